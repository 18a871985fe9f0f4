"""The server's I/O: one thread that owns the socket, the link, the protocol machine and the spool.

The engine gives it commands by `call` and takes events from `wait`. In one process there is no
thread: `wait` then pumps the same loop, and the clients' with it, until something has happened.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from fednet.errors import FednetError, RemoteProtocolError
from fednet.files import digest
from fednet.loading import WrongPart
from fednet.plain import JsonDict
from fednet.protocol.instructions import (
    Arrived,
    Forget,
    Instruction,
    Note,
    Resolved,
    Send,
    Settle,
    Store,
    Stray,
)
from fednet.protocol.server import ServerProtocol
from fednet.server.outbox import Outbox, Resolution, Told
from fednet.server.peers.clock import ListeningClock
from fednet.server.peers.events import QUIET_S, Events
from fednet.server.peers.limits import Limits
from fednet.server.spool import Spool, Spooled
from fednet.transport.base import Closed, Received, ServerTransport, pause
from fednet.wire import messages as m
from fednet.wire.link import NOBODY, Link
from fednet.wire.payload import Payload

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
        spool: Spool,
        check: Callable[[Spooled, memoryview], Payload | None],
        events: Events,
        pump: Callable[[], bool] | None = None,
        at: Callable[[str, int], None] = lambda point, round: None,
        flush: Callable[[], object] = lambda: None,
        had: Callable[[m.Key], bool] = lambda key: False,
    ) -> None:
        """The arguments are what lives here, and calls to what does not. check(reply, body): raises
        RemoteProtocolError for a payload that the methods could not use; else returns it decoded,
        or None. flush(): the books are on the disk. had(key): whether a task whose payload this
        server did not send was sent, and of use, by an earlier one.
        """
        self.protocol, self.transport, self.link, self.spool = protocol, transport, link, spool
        self.replies: dict[tuple[int, str], Spooled] = {}
        self._check, self._log, self._pump_clients = check, events, pump
        self._at, self._flush, self._had = at, flush, had
        self.inline = pump is not None
        self._told = Told(self.inline)
        self._out = Outbox(link, spool, flush, self._told.put, at)
        self._commands: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._resolutions: deque[Resolution] = deque()  # of these, not asked for yet
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

    def wait(self, timeout_s: float) -> Resolution | None:
        """The next client whose part in a phase is over, with the phase (round, exchange, purpose);
        None after `timeout_s`. Each is returned once: call it where all that may come is dealt
        with, and `rest` elsewhere. Raises what broke the I/O thread.
        """
        if not self._resolutions:
            self.rest(timeout_s)
        return self._resolutions.popleft() if self._resolutions else None

    def ended(self) -> set[int]:
        """The clients whose part is over and whom `wait` is still to return."""
        while not self._told.empty():
            self.rest(0.0)
        return {resolved.client for _, resolved in self._resolutions}

    def rest(self, timeout_s: float) -> None:
        """Lets so much time pass, or less where something happens, which is kept for `wait`. Raises
        what broke the I/O thread.
        """
        if self._thread is None and not self._pump_until(time.monotonic() + timeout_s):
            return
        found = self._told.get(timeout_s)
        if isinstance(found, BaseException):
            raise found
        self._resolutions.extend(found or ())

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
            self.link.closed(
                conn,
                lambda direction, key: (
                    self.protocol.undecided(key)
                    or (not over and self.protocol.awaits(conn, direction, key))  # noqa: B023
                ),
            )
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
        self.link.closed(conn, lambda direction, key: self.protocol.awaits(conn, direction, key))

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
            elif isinstance(i, Settle):
                self._settle(i)
            elif isinstance(i, Store):
                self.spool.store(i.key, i.offset, i.data, i.size)
                self._at("spooling", i.key.round)
            elif isinstance(i, Arrived):
                # After what was to be done before: a task goes out before it is called off.
                pending += self._arrived(i)
            elif isinstance(i, Resolved):
                round = self.protocol.round_of(i.client)
                phase = round, self.protocol.phase, self.protocol.purpose
                self._out.resolved(phase, i)
            elif isinstance(i, Note):
                self._log.tell(i.event, i.fields)
            elif isinstance(i, Forget):
                self._out.leave()
                self.transport.drop(i.conn, i.hang_up)

    def _settle(self, i: Settle) -> None:
        self._out.before_settling(i.conn, i.key)
        if i.direction == "down" and i.useful and not self.link.carried(i.conn, i.key):
            self._had(i.key)
        if i.direction == "up" and not i.useful:
            self.spool.abandon(i.key)
        self.link.settle(i.conn, i.direction, i.key, i.useful, **i.more)

    def _arrived(self, arrived: Arrived) -> list[Instruction]:
        """Checks a whole reply, and accepts or rejects it."""
        worker = self.protocol.workers[arrived.worker]
        job = self.protocol.work[arrived.key.client].job
        reply = self.spool.whole(
            arrived.key,
            arrived.form,
            arrived.check,
            arrived.state,
            arrived.kept,
            (job.check, job.start),
            arrived.seconds,
            {"host": worker.host, "pid": worker.pid, "device": worker.device},
        )
        reply.split, reply.taken_s = tuple(arrived.split), arrived.taken_s
        reply.arrived, now = time.monotonic(), self._now()
        reply.reported = {n: v for n, v in arrived.reported.items() if math.isfinite(v)}
        try:
            body = reply.view()
            if digest([body]) != reply.check:
                raise RemoteProtocolError("the payload was damaged on its way")
            made = self._check(reply, body)
            reply.payload = made if reply.memory is not None else None
        except (RemoteProtocolError, WrongPart) as broken:  # a compressor made nothing of its bytes
            self.spool.discard(reply)
            return self.protocol.reject(arrived.key, str(broken), now)
        accepted = self.protocol.accept(arrived.key, now)
        self._do([i for i in accepted if isinstance(i, Settle)])
        self._out.seal(reply)
        self.replies[arrived.key.client, arrived.key.purpose] = reply
        return [i for i in accepted if not isinstance(i, Settle)]


class Broken(FednetError):
    """Something outside the federation failed, such as the disk."""
