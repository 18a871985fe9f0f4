"""When a round closes, on the real clock over real processes: who is late is made certain by
planned faults and signals.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fednet import config as configuration
from fednet.experiment import selection
from tests.federation import Federation

LONG_S = 600.0  # a reply kept back for so long never comes


def run(
    out: Path, late: int, kind: str = "delay", rounds: tuple[int, ...] = (2,), **changes: Any
) -> Federation:
    """A run in which client `late` has a process of its own and the fault in these rounds. Not
    waited for.
    """
    faults = {
        "schedule": [
            {"round": r, "client": late, "kind": kind, "seconds": LONG_S, "factor": 1e6}
            for r in rounds
        ]
    }
    fed = Federation(out, algorithm="scaffold", faults=faults, **changes)
    others = [c for c in range(4) if c != late]
    for ids in (f"{late}", ",".join(map(str, others))):
        fed.client(ids)
    fed.server()
    return fed


def completed(fed: Federation) -> list[list[int]]:
    return [r["completed"] for r in fed.rounds()]


def test_a_deadline_closes_the_round_without_the_late_one_which_takes_part_in_the_next(
    tmp_path: Path,
) -> None:
    with run(tmp_path / "late", 1, round={"deadline": 2.5}) as fed:
        fed.finish()
        assert completed(fed) == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
        assert fed.rounds()[1]["dropped"] == {"1": "deadline"}
        fed.check()
    with run(tmp_path / "lost", 1, "drop_before_training", round={"lost": {"closed": 0.6}}) as lost:
        lost.finish()
        assert completed(lost) == completed(fed)
        assert lost.hashes() == fed.hashes()  # late or never trained: no trace of it is left


@pytest.mark.slow
def test_a_client_slower_by_a_factor_misses_the_deadline_too(tmp_path: Path) -> None:
    with run(tmp_path, 2, "slow", round={"deadline": 2.5}) as fed:
        fed.finish()
        assert completed(fed) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
        assert fed.rounds()[1]["dropped"] == {"2": "deadline"}


def test_the_first_k_of_m_asked_close_the_round(tmp_path: Path) -> None:
    """Two wanted, three asked: the late one of the three is not among the first two."""
    shape: dict[str, Any] = {"participation": 0.5, "round": {"select_extra": 1, "first": 2}}
    probe = Federation(tmp_path / "probe", algorithm="scaffold", **shape)
    asked = [selection.cohort(configuration.from_mapping(probe.mapping), r) for r in (1, 2, 3)]
    assert all(len(a) == 3 for a in asked)
    late = asked[1][0]
    with run(tmp_path / "first", late, **shape) as fed:
        fed.finish()
        assert [r["selected"] for r in fed.rounds()] == asked
        assert [len(c) for c in completed(fed)] == [2, 2, 2]
        assert completed(fed)[1] == asked[1][1:]
        assert fed.rounds()[1]["dropped"] == {str(late): "not among the first 2"}
        fed.check()


def test_a_silent_process_is_counted_out_and_takes_part_again_when_it_speaks(
    tmp_path: Path,
) -> None:
    with Federation(
        tmp_path,
        algorithm="scaffold",
        rounds=1_000_000,
        round={"lost": {"closed": 1.0, "silent": 1.5}},
    ) as fed:
        fed.client("0,2,3")
        one = fed.client("1")
        fed.server()
        fed.until(lambda: completed(fed)[-1:] == [[0, 1, 2, 3]])
        os.kill(one.pid, signal.SIGSTOP)  # its connection stands, and nothing is said over it
        fed.until(lambda: completed(fed)[-1:] == [[0, 2, 3]])
        os.kill(one.pid, signal.SIGCONT)
        fed.until(lambda: completed(fed)[-1:] == [[0, 1, 2, 3]])
        os.kill(fed.last.pid, signal.SIGTERM)
        assert fed.status() == 4
        assert [1] in [e["clients"] for e in fed.events("away") if e["why"] == "silent"]
        assert {str(r["dropped"].get("1")) for r in fed.rounds() if len(r["completed"]) < 4} <= {
            "lost: silent",
            "lost: connection closed",
            "absent: silent",
        }


def test_a_void_round_changes_nothing_and_too_many_in_a_row_end_the_run_with_all_saved(
    tmp_path: Path,
) -> None:
    limits = {"min_results": 4, "void_rounds": 2, "lost": {"closed": 0.6}}
    lost = {
        "schedule": [{"round": r, "client": 1, "kind": "drop_before_sending"} for r in (2, 4, 5)]
    }
    with Federation(tmp_path, algorithm="scaffold", rounds=6, round=limits, faults=lost) as fed:
        one = fed.client("0-3")
        fed.server()
        assert fed.status() == 3
        assert "2 rounds in a row had fewer than 4 results" in fed.output()
        assert [r["void"] for r in fed.rounds()] == [False, True, False, True, True]
        hashes = [h[1:] for h in fed.hashes()]
        assert hashes[1] == hashes[0] != hashes[2] == hashes[3] == hashes[4]
        assert fed.status(one) == 0  # a run that gives up sends its clients home
        fed.client("0-3")
        fed.server(resume=True)  # what was in the way is gone: it goes on from the last good state
        fed.finish()
        assert [r["void"] for r in fed.rounds()][5:] == [False]
        assert fed.hashes()[5][1] != hashes[4][0]
        fed.check()
