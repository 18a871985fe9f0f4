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
from fednet.errors import RemoteProtocolError
from fednet.protocol.client_instructions import (
    Ended,
    Instruction,
    Out,
    Reconnect,
    Stray,
    TurnedAway,
    Welcomed,
)
from fednet.protocol.client_tasks import ClientTasks
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import PART, Key

REJOIN_S = 1.0  # seconds until a refused join is tried again
SILENCE = 8.0  # a server that was silent for this many beats is taken for gone
# One that was not gone was at something else, such as a slow disk, and may be again: each time that
# it is met anew, twice as many, up to these, for so many seconds.
MOST_SILENCE, SLOW_S = 4 * SILENCE, 600.0


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
