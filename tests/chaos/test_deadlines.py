"""When a round closes, on the real clock over real processes. Planned faults and signals make
certain who is late.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from fednet import config as configuration
from fednet.experiment import selection
from tests.processes import Federation, finished, in_process, planned, settings, undisturbed

NEVER = 600.0  # a reply that is kept back for so long does not come


def without(out: Path, late: int, **changes: Any) -> Federation:
    """Run with client `late` in a process of its own, and the fault in round 2."""
    others = ",".join(str(c) for c in range(4) if c != late)
    faults = planned("delay", client=late, seconds=NEVER)
    return finished(out, str(late), others, algorithm="scaffold", faults=faults, **changes)


def test_a_deadline_closes_the_round_without_the_late_client_which_takes_part_in_the_next(tmp_path):
    late = without(tmp_path, 1, round={"deadline": 2.0})
    assert late.completed() == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert late.rounds()[1]["dropped"] == {"1": "deadline"}
    late.check()
    lost = {"round": {"lost": {"closed": 0.6}}, "faults": planned("drop_before_training")}
    # Late or never trained: no trace of it is left.
    assert late.hashes() == undisturbed(algorithm="scaffold", **lost)


def test_the_first_k_of_m_asked_close_the_round(tmp_path):
    """Two wanted, three asked: the late one of the three is not among the first two."""
    shape: dict[str, Any] = {"participation": 0.5, "round": {"ask": 1.5}}
    config = configuration.from_mapping(settings(**shape))
    asked = [selection.cohort(config, r) for r in (1, 2, 3)]
    assert [len(a) for a in asked] == [3, 3, 3]
    late = asked[1][0]
    fed = without(tmp_path, late, **shape)
    assert [r["selected"] for r in fed.rounds()] == asked
    assert [len(c) for c in fed.completed()] == [2, 2, 2]
    assert fed.completed()[1] == asked[1][1:]
    assert fed.rounds()[1]["dropped"] == {str(late): "not among the first 2"}
    fed.check()


def test_all_clients_are_evaluated_though_the_first_k_close_the_round(tmp_path):
    shape: dict[str, Any] = {"participation": 0.5, "round": {"ask": 1.5}}
    fed = in_process(tmp_path, rounds=1, evaluate={"clients": "all"}, **shape)
    (completed,) = fed.completed()
    assert len(completed) == 2
    rows = fed.lines("clients.jsonl")
    assert [row["client"] for row in rows if not row.get("final")] == [0, 1, 2, 3]


def test_a_silent_process_is_left_out_and_takes_part_again_when_it_speaks(tmp_path):
    patience = {"lost": {"closed": 1.0, "silent": 1.5}}
    with Federation(tmp_path, algorithm="scaffold", rounds=1_000_000, round=patience) as fed:
        one = fed.client("1")
        fed.begin("0,2,3")
        fed.until(lambda: fed.completed()[-1:] == [[0, 1, 2, 3]])
        os.kill(one.pid, signal.SIGSTOP)  # its connection stays open
        fed.until(lambda: fed.completed()[-1:] == [[0, 2, 3]])
        os.kill(one.pid, signal.SIGCONT)
        fed.until(lambda: fed.completed()[-1:] == [[0, 1, 2, 3]])
        fed.stop()
        assert [1] in [e["clients"] for e in fed.events("away") if e["why"] == "silent"]
        assert {str(r["dropped"].get("1")) for r in fed.rounds() if len(r["completed"]) < 4} <= {
            "lost: silent",
            "lost: connection closed",
            "absent: silent",
        }


def test_a_void_round_changes_nothing_and_too_many_in_a_row_end_the_run_with_all_saved(tmp_path):
    limits = {"min_results": 4, "void_rounds": 2, "lost": {"closed": 0.6}}
    lost = [{"round": r, "client": 1, "kind": "drop_before_sending"} for r in (2, 4, 5)]
    changes = {"algorithm": "scaffold", "rounds": 6, "round": limits}
    with Federation(tmp_path, **changes, faults={"schedule": lost}) as fed:
        fed.begin("0-3")
        assert fed.status() == 3
        assert "2 rounds in a row had fewer than 4 results" in fed.output()
        assert [r["void"] for r in fed.rounds()] == [False, True, False, True, True]
        hashes = [h[1:] for h in fed.hashes()]
        assert hashes[1] == hashes[0] != hashes[2] == hashes[3] == hashes[4]
        assert fed.status(fed.all[0]) == 0  # a run that gives up ends its clients
        fed.begin("0-3", resume=True)  # no fault is left: it continues from the last good state
        assert fed.status() == 0
        assert [r["void"] for r in fed.rounds()][5:] == [False]
        assert fed.hashes()[5][1] != hashes[4][0]
        fed.check()
