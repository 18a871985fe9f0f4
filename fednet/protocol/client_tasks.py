"""A client process's tasks: their payloads are pulled in parts before they are given to be worked
on; their replies are announced, and sent in parts as the server grants them.

    pulled ── the last part ──> worked on ── reply ──> announced, and sent
    any ── called off, or a later phase has begun ──> forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fednet.buffers import lend
from fednet.errors import RemoteProtocolError
from fednet.protocol.client_instructions import (
    Booked,
    Cancelled,
    Given,
    Instruction,
    Out,
    Stray,
)
from fednet.protocol.window import Receiving, Sending, before_cut
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import Key

MOST = 1 << 62  # bytes: no bound


@dataclass(slots=True)
class Incoming:
    task: m.Task
    body: memoryview
    window: Receiving


@dataclass(slots=True)
class OutgoingReply:
    reply: m.Reply
    sending: Sending
    announced: bool = False


class ClientTasks:
    """The tasks of the clients that this process hosts. room(): bytes of memory that a payload may
    take; part: bytes of a payload's parts, but the last. largest(key): bytes of a task's payload at
    most, by what the run declares; slots: tasks that are worked on at once. All tasks together have
    what these, one that is ahead and one that is called off can take.
    """

    def __init__(self, room: Callable[[], int], part: int) -> None:
        self._room, self._part = room, part
        self.beside = False  # a task of a later round leaves other clients' tasks be
        self.largest: Callable[[Key], int] = lambda key: MOST
        self.slots = 1
        self.incoming: dict[Key, Incoming] = {}
        self.working: set[Key] = set()
        self.outgoing: dict[Key, OutgoingReply] = {}
        # What is worked on, or answered and not sent yet.
        self._tasks: dict[Key, m.Task] = {}
        # Of these, the ones that a server now gone had asked for.
        self._earlier: set[Key] = set()

    def held(self) -> list[Key]:
        """What goes on after another join."""
        return sorted({*self.working, *self.outgoing})

    # -- the connection ----------------------------------------------------------------------------
    def cut(self) -> list[Instruction]:
        """The connection is gone: what was cut short is handed out, or announced, anew."""
        out: list[Instruction] = [Booked("down", key, False) for key in self.incoming]
        out += [
            Booked("up", key, False)
            for key, going in self.outgoing.items()
            if going.announced and not going.sending.inline
        ]
        self.incoming.clear()
        for going in self.outgoing.values():
            going.sending.sent, going.announced = 0, False
        return out

    def of_an_earlier_server(self) -> None:
        """A server started anew: what it asks for again is not done again, see `task`."""
        self._earlier = set(self._tasks)
        for going in self.outgoing.values():
            going.announced = True

    # -- a task comes ------------------------------------------------------------------------------
    def task(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        if (
            sum(f.size for f in task.form) != task.size
            or (body is not None and len(body) != task.size)
            or (body is None and 0 < task.size <= self._part)
        ):
            if task.key in self._tasks:
                return [Stray("doubled")]
            # A part of it was lost on its way, and does not come any more.
            reason = "task: announced sizes do not agree"
            return [Stray("refused"), Out(m.Failed(key=task.key, reason=reason, again=True))]
        now = task.key
        earlier = [k for k in self._tasks if (k.round, k.phase) < (now.round, now.phase)]
        out = self.abandon([k for k in earlier if not self.beside or k.client == now.client])
        if task.key in self._earlier:
            self._earlier.discard(task.key)
            if _same(task, self._tasks[task.key]):
                for key, going in self.outgoing.items():
                    if _train(key) == _train(task.key):
                        going.sending.sent, going.announced = 0, False
                return [*out, Booked("down", task.key), *self.announce()]
            out += self.abandon([task.key])
        known = self.incoming, self.working, self.outgoing
        if any(task.key in tasks for tasks in known):
            return [Stray("doubled")]
        return [*out, *self._begun(task, body)]

    def abandon(self, keys: Sequence[Key] | None = None) -> list[Instruction]:
        """These tasks, or all, are not wanted any more."""
        keys = list(self._tasks) if keys is None else keys
        working = [k for k in keys if k in self.working]
        for key in keys:
            self.working.discard(key)
            self._forget(key)
        return [Cancelled(k) for k in working]

    def _begun(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        most = self.largest(task.key)
        if task.size > most:
            reason = f"a payload of {task.size} bytes; this run declares {most} at most"
            return [Booked("down", task.key, False), Out(m.Failed(key=task.key, reason=reason))]
        if self._held_with(task) > (self.slots + 2) * most:
            return self._no_room(task, "what this client takes beside its other tasks")
        if body is not None or task.size == 0:
            return self._given(task, memoryview(bytearray(body or b"")))
        if task.size > (room := self._room()):
            return self._no_room(task, f"the {room} that are free")
        try:
            # Not cleared: the system gives it memory as parts are written to it.
            whole = lend(task.size).data
        except (MemoryError, OverflowError, ValueError):
            return self._no_room(task, "this machine")
        coming = self.incoming[task.key] = Incoming(task, whole, Receiving(task.size, self._part))
        return self._grant(coming)

    def _held_with(self, task: m.Task) -> int:
        """Bytes of this payload and of all that are here or under way."""
        arriving = sum(coming.task.size for coming in self.incoming.values())
        return arriving + sum(self._tasks[key].size for key in self.working) + task.size

    def _no_room(self, task: m.Task, where: str) -> list[Instruction]:
        """Another process may have it, or this one later: it is not done here, and said so."""
        reason = f"a payload of {task.size} bytes does not fit into {where}"
        failed = m.Failed(key=task.key, reason=reason, again=True)
        return [Booked("down", task.key, False), Out(failed)]

    def _given(self, task: m.Task, body: memoryview) -> list[Instruction]:
        self.working.add(task.key)
        self._tasks[task.key] = task
        return [Booked("down", task.key), Given(task, body)]

    def _grant(self, coming: Incoming) -> list[Instruction]:
        granted = coming.window.grant()
        if granted is None:
            return []
        return [Out(m.Pull(key=coming.task.key, first=granted[0], count=granted[1]))]

    def part(self, part: m.Part, body: memoryview | None) -> list[Instruction]:
        """The next part of a task's payload."""
        coming = self.incoming.get(part.key)
        if coming is None:
            return [Stray("late")]
        try:
            start = coming.window.take(part.index, body)
        except RemoteProtocolError as broken:
            # What is missing does not come any more: the task must be given out anew.
            del self.incoming[part.key]
            failed = m.Failed(key=part.key, reason=str(broken), again=True)
            return [Booked("down", part.key, False), Out(failed)]
        if start is None or body is None:
            return [Stray("doubled")]
        coming.body[start : start + len(body)] = body
        if coming.window.whole:
            del self.incoming[part.key]
            return self._given(coming.task, coming.body)
        return self._grant(coming)

    def cancel(self, key: Key) -> list[Instruction]:
        """The server does not want that task any more."""
        coming = self.incoming.pop(key, None)
        known = key in self.working or key in self.outgoing or coming is not None
        out: list[Instruction] = [] if coming is None else [Booked("down", key, False)]
        going = self.outgoing.get(key)
        if going is not None and going.announced and not going.sending.inline:
            out.append(Booked("up", key, False))
        self.forget(key)
        return [*out, Cancelled(key)] if known else []

    # -- and is answered ---------------------------------------------------------------------------
    def reply(self, reply: m.Reply, body: Body, share: float | None) -> bool:
        """Whether there is something to announce. share: see `ClientProtocol.reply`."""
        key = reply.key
        if key.purpose == "train" or key in self.working:
            if key not in self.working:
                return False
            self.working.discard(key)
        elif not any(k.version == key.version and k.client == key.client for k in self.working):
            return False
        sending = Sending(body, self._part)
        if share is not None:
            if not body.size:  # there is nothing that could be cut
                self.forget(key)
                return False
            sending.until = before_cut(body.size, share)
        self.outgoing[key] = OutgoingReply(reply, sending)
        return True

    def failed(self, failed: m.Failed) -> list[Instruction]:
        if failed.key not in self.working:
            return []
        self.working.discard(failed.key)
        self._tasks.pop(failed.key, None)
        return [Out(failed)]

    def announce(self) -> list[Instruction]:
        """The replies that the server does not know of."""
        out: list[Instruction] = []
        for key in sorted(
            self.outgoing, key=lambda k: (k.round, k.phase, k.purpose != "evaluate", k)
        ):
            going = self.outgoing[key]
            if going.announced:
                continue
            going.announced = True
            sending, inline = going.sending, going.sending.inline
            out.append(Out(going.reply, sending.all() if inline and sending.body.size else None))
            if inline:
                out.append(Booked("up", key, sending.until is None))
                if not self._waits(key):
                    self._forget(key)
        return out

    def _waits(self, key: Key) -> bool:
        """Whether an evaluation within a training task is kept until that task's own reply is
        through: if the connection is cut in between, both are announced anew.
        """
        train = _train(key)
        return key != train and (train in self.working or train in self.outgoing)

    def pulled(self, pull: m.Pull) -> list[Instruction]:
        """The server grants parts of a reply."""
        going = self.outgoing.get(pull.key)
        if going is None or not going.announced:
            return [Stray("late")]
        parts = going.sending.pulled(pull.first, pull.count)
        if parts is None:
            return [Stray("doubled")]
        out: list[Instruction] = [Out(m.Part(key=pull.key, index=i), data) for i, data in parts]
        if going.sending.whole or going.sending.cut:
            self._forget(pull.key)
            out.append(Booked("up", pull.key, going.sending.whole))
        return out

    def forget(self, key: Key) -> None:
        self.working.discard(key)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        """This reply is through, and with a training task's the evaluation within it."""
        self.outgoing.pop(key, None)
        self._tasks.pop(key, None)
        self._earlier.discard(key)
        if key == _train(key):
            self.outgoing.pop(msgspec.structs.replace(key, purpose="evaluate"), None)


def _train(key: Key) -> Key:
    """The training task that a key belongs to."""
    return msgspec.structs.replace(key, purpose="train")


def _same(a: m.Task, b: m.Task) -> bool:
    """Whether what was done for one task answers the other."""
    return not a.faults and (a.check, a.form, a.start, a.enrol, a.judge) == (
        b.check,
        b.form,
        b.start,
        b.enrol,
        b.judge,
    )
