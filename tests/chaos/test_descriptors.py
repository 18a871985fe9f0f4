"""A server that may open a thousand files and sockets, and strangers who want them all."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

from fednet.client import join
from fednet.transport import keys
from tests.processes import Processes, lines, until

THOUSAND = ("sh", "-c", 'ulimit -n 1024 && exec "$0" "$@"')
PATIENT = "round={lost: {closed: 100, silent: 100}}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_idle_connections_leave_a_server_the_descriptors_of_its_files(tmp_path):
    keys.lab(tmp_path / "keys", 4)
    site = ("--keys", tmp_path / "keys" / "clients" / "all.key", "--state", tmp_path / "state")
    sets = ("clients=4", "rounds=1000000", "security.curve=true", PATIENT)
    rounds, crowd = tmp_path / "run" / "rounds.jsonl", []
    with Processes(tmp_path) as started:
        server = started.server("--keys", tmp_path / "keys", sets=sets, prefix=THOUSAND)
        first = started.client("0-3", *site)
        until(lambda: len(lines(rounds)) >= 3, "rounds in peace", server, first)
        host, port = join.read_server(tmp_path / "run")[0].removeprefix("tcp://").split(":")
        try:
            for n in range(1500):  # as fast as they go
                crowd.append(socket.socket())
                crowd[-1].settimeout(5)
                crowd[-1].connect((host, int(port)))
                if n < 600:
                    crowd[-1].sendall(b"\xff")  # and no more of a handshake
            first.kill()
            first.wait()
            before = len(lines(rounds))
            second = started.client("0-3", *site)  # gets in all the same
            until(
                lambda: len(lines(rounds)) >= before + 5,
                "rounds among strangers",
                server,
                second,
            )
        finally:
            for one in crowd:
                one.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 4, server.said()
