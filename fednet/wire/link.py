"""The one place that encodes, records and sends messages, and that decodes and records what comes.

To record a message is to add its bytes to an account of the ledger, which becomes a row of the book
once it is settled (see `ledger`). The parts of a payload share its announcement's account, the
pulls that fetch them another, and a connection's heartbeats a third; every other message is a row
at once. `send` is handed in, so the same link serves every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import msgpack

from fednet.errors import RemoteProtocolError
from fednet.wire import messages as m
from fednet.wire.codec import Content
from fednet.wire.frames import decode_from_client, decode_from_server, encode
from fednet.wire.ledger import OTHER, AccountName, Direction, Ledger

NOBODY = b""  # in place of a connection: all connections together that have not joined
ONCE = "once"  # in an account's name, of a message that is a row at once
UNREAD = m.Message()  # stands for one that nobody has decoded, or looks at
CARRIERS = {"down": "task", "up": "reply"}  # what a payload's parts belong to

Frame = Any  # bytes, as the transport has them


class Outgoing(NamedTuple):
    """A message that is recorded and has not left. name: of its account; envelope, kinds, raw: what
    it added there.
    """

    conn: bytes
    frames: Sequence[Frame]
    name: AccountName
    envelope: int
    kinds: dict[str, int]
    raw: int


class Link:
    """One side of all connections of a process. side: "server" or "client". framing: bytes on the
    wire of a frame of n bytes. greeting: (sent, received) bytes of a connection before its first
    message. part: bytes of a payload's parts, but the last; with `WHOLE` a payload is one frame
    within a process, and is recorded in parts of `PART` as it would cross a network.
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
        self._most = max(part, m.PART)  # bytes of a body
        self.ledger = ledger
        self._strangers: set[bytes] = set()
        # Open accounts of many messages, by connection; a dict in place of a set keeps their order.
        self._counted: dict[bytes, dict[AccountName, None]] = {}
        self._booked: dict[bytes, int] = {}  # bytes that came, by connection

    # -- messages ----------------------------------------------------------------------------------
    def send(self, conn: bytes, message: m.Message, body: Content | None = None) -> bool:
        """Encodes, records and sends. False if the connection is gone; nothing is recorded then."""
        return self.send_composed(self.compose(conn, message, body))

    def compose(self, conn: bytes, message: m.Message, body: Content | None = None) -> Outgoing:
        """Encodes a message, and adds it to its account before it leaves."""
        frames: list[Frame] = [encode(message)]
        if body is not None:
            frames.append(body)
        nbytes = sum([self._framing(len(frame)) for frame in frames])
        return Outgoing(conn, frames, *self._add(conn, self.out, message, body, nbytes))

    def send_composed(self, out: Outgoing) -> bool:
        """Sends what was composed; takes it out of its account if its connection is gone."""
        sent = self._send(out.conn, out.frames)
        if not sent:
            self.ledger.take_back(out.name, out.envelope, out.kinds, out.raw)
        elif out.name[2] == ONCE:
            self.ledger.settle(out.name, False)
        return sent

    def receive(self, conn: bytes, frames: Sequence[Frame]) -> tuple[m.Message, Content | None]:
        """Decodes; the caller calls `record_received` once it knows whose the message is. What
        cannot be decoded is recorded as refused, and raises RemoteProtocolError.
        """
        try:
            return self._decode(frames, self._most)
        except RemoteProtocolError:
            self.refused(conn, frames)
            raise

    def record_received(
        self,
        conn: bytes,
        message: m.Message,
        body: Content | None,
        frames: Sequence[Frame],
        stray: str = "",
    ) -> None:
        """Adds what was received to its account; whether it was useful is not known yet. stray:
        why it belongs to nothing that is under way (late, doubled, refused). It is wasted then: it
        gets a row of its own, and the account of the payload that it names stays as it is.
        """
        nbytes = sum([self._framing(len(frame)) for frame in frames])
        if conn in self._booked:  # else it has ended, and been counted
            self._booked[conn] += nbytes
        name, *_ = self._add(conn, self.back, message, body, nbytes, stray)
        if name[2] == ONCE:
            self.ledger.settle(name, False, reason=stray or None)

    def refused(self, conn: bytes, frames: Sequence[Frame]) -> None:
        """Records frames that nobody reads, or that cannot be used, in a row of many messages."""
        self.record_received(conn, UNREAD, None, frames, "refused")

    def _count(self, conn: bytes, direction: Direction, what: str, nbytes: int) -> AccountName:
        """Adds bytes to a row of many messages; returns the name of its account."""
        whose = NOBODY if conn in self._strangers else conn
        name = whose, direction, what
        self.ledger.add(name, what, nbytes, counted=True)
        self._counted.setdefault(whose, {})[name] = None
        return name

    def _add(
        self,
        conn: bytes,
        direction: Direction,
        message: m.Message,
        body: Content | None,
        nbytes: int,
        stray: str = "",
    ) -> tuple[AccountName, int, dict[str, int], int]:
        """Adds a message of so many bytes to the account that it belongs to: (the account's name,
        and what was added: envelope, bytes by kind, raw bytes). A part of a payload is added to
        that payload's account. A stray one is not, but its kinds are found by the form that is
        noted there.
        """
        key: m.Key | None = getattr(message, "key", None)
        kinds, raw = dict[str, int](), 0
        if key is None and isinstance(message, m.BEATS):
            return self._count(conn, direction, "beat", nbytes), nbytes, kinds, raw
        if key is None and stray:
            return self._count(conn, direction, "refused", nbytes), nbytes, kinds, raw
        type = str(message.__struct_config__.tag)
        name: AccountName = (conn, direction, ONCE, object())
        if key is not None and isinstance(message, (m.Task, m.Reply, m.Part, m.Pull)):
            if type != "pull":
                type = CARRIERS[direction]
            payload: AccountName = (conn, direction, type, key)
            if not stray:
                name = payload
            length = 0 if body is None else len(body)
            start, form = 0, self.ledger.forms.get(payload, ())
            if isinstance(message, (m.Task, m.Reply)):
                form = message.form
                if length != message.size:  # the rest follows
                    self.ledger.forms[name] = form
                if length > m.PART and self._part > m.PART:
                    nbytes += self._parts(name, message, length) - self._framing(length)
            elif isinstance(message, m.Part):
                start = message.index * self._part
            if length:
                kinds, raw = split(form, start, start + length)
            if type != "pull" and key.purpose == "evaluate":
                type = "evaluate"
        envelope = nbytes - sum(kinds.values())
        self.ledger.add(name, type, envelope, key, kinds, raw)
        return name, envelope, kinds, raw

    def _parts(self, name: AccountName, message: m.Task | m.Reply, length: int) -> int:
        """The bytes that so much of a payload takes in parts. Records the pulls for them too."""
        key, run, inc = message.key, message.run, message.inc
        starts = range(0, length, m.PART)
        header = len(encode(m.Part(run=run, inc=inc, key=key, index=0)))
        total = 0
        for index, start in enumerate(starts):
            total += self._framing(header + len(msgpack.encode(index)) - 1)
            total += self._framing(min(m.PART, length - start))
        if name[2] != ONCE:
            pull: AccountName = (name[0], OTHER[name[1]], "pull", key)
            header = len(encode(m.Pull(run=run, inc=inc, key=key, first=0, count=1)))
            first = 0
            while first < len(starts):
                nbytes = self._framing(header + len(msgpack.encode(first)) - 1)
                self.ledger.add(pull, "pull", nbytes, key)
                first += m.WINDOW // 2 if first else m.WINDOW
        return total

    # -- what becomes of them ----------------------------------------------------------------------
    def settle(
        self, conn: bytes, direction: Direction, key: m.Key, useful: bool, **more: object
    ) -> None:
        """Writes the row of a task's or reply's payload, and that of the pulls that fetched it."""
        self.ledger.settle((conn, direction, CARRIERS[direction], key), useful, **more)
        self.ledger.settle((conn, OTHER[direction], "pull", key), useful, **more)

    def settle_counted(self, conn: bytes, **more: object) -> None:
        """Writes a connection's row of heartbeats, and that of what was refused of it, so far."""
        for name in self._counted.pop(conn, ()):
            self.ledger.settle(name, False, **more)

    # -- connections -------------------------------------------------------------------------------
    def opened(self, conn: bytes, stranger: bool = False) -> None:
        """Records the greeting and the handshake of a new connection. stranger: until `joined` its
        bytes are counted with those of all strangers, who may be as many as they like.
        """
        if stranger:
            self._strangers.add(conn)
        self._booked[conn] = self._greeting[1]
        for direction, nbytes in zip((self.out, self.back), self._greeting):
            if stranger:
                self._count(conn, direction, "connection", nbytes)
            else:
                self._once(conn, direction, nbytes)

    def _once(self, conn: bytes, direction: Direction, nbytes: int, **more: object) -> None:
        """Writes a row of bytes of a connection that are no message."""
        name: AccountName = (conn, direction, ONCE, object())
        self.ledger.add(name, "connection", nbytes)
        self.ledger.settle(name, False, **more)

    def joined(self, conn: bytes) -> None:
        """From now on there are rows of this connection's own."""
        self._strangers.discard(conn)

    def undecoded(self, conn: bytes, received: int | None, **more: object) -> None:
        """A connection has ended over which the kernel received so many bytes: records what
        never became a message. libzmq drops a message that is cut short, or damaged under CURVE,
        and says nothing of its bytes.
        """
        beyond = (received or 0) - self._booked.pop(conn, received or 0)
        if beyond > 0 and conn in self._strangers:
            self._count(conn, self.back, "refused", beyond)
        elif beyond > 0:
            self._once(conn, self.back, beyond, **{"reason": "not decoded", **more})

    def ended(self, conn: bytes) -> None:
        """The connection has ended, and its payloads are not settled yet. What was sent and turns
        out not to be used may not have arrived: it is `lost`, and its bytes are an upper bound.
        """
        for name, account in self.ledger.open(conn).items():
            if isinstance(name[-1], m.Key):
                account.cut = name[1] == self.out

    def closed(self, conn: bytes, awaited: bool = False, **more: object) -> None:
        """Writes the rows that a connection leaves open, with `more` in those of many messages.
        awaited: payloads of tasks stay open, as their tasks go on over another connection.
        """
        if conn in self._strangers:
            self._strangers.discard(conn)
            return  # it has none
        self.ended(conn)
        self.settle_counted(conn, **more)
        if not awaited:
            for name in self.ledger.open(conn):
                self.ledger.settle(name, False, reason="cut short")


def split(form: Sequence[m.Field], start: int, end: int) -> tuple[dict[str, int], int]:
    """Bytes by kind of the range [start, end) of a payload of that form, and their share of the raw
    bytes.
    """
    kinds: dict[str, int] = {}
    raw, at = 0, 0
    for f in form:
        low, high = max(start - at, 0), min(end - at, f.size)
        if low < high:
            kinds[f.kind] = kinds.get(f.kind, 0) + high - low
            # Over all parts this sums to f.raw.
            raw += f.raw * high // f.size - f.raw * low // f.size
        at += f.size
    return kinds, raw
