"""Two processes that are started on one run, or on one client's states: the second is turned away,
and the first does not notice.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import msgspec

from fednet.experiment import lock
from tests.federation import Federation


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def intruders(fed: Federation, pid: int) -> None:
    """Each way to work on the run's directory a second time, while process `pid` does."""
    who = f"is in use by process {pid} on {socket.gethostname()}"
    for start in (
        lambda: fed.server(resume=True),
        lambda: fed.supervisor(resume=True),
        lambda: fed.server(resume=True, rounds=9),
    ):
        said = fed.output().count(who)
        assert fed.status(start()) == 2
        assert fed.output().count(who) == said + 1


def test_a_second_server_on_a_running_directory_is_turned_away_and_the_bits_are_the_same(
    tmp_path: Path,
) -> None:
    patient = {"lost": {"closed": 100.0, "silent": 100.0}, "join": 100.0}
    with Federation(tmp_path / "calm", algorithm="scaffold", rounds=4) as calm:
        calm.client("0-3")
        calm.server()
        calm.finish()
    with Federation(tmp_path / "run", algorithm="scaffold", rounds=4, round=patient) as fed:
        first = fed.server()
        fed.until(lambda: fed.events("started"))
        intruders(fed, first.pid)  # before the first round
        fed.client("0-1")
        one = fed.client("2-3")
        fed.until(fed.rounds)
        one.kill()  # the round waits for it
        one.wait()
        half = next(fed.path.glob("state/*")) / "client-2" / ".2-0-0.safetensors.here.1"
        half.write_bytes(b"half")  # as if it had been at it; the next one removes it
        intruders(fed, first.pid)
        fed.client("2-3")
        assert fed.status(first) == 0
        assert fed.hashes() == calm.hashes()
        assert {e["incarnation"] for e in fed.events("started")} == {1}
        fed.check()
        assert not (fed.path / "lock").exists()


def test_a_run_whose_data_are_being_built_keeps_its_directory(tmp_path: Path) -> None:
    with Federation(tmp_path) as fed:
        (tmp_path / "run").mkdir()
        with lock.holding(tmp_path / "run"):  # as a server does that has not come to its socket
            (tmp_path / "run" / "config.yaml").write_text("name: run\n")
            before = contents(tmp_path / "run")
            intruders(fed, os.getpid())
            assert contents(tmp_path / "run") == before


def test_an_address_that_cannot_be_bound_leaves_a_finished_run_as_it_was(tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, socket.create_server(("127.0.0.1", 0)) as taken:
        fed.client("0-3")
        fed.server()
        fed.finish()
        before = contents(fed.path)
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert fed.status(fed.server(resume=True, bind=bind, rounds=5)) == 2
        assert "the port is in use" in fed.output()
        assert contents(fed.path) == before


def test_a_server_whose_run_was_taken_over_elsewhere_writes_no_checkpoint_any_more(
    tmp_path: Path,
) -> None:
    with Federation(tmp_path, rounds=1_000_000) as fed:
        fed.client("0-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) > 2)
        held = fed.path / "lock"
        other = msgspec.structs.replace(lock.read(held), host="elsewhere", pid=12, token="another")
        held.write_bytes(msgspec.json.encode(other))
        assert fed.status() == 3
        assert "process 12 on elsewhere has taken it over" in fed.output()
        manifest = json.loads((fed.path / "checkpoint" / "manifest.json").read_text())
        assert manifest["progress"]["round"] <= fed.rounds()[-1]["round"]
        assert lock.read(held) == other


def test_a_second_process_with_the_same_clients_states_is_turned_away(tmp_path: Path) -> None:
    with Federation(tmp_path, algorithm="scaffold", rounds=1_000_000) as fed:
        first = fed.client("0-3")
        fed.server()
        fed.until(fed.rounds)
        for ids in ("0-3", "2"):
            assert fed.status(fed.client(ids)) == 2
        who = f"is in use by process {first.pid} on {socket.gethostname()}"
        assert fed.output().count(who) == 2
        os.kill(fed.last.pid, signal.SIGTERM)
        assert fed.status() == 4
        assert all(r["completed"] == [0, 1, 2, 3] for r in fed.rounds())
