"""The choke point: the one place that encodes, bills and sends, and that decodes and bills what
comes.

`send` is handed in, so the same link serves every transport. The parts of a payload share its
announcement's account, the pulls that fetch them another, and a connection's heartbeats a third;
every other message is a row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from fednet.errors import RemoteProtocolError
from fednet.wire import messages as m
from fednet.wire.codec import Content
from fednet.wire.frames import decode_from_client, decode_from_server, encode
from fednet.wire.ledger import OTHER, Account, Bill, Direction, Ledger, Name

COUNTED = ("beat", "refused", "connection")  # one row for many
NOBODY = b""  # of a server's book: whoever has not joined, all together
ONCE = "once"  # a row of its own
CARRIERS = {"down": "task", "up": "reply"}  # what a payload's parts belong to
PAYLOADS = ("task", "reply", "part", "pull")  # messages whose account is their payload's


Frame = Any  # bytes, as the transport has them


class Outgoing(NamedTuple):
    """A message that is billed and has not left. name: of its account; kinds, envelope, raw: what
    it added there.
    """

    conn: bytes
    frames: Sequence[Frame]
    name: Name
    kinds: dict[str, int]
    envelope: int
    raw: int


class Link:
    """One side of all connections of a process. side: "server" or "client". framing: bytes on the
    wire of a frame of n bytes. greeting: (sent, received) bytes of a connection before its first
    message. part: bytes of a payload's parts, but the last; with `WHOLE` a payload is one frame
    within a process, and is billed in parts of `PART` as it would cross a network.
    """

    def __init__(
        self,
        side: str,
        send: Callable[[bytes, Sequence[Frame]], bool],
        framing: Callable[[int], int],
        ledger: Ledger,
        greeting: tuple[int, int] = (0, 0),
        part: int = m.PART,
    ) -> None:
        self.out: Direction = "down" if side == "server" else "up"
        self.back = OTHER[self.out]
        self._decode = decode_from_client if side == "server" else decode_from_server
        self._send = send
        self._framing = framing
        self._greeting, self._part = greeting, part
        self.ledger = ledger
        self.forms: dict[tuple[bytes, Direction, m.Key], Sequence[m.Field]] = {}
        self._strangers: set[bytes] = set()
        self._booked: dict[bytes, int] = {}  # bytes that came, by connection

    def opened(self, conn: bytes, stranger: bool = False) -> None:
        """Bills the greeting and the handshake of a new connection. stranger: until `joined` its
        bytes are counted with those of all strangers, who may be as many as they like.
        """
        if stranger:
            self._strangers.add(conn)
        self._booked[conn] = self._greeting[1]
        for direction, nbytes in zip((self.out, self.back), self._greeting):
            if stranger:
                self._count(NOBODY, direction, "connection", nbytes)
            else:
                self.ledger.write(Account(direction, "connection", envelope=nbytes, count=1), False)

    def joined(self, conn: bytes) -> None:
        """From now on there are rows of this connection's own."""
        self._strangers.discard(conn)

    def refused(self, conn: bytes, frames: Sequence[Frame]) -> None:
        """Bills what came, unread or of no use, without a row of its own."""
        nbytes = self._size(frames)
        if conn in self._booked:  # else it has ended, and been counted
            self._booked[conn] += nbytes
        self._count(self._whose(conn), self.back, "refused", nbytes)

    def _whose(self, conn: bytes) -> bytes:
        return NOBODY if conn in self._strangers else conn

    def _count(self, conn: bytes, direction: Direction, name: str, nbytes: int) -> None:
        account = self.ledger.account((conn, direction, name), direction, name, counted=True)
        account.add({}, nbytes, 0)

    def send(self, conn: bytes, message: m.Message, body: Content | None = None) -> bool:
        """Encodes, bills and sends. False where the connection is gone (nothing is billed then)."""
        return self.leave(self.compose(conn, message, body))

    def compose(self, conn: bytes, message: m.Message, body: Content | None = None) -> Outgoing:
        """Encodes a message, and bills it as one that is under way, before it leaves."""
        frames: list[Frame] = [encode(message)]
        if body is not None:
            frames.append(body)
        entry = self._entry(conn, self.out, message, body, self._size(frames))
        return Outgoing(conn, frames, *entry)

    def leave(self, out: Outgoing) -> bool:
        """Sends what was composed, and takes it off the bill where its connection is gone."""
        sent = self._send(out.conn, out.frames)
        if not sent:
            self.ledger.take_back(out.name, out.kinds, out.envelope, out.raw)
        elif out.name[2] == ONCE:
            self.ledger.settle(out.name, False)
        return sent

    def receive(self, conn: bytes, frames: Sequence[Frame]) -> tuple[m.Message, Content | None]:
        """Decodes; the caller bills by `book`, once it knows whose it is. What cannot be decoded is
        billed as refused, and raises RemoteProtocolError.
        """
        try:
            return self._decode(frames, max(self._part, m.PART))
        except RemoteProtocolError:
            self.refused(conn, frames)
            raise

    def book(
        self,
        conn: bytes,
        message: m.Message,
        body: Content | None,
        frames: Sequence[Frame],
        stray: str = "",
    ) -> None:
        """Bills what was received. stray: why it belongs to nothing that is under way (late,
        doubled, refused): it gets a row of its own then, and leaves the account of what it
        resembles alone.
        """
        nbytes = self._size(frames)
        if conn in self._booked:  # else it has ended, and been counted
            self._booked[conn] += nbytes
        name, *_ = self._entry(conn, self.back, message, body, nbytes, stray)
        if name[2] == ONCE:
            self.ledger.settle(name, False, **({"reason": stray} if stray else {}))

    def _size(self, frames: Sequence[Sized]) -> int:
        total = 0
        for f in frames:
            total += self._framing(len(f))
        return total

    def _entry(
        self,
        conn: bytes,
        direction: Direction,
        message: m.Message,
        body: Content | None,
        nbytes: int,
        stray: str = "",
    ) -> tuple[Name, dict[str, int], int, int]:
        """Adds a message of so many bytes to the account that it belongs to: (the account's name,
        and what was added: bytes by kind, envelope, raw bytes).
        """
        tag = str(message.__struct_config__.tag)
        key: m.Key | None = getattr(message, "key", None)
        name: Name
        beat = key is None and isinstance(message, m.BEATS)
        if beat or (stray and key is None):
            what = "beat" if beat else "refused"
            whose = self._whose(conn)
            self._count(whose, direction, what, nbytes)
            return (whose, direction, what), {}, nbytes, 0
        kinds, raw = dict[str, int](), 0
        if key is None or tag not in PAYLOADS:
            name, type = (conn, direction, ONCE, object()), tag
        else:
            length = 0 if body is None else len(body)
            form, start = self.forms.get((conn, direction, key), ()), 0
            if isinstance(message, (m.Task, m.Reply)):
                form = message.form
                if not stray and length != message.size:  # the rest follows
                    self.forms[conn, direction, key] = form
            elif isinstance(message, m.Part):
                start = message.index * self._part
            if length:
                kinds, raw = split(form, start, start + length)
            what = "pull" if tag == "pull" else CARRIERS[direction]
            type = "evaluate" if key.purpose == "evaluate" and what != "pull" else what
            name = (conn, direction, ONCE, object()) if stray else (conn, direction, what, key)
            if length > m.PART and self._part > m.PART:
                parts = self._parts(conn, direction, name, message, length)
                nbytes += parts - self._framing(length)
        envelope = nbytes - sum(kinds.values())
        account = self.ledger.account(name, direction, type, key)
        account.add(kinds, envelope, raw)
        return name, kinds, envelope, raw

    def _parts(
        self, conn: bytes, direction: Direction, name: Name, message: m.Message, length: int
    ) -> int:
        """The bytes that so much of a payload takes in parts. Bills the pulls for them too."""
        assert isinstance(message, (m.Task, m.Reply))
        key, run, inc = message.key, message.run, message.inc
        starts = range(0, length, m.PART)
        header = len(encode(m.Part(run=run, inc=inc, key=key, index=0)))
        total = 0
        for index, start in enumerate(starts):
            total += self._framing(header + _more_bytes(index))
            total += self._framing(min(m.PART, length - start))
        if name[2] != ONCE:
            back = OTHER[direction]
            pulls = self.ledger.account((conn, back, "pull", key), back, "pull", key)
            header = len(encode(m.Pull(run=run, inc=inc, key=key, first=0, count=1)))
            first = 0
            while first < len(starts):
                pulls.add({}, self._framing(header + _more_bytes(first)), 0)
                first += m.WINDOW // 2 if first else m.WINDOW
        return total

    def add_to_bill(self, bill: Bill, key: m.Key, down: bytes | None, up: bytes) -> None:
        """Adds what crossed for a reply that was accepted to its bill. down, up: the connections
        over which the task went and the reply came; down None: the reply is an evaluation within a
        task.
        """
        names: list[Name] = [(up, "up", "reply", key), (up, "down", "pull", key)]
        if down is not None:
            names += [(down, "down", "task", key), (down, "up", "pull", key)]
            self.forms.pop((down, "down", key), None)
        self.forms.pop((up, "up", key), None)
        self.ledger.move(names, bill)

    def settle(
        self,
        conn: bytes,
        direction: Direction,
        key: m.Key,
        useful: bool,
        **more: object,
    ) -> None:
        """Writes the row of a task's or reply's payload, and that of the pulls that fetched it."""
        name = "task" if direction == "down" else "reply"
        other: Direction = "up" if direction == "down" else "down"
        self.ledger.settle((conn, direction, name, key), useful, **more)
        self.ledger.settle((conn, other, "pull", key), useful, **more)
        self.forms.pop((conn, direction, key), None)

    def settle_counted(self, conn: bytes, **more: object) -> None:
        """Writes a connection's row of heartbeats, and that of what was refused of it, so far."""
        for name in self.ledger.open(conn):
            if name[2] in COUNTED:
                self.ledger.settle(name, False, **more)

    def undecoded(self, conn: bytes, received: int | None, **more: object) -> None:
        """A connection has ended over which the kernel received so many bytes: bills what never
        became a message. libzmq drops a message that is cut short, or damaged under CURVE, and says
        nothing of its bytes.
        """
        beyond = (received or 0) - self._booked.pop(conn, received or 0)
        if beyond > 0 and conn in self._strangers:
            self._count(NOBODY, self.back, "refused", beyond)
        elif beyond > 0:
            account = Account(self.back, "connection", envelope=beyond, count=1)
            self.ledger.write(account, False, **{"reason": "not decoded", **more})

    def unread(self, traffic: Mapping[bytes | int, tuple[int, int]], round: int) -> None:
        """Nobody reads any more: bills what the kernel has received beside what was read. traffic:
        (sent, received) by connection.
        """
        for conn, (_, received) in traffic.items():
            if isinstance(conn, bytes):
                self.undecoded(conn, received, reason="the server stopped", round=round)
        self.settle_counted(NOBODY)

    def ended(self, conn: bytes) -> None:
        """The connection is gone: what it was good for is told after this. What was sent and turns
        out to be of no use may not have arrived: it is `lost`, and its bytes are an upper bound.
        """
        for name in self.ledger.open(conn):
            if len(name) == 4 and isinstance(name[3], m.Key):
                self.ledger.cut(name, name[1] == self.out)

    def closed(self, conn: bytes, awaited: bool = False) -> None:
        """Writes the rows that a connection leaves open. awaited: payloads of tasks stay open, as
        their tasks go on over another connection.
        """
        if conn in self._strangers:
            self._strangers.discard(conn)
            return  # it has none
        self.ended(conn)
        self.settle_counted(conn)
        for name in self.ledger.open(conn):
            direction, what, key = name[1], name[2], name[3] if len(name) == 4 else None
            payload = direction if what != "pull" else OTHER[direction]
            if not isinstance(key, m.Key):
                lost = {"lost": True} if direction == self.out else {}
                self.ledger.settle(name, False, **lost, reason="cut short")
            elif not awaited:
                self.ledger.settle(name, False, reason="cut short")
                self.forms.pop((conn, payload, key), None)


def _more_bytes(number: int) -> int:
    """The bytes of a number in a header, beyond one."""
    for more, most in ((0, 1 << 7), (1, 1 << 8), (2, 1 << 16)):
        if number < most:
            return more
    return 4


def split(form: Sequence[m.Field], start: int, end: int) -> tuple[dict[str, int], int]:
    """Bytes by kind of the range [start, end) of a payload of that form, and their share of the raw
    bytes.
    """
    kinds: dict[str, int] = {}
    raw, at = 0, 0
    for f in form:
        inside = max(0, min(end, at + f.size) - max(start, at))
        if inside:
            kinds[f.kind] = kinds.get(f.kind, 0) + inside
            low, high = max(start, at) - at, min(end, at + f.size) - at
            # Over all parts this sums to f.raw.
            raw += f.raw * high // f.size - f.raw * low // f.size
        at += f.size
    return kinds, raw
