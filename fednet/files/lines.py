"""Files of records, a line each, to which is only added."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from fednet.descriptors import named, reaching, synced
from fednet.errors import StateError
from fednet.files.records import carries_check, decoded, line, unchecked, without_check
from fednet.plain import JsonDict

T = TypeVar("T")

BUFFER_BYTES = 1 << 18  # of lines that are written at once
BLOCK_BYTES = 1 << 16  # of lines that are read at once


class Lines:
    """An append-only file of records, a line each; threads may append at once. text: of one."""

    def __init__(self, path: Path, text: Callable[[JsonDict], bytes] = line) -> None:
        self.path, self._text = path, text
        self._file = reaching(lambda: named(path, there=False).open("ab", BUFFER_BYTES))
        self._length, self._lock = self._file.tell(), threading.Lock()

    def append(self, record: JsonDict) -> None:
        text = self._text(record)
        with self._lock:
            self._length += self._file.write(text)

    def flush(self, fsync: bool = False) -> int:
        """All is with the operating system, and with `fsync` on the disk. Returns the length that
        the file has by what was written, whatever became of it.
        """
        length = self._length  # before it: another thread may append meanwhile
        self._file.flush()
        if fsync:
            synced(self._file.fileno(), self.path)
        return length

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, old: bool = False, end: int | None = None) -> Iterator[JsonDict]:
    """The records of a file of lines, without their checks, as `read_rows` has them."""
    return read_rows(path, old, decoded, end)


def read_rows(
    path: Path,
    old: bool,
    decode: Callable[[bytes], T],
    end: int | None = None,
    many: Callable[[bytes], list[T]] | None = None,
    seen: Callable[[bytes], object] | None = None,
) -> Iterator[T]:
    """The records of a file of lines. A last line without its end is being written, or was torn by
    a crash, and is left out. Raises StateError for any other line that is not as it was written.
    old: lines that carry no check are taken too, as earlier releases wrote them, in a file that has
    none at all. decode: of a line's text, into what it is to be read as; its
    msgspec.ValidationError is a StateError that names the line. end: bytes of the file after which
    nothing is read. many: of the text of several lines, checks and all, in one step.
    seen: given the text of all lines that are read, once.
    """

    def blocks() -> Iterator[Iterable[T]]:
        number = 1
        bare: bool | None = None  # whether this file's lines carry no check
        with reaching(lambda: named(path).open("rb")) as file:
            for block in _blocks(file, end):
                if seen is not None:
                    seen(block)
                if bare is None:
                    bare = old and not carries_check(block[: block.index(b"\n")])
                found = None if many is None else _together(block, bare, many)
                yield _singly(path, number, block, bare, decode) if found is None else found
                number += block.count(b"\n")

    return itertools.chain.from_iterable(blocks())


def _singly(
    path: Path, first: int, block: bytes, bare: bool, decode: Callable[[bytes], T]
) -> Iterator[T]:
    for number, text in enumerate(block.split(b"\n")[:-1], first):
        try:
            if not bare:
                yield decode(unchecked(text))
            elif carries_check(text):
                raise ValueError("it carries a check, and the lines before it do not")
            elif text.strip():
                yield decode(text)
        except msgspec.ValidationError as other:
            raise StateError(f"{path}:{number}: {other}.") from None
        except (ValueError, RecursionError) as broken:
            raise StateError(
                f"{path}:{number}: not what was written there ({broken}); put the file back as "
                f"it was, or delete this line to go on without what it said."
            ) from broken


def _blocks(file: BinaryIO, end: int | None) -> Iterator[bytes]:
    """Its whole lines up to a byte, some at a time."""
    at = 0
    while block := file.read(BLOCK_BYTES):
        block += file.readline()
        stop = len(block) if end is None else max(0, end - at)
        whole = block[: block.rfind(b"\n", 0, stop) + 1]
        if whole:
            yield whole
        if len(whole) < len(block):
            return
        at += len(whole)


def _together(block: bytes, bare: bool, many: Callable[[bytes], list[T]]) -> list[T] | None:
    """The records of lines, one each, that are as they were written; None where they are not."""
    if b'"check"' in block if bare else None in map(without_check, block.split(b"\n")[:-1]):
        return None
    try:
        found = many(block)
    except ValueError:
        return None
    return found if len(found) == block.count(b"\n") else None


def repair(path: Path) -> None:
    """Cuts a torn last line off a file of lines: a crash ended the process that wrote it."""
    if not path.exists():
        return
    with reaching(lambda: named(path).open("r+b")) as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            step = min(4096, at)
            file.seek(at - step)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                at = at - step + found + 1
                break
            at -= step
        if at != size:
            file.truncate(at)
