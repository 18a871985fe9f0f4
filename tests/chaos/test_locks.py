"""Two processes are started on one run, or on one client's states: the second is refused, and the
first does not notice.
"""

from __future__ import annotations

import json
import socket

import msgspec

from fednet.experiment import lock
from tests.processes import Federation, undisturbed


def in_use_by(pid: int) -> str:
    return f"is in use by process {pid} on {socket.gethostname()}"


def intruders(fed: Federation, pid: int) -> None:
    """Try each way to use the run's directory a second time, while process `pid` does."""
    first = fed.last
    for start in (
        lambda: fed.server(resume=True),
        lambda: fed.supervisor(resume=True),
        lambda: fed.server(resume=True, rounds=9),
    ):
        status, said = fed.ended(start())
        assert (status, in_use_by(pid) in said) == (2, True), said
    fed.last = first


def test_a_second_server_on_a_run_is_refused_and_the_bits_are_the_same(tmp_path):
    patient = {"lost": {"closed": 100.0, "silent": 100.0}, "join": 100.0}
    with Federation(tmp_path, algorithm="scaffold", rounds=4, round=patient) as fed:
        first = fed.server()
        fed.until(lambda: fed.events("started"))
        intruders(fed, first.pid)  # before the first round
        fed.client("0-1")
        one = fed.client("2-3")
        fed.until(fed.rounds)
        fed.lose(one)  # the round waits for it
        half = next(fed.path.glob("state/*")) / "client-2" / ".2-0-0.safetensors.here.1"
        half.write_bytes(b"half")  # as if it had been writing it; the next one removes it
        intruders(fed, first.pid)
        fed.client("2-3")
        assert fed.status(first) == 0
        assert fed.hashes() == undisturbed(algorithm="scaffold", rounds=4)
        assert {e["incarnation"] for e in fed.events("started")} == {1}
        fed.check()
        assert not (fed.path / "lock").exists()


def test_a_server_whose_run_was_taken_over_elsewhere_writes_no_more_checkpoints(tmp_path):
    with Federation(tmp_path, rounds=1_000_000) as fed:
        fed.begin("0-3")
        fed.until(lambda: len(fed.rounds()) > 2)
        held = fed.path / "lock"
        other = msgspec.structs.replace(lock.read(held), host="elsewhere", pid=12, token="another")
        held.write_bytes(msgspec.json.encode(other))
        assert fed.status() == 3
        assert "names process 12 on elsewhere" in fed.output()
        manifest = json.loads((fed.path / "checkpoint" / "manifest.json").read_text())
        assert manifest["progress"]["round"] <= fed.rounds()[-1]["round"]
        assert lock.read(held) == other


def test_a_second_process_with_the_same_clients_states_is_refused(tmp_path):
    with Federation(tmp_path, algorithm="scaffold", rounds=1_000_000) as fed:
        first = fed.client("0-3")
        fed.server()
        fed.until(fed.rounds)
        for ids in ("0-3", "2"):
            status, said = fed.ended(fed.client(ids))
            assert (status, in_use_by(first.pid) in said) == (2, True), said
        fed.stop()
        assert all(completed == [0, 1, 2, 3] for completed in fed.completed())
