"""CURVE keys on disk, and who may speak for whom.

    DIR/server.key        the server's pair, mode 0600
    DIR/allowed/K         the public keys that may speak for client K, one a line;
                          several ids may share a key
    DIR/clients/K.key     pairs made by `lab`, for experiments in one hand;
                          else a client's pair is made at its site

A key is 40 characters of Z85. Secret keys are read only from files that nobody else can read.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fednet.descriptors import reaching
from fednet.errors import ConfigError
from fednet.files import write_aside

log = logging.getLogger(__name__)

KEY_LENGTH = 40
_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """`server`, in a client's file: the public key of the server it is meant for, where that is
    known.
    """

    public: str
    secret: str = field(repr=False)
    server: str | None = None


def make_server_keys(directory: str | Path) -> str:
    """Make the server's pair in `directory`; returns the public key. Raises ConfigError if there is
    one already.
    """
    directory = Path(directory)
    (directory / "allowed").mkdir(parents=True, exist_ok=True)
    return _make(directory / "server.key")


def make_client_keys(file: str | Path, server: str | None = None) -> str:
    """Make a client's pair in `file`; returns the public key, the half that travels to the server's
    `allow`.
    """
    return _make(Path(file), server)


def allow(directory: str | Path, ids: Iterable[int], public: str) -> None:
    """From now on the holder of `public` may speak for `ids`, beside whoever may already. A running
    server notices.
    """
    public = checked(public.strip(), "the public key")
    allowed = _allowed(directory)
    for k in ids:
        keys = _read_keys(allowed / str(k)) if (allowed / str(k)).exists() else []
        if public not in keys:
            write_aside(allowed / str(k), "".join(f"{key}\n" for key in [*keys, public]), 0o644)


def revoke(directory: str | Path, ids: Iterable[int]) -> None:
    """From now on nobody may speak for `ids`. Raises ConfigError if nobody could."""
    allowed = _allowed(directory)
    for k in ids:
        try:
            (allowed / str(k)).unlink()
        except FileNotFoundError:
            raise ConfigError(f"{allowed}: client {k} has no key to revoke.") from None


def lab(directory: str | Path, clients: int) -> list[Path]:
    """All keys at once: the server's, one for each of `clients` ids, and clients/all.key, which may
    speak for every id.

    Returns the clients' key files, in id order, then all.key.
    """
    directory = Path(directory)
    server = make_server_keys(directory)
    (directory / "clients").mkdir(mode=0o700, exist_ok=True)
    files = [directory / "clients" / f"{k}.key" for k in range(clients)]
    for k, file in enumerate(files):
        allow(directory, [k], make_client_keys(file, server))
    everybody = directory / "clients" / "all.key"
    allow(directory, range(clients), make_client_keys(everybody, server))
    return [*files, everybody]


def load(file: str | Path) -> KeyPair:
    """The pair in `file`. Raises ConfigError if it is missing, no key file, or readable by
    others.
    """
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{path}: a secret key must be readable by its owner only; its mode is "
                f"{mode:04o}, "
                f"expected 0600: chmod 600 {path}"
            )
        found = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file; make one with `fednet keys`.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"{path}: not a key file of fednet.") from None
    if not isinstance(found, dict) or not {"public", "secret"} <= found.keys() <= {
        "public",
        "secret",
        "server",
    }:
        raise ConfigError(
            f"{path}: not a key file of fednet: expected the keys public, secret and perhaps "
            f"server."
        )
    return KeyPair(**{name: checked(key, f"{path}: {name}") for name, key in found.items()})


def checked(key: object, where: str) -> str:
    """`key`, if it is a key. The text of an error never shows it: it might be the secret half."""
    if not isinstance(key, str) or len(key) != KEY_LENGTH or not _Z85.issuperset(key):
        found = f"{len(key)} characters" if isinstance(key, str) else f"a {type(key).__name__}"
        raise ConfigError(f"{where}: expected a key of {KEY_LENGTH} Z85 characters, found {found}.")
    return key


class Keyring:
    """The server's pair and its clients' public keys, as they stand in `directory` now.

    Every change goes through a rename or an unlink, so the directory's time tells whether to read
    again.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ConfigError(
                f"{self.directory}: no such directory of keys; `fednet keys server "
                f"{self.directory}`."
            )
        self.pair = load(self.directory / "server.key")
        self._speakers: dict[int, frozenset[str]] = {}
        self._known: frozenset[str] = frozenset()
        self._read_at: tuple[int, int] | None = None
        self.version = 0
        """Rises when who may speak for whom has changed."""
        self.refresh()

    def refresh(self) -> None:
        """Read again what has changed."""
        allowed = self.directory / "allowed"
        try:
            now = allowed.stat()
        except FileNotFoundError:
            self.version += bool(self._known)
            self._speakers, self._known, self._read_at = {}, frozenset(), None
            return
        mark = (now.st_mtime_ns, now.st_ino)
        if mark == self._read_at:
            return
        before, first = self._speakers, self.version == 0
        self._speakers = {}
        for entry in reaching(lambda: list(allowed.iterdir())):
            if not entry.name.isdecimal():
                continue  # an editor's backup, or a file half written by `allow`
            try:
                self._speakers[int(entry.name)] = frozenset(_read_keys(entry))
            except FileNotFoundError:
                continue  # revoked this moment
            except ConfigError as error:
                if first:
                    raise
                # No reason to stop a round.
                log.warning("%s Nobody may speak for client %s.", error, entry.name)
        self._known = frozenset().union(*self._speakers.values())
        # The clock behind mtime ticks every few milliseconds: a change within the same tick would
        # go unseen, so a directory that changed just now is read once more next time.
        settled = time.time_ns() - now.st_mtime_ns > 50_000_000
        self._read_at = mark if settled else None
        self.version += first or self._speakers != before

    def allows(self, user: str) -> bool:
        """Whether `user`, a public key, may connect at all: whether it may speak for anybody."""
        self.refresh()
        return user in self._known

    def may_speak_for(self, user: str | None, client_id: int) -> bool:
        self.refresh()
        return user is not None and user in self._speakers.get(client_id, ())


def _allowed(directory: str | Path) -> Path:
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory of keys; `fednet keys server {directory}` makes it."
        )
    (directory / "allowed").mkdir(exist_ok=True)
    return directory / "allowed"


def _read_keys(file: Path) -> list[str]:
    lines = (
        line.strip()
        for line in reaching(file.read_bytes).decode("ascii", errors="replace").splitlines()
    )
    return [checked(line, f"{file}") for line in lines if line]


def _make(path: Path, server: str | None = None) -> str:
    from fednet.transport.zeromq.sockets import new_curve_pair

    if server is not None:
        checked(server, "the server's public key")
    public, secret = new_curve_pair()
    while public.startswith("-"):  # on a command line it would pass for a flag
        public, secret = new_curve_pair()
    record = {"public": public, "secret": secret} | (
        {"server": server} if server is not None else {}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: there is a key already, and keys are never overwritten."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as out:
        json.dump(record, out, indent=1)
        out.write("\n")
    return public
