"""The client's side of the protocol: a state machine without I/O.

    away ── connected ──> joining ── Welcome ──> welcomed ── the client's `ready` ──> ready
    joining, welcomed, ready ── connection closed, or the server silent ──> away
    any ── End, a final Refuse, leave ──> over

One process hosts one or many ids over one connection. What becomes of its tasks is in
`client_tasks`, what is answered with in `client_instructions`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from fednet import capacity
from fednet.buffers import lend
from fednet.errors import RemoteProtocolError
from fednet.protocol.transfers import Receiving, Sending, before_cut
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import PART, Key

REJOIN_S = 1.0  # seconds until a refused join is tried again
SILENCE = 8.0  # a server that was silent for this many beats is taken for gone
# One that was not gone was at something else, such as a slow disk, and may be again: each time that
# it is met anew, twice as many, up to these, for so many seconds.
MOST_SILENCE, SLOW_S = 4 * SILENCE, 600.0
MOST = 1 << 62  # bytes: no bound


# -- instructions: what the machine answers an event with -----------------------------------------


@dataclass(frozen=True, slots=True)
class Out:
    """Send this."""

    message: m.Message
    body: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The server's configuration; the engine prepares data and model, then calls `ready`."""

    welcome: m.Welcome
    again: bool  # of the same run as before: all is prepared


@dataclass(frozen=True, slots=True)
class Given:
    """A task with its whole payload."""

    task: m.Task
    body: memoryview


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This task is not wanted any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over (or, `over` false, its server stopped and a later one goes on)."""

    over: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The server refused this client for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The server has been silent for too long: connect anew."""


@dataclass(frozen=True, slots=True)
class Booked:
    """The row of this payload is complete. whole: all of it is here."""

    direction: str
    key: Key
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Stray:
    """The message just received belongs to nothing that is under way: it is billed, and not used.
    Comes first.
    """

    reason: str


Instruction = Out | Stray | Welcomed | Given | Cancelled | Ended | TurnedAway | Reconnect | Booked


# -- the connection -------------------------------------------------------------------------------


class Standing(enum.Enum):
    """How this process stands with a server."""

    AWAY = "away"
    JOINING = "joining"
    WELCOMED = "welcomed"
    READY = "ready"
    OVER = "over"


CONNECTED = (Standing.JOINING, Standing.WELCOMED, Standing.READY)
TAKEN_IN = (Standing.WELCOMED, Standing.READY)


@dataclass(slots=True)
class ClientProtocol:
    """Feed it `opened`, `closed`, `received`, `tick` and the calls of whoever does the work; do
    what it returns.
    """

    worker: str
    ids: Sequence[int] = ()
    share: tuple[int, int] | None = None
    host: str = ""
    pid: int = 0
    device: str = ""
    slots: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    room: Callable[[], int] = capacity.room  # bytes of memory that a payload may take
    part: int = PART  # bytes of a payload's parts, but the last

    state: Standing = Standing.AWAY
    run: str = ""
    inc: int = 0
    session: str = ""
    beat_s: float = 2.0
    hosts: frozenset[int] = frozenset()  # of the ids, those that the server welcomed
    # client -> phase, step, steps. The threads that train write to it.
    doing: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    tasks: ClientTasks = field(init=False)
    _heard: float = 0.0
    _beaten: float = 0.0
    _said: bool = False  # something, since the last tick
    _rejoin_at: float | None = None
    _silence: float = SILENCE
    _taken_for_gone: bool = False  # the server, since it last welcomed this process
    _slow_at: float = 0.0  # when it was found to be there all the same
    _config: str = ""
    _layout: str = ""
    _sites: list[m.SiteFacts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = ClientTasks(self.room, self.part)
        self.tasks.slots = self.slots

    # -- the transport's events --------------------------------------------------------------------
    def opened(self, now: float) -> list[Instruction]:
        if self.state is Standing.OVER:
            return []
        self.state, self._heard, self._beaten = Standing.JOINING, now, now
        join = m.Join(
            worker=self.worker,
            session=self.session,
            ids=list(self.ids),
            share=self.share,
            host=self.host,
            pid=self.pid,
            device=self.device,
            slots=self.slots,
            versions=self.versions,
            files=self.files,
            holding=self.tasks.held(),
        )
        return self._marked([Out(join)])

    def closed(self, now: float) -> list[Instruction]:
        if self.state is not Standing.OVER:
            self.state = Standing.AWAY
        self._rejoin_at = None
        return self.tasks.cut()

    def received(
        self, message: m.Message, body: memoryview | None, now: float
    ) -> list[Instruction]:
        """A decoded message. Raises RemoteProtocolError for what the protocol does not allow;
        nothing has changed then.
        """
        self._heard = now
        if self.state not in CONNECTED:
            return [Stray("late")]
        if isinstance(message, m.Welcome):
            if self.state is not Standing.JOINING:
                raise RemoteProtocolError("a welcome to a process that has not just joined")
            return self._welcomed(message)
        if isinstance(message, m.Refuse):
            return self._refused(message, now)
        if message.run != self.run or message.inc != self.inc:
            raise RemoteProtocolError(
                f"a message of another run or incarnation ({message.run[:16]!r}, {message.inc})"
            )
        return self._marked(self._of_the_run(message, body))

    def _of_the_run(self, message: m.Message, body: memoryview | None) -> list[Instruction]:
        if isinstance(message, m.Task):
            client = message.key.client
            if self.state is not Standing.READY or client not in self.hosts:
                raise RemoteProtocolError(f"a task of client {client}, which is not ready here")
            return self.tasks.task(message, body)
        if isinstance(message, m.Part):
            return self.tasks.part(message, body)
        if isinstance(message, m.Pull):
            return self.tasks.pulled(message)
        if isinstance(message, m.Cancel):
            return self.tasks.cancel(message.key)
        if isinstance(message, m.End):
            self.state = Standing.OVER if message.over else self.state
            return [Ended(message.over, message.reason)]
        return []  # it is alive

    def tick(self, now: float) -> list[Instruction]:
        if self._rejoin_at is not None and now >= self._rejoin_at:
            self._rejoin_at = None
            return self.opened(now)
        if now - self._slow_at > SLOW_S:
            self._silence = SILENCE
        if self.state in CONNECTED and now - self._heard > self._silence * self.beat_s:
            self._heard, self._taken_for_gone = now, True
            return [Reconnect()]
        doing = list(self.doing.items())  # a copy: other threads write to it
        if self._said and not doing:  # which is sign of life enough: a busy server has few to hear
            self._beaten = now
        self._said = False
        if self.state in TAKEN_IN and now - self._beaten >= self.beat_s:
            self._beaten = now
            beats: list[Instruction] = [
                Out(m.Progress(client=c, phase=p, step=s, steps=n)) for c, (p, s, n) in doing
            ]
            marked = self._marked(beats or [Out(m.Alive())])
            self._said = False
            return marked
        return []

    # -- the calls of whoever does the work --------------------------------------------------------
    def ready(self, layout: str, sites: Sequence[m.SiteFacts] = ()) -> list[Instruction]:
        """Data and model are in place."""
        self._layout, self._sites = layout, list(sites)
        if self.state is not Standing.WELCOMED:
            return []
        self.state = Standing.READY
        ready = m.Ready(layout=layout, sites=self._sites)
        return self._marked([Out(ready), *self.tasks.announce()])

    def reply(self, reply: m.Reply, body: Body, share: float | None = None) -> list[Instruction]:
        """A task is done. A reply to a task that was cancelled meanwhile is not sent. share: of the
        upload that is sent before this client falls silent, where such a fault is planned.
        """
        made = self.tasks.reply(reply, body, share)
        return self._marked(self.tasks.announce()) if made and self._is_ready else []

    @property
    def _is_ready(self) -> bool:
        return self.state is Standing.READY

    def forget(self, key: Key) -> list[Instruction]:
        """This task will not be answered, and the server does not hear of it: a planned fault."""
        self.tasks.forget(key)
        return []

    def failed(
        self, key: Key, reason: str, again: bool, lacks: bool = False, base: bool = False
    ) -> list[Instruction]:
        text = m.clean(reason, 4000)
        failed = m.Failed(key=key, reason=text, again=again, lacks=lacks, base=base)
        return self._marked(self.tasks.failed(failed))

    def uploading(self, client: int) -> list[Instruction]:
        """A client's reply waits for its link; this process is free for its next client."""
        return self._marked([Out(m.Progress(client=client, phase=m.UPLOADING))])

    def at_once(self, slots: int) -> list[Instruction]:
        """From now on this process can do so many tasks at once."""
        changed, self.slots = slots != self.slots, slots
        self.tasks.slots = slots
        if not changed or self.state not in TAKEN_IN:
            return []
        return self._marked([Out(m.Slots(slots=slots))])

    def leave(self) -> list[Instruction]:
        self.state = Standing.OVER
        return self._marked([Out(m.Leave())])

    # -- inside ------------------------------------------------------------------------------------
    def _marked(self, instructions: list[Instruction]) -> list[Instruction]:
        """What is sent bears the run, and the incarnation of its server."""
        self._said = self._said or any(isinstance(i, Out) for i in instructions)
        return [
            replace(i, message=msgspec.structs.replace(i.message, run=self.run, inc=self.inc))
            if isinstance(i, Out)
            else i
            for i in instructions
        ]

    def _welcomed(self, welcome: m.Welcome) -> list[Instruction]:
        if welcome.speaks != m.PROTOCOL:
            raise RemoteProtocolError(
                f"a welcome in version {welcome.speaks} of the protocol; this client speaks "
                f"version {m.PROTOCOL}"
            )
        # A resume may have changed it.
        again = (welcome.run, welcome.config, frozenset(welcome.ids)) == (
            self.run,
            self._config,
            self.hosts,
        )
        if self._taken_for_gone and self.run in ("", welcome.run) and self.inc in (0, welcome.inc):
            self._silence, self._slow_at = min(2 * self._silence, MOST_SILENCE), self._heard
        self._taken_for_gone = False
        out: list[Instruction] = []
        if not again:
            self._layout = ""  # what is prepared is another run's
            out += self.tasks.abandon()
        elif welcome.inc != self.inc:
            self.tasks.of_an_earlier_server()
        self.state, self.session, self.beat_s = Standing.WELCOMED, welcome.session, welcome.beat_s
        self.run, self.inc, self._config = welcome.run, welcome.inc, welcome.config
        self.hosts = frozenset(welcome.ids)
        out.append(Welcomed(welcome, again))
        return [*out, *(self.ready(self._layout, self._sites) if again and self._layout else [])]

    def _refused(self, refuse: m.Refuse, now: float) -> list[Instruction]:
        if refuse.final:
            self.state = Standing.OVER
            return [TurnedAway(refuse.reason)]
        if self.state is Standing.JOINING:
            self._rejoin_at = now + REJOIN_S
        elif refuse.unread:
            # It might have been awaited: all that is under way is said anew after a join.
            return [Reconnect()]
        return []


# -- the tasks ------------------------------------------------------------------------------------


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
