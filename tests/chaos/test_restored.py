"""A server that was restored from a backup, older than what its clients keep."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from fednet.errors import StateError, Stopped
from tests.federation import Federation
from tests.rooms import lines, run

CHANGES = {
    "algorithm": {"name": "scaffold"},
    "rounds": 8,
    "clients": 4,
    "participation": 0.5,
    "evaluate": {"clients": "all", "every": 8},
}
TOPK = {**CHANGES, "algorithm": {"name": "fedavg"}, "wire": {"up": {"state": ["topk(0.5)"]}}}
VIRTUAL = {**CHANGES, "link": {"clock": "virtual", "step_ms": 10}}
ASYNC = {
    **VIRTUAL,
    "algorithm": TOPK["algorithm"],
    "wire": TOPK["wire"],
    "schedule": {"mode": "async", "buffer": 1},
    "evaluate": {"clients": "none"},
    "rounds": 16,
}
# Both ends remember what crossed.
EF21 = {**TOPK, "wire": {"up": {"state": ["ef21", "topk(0.5)"]}}}


def restored(out: Path, changes: dict) -> Path:
    """A run that was stopped near its end, its server's files put back to those of round 2."""

    def copy(record) -> None:
        if record.round == 2:
            ignored = shutil.ignore_patterns("state", "lock")
            shutil.copytree(out / "r", out / "copy", ignore=ignored)
        if record.round == changes["rounds"] - 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run(out, callback=copy, **changes)
    for path in (out / "r").iterdir():
        if path.name == "state":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(out / "copy", out / "r", dirs_exist_ok=True)
    return out / "r"


CASES = pytest.mark.parametrize(
    "changes",
    [CHANGES, VIRTUAL, TOPK, EF21, ASYNC],
    ids=["scaffold", "virtual clock", "residuals", "memory at both ends", "async"],
)


@CASES
def test_a_restored_server_names_the_clients_whose_states_are_gone(tmp_path, changes) -> None:
    restored(tmp_path, changes)
    why = r"no longer have it: clients [0-3].*it holds those of rounds .*state_lost=restart"
    with pytest.raises(StateError, match=why):
        run(tmp_path, resume=True, **changes)


@CASES
def test_with_restart_these_clients_begin_again_and_the_run_goes_on(tmp_path, changes) -> None:
    directory = restored(tmp_path, changes)
    run(tmp_path, resume=True, **changes, round={"state_lost": "restart"})
    rounds = lines(directory / "rounds.jsonl")
    assert [r["round"] for r in rounds] == list(range(1, changes["rounds"] + 1))
    assert not any(r["void"] for r in rounds)
    again = {c for r in rounds for c in r.get("restarted", ())}
    events = [e for e in lines(directory / "events.jsonl") if e["type"] == "restarted"]
    assert again == {e["client"] for e in events} != set()
    assert len(events) == len(again)  # each once: then it has a state again
    assert not any(r["dropped"] for r in rounds) or changes is ASYNC


def test_one_site_whose_states_are_deleted_ends_no_run_and_is_named_even_when_quiet(
    tmp_path: Path,
) -> None:
    crash = [{"round": 2, "kind": "server_crash", "at": "between"}]
    changes = {"rounds": 4, "algorithm": "scaffold", "faults": {"schedule": crash}}
    with Federation(tmp_path, **changes) as fed:
        fed.client("0", state=tmp_path / "one")
        fed.client("1-3", state=tmp_path / "others")
        assert fed.status(fed.server()) == -signal.SIGKILL
        shutil.rmtree(next((tmp_path / "one").glob("*/client-0")))
        fed.server(resume=True)
        fed.finish()
        dropped = [r["dropped"] for r in fed.rounds()]
        # The task of round 3 may have reached the client before the server died.
        assert (dropped[0], dropped[1], list(dropped[3])) == ({}, {}, ["0"])
        assert re.search(r"its state of round [23] is not in", dropped[3]["0"])
        said = fed.output()
    assert re.search(r"fednet-client: round [34]: client 0: its state of round [23] is", said)
    assert "the last tasks of client(s) 0 were not done here" in said


def test_a_server_whose_sites_have_mostly_lost_their_states_ends_and_names_them(
    tmp_path: Path,
) -> None:
    crash = [{"round": 2, "kind": "server_crash", "at": "between"}]
    changes = {"rounds": 4, "algorithm": "scaffold", "faults": {"schedule": crash}}
    with Federation(tmp_path, **changes) as fed:
        fed.client("0", state=tmp_path / "one")
        others = fed.client("1-3", state=tmp_path / "others")
        assert fed.status(fed.server()) == -signal.SIGKILL
        fed.lose(others)
        for folder in (tmp_path / "others").glob("*/client-*"):
            shutil.rmtree(folder)
        fed.client("1-3", state=tmp_path / "others")
        assert fed.status(fed.server(resume=True)) == 2
        assert re.search(r"clients 1-3\. client 1: its state of round [23] is not", fed.output())
        fed.server(resume=True, round={**fed.mapping["round"], "state_lost": "restart"})
        fed.finish()
        again = [r["restarted"] for r in fed.rounds() if r.get("restarted")]
        assert again == [[1, 2, 3]]
