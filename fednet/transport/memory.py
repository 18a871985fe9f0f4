"""Payloads between a server and workers that one launcher forked: they lie in memory that all of
them have from it, and a reference crosses the socket in their place.

The memory has no name: only whom the launcher forks has it, and it is the system's again when the
last of these has ended, however they end. A `SharedBuffer` is one direction between the server and
one worker; a worker proves to have its own by a token, which its join carries. So nobody else can
make a server, or a client, read what they did not send.

A large reply lies in a file instead, where the server wants it for a crash anyway (`uploads`).

What came so is judged and folded where it lies: who can write to it meanwhile is a process that the
launcher forked, or one of the same user, and can write to all of the run.
"""

from __future__ import annotations

import logging
import mmap
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fednet.buffers import Lease, send_from
from fednet.transport.base import (
    MAX_FRAME_BYTES,
    ClientTransport,
    Closed,
    Event,
    Frame,
    Frames,
    Received,
    ServerTransport,
)
from fednet.transport.broadcasts import Broadcasts, Lane
from fednet.transport.references import FREE, READ, REFERENCE, SENT, Places
from fednet.transport.uploads import Uploads
from fednet.wire.codec import Body
from fednet.wire.frames import Laid

log = logging.getLogger(__name__)

SLOTS = 16  # bodies that lie in a buffer at a time; while all are taken, bodies cross the socket
FROM_BYTES = 1 << 16  # smaller ones do always

_SLOT_BYTES = -(-MAX_FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedBuffer(Places):
    """One direction, with one sender and one receiver at a time. A slot's number tells one body
    from the next that lies there: what was sent over a connection that has ended may have been
    written over.
    """

    def __init__(self) -> None:
        """Before the fork of either end."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE + SLOTS * _SLOT_BYTES)
        whole = np.frombuffer(self._memory, np.uint8)
        heads = whole[: 16 * SLOTS].view(np.uint64).reshape(SLOTS, 2)
        super().__init__(heads[:, 0], heads[:, 1])
        self._slots = whole[mmap.PAGESIZE :].reshape(SLOTS, _SLOT_BYTES)

    # -- the sender's end --------------------------------------------------------------------------
    def lay(self, body: memoryview) -> bytes | None:
        """Copies a body here, and returns the reference to it; None where there is no room now."""
        if len(body) > _SLOT_BYTES:
            return None
        for slot in range(SLOTS):
            if self._state[slot] == FREE:
                self._slots[slot, : len(body)] = body
                self._number[slot] += 1
                self._state[slot] = SENT
                number = int(self._number[slot])
                return REFERENCE.pack(self.token, slot, number, len(body))
        return None

    def leaves(self, reference: bytes) -> None:
        """It has counted as sent since it was laid: a connection that ends meanwhile takes it."""

    # -- the receiver's end ------------------------------------------------------------------------
    def read(self, reference: Frame) -> memoryview | None:
        _, slot, number, nbytes = REFERENCE.unpack(reference)
        if nbytes > _SLOT_BYTES or not self._lies(slot, number):
            return None
        self._state[slot] = READ
        lease = Lease(self._slots[slot, :nbytes])
        self._when_gone(lease, self._release, slot, number)
        return np.asarray(lease).data.toreadonly()


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Between the server and one worker, made by whoever forks both."""

    up: SharedBuffer
    down: SharedBuffer
    uploads: Uploads
    broadcasts: Broadcasts  # the same for all
    lane: Lane  # the worker's own of them

    @property
    def token(self) -> bytes:
        return self.up.token

    def cut(self) -> None:
        """The connection has ended, or the server is a new one: what it had sent is lost."""
        self.down.cut()
        self.lane.cut()


def shared_memory(workers: int) -> list[SharedMemory]:
    """For each of a launcher's workers."""
    all = Broadcasts(workers)
    return [
        SharedMemory(SharedBuffer(), SharedBuffer(), Uploads(), all, lane) for lane in all.lanes
    ]


T = TypeVar("T", bound=ServerTransport | ClientTransport)


class _Over(Generic[T]):
    """A transport that is passed on but for bodies."""

    def __init__(self, inner: T) -> None:
        self._inner: T = inner

    def lay(self, conn: bytes, body: memoryview) -> Frame | Laid:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:  # whatever else that transport has
        return getattr(self._inner, name)


class MemoryServer(_Over[ServerTransport]):
    """A server's transport, whose connections to forked workers share memory. `vouch` with a
    token binds its worker's connection to it.
    """

    def __init__(
        self, inner: ServerTransport, shared: Sequence[SharedMemory], folder: Path | None = None
    ) -> None:
        """folder: for large replies, of this server alone and on the disk of its run."""
        super().__init__(inner)
        self._known = {found.token: found for found in shared}
        self._bound: dict[bytes, SharedMemory] = {}
        for found in shared:
            found.up.renew()
            found.cut()
        self._folder = folder
        if folder is not None:
            for k, found in enumerate(shared):
                found.uploads.put(folder / str(k))

    def close(self, linger_s: float = 0.0) -> None:
        self._inner.close(linger_s)
        if self._folder is not None:  # what a later server goes on with has a second name
            shutil.rmtree(self._folder, ignore_errors=True)

    def vouch(self, conn: bytes, token: bytes = b"") -> None:
        self._inner.vouch(conn)
        if token in self._known:
            self._known[token].cut()  # the last connection's end may not have been told yet
            self._bound[conn] = self._known[token]

    def lay(self, conn: bytes, body: memoryview) -> Frame | Laid:
        found = self._bound.get(conn)
        return body if found is None else _laid(found.down, body)

    def lay_whole(self, conn: bytes, body: Body) -> Laid | None:
        """Where that connection's worker finds a payload; None where it has to be sent it."""
        found = self._bound.get(conn) if body.size > MAX_FRAME_BYTES else None
        return None if found is None else found.broadcasts.lay(body, found.lane)

    def send(self, conn: bytes, frames: Frames) -> bool:
        found = self._bound.get(conn)
        places = () if found is None else (found.down, found.lane)
        return _sent(places, frames, lambda plain: self._inner.send(conn, plain))

    def poll(self, timeout_s: float | None) -> list[Event]:
        out: list[Event] = []
        for event in self._inner.poll(timeout_s):
            if isinstance(event, Received) and event.conn in self._bound:
                found = self._bound[event.conn]
                read = _read((found.up, found.uploads), event)
                if read is None:
                    self._inner.drop(event.conn, hang_up=True)
                    continue
                event = read
            elif isinstance(event, Closed) and event.conn in self._bound:
                found = self._bound.pop(event.conn)
                if not any(other is found for other in self._bound.values()):
                    found.cut()
            out.append(event)
        return out


class MemoryClient(_Over[ClientTransport]):
    """A worker's transport, over the memory that it shares with the server."""

    def __init__(self, inner: ClientTransport, shared: SharedMemory) -> None:
        super().__init__(inner)
        self._shared = shared
        shared.up.cut()
        shared.down.renew()
        shared.lane.renew()
        shared.uploads.renew_sender()
        send_from(shared.uploads.lend)

    def lay(self, conn: bytes, body: memoryview) -> Frame | Laid:
        return _laid(self._shared.up, body)

    def lay_whole(self, body: Body) -> Body:
        found = self._shared.uploads.lay(body.segments) if body.size > MAX_FRAME_BYTES else None
        return body if found is None else Body([found.body], found)

    def send(self, frames: Frames) -> bool:
        return _sent((self._shared.up, self._shared.uploads), frames, self._inner.send)

    def poll(self, timeout_s: float | None) -> list[Event]:
        out: list[Event] = []
        for event in self._inner.poll(timeout_s):
            if isinstance(event, Received):
                read = _read((self._shared.down, self._shared.lane), event)
                if read is None:
                    self._inner.reconnect()
                    continue
                event = read
            elif isinstance(event, Closed):
                self._shared.up.cut()
                self._shared.uploads.cut()
            out.append(event)
        return out


def laying(transport: object) -> Callable[[bytes, memoryview], Frame | Laid]:
    """What a link does with a body before it is sent over that transport."""
    return transport.lay if isinstance(transport, _Over) else _crossing


def payloads_of(transport: object) -> Callable[[bytes, Body], Laid | None]:
    """What a server does with a payload that a connection asks for."""
    return transport.lay_whole if isinstance(transport, MemoryServer) else lambda conn, body: None


def laying_whole(transport: object) -> Callable[[Body], Body]:
    """What a worker does with a large reply that may go at once."""
    return transport.lay_whole if isinstance(transport, MemoryClient) else lambda body: body


def _crossing(conn: bytes, body: memoryview) -> Frame:
    return body


def _laid(buffer: SharedBuffer, body: memoryview) -> Frame | Laid:
    reference = buffer.lay(body) if len(body) >= FROM_BYTES else None
    return body if reference is None else Laid(reference, body)


def _sent(
    places: Sequence[Places],
    frames: Sequence[Frame | Laid],
    send: Callable[[Sequence[Frame]], bool],
) -> bool:
    laid = [f.reference for f in frames if isinstance(f, Laid)]
    mine = [(where, reference) for reference in laid for where in places if where.refers(reference)]
    for where, reference in mine:
        where.leaves(reference)
    sent = send([f.reference if isinstance(f, Laid) else f for f in frames])
    for where, reference in () if sent else mine:
        where.take_back(reference)
    return sent


def _read(places: Sequence[Places], event: Received) -> Received | None:
    """The event with its body in place of the reference; None where that body is lost."""
    found = [w for w in places if len(event.frames) == 2 and w.refers(event.frames[1])]
    if not found:
        return event
    head, reference = event.frames
    body = found[0].read(reference)
    if body is None:
        log.warning("a body that a message refers to lies in no buffer any more; connecting anew")
        return None
    # The link that laid bodies down takes them so; no other receiver sees this event.
    frames: Any = (head, Laid(bytes(reference), body))
    return Received(event.conn, frames, event.user)
