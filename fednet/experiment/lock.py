"""One process at a time works on a run's directory, and on a client's states.

`flock` decides, and the system takes it back from a process that ends in whatever way. On a shared
file system it may reach this machine alone. So the locked file names its holder, by a token that is
drawn anew each time: who takes the lock writes its own over what stood there, and a holder that
finds another's token writes no checkpoint any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from fednet.descriptors import named, reaching, synced
from fednet.errors import CannotGoOn, ConfigError, why
from fednet.files import opened

log = logging.getLogger(__name__)

try:
    import fcntl
except ImportError:  # on Windows, where the token alone tells who was the last to take it
    fcntl = None  # type: ignore[assignment]

ENDING_S = 10.0
"""The processes that a holder has started keep its lock; once it has ended, they may take so long
to end too.
"""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a locked file. started: of the process, see `started_at`. boot: which start of
    the machine the process belongs to. group: of processes that may work side by side; ids: clients
    it hosts.
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
        return (
            self.host == socket.gethostname()
            and self.boot == _boot()
            and self.started is not None
            and started_at(self.pid) == self.started
        )

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
        """Raises CannotGoOn where another process has taken it since: no lock of the file system's
        had kept that one away.
        """
        now = read(self.path)
        if now is None or now.token != self.holder.token:
            who = f"{now} has taken it over" if now is not None else f"{self.path.name} is gone"
            raise CannotGoOn(
                f"{self.path.parent} is not this process's any more: {who}; nothing more is "
                f"written there."
            )

    def release(self) -> None:
        """The file goes with it, where it is still this process's; a process that this one has
        forked leaves it alone.
        """
        if os.getpid() != self.holder.pid:
            return
        now = read(self.path)
        if now is not None and now.token == self.holder.token:
            with contextlib.suppress(PermissionError):  # Windows deletes no file that is open
                self.path.unlink(missing_ok=True)
        os.close(self._file)


def take(path: Path, group: str = "", ids: list[int] | None = None) -> Lock:
    """Locks that file, which is made if need be. Raises ConfigError that names the process that
    holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + ENDING_S
    while True:
        file = opened(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _locked(file):
            os.close(file)
            held = read(path)
            if (held is None or held.gone) and time.monotonic() < end:
                time.sleep(0.02)  # it is being written, or the holder's own processes are ending
                continue
            raise ConfigError(_in_use(path, held))
        if _is(file, path):  # else its holder has let go of it, and deleted it, in between
            break
        os.close(file)
    held = read(path)
    if held is not None and held.lives:
        os.close(file)
        raise ConfigError(_in_use(path, held))
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
    """Who holds that file, or held it when it ended; None where it says nobody."""
    try:
        return msgspec.json.decode(reaching(named(path).read_bytes), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def me(group: str = "", ids: list[int] | None = None) -> Holder:
    pid = os.getpid()
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        started=started_at(pid),
        boot=_boot(),
        token=secrets.token_hex(8),
        group=group,
        ids=ids or [],
    )


def started_at(pid: int) -> str | None:
    """When a process of this machine was started, since ids are used again; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _exists(pid)
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _exists(pid: int) -> str | None:
    """Where the system has no /proc."""
    if fcntl is None:  # signal 0 is no mere question on Windows
        return "?" if pid == os.getpid() else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _locked(file: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(file: int, path: Path) -> bool:
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
    if (held := read(directory / "lock")) is not None and held.lives and held.pid != os.getpid():
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
            for held in _holders(locks):
                _refuse_shared(folder, held, ids, self._group)
            clear(set(ids).difference(*(held.ids for held in _holders(locks))))
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
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_UN)


def _holders(locks: Path) -> list[Holder]:
    """Who holds the locks of this folder; those that nobody holds any more are deleted."""
    found = ((path, read(path)) for path in sorted(locks.glob("*.lock")))
    return [held for path, held in found if not _free(path, held) and held is not None]


def _free(path: Path, held: Holder | None) -> bool:
    """Whether nobody holds that lock any more; it is deleted then."""
    try:
        file = opened(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        free = _locked(file) and not (held is not None and held.lives)
        if free:
            path.unlink(missing_ok=True)
        return free
    finally:
        os.close(file)


def _refuse_shared(folder: Path, held: Holder, ids: Sequence[int], group: str) -> None:
    if group and held.group == group:
        return
    if common := sorted(set(ids) & set(held.ids)):
        raise ConfigError(
            f"--state: the state of client {common[0]} in {folder} is in use by {held}; give this "
            f"one a folder of its own, or stop that one."
        )
