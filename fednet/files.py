"""Files whose damage is noticed: JSON records with a digest, files of lines, whole files. And files
that are mapped into memory.

A file from which a run resumes must be whole and unchanged; otherwise it is refused by name. So
each record has the digest of its own text as its last field, `check`, whether it is a file
(`write_record`) or a line (`Lines`). A file is written under another name, then renamed, so that
nobody sees half of it.

The digests detect faults of disks, memory and networks. They do not protect against forgery; CURVE
and the file's owner do. XXH3 is fast: 45 MB took 1.6 ms, a copy 4 ms and SHA-256 28 ms.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import mmap
import os
import re
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from fednet.descriptors import flush_to_disk, reaching
from fednet.errors import ConfigError, StateError
from fednet.plain import JsonDict, as_json, plain

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

BUFFER_BYTES = 1 << 18  # of lines that are written at once
BLOCK_BYTES = 1 << 16  # in which the end of the last whole line is looked for


# What `flock` and `fcntl` say on a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
MOST_PIECES = 1024  # that the system writes at once: IOV_MAX of Linux


# -- opening ---------------------------------------------------------------------------------------
# For files of fednet's own: a link or a pipe in their place is an error, and not waited for.
OWN = os.O_NOFOLLOW | os.O_NONBLOCK


def open_descriptor(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Opens a file, also where connections use all descriptors that they may have."""
    return reaching(lambda: os.open(path, flags | os.O_CLOEXEC, mode))


def read_bytes(path: Path) -> bytes:
    """Returns a file's content."""
    with naming_file(path):
        return reaching(path.read_bytes)


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns what is in a folder under names of that pattern; nothing if there is no such folder.
    (From Python 3.13 on `Path.glob` leaves out in silence what it cannot read.)
    """
    return [folder / name for name in list_names(folder) if fnmatch.fnmatchcase(name, pattern)]


def list_names(folder: Path) -> list[str]:
    """Returns the names of all that is in a folder; nothing if there is no such folder."""
    try:
        with naming_file(folder):
            return sorted(reaching(lambda: os.listdir(folder)))
    except FileNotFoundError:
        return []


def remove_folder(folder: Path) -> None:
    """Deletes a folder with all that is in it, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        reaching(lambda: shutil.rmtree(folder))


@contextlib.contextmanager
def naming_file(path: Path | str) -> Iterator[None]:
    """Makes the system's errors inside name that file, where they name none, as those of reading,
    writing and locking do.
    """
    try:
        yield
    except OSError as broken:
        if broken.filename is None:
            broken.filename = str(path)
        raise


@contextlib.contextmanager
def locking(path: Path | str) -> Iterator[None]:
    """Inside, that file is locked. Raises ConfigError if its file system has no locks."""
    try:
        with naming_file(path):
            yield
    except OSError as broken:
        if broken.errno not in NO_LOCKS:
            raise
        raise ConfigError(
            f"{path}: its file system has no locks ({broken.strerror}); expected a folder on one "
            f"that has, such as a local disk."
        ) from None


@contextlib.contextmanager
def alone(file: int, path: Path | str) -> Iterator[None]:
    """Inside, no other process of this machine is inside with that file. A process that is forked
    meanwhile holds nothing up.
    """
    with locking(path):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def try_lock(file: int, path: Path | str) -> bool:
    """Locks a file, until it is closed, if no other process has locked it."""
    with locking(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# -- writing aside ---------------------------------------------------------------------------------
# The name of a file that is being written.
ASIDE = re.compile(r"\..+\.[0-9]+")


def write_aside(
    path: Path,
    data: Buffer | str | Iterable[Buffer],
    mode: int | None = None,
    fsync: bool = False,
    first: bool = False,
) -> bool:
    """Writes a file so that a reader sees the old or the new one, never half. data: its content,
    or the parts of it. mode: of the new file, from its first byte on. fsync: it survives a power
    cut. first: only if there is no such file yet. Returns whether it was written.
    """
    # No other process writes under this name, on any machine.
    aside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with _whole_or_gone(aside, path):
        if mode is not None:  # what a process of that id left would keep its own
            aside.unlink(missing_ok=True)
        new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(
            open_descriptor(aside, new, 0o666 if mode is None else mode), "wb", buffering=0
        ) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever this process masks
            for part in [data] if isinstance(data, (str, bytes, bytearray, memoryview)) else data:
                write_all(file.fileno(), part)
            if fsync:
                flush_to_disk(file.fileno(), path)
        if first:
            try:
                os.link(aside, path)
            except FileExistsError:
                return False
            finally:
                aside.unlink()
        else:
            aside.replace(path)
        if fsync:
            folder = open_descriptor(path.parent, os.O_RDONLY)
            try:
                flush_to_disk(folder, path.parent)
            finally:
                os.close(folder)
    return True


def write_new(path: Path, data: Buffer | str, mode: int = 0o666) -> None:
    """Writes a new file directly, for file systems without links, such as those of USB sticks.
    Raises FileExistsError, and OSError, after which no half of it stays.
    """
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with (
        open(open_descriptor(path, new, mode), "wb", buffering=0) as file,
        _whole_or_gone(path, path),
    ):
        write_all(file.fileno(), data)


@contextlib.contextmanager
def _whole_or_gone(file: Path, path: Path) -> Iterator[None]:
    """Removes a file whose writing an error or a signal ends, and makes the system's error name the
    file that was asked for.
    """
    try:
        yield
    except BaseException as broken:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        if isinstance(broken, OSError) and broken.filename in (None, str(file)):
            broken.filename = str(path)
            broken.filename2 = None
        raise


def clear_asides(folder: Path) -> None:
    """Removes what a killed process left half written. Call it with the folder's lock."""
    for aside in list_folder(folder, ".*"):
        if ASIDE.fullmatch(aside.name) and aside.is_file():
            aside.unlink(missing_ok=True)


def write_all(file: int, data: Buffer | str) -> None:
    view = memoryview(data.encode() if isinstance(data, str) else data)
    while len(view):
        view = view[os.write(file, view) :]


def write_pieces(file: int, pieces: Sequence[Buffer]) -> None:
    """Writes buffers one behind the other, without a copy of them all."""
    for first in range(0, len(pieces), MOST_PIECES):
        some = pieces[first : first + MOST_PIECES]
        written = os.writev(file, some)
        if written < sum(map(len, some)):  # a full disk, say: the next write raises
            write_all(file, b"".join(some)[written:])


def write_json(path: Path, value: object, indent: int | None = 1) -> None:
    """Writes a file for people and other programs, from which no run resumes."""
    if indent is None:
        text = msgspec.json.encode(value, enc_hook=plain)  # a tenth of the time
    else:
        text = as_json(value, indent).encode()
    write_aside(path, text + b"\n")


# -- records with a check -------------------------------------------------------------------------
CHECK_BYTES = 16
_CHECK = b',"check":"'
_TAIL_BYTES = len(_CHECK) + 16 + 2


Digest = xxhash.xxh3_128  # XXH3-128: `update` with each segment in order, then `digest`


def digest(segments: Iterable[Buffer]) -> bytes:
    """Returns XXH3-128 (16 bytes) over all segments in order."""
    whole = Digest()
    for segment in segments:
        whole.update(segment)
    return whole.digest()


def line(record: JsonDict) -> bytes:
    """Returns a record as a line with its digest."""
    return with_digest(as_json(record).encode())


def plain_line(record: JsonDict) -> bytes:
    """Returns the same line, for a record of strings and whole numbers only, in a fifth of the
    time.
    """
    return with_digest(msgspec.json.encode(record))


def with_digest(text: bytes) -> bytes:
    """Returns the text of a JSON object, with at least one field, as a line with its digest."""
    return b'%b%b%b"}\n' % (text[:-1], _CHECK, xxhash.xxh3_64_hexdigest(text).encode())


def without_digest(text: bytes) -> bytes:
    """Returns the text that `with_digest` got. Raises ValueError if it did not return this line."""
    record = text.removesuffix(b"\n")[:-_TAIL_BYTES] + b"}"
    if with_digest(record) != text.removesuffix(b"\n") + b"\n":
        raise ValueError(f"its check is {'of another text' if _CHECK in text else 'missing'}")
    return record


def write_record(
    path: Path, record: JsonDict, mode: int | None = None, fsync: bool = False
) -> None:
    """Writes a file that holds one record."""
    write_aside(path, line(record), mode, fsync)


def read_record(path: Path, remedy: str) -> JsonDict:
    """Reads what `write_record` wrote. Raises StateError if it is damaged, and FileNotFoundError.
    remedy: what to do then, for the error.
    """
    try:
        text = read_bytes(path)
        if not text.endswith(b"\n"):
            raise ValueError("its end is missing" if text else "it is empty")
        return decode_line(without_digest(text))
    except (ValueError, RecursionError) as broken:
        raise StateError(f"{path}: not what was written there ({broken}); {remedy}.") from broken


def read_text(path: Path, remedy: str) -> str:
    """Reads a small file of text. Raises StateError if it is empty or no text, and
    FileNotFoundError. remedy: what to do then, for the error.
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as broken:
        raise StateError(f"{path}: is no text ({broken.reason}); {remedy}.") from None
    if not text.strip():
        raise StateError(f"{path}: is empty; {remedy}.")
    return text


_decoder = msgspec.json.Decoder(JsonDict)  # to make one takes longer than to decode a line


def decode_line(text: bytes) -> JsonDict:
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:  # a NaN, which msgspec does not read
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object") from None
        return found


# -- files of lines --------------------------------------------------------------------------------
class Lines:
    """Appends records to a file, a line each; threads may append at once. text: makes the line of a
    record.
    """

    def __init__(self, path: Path, text: Callable[[JsonDict], bytes] = line) -> None:
        self.path = path
        self._text = text
        self._file = reaching(lambda: path.open("ab", BUFFER_BYTES))
        self._length = self._file.tell()
        self._lock = threading.Lock()

    def append(self, record: JsonDict) -> None:
        text = self._text(record)
        with self._lock, naming_file(self.path):
            self._length += self._file.write(text)

    def was_cut(self, length: int) -> None:
        """The file has so many bytes now."""
        self._length = length

    def flush(self, fsync: bool = False) -> int:
        """Hands all lines to the operating system; with `fsync` they are on the disk. Returns the
        length that the file has by what was written, whatever became of it.
        """
        length = self._length  # before it: another thread may append meanwhile
        with naming_file(self.path):
            self._file.flush()
        if fsync:
            flush_to_disk(self._file.fileno(), self.path)
        return length

    def close(self) -> None:
        with naming_file(self.path):
            self._file.close()


def read_lines(path: Path) -> Iterator[JsonDict]:
    """Returns the records of a file of lines, without their checks; see `read_rows`."""
    return read_rows(path, decode_line)


def read_rows(
    path: Path,
    decode: Callable[[bytes], T],
    seen: Callable[[bytes], object] = lambda text: None,
) -> Iterator[T]:
    """Yields the records of a file of lines. A last line without its end is still being written, or
    was torn by a crash, and is left out. Raises StateError for any other line that is not as it was
    written.

    decode: makes a record of a line's text, without its check; its msgspec.ValidationError becomes
    a StateError that names the line. seen: is given each line that is read.
    """
    with reaching(lambda: path.open("rb")) as file, naming_file(path):
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            seen(text)
            try:
                record = decode(without_digest(text))
            except msgspec.ValidationError as other:
                raise StateError(f"{path}:{number}: {other}.") from None
            except (ValueError, RecursionError) as broken:
                raise StateError(
                    f"{path}:{number}: not what was written there ({broken}); put the file back as "
                    f"it was, or delete this line to continue without it."
                ) from broken
            yield record


def last_lines(path: Path, most: int = 1, start: int = 0) -> list[str]:
    """Returns the last lines of a log, at most so many, and only what follows byte `start`; none if
    there is no such file.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - 16_384))
        return file.read().decode("utf-8", errors="replace").strip().splitlines()[-most:]
    return []


def repair(path: Path) -> None:
    """Cuts off a torn last line: a crash ended the process that wrote it."""
    if not path.exists():
        return
    with reaching(lambda: path.open("r+b")) as file, naming_file(path):
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


# -- files in memory -------------------------------------------------------------------------------
MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on

# By (device, inode), the mappings of a file that are in use.
_mapped: dict[tuple[int, int], weakref.WeakSet[mmap.mmap]] = {}


def copy_on_write(file: int) -> mmap.mmap:
    """Maps the file with that descriptor. Writing to the mapping does not change the file."""
    # Without MAP_NORESERVE the system refuses to map more than its memory, since all might be
    # written to.
    alone = mmap.MAP_PRIVATE | MAP_NORESERVE
    return mmap.mmap(file, 0, flags=alone, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def pages(path: str) -> memoryview:
    """Maps a file, for as long as anything refers to the bytes. Writing to them does not change the
    file.
    """
    file = open_descriptor(path, os.O_RDONLY | OWN)
    try:
        about = os.fstat(file)
        found = reaching(lambda: copy_on_write(file))  # it has a descriptor of its own
        _mapped.setdefault((about.st_dev, about.st_ino), weakref.WeakSet()).add(found)
    finally:
        os.close(file)
    return memoryview(found)


def is_read(path: str) -> bool:
    """Returns whether something refers to bytes of that file, which then must not change."""
    about = os.stat(path)
    name = about.st_dev, about.st_ino
    if _mapped.get(name):
        return True
    _mapped.pop(name, None)
    return False
