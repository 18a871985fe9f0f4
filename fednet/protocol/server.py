"""The server's side of the protocol: a state machine without I/O.

Events and the time go in, instructions come out: all times are seconds on the caller's clock,
handed in as `now`. Who is there is in `roster`, what each was handed in `tasks`, how payloads cross
in `transfers`, what is refused in `refusals`.

What a peer may make the server hold or send is bounded: one join a connection, what `transfers`
says of payloads, and a connection whose messages keep belonging to nothing is hung up on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids
from fednet.protocol.refusals import Refusals
from fednet.protocol.roster import Roster, Worker, differs
from fednet.protocol.rules import HOSTED, SLOTS, Forget, Instruction, Job, Note, Rules
from fednet.protocol.tasks import WITH_WORKER, Tasks, Work
from fednet.protocol.transfers import Transfers
from fednet.protocol.turn import Turn
from fednet.wire import messages as m
from fednet.wire.messages import Field, Key


class ServerProtocol:
    """Feed it `received`, `closed`, `tick`, and the engine's `begin`, `accept`, `reject`, `finish`;
    do what it returns.

    welcome(ids, session): the answer to a join. may_speak_for(user, client): whether that key may.
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
        declared: Callable[[Key, Sequence[Field]], None] | None = None,
        max_workers: int = 10_000,
        versions: Mapping[str, str] | None = None,
        rules: Rules | None = None,
        part: int = m.PART,
    ) -> None:
        """Thirteen arguments: the run, and what its owner knows of files, keys and payloads."""
        self.run, self.incarnation, self.clients = run, incarnation, clients
        self.files, self.layout = dict(files or {}), layout
        self.versions = dict(versions or {})
        self.sites: dict[int, m.SiteFacts] = {}
        self._welcome = welcome
        self._may = may_speak_for or (lambda user, client: True)
        self._turn = Turn(run, incarnation, now, part)
        self._roster = Roster(max_workers, now)
        self._refusals = Refusals(self._turn, self._roster.worker_of)
        self._tasks = Tasks(self._turn, self._roster, self._refusals, rules or Rules())
        self._transfers = Transfers(
            self._turn, self._roster, self._tasks, declared or (lambda key, form: None)
        )

    # -- what is known -----------------------------------------------------------------------------
    @property
    def workers(self) -> Mapping[str, Worker]:
        return self._roster.workers

    @property
    def work(self) -> Mapping[int, Work]:
        """By client: the phase's tasks."""
        return self._tasks.work

    @property
    def rules(self) -> Rules:
        return self._tasks.rules

    @property
    def round(self) -> int:
        return self._tasks.round

    @property
    def phase(self) -> int:
        return self._tasks.phase

    @property
    def purpose(self) -> m.Purpose:
        return self._tasks.purpose

    @property
    def refused(self) -> int:
        return self._refusals.count

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

    def awaits(self, conn: bytes, direction: str, key: Key) -> bool:
        """Whether it is still to be told if that payload, which went over `conn`, was of use."""
        return self._tasks.awaits(conn, direction, key)

    def undecided(self, key: Key) -> bool:
        """Whether that task's reply was accepted in a phase at whose end it is told of use."""
        return self._tasks.undecided(key)

    def waiting(self) -> list[dict[str, object]]:
        """Whom the phase waits for: for the display and `fednet status`."""
        rows: list[dict[str, object]] = []
        for w in self.open():
            worker = self.workers.get(w.worker)
            phase, step, steps = (
                worker.doing.get(w.job.client, ("queued" if not w.running else w.status, 0, 0))
                if worker
                else (w.status, 0, 0)
            )
            deadline = self.rules.deadline
            # It runs once its worker is free.
            left = (
                deadline - (self._turn.now - w.since)
                if deadline is not None and w.running
                else deadline
            )
            rows.append(
                {
                    "client": w.job.client,
                    "host": worker.host if worker else "",
                    "pid": worker.pid if worker else 0,
                    "device": worker.device if worker else "",
                    "phase": phase if w.status != "arriving" else "uploading",
                    "step": step,
                    "steps": steps,
                    "since": w.since,
                    "deadline_s": left,
                }
            )
        return rows

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

    def decide(self, useful: Mapping[int, bool]) -> list[Instruction]:
        """Settles the bytes of a deferred phase."""
        self._tasks.decide(useful)
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
                    m.End(
                        run=self.run,
                        inc=self.incarnation,
                        over=over,
                        reason=m.clean(reason, 4000),
                    ),
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
                self._join(conn, message, user)
                if isinstance(message, m.Join)
                else self._from_worker(conn, message, body)
            )
        except RemoteProtocolError as broken:
            self._refusals.tell(conn, str(broken), str(message.__struct_config__.tag))
            stray = "refused"
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

    def closed(self, conn: bytes, now: float) -> list[Instruction]:
        """The connection is gone."""
        self._turn.now = now
        self._refusals.strikes.pop(conn, None)
        worker = self._roster.closed(conn)
        if worker is not None:
            self._away(worker, "connection closed", self.rules.closed)
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
        self._tasks.expire()
        self._tasks.assign()
        self._transfers.grant()
        return self._turn.take()

    def _away(self, worker: Worker, why: str, patience: float | None) -> None:
        self._roster.away(worker, patience, self._turn.now)
        self._tasks.pause(worker)
        self._turn.say(Note("away", {**_who(worker), "why": why}))

    # -- joining -----------------------------------------------------------------------------------
    def _join(self, conn: bytes, join: m.Join, user: str | None) -> str:
        """Lets a worker in, anew or back. Returns why it was not let in, for the books."""
        if self._roster.has_joined(conn):
            raise RemoteProtocolError("join: this connection has joined already")
        try:
            ids = frozenset(
                Ids("{}/{}".format(*join.share), share=join.share).resolve(self.clients)
                if join.share is not None
                else join.ids
            )
        except (ConfigError, ZeroDivisionError) as broken:
            self._refusals.tell(conn, f"join: {broken}", "join", final=True)
            return "refused"
        old = self.workers.get(join.worker)
        reason, final = self._objection(join, ids, user), True
        if (
            not reason
            and old is not None
            and (
                old.user != user
                or (old.conn is not None and old.gone_at is None and old.session != join.session)
            )
        ):
            reason, final = "join: a worker of that name is connected.", False
        if (
            not reason
            and old is None
            and not self._roster.room(lambda: {w.worker for w in self.open()})
        ):
            reason, final = f"join: {self._roster.limit} workers are connected already.", False
        if reason:
            self._refusals.tell(conn, reason, "join", final)
            return "refused"
        if old is not None and old.conn is not None:
            self._turn.say(Forget(old.conn, hang_up=True))
        worker = self._roster.enter(conn, join, ids, user, self._turn.now)
        self._turn.send(conn, self._welcome(sorted(ids), worker.session))
        self._turn.say(
            Note(
                "joined" if old is None else "rejoined",
                {
                    "worker": worker.name,
                    "clients": sorted(ids),
                    "host": worker.host,
                    "pid": worker.pid,
                    "device": worker.device,
                    "versions": join.versions,
                    **differs(join.versions, self.versions),
                },
            )
        )
        self._tasks.pick_up(worker, set(join.holding), join.inc == self.incarnation)
        return ""

    def _objection(self, join: m.Join, ids: frozenset[int], user: str | None) -> str:
        """Why this server can never let that worker in, or ""."""
        bad = sorted(i for i in ids if not 0 <= i < self.clients)
        if bad or not ids:
            known = f"this federation has ids 0 to {self.clients - 1}."
            return f"join: client id {bad[0] if bad else 'missing'}; {known}"
        if len(ids) > HOSTED:
            return (
                f"join: {len(ids)} clients in one process, at most {HOSTED} are allowed; "
                "start several with --id K/N."
            )
        if missing := [f for f, sha in self.files.items() if sha not in join.files.values()]:
            return (
                f"join: this federation needs {', '.join(missing)} loaded on the client too "
                "(--load), with the same content."
            )
        if strangers := sorted(i for i in ids if not self._may(user, i)):
            return f"join: this key may not speak for client {strangers[0]}."
        return ""

    def _ready(self, conn: bytes, worker: Worker, ready: m.Ready) -> str:
        if self.layout and ready.layout != self.layout:
            self._refusals.tell(
                conn,
                "ready: the model built there has other tensors than the server's; the same "
                "configuration, "
                "files and torch are needed on both sides.",
                "ready",
                final=True,
            )
            return "refused"
        for facts in ready.sites:
            if facts.client not in worker.ids:
                raise RemoteProtocolError(
                    f"facts of client {facts.client}, which this worker does not host"
                )
        self.sites.update((facts.client, facts) for facts in ready.sites)
        if worker.ready:
            return ""
        self._roster.ready(worker)
        self._turn.say(Note("ready", _who(worker)))
        self._tasks.supersede(worker)
        return ""

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
            self._turn.say(Note("back", _who(worker)))
        if isinstance(message, m.Beat):
            self._beat(worker, message)
            self._turn.send(conn, m.Beat(run=self.run, inc=self.incarnation))
            return ""
        if isinstance(message, m.Ready):
            return self._ready(conn, worker, message)
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
        return self._failed(worker, message)

    def _beat(self, worker: Worker, beat: m.Beat) -> None:
        tasks, now = self._tasks, self._turn.now
        if beat.slots:
            worker.slots = min(beat.slots, SLOTS)
            tasks.run_heads(worker)
            tasks.assign()
        if beat.client in worker.ids:
            # Its link is slow, not its worker, which is free for the next.
            if beat.phase == m.UPLOADING:
                tasks.start_next(worker, beat.client)
                tasks.assign()
            doing = beat.phase, beat.step, beat.steps
            if beat.client in worker.queue and beat.client in self.work:
                w = self.work[beat.client]
                w.heard, w.moved = now, w.moved if worker.doing.get(beat.client) == doing else now
            worker.doing[beat.client] = doing

    def _leave(self, conn: bytes, worker: Worker) -> None:
        self._turn.say(Note("left", _who(worker)))
        self._roster.left(conn, worker)
        self._away(worker, "left", self.rules.closed)
        self._tasks.give_on(worker)

    def _failed(self, worker: Worker, failed: m.Failed) -> str:
        w = self._tasks.current(failed.key)
        self._turn.say(
            Note(
                "failed",
                {
                    "client": failed.key.client,
                    "round": failed.key.round,
                    "worker": worker.name,
                    "reason": failed.reason,
                },
            )
        )
        if (
            w is None
            or failed.key.purpose != self.purpose
            or w.worker != worker.name
            or w.status not in WITH_WORKER
        ):
            return "late"
        if failed.lacks:
            self._tasks.elsewhere(w, worker, failed.reason)
            return ""
        self._tasks.refuse(w, failed.reason, failed.again, "damaged" if failed.again else "failed")
        return ""


def _who(worker: Worker) -> dict[str, object]:
    """A worker, as the run's events name it."""
    return {"worker": worker.name, "clients": sorted(worker.ids), "pid": worker.pid}
