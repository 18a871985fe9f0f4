"""One process at a time uses the state of a client. The system's locks decide: it takes a lock back
from a process that ends in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from fednet.errors import ConfigError
from fednet.files import locking, naming_file, open_descriptor

NAME_BYTES = 64  # of a client's part of the file: which process uses its state


class StatesHold:
    """Locks the states of a process's clients in one folder. The folder's file `lock` has a part
    for each client; it is locked while a process uses the client's state, and names that process.
    Processes that host other clients may share the folder. shared: so may processes that host the
    same ones; their launcher takes care of that.
    """

    def __init__(self, shared: bool = False) -> None:
        self._kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        self._file = -1

    def take(self, folder: Path, ids: Iterable[int]) -> None:
        """Locks the states of `ids`, in place of those locked before. Raises ConfigError that names
        the process which uses the state of one of `ids`.
        """
        self.release()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lock"
        self._file = open_descriptor(path, os.O_RDWR | os.O_CREAT, 0o644)
        name = f"process {os.getpid()} on {socket.gethostname()}".encode()[:NAME_BYTES]
        # Ascending: of two processes that want some of the same clients, one gets all of them.
        for client in sorted(ids):
            with locking(path):
                free = _lock_part(self._file, self._kind, client * NAME_BYTES, NAME_BYTES)
            if not free:
                other = os.pread(self._file, NAME_BYTES, client * NAME_BYTES).rstrip(b"\0")
                self.release()
                raise ConfigError(
                    f"--state: the state of client {client} in {folder} is in use by "
                    f"{other.decode(errors='replace') or 'another process'}; give this one a "
                    f"folder of its own, or stop that one."
                )
            with naming_file(path):
                os.pwrite(self._file, name.ljust(NAME_BYTES, b"\0"), client * NAME_BYTES)

    def release(self) -> None:
        if self._file >= 0:
            # Processes that this one has forked do not keep it.
            with contextlib.suppress(OSError):  # there are no locks: `take` has said so
                _lock_part(self._file, fcntl.F_UNLCK, 0, 0)
            os.close(self._file)
            self._file = -1


def _lock_part(file: int, kind: int, start: int, nbytes: int) -> bool:
    """Locks a part of a file, or ends its lock; nbytes: 0 for all that follows. Returns False if
    another process has locked it. kind: F_RDLCK, F_WRLCK, F_UNLCK. These are open file description
    locks, see fcntl(2).
    """
    # struct flock: kind, whence, start, length, process
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, nbytes, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True
