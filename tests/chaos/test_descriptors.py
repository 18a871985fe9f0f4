"""A server that may open a thousand files and sockets, and strangers who want them all."""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fednet import descriptors
from fednet.client.loop import read_server
from fednet.transport import keys
from fednet.transport.zeromq.server import ZmqServer
from tests.processes import COLD, Federation, crashes, port


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
    server = list[Any]()
    site = list[Any]()
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


def test_idle_connections_to_the_metrics_of_a_run_leave_it_its_descriptors(tmp_path):
    pytest.importorskip("prometheus_client")
    where = port()
    limited = functools.partial(limit_files, 256)
    with Federation(tmp_path, rounds=10**6) as fed, ExitStack() as stack:
        fed.client("0-3")
        fed.server("--metrics", where, before=limited)
        fed.until(fed.rounds)
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", where), timeout=30))
        before = len(fed.rounds())
        fed.until(lambda: len(fed.rounds()) >= before + 3)
        fed.stop()


# Events of Python's audit hooks for what takes a descriptor; sockets are no files.
TAKES = ("open", "os.listdir", "os.scandir", "mmap.__new__", "subprocess.Popen", "import")


def list_opens(path: Path) -> None:
    """Lists there what this process opens while others can connect to it, without what is kept back
    for files: a line for each, with the functions that lead to it.
    """
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reaching = descriptors.reaching.__code__
    listens = False
    listen = ZmqServer.listen
    close = ZmqServer.close

    def listen_then(self: ZmqServer) -> None:
        nonlocal listens
        listen(self)
        listens = True

    def close_then(self: ZmqServer, linger_s: float = 1.0) -> None:
        nonlocal listens
        close(self, linger_s)
        listens = False

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if not listens or event not in TAKES:
            return
        if event == "open" and isinstance(args[0], int):  # a descriptor that there is already
            return
        if event == "mmap.__new__" and args[0] < 0:  # memory
            return
        frame = sys._getframe(1)
        callers = list[str]()
        while frame is not None:
            if frame.f_code is reaching:
                return
            callers.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        os.write(out, f"{event} {args[0]} by {' '.join(callers)}\n".encode())

    ZmqServer.listen = listen_then  # type: ignore[method-assign]
    ZmqServer.close = close_then  # type: ignore[method-assign]
    sys.addaudithook(heard)


def test_whatever_a_server_opens_while_it_listens_may_use_what_is_kept_for_files(tmp_path):
    """A run with keys that are changed, large replies on disk, states of clients, a server that
    dies and is resumed, evaluations, exports and a report. Each server starts in an interpreter
    that has imported nothing yet.
    """
    keys.lab(tmp_path / "keys", 4)
    changes = {
        "algorithm": "ditto",
        "rounds": 4,
        "model": {"name": "mlp", "hidden": [20_000]},
        "evaluate": {"clients": "all", "every": 2},
        "record": {"clients": "each"},
        "report": True,
        "checkpoint": {"best": True, "fsync": True},
        "security": {"curve": True},
        "faults": crashes((2, "checkpointing")),
    }
    with Federation(tmp_path, **changes) as fed:
        fed.client("0-3", "--keys", tmp_path / "keys" / "clients" / "all.key")
        fed.context = COLD
        for resume in (False, True):
            before = functools.partial(list_opens, tmp_path / f"opens-{resume}")
            fed.server("--keys", tmp_path / "keys", resume=resume, before=before)
            fed.until(lambda: fed.rounds() or fed.last.poll() is not None)
            keys.allow(tmp_path / "keys", [0], "k" * keys.KEY_LENGTH)
            status = fed.status()
            assert status == (0 if resume else -signal.SIGKILL), fed
        assert [r["round"] for r in fed.rounds()] == [1, 2, 3, 4]
    for resume in (False, True):
        assert (tmp_path / f"opens-{resume}").read_text() == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"clip": 1.0, "noise": 1.0}, "report": True},
        {"privacy": {"secagg": {"protocol": "secagg"}}},
        {
            "schedule": {"mode": "async"},
            "evaluate": {"metrics": ["f1_macro"]},
            "stop": {"patience": 9},
        },
    ],
)
@pytest.mark.long
def test_a_server_has_imported_and_looked_up_all_it_needs_when_it_listens(tmp_path, changes):
    with Federation(tmp_path, **changes) as fed:
        fed.client("0-3")
        fed.context = COLD
        fed.server(before=functools.partial(list_opens, tmp_path / "opens"))
        assert fed.status() == 0, fed
    assert (tmp_path / "opens").read_text() == ""
