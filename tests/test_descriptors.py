"""Descriptors that are kept for files, whatever connections take. Each test runs in a process of
its own that may open 200.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fednet import descriptors
from fednet.errors import machine_error
from fednet.files import Lines, open_descriptor, read_lines, read_record, write_json, write_record
from tests.processes import ROOT

MANY = 200


def alone(case: str, folder: Path) -> None:
    code = f"import pathlib, tests.test_descriptors as t; t.{case}(pathlib.Path({str(folder)!r}))"
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {MANY} && exec "$0" "$@"', sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def crowd() -> list[socket.socket]:
    """As many sockets as there may be."""
    held = []
    while True:
        try:
            held.append(socket.socket())
        except OSError as full:
            if full.errno != errno.EMFILE:
                raise
            return held


def files(folder: Path) -> None:
    descriptors.keep_back()
    held = crowd()
    assert descriptors.limit() == MANY - MANY // 8
    write_json(folder / "status.json", {"round": 1})
    write_record(folder / "record", {"round": 1}, fsync=True)
    assert read_record(folder / "record", "") == {"round": 1}
    lines = Lines(folder / "rounds.jsonl")
    lines.append({"round": 1})
    lines.close()
    assert list(read_lines(folder / "rounds.jsonl")) == [{"round": 1}]
    assert not crowd()  # the limit is as before
    assert len(held) < MANY - MANY // 8


def patience(folder: Path) -> None:
    """All are taken, those kept back too, until someone is hung up on."""
    held = crowd()
    descriptors.keep_back()
    threading.Timer(0.2, lambda: held.pop().close()).start()
    os.close(open_descriptor(folder / "file", os.O_WRONLY | os.O_CREAT))


def end(folder: Path) -> None:
    descriptors.PATIENCE_S = 0.1
    held = crowd()
    descriptors.keep_back()
    with pytest.raises(OSError, match="Too many open files"):
        open_descriptor(folder / "file", os.O_WRONLY | os.O_CREAT)
    assert held


@pytest.mark.parametrize("case", [files, patience, end])
def test_files_are_opened_beyond_what_connections_may_take(case, tmp_path):
    alone(case.__name__, tmp_path)


@pytest.mark.parametrize("full", [errno.EMFILE, errno.ENFILE])
def test_that_no_more_may_be_opened_is_no_fault_of_fednet(full):
    said = os.strerror(full)
    assert machine_error(OSError(full, said, "log/server.log")) == f"{said}: log/server.log."
