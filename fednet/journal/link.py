"""The one place that encodes, records and sends messages, and that decodes and records what comes.

To record a message is to note in the journal that it crosses: its bytes go to an account of the
book, which becomes a row once it is closed, or the verdict on its reply is there (see `events`).
The parts of a payload share its announcement's account, the pulls that fetch them another, and a
connection's heartbeats a third; every other message is a row at once. `send` is handed in, so the
same link serves every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import msgpack

from fednet.errors import RemoteProtocolError
from fednet.journal.events import AccountsClosed, CountsClosed, Crossed, Cut, Name, Undone
from fednet.journal.journal import Journal
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import decode_from_client, decode_from_server, encode

NOBODY = b""  # in place of a connection: all connections together that have not joined
ONCE = "once"  # in an account's name, of a message that is a row at once
UNREAD = m.Message()  # in place of a message that is not decoded, or not used
CARRIERS = {"down": "task", "up": "reply"}  # what a payload's parts belong to

Frame = Any  # bytes, as the transport has them


class Outgoing(msgspec.Struct, frozen=True):
    """A message that is recorded and has not left."""

    conn: bytes
    frames: Sequence[Frame]
    name: Name
    """Of its account."""
    crossed: Crossed
    """The event that records it, perhaps with others."""


class Incoming(msgspec.Struct, frozen=True):
    """A message that came, and is not recorded."""

    conn: bytes
    message: m.Message
    body: Body | None
    frames: Sequence[Frame]
    stray: str = ""
    """Why it belongs to nothing that is under way (late, doubled, refused). It is wasted then: it
    gets a row of its own, and the account of the payload that it names stays as it is.
    """


class Link:
    """One side of all connections of a process."""

    def __init__(
        self,
        side: str,  # "server" or "client"
        send: Callable[[bytes, Sequence[Frame]], bool],
        framing: Callable[..., int],  # (sizes): bytes on the wire of frames of so many bytes
        journal: Journal,
        # (sent, received) bytes of a connection before its first message
        greeting: tuple[int, int] = (0, 0),
        # bytes of a payload's parts, but the last; with `WHOLE` a payload is one frame within a
        # process, and is recorded in parts of `PART` as it would cross a network
        part: int = m.PART,
    ) -> None:
        self.out: m.Direction = "down" if side == "server" else "up"
        self.back = m.OTHER[self.out]  # in which messages come
        self._decode = decode_from_client if side == "server" else decode_from_server
        self._send = send
        self._framing = framing
        self._greeting = greeting
        self._part = part
        self._most = max(part, m.PART)  # bytes of a body
        self.journal = journal
        # (round, phase) of the evaluation after the last round, whose rows say so.
        self.final: tuple[int, int] | None = None
        self._messages = 0  # that are a row each
        self._strangers: set[bytes] = set()
        # Open accounts of many messages, by connection; a dict in place of a set keeps their order.
        self._counted: dict[bytes, dict[Name, None]] = {}
        self._received: dict[bytes, int] = {}  # bytes that came, by connection
        # The event of the last task or reply beside which its payload crossed, and the size of
        # that, all bytes of the message, and its form.
        self._whole: Crossed | None = None
        self._alike: tuple[int, int, Sequence[m.Field]] = 0, 0, ()
        # By direction, of the last payload that crossed whole: most are of one form.
        self._last: dict[m.Direction, tuple[Sequence[m.Field], int, dict[str, int], int]] = {}

    # -- messages ----------------------------------------------------------------------------------
    def send(self, messages: Iterable[tuple[bytes, m.Message, Body | None]]) -> list[bool]:
        """Encodes, records and sends messages, each over a connection. Returns of each whether that
        is there; nothing is recorded of it otherwise.
        """
        return [self.send_composed(out) for out in self.compose(messages)]

    def compose(self, messages: Iterable[tuple[bytes, m.Message, Body | None]]) -> list[Outgoing]:
        """Encodes messages, each for a connection, and adds them to their accounts before they
        leave.
        """
        composed: list[Outgoing] = []
        crossing: list[Crossed] = []
        for conn, message, body in messages:
            frames: list[Frame] = [encode(message)]
            if body is not None:
                # Two ends in one process that do not cut payloads hand over tensors as they are.
                here = self._part == m.WHOLE and body.by_reference
                frames.append(body if here else body.to_bytes())
            nbytes = self._framing(*map(len, frames))
            name = self._add(crossing, conn, self.out, message, body, nbytes)
            composed.append(Outgoing(conn, frames, name, crossing[-1]))
        for event in crossing:
            self.journal.note(event)
        return composed

    def send_composed(self, out: Outgoing) -> bool:
        """Sends what was composed; takes it out of its account if its connection is gone."""
        sent = self._send(out.conn, out.frames)
        if not sent:
            crossed = out.crossed
            self.journal.note(Undone(out.name, crossed.envelope, crossed.kinds, crossed.raw))
        elif out.name[2] == ONCE:
            self._close([out.name])
        return sent

    def receive(self, conn: bytes, frames: Sequence[Frame]) -> tuple[m.Message, Body | None]:
        """Decodes; the caller calls `record_received` once it knows whose the message is. What
        cannot be decoded is recorded as refused, and raises RemoteProtocolError.
        """
        try:
            return self._decode(frames, self._most)
        except RemoteProtocolError:
            self.record_refused(conn, frames)
            raise

    def record_received(self, received: Iterable[Incoming]) -> None:
        """Adds what was received to its accounts; whether it was useful is not known yet."""
        wasted: list[tuple[Name, str]] = []
        crossing: list[Crossed] = []
        for one in received:
            conn = one.conn
            nbytes = self._framing(*map(len, one.frames))
            if conn in self._received:  # else it has ended, and been counted
                self._received[conn] += nbytes
            name = self._add(crossing, conn, self.back, one.message, one.body, nbytes, one.stray)
            if name[2] == ONCE:
                wasted.append((name, one.stray))
        for event in crossing:
            self.journal.note(event)
        for name, stray in wasted:
            self._close([name], reason=stray)

    def record_refused(self, conn: bytes, frames: Sequence[Frame]) -> None:
        """Records frames that nobody reads, or that cannot be used, in a row of many messages."""
        self.record_received([Incoming(conn, UNREAD, None, frames, "refused")])

    def _add(
        self,
        crossing: list[Crossed],
        conn: bytes,
        direction: m.Direction,
        message: m.Message,
        body: Body | None,
        nbytes: int,
        stray: str = "",
    ) -> Name:
        """Adds a message of so many bytes to events that are not in the journal yet; returns the
        name of its account. Messages that are alike and follow each other are one event, since the
        tasks of a round, and the replies to them, mostly are.

        A part of a payload belongs to that payload's account. A stray one does not, but its kinds
        are found by the form that is noted there.
        """
        if (
            isinstance(message, (m.Task, m.Reply))
            and body is not None
            and message.size == body.size <= m.BESIDE
            and not stray
            and message.key.purpose == "train"
        ):  # most messages; nothing of the rest applies to them
            return self._add_whole(crossing, conn, direction, message, body.size, nbytes)
        key: m.Key | None = getattr(message, "key", None)
        if key is None and (stray or isinstance(message, m.BEATS)):
            row = "beat" if isinstance(message, m.BEATS) else "refused"
            crossing.append(self._event_of_many(conn, direction, row, nbytes))
            return crossing[-1].names[0]
        kinds: dict[str, int] = {}
        raw = 0
        type = str(message.__struct_config__.tag)
        name: Name
        if key is None or not isinstance(message, (m.Task, m.Reply, m.Part, m.Pull)):
            name = self._once_name(conn, direction)
        else:
            if type != "pull":
                type = CARRIERS[direction]
            payload: Name = (conn, direction, type, key)
            name = self._once_name(conn, direction) if stray else payload
            length = 0 if body is None else body.size
            start = 0
            if isinstance(message, (m.Task, m.Reply)):
                form: Sequence[m.Field] = message.form
                if length != message.size:  # the rest follows
                    self.journal.book.forms[name] = form
                if length > m.BESIDE and self._part == m.WHOLE:
                    nbytes += self._parts(name, message, length) - self._framing(length)
            else:
                form = self.journal.book.forms.get(payload, ())
                if isinstance(message, m.Part):
                    start = message.index * self._part
            if length:
                kinds, raw = self._split(direction, form, start, length)
            if type != "pull" and key.purpose == "evaluate":
                type = "evaluate"
        envelope = nbytes - sum(kinds.values())
        final = key is not None and self._is_final(key)
        key_of_row = key if name[2] == ONCE else None  # else it is in the name
        self._add_alike(crossing, name, type, envelope, kinds, raw, key_of_row, final)
        return name

    def _add_whole(
        self,
        crossing: list[Crossed],
        conn: bytes,
        direction: m.Direction,
        message: m.Task | m.Reply,
        size: int,
        nbytes: int,
    ) -> Name:
        """The same of a task or reply of a training, beside which its whole payload crosses."""
        type = CARRIERS[direction]
        name = conn, direction, type, message.key
        alike = size, nbytes, message.form
        if crossing and crossing[-1] is self._whole and alike == self._alike:
            self._whole.names.append(name)
            return name
        kinds, raw = self._split(direction, message.form, 0, size)
        self._add_alike(crossing, name, type, nbytes - size, kinds, raw)
        self._whole = crossing[-1]
        self._alike = alike
        return name

    def _add_alike(
        self,
        crossing: list[Crossed],
        name: Name,
        type: str,
        envelope: int,
        kinds: dict[str, int],
        raw: int,
        key: m.Key | None = None,
        final: bool = False,
    ) -> None:
        """Adds a message to the last event where it is like those of that one."""
        if crossing:
            last = crossing[-1]
            if (
                last.kinds is kinds  # those of one form, see `_split`
                and last.envelope == envelope
                and last.type == type
                and last.key is key is None
                and last.final == final
            ):
                last.names.append(name)
                return
        crossing.append(Crossed([name], type, envelope, kinds, raw, key, final=final))

    def _is_final(self, key: m.Key) -> bool:
        """Whether a task is of the evaluation after the last round."""
        return key.purpose == "evaluate" and (key.round, key.phase) == self.final

    def _event_of_many(self, conn: bytes, direction: m.Direction, row: str, nbytes: int) -> Crossed:
        """Bytes of a row of many messages, of that type."""
        counted_for = NOBODY if conn in self._strangers else conn
        name = counted_for, direction, row, 0
        self._counted.setdefault(counted_for, {})[name] = None
        return Crossed([name], row, nbytes, counted=True)

    def _split(
        self, direction: m.Direction, form: Sequence[m.Field], start: int, length: int
    ) -> tuple[dict[str, int], int]:
        """See `split`. What is returned is kept here: it must not be changed."""
        if start:
            return split(form, start, start + length)
        last = self._last.get(direction)
        if last is None or length != last[1] or form != last[0]:
            last = self._last[direction] = form, length, *split(form, 0, length)
        return last[2:]

    def _once_name(self, conn: bytes, direction: m.Direction) -> Name:
        """Of a message that is a row at once."""
        self._messages += 1
        return conn, direction, ONCE, self._messages

    def _parts(self, name: Name, message: m.Task | m.Reply, length: int) -> int:
        """The bytes that so much of a payload takes in parts. Records the pulls for them too."""
        key = message.key
        run = message.run
        inc = message.inc
        starts = range(0, length, m.PART)
        header = len(encode(m.Part(run=run, inc=inc, key=key, index=0)))
        total = 0
        for index, start in enumerate(starts):
            total += self._framing(header + len(msgpack.encode(index)) - 1)
            total += self._framing(min(m.PART, length - start))
        if name[2] != ONCE:
            pull: Name = (name[0], m.OTHER[name[1]], "pull", key)
            header = len(encode(m.Pull(run=run, inc=inc, key=key, first=0, count=1)))
            first = 0
            while first < len(starts):
                nbytes = self._framing(header + len(msgpack.encode(first)) - 1)
                self.journal.note(Crossed([pull], "pull", nbytes, final=self._is_final(key)))
                first += m.WINDOW // 2 if first else m.WINDOW
        return total

    # -- what becomes of them ----------------------------------------------------------------------
    def close_payloads(
        self,
        conn: bytes,
        direction: m.Direction,
        keys: Sequence[m.Key],
        useful: bool,
        reason: str = "",
    ) -> None:
        """Writes the rows of the payloads of tasks, or of replies, and of the pulls that fetched
        them.
        """
        names: list[Name] = [(conn, direction, CARRIERS[direction], key) for key in keys]
        names += [(conn, m.OTHER[direction], "pull", key) for key in keys]
        self._close(names, useful, reason)

    def close_counted(
        self, conn: bytes, round: int | None = None, worker: str | None = None
    ) -> None:
        """Writes a connection's row of heartbeats, and that of what was refused of it, so far.
        round, worker: in the rows.
        """
        self._close(self._counted.pop(conn, ()), round=round, worker=worker)

    def close_all_counted(self, round: int) -> None:
        """Writes a row for the heartbeats of all connections that have joined, each way, and one
        for what was refused of them.
        """
        joined = [conn for conn in self._counted if conn != NOBODY]
        names = [name for conn in joined for name in self._counted.pop(conn)]
        if names:
            self.journal.note(CountsClosed(names, round))

    def _close(
        self,
        names: Iterable[Name],
        useful: bool = False,
        reason: str = "",
        round: int | None = None,
        worker: str | None = None,
    ) -> None:
        accounts = self.journal.book.open_accounts
        crossed = [name for name in names if name in accounts.get(name[0], ())]
        if crossed:
            self.journal.note(AccountsClosed(crossed, useful, reason, round, worker))

    # -- connections -------------------------------------------------------------------------------
    def opened(self, conn: bytes, stranger: bool = False) -> None:
        """Records the greeting and the handshake of a new connection. stranger: until `joined` its
        bytes are counted with those of all strangers, who may be as many as they like.
        """
        if stranger:
            self._strangers.add(conn)
        self._received[conn] = self._greeting[1]
        for direction, nbytes in zip((self.out, self.back), self._greeting):
            if stranger:
                self.journal.note(self._event_of_many(conn, direction, "connection", nbytes))
            else:
                self._once(conn, direction, nbytes)

    def _once(
        self,
        conn: bytes,
        direction: m.Direction,
        nbytes: int,
        reason: str = "",
        round: int | None = None,
        worker: str | None = None,
    ) -> None:
        """Writes a row of bytes of a connection that are no message."""
        name = self._once_name(conn, direction)
        self.journal.note(Crossed([name], "connection", nbytes))
        self._close([name], False, reason, round, worker)

    def joined(self, conn: bytes) -> None:
        """From now on there are rows of this connection's own."""
        self._strangers.discard(conn)

    def undecoded(
        self,
        conn: bytes,
        received: int | None,
        reason: str = "not decoded",
        round: int | None = None,
        worker: str | None = None,
    ) -> None:
        """A connection has ended over which the kernel received so many bytes: records what
        never became a message. libzmq drops a message that is cut short, or damaged under CURVE,
        and says nothing of its bytes.
        """
        beyond = (received or 0) - self._received.pop(conn, received or 0)
        if beyond > 0 and conn in self._strangers:
            self.journal.note(self._event_of_many(conn, self.back, "refused", beyond))
        elif beyond > 0:
            self._once(conn, self.back, beyond, reason, round, worker)

    def mark_cut(self, conn: bytes) -> None:
        """The connection has ended; its accounts are still open. What was sent and turns out not to
        be used may not have arrived: it is `lost`, and its bytes are an upper bound.
        """
        if conn in self.journal.book.open_accounts:
            self.journal.note(Cut(conn, self.out))

    def closed(
        self,
        conn: bytes,
        awaited: bool = False,
        round: int | None = None,
        worker: str | None = None,
    ) -> None:
        """Writes the rows that a connection leaves open. round, worker: in those of many messages.
        awaited: payloads of tasks stay open, as their tasks go on over another connection.
        """
        if conn in self._strangers:
            self._strangers.discard(conn)
            return  # it has none
        self.mark_cut(conn)
        self.close_counted(conn, round, worker)
        if not awaited:
            self._close(self.journal.book.open_accounts.get(conn, ()), reason="cut short")


def split(form: Sequence[m.Field], start: int, end: int) -> tuple[dict[str, int], int]:
    """Bytes by kind of the range [start, end) of a payload of that form, and their share of the raw
    bytes.
    """
    kinds: dict[str, int] = {}
    raw = 0
    at = 0
    for f in form:
        low = max(start - at, 0)
        high = min(end - at, f.size)
        if low < high:
            kinds[f.kind] = kinds.get(f.kind, 0) + high - low
            # Over all parts this sums to f.raw.
            raw += f.raw * high // f.size - f.raw * low // f.size
        at += f.size
    return kinds, raw
