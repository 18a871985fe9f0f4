"""The server's I/O: sockets, journal, protocol and inbox, and who may use them.

What the messages of one wake-up lead to is held back until it is written down, once for all of
them:

    journal  ->  messages leave  ->  outcomes for the rounds

Replies that come one after the other are taken in together, once the protocol has seen all of them:
the same few steps for many are faster than all steps for each.

Messages that bring the run nothing are capped: so many a second of each key, address and
connection; the connection of a peer that sends more is closed. A message before a join, or a join,
counts against the key or address that it comes from; after the join heartbeats, and what belongs to
nothing, count against the connection too. Connections are capped by the transport
(`transport/zeromq/server.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from fednet.errors import RemoteProtocolError
from fednet.journal.events import Accepted
from fednet.journal.link import NOBODY, Incoming, Link
from fednet.plain import JsonDict
from fednet.protocol.instructions import (
    MOST_STRAYS,
    Arrived,
    ClosePayload,
    HangUp,
    Instruction,
    Note,
    Resolved,
    Send,
    Store,
    Stray,
)
from fednet.protocol.server import ServerProtocol
from fednet.server.events import Events, Rate
from fednet.server.inbox import Inbox, ReceivedReply
from fednet.transport.base import Opened, Received, ServerTransport, pause
from fednet.wire import messages as m
from fednet.wire.body import Body

# -- times, in seconds
BOOK_S = 1.0  # how often the bytes of connections that have not joined are booked
TICK_S = 0.05  # how often time passes for the protocol while something is awaited
STATUS_S = 0.5  # how often the rows for status.json are made, such as whom the exchange waits for
# How long the rounds may be away before the caretaker looks whether to do their I/O. Where both
# threads work, they hand the interpreter to each other at every operation on tensors: a third more
# for a small reply.
GRACE_S = 0.02
PAUSE_S = 1.0  # at most so much of the time between two polls counts as silence of the clients

# -- messages of a wake-up
TOGETHER = 64  # that are handled before the journal is written and anything is sent
# Bytes of a body from which on what follows from a message is written and sent at once, since its
# sender waits. This is not done where tensors are handed over within a process.
LARGE_BYTES = 1 << 16

# -- what peers may send that brings the run nothing
# Messages before a join, or joins, of each key, or address without CURVE: so many a second, and at
# once so many and two for each client of the federation. It may have as many connections.
JOINS_A_SECOND = 10
JOINS_AT_ONCE = 256
# Heartbeats, and messages that belong to nothing, of a connection; of a key or address so many for
# each client of the federation and one more.
USELESS_A_SECOND = 100
USELESS_AT_ONCE = 1000


class ListeningClock:
    """A clock that stops while the server reads nothing. A server that was stopped, or whose
    machine slept, would else count its clients as silent although it has not read what they sent.
    """

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._missed = 0.0
        self._listened = self.monotonic()
        self._counts = False

    def __call__(self) -> float:
        now = self.monotonic()
        # A pause of this process never counts as silence of the clients, whatever code it was in.
        return (min(now, self._listened + PAUSE_S) if self._counts else now) - self._missed

    def note_listened(self, counts: bool = True, nobody_missed: bool = False) -> None:
        """What had come was taken in. counts: False in one process, where clients train in this
        very thread, and nobody ever is silent. nobody_missed: nobody was waited for until now, so
        that all of the time counts.
        """
        now = self.monotonic()
        if counts and not nobody_missed:
            self._missed += max(0.0, now - self._listened - PAUSE_S)
        self._listened = now
        self._counts = counts


def most_connections(clients: int) -> int:
    """Connections, and joins, of one key or address. clients: of the federation, which may all be
    one's, each with a connection that has broken beside its new one.
    """
    return JOINS_AT_ONCE + 2 * clients


class ServerIO:
    """The server's sockets, protocol, journal and inbox, and their clock.

    All of it belongs to one thread at a time: to that of the rounds inside `with io:`, else to the
    caretaker, a thread that does the I/O meanwhile. What the caretaker raised is raised by the next
    `with io:`. In one process there is no caretaker, and `do_io` also steps the clients.

    outcomes: of tasks that are over, in the order in which they ended: the reply, or why there is
    none. `Clients.wait` takes them.
    inline: the clients work in this process, while the server waits.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        transport: ServerTransport,
        link: Link,
        inbox: Inbox,
        events: Events,
        pump: Callable[[], bool] | None = None,
        crash_at: Callable[[str, int], None] = lambda point, round: None,
    ) -> None:
        """pump(): steps the clients of this process; whether anything happened. crash_at(point,
        round): crashes this process where a planned fault says so.
        """
        self.journal = link.journal
        self.protocol = protocol
        self.transport = transport
        self.link = link
        self.inbox = inbox
        self.events = events
        self._pump_clients = pump
        self._crash_at = crash_at
        self.inline = pump is not None
        self.outcomes: deque[ReceivedReply | Resolved] = deque()
        # What a wake-up leads to, held back until it is written down.
        self._unsent: list[Send] = []
        self._read: list[tuple[Received, m.Message, Body | None]] = []  # replies, not handled
        self._whole: list[Arrived] = []  # replies that are not accepted or rejected yet
        self._resolved: list[ReceivedReply | Resolved] = []
        self._trained: set[int] = set()  # rounds of replies that were accepted
        self._handled = 0  # messages since the last `_end_wakeup`
        self._tasks_sent = False  # whether a task has left since the last step
        self._tick_at = self._shown_at = self._booked = 0.0
        # Of what peers send that brings the run nothing: so much each, see above.
        everyone = 1 + protocol.clients
        self._joins = Rate(JOINS_A_SECOND, most_connections(protocol.clients))
        self._of_connection = Rate(USELESS_A_SECOND, USELESS_AT_ONCE)
        self._of_peer = Rate(everyone * USELESS_A_SECOND, everyone * USELESS_AT_ONCE)
        self._addresses: dict[bytes, str] = {}  # by connection
        self._hung_up: set[bytes] = set()  # connections of which nothing is taken in any more
        self.now = ListeningClock()
        self.status_rows: JsonDict = {"waiting": [], "arrived": [], "sites": [], "refused": []}
        self._lock = threading.Lock()
        self._owner = 0  # the number of the thread that has it; 0: none
        self._within = 0  # how often that thread is inside `with io:`
        self._wanted = False  # whether the rounds wait for it
        self._left = time.monotonic()  # when the rounds last left it
        self._closing = threading.Event()
        self._broken: BaseException | None = None
        self._caretaker: threading.Thread | None = None
        if not self.inline:
            self._caretaker = threading.Thread(target=self._care, name="fednet-io", daemon=True)
            self._caretaker.start()

    # -- whose it is -------------------------------------------------------------------------------
    def __enter__(self) -> ServerIO:
        me = threading.get_ident()
        if self._owner == me:
            self._within += 1
            return self
        self._wanted = True
        if not self._lock.acquire(blocking=False):
            self.transport.wake()
            self._lock.acquire()
        self._owner = me
        self._within = 1
        self._wanted = False
        if self._broken is not None:
            self.__exit__()
            raise self._broken
        return self

    def __exit__(self, *raised: object) -> None:
        self._within -= 1
        if not self._within:
            self._owner = 0
            self._left = time.monotonic()
            self._lock.release()

    def _care(self) -> None:
        """The caretaker: does the I/O while the rounds are at something else. It looks for that
        from time to time: to be told each time that they leave would cost them more.
        """
        while not self._closing.wait(GRACE_S):
            if time.monotonic() - self._left < GRACE_S or not self._lock.acquire(blocking=False):
                continue
            self._owner = threading.get_ident()
            self._within = 1
            try:
                while not (self._wanted or self._closing.is_set()):
                    self._step(TICK_S)
            except BaseException:  # raised where the rounds use it
                return
            finally:
                self._owner = 0
                self._lock.release()

    # -- commands ----------------------------------------------------------------------------------
    def act(self, instructions: list[Instruction]) -> None:
        """Does what a command to the protocol leads to."""
        self._follow(instructions)
        self._end_wakeup()

    def finish(self, over: bool, reason: str) -> None:
        """Tells the clients that the run is over, or why this server ends; waits until they have
        disconnected, so that the last bytes are counted on both sides. Clients of a run that has
        rounds left stay: it hardly waits for them.
        """
        if self._broken is not None:
            return
        with self:
            self.act(self.protocol.finish(over, reason))
            if self.inline:
                self._step(0.0)
                return
            until = time.monotonic() + (1.0 if over else 0.05)
            while time.monotonic() < until:
                if all(w.conn is None for w in self.protocol.roster.workers.values()):
                    break
                self._step(min(TICK_S, max(0.0, until - time.monotonic())))

    def tell(self, event: str, fields: JsonDict) -> None:
        """Writes an event of a site, and shows it."""
        with self:
            self.events.tell(event, fields)

    def do_io(self, timeout_s: float, enough: Callable[[], object] = lambda: False) -> None:
        """Does the I/O until `enough`, or for `timeout_s`. In one process it also steps the
        clients.
        """
        until = time.monotonic() + timeout_s
        with self:
            while True:
                left = max(0.0, until - time.monotonic())
                if self._pump_clients is None:
                    self._step(min(TICK_S, left))
                else:
                    moved = self._step(0.0)
                    moved = self._pump_clients() or moved
                    if not (moved or enough()) and left:
                        self._step(0.01)
                        time.sleep(0.001)  # in one process nothing waits in `poll`
                if enough() or time.monotonic() >= until:
                    return

    def close(self, over: bool = True, linger_s: float = 1.0) -> None:
        """over: no later server goes on with what is under way."""
        self._closing.set()
        if self._caretaker is not None:
            self.transport.wake()
            self._caretaker.join(60.0)  # before its socket is closed: thousands may end together
        self.inbox.close()
        self._send_all()
        # Accounts that wait for a verdict stay: a resumed run uses their replies.
        for conn in list(self.journal.book.open_accounts):
            self.link.closed(conn, awaited=not over)
        self.journal.flush()
        self.transport.close(linger_s)
        traffic = self.transport.traffic()
        # Nobody reads any more: bytes that the kernel has received and nobody has read.
        for name, (_, received) in traffic.items():
            if isinstance(name, bytes):
                self.link.undecoded(name, received, "the server stopped", self.protocol.round)
        self.link.close_counted(NOBODY)
        self.journal.flush()
        if over:
            self.journal.renew()  # only what adds rounds to the run needs it
        if traffic:
            booked = self.journal.book.crossed
            fields = {
                "sent": sum(sent for sent, _ in traffic.values()),
                "received": sum(got for _, got in traffic.values()),
                "connections": len(traffic),
                "booked_up": booked["up"],
                "booked_down": booked["down"],
            }
            self.events.tell("kernel", fields)

    # -- a wake-up ---------------------------------------------------------------------------------
    def _step(self, timeout_s: float) -> bool:
        """Handles what the transport receives in this time; returns whether anything happened."""
        try:
            if self._tasks_sent:  # in the last step
                self._crash_at("broadcasting", self.protocol.round)
                self._tasks_sent = False
            nobody_missed = not self.protocol.roster.workers and not self.protocol.tasks
            came = self.transport.poll(timeout_s)
            self.now.note_listened(not self.inline, nobody_missed)
            for event in came:
                if isinstance(event, Received):
                    self._received(event)
                    continue
                self._handle_replies()
                if isinstance(event, Opened):
                    self.link.opened(event.conn, stranger=True)
                    address = self.transport.peer(event.conn).rpartition(":")[0]
                    self._addresses[event.conn] = address
                else:
                    conn = event.conn
                    worker = self.protocol.roster.worker_of(conn)
                    self._send_all()
                    self.link.mark_cut(conn)
                    self._follow(self.protocol.closed(conn, self.now(), event.why))
                    round = self.protocol.round
                    self.link.undecoded(conn, event.received, round=round, worker=worker)
                    self.link.closed(conn, True, round, worker)
                    self._hung_up.discard(conn)
                    self._addresses.pop(conn, None)
            now = self.now()
            due = now >= self._tick_at
            if due:
                self._tick(now)
            if came or due:
                self._end_wakeup()
            return bool(came) or due
        except BaseException as broken:
            self._broken = broken
            raise

    def _tick(self, now: float) -> None:
        """Tells the protocol that time has passed. The more clients there are, the longer this
        takes and the less often it is done.
        """
        began = time.thread_time()
        self._handle_replies()
        self._follow(self.protocol.tick(now))
        if now - self._booked >= BOOK_S:
            self._booked = now
            self._send_all()
            self.link.close_counted(NOBODY)
        if now >= self._shown_at:
            protocol = self.protocol
            offset = time.time() - now
            self.status_rows = {
                "waiting": protocol.waiting(offset),
                "arrived": protocol.accepted_clients(),
                "sites": protocol.roster.sites(protocol.clients, offset),
                "refused": self.events.refusals(),
                "refusals": dict(self.events.refused),
            }
            self._shown_at = now + pause(STATUS_S, began)
        self._tick_at = now + pause(TICK_S, began)

    def _received(self, event: Received) -> None:
        """Reads a message; handles it at once, but for a reply, which is handled with those that
        come next.
        """
        conn = event.conn
        frames = event.frames
        if conn in self._hung_up:
            self.link.record_refused(conn, frames)
            return
        stranger = conn not in self.protocol.roster.joined
        if stranger and not self._joins.allows(self._peer(event), time.monotonic()):
            self._hang_up(conn, "more joins than this server accepts from one peer")
            self.link.record_refused(conn, frames)
            return
        try:
            message, body = self.link.receive(conn, frames)
        except RemoteProtocolError as broken:
            self._handle_replies()
            self._follow(self.protocol.undecodable(conn, str(broken), self.now()))
            if not stranger:
                self._limit_useless(event)
            return
        if isinstance(message, m.Reply):
            self._read.append((event, message, body))
        else:
            self._handle_replies()
            self._handle([(event, message, body)])
        self._handled += 1
        large = body is not None and not body.by_reference and body.size >= LARGE_BYTES
        if large or self._handled >= TOGETHER:
            self._end_wakeup()

    def _handle(self, messages: list[tuple[Received, m.Message, Body | None]]) -> None:
        """Hands messages to the protocol, records them, and does what follows from them: each step
        for all of them.
        """
        now = self.now()
        came: list[Incoming] = []
        answers: list[tuple[Received, list[Instruction], bool]] = []
        for event, message, body in messages:
            conn = event.conn
            instructions = self.protocol.received(conn, message, body, now, event.user)
            stray = ""
            if instructions and isinstance(instructions[0], Stray):
                stray = instructions[0].reason
            if isinstance(message, m.Join) and self.protocol.roster.worker_of(conn):
                self._send_all()  # what is for its last connection, which a new one ends
                self.transport.vouch(conn)
                self.link.joined(conn)
                self.link.close_counted(NOBODY)
            # A payload that belongs to nothing has a row of its own, but not where it is of rounds
            # or clients that a peer has made up, nor among very many.
            key: m.Key | None = getattr(message, "key", None) if stray else None
            if key is not None and (
                stray == "refused"
                or key.round > self.protocol.round
                or self.protocol.strays.get(conn, 0) > MOST_STRAYS
            ):
                self.link.record_refused(conn, event.frames)
            else:
                came.append(Incoming(conn, message, body, event.frames, stray))
            useless = bool(stray) or isinstance(message, m.BEATS)
            answers.append((event, instructions, useless and conn in self.protocol.roster.joined))
        self.link.record_received(came)
        for event, instructions, useless in answers:
            self._follow(instructions)
            if useless:  # of one that has joined: others count against their joins
                self._limit_useless(event)

    def _peer(self, event: Received) -> str:
        """Who sent it: a key, or an address where there are none."""
        return event.user or self._addresses.get(event.conn, "")

    def _limit_useless(self, event: Received) -> None:
        """A message brought the run nothing: a peer that sends too many such is hung up on."""
        at = time.monotonic()
        here = self._of_connection.allows(event.conn, at)
        if not (self._of_peer.allows(self._peer(event), at) and here):
            self._hang_up(
                event.conn, "more unusable messages than this server accepts from one peer"
            )

    def _hang_up(self, conn: bytes, reason: str) -> None:
        self._hung_up.add(conn)
        fields = {"what": "connection", "reason": reason, "worker": ""}
        self.events.tell("refused", {**fields, "address": self._addresses.get(conn, "")})
        self.transport.hang_up(conn)

    def _follow(self, instructions: list[Instruction], reply: ReceivedReply | None = None) -> None:
        """Carries out the protocol's instructions. Messages are held back until `_send_all`,
        outcomes until `_end_wakeup`. reply: the one by which a task is over, if one is.
        """
        for i in instructions:
            if isinstance(i, Send):
                self._unsent.append(i)
            elif isinstance(i, Arrived):
                if i.body is not None:
                    self._crash_at("spooling", i.task.key.round)
                self._whole.append(i)
            elif isinstance(i, Resolved):
                if reply is not None and reply.key == i.key:
                    self._resolved.append(reply)
                else:
                    self._resolved.append(i)
            elif isinstance(i, Store):
                self.inbox.store(i.key, i.offset, i.data)
                self._crash_at("spooling", i.key.round)
            elif isinstance(i, ClosePayload):
                if (i.conn, i.key) in self._unsent_of():
                    self._send_all()  # before it is closed: what cannot leave is subtracted
                if i.direction == "up":
                    self.inbox.abandon(i.key)
                self.link.close_payloads(i.conn, i.direction, [i.key], False, i.reason)
            elif isinstance(i, Note):
                self.events.tell(i.event, i.fields)
            elif isinstance(i, HangUp):
                self._send_all()
                self.transport.hang_up(i.conn)

    def _handle_replies(self) -> None:
        """Handles the replies that were read, and accepts or rejects those that are whole."""
        if self._read:
            read = self._read
            self._read = []
            self._handle(read)
        if not self._whole:
            return
        whole = self._whole
        self._whole = []
        unsent_of = self._unsent_of()
        unsent = False
        records: list[tuple[Accepted, Body | None]] = []
        for i in whole:
            task = i.task
            reply = task.reply
            assert reply is not None
            if (task.up_conn, task.key) in unsent_of or (task.conn, task.key) in unsent_of:
                unsent = True
            worker = self.protocol.roster.workers[task.worker]
            place = {"host": worker.host, "pid": worker.pid, "device": worker.device}
            asked = task.spec.check, task.spec.start
            took_s = task.heard - task.since
            record = Accepted(reply, task.conn, task.up_conn, asked, place, took_s)
            records.append((record, i.body))
        if unsent:
            self._send_all()  # before it is accepted: what cannot leave is subtracted
        now = self.now()
        for (record, _), accepted in zip(records, self.inbox.accept(records)):
            key = record.message.key
            if isinstance(accepted, ReceivedReply):
                if key.purpose == "train":
                    self._trained.add(key.round)
                self._follow(self.protocol.accept(key, now, accepted.evaluation_refused), accepted)
            else:
                self._follow(self.protocol.reject(key, str(accepted), now))

    # -- its end -----------------------------------------------------------------------------------
    def _unsent_of(self) -> set[tuple[bytes, object]]:
        """The connections and tasks of the messages that are held back."""
        return {(i.conn, getattr(i.message, "key", None)) for i in self._unsent}

    def _send_all(self) -> None:
        """Sends the messages that were held back, in their order; they are in the journal before
        they leave.
        """
        if not self._unsent:
            return
        unsent = self._unsent
        self._unsent = []
        outgoing = self.link.compose([(i.conn, i.message, i.body) for i in unsent])
        self.journal.flush()
        for out in outgoing:
            self.link.send_composed(out)
        for i in unsent:
            if isinstance(i.message, m.Task):
                self._tasks_sent = True

    def _end_wakeup(self) -> None:
        """Writes down all that the wake-up led to, then sends, then hands over the outcomes."""
        self._handled = 0
        self._handle_replies()
        if self._unsent:
            self._send_all()
        else:
            self.journal.flush()
        for round in sorted(self._trained):
            self._crash_at("receiving", round)
        self._trained.clear()
        self.outcomes += self._resolved
        self._resolved.clear()
