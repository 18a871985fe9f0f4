"""CURVE keys on disk, and who may speak for whom.

    DIR/server.key        the server's pair, mode 0600
    DIR/next.key          its next one, which `switch` puts in that one's place
    DIR/allowed/K         the public keys that may speak for client K, one a line, perhaps with
                          the time (UTC) until which; several ids may share a key
    DIR/revoked           the keys that were revoked, with client and time (UTC), for the list
    DIR/clients/K.key     pairs made by `lab`, for experiments in one hand;
                          else a client's pair is made at its site

A running server reads all of it again when it changes, and when a key's time is over. A key is 40
characters of Z85. Secret keys are read only from files that nobody else can read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from fednet.descriptors import named, reaching
from fednet.errors import ConfigError
from fednet.files import write_aside, write_new
from fednet.ids import as_text

log = logging.getLogger(__name__)

KEY_LENGTH = 40
_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """`server`, in a client's file: the public key of the server it is meant for, where that is
    known; `servers`: others that it may have by now.
    """

    public: str
    secret: str = field(repr=False)
    server: str | None = None
    servers: tuple[str, ...] = ()


def make_server_keys(directory: str | Path, following: bool = False) -> str:
    """Make the server's pair in `directory`, or the one that is to follow it; returns the public
    key. Raises ConfigError if there is one already.
    """
    directory = Path(directory)
    (directory / "allowed").mkdir(parents=True, exist_ok=True)
    return _make(directory / ("next.key" if following else "server.key"))


def switch(directory: str | Path) -> str:
    """The next pair takes the place of the server's; returns its public key. A running server hangs
    up on everybody, who come back if they know that key.
    """
    directory = Path(directory)
    if not (directory / "next.key").exists():
        made = f"make it with `fednet keys server {directory} --next`"
        raise ConfigError(f"{directory}: the server has no next pair of keys; {made}.")
    public = load(directory / "next.key").public
    os.replace(directory / "next.key", directory / "server.key")
    return public


def trust(file: str | Path, server: str) -> None:
    """Adds a public key to those that a client's file says its server may have."""
    path, server = Path(file), checked(server.strip(), "the server's public key")
    pair = load(path)
    known = [key for key in (pair.server, *pair.servers) if key is not None and key != server]
    record = {"public": pair.public, "secret": pair.secret, "server": server}
    more = {"servers": known} if known else {}
    write_aside(path, json.dumps({**record, **more}, indent=1) + "\n", 0o600)


def trusting(file: str | Path, pair: KeyPair, announced: str | None = None) -> KeyPair:
    """`pair`, with the servers' keys that stand in its file by now, or else the one that its run
    announced. What cannot be read is no reason to stop: then those that were known stay.
    """
    try:
        found = load(file)
    except ConfigError as error:
        log.warning("%s This client keeps the server's keys that it knows.", error)
        return pair
    if found.server is None:
        return replace(pair, server=announced or pair.server)
    return replace(pair, server=found.server, servers=found.servers)


def make_client_keys(file: str | Path, server: str | None = None) -> str:
    """Make a client's pair in `file`; returns the public key, the half that travels to the server's
    `allow`.
    """
    return _make(Path(file), server)


def allow(directory: str | Path, ids: Iterable[int], public: str, until: float = math.inf) -> None:
    """From now on the holder of `public` may speak for `ids`, beside whoever may already. until:
    seconds since the epoch. A running server notices.
    """
    public = checked(public.strip(), "the public key")
    allowed = _allowed(directory)
    for k in ids:
        known = _read_keys(allowed / str(k)) if (allowed / str(k)).exists() else {}
        _write_keys(allowed / str(k), {**known, public: until})


def revoke(directory: str | Path, ids: Iterable[int], public: str | None = None) -> None:
    """From now on nobody may speak for `ids`, or not the holder of `public`. Raises ConfigError if
    nobody could.
    """
    allowed, now = _allowed(directory), time.time()
    for k in ids:
        file = allowed / str(k)
        known = _read_keys(file) if file.exists() else {}
        if not known or (public is not None and public.strip() not in known):
            raise ConfigError(
                f"{allowed}: client {k} has no {'such ' * bool(public)}key to revoke."
            )
        left = {} if public is None else {k: t for k, t in known.items() if k != public.strip()}
        _note_revoked(directory, k, known.keys() - left.keys(), now)
        if left:
            _write_keys(file, left)
        else:
            file.unlink()


def fingerprint(public: str) -> str:
    """Sixteen hexadecimal digits by which people compare a public key."""
    return hashlib.sha256(public.encode("ascii")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A public key that is allowed for some clients, or was. until: seconds since the epoch, when
    it expires; revoked: when it was revoked, None: it was not.
    """

    public: str
    clients: tuple[int, ...]
    until: float = math.inf
    revoked: float | None = None


def listed(directory: str | Path) -> list[ListedKey]:
    """Every key that is allowed or was revoked, with the clients it is for; those that were revoked
    last. A key has one entry for each date. Raises ConfigError.
    """
    directory = Path(directory)
    allowed: dict[tuple[str, float], list[int]] = {}
    for file in _allowed(directory, make=False).iterdir():
        if file.name.isdecimal():
            for public, until in _read_keys(file).items():
                allowed.setdefault((public, until), []).append(int(file.name))
    valid = {(public, k) for (public, _), clients in allowed.items() for k in clients}
    gone = {pair: at for pair, at in _read_revoked(directory).items() if pair not in valid}
    revoked: dict[tuple[str, float], list[int]] = {}
    for (public, k), at in gone.items():
        revoked.setdefault((public, at), []).append(k)
    found = [
        *(ListedKey(public, tuple(sorted(ks)), until) for (public, until), ks in allowed.items()),
        *(ListedKey(public, tuple(sorted(ks)), revoked=at) for (public, at), ks in revoked.items()),
    ]
    return sorted(found, key=lambda key: (key.revoked is not None, key.clients, key.public))


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


def owners_alone(path: Path) -> None:
    """Raises ConfigError where others than its owner can read a file that holds a secret."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 and not path.is_dir():
        raise ConfigError(
            f"{path}: a secret must be readable by its owner only; its mode is {mode:04o}, "
            f"expected 0600: chmod 600 {path}"
        )


def load(file: str | Path) -> KeyPair:
    """The pair in `file`. Raises ConfigError if it is missing, no key file, or readable by
    others.
    """
    path = Path(file)
    try:
        owners_alone(path)
        found = json.loads(named(path).read_text(encoding="ascii"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file; make one with `fednet keys`.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"{path}: not a key file of fednet.") from None
    names = {"public", "secret", "server", "servers"}
    if not isinstance(found, dict) or not {"public", "secret"} <= found.keys() <= names:
        raise ConfigError(
            f"{path}: not a key file of fednet: expected the keys public, secret and perhaps "
            f"server and servers."
        )
    others = found.pop("servers", [])
    if not isinstance(others, list):
        raise ConfigError(f"{path}: servers: expected a list of keys.")
    return KeyPair(
        **{name: checked(key, f"{path}: {name}") for name, key in found.items()},
        servers=tuple(checked(key, f"{path}: servers") for key in others),
    )


def is_key(text: object) -> bool:
    """Whether a text has the form of a key."""
    return isinstance(text, str) and len(text) == KEY_LENGTH and _Z85.issuperset(text)


def checked(key: object, where: str) -> str:
    """`key`, if it is a key. The text of an error never shows it: it might be the secret half."""
    if not isinstance(key, str) or not is_key(key):
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
        self._expired: dict[str, list[int]] = {}  # by key that has expired: the clients it was for
        self._former: frozenset[str] = frozenset()  # all that were known to this process
        self._read_at: tuple[int, int] | None = None
        self._since, self._over = -math.inf, math.inf  # what was read holds between these times
        self._pair_at = self._stamp()
        self.version = 0
        """Rises whenever the set of allowed keys changes."""
        self.refresh()

    def _stamp(self) -> tuple[int, int]:
        now = (self.directory / "server.key").stat()
        return now.st_mtime_ns, now.st_ino

    def _refresh_pair(self) -> None:
        """The server's own. What cannot be read is no reason to stop: the old one stays."""
        try:
            now = self._stamp()
            if now != self._pair_at:
                self._pair_at, self.pair = now, load(self.directory / "server.key")
        except (OSError, ConfigError) as error:
            log.warning("%s The server keeps the key that it has.", error)

    def refresh(self) -> None:
        """Read again what has changed."""
        self._refresh_pair()
        allowed = self.directory / "allowed"
        try:
            now = allowed.stat()
        except FileNotFoundError:
            self.version += bool(self._known)
            self._speakers, self._known, self._read_at = {}, frozenset(), None
            self._expired = {}
            return
        mark = (now.st_mtime_ns, now.st_ino)
        at = time.time()
        if mark == self._read_at and self._since <= at < self._over:
            return
        before, first = self._speakers, self.version == 0
        self._speakers, self._since, self._over = {}, at, math.inf
        expired: dict[str, list[int]] = {}
        for entry in reaching(lambda: list(allowed.iterdir())):
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
            valid = {key: until for key, until in known.items() if until > at}
            self._over = min(self._over, *valid.values(), math.inf)
            for key in known.keys() - valid.keys():
                expired.setdefault(key, []).append(int(entry.name))
            self._speakers[int(entry.name)] = frozenset(valid)
        self._known = frozenset().union(*self._speakers.values())
        self._expired, self._former = expired, self._former | self._known
        # The clock behind mtime ticks every few milliseconds: a change within the same tick would
        # go unseen, so a directory that changed just now is read once more next time.
        settled = time.time_ns() - now.st_mtime_ns > 50_000_000
        self._read_at = mark if settled else None
        self.version += first or self._speakers != before

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
        whose = f" (of client {as_text(clients)})" if clients else ""
        return f"{self.why_not(user)}: {user}{whose}"

    def refusal(self, user: str | None, client_id: int) -> str:
        """Why that public key may not speak for the client; "" if it may."""
        if self.may_speak_for(user, client_id):
            return ""
        expired = user is not None and client_id in self._expired.get(user, ())
        return "key expired" if expired else "key revoked"

    def may_speak_for(self, user: str | None, client_id: int) -> bool:
        self.refresh()
        return user is not None and user in self._speakers.get(client_id, ())


def _allowed(directory: str | Path, make: bool = True) -> Path:
    directory = Path(directory)
    if not directory.is_dir() or not (make or (directory / "allowed").is_dir()):
        raise ConfigError(
            f"{directory}: no such directory of keys; `fednet keys server {directory}` makes it."
        )
    (directory / "allowed").mkdir(exist_ok=True)
    return directory / "allowed"


def _note_revoked(directory: str | Path, client: int, keys: Iterable[str], at: float) -> None:
    """Adds keys to the list of those that were revoked, for `listed` alone: a key is valid while it
    is in `allowed`.
    """
    lines = "".join(f"{public} {client} {date_text(at)}\n" for public in sorted(keys))
    with (Path(directory) / "revoked").open("a", encoding="ascii") as file:
        file.write(lines)


def _read_revoked(directory: Path) -> dict[tuple[str, int], float]:
    """(key, client) -> when it was last revoked, in seconds since the epoch."""
    path = directory / "revoked"
    found: dict[tuple[str, int], float] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        public, client, at = (line.split() + ["", "", ""])[:3]
        if not client.isdecimal():
            raise ConfigError(f"{path}: expected lines of a key, a client and a time.")
        found[checked(public, f"{path}"), int(client)] = time_of(at, f"{path}")
    return found


def _read_keys(file: Path) -> dict[str, float]:
    """key -> until when, in seconds since the epoch."""
    found: dict[str, float] = {}
    for line in reaching(file.read_bytes).decode("ascii", errors="replace").splitlines():
        if line.strip():
            key, _, until = line.strip().partition(" ")
            found[checked(key, f"{file}")] = time_of(until, f"{file}") if until else math.inf
    return found


def _write_keys(file: Path, keys: dict[str, float]) -> None:
    lines = [
        key if until == math.inf else f"{key} {date_text(until)}" for key, until in keys.items()
    ]
    write_aside(file, "".join(f"{line}\n" for line in lines), 0o644)


def date_text(at: float) -> str:
    """A time as `time_of` reads it, UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def time_of(text: str, where: str) -> float:
    """A time such as 2027-01-31 or 2027-01-31T18:00:00, UTC, in seconds since the epoch. Raises
    ConfigError.
    """
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise ConfigError(
            f"{where}: expected a time (UTC) such as 2027-01-31 or 2027-01-31T18:00:00, found "
            f"{text.strip()!r}."
        ) from None


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
        write_new(path, json.dumps(record, indent=1) + "\n", 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: there is a key already, and keys are never overwritten."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from None
    return public
