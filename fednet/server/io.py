"""The server's I/O: one thread that owns the socket, the link, the protocol machine and the inbox.

The engine gives it commands by `call` and takes events from `wait`. In one process there is no
thread: `wait` then pumps the same loop, and the clients' with it, until something has happened.

What the messages of one wake-up lead to is held back until it is written down: once for all of
them, and in the order in which a server that comes after this one relies on it.

    rows of the books  ->  log of the replies  ->  messages leave  ->  the rounds are told

Messages that bring the run nothing are capped: so many a second of each key, address and
connection; whoever sends more is hung up on. A message before a join, or a join, counts against the
key or address that it comes from; after the join heartbeats, and what belongs to nothing, count
against the connection too. Connections are capped by the transport
(`transport/zeromq/connections.py`, `transport/strangers.py`).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fednet.errors import FednetError, RemoteProtocolError, timed
from fednet.ids import as_text
from fednet.loading import WrongPart
from fednet.plain import JsonDict
from fednet.protocol.instructions import (
    REFUSALS,
    Arrived,
    Forget,
    Instruction,
    Note,
    Resolved,
    Send,
    Spend,
    Store,
    Stray,
)
from fednet.protocol.server import ServerProtocol
from fednet.protocol.tasks import Job, Rules
from fednet.server.inbox import Inbox, Reply
from fednet.transport.base import Closed, Event, Opened, Received, ServerTransport, pause
from fednet.wire import messages as m
from fednet.wire.ledger import Bill, Tally
from fednet.wire.link import NOBODY, Link, Outgoing

PAUSE_S = 1.0  # of what passes between two times that a server listens, at most so much counts


class ListeningClock:
    """A clock that stands while the server hears nobody: one that was stopped, or whose machine
    slept, would else take what its clients sent meanwhile, and it has not read yet, for silence.
    """

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._missed, self._listened, self._counts = 0.0, self.monotonic(), False

    def __call__(self) -> float:
        now = self.monotonic()
        # A pause is none of theirs wherever it struck, also before this server listens again.
        return (min(now, self._listened + PAUSE_S) if self._counts else now) - self._missed

    def listened(self, counts: bool = True, alone: bool = False) -> None:
        """What had come was taken in. alone: nobody was waited for until now, so that all of it
        counts. counts: False in one process, where clients train in this very thread, and nobody
        ever is silent.
        """
        now = self.monotonic()
        if counts and not alone:
            self._missed += max(0.0, now - self._listened - PAUSE_S)
        self._listened, self._counts = now, counts


log = logging.getLogger(__name__)

# Events that a peer can bring about at will.
LOUD = ("refused", "late", "doubled", "failed", "data_changed")
# Of such events, those of one kind and worker have one line in this time, and are counted.
QUIET_S = 1.0
# What is said of a site, by event. Of one that is gone: why.
SITES = {
    "joined": "joined",
    "rejoined": "connected again",
    "ready": "ready",
    "away": "",
    "back": "heard of again",
    "superseded": "another process has taken its place",
}
EXPECTED = ("joined", "ready")  # which are for the log alone


def in_words(event: str, fields: JsonDict) -> str:
    """What is said of a site that came, went or was refused; "" for other events."""
    if event == "refused" and fields["what"] in ("join", "connection", "ready"):
        whose = fields.get("address") or fields.get("worker") or "a client process"
        return f"refused {whose}: {fields['reason']}"
    if event not in SITES:
        return ""
    who = f"client(s) {as_text(fields['clients'])}"
    if fields.get("host"):
        who += f" on {fields['host']}, process {fields['pid']}"
    return f"{who}: {fields['why'] if event == 'away' else SITES[event]}"


class Events:
    """The run's events, with those that a peer can bring about at will thinned out: the first of a
    kind and worker is written, and a moment later how many more there were. Called by one thread.
    note(event, fields): writes one. say(text): shows what is said of sites that go, come back or
    are refused, until it is set to None.
    """

    def __init__(
        self,
        note: Callable[[str, JsonDict], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._write, self.say = note, say
        self._loud: dict[tuple[str, str, str], tuple[float, int, JsonDict]] = {}

    def tell(self, event: str, fields: JsonDict) -> None:
        if event not in LOUD:
            return self._note(event, fields)
        name = (event, str(fields.get("what", "")), str(fields.get("worker", "")))
        if name in self._loud:
            since, more, _ = self._loud[name]
            self._loud[name] = since, more + 1, fields
        else:
            self._note(event, fields)
            self._loud[name] = time.monotonic(), 0, {}

    def _note(self, event: str, fields: JsonDict) -> None:
        self._write(event, fields)
        if text := in_words(event, fields):
            log.info("%s", text)
            if self.say is not None and event not in EXPECTED:
                self.say(timed(text))

    def write_counts(self, last: bool = False) -> None:
        """Writes what was only counted for long enough; last: all of it."""
        now = math.inf if last else time.monotonic()
        for name, (since, more, fields) in list(self._loud.items()):
            if now - since < QUIET_S:
                continue
            if more:
                self._note(name[0], {**fields, "count": more})
                self._loud[name] = now, 0, {}
            else:
                del self._loud[name]


JOINS_A_SECOND, JOINS_AT_ONCE = 10, 256
"""Messages before a join, or joins, of each key, or address without CURVE: so many a second, and at
once so many and two for each client of the federation. It may have as many connections."""

USELESS_A_SECOND, USELESS_AT_ONCE = 100, 1000
"""Heartbeats, and messages that belong to nothing, of a connection; of a key or address so many for
each client of the federation and one more."""

PEERS = 4096
"""Keys, addresses and connections whose messages are counted: those that sent last."""


def at_once(clients: int) -> int:
    """Connections, and joins, of one key or address. clients: of the federation, which may all be
    one's, each with a connection that has broken beside its new one.
    """
    return JOINS_AT_ONCE + 2 * clients


class Rate:
    """Counts messages by who sent them: so many a second, and up to `at_once` saved up."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._a_second, self._at_once = a_second, at_once
        self._known: OrderedDict[object, tuple[float, float]] = OrderedDict()  # (left, when)

    def allows(self, who: object, now: float) -> bool:
        """Counts one more message; False where it is one too many."""
        left, then = self._known.pop(who, (self._at_once, now))
        left = min(self._at_once, left + (now - then) * self._a_second)
        allowed = left >= 1
        self._known[who] = (left - 1 if allowed else left), now
        if len(self._known) > PEERS:
            self._known.popitem(last=False)
        return allowed


class Limits:
    """Hands what came to whoever takes it in, and hangs up on who sends too much. receive(event):
    takes a message in; whether it was of no use. closed(conn): a connection has ended, and all that
    it had sent was taken in.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        transport: ServerTransport,
        link: Link,
        events: Events,
        receive: Callable[[Received], bool],
        closed: Callable[[Closed], None],
    ) -> None:
        self._protocol, self._transport = protocol, transport
        self._link, self._events = link, events
        self._receive, self._closed = receive, closed
        everyone = 1 + protocol.clients
        self._joins = Rate(JOINS_A_SECOND, at_once(protocol.clients))
        self._of_connection = Rate(USELESS_A_SECOND, USELESS_AT_ONCE)
        self._of_peer = Rate(everyone * USELESS_A_SECOND, everyone * USELESS_AT_ONCE)
        self._addresses: dict[bytes, str] = {}  # by connection
        self._hung_up: set[bytes] = set()  # connections of which nothing is taken in any more

    def came(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, Opened):
            self._link.opened(conn, stranger=True)
            self._addresses[conn] = self._transport.peer(conn).rpartition(":")[0]
        elif isinstance(event, Closed):
            self._closed(event)
            self._hung_up.discard(conn)
            self._addresses.pop(conn, None)
        elif conn in self._hung_up:
            self._link.refused(conn, event.frames)
        elif not self._protocol.has_joined(conn):
            if self._joins.allows(self._peer(event), time.monotonic()):
                self._receive(event)
            else:
                self._hang_up(conn, "more joins than this server takes of one peer")
                self._link.refused(conn, event.frames)
        elif self._receive(event):
            now = time.monotonic()
            here = self._of_connection.allows(conn, now)
            if not (self._of_peer.allows(self._peer(event), now) and here):
                self._hang_up(conn, "more messages of no use than this server takes of one peer")

    def worth_a_row(self, conn: bytes, stray: str, key: m.Key) -> bool:
        """Whether a payload that belongs to nothing has a line of the book of its own: not where it
        is of rounds or clients that a peer has made up, nor among very many.
        """
        known = stray != "refused" and key.round <= self._protocol.round
        return known and self._protocol.strikes(conn) <= REFUSALS

    def _peer(self, event: Received) -> str:
        """Who sent it: a key, or an address where there are no keys."""
        return event.user or self._addresses.get(event.conn, "")

    def _hang_up(self, conn: bytes, reason: str) -> None:
        if conn not in self._hung_up:
            self._hung_up.add(conn)
            fields = {"what": "connection", "reason": reason, "worker": ""}
            self._events.tell("refused", {**fields, "address": self._addresses.get(conn, "")})
            self._transport.drop(conn, hang_up=True)


# Messages of a wake-up that are dealt with before anything leaves; and of those that a round's
# opening leads to, how many leave before it is looked for what has come: the first clients need not
# wait for the last ones' tasks, and what is known of one is still at hand when its reply comes.
TOGETHER = 64
ALONE_S = 0.02  # how long the rounds are left alone, at most
MUCH = 1024  # replies that the rounds are told of though more messages have come
LARGE_BYTES = 1 << 16  # of a body: such a message is dealt with by itself, its sender waits

Destination = tuple[bytes, m.Key]  # a connection, and a task


@dataclass(frozen=True)
class Outcome:
    """A client's part in an exchange is over. phase: (round, exchange, purpose). reason: "" where
    its reply counts, else why it does not. reply: None where none came; evaluation: of the same
    task, where it came.
    """

    phase: tuple[int, int, str]
    client: int
    reason: str = ""
    reply: Reply | None = None
    evaluation: Reply | None = None


LEFT_OUT = "left out"  # why a reply's bytes were not useful that did not count


class Settled(NamedTuple):
    """Whether what crossed for a reply was useful. reason: why not; staleness: of the reply."""

    bill: Bill
    useful: bool
    reason: str = ""
    staleness: int | None = None


class Outbox:
    """flush(): what is in the books is with the operating system. tell(what): to the rounds. at:
    see `ServerIO`.
    """

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        flush: Callable[[], object],
        tell: Callable[[list[Outcome]], None],
        at: Callable[[str, int], None],
    ) -> None:
        self._link, self._inbox, self._flush, self._tell, self._at = link, inbox, flush, tell, at
        self._later: deque[tuple[Send, Destination | None]] = deque()  # not in the books yet
        self._outgoing: list[tuple[Outgoing, Destination | None]] = []
        self._keys = Counter[Destination]()  # of the messages of both
        self._outcomes: list[Outcome] = []
        self._logged: list[Reply] = []
        self._heard = 0
        self.tasks = False  # whether one is among what has left since this was set to False

    def send(self, send: Send) -> None:
        """Messages leave in the order of these calls, and are in the books before."""
        key = getattr(send.message, "key", None)
        of = None if key is None else (send.conn, key)
        if of is not None:
            self._keys[of] += 1
        self._later.append((send, of))
        if len(self._later) == 1 and len(self._outgoing) < TOGETHER:
            self._compose(1)

    def _compose(self, most: int) -> None:
        while self._later and most:
            (send, of), most = self._later.popleft(), most - 1
            out = self._link.compose(send.conn, send.message, send.body)
            self._outgoing.append((out, of))
            self.tasks = self.tasks or isinstance(send.message, m.Task)

    def logged(self, reply: Reply) -> None:
        """The reply was accepted; its row is in the books, its record in the inbox's log."""
        self._logged.append(reply)

    def over(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def before_settling(self, conn: bytes, key: m.Key) -> None:
        """An account is settled only once its messages have left: what does not is taken off it."""
        if (conn, key) in self._keys:
            self.leave()

    def heard(self, nbytes: int) -> None:
        """A message was dealt with; nbytes: of its body."""
        self._heard += 1
        large = nbytes >= LARGE_BYTES
        if self._heard >= TOGETHER or large:
            self.conclude(more=not large)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to send, or to tell the rounds, though nothing may come."""
        return bool(self._outcomes or self._later)

    def leave(self) -> None:
        """Sends all messages, once their bytes are in the books."""
        self._compose(len(self._later))
        self._leave()

    def _leave(self) -> None:
        if self._outgoing:
            self._flush()
            outgoing, self._outgoing = self._outgoing, []
            for out, of in outgoing:
                self._link.leave(out)
                if of is not None:
                    self._keys[of] -= 1
                    if not self._keys[of]:
                        del self._keys[of]

    def conclude(self, more: bool = False) -> None:
        """All that the wake-up led to is written down, and has left; and it is told. more: only
        where that is much already. More may have come meanwhile, and what the rounds make of it
        takes turns with whoever reads that, at every turn for a fifth of the time of both.
        """
        self._heard = 0
        self._compose(TOGETHER - len(self._outgoing))
        # What was spent stays in the book, whatever becomes of this process. Before the log: a
        # reply that a resume uses is in the books.
        self._flush()
        self._inbox.flush()
        self._leave()
        logged, self._logged = self._logged, []
        for reply in logged:
            if reply.key.purpose == "train":
                self._at("receiving", reply.key.round)
        if len(self._outcomes) >= (MUCH if more else 1):
            outcomes, self._outcomes = self._outcomes, []
            self._tell(outcomes)


class Told:
    """What the rounds are told, until they ask. inline: they and who tells are one thread."""

    def __init__(self, inline: bool) -> None:
        self._inline, self._several = inline, False
        # Not a SimpleQueue: a signal that takes it beyond its timeout makes it wait for ever.
        self._found: queue.Queue[list[Outcome] | BaseException] = queue.Queue()
        self._asked = threading.Event()

    def put(self, found: list[Outcome] | BaseException) -> None:
        """Never waits: the rounds may be waiting for what is done after it."""
        several = isinstance(found, list) and len(found) > 1 and not self._inline
        self._several = several and self._found.empty()
        self._asked.clear()
        self._found.put(found)

    def leave_alone(self) -> None:
        """Two threads that share one interpreter lose to each other at every turn what it takes to
        fold a small reply: with several, the rounds are left alone until they ask again, unless
        they are at something else. To be called with no command of theirs left to be done.
        """
        if self._several:
            self._several = False
            self._asked.wait(ALONE_S)

    def get(self, timeout_s: float) -> list[Outcome] | BaseException | None:
        """What is next, or None after so long."""
        if self._found.empty():
            self.ask()
        try:
            return self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def ask(self) -> None:
        """The rounds are done with what they were told, or have a command."""
        self._asked.set()

    def empty(self) -> bool:
        return self._found.empty()


Answer = TypeVar("Answer")
Command = Callable[[float], list[Instruction] | None]  # of the time: what is to be done

TICK_S = 0.05  # how often time passes for the protocol while something is awaited
SNAPSHOT_S = 0.5  # how often it is written down for others whom the phase waits for


class ServerIO:
    def __init__(
        self,
        protocol: ServerProtocol,
        transport: ServerTransport,
        link: Link,
        inbox: Inbox,
        events: Events,
        pump: Callable[[], bool] | None = None,
        at: Callable[[str, int], None] = lambda point, round: None,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        """The arguments are what this thread owns, and calls to what it does not. flush(): the
        books are on the disk.
        """
        self.protocol, self.transport, self.link, self.inbox = protocol, transport, link, inbox
        self._log, self._pump_clients = events, pump
        self._at, self._flush = at, flush
        self.inline = pump is not None
        self._told = Told(self.inline)
        self._out = Outbox(link, inbox, flush, self._told.put, at)
        self._commands: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._taken: dict[tuple[int, str], Reply] = {}  # accepted, of tasks that are not over yet
        self._outcomes: deque[Outcome] = deque()  # told, and not asked for yet
        self._tick_at = self._shown_at = self._booked = 0.0
        self._limits = Limits(protocol, transport, link, events, self._receive, self._closed)
        self._now = ListeningClock()
        self._closing = threading.Event()
        self._gone: threading.Event | None = None
        self._sent_any = False
        self.snapshot: JsonDict = {"waiting": [], "arrived": [], "present": 0, "sites": []}
        self._thread: threading.Thread | None = None
        if not self.inline:
            self._thread = threading.Thread(target=self._run, name="fednet-io", daemon=True)
            self._thread.start()

    # -- the engine's side -------------------------------------------------------------------------
    def call(self, command: Command, wait: bool = False) -> None:
        """Runs `command(now)` where the protocol lives, and does what it returns; wait: for it."""
        done = threading.Event()

        def run(now: float) -> None:
            self._do(command(now) or [])
            self._out.conclude()
            done.set()

        self._commands.put(run)
        self._told.ask()
        self.transport.wake()
        while wait and not done.is_set():
            if self._thread is None:
                self._step(0.0)
            elif not done.wait(0.5) and not self._thread.is_alive():
                return  # what broke it is raised by the next `wait`

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What `question()` returns where the protocol lives, after all that was called before."""
        found: list[Answer] = []

        self.call(lambda now: found.append(question()), wait=True)
        if not found:
            self.rest(0.0)
            raise Broken("the server's input and output has ended")
        return found[0]

    def begin(self, phase: tuple[int, int, m.Purpose], jobs: Sequence[Job], rules: Rules) -> None:
        """Opens an exchange or evaluation; what is left of the one before is called off."""

        def command(now: float) -> list[Instruction]:
            self._taken.clear()
            return self.protocol.begin(*phase, jobs, rules, now)

        self.call(command)

    def add(self, round: int, jobs: Sequence[Job]) -> None:
        """More tasks beside those under way."""
        self.call(lambda now: self.protocol.add(round, jobs, now))

    def cancel(self, reason: str) -> None:
        self.call(lambda now: self.protocol.cancel(reason, now))

    def settle(self, bills: Iterable[Settled]) -> None:
        """It is known whether what crossed for these replies was useful."""
        settled = list(bills)

        def command(now: float) -> None:
            for bill, useful, reason, staleness in settled:
                self.link.ledger.settle_bill(bill, useful, reason, staleness)

        if settled:
            self.call(command)

    def tally(self, round: int, under_way: Container[tuple[int, int]] = ()) -> Tally:
        """What the books have for rounds up to this one, and no record has yet. under_way: tasks
        (round, client) that may still be answered; for no other one an earlier server's bytes were
        useful.
        """
        ledger, bills = self.link.ledger, self.inbox.bills

        def taken() -> Tally:
            for key in [k for k in bills if k.round <= round]:
                if (key.round, key.client) not in under_way:
                    ledger.settle_bill(bills.pop(key), False, "the server ended")
            return ledger.take(round)

        return self.ask(taken)

    def unused(self, outcome: Outcome) -> None:
        """The outcome came after its exchange was over."""
        for reply in (outcome.reply, outcome.evaluation):
            if reply is not None:
                reply.let_go()
                self.settle([Settled(reply.bill, False, LEFT_OUT)])

    def wait(self, timeout_s: float) -> Outcome | None:
        """The next outcome; None after `timeout_s`. Each is returned once: call it where all that
        may come is dealt with, and `rest` elsewhere. Raises what broke the I/O thread.
        """
        if not self._outcomes:
            self.rest(timeout_s)
        return self._outcomes.popleft() if self._outcomes else None

    def ended(self) -> set[int]:
        """The clients whose part is over and whom `wait` is still to return."""
        while not self._told.empty():
            self.rest(0.0)
        return {outcome.client for outcome in self._outcomes}

    def rest(self, timeout_s: float) -> None:
        """Lets so much time pass, or less where something happens, which is kept for `wait`. Raises
        what broke the I/O thread.
        """
        if self._thread is None and not self._pump_until(time.monotonic() + timeout_s):
            return
        found = self._told.get(timeout_s)
        if isinstance(found, BaseException):
            raise found
        self._outcomes.extend(found or ())

    def _pump_until(self, until: float) -> bool:
        """Does the work of both sides until something has happened; False where the time was over
        before.
        """
        while self._told.empty():
            moved = self._step(0.0)
            moved = bool(self._pump_clients and self._pump_clients()) or moved
            if not moved and self._told.empty():
                if time.monotonic() >= until:
                    return False
                self._step(0.01)
                time.sleep(0.001)  # in one process nothing waits in `poll`
        return True

    def close(self, over: bool = True, linger_s: float = 1.0) -> None:
        """over: no later server goes on with what is under way."""
        self._closing.set()
        self._told.ask()
        if self._thread is not None:
            self.transport.wake()
            self._thread.join(60.0)  # before its socket is closed: thousands may end together
        self._out.leave()
        self._log.write_counts(last=True)
        for conn in {name[0] for name in self.link.ledger.open()}:
            # What a resume goes on with is not known to be of use or not until that one says so.
            self.link.closed(conn, awaited=not over)
        self._flush()
        self.transport.close(linger_s)
        traffic = self.transport.traffic()
        self.link.unread(traffic, self.protocol.round)
        self._flush()
        counts, booked = traffic.values(), self.link.ledger.crossed()
        if counts:
            self._log.tell(
                "kernel",
                {
                    "sent": sum(sent for sent, _ in counts),
                    "received": sum(got for _, got in counts),
                    "connections": len(counts),
                    **{f"booked_{d}": n for d, n in booked.items()},
                },
            )

    def await_leaves(self, timeout_s: float) -> None:
        """Waits until all workers have gone, so that the last bytes are counted on both sides."""
        if self.inline:
            self._step(0.0)
            return
        gone = self._gone = threading.Event()
        self.transport.wake()
        gone.wait(timeout_s)

    # -- the loop ----------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._step(None if not self.protocol.workers and not self.protocol.work else TICK_S)
            self._step(0.0)
        except BaseException as broken:  # the engine must not wait for ever: it is raised there
            self._told.put(broken)

    def _step(self, timeout_s: float | None) -> bool:
        moved = not self._commands.empty()
        while not self._commands.empty():
            self._commands.get()(self._now())
        self._told.leave_alone()
        if self._out.tasks:  # with the last turn
            if not self._sent_any:  # how long a server that was started anew took to it
                self._sent_any = True
                self._log.tell("first_task", {"round": self.protocol.round})
            self._at("broadcasting", self.protocol.round)
            self._out.tasks = False
        came = self.transport.poll(0.0 if self._out.unfinished else timeout_s)
        self._now.listened(not self.inline, alone=timeout_s is None)
        for event in came:
            self._limits.came(event)
        moved = bool(came) or moved
        if self._gone is not None and all(w.conn is None for w in self.protocol.workers.values()):
            self._gone.set()
        now = self._now()
        if due := now >= self._tick_at:
            self._tick(now)
        if busy := moved or due or self._out.unfinished:
            self._out.conclude(more=bool(came) and not due)
        return busy

    def _tick(self, now: float) -> None:
        """Time passes: less often where there are so many clients that each look takes long."""
        began = time.thread_time()
        self._do(self.protocol.tick(now))
        self._log.write_counts()
        if now - self._booked >= QUIET_S:
            self._booked = now
            self._out.leave()
            self.link.settle_counted(NOBODY)
        self.snapshot["present"] = len(self.protocol.present())
        if now >= self._shown_at:
            self.snapshot["waiting"] = self.protocol.waiting(time.time() - now)
            self.snapshot["arrived"] = self.protocol.arrived()
            self.snapshot["sites"] = self.protocol.present_sites(time.time() - now)
            self._shown_at = now + pause(SNAPSHOT_S, began)
        self._tick_at = now + pause(TICK_S, began)

    def book_round(self, round: int) -> None:
        """Heartbeats: one line a worker and round."""
        for conn, worker in self.protocol.connections():
            self.link.settle_counted(conn, round=round, worker=worker)

    def _closed(self, event: Closed) -> None:
        conn = event.conn
        worker = self.protocol.worker_of(conn)
        self._out.leave()
        self.link.ended(conn)
        self._do(self.protocol.closed(conn, self._now(), event.why))
        where = {"round": self.protocol.round, "worker": worker}
        self.link.undecoded(conn, event.received, **where)
        self.link.settle_counted(conn, **where)
        self.link.closed(conn, awaited=True)

    def _receive(self, event: Received) -> bool:
        """Whether it was of no use."""
        conn, frames, now = event.conn, event.frames, self._now()
        try:
            message, body = self.link.receive(conn, frames)
        except RemoteProtocolError as broken:
            self._do(self.protocol.undecodable(conn, str(broken), now))
            return True
        instructions = self.protocol.received(conn, message, body, now, event.user)
        first = instructions[0] if instructions else None
        stray = first.reason if isinstance(first, Stray) else ""
        if isinstance(message, m.Join) and self.protocol.worker_of(conn):
            self._out.leave()  # what is for its last connection, which a new one ends
            self.transport.vouch(conn)
            self.link.joined(conn)
            self.link.settle_counted(NOBODY)
        key: m.Key | None = getattr(message, "key", None)
        if stray and key is not None and not self._limits.worth_a_row(conn, stray, key):
            self.link.refused(conn, frames)
        else:
            self.link.book(conn, message, body, frames, stray)
        self._do(instructions)
        self._out.heard(0 if body is None else len(body))
        return bool(stray) or isinstance(message, m.BEATS)

    def _do(self, instructions: list[Instruction]) -> None:
        """Does it, as far as it does not wait for the end of the wake-up."""
        pending = list(instructions)
        for i in pending:
            if isinstance(i, Send):
                self._out.send(i)
            elif isinstance(i, Spend):
                self._spend(i)
            elif isinstance(i, Store):
                self.inbox.store(i.key, i.offset, i.data, i.size)
                self._at("spooling", i.key.round)
            elif isinstance(i, Arrived):
                # After what was to be done before: a task goes out before it is called off.
                pending += self._arrived(i)
            elif isinstance(i, Resolved):
                self._out.over(self._outcome(i))
            elif isinstance(i, Note):
                self._log.tell(i.event, i.fields)
            elif isinstance(i, Forget):
                self._out.leave()
                self.transport.drop(i.conn, i.hang_up)

    def _spend(self, i: Spend) -> None:
        self._out.before_settling(i.conn, i.key)
        if i.direction == "up":
            self.inbox.abandon(i.key)
        self.link.settle(i.conn, i.direction, i.key, False, reason=i.reason)

    def _arrived(self, arrived: Arrived) -> list[Instruction]:
        """Takes a whole reply in, and accepts or rejects it."""
        worker = self.protocol.workers[arrived.worker]
        job = self.protocol.work[arrived.key.client].job
        place = {"host": worker.host, "pid": worker.pid, "device": worker.device}
        try:
            reply = self.inbox.take(arrived, (job.check, job.start), place)
        except (RemoteProtocolError, WrongPart) as broken:
            return self.protocol.reject(arrived.key, str(broken), self._now())
        for conn in (arrived.down, arrived.up):
            if conn:
                self._out.before_settling(conn, arrived.key)
        reply.bill.join(self.link.bill(arrived.key, arrived.down, arrived.up))
        if arrived.down is None:  # an evaluation within a task counts for itself
            self.link.ledger.settle_bill(reply.bill, True)
        self._out.logged(reply)
        self._taken[arrived.key.client, arrived.key.purpose] = reply
        return self.protocol.accept(arrived.key, self._now())

    def _outcome(self, resolved: Resolved) -> Outcome:
        client, purpose = resolved.client, self.protocol.purpose
        phase = self.protocol.round_of(client), self.protocol.phase, purpose
        reply = self._taken.pop((client, purpose), None)
        # Within a training task it comes before the reply.
        evaluation = self._taken.pop((client, "evaluate"), None)
        if resolved.reason:
            for unused in (reply, evaluation):
                if unused is not None:
                    unused.let_go()
            return Outcome(phase, client, resolved.reason)
        return Outcome(phase, client, "", reply, evaluation)


class Broken(FednetError):
    """Something outside the federation failed, such as the disk."""
