"""A server that may open a thousand files and sockets, and strangers who want them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from fednet.client import join
from fednet.transport import keys
from tests.processes import ROOT, Processes, lines, until

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
            for _ in range(1500):  # as fast as they go
                crowd.append(socket.socket())
                crowd[-1].settimeout(5)
                crowd[-1].connect((host, int(port)))
                with contextlib.suppress(OSError):  # it was hung up on already
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


def greeted(crowd: list[socket.socket], address: str, many: int) -> None:
    """Connections that send the first byte of a greeting, as fast as the server takes them."""
    host, port = address.removeprefix("tcp://").split(":")
    while len(crowd) < many:
        one = socket.socket()
        one.settimeout(5)
        try:
            one.connect((host, int(port)))
            one.sendall(b"\xff")
        except OSError:
            one.close()  # nothing listens yet, or it was hung up on
            time.sleep(0.001)
            continue
        crowd.append(one)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_strangers_do_not_end_a_server_that_is_starting(tmp_path):
    """They connect from the moment at which the address is known."""
    rounds, crowd = tmp_path / "run" / "rounds.jsonl", []
    with Processes(tmp_path) as started:
        server = started.server(sets=("clients=4", "rounds=1000000", PATIENT), prefix=THOUSAND)
        until(lambda: (tmp_path / "run" / "server.json").exists(), "the address", server)
        try:
            greeted(crowd, join.read_server(tmp_path / "run")[0], 1100)
            worker = started.client("0-3")
            until(lambda: len(lines(rounds)) >= 3, "rounds among strangers", server, worker)
        finally:
            for one in crowd:
                one.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 4, server.said()


# A server that is busy elsewhere while connections come, and opens files then.
BUSY = """
import pathlib, sys, time
from fednet import descriptors, files
from fednet.transport.zeromq.router import ZmqServer
descriptors.keep_back()
server = ZmqServer("tcp://127.0.0.1:0")
print(server.address, descriptors.limit(), flush=True)
sys.stdin.readline()
assert descriptors.count() == 0  # there is none left to look with
for n in range(20):
    files.write_json(pathlib.Path(sys.argv[1]) / "status.json", {"round": n})
end = time.monotonic() + 60
while descriptors.limit() - descriptors.count() < 20 or not descriptors.count():
    assert time.monotonic() < end
    server.poll(0.01)
"""
QUEUE = 50  # connections that wait to be taken, of the hundred that the kernel would hold
WAITING = 5  # connections that the kernel holds, and that would take whatever is given back


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_a_file_is_opened_while_connections_hold_all_that_they_may(tmp_path):
    limited = ("sh", "-c", 'ulimit -n 200 && exec "$0" "$@"', sys.executable, "-c", BUSY)
    with (
        ExitStack() as stack,
        subprocess.Popen(
            [*limited, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as server,
    ):
        stack.callback(server.kill)
        address, most = server.stdout.readline().split()
        host, port = address.removeprefix("tcp://").split(":")

        def held() -> int:
            return len(os.listdir(f"/proc/{server.pid}/fd"))

        def connect() -> None:
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            one.sendall(b"\xff")  # the kernel keeps who says nothing to itself, see `await_words`

        while (left := int(most) - held()) > 0:
            for _ in range(min(left, QUEUE)):
                connect()
            until(lambda: int(most) - held() <= max(0, left - QUEUE), "connections", server)
        for _ in range(WAITING):
            connect()
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.wait(60) == 0
        assert json.loads((tmp_path / "status.json").read_text()) == {"round": 19}
