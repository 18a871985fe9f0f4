"""The loop of a client process: one connection for one or many clients. Its thread has the socket,
the protocol and the book; each slot has a thread that trains.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from fednet.client.books import Book
from fednet.client.slots import CpuMemory, Slots, Threads
from fednet.client.tasks import OWN_ERRORS, Call, Prepared, Tasks
from fednet.errors import CannotGoOn, RemoteProtocolError
from fednet.protocol import client as p
from fednet.protocol.client import ClientProtocol
from fednet.protocol.table import TAKEN_IN
from fednet.transport.base import ClientTransport, Closed, Opened, Received
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.ledger import Direction, Ledger
from fednet.wire.link import Link

log = logging.getLogger(__name__)
CONNECTION = b""  # a client has one
UNANSWERED_S = 3.0  # after so long without a server the user is told
FIND_S = 0.1  # between two looks for the server


def given_up(give_up_s: float, transport: ClientTransport | None = None) -> CannotGoOn:
    """Returns the error of a client that no server has taken in for so long."""
    cause = ""
    if transport is not None and transport.trouble:
        cause = f"; {transport.address}: {transport.trouble}"
    return CannotGoOn(
        f"no server has taken this client in for {give_up_s:g} s (--give-up{cause}); started again "
        f"with the same --state, it goes on."
    )


class Finder(Protocol):
    """Finds the server while there is no connection. over: there will be no server any more."""

    over: bool

    def address(self) -> str | None: ...


class ClientLoop:
    """Does what the protocol answers to messages, to finished tasks and to the time.

    prepare(loop, welcome) builds data and model for a run, and opens its book; it is called again
    only for another run. curve: the connection is encrypted, or its bytes are counted as if it
    were. inline: tasks are done within `step`, because the server runs in this process too. faults:
    planned faults are acted out.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        transport: ClientTransport,
        prepare: Callable[[ClientLoop, m.Welcome], Prepared],
        *,
        curve: bool,
        inline: bool = False,
        finder: Finder | None = None,
        faults: bool = False,
        slots: Slots | None = None,
    ) -> None:
        self.protocol = protocol
        self.transport = transport
        self.ended: p.Ended | p.TurnedAway | None = None
        self.book = Book()
        self.link = Link(
            "client",
            lambda conn, frames: self.transport.send(frames),
            lambda n: framing(n, curve=curve),
            Ledger(self.book.write, by_round=False),
            connection_bytes(curve, "client"),
        )
        self.slots = slots or Slots([CpuMemory()], 1)
        self._prepare = prepare
        self._inline = inline
        self._finder = finder
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()  # by other threads, for this one
        self._round = 0  # of the newest task
        self._found_at = 0.0  # when the finder was last asked
        self._connected = False
        self._leaving = False
        self._threads = Threads(self.slots, inline, self._tell_slots)
        self.tasks = Tasks(protocol, self._threads, self._later, inline=inline, faults=faults)

    # -- the loop ----------------------------------------------------------------------------------
    def run(
        self, say: Callable[[str], None] = lambda line: None, give_up_s: float | None = None
    ) -> p.Ended | p.TurnedAway:
        """Works until the run is over or this process is asked to leave.

        say(sentence) is called when nobody answers, and when someone does again. Raises CannotGoOn
        when no server has taken this process in for give_up_s, and what a task raised that is to
        end the process.
        """
        taken_in = connected = time.monotonic()  # when that was last so
        reported = False
        while self.ended is None:
            self.step(min(0.5, self.protocol.beat_s / 2))
            if self.tasks.error is not None:
                raise self.tasks.error
            now = time.monotonic()
            if self.protocol.state in TAKEN_IN:
                taken_in = now
            elif give_up_s is not None and now - taken_in > give_up_s:
                raise given_up(give_up_s, self.transport)
            if self._connected:
                connected = now
                if reported:
                    say(f"connected to {self.transport.address}")
                reported = False
            elif not reported and self.ended is None and now - connected > UNANSWERED_S:
                cause = f" ({self.transport.trouble})" if self.transport.trouble else ""
                say(
                    f"not connected to {self.transport.address} yet{cause}; trying on "
                    f"(Ctrl-C ends this)"
                )
                reported = True
        return self.ended

    def leave(self) -> None:
        """Asks the loop to end; safe to call from a signal handler."""
        self._leaving = True

    def step(self, timeout_s: float) -> bool:
        """Handles what the transport has, what the tasks have brought, and what is due by now.
        Returns whether there was anything.
        """
        moved = False
        for event in self.transport.poll(self.tasks.until_due(timeout_s)):
            moved = True
            now = time.monotonic()
            if isinstance(event, Opened):
                self._connected = True
                self.link.opened(CONNECTION)
                self._follow(self.protocol.opened(now))
            elif isinstance(event, Closed):
                self._connected = False
                self.link.ended(CONNECTION)
                self._follow(self.protocol.closed(now))
                self.link.undecoded(CONNECTION, event.received)
                self.link.closed(CONNECTION)
            elif isinstance(event, Received):
                self._receive(event, now)
        while not self._calls.empty():
            moved = True
            self._follow(self._calls.get()())
        for call in self.tasks.take_due():
            self._follow(call())
        if self._inline and self._threads.waiting:
            moved = True
            self._threads.work_inline()
        self._follow(self.protocol.tick(time.monotonic()))
        if self._leaving and self.ended is None:
            self._follow(self.protocol.leave())
            self.ended = p.Ended(False, "asked to leave")
        if not self._connected:
            self._look()
        return moved

    def _look(self) -> None:
        """Asks the finder, at most once in FIND_S seconds, where the server is by now."""
        if self._finder is None or time.monotonic() - self._found_at <= FIND_S:
            return
        self._found_at = time.monotonic()
        address = self._finder.address()
        if self._finder.over:
            self.leave()
        if address is not None and address != self.transport.address:
            self.transport.reconnect(address)

    def close(self) -> None:
        self.tasks.stop()
        self._threads.close()
        self.link.closed(CONNECTION)
        self.transport.close(1.0)
        self.book.close()

    # -- messages ----------------------------------------------------------------------------------
    def _receive(self, event: Received, now: float) -> None:
        try:
            message, body = self.link.receive(CONNECTION, event.frames)
        except RemoteProtocolError as broken:
            log.warning("refused a message of the server, and connecting again: %s", broken)
            self._follow([p.Reconnect()])  # the message is lost, and might have been awaited
            return
        instructions: list[p.Instruction] = []
        stray = ""
        try:
            instructions = self.protocol.received(message, body, now)
        except RemoteProtocolError as broken:
            log.warning("refused a message of the server: %s", broken)
            stray = "refused"
        if instructions and isinstance(instructions[0], p.Stray):
            stray = instructions[0].reason
        self.link.book(CONNECTION, message, body, event.frames, stray)
        self._follow(instructions)

    def _follow(self, instructions: list[p.Instruction]) -> None:
        for i in instructions:
            if isinstance(i, p.Out):
                self.link.send(CONNECTION, i.message, i.body)
            elif isinstance(i, p.Given):
                if i.task.key.round != self._round:  # heartbeats: one line a round
                    self.link.settle_counted(CONNECTION, round=self._round)
                    self._round = i.task.key.round
                self.tasks.add(i)
            elif isinstance(i, p.Welcomed):
                self._welcomed(i)
            elif isinstance(i, p.Booked):
                reason = {} if i.whole else {"reason": "cut short"}
                direction: Direction = "down" if i.direction == "down" else "up"
                self.link.settle(CONNECTION, direction, i.key, i.whole, **reason)
            elif isinstance(i, p.Cancelled):
                self.tasks.cancel(i.key)
            elif isinstance(i, p.Ended):
                if i.over:
                    self.ended = i
            elif isinstance(i, p.TurnedAway):
                self.ended = i
            elif isinstance(i, p.Reconnect):
                self.transport.reconnect(
                    self._finder.address() if self._finder is not None else None
                )

    def _welcomed(self, event: p.Welcomed) -> None:
        self.link.ledger.incarnation = event.welcome.inc
        if not event.again or self.tasks.prepared is None:
            self._threads.put(lambda device: self._prepare_run(event.welcome))

    # -- preparing a run ---------------------------------------------------------------------------
    def _later(self, call: Call) -> None:
        """Makes the thread of the loop make this call; any thread may call it."""
        self._calls.put(call)
        if not self._inline:
            self.transport.wake()

    def _prepare_run(self, welcome: m.Welcome) -> None:
        try:
            prepared = self._prepare(self, welcome)
        except OWN_ERRORS as broken:
            # Raised again in the thread that runs the loop, which ends the process; but SystemExit
            # of a user's own part must not end it as if all were well.
            if not isinstance(broken, Exception):
                name = type(broken).__name__
                broken = CannotGoOn(f"a part of your own raised {name}: {broken}")
            self.tasks.error = broken
            self._later(list)
            return
        self.tasks.prepared = prepared
        self.slots.pack(prepared.together)
        self._threads.start()
        # Another server may have welcomed this process meanwhile: what is ready here is not what
        # that one asked for.
        self._later(lambda: self._use(prepared) if self.protocol.run == welcome.run else [])

    def _use(self, prepared: Prepared) -> list[p.Instruction]:
        # Without the emulated links of the run before.
        self.transport = getattr(self.transport, "inner", self.transport)
        if prepared.shape is not None:
            self.transport = prepared.shape(self.transport, self._connected)
        ours = self.protocol.tasks
        ours.beside = prepared.beside
        ours.largest = prepared.largest
        return [
            *self.protocol.at_once(self.slots.total),
            *self.protocol.ready(prepared.layout, prepared.sites),
        ]

    def _tell_slots(self) -> None:
        if not self._inline:
            self._later(lambda: self.protocol.at_once(self.slots.total))
