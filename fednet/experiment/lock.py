"""One process at a time works on a run's directory, and on the states of a client.

The system's locks decide: it takes a lock back from a process that ends in whatever way. Processes
that its holder has forked keep it, so a run stays locked until they have ended too (the package
`filelock` lets go in a forked child). On a shared file system `flock` may reach this machine alone.
So a run's lock also names its holder, by a random token: who takes the lock writes its own token
there, and a holder that finds another token writes no checkpoint any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from fednet.descriptors import synced
from fednet.errors import CannotGoOn, ConfigError, StateError
from fednet.files import opened, read_value

log = logging.getLogger(__name__)

ENDING_S = 10.0  # how long the processes that a holder forked may take to end after it


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a lock's file."""

    host: str
    pid: int
    token: str

    @property
    def gone(self) -> bool:
        """Whether its process is known to have ended. Only one of this machine can be known."""
        return self.host == socket.gethostname() and started_at(self.pid) is None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def me() -> Holder:
    """This process as a holder, with a new token."""
    return Holder(host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(8))


def started_at(pid: int) -> str | None:
    """When a process of this machine was started, since ids are used again; None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


# -- a run's directory -----------------------------------------------------------------------------
class Lock:
    """A file that this process, and those that it has forked, hold locked."""

    def __init__(self, path: Path, file: int, holder: Holder) -> None:
        self.path, self._file, self.holder = path, file, holder

    def check(self) -> None:
        """Raises CannotGoOn where another process has taken the lock since, as one of another
        machine can where `flock` reaches this machine alone.
        """
        now = read(self.path)
        if now is None or now.token != self.holder.token:
            who = f"{now} has taken it over" if now is not None else f"{self.path.name} is gone"
            raise CannotGoOn(
                f"{self.path.parent} no longer belongs to this process: {who}; nothing more is "
                f"written there."
            )

    def release(self) -> None:
        """Deletes the file, unless another process has taken the lock. A forked process leaves the
        file alone.
        """
        if os.getpid() != self.holder.pid:
            return
        now = _read_or_none(self.path)
        if now is not None and now.token == self.holder.token:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def take(path: Path) -> Lock:
    """Locks that file, and makes it if need be. Raises ConfigError that names the process that
    holds it. What is in a file that nobody holds is overwritten, damaged or not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + ENDING_S
    while (file := _locked(path)) is None:
        held = _read_or_none(path)
        # Else it is being written or deleted, or what its holder forked is ending.
        if (held is not None and not held.gone) or time.monotonic() >= end:
            raise ConfigError(_in_use(path, held))
        time.sleep(0.02)
    mine = me()
    text = msgspec.json.encode(mine)
    try:
        os.pwrite(file, text, 0)
        os.ftruncate(file, len(text))
        synced(file, path)
    except OSError as broken:
        with contextlib.suppress(OSError):  # else it names this process as its holder
            path.unlink(missing_ok=True)
        os.close(file)
        broken.filename = broken.filename or str(path)
        raise
    return Lock(path, file, mine)


def _locked(path: Path) -> int | None:
    """The file, opened and locked; None where another process holds it, or has just deleted it."""
    file = opened(path, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)
    return None


def read(path: Path) -> Holder | None:
    """Who holds that file, or held it last; None where it names nobody, as while it is being made.
    Raises StateError where it is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size:
            return read_value(path, Holder, "delete it if no process works there any more")
    return None


def _read_or_none(path: Path) -> Holder | None:
    try:
        return read(path)
    except StateError as damaged:  # then the system's lock alone says whether anybody holds it
        log.warning("%s", damaged)
        return None


def _in_use(path: Path, held: Holder | None) -> str:
    who = str(held) if held is not None else "another process"
    if held is not None and held.gone:
        who = f"a process that {held}, which has ended, had started"
    return f"{path.parent} is in use by {who}; wait until it has ended, or stop it."


_held: dict[Path, Lock] = {}  # by directory: those of this process and of the one that forked it


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[None]:
    """Inside, the directory is locked. An empty one is not left behind."""
    lock = take(directory / "lock")
    _held[directory.resolve()] = lock
    try:
        yield
    finally:
        del _held[directory.resolve()]
        lock.release()
        with contextlib.suppress(OSError):  # not empty, as is the rule
            directory.rmdir()


def refuse_held(directory: Path) -> None:
    """Raises ConfigError that names the process, not this one, that holds the directory."""
    path = directory / "lock"
    held = read(path)
    if held is None or directory.resolve() in _held:
        return
    if (file := _locked(path)) is None:
        raise ConfigError(_in_use(path, held))
    os.close(file)


def inherited(directory: Path) -> bool:
    """Whether a process that forked this one holds the directory."""
    lock = _held.get(directory.resolve())
    return lock is not None and lock.holder.pid != os.getpid()


def check(directory: Path) -> None:
    """Raises CannotGoOn where a directory that this process held is another's now."""
    if (lock := _held.get(directory.resolve())) is not None:
        lock.check()


# -- the states of clients -------------------------------------------------------------------------
NAME_BYTES = 64  # of a client's part of the file: which process uses its state
GUARD = -1  # in place of a client: the part that is locked while others are being locked


class StatesHold:
    """A process's lock on the states of its clients in one folder: in a file that has a part for
    each client, which names the process that locked it. Processes that host other clients may share
    the folder. shared: so may processes that host the same ones; their launcher takes care of that.
    """

    def __init__(self, shared: bool = False) -> None:
        self._kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        self._file = -1

    def take(
        self,
        folder: Path,
        ids: Sequence[int],
        clear: Callable[[set[int]], None] = lambda ids: None,
    ) -> None:
        """Locks the states of `ids`, in place of those locked before. Raises ConfigError that names
        the process which uses the state of one of `ids`. clear: called with those of them that no
        other process uses, before one can.
        """
        self.release()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file = opened(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        name = f"process {os.getpid()} on {socket.gethostname()}".encode()[:NAME_BYTES]
        try:
            _lock_part(file, GUARD, fcntl.F_WRLCK)
            free = {client for client in ids if _lock_part(file, client, fcntl.F_WRLCK)}
            for client in ids:
                if client not in free and not _lock_part(file, client, self._kind):
                    other = os.pread(file, NAME_BYTES, _part(client)).rstrip(b"\0")
                    raise ConfigError(
                        f"--state: the state of client {client} in {folder} is in use by "
                        f"{other.decode(errors='replace')}; give this one a folder of its own, or "
                        f"stop that one."
                    )
            clear(free)
            for client in ids:
                os.pwrite(file, name.ljust(NAME_BYTES, b"\0"), _part(client))
                _lock_part(file, client, self._kind)
            _lock_part(file, GUARD, fcntl.F_UNLCK)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._file >= 0:
            # Processes that this one has forked do not keep it.
            _lock_part(self._file, GUARD, fcntl.F_UNLCK, nbytes=0)
            os.close(self._file)
            self._file = -1


def _part(client: int) -> int:
    """Where a client's part of the file begins."""
    return (client + 1) * NAME_BYTES


def _lock_part(file: int, client: int, kind: int, nbytes: int = NAME_BYTES) -> bool:
    """Locks the part of a client, or changes or ends its lock; False where another process has
    locked it. `GUARD` is waited for. kind: F_RDLCK, F_WRLCK, F_UNLCK. nbytes: 0 for all that
    follows. These are open file description locks, see fcntl(2).
    """
    command = fcntl.F_OFD_SETLKW if client == GUARD else fcntl.F_OFD_SETLK
    # struct flock: kind, whence, start, length, process
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, _part(client), nbytes, 0)
    try:
        fcntl.fcntl(file, command, request)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def alone(file: int) -> Iterator[None]:
    """Inside, no other process of this machine is inside with that file. A process that is forked
    meanwhile holds nothing up.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
