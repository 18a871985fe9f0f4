"""CURVE keys on disk, and who may speak for whom.

    DIR/server.key        the server's pair, mode 0600
    DIR/allowed/K         the public keys that may speak for client K, one a line, perhaps with
                          the time (UTC) until which, or "-", and the site's name; several ids
                          may share a key
    DIR/allowed.lock      locked while allowed keys are changed
    DIR/clients/K.key     pairs made by `lab`, for experiments in one hand;
                          else a client's pair is made at its site

A running server reads the allowed keys again when they change, and when a key's time is over. A key
is 40 characters of Z85. Secret keys are read only from files that nobody else can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import msgspec

from fednet import files
from fednet.errors import ConfigError
from fednet.files import alone, open_descriptor, read_bytes, write_aside, write_new
from fednet.ids import as_text

log = logging.getLogger(__name__)

KEY_LENGTH = 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NEVER = "-"  # in place of a time, where a key does not expire
_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


class Allowed(NamedTuple):
    """Until when a key may speak for a client, in seconds since the epoch, and its site's name, ""
    where it has none.
    """

    until: float = math.inf
    name: str = ""


class KeyEnd(NamedTuple):
    """When the last key of clients ends, in seconds since the epoch."""

    clients: tuple[int, ...]
    name: str
    until: float


@dataclass(frozen=True, slots=True)
class KeyPair:
    """`server`, in a client's file: the public key of the server it is meant for, where that is
    known.
    """

    public: str
    secret: str = field(repr=False)
    server: str | None = None


def make_server_keys(directory: str | Path) -> str:
    """Makes the server's pair in `directory`; returns the public key."""
    directory = Path(directory)
    (directory / "allowed").mkdir(parents=True, exist_ok=True)
    return make_client_keys(directory / "server.key")


def trust(file: str | Path, server: str) -> None:
    """Writes the public key of another server into a client's file."""
    pair = load(file)
    public = check_key(server.strip(), "the server's public key")
    write_aside(Path(file), _record(pair.public, pair.secret, public), 0o600)


def make_client_keys(file: str | Path, server: str | None = None) -> str:
    """Make a client's pair in `file`; returns the public key, the half that travels to the server's
    `allow`. Raises ConfigError if there is one already.
    """
    from fednet.transport.zeromq.sockets import new_curve_pair

    if server is not None:
        check_key(server, "the server's public key")
    public, secret = new_curve_pair()
    while public.startswith("-"):  # on a command line it would pass for a flag
        public, secret = new_curve_pair()
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_new(path, _record(public, secret, server), 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: there is a key already, and keys are never overwritten."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from None
    return public


def allow(
    directory: str | Path,
    ids: Iterable[int],
    public: str,
    until: float = math.inf,
    name: str = "",
) -> None:
    """Adds a public key, whose holder may run the clients `ids`; keys allowed before stay allowed.
    until: seconds since the epoch. name: of the site, that people see; "": as it was. A running
    server notices. Raises ConfigError.
    """
    public = check_key(public.strip(), "the public key")
    if name:
        checked_name(name, "--name")
    with _changing(directory) as allowed:
        for k in ids:
            known = _read_keys(allowed / str(k)) if (allowed / str(k)).exists() else {}
            before = known.get(public, Allowed())
            _write_keys(allowed / str(k), {**known, public: Allowed(until, name or before.name)})


def revoke(directory: str | Path, ids: Iterable[int], public: str | None = None) -> None:
    """From now on nobody may speak for `ids`, or not the holder of `public`. Raises ConfigError if
    nobody could.
    """
    with _changing(directory) as allowed:
        for k in ids:
            file = allowed / str(k)
            known = _read_keys(file) if file.exists() else {}
            if not known or (public is not None and public.strip() not in known):
                which = "such key" if public else "key"
                raise ConfigError(f"{allowed}: client {k} has no {which} to revoke.")
            left = {} if public is None else {k: t for k, t in known.items() if k != public.strip()}
            if left:
                _write_keys(file, left)
            else:
                file.unlink()


def fingerprint(public: str) -> str:
    """Sixteen hexadecimal digits by which people compare a public key."""
    return hashlib.sha256(public.encode("ascii")).hexdigest()[:16]


def all_keys(directory: str | Path) -> list[tuple[tuple[int, ...], str, Allowed]]:
    """Every allowed key, by client: (the clients it is for, the key, until when and the site's
    name). A key has one entry for each date and name. Raises ConfigError.
    """
    found: dict[tuple[str, Allowed], list[int]] = {}
    for file in files.list_folder(_allowed_folder(directory)):
        if file.name.isdecimal():
            for key in _read_keys(file).items():
                found.setdefault(key, []).append(int(file.name))
    return sorted((tuple(sorted(ks)), public, allowed) for (public, allowed), ks in found.items())


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
        if mode & 0o077 and not path.is_dir():
            raise ConfigError(
                f"{path}: a secret must be readable by its owner only; its mode is {mode:04o}, "
                f"expected 0600: chmod 600 {path}"
            )
        found = msgspec.json.decode(read_bytes(path), type=dict[str, str])
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file; make one with `fednet keys`.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError:  # also of bytes that are no text
        found = {}
    if not {"public", "secret"} <= found.keys() <= {"public", "secret", "server"}:
        raise ConfigError(
            f"{path}: not a key file of fednet: expected the keys public, secret and perhaps "
            f"server."
        )
    return KeyPair(**{name: check_key(key, f"{path}: {name}") for name, key in found.items()})


def check_key(key: str, where: str) -> str:
    """`key`, if it is a key. The text of an error never shows it: it might be the secret half."""
    if len(key) != KEY_LENGTH or not _Z85.issuperset(key):
        raise ConfigError(
            f"{where}: expected a key of {KEY_LENGTH} Z85 characters, found {len(key)} characters."
        )
    return key


class Keyring:
    """The server's pair, and its clients' public keys as they stand in `directory` now.

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
        self._expired: dict[str, list[int]] = {}  # by key that has expired: the clients it was for
        self._names: dict[int, str] = {}
        self.ends: list[KeyEnd] = []
        """When clients' last keys end, the first to end first; without those that never end."""
        self._former: frozenset[str] = frozenset()  # all that were known to this process
        self._read_at: tuple[int, int] | None = None
        # From when until when what was read holds: no key expires in between. A clock that was set
        # wrong may also go back.
        self._since = -math.inf
        self._over = math.inf
        self.version = 0
        """Rises whenever the set of allowed keys changes."""
        self.refresh()

    def refresh(self) -> None:
        """Read again what has changed."""
        allowed = self.directory / "allowed"
        try:
            now = allowed.stat()
        except FileNotFoundError:
            self.version += bool(self._known)
            self._speakers = {}
            self._known = frozenset()
            self._read_at = None
            self._expired = {}
            self._names = {}
            self.ends = []
            return
        mark = (now.st_mtime_ns, now.st_ino)
        at = time.time()
        if mark == self._read_at and self._since <= at < self._over:
            return
        before = self._speakers
        first = self.version == 0
        self._speakers = {}
        self._since = -math.inf
        self._over = math.inf
        expired: dict[str, list[int]] = {}
        names: dict[int, str] = {}
        ends: dict[tuple[float, str], list[int]] = {}
        for entry in files.list_folder(allowed):
            if not entry.name.isdecimal():
                continue  # an editor's backup, or a file half written by `allow`
            try:
                known = _read_keys(entry)
            except FileNotFoundError:
                continue  # revoked this moment
            except ConfigError as error:
                if first:
                    raise
                # No reason to stop a round.
                log.warning("%s Nobody may speak for client %s.", error, entry.name)
                continue
            client = int(entry.name)
            valid = {key: one.until for key, one in known.items() if one.until > at}
            self._over = min(self._over, *valid.values(), math.inf)
            for key in known.keys() - valid.keys():
                self._since = max(self._since, known[key].until)
                expired.setdefault(key, []).append(client)
            self._speakers[client] = frozenset(valid)
            last = max(known.values(), default=Allowed(), key=lambda one: one.until)
            named = [one for one in known.values() if one.name]
            names[client] = max(named, default=last, key=lambda one: one.until).name
            ends.setdefault((last.until, names[client]), []).append(client)
        self._names = names
        self.ends = [
            KeyEnd(tuple(sorted(clients)), name, until)
            for (until, name), clients in sorted(ends.items())
            if until < math.inf
        ]
        self._known = frozenset().union(*self._speakers.values())
        self._expired = expired
        self._former = self._former | self._known
        # The clock behind mtime ticks every few milliseconds: a change within the same tick would
        # go unseen, so a directory that changed just now is read once more next time.
        settled = time.time_ns() - now.st_mtime_ns > 50_000_000
        self._read_at = mark if settled else None
        if first or self._speakers != before:
            self.version += 1

    def allows(self, user: str) -> bool:
        """Whether `user`, a public key, may connect at all: whether it may speak for anybody."""
        self.refresh()
        return user in self._known

    def why_not(self, user: str) -> str:
        """Why that public key may not connect."""
        if user in self._expired:
            return "key expired"
        return "key revoked" if user in self._former else "key not allowed"

    def why_named(self, user: str) -> str:
        """Why that public key may not connect, which it is, and which clients it was for until it
        expired.
        """
        clients = self._expired.get(user)
        said = f"{self.why_not(user)}: {user}"
        if not clients:
            return said
        name = self.name(clients[0])
        whose = f"client {as_text(clients)}, {name}" if name else f"client {as_text(clients)}"
        return f"{said} (of {whose})"

    def name(self, client_id: int) -> str:
        """The name of the client's site, "" where it has none."""
        return self._names.get(client_id, "")

    def lacking(self, client_id: int) -> str:
        """Why no key may speak for the client, as of the last `refresh`; "" if one may."""
        speakers = self._speakers.get(client_id)
        if speakers is None:
            return "no key is allowed"
        return "" if speakers else "key expired"

    def refusal(self, user: str | None, client_id: int) -> str:
        """Why that public key may not speak for the client; "" if it may."""
        self.refresh()
        if user is not None and user in self._speakers.get(client_id, ()):
            return ""
        expired = user is not None and client_id in self._expired.get(user, ())
        return "key expired" if expired else "key revoked"


def _allowed_folder(directory: str | Path) -> Path:
    found = Path(directory) / "allowed"
    if not found.is_dir():
        raise ConfigError(
            f"{directory}: no such directory of keys; `fednet keys server {directory}` makes it."
        )
    return found


@contextlib.contextmanager
def _changing(directory: str | Path) -> Iterator[Path]:
    """Gives the folder of allowed keys to one process at a time: each writes what it has read
    together with its own change.
    """
    allowed = _allowed_folder(directory)
    lock = allowed.with_name("allowed.lock")
    file = open_descriptor(lock, os.O_RDWR | os.O_CREAT)
    try:
        with alone(file, lock):
            yield allowed
    finally:
        os.close(file)


def checked_name(name: str, where: str) -> str:
    """`name`, if a site may have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: expected a site's name of up to 64 letters, digits, '.', '_' and '-', such "
            f"as uke, found {name!r}."
        )
    return name


def _read_keys(file: Path) -> dict[str, Allowed]:
    """By key, until when it is allowed, and its site's name."""
    found: dict[str, Allowed] = {}
    for line in read_bytes(file).decode("ascii", errors="replace").splitlines():
        if line.strip():
            fields = line.split()
            key = fields[0]
            date = fields[1] if len(fields) > 1 else NEVER
            name = fields[2] if len(fields) > 2 else ""
            until = math.inf if date == NEVER else time_of(date, f"{file}")
            if name:
                checked_name(name, f"{file}")
            found[check_key(key, f"{file}")] = Allowed(until, name)
    return found


def _write_keys(file: Path, keys: dict[str, Allowed]) -> None:
    text = ""
    for key, (until, name) in keys.items():
        fields = [key]
        if until < math.inf or name:
            fields.append(NEVER if until == math.inf else date_text(until))
        text += " ".join([*fields, name]).rstrip() + "\n"
    write_aside(file, text, 0o644)


def date_text(at: float) -> str:
    """A time as `time_of` reads it, UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def time_of(text: str, where: str) -> float:
    """A time such as 2027-01-31, 2027-01-31T18:00:00 or 2027-01-31T18:00:00+05:00 in seconds since
    the epoch. One without a zone is UTC. Raises ConfigError.
    """
    # Python 3.10 does not know the zone Z.
    written = re.sub("[Zz]$", "+00:00", text.strip())
    try:
        found = datetime.fromisoformat(written)
        if found.tzinfo is None:
            found = found.replace(tzinfo=timezone.utc)
        return found.astimezone(timezone.utc).timestamp()
    except (ValueError, OverflowError):  # the latter of the first and last days there are
        raise ConfigError(
            f"{where}: expected a time such as 2027-01-31 or 2027-01-31T18:00:00 (UTC), or "
            f"2027-01-31T18:00:00+05:00, found {text.strip()!r}."
        ) from None


def _record(public: str, secret: str, server: str | None) -> str:
    """The text of a key file."""
    record = {"public": public, "secret": secret, "server": server}
    return json.dumps({k: v for k, v in record.items() if v is not None}, indent=1) + "\n"
