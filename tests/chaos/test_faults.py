"""Planned faults strike for real, are written down, and change who completes a round, never what
comes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import rooms
from tests.federation import Federation
from tests.rooms import lines

QUICK = {"lost": {"closed": 0.6}}
WIDE = {"name": "mlp", "hidden": [4000]}  # 300 010 weights, twice: an upload of three parts
LOST = ("drop_before_training", "drop_before_sending", "drop_during_upload")
MASKED = {"protocol": "secagg", "clip": 4.0, "colluding": 0.25}


def planned(kind: str, client: int = 1, round: int = 2, **more: Any) -> dict[str, Any]:
    return {"schedule": [{"round": round, "client": client, "kind": kind, **more}]}


def run(out: Path, workers: tuple[str, ...] = ("0-1", "2-3"), **changes: Any) -> Federation:
    with Federation(out, **changes) as fed:
        for ids in workers:
            fed.client(ids)
        fed.server()
        fed.finish()
    return fed


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return run(tmp_path_factory.mktemp("calm"), algorithm="scaffold", model=WIDE)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Client 1 is missing from round 2."""
    return run(
        tmp_path_factory.mktemp("short"),
        algorithm="scaffold",
        model=WIDE,
        round=QUICK,
        faults=planned("drop_before_training"),
    )


@pytest.mark.parametrize("kind", LOST)
def test_a_client_that_falls_silent_is_missing_from_its_round_and_leaves_no_trace(
    tmp_path: Path, calm: Federation, short: Federation, kind: str
) -> None:
    fed = (
        short
        if kind == "drop_before_training"
        else run(
            tmp_path / "fault", algorithm="scaffold", model=WIDE, round=QUICK, faults=planned(kind)
        )
    )
    assert fed.faults() == [(2, 1, kind)]
    assert [r["completed"] for r in fed.rounds()] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert fed.rounds()[1]["dropped"] == {"1": f"lost: {kind}"}
    assert fed.hashes()[0] == calm.hashes()[0]
    assert fed.hashes()[1] != calm.hashes()[1]
    assert fed.hashes() == short.hashes()  # who completed decides, not how the others were lost
    fed.check()
    whole, cut = sum(uploads(fed.path, 0)[0]["kinds"].values()), uploads(fed.path, 1)
    if kind == "drop_during_upload":  # half of it was spent: a part of 1 MiB, and some of the next
        assert whole // 2 % (1 << 20) > 0
        assert [(r["useful"], sum(r["kinds"].values())) for r in cut] == [(False, whole // 2)]
    else:
        assert cut == []


def uploads(path: Path, client: int, round: int = 2) -> list[dict[str, Any]]:
    """The rows of a client's replies in a round."""
    return [
        r
        for r in lines(path / "wire.jsonl")
        if r["type"] == "reply" and r["round"] == round and r["client"] == client
    ]


@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_an_upload_of_one_message_is_cut_at_the_byte_wherever_it_is_computed(
    tmp_path: Path, share: float
) -> None:
    """Books, kernel and bits agree, in one process and in several."""
    changes = {"round": QUICK, "faults": planned("drop_during_upload", share=share)}
    changes |= {"rounds": 3, "algorithm": {"name": "scaffold"}}
    one = rooms.run(tmp_path / "one", **changes)
    many = rooms.processes(tmp_path / "many", **changes)
    assert rooms.hashes(one) == rooms.hashes(many)
    for path in (one, many):
        (cut,), (whole, *_) = uploads(path, 1), uploads(path, 0)
        size = sum(whole["kinds"].values())
        assert size < 1 << 20
        assert sum(cut["kinds"].values()) == {0.0: 0, 0.9: int(0.9 * size), 1.0: size - 1}[share]
        assert not cut["useful"]
        assert cut["bytes"] == sum(cut["kinds"].values()) + cut["envelope"]
        record = lines(path / "rounds.jsonl")[1]
        assert record["dropped"] == {"1": "lost: drop_during_upload"}
        assert record["predicted"] == record["useful"]
    assert uploads(one, 1)[0]["kinds"] == uploads(many, 1)[0]["kinds"]
    said = [e for e in lines(many / "events.jsonl") if e["type"] == "kernel"][-1]
    assert (said["sent"], said["received"]) == (said["booked_down"], said["booked_up"])
    mine = [r for p in many.glob("state/*/wire*.jsonl") for r in lines(p)]
    sent = [r for r in mine if r["client"] == 1 and r["round"] == 2 and r["type"] == "reply"]
    assert [(r["kinds"], r["useful"]) for r in sent] == [(uploads(many, 1)[0]["kinds"], False)]


def test_a_crashed_client_stays_away_for_its_rounds_while_its_neighbours_go_on(
    tmp_path: Path,
) -> None:
    with Federation(
        tmp_path,
        algorithm="scaffold",
        round=QUICK,
        rounds=4,
        faults=planned("crash", rounds=2, round=1),
    ) as fed:
        # Which hosts them all: the others' tasks are given on to the worker that is started anew.
        fed.supervisor(workers=1)
        assert fed.status() == 0
        assert [r["completed"] for r in fed.rounds()] == [
            [0, 2, 3],
            [0, 2, 3],
            [0, 2, 3],
            [0, 1, 2, 3],
        ]
        assert [r["dropped"] for r in fed.rounds()] == [
            {"1": "lost: crash"},
            {"1": "away: crash"},
            {"1": "away: crash"},
            {},
        ]
        assert len({e["pid"] for e in fed.events("joined")}) == 2
        fed.check(killed=1)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("delay", {"seconds": 0.5}),
        ("slow", {"factor": 3}),
        ("duplicate", {}),
        ("corrupt", {}),
        ("disconnect", {}),
    ],
)
def test_what_loses_no_reply_changes_no_bit(
    tmp_path: Path, calm: Federation, kind: str, more: dict[str, Any]
) -> None:
    fed = run(tmp_path / "fault", algorithm="scaffold", model=WIDE, faults=planned(kind, **more))
    assert fed.faults() == [(2, 1, kind)]
    assert fed.hashes() == calm.hashes()
    fed.check()
    rows = [
        r
        for r in fed.lines("wire.jsonl")
        if r["client"] == 1 and r["round"] == 2 and r["type"] == "reply"
    ]
    assert sum(r["useful"] for r in rows) == 1
    if kind == "corrupt":
        assert [r["useful"] for r in rows] == [False, True]
        assert any(e["round"] == 2 and e["client"] == 1 for e in fed.events("refused"))
    if kind == "duplicate":
        assert len(rows) == 2
    if kind == "delay":
        assert fed.rounds()[1]["seconds"] >= 0.5
    if kind == "disconnect":
        assert fed.events("rejoined")


def test_random_faults_are_the_same_however_the_clients_are_placed(tmp_path: Path) -> None:
    faults = {
        "seed": 3,
        "random": {"drop_before_sending": 0.2, "corrupt": 0.2, "disconnect": 0.2, "duplicate": 0.2},
    }
    runs = [
        run(tmp_path / str(len(workers)), workers, algorithm="scaffold", round=QUICK, faults=faults)
        for workers in (("0-3",), ("0", "1", "2-3"))
    ]
    assert len(runs[0].faults()) >= 4
    assert sorted(runs[0].faults()) == sorted(runs[1].faults())
    assert runs[0].hashes() == runs[1].hashes()


def test_a_fault_that_struck_before_the_server_died_does_not_strike_again_and_stays_struck(
    tmp_path: Path,
) -> None:
    faults = planned("drop_before_sending")
    once = run(tmp_path / "once", algorithm="scaffold", round=QUICK, faults=faults)
    died = {
        "schedule": [*faults["schedule"], {"round": 2, "kind": "server_crash", "at": "evaluating"}]
    }
    fed = run(tmp_path / "died", algorithm="scaffold", round=QUICK, faults=died)
    assert sorted(fed.faults()) == [
        (2, -1, "server_crash evaluating"),
        (2, 1, "drop_before_sending"),
    ]
    assert fed.hashes() == once.hashes()
    assert fed.rounds()[1]["dropped"] == {"1": "lost: drop_before_sending"}


@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedga", marks=pytest.mark.slow)])
def test_a_recorded_run_is_replayed_bit_for_bit(tmp_path: Path, method: str) -> None:
    faults = {"seed": 1, "random": {"drop_before_training": 0.3}}
    first = run(tmp_path / "recorded", algorithm=method, round=QUICK, faults=faults)
    assert any(len(r["completed"]) < 4 for r in first.rounds())
    again = run(
        tmp_path / "replayed", ("0-3",), algorithm=method, faults={"replay": str(first.path)}
    )
    assert again.hashes() == first.hashes()
    assert [r["completed"] for r in again.rounds()] == [r["completed"] for r in first.rounds()]
    assert [r["dropped"] for r in again.rounds()] == [r["dropped"] for r in first.rounds()]
    assert again.faults() == []


def test_a_record_that_is_too_short_or_of_other_clients_or_rounds_is_refused(
    tmp_path: Path,
) -> None:
    first = run(tmp_path / "recorded", algorithm="fedavg", rounds=1)
    for name, changes, words in (
        ("longer", {"rounds": 2}, "has 1 rounds, this run asks for 2"),
        ("others", {"rounds": 1, "participation": 0.5}, "asked clients [0, 1, 2, 3]"),
        (
            "secagg",
            {"rounds": 1, "privacy": {"secagg": MASKED}},
            "its clients: 1; here it has 5",
        ),
    ):
        with Federation(tmp_path / name, faults={"replay": str(first.path)}, **changes) as fed:
            fed.server()
            assert fed.status() == 2, fed.output()
            assert words in fed.output()
