"""Whole files: they are written under another name, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fednet.descriptors import reaching, synced
from fednet.plain import plain

Buffer = bytes | bytearray | memoryview


# -- opening ---------------------------------------------------------------------------------------
# For files of fednet's own: a link or a pipe in their place is an error, and not waited for.
OWN = os.O_NOFOLLOW | os.O_NONBLOCK


def opened(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Opens a file, also where connections use all descriptors that they may have."""
    return reaching(lambda: os.open(path, flags | os.O_CLOEXEC, mode))


# -- writing aside ---------------------------------------------------------------------------------
# The name of a file that is being written, by fednet or by safetensors.
ASIDE = re.compile(r"\..+\.[0-9]+|\.tmp[A-Za-z0-9]{6}")


def aside_of(path: Path) -> Path:
    """The name under which this process writes a file; no other process uses it, on any machine."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def write_aside(
    path: Path, data: Buffer | str, mode: int | None = None, fsync: bool = False
) -> None:
    """Writes a file so that a reader sees the old or the new one, never half. mode: of the new
    file, from its first byte on. fsync: it survives a power cut.
    """
    with unfinished(path) as aside:
        _fill(aside, path, data, mode, fsync)
        appear(aside, path, fsync)


def write_first(path: Path, data: Buffer | str, mode: int | None = None) -> bool:
    """The same, but a file that exists stays. Returns whether it was written."""
    try:
        with unfinished(path) as aside:
            _fill(aside, path, data, mode, False)
            os.link(aside, path)
    except FileExistsError:
        return False
    aside.unlink()
    return True


def write_new(path: Path, data: Buffer | str, mode: int = 0o666) -> None:
    """Writes a new file directly, for file systems without links, such as those of USB sticks.
    Raises FileExistsError, and OSError, after which no half of it stays.
    """
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(opened(path, new, mode), "wb", buffering=0) as file, _whole_or_gone(path, path):
        write_all(file.fileno(), data)


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Gives the name under which to write a file, and removes that file unless it was renamed."""
    aside = aside_of(path)
    with _whole_or_gone(aside, path):
        yield aside


@contextlib.contextmanager
def _whole_or_gone(file: Path, path: Path) -> Iterator[None]:
    """Nothing stays of a file that an error or a signal ends, and what the system says of it is
    said of the one that was asked for.
    """
    try:
        yield
    except BaseException as broken:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        if isinstance(broken, OSError) and broken.filename in (None, str(file)):
            broken.filename, broken.filename2 = str(path), None
        raise


def _fill(aside: Path, path: Path, data: Buffer | str, mode: int | None, fsync: bool) -> None:
    if mode is not None:  # what a process of that id left would keep its own
        aside.unlink(missing_ok=True)
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(opened(aside, new, 0o666 if mode is None else mode), "wb", buffering=0) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)  # whatever this process masks
        write_all(file.fileno(), data)
        if fsync:
            synced(file.fileno(), path)


def clear_asides(folder: Path) -> None:
    """Removes what a killed process left half written. For whoever holds the folder's lock."""
    for aside in folder.glob(".*"):
        if ASIDE.fullmatch(aside.name) and aside.is_file():
            aside.unlink(missing_ok=True)


def appear(aside: Path, path: Path, fsync: bool = False) -> None:
    """Renames a whole file to its own name. fsync: it survives a power cut."""
    aside.replace(path)
    if fsync:
        folder = opened(path.parent, os.O_RDONLY)
        try:
            synced(folder, path.parent)
        finally:
            os.close(folder)


def write_all(file: int, data: Buffer | str) -> None:
    view = memoryview(data.encode() if isinstance(data, str) else data)
    while len(view):
        view = view[os.write(file, view) :]


def write_json(path: Path, value: object, indent: int | None = 1) -> None:
    """Writes a file for people and other programs, from which no run resumes."""
    if indent is None:
        text = msgspec.json.encode(value, enc_hook=plain)  # a tenth of the time
    else:
        text = json.dumps(value, indent=indent, default=plain).encode()
    write_aside(path, text + b"\n")
