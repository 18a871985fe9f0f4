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
from fednet.files.records import decoded, line, unchecked, without_check
from fednet.plain import JsonDict

T = TypeVar("T")

BUFFER_BYTES = 1 << 18  # of lines that are written at once
BLOCK_BYTES = 1 << 16  # of lines that are read at once


class Lines:
    """An append-only file of records, a line each; threads may append at once. text: makes the line
    of a record.
    """

    def __init__(self, path: Path, text: Callable[[JsonDict], bytes] = line) -> None:
        self.path, self._text = path, text
        self._file = reaching(lambda: named(path, there=False).open("ab", BUFFER_BYTES))
        self._length, self._lock = self._file.tell(), threading.Lock()

    def append(self, record: JsonDict) -> None:
        text = self._text(record)
        with self._lock:
            self._length += self._file.write(text)

    def flush(self, fsync: bool = False) -> int:
        """Hands all lines to the operating system; with `fsync` they are on the disk. Returns the
        length that the file has by what was written, whatever became of it.
        """
        length = self._length  # before it: another thread may append meanwhile
        self._file.flush()
        if fsync:
            synced(self._file.fileno(), self.path)
        return length

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[JsonDict]:
    """The records of a file of lines, without their checks; see `read_rows`."""
    return read_rows(path, decoded)


def read_rows(
    path: Path,
    decode: Callable[[bytes], T],
    many: Callable[[bytes], list[T]] | None = None,
    seen: Callable[[bytes], object] | None = None,
) -> Iterator[T]:
    """The records of a file of lines. A last line without its end is still being written, or was
    torn by a crash, and is left out. Raises StateError for any other line that is not as it was
    written.

    decode: makes a record of a line's text, without its check; its msgspec.ValidationError becomes
    a StateError that names the line. many:
    decodes several whole lines at once, which is faster. seen: called with the text that is read.
    """

    def blocks() -> Iterator[Iterable[T]]:
        number = 1
        with reaching(lambda: named(path).open("rb")) as file:
            for block in _blocks(file):
                if seen is not None:
                    seen(block)
                found = None if many is None else _together(block, many)
                yield _singly(path, number, block, decode) if found is None else found
                number += block.count(b"\n")

    return itertools.chain.from_iterable(blocks())


def _singly(path: Path, first: int, block: bytes, decode: Callable[[bytes], T]) -> Iterator[T]:
    for number, text in enumerate(block.split(b"\n")[:-1], first):
        try:
            yield decode(unchecked(text))
        except msgspec.ValidationError as other:
            raise StateError(f"{path}:{number}: {other}.") from None
        except (ValueError, RecursionError) as broken:
            raise StateError(
                f"{path}:{number}: not what was written there ({broken}); put the file back as "
                f"it was, or delete this line to continue without it."
            ) from broken


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Its whole lines, some at a time."""
    while block := file.read(BLOCK_BYTES):
        block += file.readline()
        whole = block[: block.rfind(b"\n") + 1]
        if whole:
            yield whole


def _together(block: bytes, many: Callable[[bytes], list[T]]) -> list[T] | None:
    """The records of lines that are all as they were written; None where one is not."""
    if None in map(without_check, block.split(b"\n")[:-1]):
        return None
    try:
        found = many(block)
    except ValueError:
        return None
    return found if len(found) == block.count(b"\n") else None


def repair(path: Path) -> None:
    """Cuts off a torn last line: a crash ended the process that wrote it."""
    if not path.exists():
        return
    with reaching(lambda: named(path).open("r+b")) as file:
        at = size = file.seek(0, os.SEEK_END)
        whole = 0  # the length of the whole lines
        while at > 0 and not whole:
            start = max(0, at - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
            at = start
        if whole != size:
            file.truncate(whole)
