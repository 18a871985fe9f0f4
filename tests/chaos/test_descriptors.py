"""A server that may open a thousand files and sockets, and strangers who want them all."""

from __future__ import annotations

import functools
import resource
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest

from fednet.client.loop import read_server
from fednet.transport import keys
from tests.processes import Federation


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
