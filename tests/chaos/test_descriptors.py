"""A server that may open a thousand files and sockets, and strangers who want them all."""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest

from fednet.client.join import read_server
from fednet.transport import keys
from tests.processes import ROOT, Federation, until


def limit_files(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def greet(address: str, many: int, stack: ExitStack) -> None:
    """Make so many connections that send the first byte of a greeting, as fast as the server takes
    them.
    """
    host, port = address.removeprefix("tcp://").split(":")
    made = 0
    while made < many:
        one = stack.enter_context(socket.socket())
        one.settimeout(5)
        try:
            one.connect((host, int(port)))
            one.sendall(b"\xff")
        except OSError:
            one.close()  # nothing listens yet, or it was closed
            time.sleep(0.001)
            continue
        made += 1


@pytest.mark.parametrize("curve", [False, True])
def test_strangers_leave_a_server_the_descriptors_of_its_files_and_clients(tmp_path, curve):
    """They connect from the moment at which the address is known."""
    keys.lab(tmp_path / "keys", 4)
    server, site = list[Any](), list[Any]()
    if curve:
        server = ["--keys", tmp_path / "keys"]
        site = ["--keys", tmp_path / "keys" / "clients" / "all.key"]
    patient = {"join": 300, "lost": {"closed": 100, "silent": 100}}
    changes = {"rounds": 10**6, "round": patient, "security": {"curve": curve}}
    with Federation(tmp_path, **changes) as fed, ExitStack() as stack:
        fed.server(*server, before=functools.partial(limit_files, 1024))
        fed.until((fed.path / "server.json").exists)
        greet(read_server(fed.path)[0], 1100, stack)
        first = fed.client("0-3", *site)
        fed.until(lambda: len(fed.rounds()) >= 3)
        fed.lose(first)
        before = len(fed.rounds())
        fed.client("0-3", *site)
        fed.until(lambda: len(fed.rounds()) >= before + 3)
        fed.stop()


# A server that is busy elsewhere while connections come, and opens files then.
BUSY = """
import pathlib, sys, time
from fednet import descriptors, files
from fednet.transport.zeromq.server import ZmqServer
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
WAITING = 5  # connections that the kernel holds, and that would take all that is given back


def test_a_file_is_opened_while_connections_hold_all_that_they_may(tmp_path):
    limited = ("sh", "-c", 'ulimit -n 200 && exec "$0" "$@"', sys.executable, "-c", BUSY)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        ExitStack() as stack,
        subprocess.Popen(
            [*limited, str(tmp_path)], cwd=ROOT, text=True, env=environment, **pipes
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
