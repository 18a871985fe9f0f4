"""One process at a time works on a run's directory.

The system's locks decide: it takes a lock back from a process that ends in whatever way. Processes
that its holder has forked keep it, so a run stays locked until they have ended too (the package
`filelock` lets go in a forked child). On a shared file system `flock` may reach this machine alone.
So a run's lock also names its holder, by a random token: who takes the lock writes its own token
there, and a holder that finds another token writes no checkpoint any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fednet import proc
from fednet.descriptors import flush_to_disk
from fednet.errors import CannotGoOn, ConfigError
from fednet.files import locking, open_descriptor, read_bytes

ENDING_S = 3.0  # how long the processes that a killed holder forked may take to end after it


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that a lock's file names."""

    host: str
    pid: int
    token: str

    @property
    def gone(self) -> bool:
        """Returns whether its process is known to have ended: only one of this machine can be."""
        return self.host == socket.gethostname() and not proc.running(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def me() -> Holder:
    """Returns this process as a holder, with a new token."""
    return Holder(host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(8))


# -- a run's directory -----------------------------------------------------------------------------
class Lock:
    """Holds a file locked, for this process and those that it has forked."""

    def __init__(self, path: Path, file: int, holder: Holder) -> None:
        self.path = path
        self._file = file
        self.holder = holder

    def release(self) -> None:
        """Deletes the file, unless another process, or one that has forked this one, holds it."""
        if os.getpid() != self.holder.pid:
            return
        now = read(self.path)
        if now is not None and now.token == self.holder.token:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def take(path: Path) -> Lock:
    """Locks that file, and makes it if need be. Raises ConfigError that names the process that
    holds it. What is in a file that nobody holds is overwritten, damaged or not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + ENDING_S
    while (file := _lock_file(path)) is None:
        held = read(path)
        # Else it is being written or deleted, or what its holder forked is ending.
        if (held is not None and not held.gone) or time.monotonic() >= end:
            raise ConfigError(_in_use(path))
        time.sleep(0.02)
    mine = me()
    text = msgspec.json.encode(mine)
    try:
        os.pwrite(file, text, 0)
        os.ftruncate(file, len(text))
        flush_to_disk(file, path)
    except OSError as broken:  # a full disk
        path.unlink(missing_ok=True)
        os.close(file)
        raise OSError(broken.errno, broken.strerror, str(path)) from broken
    return Lock(path, file, mine)


def _lock_file(path: Path) -> int | None:
    """Returns the file, opened and locked; None if another process holds or has just deleted it."""
    file = open_descriptor(path, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.ExitStack() as unlocked:
        unlocked.callback(os.close, file)
        with contextlib.suppress(BlockingIOError, FileNotFoundError), locking(path):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                unlocked.pop_all()
                return file
    return None


def read(path: Path) -> Holder | None:
    """Returns who holds that file, or held it last; None if it names nobody, or nobody yet."""
    try:
        return msgspec.json.decode(read_bytes(path), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _in_use(path: Path) -> str:
    who = read(path) or "another process"
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
    if not path.exists() or directory.resolve() in _held:
        return
    if (file := _lock_file(path)) is None:
        raise ConfigError(_in_use(path))
    os.close(file)


def check(directory: Path) -> None:
    """Raises CannotGoOn if a directory that this process held is another's now, as one of another
    machine can take it where `flock` reaches this machine alone.
    """
    lock = _held.get(directory.resolve())
    if lock is None:
        return
    now = read(lock.path)
    if now is None or now.token != lock.holder.token:
        raise CannotGoOn(
            f"{lock.path.parent} no longer belongs to this process: its file {lock.path.name} "
            f"names {now or 'nobody'}; nothing more is written there."
        )
