"""One process at a time works on a run's directory, and on a client's states.

`flock` decides, and the system takes it back from a process that ends in whatever way. It is kept
by the processes that a holder has forked: a run stays locked until they have ended too (which the
package `filelock` does not do: it lets go in a forked child). On a shared file system it may reach
this machine alone. So the locked file names its holder, by a token that is drawn each time: who
takes the lock writes its own over what was there, and a holder that finds another's token writes no
checkpoint any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from fednet.descriptors import synced
from fednet.errors import CannotGoOn, ConfigError, StateError, why
from fednet.files import opened, read_value

log = logging.getLogger(__name__)

ENDING_S = 10.0  # for so long the processes that a holder started may take to end after it
REMEDY = "delete it where no process works there any more"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a locked file. started: of the process, see `started_at`. boot: which start of the
    machine the process belongs to. group: of processes that may work side by side; ids: clients it
    hosts.
    """

    host: str
    pid: int
    started: str | None
    boot: str
    token: str
    group: str = ""
    ids: list[int] = []

    @property
    def lives(self) -> bool:
        """Whether its process is known to live: it is one of this machine's."""
        here = self.host == socket.gethostname() and self.boot == _boot()
        return here and self.started is not None and started_at(self.pid) == self.started

    @property
    def gone(self) -> bool:
        """Whether its process is known to have ended."""
        return self.host == socket.gethostname() and not self.lives

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """A file that this process, and those that it has forked, hold locked."""

    def __init__(self, path: Path, file: int, holder: Holder) -> None:
        self.path, self._file, self.holder = path, file, holder

    def check(self) -> None:
        """Raises CannotGoOn where another process has taken it since, which no lock of the file
        system had kept away.
        """
        now = read(self.path)
        if now is None or now.token != self.holder.token:
            who = f"{now} has taken it over" if now is not None else f"{self.path.name} is gone"
            raise CannotGoOn(
                f"{self.path.parent} is not this process's any more: {who}; nothing more is "
                f"written there."
            )

    def release(self) -> None:
        """Deletes the file, where it is still this process's; a process that this one has forked
        leaves it alone.
        """
        if os.getpid() != self.holder.pid:
            return
        now = _read_any(self.path)
        if now is not None and now.token == self.holder.token:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def take(path: Path, group: str = "", ids: Sequence[int] = ()) -> Lock:
    """Locks that file, which is made if need be. Raises ConfigError that names the process that
    holds it. What it says although nobody holds it is written over, damaged or not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + ENDING_S
    while True:
        file = opened(path, os.O_RDWR | os.O_CREAT, 0o644)
        locked, held = _locked(file), _read_any(path)
        if locked and _is(file, path) and not (held is not None and held.lives):
            break
        os.close(file)
        if locked and held is not None and held.lives:
            raise ConfigError(_in_use(path, held))
        # It is being written or deleted, or the holder's own processes are ending.
        if not locked and ((held is not None and not held.gone) or time.monotonic() >= end):
            raise ConfigError(_in_use(path, held))
        if not locked:
            time.sleep(0.02)
    mine = me(group, ids)
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


def read(path: Path) -> Holder | None:
    """Who holds that file, or held it when it ended; None where it says nobody, as while it is
    being made. Raises StateError where it is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size:
            return read_value(path, Holder, REMEDY)
    return None


def _read_any(path: Path) -> Holder | None:
    """The same; None where it is damaged: then the lock itself says whether anybody holds it."""
    try:
        return read(path)
    except StateError as damaged:
        log.warning("%s", damaged)
        return None


def me(group: str = "", ids: Sequence[int] = ()) -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started_at(os.getpid()),
        boot=_boot(),
        token=secrets.token_hex(8),
        group=group,
        ids=list(ids),
    )


def started_at(pid: int) -> str | None:
    """When a process of this machine was started, since ids are used again; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(file: int, path: Path) -> bool:
    """Whether its holder has not let go of it, and deleted it, in between."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _in_use(path: Path, held: Holder | None) -> str:
    who = str(held) if held is not None else "another process"
    if held is not None and held.gone:
        who = f"a process that {held}, which has ended, had started"
    return f"{path.parent} is in use by {who}; wait until it has ended, or stop it."


# -- a run's directory -----------------------------------------------------------------------------
_held: dict[Path, Lock] = {}  # by directory: those of this process and of whoever forked it


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[None]:
    """The directory is this process's own meanwhile. An empty one is not left behind."""
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
    """Raises ConfigError that names the process, not this one, that is known to hold it."""
    held = read(directory / "lock")
    if held is not None and held.lives and held.pid != os.getpid():
        raise ConfigError(_in_use(directory / "lock", held))


def inherited(directory: Path) -> bool:
    """Whether not this process holds the directory, but one that has forked it."""
    lock = _held.get(directory.resolve())
    return lock is not None and lock.holder.pid != os.getpid()


def check(directory: Path) -> None:
    """Raises CannotGoOn where a directory that this process held is another's now."""
    if (lock := _held.get(directory.resolve())) is not None:
        lock.check()


# -- the states of clients -------------------------------------------------------------------------
class StatesHold:
    """A process's hold on the states of its clients in one folder: several processes may share the
    folder, each with clients of its own. group: those of one may host the same clients, since
    whoever started them looks after that.
    """

    def __init__(self, group: str = "") -> None:
        self._group = group
        self._lock: Lock | None = None
        self._clear: Callable[[set[int]], None] = lambda ids: None

    def take(
        self,
        folder: Path,
        ids: Sequence[int],
        clear: Callable[[set[int]], None] = lambda ids: None,
    ) -> None:
        """Locks the states of `ids`, in place of what was held before. Raises ConfigError that
        names the process which holds the state of one of `ids`. clear: called, now and when they
        are released, with those of them that no other process holds, before one can.
        """
        self.release()
        locks = folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with _alone(locks):
            others = _holders(locks)
            for held in others:
                common = sorted(set(ids) & set(held.ids))
                if common and not (self._group and held.group == self._group):
                    raise ConfigError(
                        f"--state: the state of client {common[0]} in {folder} is in use by "
                        f"{held}; give this one a folder of its own, or stop that one."
                    )
            clear(set(ids).difference(*(held.ids for held in others)))
            self._lock = take(locks / f"{secrets.token_hex(8)}.lock", self._group, sorted(ids))
            self._clear = clear

    def release(self) -> None:
        """Where the folder is gone or no longer to be written, the hold ends with the process."""
        mine, self._lock = self._lock, None
        if mine is None:
            return
        locks = mine.path.parent
        try:
            with _alone(locks):
                mine.release()
                others = (held.ids for held in _holders(locks))
                self._clear(set(mine.holder.ids).difference(*others))
        except OSError as broken:
            log.warning("the hold on states ends with this process: %s", why(broken))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Among the processes that take or look at the locks of this folder."""
    file = opened(folder / "taking", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with alone(file):
            yield
    finally:
        os.close(file)


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


def _holders(locks: Path) -> list[Holder]:
    """Who holds the locks of this folder; those that nobody holds any more are deleted. Raises
    StateError for one that is held and damaged: whose clients are meant cannot be told.
    """
    found = []
    for path in sorted(locks.glob("*.lock")):
        with contextlib.suppress(FileNotFoundError):
            file = opened(path, os.O_RDWR)
            try:
                held = _read_any(path)
                if _locked(file) and not (held is not None and held.lives):
                    path.unlink(missing_ok=True)
                elif (held := read(path)) is not None:
                    found.append(held)
            finally:
                os.close(file)
    return found
