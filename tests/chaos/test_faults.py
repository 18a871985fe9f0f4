"""Planned faults strike for real, are recorded, and change who completes a round, never what
comes of it.
"""

from __future__ import annotations

import re

import pytest

from fednet.errors import ConfigError
from fednet.wire import messages as m
from tests import rooms
from tests.processes import Federation, finished, in_process, lines, planned, undisturbed

QUICK = {"lost": {"closed": 0.6}}
# 1 200 010 weights, twice: an upload of three parts.
WIDE = {"algorithm": "scaffold", "model": {"name": "mlp", "hidden": [16000]}}
MASKED = {"protocol": "secagg", "clip": 4.0}


@pytest.fixture(scope="module")
def without_1():
    """The hashes of a run in which client 1 is missing from round 2."""
    return undisturbed(**WIDE, round=QUICK, faults=planned("drop_before_training"))


@pytest.mark.parametrize(
    "kind", ["drop_before_training", "drop_before_sending", "drop_during_upload"]
)
def test_a_client_that_falls_silent_is_missing_from_its_round_and_leaves_no_trace(
    tmp_path, without_1, kind
):
    fed = finished(tmp_path, **WIDE, round=QUICK, faults=planned(kind))
    assert fed.faults() == [(2, 1, kind)]
    assert fed.completed() == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert fed.rounds()[1]["dropped"] == {"1": f"lost: {kind}"}
    assert fed.hashes() == without_1  # who completed decides, not how the others were lost
    calm = undisturbed(**WIDE)
    assert fed.hashes()[0] == calm[0]
    assert fed.hashes()[1] != calm[1]
    fed.check()
    cut = [(r["useful"], sum(r["kinds"].values())) for r in fed.replies(1)]
    if kind == "drop_during_upload":  # half of it was spent: a part, and some of the next
        whole = sum(fed.replies(0)[0]["kinds"].values())
        assert m.PART < whole // 2 < 2 * m.PART
        assert cut == [(False, whole // 2)]
    else:
        assert cut == []


@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_an_upload_of_one_message_is_cut_at_the_byte_in_any_placement(tmp_path, share):
    """Records, kernel and bits agree, in one process and in several."""
    changes = {
        "round": QUICK,
        "faults": planned("drop_during_upload", share=share),
        "rounds": 3,
        "algorithm": {"name": "scaffold"},
    }
    one = rooms.run(tmp_path / "one", **changes)
    many = rooms.processes(tmp_path / "many", **changes)
    assert rooms.hashes(one) == rooms.hashes(many)
    kinds = []
    for path in (one, many):
        rows = [r for r in lines(path / "wire.jsonl") if r["type"] == "reply" and r["round"] == 2]
        (cut,) = [r for r in rows if r["client"] == 1]
        size = sum(next(r for r in rows if r["client"] == 0)["kinds"].values())
        assert size < m.BESIDE
        assert sum(cut["kinds"].values()) == {0.0: 0, 0.9: int(0.9 * size), 1.0: size - 1}[share]
        assert not cut["useful"]
        assert cut["bytes"] == sum(cut["kinds"].values()) + cut["envelope"]
        kinds.append(cut["kinds"])
        record = lines(path / "rounds.jsonl")[1]
        assert record["dropped"] == {"1": "lost: drop_during_upload"}
        assert record["predicted"] == record["useful"]
    assert kinds[0] == kinds[1]
    said = [e for e in lines(many / "events.jsonl") if e["type"] == "kernel"][-1]
    assert (said["sent"], said["received"]) == (said["booked_down"], said["booked_up"])
    own = [r for p in many.glob("state/*/wire*.jsonl") for r in lines(p)]
    sent = [r for r in own if (r["type"], r["round"], r["client"]) == ("reply", 2, 1)]
    assert [(r["kinds"], r["useful"]) for r in sent] == [(kinds[0], False)]


def test_a_crashed_client_stays_away_for_its_rounds_while_its_neighbours_continue(tmp_path):
    faults = planned("crash", rounds=2, round=1)
    with Federation(tmp_path, algorithm="scaffold", round=QUICK, rounds=4, faults=faults) as fed:
        # One worker hosts all: the others' tasks are given to the worker that is started again.
        fed.supervisor(workers=1)
        assert fed.status() == 0
        assert fed.completed() == [[0, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
        away = {"1": "away: crash"}
        assert [r["dropped"] for r in fed.rounds()] == [{"1": "lost: crash"}, away, away, {}]
        assert len({e["pid"] for e in fed.events("joined")}) == 2
        fed.check(killed=1)


@pytest.mark.parametrize(
    ("kind", "more", "useful"),
    [
        ("delay", {"seconds": 0.5}, [True]),
        ("slow", {"factor": 3}, [True]),
        ("duplicate", {}, None),
        ("corrupt", {}, [False, True]),
        ("disconnect", {}, None),
    ],
)
def test_what_loses_no_reply_changes_no_bit(tmp_path, kind, more, useful):
    fed = finished(tmp_path, **WIDE, faults=planned(kind, **more))
    assert fed.faults() == [(2, 1, kind)]
    assert fed.hashes() == undisturbed(**WIDE)
    fed.check()
    found = [r["useful"] for r in fed.replies(1)]
    assert sum(found) == 1
    assert found == (useful or found)
    if kind == "corrupt":
        assert any(e["round"] == 2 and e["client"] == 1 for e in fed.events("refused"))
    if kind == "duplicate":
        assert len(found) == 2
    if kind == "delay":
        assert fed.rounds()[1]["seconds"] >= 0.5
    if kind == "disconnect":
        assert fed.events("rejoined")


def test_a_fault_that_struck_before_the_server_died_does_not_strike_again(tmp_path):
    faults = planned("drop_before_sending")
    changes = {"algorithm": "scaffold", "round": QUICK}
    died = [*faults["schedule"], {"round": 2, "kind": "server_crash", "at": "evaluating"}]
    fed = finished(tmp_path, **changes, faults={"schedule": died})
    assert sorted(fed.faults()) == [
        (2, -1, "server_crash evaluating"),
        (2, 1, "drop_before_sending"),
    ]
    assert fed.hashes() == undisturbed(**changes, faults=faults)
    assert fed.rounds()[1]["dropped"] == {"1": "lost: drop_before_sending"}


@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedga", marks=pytest.mark.slow)])
def test_random_faults_are_the_same_in_any_placement_and_are_replayed_bit_for_bit(tmp_path, method):
    kinds = ("drop_before_training", "drop_before_sending", "corrupt", "disconnect", "duplicate")
    faults = {"random": dict.fromkeys(kinds, 0.25)}
    changes = {"algorithm": method, "round": QUICK, "faults": faults}
    one = finished(tmp_path / "one", "0-3", **changes)
    three = finished(tmp_path / "three", "0", "1", "2-3", **changes)
    assert {kind for _, _, kind in one.faults()} == set(kinds)
    assert sorted(one.faults()) == sorted(three.faults())
    assert one.hashes() == three.hashes()
    assert any(len(completed) < 4 for completed in one.completed())
    again = in_process(tmp_path / "again", algorithm=method, faults={"replay": str(one.path)})
    assert again.hashes() == one.hashes()
    assert [r["dropped"] for r in again.rounds()] == [r["dropped"] for r in one.rounds()]
    assert again.faults() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 2}, "has 1 rounds, this run asks for 2"),
        ({"participation": 0.5}, "asked clients [0, 1, 2, 3]"),
        ({"privacy": {"secagg": MASKED}}, "its clients: 1; here it has 5"),
    ],
    ids=["longer", "others", "secagg"],
)
def test_a_record_that_is_too_short_or_of_other_clients_or_rounds_is_refused(
    tmp_path, changes, words
):
    first = in_process(tmp_path / "first", rounds=1)
    replay = {"rounds": 1, "faults": {"replay": str(first.path)}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        in_process(tmp_path / "again", **{**replay, **changes})
