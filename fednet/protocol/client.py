"""The client's side of the protocol: a state machine without I/O. Its states are in `table`.

One process hosts one or many ids over one connection. `ClientProtocol` is that connection,
`ClientTasks` are the tasks of these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from fednet import capacity
from fednet.buffers import lend
from fednet.errors import RemoteProtocolError
from fednet.protocol.table import (
    CLIENT,
    CLIENT_TASK,
    CONNECTED,
    TAKEN_IN,
    ClientEvent,
    ClientState,
    ClientTaskEvent,
    ClientTaskState,
    step,
)
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

    state: ClientState = ClientState.AWAY
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
        self._change(ClientEvent.OPENED)
        return [] if self.state is ClientState.OVER else self._join(now)

    def _join(self, now: float) -> list[Instruction]:
        self._heard = self._beaten = now
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
        self._change(ClientEvent.CLOSED)
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
            if self.state is not ClientState.JOINING:
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
            if self.state is not ClientState.READY or client not in self.hosts:
                raise RemoteProtocolError(f"a task of client {client}, which is not ready here")
            return self.tasks.task(message, body)
        if isinstance(message, m.Part):
            return self.tasks.part(message, body)
        if isinstance(message, m.Pull):
            return self.tasks.pulled(message)
        if isinstance(message, m.Cancel):
            return self.tasks.cancel(message.key)
        if isinstance(message, m.End):
            if message.over:
                self._change(ClientEvent.ENDED)
            return [Ended(message.over, message.reason)]
        return []  # it is alive

    def tick(self, now: float) -> list[Instruction]:
        if self._rejoin_at is not None and now >= self._rejoin_at:
            self._rejoin_at = None
            self._change(ClientEvent.REJOINS)
            return self._join(now)
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
        if self.state is not ClientState.WELCOMED:
            return []
        self._change(ClientEvent.PREPARED)
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
        return self.state is ClientState.READY

    def forget(self, key: Key) -> list[Instruction]:
        """This task will not be answered, and the server does not hear of it: a planned fault."""
        self.tasks.silence(key)
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
        self._change(ClientEvent.LEAVES)
        return self._marked([Out(m.Leave())])

    # -- inside ------------------------------------------------------------------------------------
    def _change(self, event: ClientEvent) -> None:
        self.state = step(CLIENT, self.state, event)
        if self.state is not ClientState.JOINING:
            self._rejoin_at = None

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
        self._change(ClientEvent.WELCOME)
        self.session, self.beat_s = welcome.session, welcome.beat_s
        self.run, self.inc, self._config = welcome.run, welcome.inc, welcome.config
        self.hosts = frozenset(welcome.ids)
        out.append(Welcomed(welcome, again))
        return [*out, *(self.ready(self._layout, self._sites) if again and self._layout else [])]

    def _refused(self, refuse: m.Refuse, now: float) -> list[Instruction]:
        if refuse.final:
            self._change(ClientEvent.TURNED_AWAY)
            return [TurnedAway(refuse.reason)]
        if self.state is ClientState.JOINING:
            self._rejoin_at = now + REJOIN_S
        elif refuse.unread:
            # It might have been awaited: all that is under way is said anew after a join.
            return [Reconnect()]
        return []


# -- the tasks ------------------------------------------------------------------------------------


STARTED = (ClientTaskState.WORKING, ClientTaskState.REPLYING)


@dataclass(slots=True)
class HeldTask:
    """A task that is here. Its state is changed by `ClientTasks._change` alone. body: all of the
    payload, or room for it; window: of one that is coming. earlier: a server that is gone had asked
    for it.
    """

    task: m.Task
    body: memoryview
    state: ClientTaskState = ClientTaskState.GONE
    window: Receiving | None = None
    earlier: bool = False


@dataclass(slots=True)
class OutgoingReply:
    reply: m.Reply
    sending: Sending
    announced: bool = False


class ClientTasks:
    """The tasks of the clients that this process hosts: their payloads are pulled in parts before
    they are given to be worked on; their replies are announced, and sent in parts as the server
    grants them.

    room(): bytes of memory that a payload may take; part: bytes of a payload's parts, but the last.
    largest(key): bytes of a task's payload at most, by what the run declares; slots: tasks that are
    worked on at once. All tasks together have what these, one that is ahead and one that is
    cancelled can take.
    """

    def __init__(self, room: Callable[[], int], part: int) -> None:
        self._room, self._part = room, part
        self.beside = False  # a task of a later round leaves other clients' tasks be
        self.largest: Callable[[Key], int] = lambda key: MOST
        self.slots = 1
        self._tasks: dict[Key, HeldTask] = {}  # none of them GONE
        # The replies that were not sent in full. That to the evaluation within a training task
        # has a key of its own, and stays until the reply to the task is sent.
        self._replies: dict[Key, OutgoingReply] = {}

    def state(self, key: Key) -> ClientTaskState:
        held = self._tasks.get(key)
        return ClientTaskState.GONE if held is None else held.state

    def with_state(self, *states: ClientTaskState) -> list[Key]:
        return [key for key, held in self._tasks.items() if held.state in states]

    def held(self) -> list[Key]:
        """What goes on after another join."""
        working = self.with_state(ClientTaskState.WORKING)
        return sorted({*working, *self._replies})

    def _change(self, key: Key, event: ClientTaskEvent) -> None:
        """Changes a task's state by the table. Of one that is gone nothing is kept."""
        held = self._tasks[key]
        held.state = step(CLIENT_TASK, held.state, event)
        if held.state is ClientTaskState.GONE:
            del self._tasks[key]
            self._replies.pop(key, None)
            self._replies.pop(msgspec.structs.replace(key, purpose="evaluate"), None)

    # -- the connection ----------------------------------------------------------------------------
    def cut(self) -> list[Instruction]:
        """The connection is gone: the server sends again what was coming, and replies are announced
        again.
        """
        out: list[Instruction] = []
        for key in self.with_state(ClientTaskState.COMING):
            self._change(key, ClientTaskEvent.CLOSED)
            out.append(Booked("down", key, False))
        for key in self.with_state(ClientTaskState.REPLYING):
            self._change(key, ClientTaskEvent.CLOSED)
        for key, going in self._replies.items():
            if going.announced and not going.sending.inline:
                out.append(Booked("up", key, False))
            going.sending.sent, going.announced = 0, False
        return out

    def of_an_earlier_server(self) -> None:
        """A server started again: what it asks for again is not done again, see `task`."""
        for held in self._tasks.values():
            held.earlier = True
        for going in self._replies.values():
            going.announced = True

    # -- a task comes ------------------------------------------------------------------------------
    def task(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        key = task.key
        if (
            sum(f.size for f in task.form) != task.size
            or (body is not None and len(body) != task.size)
            or (body is None and 0 < task.size <= self._part)
        ):
            if self.state(key) in STARTED:
                return [Stray("doubled")]
            # A part of it was lost on its way, and does not come any more.
            reason = "task: announced sizes do not agree"
            return [Stray("refused"), Out(m.Failed(key=key, reason=reason, again=True))]
        earlier = [
            k
            for k in self.with_state(*STARTED)
            if (k.round, k.phase) < (key.round, key.phase)
            and (k.client == key.client or not self.beside)
        ]
        out = self.abandon(earlier)
        held = self._tasks.get(key)
        if held is not None and held.earlier:
            held.earlier = False
            if _same(task, held.task):
                for of, going in self._replies.items():
                    if _train(of) == _train(key):
                        going.sending.sent, going.announced = 0, False
                return [*out, Booked("down", key), *self.announce()]
            out += self.abandon([key])
            held = None
        if held is not None or key in self._replies:
            return [Stray("doubled"), *out]
        return [*out, *self._begun(task, body)]

    def abandon(self, keys: Sequence[Key] | None = None) -> list[Instruction]:
        """These tasks, or all, are not wanted any more."""
        out: list[Instruction] = []
        for key in self.with_state(*STARTED) if keys is None else keys:
            if self.state(key) is ClientTaskState.WORKING:
                out.append(Cancelled(key))
            self._change(key, ClientTaskEvent.ABANDONED)
        return out

    def _begun(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        most = self.largest(task.key)
        if task.size > most:
            reason = f"a payload of {task.size} bytes; this run declares {most} at most"
            return [Booked("down", task.key, False), Out(m.Failed(key=task.key, reason=reason))]
        if self._held_with(task) > (self.slots + 2) * most:
            return self._no_room(task, "what this client takes beside its other tasks")
        if body is not None or task.size == 0:
            self._tasks[task.key] = HeldTask(task, memoryview(bytearray(body or b"")))
            return self._whole(task.key)
        if task.size > (room := self._room()):
            return self._no_room(task, f"the {room} that are free")
        try:
            # Not cleared: the system gives it memory as parts are written to it.
            whole = lend(task.size).data
        except (MemoryError, OverflowError, ValueError):
            return self._no_room(task, "this machine")
        window = Receiving(task.size, self._part)
        self._tasks[task.key] = HeldTask(task, whole, window=window)
        self._change(task.key, ClientTaskEvent.TASK)
        return self._grant(task.key, window)

    def _held_with(self, task: m.Task) -> int:
        """Bytes of this payload and of all that are here or under way."""
        with_payload = self.with_state(ClientTaskState.COMING, ClientTaskState.WORKING)
        return task.size + sum(self._tasks[key].task.size for key in with_payload)

    def _no_room(self, task: m.Task, where: str) -> list[Instruction]:
        """Another process may have it, or this one later: it is not done here, and the server is
        told so.
        """
        reason = f"a payload of {task.size} bytes does not fit into {where}"
        failed = m.Failed(key=task.key, reason=reason, again=True)
        return [Booked("down", task.key, False), Out(failed)]

    def _whole(self, key: Key) -> list[Instruction]:
        self._change(key, ClientTaskEvent.WHOLE)
        held = self._tasks[key] = self._tasks.pop(key)  # in the order in which they are worked on
        held.window = None
        return [Booked("down", key), Given(held.task, held.body)]

    def _grant(self, key: Key, window: Receiving) -> list[Instruction]:
        granted = window.grant()
        if granted is None:
            return []
        return [Out(m.Pull(key=key, first=granted[0], count=granted[1]))]

    def part(self, part: m.Part, body: memoryview | None) -> list[Instruction]:
        """The next part of a task's payload."""
        held = self._tasks.get(part.key)
        if held is None or held.window is None:
            return [Stray("late")]
        try:
            start = held.window.take(part.index, body)
        except RemoteProtocolError as broken:
            # What is missing does not come any more: the task must be handed out again.
            self._change(part.key, ClientTaskEvent.DAMAGED)
            failed = m.Failed(key=part.key, reason=str(broken), again=True)
            return [Booked("down", part.key, False), Out(failed)]
        if start is None or body is None:
            return [Stray("doubled")]
        held.body[start : start + len(body)] = body
        if held.window.whole:
            return self._whole(part.key)
        return self._grant(part.key, held.window)

    def cancel(self, key: Key) -> list[Instruction]:
        """The server does not want that task any more."""
        state, going = self.state(key), self._replies.get(key)
        if state is ClientTaskState.GONE and going is None:
            return []
        out: list[Instruction] = []
        if state is ClientTaskState.COMING:
            out.append(Booked("down", key, False))
        if going is not None and going.announced and not going.sending.inline:
            out.append(Booked("up", key, False))
        if state is ClientTaskState.GONE:
            del self._replies[key]  # to the evaluation within a task
        else:
            self._change(key, ClientTaskEvent.CANCELLED)
        return [*out, Cancelled(key)]

    # -- and is answered ---------------------------------------------------------------------------
    def reply(self, reply: m.Reply, body: Body, share: float | None) -> bool:
        """Whether there is something to announce. share: see `ClientProtocol.reply`."""
        key = reply.key
        within = self.state(key) is not ClientTaskState.WORKING  # an evaluation within its task
        if within and (
            key.purpose == "train" or self.state(_train(key)) is not ClientTaskState.WORKING
        ):
            return False
        sending = Sending(body, self._part)
        if share is not None:
            if not body.size:  # there is nothing that could be cut
                self.silence(key)
                return False
            sending.until = before_cut(body.size, share)
        if not within:
            self._change(key, ClientTaskEvent.REPLIED)
            self._tasks[key].body = memoryview(b"")  # its room is for the next task's payload
        self._replies[key] = OutgoingReply(reply, sending)
        return True

    def failed(self, failed: m.Failed) -> list[Instruction]:
        if self.state(failed.key) is not ClientTaskState.WORKING:
            return []
        self._change(failed.key, ClientTaskEvent.FAILED)
        return [Out(failed)]

    def silence(self, key: Key) -> None:
        """This task will not be answered, and the server does not hear of it: a planned fault."""
        if self.state(key) is ClientTaskState.WORKING:
            self._change(key, ClientTaskEvent.SILENCED)

    def announce(self) -> list[Instruction]:
        """The replies that the server does not know of."""
        out: list[Instruction] = []
        for key in sorted(
            self._replies, key=lambda k: (k.round, k.phase, k.purpose != "evaluate", k)
        ):
            going = self._replies[key]
            if going.announced:
                continue
            going.announced = True
            sending, inline = going.sending, going.sending.inline
            out.append(Out(going.reply, sending.all() if inline and sending.body.size else None))
            if inline:
                out.append(Booked("up", key, sending.until is None))
                self._sent(key)
        return out

    def pulled(self, pull: m.Pull) -> list[Instruction]:
        """The server grants parts of a reply."""
        going = self._replies.get(pull.key)
        if going is None or not going.announced:
            return [Stray("late")]
        parts = going.sending.pulled(pull.first, pull.count)
        if parts is None:
            return [Stray("doubled")]
        out: list[Instruction] = [Out(m.Part(key=pull.key, index=i), data) for i, data in parts]
        if going.sending.whole or going.sending.cut:
            out.append(Booked("up", pull.key, going.sending.whole))
            self._sent(pull.key)
        return out

    def _sent(self, key: Key) -> None:
        """All of a reply has left. That to an evaluation within a task is kept until the reply to
        the task has left too: if the connection is cut in between, both are announced again.
        """
        if self.state(key) is ClientTaskState.REPLYING:
            self._change(key, ClientTaskEvent.SENT)
        elif (
            self.state(_train(key)) is ClientTaskState.GONE or not self._replies[key].sending.inline
        ):
            del self._replies[key]


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
