"""A server that was restored from a backup that is older than what its clients keep."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal

import pytest

from fednet.algorithms.fedga import FedGA
from fednet.errors import StateError, Stopped
from tests.processes import Federation, crashes
from tests.rooms import lines, run

CHANGES = {
    "algorithm": {"name": "scaffold"},
    "rounds": 8,
    "clients": 4,
    "participation": 0.5,
    "evaluate": {"clients": "all", "every": 8},
}
TOPK = {**CHANGES, "algorithm": {"name": "fedavg"}, "wire": {"up": {"state": ["topk(0.5)"]}}}
VIRTUAL = {"link": {"clock": "virtual", "step_ms": 10}}
ASYNC = {
    **TOPK,
    **VIRTUAL,
    "schedule": {"mode": "async", "buffer": 1},
    "evaluate": {"clients": "none"},
    "rounds": 16,
}
CASES = {
    "scaffold": CHANGES,
    "feddyn": {**CHANGES, "algorithm": {"name": "feddyn"}},
    "apfl": {**CHANGES, "algorithm": {"name": "apfl"}},
    "powersgd": {**TOPK, "wire": {"up": {"state": ["powersgd(2)"]}}},
    "memory at both ends": {**TOPK, "wire": {"up": {"state": ["ef21", "topk(0.5)"]}}},
    "async": ASYNC,
}


@pytest.mark.parametrize("case", CASES)
def test_a_restored_server_names_the_clients_whose_states_are_gone_or_starts_them_again(
    tmp_path, case
):
    """The run is stopped near its end, and its server's files are put back to those of round 2."""
    changes = CASES[case]
    directory = tmp_path / "r"

    def copy(record) -> None:
        if record.round == 2:
            ignored = shutil.ignore_patterns("state", "lock")
            shutil.copytree(directory, tmp_path / "copy", ignore=ignored)
        if record.round == changes["rounds"] - 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run(tmp_path, callback=copy, **changes)
    for path in directory.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != "state":
            shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", directory, dirs_exist_ok=True)

    why = r"have lost it: clients [0-3].*state_lost=restart"
    with pytest.raises(StateError, match=why):
        run(tmp_path, resume=True, **changes)

    run(tmp_path, resume=True, **changes, round={"state_lost": "restart"})
    rounds = lines(directory / "rounds.jsonl")
    assert [r["round"] for r in rounds] == list(range(1, changes["rounds"] + 1))
    assert not any(r["void"] for r in rounds)
    again = {c for r in rounds for c in r.get("restarted", ())}
    events = [e["client"] for e in lines(directory / "events.jsonl") if e["type"] == "restarted"]
    assert again == set(events) != set()
    assert len(events) == len(again)  # each once: then it has a state again
    assert not any(r["dropped"] for r in rounds) or changes is ASYNC


@pytest.mark.parametrize(("method", "lost_at"), [("fedper", "evaluation"), ("fedga", "exchange")])
def test_a_state_lost_before_an_evaluation_is_begun_again_and_one_within_a_round_is_not(
    tmp_path, monkeypatch, method, lost_at
):
    """The second exchange of a round needs what the client kept of the first."""

    def lose() -> None:
        shutil.rmtree(next((tmp_path / "r" / "state").glob("*/client-0")))

    def ask(self, server, phase, client_id):
        if phase == 1 and client_id == 0:
            lose()
        return broadcast(self, server, phase, client_id)

    broadcast = FedGA.broadcast
    monkeypatch.setattr(FedGA, "broadcast", ask)
    expected = contextlib.nullcontext()
    if lost_at == "exchange":
        expected = pytest.raises(StateError, match="have lost it: clients 0")
    with expected:
        run(
            tmp_path,
            callback=lambda record: lose() if record.round == 2 else None,
            algorithm={"name": method},
            evaluate={"clients": "all"},
            round={"state_lost": "restart"},
        )
    events = lines(tmp_path / "r" / "events.jsonl")
    again = [(e["round"], e["client"]) for e in events if e["type"] == "restarted"]
    finals = [r for r in lines(tmp_path / "r" / "clients.jsonl") if r.get("final")]
    evaluated = lost_at == "evaluation"
    assert again == ([(2, 0)] if evaluated else [])
    assert [r["client"] for r in finals] == ([0, 1, 2] if evaluated else [])


def test_one_client_begins_again_and_another_is_dropped_before_the_same_update(tmp_path):
    """The second was dropped for a reason of its own: no state is missing because of it."""

    def lose(record) -> None:
        if record.round == 2:
            shutil.rmtree(next((tmp_path / "r" / "state").glob("*/client-0")))

    struck = {"round": 3, "client": 1, "kind": "drop_before_sending"}
    run(
        tmp_path,
        callback=lose,
        **{
            **ASYNC,
            "rounds": 4,
            "participation": 1.0,
            "schedule": {"mode": "semi-sync", "every": 1.0},
        },
        stop={"megabytes": 1000},  # so no round opens before the one before it is recorded
        faults={"schedule": [struck]},
        round={"state_lost": "restart", "lost": {"closed": 0.5}},
    )
    third, fourth = lines(tmp_path / "r" / "rounds.jsonl")[2:]
    assert third["restarted"] == [0]
    assert third["dropped"]["1"] == "lost: drop_before_sending"
    assert third["completed"] == [2, 3]
    assert sorted(fourth["completed"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("state_lost", ["stop", "restart"])
def test_one_client_that_lost_its_state_stops_an_asynchronous_run_or_begins_again(
    tmp_path, state_lost
):
    """In simulated time it is not waited for: others might make all further updates meanwhile."""

    def lose(record) -> None:
        if record.round == 4:
            shutil.rmtree(next((tmp_path / "r" / "state").glob("*/client-0")))

    changes = {**ASYNC, "participation": 1.0, "round": {"state_lost": state_lost}}
    ends = contextlib.nullcontext()
    if state_lost == "stop":
        ends = pytest.raises(StateError, match="have lost it: clients 0")
    with ends:
        run(tmp_path, callback=lose, **changes)
    if state_lost == "restart":
        rounds = lines(tmp_path / "r" / "rounds.jsonl")
        (again,) = [r["round"] for r in rounds if r.get("restarted")]
        assert [r["restarted"] for r in rounds if r.get("restarted")] == [[0]]
        assert any(0 in r["completed"] for r in rounds if r["round"] > again)


@pytest.mark.parametrize("what", ["another client's", "damaged"])
def test_a_client_whose_state_file_is_not_its_own_has_lost_its_state_and_no_other_client_has(
    tmp_path, what
):
    """It begins again; the clients of the same process go on."""

    def spoil(record) -> None:
        if record.round == 2:
            folder = next((tmp_path / "r" / "state").glob("*/client-0"))
            for file in folder.glob("*.safetensors"):
                if what == "damaged":
                    file.write_bytes(file.read_bytes()[:-1])
                else:
                    shutil.copy(folder.with_name("client-1") / file.name, file)

    changes = {**CHANGES, "participation": 1.0, "rounds": 4}
    run(tmp_path, callback=spoil, **changes, round={"state_lost": "restart"})
    rounds = lines(tmp_path / "r" / "rounds.jsonl")
    assert [r.get("restarted") for r in rounds] == [None, None, [0], None]
    assert [r["completed"] for r in rounds] == [[0, 1, 2, 3]] * 4


def test_a_state_file_that_is_not_the_clients_own_is_named_where_the_run_stops(tmp_path):
    def spoil(record) -> None:
        if record.round == 2:
            folder = next((tmp_path / "r" / "state").glob("*/client-0"))
            for file in folder.glob("*.safetensors"):
                shutil.copy(folder.with_name("client-1") / file.name, file)

    said = r"clients 0\. .*client-0/2-0-0\.safetensors: client 0's state of another run"
    with pytest.raises(StateError, match=said):
        run(tmp_path, callback=spoil, **{**CHANGES, "participation": 1.0, "rounds": 4})


@pytest.fixture
def fed(tmp_path):
    """Two sites, whose server died after round 2 of 4."""
    faults = crashes((2, "between"))
    with Federation(tmp_path, rounds=4, algorithm="scaffold", faults=faults) as made:
        made.client("0", state=tmp_path / "one")
        made.client("1-3", state=tmp_path / "others")
        made.server()
        assert made.status() == -signal.SIGKILL
        yield made


def test_one_site_whose_states_are_deleted_ends_no_run_and_is_named_even_when_quiet(tmp_path, fed):
    shutil.rmtree(next((tmp_path / "one").glob("*/client-0")))
    fed.server(resume=True)
    fed.finish()
    dropped = [r["dropped"] for r in fed.rounds()]
    # The task of round 3 may have reached the client before the server died.
    assert (dropped[0], dropped[1], list(dropped[3])) == ({}, {}, ["0"])
    assert re.search(r"its state of round [23] is not in", dropped[3]["0"])
    said = fed.output()
    assert re.search(r"fednet-client: round [34]: client 0: its state of round [23] is", said)


def test_a_server_whose_sites_have_mostly_lost_their_states_ends_and_names_them(tmp_path, fed):
    fed.lose(fed.all[1])
    for folder in (tmp_path / "others").glob("*/client-*"):
        shutil.rmtree(folder)
    fed.client("1-3", state=tmp_path / "others")
    fed.server(resume=True)
    assert fed.status() == 2
    assert re.search(r"clients 1-3\. client 1: its state of round [23] is not", fed.output())
    fed.server(resume=True, round={**fed.mapping["round"], "state_lost": "restart"})
    fed.finish()
    assert [r["restarted"] for r in fed.rounds() if r.get("restarted")] == [[1, 2, 3]]
