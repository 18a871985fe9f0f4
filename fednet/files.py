"""Files that tell when they are not what was written: digests, records of JSON, writing aside.

A file that a run goes on from must be whole and unchanged, or be refused by name. So each record
carries the digest of its own text as its last field, `check`, whether it is a file of its own
(`write_record`) or a line of many (`Lines`), and appears only when it is whole: written aside, then
renamed.

The digests guard against faults of disks, memory and networks, not against forgery (CURVE and the
file's owner do). XXH3 reads at the speed of memory: 45 MB took 1.6 ms, where a copy took 4 and a
SHA-256 28.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import xxhash

from fednet.descriptors import named, reaching, synced
from fednet.errors import StateError
from fednet.plain import JsonDict, plain

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

CHECK_BYTES = 16
BUFFER_BYTES = 1 << 18  # of lines that are written at once
BLOCK_BYTES = 1 << 16  # of lines that are read at once
_CHECK = b',"check":"'
_TAIL = re.compile(rb',"check":"[0-9a-f]{16}"\}$')
_TAIL_BYTES = len(_CHECK) + 16 + 2


# -- digests ---------------------------------------------------------------------------------------
def digest(segments: Iterable[Buffer]) -> bytes:
    """The 16 bytes of XXH3-128 over segments that lie one behind the other."""
    whole = xxhash.xxh3_128()
    for segment in segments:
        whole.update(segment)
    return whole.digest()


# -- opening ---------------------------------------------------------------------------------------
# What lies in place of a file of one's own, a link or a pipe, is an error and never written to, nor
# waited for.
OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def opened(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """A descriptor of that file, also where connections have taken all that they may."""
    return reaching(lambda: os.open(path, flags | os.O_CLOEXEC, mode))


# -- writing aside ---------------------------------------------------------------------------------
# The name of a file that is being written: around its own, or as safetensors has it.
ASIDE = re.compile(r"\..+\.[0-9]+|\.tmp[A-Za-z0-9]{6}")


def aside_of(path: Path) -> Path:
    """Where this process writes what is to become `path`: no other does, on whatever machine."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def write_aside(
    path: Path, data: Buffer | str, mode: int | None = None, fsync: bool = False
) -> None:
    """Written aside, then renamed: a reader sees the old or the new file, never half of one. mode:
    of the new file, from its first byte on. fsync: it is there after a power cut too.
    """
    with unfinished(path) as aside:
        _fill(aside, path, data, mode, fsync)
        appear(aside, path, fsync)


def write_first(path: Path, data: Buffer | str, mode: int | None = None) -> bool:
    """`write_aside`, but of several that write it the first one's stays. Returns whether it was."""
    try:
        with unfinished(path) as aside:
            _fill(aside, path, data, mode, False)
            os.link(aside, path)
    except FileExistsError:
        return False
    aside.unlink()
    return True


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """The file aside. Nothing stays of what an error or a signal ends before it appears, and what
    the system says of it is said of the file that was asked for.
    """
    aside = aside_of(path)
    try:
        yield aside
    except BaseException as broken:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(broken, OSError) and broken.filename in (None, str(aside)):
            broken.filename, broken.filename2 = str(path), None
        raise


def _fill(aside: Path, path: Path, data: Buffer | str, mode: int | None, fsync: bool) -> None:
    if mode is not None:  # what a process of that id left would keep its own
        aside.unlink(missing_ok=True)
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(opened(aside, new, 0o666 if mode is None else mode), "wb", buffering=0) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)  # whatever this process masks
        write_all(file.fileno(), data.encode() if isinstance(data, str) else data)
        if fsync:
            synced(file.fileno(), path)


def clear_asides(folder: Path) -> None:
    """Removes what a killed process left half written. For whoever holds the folder's lock."""
    for aside in folder.glob(".*"):
        if ASIDE.fullmatch(aside.name) and aside.is_file():
            aside.unlink(missing_ok=True)


def appear(aside: Path, path: Path, fsync: bool = False) -> None:
    """Renames a file that is whole to its own name, which `fsync` makes outlast a power cut."""
    aside.replace(path)
    if fsync:
        folder = opened(path.parent, os.O_RDONLY)
        try:
            synced(folder, path.parent)
        finally:
            os.close(folder)


def write_all(file: int, data: Buffer) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(file, view) :]


def write_json(path: Path, value: object, indent: int | None = 1) -> None:
    """A file for people and other programs to read, which no run goes on from."""
    if indent is None:
        text = msgspec.json.encode(value, enc_hook=plain)  # a tenth of the time
    else:
        text = json.dumps(value, indent=indent, default=plain).encode()
    write_aside(path, text + b"\n")


# -- records ---------------------------------------------------------------------------------------
def line(record: JsonDict) -> bytes:
    """A record's line, with the digest of all before it as its last field."""
    return checked(json.dumps(record, separators=(",", ":"), default=plain).encode())


def plain_line(record: JsonDict) -> bytes:
    """The text that `line` makes, of a record of strings and whole numbers alone, at a fifth of the
    time: a book has a line a message.
    """
    return checked(_encode(record))


def checked(text: bytes) -> bytes:
    """A JSON object's text as a line that carries its digest. It must have a field."""
    return b'%b%b%b"}\n' % (text[:-1], _CHECK, xxhash.xxh3_64_hexdigest(text).encode())


_encode = msgspec.json.Encoder().encode


def _carries_check(text: bytes) -> bool:
    return _TAIL.search(text, max(0, len(text) - _TAIL_BYTES - 1)) is not None


def unchecked(text: bytes) -> bytes:
    """The text that `checked` was given. Raises ValueError where the line is not what it made."""
    said = _said(text.removesuffix(b"\n"))
    if said is None:
        raise ValueError(f"its check is {'of another text' if _carries_check(text) else 'missing'}")
    return said


def _said(text: bytes) -> bytes | None:
    """What `checked` was given, of a line without its end; None where it is not what that made."""
    said = text[:-_TAIL_BYTES] + b"}"
    return said if checked(said)[:-1] == text else None


def write_record(
    path: Path, record: JsonDict, mode: int | None = None, fsync: bool = False
) -> None:
    """A file that holds one record."""
    write_aside(path, line(record), mode, fsync)


def read_record(path: Path, remedy: str, by_hand: type | None = None) -> JsonDict:
    """What `write_record` wrote. Raises StateError where the file is not as it was written, and
    FileNotFoundError. remedy: what the reader of that error can do. by_hand: a person may have
    written it, without a check: an object of that type then, which allows no unknown field.
    """
    try:
        text = reaching(named(path).read_bytes)
        if by_hand is not None and b'"check"' not in text:
            return msgspec.to_builtins(msgspec.json.decode(text, type=by_hand))
        if not text.endswith(b"\n"):
            raise ValueError("its end is missing" if text else "it is empty")
        return _decoded(unchecked(text))
    except (ValueError, RecursionError) as broken:
        raise StateError(f"{path}: not what was written there ({broken}); {remedy}.") from broken


def _decoded(text: bytes) -> JsonDict:
    try:
        return msgspec.json.decode(text, type=JsonDict)
    except msgspec.DecodeError:  # a NaN, which JSON has not
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object") from None
        return found


# -- files of lines --------------------------------------------------------------------------------
class Lines:
    """An append-only file of records, a line each. text: of a record."""

    def __init__(self, path: Path, text: Callable[[JsonDict], bytes] = line) -> None:
        self.path, self._text = path, text
        self._file = reaching(lambda: named(path, there=False).open("ab", BUFFER_BYTES))
        self._length = self._file.tell()

    def append(self, record: JsonDict) -> None:
        self._length += self._file.write(self._text(record))

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
    return read_rows(path, old, _decoded, end)


def read_rows(
    path: Path,
    old: bool,
    decode: Callable[[bytes], T],
    end: int | None = None,
    many: Callable[[bytes], list[T]] | None = None,
) -> Iterator[T]:
    """The records of a file of lines. A last line without its end is being written, or was torn by
    a crash, and is left out. Raises StateError for any other line that is not as it was written.
    old: lines that carry no check are taken too, as earlier releases wrote them, in a file that has
    none at all. decode: of a line's text, into what it is to be read as; its
    msgspec.ValidationError is a StateError that names the line. end: bytes of the file after which
    nothing is read. many: of the text of several lines, checks and all, in one step.
    """

    def blocks() -> Iterator[Iterable[T]]:
        number = 1
        bare: bool | None = None  # whether this file's lines carry no check
        with reaching(lambda: named(path).open("rb")) as file:
            for block in _blocks(file, end):
                if bare is None:
                    bare = old and not _carries_check(block[: block.index(b"\n")])
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
            elif _carries_check(text):
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
    if b'"check"' in block if bare else None in map(_said, block.split(b"\n")[:-1]):
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
