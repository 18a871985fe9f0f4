"""The server's input and output: one thread that owns the socket, the link, the protocol machine and the spool.

The engine gives it commands by `call` and takes events from `wait`. In one process there is no thread: `wait` then
pumps the same loop, and the clients' with it, until something has happened.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from fednet.engine.checkpoint import Spool, Spooled
from fednet.errors import FednetError, RemoteProtocolError
from fednet.protocol.rules import Arrived, Forget, Instruction, Note, Resolved, Send, Settle, Store
from fednet.protocol.server import ServerProtocol
from fednet.transport.base import Closed, Received, ServerTransport
from fednet.wire import messages as m
from fednet.wire.codec import checksum
from fednet.wire.link import Link

TICK_S = 0.05  # how often time passes for the protocol while something is awaited


class Hub:
    """check(reply): raises RemoteProtocolError for a payload that is not what was declared. note(event, fields):
    writes to the run's events."""

    def __init__(self, protocol: ServerProtocol, transport: ServerTransport, link: Link, spool: Spool, check: Callable[[Spooled, bytearray], None],
                 note: Callable[[str, dict[str, Any]], None], pump: Callable[[], bool] | None = None) -> None:
        self.protocol, self.transport, self.link, self.spool = protocol, transport, link, spool
        self.replies: dict[tuple[int, str], Spooled] = {}
        self._check, self._note, self._pump_clients = check, note, pump
        self._commands: queue.SimpleQueue[Callable[[float], list[Instruction]]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ticked = 0.0
        self._closing = threading.Event()
        self._last_round = 0
        self.snapshot: dict[str, Any] = {"waiting": [], "arrived": [], "present": 0}
        self._thread = None if pump is not None else threading.Thread(target=self._run, name="fednet-hub", daemon=True)
        if self._thread is not None:
            self._thread.start()

    # -- the engine's side ---------------------------------------------------------------------------------------------
    def call(self, command: Callable[[float], list[Instruction]]) -> None:
        """Runs `command(now)` where the protocol lives, and does what it returns."""
        self._commands.put(command)
        self.transport.wake()

    def wait(self, timeout_s: float) -> Resolved | None:
        """The next client whose part in the phase is over, or None after `timeout_s`. Raises what broke the hub."""
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
            found = self._events.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self, linger_s: float = 1.0) -> None:
        self._closing.set()
        if self._thread is not None:
            self.transport.wake()
            self._thread.join(5.0)
        self._book_kernel()
        self.link.ledger.settle_all()
        self.transport.close(linger_s)

    # -- the loop ------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._step(None if not self.protocol.workers and not self.protocol.work else TICK_S)
            self._step(0.0)
        except BaseException as broken:  # whatever it is, the engine must not wait for ever: it is raised there
            self._events.put(broken)

    def _step(self, timeout_s: float | None) -> bool:
        moved = False
        while not self._commands.empty():
            self._do(self._commands.get()(time.monotonic()))
            moved = True
        for event in self.transport.poll(timeout_s):
            moved = True
            now = time.monotonic()
            if isinstance(event, Received):
                self._receive(event, now)
            elif isinstance(event, Closed):
                self._do(self.protocol.closed(event.conn, now))
                self._book_plain(event.conn)
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._do(self.protocol.tick(now))
            offset = time.time() - now
            work = self.protocol.work.values()
            self.snapshot = {"waiting": [{**w, "since": w["since"] + offset} for w in self.protocol.waiting()],  # type: ignore[operator]
                             "arrived": sorted(w.job.client for w in work if w.status == "done"), "present": len(self.protocol.present())}
        return moved

    def _receive(self, event: Received, now: float) -> None:
        try:
            message, body = self.link.receive(event.conn, event.frames)
        except RemoteProtocolError as broken:
            self._do(self.protocol.undecodable(event.conn, str(broken), now))
            return
        self._do(self.protocol.received(event.conn, message, body, now, event.user))
        if isinstance(message, (m.Join, m.Ready, m.Failed, m.Leave)):
            self.link.settle_plain(event.conn, "up", str(message.__struct_config__.tag))

    def _do(self, instructions: list[Instruction]) -> None:
        for i in instructions:
            if isinstance(i, Send):
                self.link.send(i.conn, i.message, i.body)
                if isinstance(i.message, (m.Welcome, m.Refuse, m.End)):
                    self.link.settle_plain(i.conn, "down", str(i.message.__struct_config__.tag))
            elif isinstance(i, Store):
                self.spool.store(i.key, i.offset, i.data)
            elif isinstance(i, Arrived):
                self._arrived(i)
            elif isinstance(i, Resolved):
                self._events.put(i)
            elif isinstance(i, Settle):
                more = {"reason": i.reason} if i.reason else {}
                self.link.settle(i.conn, "down" if i.direction == "down" else "up", i.key, i.useful, **more)
            elif isinstance(i, Note):
                self._note(i.event, i.fields)
            elif isinstance(i, Forget):
                self.transport.drop(i.conn)

    def _arrived(self, arrived: Arrived) -> None:
        """Checks a whole reply, and accepts or rejects it."""
        worker = self.protocol.workers[arrived.worker]
        reply = self.spool.whole(arrived.key, arrived.form, arrived.check, arrived.state, arrived.kept, arrived.seconds,
                                 {"host": worker.host, "pid": worker.pid, "device": worker.device})
        now = time.monotonic()
        try:
            body = reply.body()
            if checksum([body]) != reply.check:
                raise RemoteProtocolError("the payload was damaged on its way")
            self._check(reply, body)
        except RemoteProtocolError as broken:
            self.spool.discard(arrived.key)
            self._do(self.protocol.reject(arrived.key, str(broken), now) if arrived.key.purpose == self.protocol.purpose else [])
            return
        self.spool.seal(reply)
        self.replies[arrived.key.client, arrived.key.purpose] = reply
        if arrived.key.purpose == self.protocol.purpose:
            self._do(self.protocol.accept(arrived.key, now))

    # -- books ---------------------------------------------------------------------------------------------------------
    def book_round(self, round: int) -> None:
        """Heartbeats: one line a connection and round."""
        for conn in list(self.protocol._by_conn):
            self._book_plain(conn, round=round)

    def _book_plain(self, conn: bytes, **more: Any) -> None:
        for direction in ("up", "down"):
            for tag in ("beat", "cancel"):
                self.link.settle_plain(conn, direction, tag, **more)  # type: ignore[arg-type]

    def _book_kernel(self) -> None:
        for conn in list(self.protocol._by_conn):
            self._book_plain(conn)


class Broken(FednetError):
    """Something outside the federation failed, such as the disk."""
