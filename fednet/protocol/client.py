"""The client's side of the protocol: a state machine without I/O.

    away ── connected ──> joining ── Welcome ──> welcomed ── the client's `ready` ──> ready
    joining, welcomed, ready ── connection closed, or the server silent ──> away
    ready ── End ──> over

One process hosts one or many ids over one connection. A task's payload is pulled in parts before
the task is given to the engine; a reply is announced, and its parts are sent as the server grants
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fednet import capacity
from fednet.buffers import lend
from fednet.errors import RemoteProtocolError
from fednet.protocol.rules import WINDOW
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import PART, Key

REJOIN_S = 1.0  # seconds until a refused join is tried again
SILENCE = 8.0  # a server that was silent for this many beats is taken for gone


# -- instructions ----------------------------------------------------------------------------------
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
    """The row of this payload is complete. whole: all of it crossed."""

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


@dataclass(slots=True)
class Incoming:
    task: m.Task
    body: memoryview
    got: int = 0
    granted: int = 0


@dataclass(slots=True)
class Outgoing:
    reply: m.Reply
    body: Body
    sent: int = 0
    announced: bool = False
    until: int | None = None  # parts that are sent; then silence: a planned fault


@dataclass(slots=True)
class ClientProtocol:
    """Feed it `opened`, `closed`, `received`, `tick` and the engine's calls; do what it returns."""

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

    state: str = "away"
    run: str = ""
    inc: int = 0
    session: str = ""
    beat_s: float = 2.0
    hosts: frozenset[int] = frozenset()  # of the ids, those that the server welcomed
    _heard: float = 0.0
    _beaten: float = 0.0
    _rejoin_at: float | None = None
    _incoming: dict[Key, Incoming] = field(default_factory=dict)
    _outgoing: dict[Key, Outgoing] = field(default_factory=dict)
    _working: set[Key] = field(default_factory=set)
    # What is worked on, or answered and not sent yet.
    _tasks: dict[Key, m.Task] = field(default_factory=dict)
    # Of these, the ones that a server now gone had asked for.
    _earlier: set[Key] = field(default_factory=set)
    _config: str = ""
    _layout: str = ""
    _sites: list[m.SiteFacts] = field(default_factory=list)
    doing: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    # -- the transport's events --------------------------------------------------------------------
    def opened(self, now: float) -> list[Instruction]:
        if self.state == "over":
            return []
        self.state, self._heard, self._beaten = "joining", now, now
        holding = sorted({*self._working, *self._outgoing})
        return [
            Out(
                m.Join(
                    run=self.run,
                    inc=self.inc,
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
                    holding=holding,
                )
            )
        ]

    def closed(self, now: float) -> list[Instruction]:
        if self.state != "over":
            self.state = "away"
        cut: list[Instruction] = [Booked("down", key, False) for key in self._incoming]
        cut += [
            Booked("up", key, False)
            for key, going in self._outgoing.items()
            if going.announced and going.body.size > self.part
        ]
        self._incoming.clear()  # what was cut short is handed out anew
        for reply in self._outgoing.values():
            reply.sent, reply.announced = 0, False
        self._rejoin_at = None
        return cut

    def received(
        self, message: m.Message, body: memoryview | None, now: float
    ) -> list[Instruction]:
        """A decoded message. Raises RemoteProtocolError for what the protocol does not allow;
        nothing has changed then.
        """
        self._heard = now
        if self.state in ("away", "over"):
            return [Stray("late")]
        if isinstance(message, m.Welcome):
            if self.state != "joining":
                raise RemoteProtocolError("a welcome to a process that has not just joined")
            return self._welcomed(message)
        if isinstance(message, m.Refuse):
            return self._refused(message, now)
        if message.run != self.run or message.inc != self.inc:
            raise RemoteProtocolError(
                f"a message of another run or incarnation ({message.run[:16]!r}, {message.inc})"
            )
        if isinstance(message, m.Task):
            return self._task(message, body)
        if isinstance(message, m.Part):
            return self._part(message, body)
        if isinstance(message, m.Pull):
            return self._pulled(message)
        if isinstance(message, m.Cancel):
            return self._cancel(message.key)
        if isinstance(message, m.End):
            self.state = "over" if message.over else self.state
            return [Ended(message.over, message.reason)]
        return []  # a beat

    def tick(self, now: float) -> list[Instruction]:
        if self._rejoin_at is not None and now >= self._rejoin_at:
            self._rejoin_at = None
            return self.opened(now)
        if (
            self.state in ("joining", "welcomed", "ready")
            and now - self._heard > SILENCE * self.beat_s
        ):
            self._heard = now
            return [Reconnect()]
        if self.state in ("welcomed", "ready") and now - self._beaten >= self.beat_s:
            self._beaten = now
            # A copy: the threads that train write to it.
            doing = list(self.doing.items()) or [(-1, ("idle", 0, 0))]
            return [
                Out(m.Beat(run=self.run, inc=self.inc, client=c, phase=p, step=s, steps=n))
                for c, (p, s, n) in doing
            ]
        return []

    # -- the engine's calls ------------------------------------------------------------------------
    def ready(self, layout: str, sites: Sequence[m.SiteFacts] = ()) -> list[Instruction]:
        """Data and model are in place."""
        self._layout, self._sites = layout, list(sites)
        if self.state != "welcomed":
            return []
        self.state = "ready"
        return [
            Out(m.Ready(run=self.run, inc=self.inc, layout=layout, sites=self._sites)),
            *self._announce(),
        ]

    def reply(self, reply: m.Reply, body: Body, share: float | None = None) -> list[Instruction]:
        """A task is done. A reply to a task that was cancelled meanwhile is not sent. share: of the
        upload that is sent before this client falls silent, where such a fault is planned.
        """
        if reply.key.purpose == "train" or reply.key in self._working:
            if reply.key not in self._working:
                return []
            self._working.discard(reply.key)
        elif not any(
            k.version == reply.key.version and k.client == reply.key.client for k in self._working
        ):
            return []
        if share is not None and body.size <= self.part:  # one message comes whole or not at all
            return self.forget(reply.key)
        self._outgoing[reply.key] = Outgoing(
            reply, body, until=None if share is None else int(share * body.parts(self.part))
        )
        return self._announce() if self.state == "ready" else []

    def forget(self, key: Key) -> list[Instruction]:
        """This task will not be answered, and nobody is told: a planned fault."""
        self._working.discard(key)
        self._forget(key)
        return []

    def failed(self, key: Key, reason: str, again: bool, lacks: bool = False) -> list[Instruction]:
        if key not in self._working:
            return []
        self._working.discard(key)
        self._tasks.pop(key, None)
        return [
            Out(
                m.Failed(
                    run=self.run,
                    inc=self.inc,
                    key=key,
                    reason=m.clean(reason, 4000),
                    again=again,
                    lacks=lacks,
                )
            )
        ]

    def at_once(self, slots: int) -> list[Instruction]:
        """From now on this process can do so many tasks at once."""
        changed, self.slots = slots != self.slots, slots
        return (
            [Out(m.Beat(run=self.run, inc=self.inc, slots=slots))]
            if changed and self.state in ("welcomed", "ready")
            else []
        )

    def leave(self) -> list[Instruction]:
        self.state = "over"
        return [Out(m.Leave(run=self.run, inc=self.inc))]

    # -- inside ------------------------------------------------------------------------------------
    def _welcomed(self, welcome: m.Welcome) -> list[Instruction]:
        # A resume may have changed it.
        again = (welcome.run, welcome.config, frozenset(welcome.ids)) == (
            self.run,
            self._config,
            self.hosts,
        )
        out: list[Instruction] = []
        if not again:
            self._layout = ""  # what is prepared is another run's
            out += self._abandon(list(self._tasks))
        elif welcome.inc != self.inc:
            # A server started anew: what it asks for again is not done again, see `_task`.
            self._earlier = set(self._tasks)
            for going in self._outgoing.values():
                going.announced = True
        self.state, self.run, self.inc, self.session, self.beat_s = (
            "welcomed",
            welcome.run,
            welcome.inc,
            welcome.session,
            welcome.beat_s,
        )
        self.hosts, self._config = frozenset(welcome.ids), welcome.config
        out.append(Welcomed(welcome, again))
        return [*out, *(self.ready(self._layout, self._sites) if again and self._layout else [])]

    def _refused(self, refuse: m.Refuse, now: float) -> list[Instruction]:
        if refuse.final:
            self.state = "over"
            return [TurnedAway(refuse.reason)]
        if self.state == "joining":
            self._rejoin_at = now + REJOIN_S
        elif refuse.unread:
            # It might have been awaited: all that is under way is said anew after a join.
            return [Reconnect()]
        return []

    def _task(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        if (
            sum(f.size for f in task.form) != task.size
            or (body is not None and len(body) != task.size)
            or (body is None and 0 < task.size <= self.part)
        ):
            raise RemoteProtocolError("task: announced sizes do not agree")
        if self.state != "ready" or task.key.client not in self.hosts:
            raise RemoteProtocolError(
                f"a task of client {task.key.client}, which is not ready here"
            )
        if body is None and task.size > (room := self.room()):
            raise RemoteProtocolError(
                f"task: a payload of {task.size} bytes does not fit into the {room} that are free"
            )
        out = self._abandon(
            [k for k in self._tasks if (k.round, k.phase) < (task.key.round, task.key.phase)]
        )
        if task.key in self._earlier:
            self._earlier.discard(task.key)
            if self._same(task, self._tasks[task.key]):
                for key, going in self._outgoing.items():
                    if _train(key) == _train(task.key):
                        going.sent, going.announced = 0, False
                return [*out, Booked("down", task.key), *self._announce()]
            out += self._abandon([task.key])
        if task.key in self._incoming or task.key in self._working or task.key in self._outgoing:
            return [Stray("doubled")]
        return [*out, *self._begun(task, body)]

    @staticmethod
    def _same(a: m.Task, b: m.Task) -> bool:
        """Whether what was done for one task answers the other."""
        return not a.faults and (a.check, a.form, a.start, a.enrol, a.judge) == (
            b.check,
            b.form,
            b.start,
            b.enrol,
            b.judge,
        )

    def _abandon(self, keys: Sequence[Key]) -> list[Instruction]:
        working = [k for k in keys if k in self._working]
        for key in keys:
            self._working.discard(key)
            self._forget(key)
        return [Cancelled(k) for k in working]

    def _begun(self, task: m.Task, body: memoryview | None) -> list[Instruction]:
        if body is not None or task.size == 0:
            return self._given(task, memoryview(bytearray(body or b"")))
        try:
            whole = lend(
                task.size
            ).data  # not cleared: the system gives it memory as parts are written to it
        except (MemoryError, OverflowError, ValueError) as broken:
            raise RemoteProtocolError(
                f"task: a payload of {task.size} bytes does not fit into this machine"
            ) from broken
        self._incoming[task.key] = Incoming(task, whole)
        return self._grant(task.key)

    def _given(self, task: m.Task, body: memoryview) -> list[Instruction]:
        self._working.add(task.key)
        self._tasks[task.key] = task
        return [Booked("down", task.key), Given(task, body)]

    def _grant(self, key: Key) -> list[Instruction]:
        inc = self._incoming[key]
        parts = -(-inc.task.size // self.part)
        ahead = inc.granted - inc.got
        n = min(WINDOW - ahead, parts - inc.granted)
        if n <= 0 or ahead > WINDOW // 2:
            return []
        first, inc.granted = inc.granted, inc.granted + n
        return [Out(m.Pull(run=self.run, inc=self.inc, key=key, first=first, count=n))]

    def _part(self, part: m.Part, body: memoryview | None) -> list[Instruction]:
        inc = self._incoming.get(part.key)
        if inc is None:
            return [Stray("late")]
        if part.index < inc.got:
            return [Stray("doubled")]
        start = part.index * self.part
        if (
            body is None
            or part.index != inc.got
            or part.index >= inc.granted
            or len(body) != min(self.part, inc.task.size - start)
        ):
            # What is missing does not come any more: the task must be given out anew.
            del self._incoming[part.key]
            reason = f"part {part.index} came where part {inc.got} was awaited"
            return [
                Booked("down", part.key, False),
                Out(m.Failed(run=self.run, inc=self.inc, key=part.key, reason=reason, again=True)),
            ]
        inc.body[start : start + len(body)] = body
        inc.got += 1
        if inc.got * self.part >= inc.task.size:
            del self._incoming[part.key]
            return self._given(inc.task, inc.body)
        return self._grant(part.key)

    def _announce(self) -> list[Instruction]:
        out: list[Instruction] = []
        for key in sorted(
            self._outgoing, key=lambda k: (k.round, k.phase, k.purpose != "evaluate", k)
        ):
            going = self._outgoing[key]
            if going.announced:
                continue
            going.announced = True
            inline = going.body.size <= self.part
            reply = msgspec.structs.replace(going.reply, run=self.run, inc=self.inc)
            out.append(Out(reply, going.body.whole() if inline and going.body.size else None))
            if inline:
                out.append(Booked("up", key))
                if not self._waits(key):
                    self._forget(key)
        return out

    def _waits(self, key: Key) -> bool:
        """Whether an evaluation within a training task is kept until that task's own reply is
        through: if the connection is cut in between, both are announced anew.
        """
        train = _train(key)
        return key != train and (train in self._working or train in self._outgoing)

    def _forget(self, key: Key) -> None:
        """This reply is through, and with a training task's the evaluation within it."""
        self._outgoing.pop(key, None)
        self._tasks.pop(key, None)
        self._earlier.discard(key)
        if key == _train(key):
            self._outgoing.pop(msgspec.structs.replace(key, purpose="evaluate"), None)

    def _pulled(self, pull: m.Pull) -> list[Instruction]:
        going = self._outgoing.get(pull.key)
        if going is None or not going.announced:
            return [Stray("late")]
        if pull.first < going.sent:
            return [Stray("doubled")]
        if pull.first != going.sent or pull.first + pull.count > going.body.parts(self.part):
            raise RemoteProtocolError(f"pull of part {pull.first}; {going.sent} were sent")
        last = (
            pull.first + pull.count
            if going.until is None
            else min(pull.first + pull.count, going.until)
        )
        out: list[Instruction] = [
            Out(
                m.Part(run=self.run, inc=self.inc, key=pull.key, index=i),
                going.body.part(i, self.part),
            )
            for i in range(pull.first, last)
        ]
        going.sent += pull.count
        if going.sent >= going.body.parts(self.part):
            self._forget(pull.key)
            out.append(Booked("up", pull.key))
        elif going.until is not None and last >= going.until:
            self._forget(pull.key)
            out.append(Booked("up", pull.key, False))
        return out

    def _cancel(self, key: Key) -> list[Instruction]:
        known = key in self._working or key in self._outgoing or key in self._incoming
        out: list[Instruction] = []
        if self._incoming.pop(key, None) is not None:
            out.append(Booked("down", key, False))
        going = self._outgoing.get(key)
        if going is not None and going.announced and going.body.size > self.part:
            out.append(Booked("up", key, False))
        self._forget(key)
        self._working.discard(key)
        return [*out, Cancelled(key)] if known else []


def _train(key: Key) -> Key:
    """The training task that a key belongs to."""
    return msgspec.structs.replace(key, purpose="train")
