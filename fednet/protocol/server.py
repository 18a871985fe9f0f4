"""The server's side of the protocol: a state machine without I/O.

Events and the time go in, instructions come out: all times are seconds on the caller's clock,
handed in as `now`. Who is let in is in `joining`, who is there in `roster`, what each was
handed in `tasks`, how long is waited for it in `patience`, how payloads cross in `transfers`, what
is refused in `turn`.

What a peer may make the server hold or send is bounded: one join a connection, what `transfers`
says of payloads, and a connection whose messages keep belonging to nothing is hung up on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fednet.errors import RemoteProtocolError
from fednet.protocol.joining import Joining, JoinTerms, Sites
from fednet.protocol.patience import Patience
from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import SLOTS, Forget, Instruction, Job, Rules
from fednet.protocol.tasks import Tasks
from fednet.protocol.transfers import Transfers
from fednet.protocol.turn import Refusals, Turn
from fednet.protocol.work import Work, WorkStatus
from fednet.wire import messages as m
from fednet.wire.messages import Field, Key


class ServerProtocol:
    """Feed it `received`, `closed`, `tick`, and the engine's `begin`, `accept`, `reject`, `finish`;
    do what it returns.

    welcome(ids, session): the answer to a join.
    may_speak_for(user, client): whether that key may.
    declared(key, form): raises RemoteProtocolError for a reply that is not of the form and size
    that the method declares. versions: of what computes here. rules: until a phase gives its own.
    part: bytes of a payload's parts, but the last.
    """

    def __init__(
        self,
        run: str,
        incarnation: int,
        clients: int,
        welcome: Callable[[list[int], str], m.Welcome],
        now: float,
        *,
        files: Mapping[str, str] | None = None,
        layout: str = "",
        may_speak_for: Callable[[str | None, int], bool] | None = None,
        declared: Callable[[Key, Sequence[Field]], None] = lambda key, form: None,
        max_workers: int = 10_000,
        versions: Mapping[str, str] | None = None,
        rules: Rules | None = None,
        part: int = m.PART,
        class_names: str = "",
    ) -> None:
        self.run, self.incarnation, self.clients = run, incarnation, clients
        self._may = may_speak_for or (lambda user, client: True)
        self._turn = Turn(run, incarnation, now, part)
        self._roster = Roster(max_workers, now)
        self._refusals = Refusals(self._turn, self._roster.worker_of)
        self._tasks = Tasks(self._turn, self._roster, self._refusals, rules or Rules())
        self._patience = Patience(self._turn, self._roster, self._tasks)
        terms = JoinTerms(
            clients,
            welcome,
            self._may,
            dict(files or {}),
            dict(versions or {}),
            layout,
            class_names,
        )
        self._joining = Joining(self._turn, self._roster, self._refusals, self._tasks, terms)
        self._transfers = Transfers(self._turn, self._roster, self._tasks, declared)

    # -- what is known -----------------------------------------------------------------------------
    @property
    def workers(self) -> Mapping[str, Worker]:
        return self._roster.workers

    @property
    def work(self) -> Mapping[int, Work]:
        """The phase's tasks, by client."""
        return self._tasks.work

    @property
    def rules(self) -> Rules:
        return self._tasks.rules

    @property
    def round(self) -> int:
        return self._tasks.round

    def round_of(self, client: int) -> int:
        """The round of the client's task; the open round where it has none."""
        return (self.work[client].job.round if client in self.work else 0) or self.round

    @property
    def phase(self) -> int:
        return self._tasks.phase

    @property
    def purpose(self) -> m.Purpose:
        return self._tasks.purpose

    @property
    def refused(self) -> int:
        return self._refusals.count

    @property
    def sites(self) -> Sites:
        """What sites said of their data."""
        return self._joining.sites

    def present(self) -> frozenset[int]:
        """Ids hosted by a worker that is ready."""
        return self._roster.present()

    def worker_of(self, conn: bytes) -> str:
        """The name of the worker behind a connection, "" if none has joined over it."""
        return self._roster.worker_of(conn)

    def has_joined(self, conn: bytes) -> bool:
        """Whether a worker has joined over this connection, even if another has taken its place."""
        return self._roster.has_joined(conn)

    def strikes(self, conn: bytes) -> int:
        """Messages of that connection in this phase that belonged to nothing."""
        return self._refusals.strikes.get(conn, 0)

    def connections(self) -> list[tuple[bytes, str]]:
        """Connections that workers have joined over, and the workers' names."""
        return self._roster.connections()

    def open(self) -> list[Work]:
        """Tasks whose part in the phase is not over."""
        return self._tasks.open()

    def arrived(self) -> list[int]:
        """The clients whose replies were accepted in this phase."""
        return sorted(c for c, w in self.work.items() if w.status is WorkStatus.DONE)

    def awaits(self, conn: bytes, direction: str, key: Key) -> bool:
        """Whether it is still to be told if that payload, which went over `conn`, was of use."""
        return self._tasks.awaits(conn, direction, key)

    def undecided(self, key: Key) -> bool:
        """Whether that task's reply was accepted in a phase at whose end it is told of use."""
        return self._tasks.undecided(key)

    def present_sites(self, offset: float = 0.0) -> list[dict[str, object]]:
        """Who is there, and who is not and why: see `Roster.sites`."""
        return self._roster.sites(self.clients, offset)

    def waiting(self, offset: float = 0.0) -> list[dict[str, object]]:
        """Whom the phase waits for: for the display and `fednet status`."""
        return self._patience.waiting(offset)

    # -- the engine's commands ---------------------------------------------------------------------
    def begin(
        self,
        round: int,
        phase: int,
        purpose: m.Purpose,
        jobs: Sequence[Job],
        rules: Rules,
        now: float,
        attempts: Mapping[int, int] | None = None,
    ) -> list[Instruction]:
        """Opens a phase. `attempts`: the first attempt number by client, where an earlier server
        got further than 0. What is left of the phase before is called off without a word to the
        caller, who has gone on.
        """
        self._turn.now = now
        self._refusals.strikes.clear()
        self._tasks.begin(round, phase, purpose, jobs, rules, attempts or {})
        self._patience.expire()
        return self._turn.take()

    def accept(self, key: Key, now: float) -> list[Instruction]:
        """The reply was whole and sound."""
        self._turn.now = now
        self._tasks.accept(key)
        return self._turn.take()

    def reject(self, key: Key, reason: str, now: float, again: bool = True) -> list[Instruction]:
        """The reply was not what was declared: it is billed, and the task is given out again a few
        times at most.
        """
        self._turn.now = now
        self._tasks.reject(key, reason, again)
        return self._turn.take()

    def add(self, round: int, jobs: Sequence[Job], now: float) -> list[Instruction]:
        """More tasks in the phase that is open, each of the round that it names."""
        self._turn.now = now
        if round > self.round:
            self._refusals.strikes.clear()
        self._tasks.add(round, jobs)
        return self._turn.take()

    def decide(
        self, useful: Mapping[int, bool], staleness: Mapping[int, int] | None = None
    ) -> list[Instruction]:
        """Settles the bytes of a deferred phase. staleness: of replies of use, for the book."""
        self._tasks.decide(useful, staleness or {})
        return self._turn.take()

    def cancel(self, reason: str, now: float) -> list[Instruction]:
        """Ends the phase as it is."""
        self._turn.now = now
        self._tasks.cancel(reason)
        return self._turn.take()

    def finish(self, over: bool, reason: str = "") -> list[Instruction]:
        """Tells all workers that the run is over, or that this server stops with rounds left to
        do.
        """
        for w in self.workers.values():
            if w.conn is not None:
                self._turn.send(
                    w.conn,
                    m.End(over=over, reason=m.clean(reason, 4000)),
                )
        return self._turn.take()

    # -- the transport's events --------------------------------------------------------------------
    def received(
        self,
        conn: bytes,
        message: m.Message,
        body: memoryview | None,
        now: float,
        user: str | None = None,
    ) -> list[Instruction]:
        """A decoded message. What breaks the protocol is refused with a reason, counted, and
        changes nothing.
        """
        self._turn.now = now
        try:
            stray = (
                self._joining.join(conn, message, user)
                if isinstance(message, m.Join)
                else self._from_worker(conn, message, body)
            )
        except RemoteProtocolError as broken:
            self._refusals.tell(conn, str(broken), str(message.__struct_config__.tag))
            stray = "refused"
        self._patience.depart()
        if stray:
            self._turn.stray(stray)
            self._refusals.strike(conn)
        return self._turn.take()

    def undecodable(self, conn: bytes, reason: str, now: float) -> list[Instruction]:
        self._turn.now = now
        self._refusals.tell(conn, reason, unread=True)
        self._refusals.strike(conn)
        worker = self._roster.behind(conn)
        if worker is not None:
            self._tasks.unread(worker, reason)
        return self._turn.take()

    def closed(self, conn: bytes, now: float, why: str = "") -> list[Instruction]:
        """The connection is gone. why: the reason, where this side ended it."""
        self._turn.now = now
        self._refusals.strikes.pop(conn, None)
        worker = self._roster.closed(conn)
        if worker is not None:
            self._away(worker, why or "connection closed", self.rules.closed)
        self._turn.say(Forget(conn))
        return self._turn.take()

    def tick(self, now: float) -> list[Instruction]:
        """Lets time pass: deadlines, silences, absences."""
        self._turn.now = now
        silent = self.rules.silent
        for worker in list(self.workers.values()):
            if worker.gone_at is None and silent is not None and now - worker.heard > silent:
                self._away(worker, "silent", 0.0)  # the silence was its time to come back
                self._tasks.give_on(worker)
            elif worker.gone_at is not None and self._turn.over(worker.gone_at, self.rules.closed):
                self._tasks.give_on(worker)
                if worker.conn is None:
                    self._roster.forget(worker)
            elif worker.gone_at is not None and self._turn.over(worker.gone_at, silent):
                # It may be awaited for ever, but not where others can do its tasks.
                self._tasks.replace(worker, self.present())
        self._patience.expire()
        self._tasks.assign()
        self._transfers.grant()
        return self._turn.take()

    def _away(self, worker: Worker, why: str, patience: float | None) -> None:
        self._roster.away(worker, why, patience, self._turn.now)
        self._tasks.pause(worker)
        self._turn.note("away", **worker.named(), why=why)

    # -- from a worker -----------------------------------------------------------------------------
    def _from_worker(self, conn: bytes, message: m.Message, body: memoryview | None) -> str:
        """Returns why the message belongs to nothing that is under way, or ""."""
        worker = self._roster.behind(conn)
        if worker is None:
            raise RemoteProtocolError("a message before a join")
        if message.run != self.run:
            raise RemoteProtocolError(f"a message of another run ({message.run[:16]!r})")
        if message.inc != self.incarnation and not isinstance(message, m.Reply):
            raise RemoteProtocolError(
                f"a message for incarnation {message.inc} of this server, which is "
                f"{self.incarnation}"
            )
        worker.heard = self._turn.now
        if worker.gone_at is not None:
            self._roster.back(worker)
            self._turn.note("back", **worker.named())
        if isinstance(message, m.BEATS):
            self._beat(worker, message)
            self._turn.send(conn, m.Alive())
            return ""
        if isinstance(message, m.Ready):
            return self._joining.ready(conn, worker, message)
        if isinstance(message, m.Leave):
            self._leave(conn, worker)
            return ""
        key: Key = message.key  # type: ignore[attr-defined]
        if key.client not in worker.ids:
            raise RemoteProtocolError(f"client {key.client} is not hosted by this worker")
        # Revoked since it joined; the key may still speak for others.
        if not self._may(worker.user, key.client):
            self._roster.leave_out(worker, key.client, self._turn.now)
            self._tasks.leave_out(worker, key.client)
            raise RemoteProtocolError(f"this key may not speak for client {key.client} any more")
        if isinstance(message, m.Reply):
            return self._transfers.reply(conn, worker, message, body)
        if isinstance(message, m.Part):
            return self._transfers.part(conn, message, body)
        if isinstance(message, m.Pull):
            return self._transfers.pull(conn, worker, message)
        assert isinstance(message, m.Failed)
        return self._transfers.failed(worker, message)

    def _beat(self, worker: Worker, beat: m.Message) -> None:
        tasks = self._tasks
        if isinstance(beat, m.Slots):
            worker.slots = min(beat.slots, SLOTS)
            self._roster.recount(worker)
            tasks.run_heads(worker)
            tasks.assign()
        elif isinstance(beat, m.Progress) and beat.client in worker.ids:
            # Its link is slow, not its worker, which is free for the next.
            if beat.phase == m.UPLOADING:
                tasks.start_next(worker, beat.client)
                tasks.assign(worker)
            tasks.progress(worker, beat.client, (beat.phase, beat.step, beat.steps))

    def _leave(self, conn: bytes, worker: Worker) -> None:
        self._turn.note("left", **worker.named())
        self._roster.left(conn, worker)
        self._away(worker, "left", self.rules.closed)
        self._tasks.give_on(worker)
