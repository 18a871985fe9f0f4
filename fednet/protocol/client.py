"""The client's side of the protocol: a state machine without I/O. Its states are in `table`.

A process hosts one or many clients over one connection. Their tasks' payloads are pulled in parts
before the tasks are given to the caller; their replies are announced, and sent in parts as the
server grants them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fednet import capacity
from fednet.buffers import lend
from fednet.errors import RemoteProtocolError
from fednet.files import Digest
from fednet.protocol.instructions import Stray as Stray
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
from fednet.protocol.transfers import Receiving, Sending, Silence
from fednet.protocol.workers import TASKS_PER_SLOT
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body
from fednet.wire.messages import PART, Key

REJOIN_S = 1.0  # until a refused join is tried again; then twice as long each time, up to
REJOIN_MOST_S = 8.0
SILENCE = 8.0  # beats after which a client leaves a silent server
UNBOUNDED = 1 << 62  # bytes


# -- instructions: what the caller has to do after an event ----------------------------------------
class Send(msgspec.Struct, frozen=True):
    """Send this message over the connection."""

    message: m.Message
    body: Body | None = None


class Prepare(msgspec.Struct, frozen=True):
    """Prepare data and model by the server's configuration, then call `ready`. again: they are
    those of the run that was prepared before.
    """

    welcome: m.Welcome
    again: bool


class DoTask(msgspec.Struct, frozen=True):
    """Do this task. Its payload is whole."""

    task: m.Task
    body: Body
    check: bytes | None = None
    """The digest of a payload that came in parts."""


class Cancelled(msgspec.Struct, frozen=True):
    """The server does not want this task any more."""

    key: Key


class Reconnect(msgspec.Struct, frozen=True):
    """End the connection and make another one."""


class ClosePayload(msgspec.Struct, frozen=True):
    """Nothing more comes of a payload. whole: all of it has crossed."""

    direction: m.Direction
    key: Key
    whole: bool = True


# Two of the server's messages are passed on: that the run is over, or its server stops; and that
# this process is refused, for good or for now. And the status for which it asked.
Instruction = (
    Send
    | Stray
    | Prepare
    | DoTask
    | Cancelled
    | Reconnect
    | ClosePayload
    | m.End
    | m.Refuse
    | m.Standing
)


# -- the machine -----------------------------------------------------------------------------------
STARTED = (ClientTaskState.WORKING, ClientTaskState.REPLYING)


class HeldTask(msgspec.Struct, eq=False):
    """A task of this process."""

    task: m.Task
    body: Body
    """All of the payload, or room for it."""
    state: ClientTaskState = ClientTaskState.GONE
    room: memoryview | None = None
    """Where the parts of a payload that is coming go: the bytes of `body`."""
    window: Receiving | None = None
    """Of a payload that is coming; None before it is asked for."""
    digest: Digest | None = None
    """Of the parts in `body`: each is added as it comes, while it is in the processor's cache."""
    shared: bool = False
    """`body` is the equal payload of another task, so what comes is not kept."""
    earlier: bool = False
    """An earlier server process asked for it: its reply waits until this one does."""
    reply: m.Reply | None = None
    """Until all of it is sent."""
    reply_body: Body = NOTHING
    announced: bool = False
    """Whether the server knows of the reply."""
    sending: Sending | None = None
    """Of a reply that is sent in parts."""


@dataclass(slots=True)
class ClientProtocol:
    """A client process: its connection, and its clients' tasks. Each method handles an event, and
    returns what to do.

    All payloads together have room for `slots` tasks, as many that are ahead and one that is
    cancelled. With two more: tasks for a slot that there was until now may still come.
    """

    join: m.Join
    """Its first message over each connection, which says what it is and whom it hosts; slots and
    session change.
    """
    room: Callable[[], int] = capacity.free_memory
    """Returns the bytes of memory that a payload may take."""
    part: int = PART
    """Bytes of a payload's parts, but the last."""
    own_links: bool = False
    """Each client has a link of its own: payloads need not wait for each other."""
    rounds_overlap: bool = False
    """A task of a later round does not end other clients' tasks."""
    largest: Callable[[Key], int] = lambda key: UNBOUNDED
    """Returns the most bytes of a task's payload that the run declares."""
    bytes_read: Callable[[], int] = lambda: 0
    """Returns the bytes that were read of the connection, see `ClientTransport.bytes_read`."""

    state: ClientState = ClientState.AWAY
    run: str = ""
    inc: int = 0
    beat_s: float = 2.0
    clients: frozenset[int] = frozenset()  # that the server welcomed
    # By client: stage, step, steps. The threads that train write to it.
    doing: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    _tasks: dict[Key, HeldTask] = field(default_factory=dict)  # none of them GONE
    _at_hand: int = 0  # bytes of payloads that are here or coming; a task that is replying has none
    # Tasks whose payloads are still to be asked for. Some may be gone.
    _awaited: deque[Key] = field(default_factory=deque)
    _out: list[Instruction] = field(default_factory=list)
    _heard: float = 0.0  # when a message last came
    _silence: Silence = field(default_factory=Silence)
    _beaten: float = 0.0  # when the server last got a sign of life
    _sent: bool = False  # anything since the last tick
    _rejoin_at: float | None = None
    _beside: int = field(init=False)  # bytes of a payload that crosses beside its message
    _rejoin_s: float = REJOIN_S
    _config: str = ""
    _layout: str = ""
    _sites: list[m.SiteFacts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._beside = m.beside(self.part)

    # -- events of the transport and of the clock --------------------------------------------------
    def opened(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if self.state in CONNECTED:  # the end of the last connection was not heard of
            out = self.closed()
        self._change(ClientEvent.OPENED)
        if self.state is not ClientState.OVER:
            self._join(now)
        return out + self._take_instructions()

    def closed(self) -> list[Instruction]:
        """The connection has ended: the server sends again what was coming, and replies are
        announced again.
        """
        self._change(ClientEvent.CLOSED)
        for key, held in list(self._tasks.items()):
            self._close_cut_short(held)
            held.announced = False
            held.sending = None
            if held.state is not ClientTaskState.WORKING:
                self._change_task(key, ClientTaskEvent.CLOSED)
        return self._take_instructions()

    def received(self, message: m.Message, body: Body | None, now: float) -> list[Instruction]:
        """Handles a decoded message. Raises RemoteProtocolError for what the protocol does not
        allow; nothing has changed then.
        """
        self._heard = now
        if self.state not in CONNECTED:
            return [Stray("late")]
        if isinstance(message, m.Welcome):
            self._welcomed(message)
        elif isinstance(message, m.Standing):
            if not self.join.status:
                raise RemoteProtocolError("a status that was not asked for")
            self._change(ClientEvent.TURNED_AWAY)
            self._out.append(message)
        elif isinstance(message, m.Refuse):
            if message.final:
                self._change(ClientEvent.TURNED_AWAY)
                self._out.append(message)
            elif self.state is ClientState.JOINING:
                self._rejoin_at = now + self._rejoin_s
                self._rejoin_s = min(2 * self._rejoin_s, REJOIN_MOST_S)
                self._out.append(message)
            elif message.unread:
                # The server may wait for the lost message: after a join all is announced again.
                self._out.append(Reconnect())
        elif message.run != self.run or message.inc != self.inc:
            raise RemoteProtocolError(
                f"a message of another run or incarnation ({message.run[:16]!r}, {message.inc})"
            )
        elif isinstance(message, m.Task):
            client = message.key.client
            if self.state is not ClientState.READY or client not in self.clients:
                raise RemoteProtocolError(f"a task of client {client}, which is not ready here")
            self._task(message, body)
        elif isinstance(message, m.Part):
            self._part(message, body)
        elif isinstance(message, m.Pull):
            self._pulled(message)
        elif isinstance(message, m.Cancel):
            if message.key in self._tasks:
                self._drop(message.key, ClientTaskEvent.CANCELLED)
        elif isinstance(message, m.End):
            if message.over:
                self._change(ClientEvent.ENDED)
            self._out.append(message)
        if self._awaited:
            self._pull()
        return self._take_instructions()

    def tick(self, now: float) -> list[Instruction]:
        if self._rejoin_at is not None and now >= self._rejoin_at:
            self._rejoin_at = None
            self._change(ClientEvent.REJOINS)
            self._join(now)
            return self._take_instructions()
        if self.state in CONNECTED:
            most = SILENCE * self.beat_s
            heard = self._silence.last_sign(self._heard, now, most, self.bytes_read)
            self._heard = now if heard is None else heard
            if heard is None:
                return [Reconnect()]
        if self._sent and not self.doing:
            self._beaten = now  # any message is a sign of life, and saves the server a beat
        if self.state in TAKEN_IN and now - self._beaten >= self.beat_s:
            self._beaten = now
            doing = list(self.doing.items())  # a copy: other threads write to it
            for client, (stage, done, of) in doing:
                self._send(m.Progress(client=client, stage=stage, step=done, steps=of))
            if not doing:
                self._send(m.Alive())
        self._sent = False
        return self._take_instructions()

    # -- calls of the caller, which does the work --------------------------------------------------
    def ready(self, layout: str, sites: Sequence[m.SiteFacts] = ()) -> list[Instruction]:
        """Data and model are in place."""
        self._layout = layout
        self._sites = list(sites)
        if self.state is ClientState.WELCOMED:
            self._ready()
        return self._take_instructions()

    def finish(self, answers: Iterable[tuple[m.Reply | m.Failed, Body]]) -> list[Instruction]:
        """Tasks are done, or have failed. Nothing is sent of one that was cancelled meanwhile. A
        reply and its body are kept until all of it is sent.
        """
        for message, body in answers:
            held = self._tasks.get(message.key)
            if held is None:
                continue
            if isinstance(message, m.Reply):
                self._change_task(message.key, ClientTaskEvent.REPLIED)
                held.reply = message
                held.reply_body = body
                held.body = NOTHING  # its room is for the next task's payload
                if self.state is ClientState.READY:
                    self._announce(held)
            elif held.state is ClientTaskState.WORKING:
                self._change_task(message.key, ClientTaskEvent.FAILED)
                reason = m.clean(message.reason, 4000)
                self._send(msgspec.structs.replace(message, reason=reason))
        return self._take_instructions()

    def abandon(self, key: Key) -> list[Instruction]:
        """Nothing more is sent for this task, and the server is not notified."""
        if self.task_state(key) in STARTED:
            self._drop(key, ClientTaskEvent.ABANDONED)
        return self._take_instructions()

    def uploading(self, client: int) -> list[Instruction]:
        """A client's reply waits for its link; this process is free for its next client."""
        self._send(m.Progress(client=client, stage=m.UPLOADING))
        return self._take_instructions()

    def slots_changed(self, slots: int) -> list[Instruction]:
        """From now on this process can do so many tasks at once."""
        changed = slots != self.join.slots
        self.join = msgspec.structs.replace(self.join, slots=slots)
        if changed and self.state in TAKEN_IN:
            self._send(m.Slots(slots=slots))
        return self._take_instructions()

    def leave(self, reason: str = "") -> list[Instruction]:
        self._change(ClientEvent.LEAVES)
        self._send(m.Leave(reason=m.clean(reason, 300)))
        return self._take_instructions()

    # -- inside ------------------------------------------------------------------------------------
    def task_state(self, key: Key) -> ClientTaskState:
        held = self._tasks.get(key)
        return ClientTaskState.GONE if held is None else held.state

    def _change(self, event: ClientEvent) -> None:
        self.state = step(CLIENT, self.state, event)
        if self.state is not ClientState.JOINING:
            self._rejoin_at = None
            self._rejoin_s = REJOIN_S

    def _change_task(self, key: Key, event: ClientTaskEvent) -> None:
        """Changes a task's state by the table. Nothing is kept of a task that is gone."""
        held = self._tasks[key]
        counted = held.state is not ClientTaskState.REPLYING
        held.state = step(CLIENT_TASK, held.state, event)
        if counted and held.state in (ClientTaskState.REPLYING, ClientTaskState.GONE):
            self._at_hand -= held.task.size
        if held.state is ClientTaskState.GONE:
            del self._tasks[key]

    def _send(self, message: m.Message, body: Body | None = None) -> None:
        """Sends a message, with the run and the incarnation of its server."""
        self._sent = True
        marked = msgspec.structs.replace(message, run=self.run, inc=self.inc)
        self._out.append(Send(marked, body))

    def _take_instructions(self) -> list[Instruction]:
        out = self._out
        self._out = []
        return out

    def _join(self, now: float) -> None:
        self._heard = self._beaten = now
        holding = sorted(key for key in self._tasks if self.task_state(key) in STARTED)
        self._send(msgspec.structs.replace(self.join, holding=holding))

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self.state is not ClientState.JOINING:
            raise RemoteProtocolError("a welcome to a process that has not just joined")
        if welcome.speaks != m.PROTOCOL:
            raise RemoteProtocolError(
                f"a welcome in version {welcome.speaks} of the protocol; this client has version "
                f"{m.PROTOCOL}"
            )
        # A resumed run may have another configuration.
        before = (self.run, self._config, self.clients)
        again = (welcome.run, welcome.config, frozenset(welcome.ids)) == before
        if not again:
            self._layout = ""  # what is prepared is another run's
            for key in list(self._tasks):
                if self.task_state(key) in STARTED:
                    self._drop(key, ClientTaskEvent.ABANDONED)
        elif welcome.inc != self.inc:  # what this server asks for again is not done again
            for held in self._tasks.values():
                held.earlier = True
        self._change(ClientEvent.WELCOME)
        self.join = msgspec.structs.replace(self.join, session=welcome.session)
        self.beat_s = welcome.beat_s
        self.run = welcome.run
        self.inc = welcome.inc
        self._config = welcome.config
        self.clients = frozenset(welcome.ids)
        self._out.append(Prepare(welcome, again))
        if again and self._layout:
            self._ready()

    def _ready(self) -> None:
        self._change(ClientEvent.PREPARED)
        self._send(m.Ready(layout=self._layout, sites=self._sites))
        for key in sorted(self._tasks):
            self._announce(self._tasks[key])

    # -- a task arrives ----------------------------------------------------------------------------
    def _task(self, task: m.Task, body: Body | None) -> None:
        key = task.key
        held = self._tasks.get(key)
        came = 0 if body is None else body.size
        expected = task.size if body is not None or task.size <= self._beside else 0
        if sum([f.size for f in task.form]) != task.size or came != expected:
            if held is not None and held.state in STARTED:
                self._out.append(Stray("doubled"))
            else:  # a part of it was lost on its way, and does not come any more
                self._out.append(Stray("refused"))
                reason = "task: announced sizes do not agree"
                self._send(m.Failed(key=key, reason=reason, again=True))
            return
        for other, begun in list(self._tasks.items()):
            earlier = (other.round, other.phase) < (key.round, key.phase)
            instead = other.client == key.client or not self.rounds_overlap
            if earlier and instead and begun.state in STARTED:
                self._drop(other, ClientTaskEvent.ABANDONED)
        if held is not None and held.earlier:
            held.earlier = False
            if _same(task, held.task):
                self._out.append(ClosePayload("down", key))
                self._announce(held)
                return
            self._drop(key, ClientTaskEvent.ABANDONED)
        elif held is not None:
            self._out.insert(0, Stray("doubled"))
            return
        most = self.largest(key)
        if task.size > most:
            reason = f"a payload of {task.size} bytes; this run declares {most} at most"
            self._fail(key, reason, again=False)
        elif self._at_hand + task.size > (TASKS_PER_SLOT * self.join.slots + 3) * most:
            self._no_room(task, "what this client takes beside its other tasks")
        else:
            self._at_hand += task.size
            self._tasks[key] = HeldTask(task, NOTHING if body is None else body.own())
            if body is not None or task.size == 0:
                self._payload_complete(key)
            else:
                self._change_task(key, ClientTaskEvent.TASK)
                self._awaited.append(key)

    def _pull(self) -> None:
        """Begins to ask for payloads, in the order of their tasks: for one at a time over a shared
        link, so that its task can begin before the others' payloads have come.
        """
        while self._awaited:
            if not self.own_links and any(h.window is not None for h in self._tasks.values()):
                return
            held = self._tasks.get(self._awaited.popleft())
            if held is None or held.state is not ClientTaskState.COMING or held.window is not None:
                continue
            key = held.task.key
            where = self._make_room(held)
            if where:
                self._change_task(key, ClientTaskEvent.NO_ROOM)
                self._no_room(held.task, where)
            else:
                held.window = Receiving(held.task.size, self.part)
                self._grant(key, held.window)

    def _make_room(self, held: HeldTask) -> str:
        """Finds room for a payload; returns where there is too little, "" if there is enough."""
        task = held.task
        # Most clients get the same broadcast, and this process has it in memory once.
        for other in self._tasks.values():
            here = other.shared or other.state is ClientTaskState.WORKING
            if here and other.body and task.check and task.check == other.task.check:
                held.body = other.body
                held.shared = True
                held.digest = other.digest
                return ""
        room = self.room()
        if task.size > room:
            return f"the {room} that are free"
        try:
            # Not cleared: the system gives it memory as parts are written to it.
            held.room = lend(task.size).data
            held.body = Body([held.room])
            held.digest = Digest()
        except (MemoryError, OverflowError, ValueError):
            return "this machine"
        return ""

    def _no_room(self, task: m.Task, where: str) -> None:
        self._fail(task.key, f"a payload of {task.size} bytes does not fit into {where}")

    def _fail(self, key: Key, reason: str, again: bool = True) -> None:
        """Tells the server that a task could not begin here; again: that it may be tried again."""
        self._out.append(ClosePayload("down", key, False))
        self._send(m.Failed(key=key, reason=reason, again=again))

    def _grant(self, key: Key, window: Receiving) -> None:
        granted = window.grant()
        if granted is not None:
            self._send(m.Pull(key=key, first=granted[0], count=granted[1]))

    def _part(self, part: m.Part, body: Body | None) -> None:
        """The next part of a task's payload has come."""
        held = self._tasks.get(part.key)
        if held is None or held.window is None:
            self._out.append(Stray("late"))
            return
        try:
            start = held.window.take(part.index, body)
        except RemoteProtocolError as broken:
            # What is missing does not come any more: the server must send the task again.
            self._change_task(part.key, ClientTaskEvent.DAMAGED)
            self._fail(part.key, str(broken))
            return
        if start is None or body is None:
            self._out.append(Stray("doubled"))
            return
        if not held.shared:
            # A copy, also of a server's in this process: a method may write to what it gets.
            assert held.room is not None
            assert held.digest is not None
            data = body.to_bytes()
            held.room[start : start + len(data)] = data
            held.digest.update(data)
        if held.window.whole:
            self._payload_complete(part.key)
        else:
            self._grant(part.key, held.window)

    def _payload_complete(self, key: Key) -> None:
        self._change_task(key, ClientTaskEvent.WHOLE)
        held = self._tasks[key] = self._tasks.pop(key)  # in the order in which they are worked on
        held.window = None
        held.room = None
        check = None if held.digest is None else held.digest.digest()
        self._out += (ClosePayload("down", key), DoTask(held.task, held.body, check))

    def _drop(self, key: Key, event: ClientTaskEvent) -> None:
        """Nobody wants this task any more."""
        self._close_cut_short(self._tasks[key])
        self._change_task(key, event)
        self._out.append(Cancelled(key))

    def _close_cut_short(self, held: HeldTask) -> None:
        """What has crossed of the task, or of its reply, was in vain."""
        if held.state is ClientTaskState.COMING:
            self._out.append(ClosePayload("down", held.task.key, False))
        if held.reply is not None:
            self._out.append(ClosePayload("up", held.task.key, False))

    # -- a task is answered ------------------------------------------------------------------------
    def _announce(self, held: HeldTask) -> None:
        """Announces the reply, if the server asked for it and does not know of it; a small one is
        sent with it.
        """
        reply = held.reply
        if reply is None or held.announced or held.earlier:
            return
        held.announced = True
        if (reply.run, reply.inc) != (self.run, self.inc):  # the server was restarted meanwhile
            reply = msgspec.structs.replace(reply, run=self.run, inc=self.inc)
        self._sent = True
        body = held.reply_body
        if body.size <= self._beside:
            self._out += (Send(reply, body if body.size else None), ClosePayload("up", reply.key))
            self._change_task(reply.key, ClientTaskEvent.SENT)
        else:
            held.sending = Sending(body, self.part)
            self._out.append(Send(reply))

    def _pulled(self, pull: m.Pull) -> None:
        """The server asks for parts of a reply."""
        held = self._tasks.get(pull.key)
        if held is None or held.sending is None or not held.announced:
            self._out.append(Stray("late"))
            return
        parts = held.sending.pulled(pull.first, pull.count)
        if parts is None:
            self._out.append(Stray("doubled"))
            return
        for index, data in parts:
            self._send(m.Part(key=pull.key, index=index), data)
        if held.sending.whole:
            self._out.append(ClosePayload("up", pull.key))
            self._change_task(pull.key, ClientTaskEvent.SENT)


def _same(a: m.Task, b: m.Task) -> bool:
    """Whether a reply to one task answers the other."""
    names = ("check", "form", "start", "enrol", "evaluates")
    return all(getattr(a, name) == getattr(b, name) for name in names)
