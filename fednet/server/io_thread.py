"""The server's input and output: one thread that owns the socket, the link, the protocol machine
and the spool.

The engine gives it commands by `call` and takes events from `wait`. In one process there is no
thread: `wait` then pumps the same loop, and the clients' with it, until something has happened.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from fednet.errors import FednetError, RemoteProtocolError
from fednet.files import digest
from fednet.protocol.rules import (
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
from fednet.server.events import QUIET_S, Events
from fednet.server.hearing import Hearing
from fednet.server.spool import Spool, Spooled
from fednet.transport.base import Closed, Received, ServerTransport
from fednet.wire import messages as m
from fednet.wire.link import NOBODY, Link, Outgoing

Answer = TypeVar("Answer")
Command = Callable[[float], list[Instruction]]  # of the time: what is to be done

TICK_S = 0.05  # how often time passes for the protocol while something is awaited


class ServerIO:
    """check(reply, body): raises RemoteProtocolError for a payload that the methods could not
    use. flush(): what is in the books is on the disk. had(key): a client did a task whose payload
    it had from an earlier server.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        transport: ServerTransport,
        link: Link,
        spool: Spool,
        check: Callable[[Spooled, memoryview], None],
        events: Events,
        pump: Callable[[], bool] | None = None,
        at: Callable[[str, int], None] = lambda point, round: None,
        flush: Callable[[], object] = lambda: None,
        had: Callable[[m.Key], object] = lambda key: None,
    ) -> None:
        self.protocol, self.transport, self.link, self.spool = protocol, transport, link, spool
        self.replies: dict[tuple[int, str], Spooled] = {}
        self._check, self._told, self._pump_clients = check, events, pump
        self._at, self._flush, self._had = at, flush, had
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ticked = self._booked = 0.0
        self._hearing = Hearing(protocol, transport, link, events, self._receive, self._closed)
        self._closing = threading.Event()
        self._gone: threading.Event | None = None
        self._before = dict(link.ledger.totals)  # spent by earlier servers
        self._outgoing: list[Outgoing] = []
        self._sent_task = self._sent_any = False
        self.snapshot: dict[str, Any] = {"waiting": [], "arrived": [], "present": 0}
        self.inline = pump is not None
        self._thread: threading.Thread | None = None
        if pump is None:
            self._thread = threading.Thread(target=self._run, name="fednet-io", daemon=True)
            self._thread.start()

    # -- the engine's side -------------------------------------------------------------------------
    def call(self, command: Command, wait: bool = False) -> None:
        """Runs `command(now)` where the protocol lives, and does what it returns. wait: until that
        is done.
        """
        done = threading.Event()

        def run(now: float) -> list[Instruction]:
            self._do(command(now))
            done.set()
            return []

        self._commands.put(run)
        self.transport.wake()
        while wait and not done.is_set():
            if self._thread is None:
                self._step(0.0)
            elif not done.wait(0.5) and not self._thread.is_alive():
                return  # what broke it is raised by the next `wait`

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What `question()` returns where the protocol lives, once all that was called before is
        done.
        """
        found: list[Answer] = []

        def command(now: float) -> list[Instruction]:
            found.append(question())
            return []

        self.call(command, wait=True)
        if not found:
            self.wait(0.0, (0, 0, ""))
            raise Broken("the server's input and output has ended")
        return found[0]

    def wait(self, timeout_s: float, phase: tuple[int, int, str]) -> Resolved | None:
        """The next client whose part in the phase (round, exchange, purpose) is over, or None after
        `timeout_s`. What is left of earlier phases is passed over. Raises what broke the I/O
        thread.
        """
        if self._thread is not None:
            try:
                found = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
        else:
            until = time.monotonic() + timeout_s
            while self._events.empty():
                moved = self._step(0.0)
                moved = bool(self._pump_clients and self._pump_clients()) or moved
                if not moved and self._events.empty():
                    if time.monotonic() >= until:
                        return None
                    self._step(0.01)
                    time.sleep(0.001)  # in one process nothing waits in `poll`
            found = self._events.get()
        if isinstance(found, BaseException):
            raise found
        of, resolved = found
        return resolved if of == phase else None

    def close(self, over: bool = True, linger_s: float = 1.0) -> None:
        """over: no later server goes on with what is under way."""
        self._closing.set()
        if self._thread is not None:
            self.transport.wake()
            self._thread.join(5.0)
        self._told.hush(float("inf"))
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
        counts = self.transport.traffic().values()
        if counts:
            self._told.tell(
                "kernel",
                {
                    "sent": sum(sent for sent, _ in counts),
                    "received": sum(got for _, got in counts),
                    "connections": len(counts),
                    "booked_down": self.link.ledger.totals["down"] - self._before["down"],
                    "booked_up": self.link.ledger.totals["up"] - self._before["up"],
                },
            )

    def farewell(self, timeout_s: float) -> None:
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
            self._events.put(broken)

    def _step(self, timeout_s: float | None) -> bool:
        moved = False
        while not self._commands.empty():
            self._do(self._commands.get()(time.monotonic()))
            moved = True
        if self._sent_task:  # with the last turn
            if not self._sent_any:  # how long a server that was started anew took to it
                self._sent_any = True
                self._told.tell("first_task", {"round": self.protocol.round})
            self._at("broadcasting", self.protocol.round)
            self._sent_task = False
        for event in self.transport.poll(self._hearing.wait(timeout_s)):
            moved = True
            self._hearing.came(event)
        moved = self._hearing.strangers() or moved
        if self._gone is not None and all(w.conn is None for w in self.protocol.workers.values()):
            self._gone.set()
        if moved:
            self._flush()  # what was spent stays in the book, whatever becomes of this process
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._do(self.protocol.tick(now))
            self._told.hush(now)
            if now - self._booked >= QUIET_S:
                self._booked = now
                self.link.settle_counted(NOBODY)
            offset = time.time() - now
            work = self.protocol.work.values()
            self.snapshot = {
                "waiting": [{**w, "since": w["since"] + offset} for w in self.protocol.waiting()],  # type: ignore[operator]
                "arrived": sorted(w.job.client for w in work if w.status == "done"),
                "present": len(self.protocol.present()),
            }
        return moved

    def book_round(self, round: int) -> None:
        """Heartbeats: one line a worker and round."""
        for conn, worker in self.protocol.connections():
            self.link.settle_counted(conn, round=round, worker=worker)

    def _closed(self, event: Closed) -> None:
        conn = event.conn
        worker = self.protocol.worker_of(conn)
        self._do(self.protocol.closed(conn, time.monotonic()))
        where = {"round": self.protocol.round, "worker": worker}
        self.link.undecoded(conn, event.received, **where)
        self.link.settle_counted(conn, **where)
        self.link.closed(conn, lambda direction, key: self.protocol.awaits(conn, direction, key))

    def _receive(self, event: Received, now: float) -> bool:
        """Whether it was of no use."""
        conn, frames = event.conn, event.frames
        try:
            message, body = self.link.receive(conn, frames)
        except RemoteProtocolError as broken:
            self._do(self.protocol.undecodable(conn, str(broken), now))
            return True
        instructions = self.protocol.received(conn, message, body, now, event.user)
        first = instructions[0] if instructions else None
        stray = first.reason if isinstance(first, Stray) else ""
        if isinstance(message, m.Join) and self.protocol.worker_of(conn):
            self.transport.vouch(conn)
            self.link.joined(conn)
            self.link.settle_counted(NOBODY)
        key: m.Key | None = getattr(message, "key", None)
        if stray and key is not None and not self._hearing.worth_a_row(conn, stray, key):
            self.link.refused(conn, frames)
        else:
            self.link.book(conn, message, body, frames, stray)
        self._do(instructions)
        return bool(stray) or isinstance(message, m.Beat)

    def _do(self, instructions: list[Instruction]) -> None:
        pending = deque(instructions)
        while pending:
            i = pending.popleft()
            if isinstance(i, (Settle, Forget)):
                self._leave()
            if isinstance(i, Send):
                self._outgoing.append(self.link.compose(i.conn, i.message, i.body))
                self._sent_task = self._sent_task or isinstance(i.message, m.Task)
            elif isinstance(i, Store):
                self.spool.store(i.key, i.offset, i.data)
                self._at("spooling", i.key.round)
            elif isinstance(i, Arrived):
                # After what was to be done before: a task goes out before it is called off.
                pending.extend(self._arrived(i))
            elif isinstance(i, Resolved):
                phase = self.protocol.round, self.protocol.phase, self.protocol.purpose
                self._events.put((phase, i))
            elif isinstance(i, Settle):
                more = {"reason": i.reason} if i.reason else {}
                if i.direction == "down" and i.useful and not self.link.carried(i.conn, i.key):
                    self._had(i.key)
                if i.direction == "up" and not i.useful:
                    self.spool.abandon(i.key)
                self.link.settle(
                    i.conn, "down" if i.direction == "down" else "up", i.key, i.useful, **more
                )
            elif isinstance(i, Note):
                self._told.tell(i.event, i.fields)
            elif isinstance(i, Forget):
                self.transport.drop(i.conn, i.hang_up)
        self._leave()

    def _leave(self) -> None:
        """Sends what was composed, once its bytes are in the books."""
        if self._outgoing:
            self._flush()
            outgoing, self._outgoing = self._outgoing, []
            for out in outgoing:
                self.link.leave(out)

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
        now = time.monotonic()
        reply = dataclasses.replace(
            reply,
            split=tuple(arrived.split),
            taken_s=arrived.taken_s,
            arrived=now,
            reported={n: v for n, v in arrived.reported.items() if math.isfinite(v)},
        )
        try:
            body = reply.glance()
            if digest([body]) != reply.check:
                raise RemoteProtocolError("the payload was damaged on its way")
            self._check(reply, body)
        except RemoteProtocolError as broken:
            self.spool.discard(arrived.key)
            return self.protocol.reject(arrived.key, str(broken), now)
        accepted = self.protocol.accept(arrived.key, now)
        self._do([i for i in accepted if isinstance(i, Settle)])
        # its row first: a reply that a resume folds is in the books, whenever this process ends
        self._flush()
        self.spool.seal(reply)
        self.replies[arrived.key.client, arrived.key.purpose] = reply
        if arrived.key.purpose == "train":
            self._at("receiving", arrived.key.round)
        return [i for i in accepted if not isinstance(i, Settle)]


class Broken(FednetError):
    """Something outside the federation failed, such as the disk."""
