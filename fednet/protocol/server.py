"""The server's side of the protocol: a state machine without I/O.

Events and the time go in, instructions come out: all times are seconds on the caller's clock,
handed in as `now`. The records of tasks are in `tasks`, those of client processes in `workers`, a
payload that crosses in parts in `transfers`, the instructions in `instructions`, the states in
`table`.

What a peer may make the server hold or send is bounded: one join a connection; a form is checked
before a byte of its body is asked for; parts are granted within a window and a budget; each part of
a task is sent once a hand-out. `server.io` disconnects who sends many messages that belong to
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids, as_text
from fednet.protocol.assignment import Assignment
from fednet.protocol.instructions import (
    MOST_STRAYS,
    Arrived,
    ClosePayload,
    HangUp,
    Instruction,
    Note,
    Resolved,
    Send,
    Store,
    Stray,
)
from fednet.protocol.table import (
    CHANGES,
    ENDED,
    WITH_WORKER,
    Effect,
    TaskEvent,
    TaskState,
    WorkerEvent,
    WorkerState,
)
from fednet.protocol.tasks import (
    DEATHS,
    LEFT,
    NO_REPLY,
    NOT_HANDED,
    STATE_LOST,
    TRIES,
    Rules,
    TaskSpec,
    TrackedTask,
    end_of,
    message_of,
)
from fednet.protocol.transfers import Receiving, Sending
from fednet.protocol.workers import SHOWN, SLOTS, ClientProcess, Roster, Sites
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body
from fednet.wire.messages import Field, Key

BUDGET = 16  # parts granted to all senders together
# A grant of which no part has come for so long does not count: a few who send nothing must not use
# up the budget of all.
UNUSED_S = 4.0
ANSWERED = (TaskState.ARRIVING, TaskState.ARRIVED, TaskState.DONE)


class _Final(RemoteProtocolError):
    """A refusal after which trying again cannot help."""


class ServerProtocol:
    """Each method handles an event or a command, and returns what the caller has to do. What the
    machine knows can be read: the client processes in `roster`, the tasks of the open phase, or of
    the last one, in `tasks`, by client.
    """

    def __init__(
        self,
        run: str,
        incarnation: int,
        clients: int,
        welcome: Callable[[list[int], str], m.Welcome],  # (ids, session): the answer to a join
        now: float,
        *,
        files: Mapping[str, str] | None = None,
        layout: str = "",
        # why that key may not speak for the client; "" if it may
        key_refusal: Callable[[str | None, int], str] = lambda user, client: "",
        # why no key may speak for the client now; "" if one may
        no_key: Callable[[int], str] = lambda client: "",
        # the name of its site, "" where it has none
        site_name: Callable[[int], str] = lambda client: "",
        # (key, form, evaluates): raises RemoteProtocolError for a reply that is not of the form and
        # size that the method declares; evaluates: with the evaluation within the task
        declared: Callable[[Key, Sequence[Field], bool], None] = lambda key, form, evaluates: None,
        rules: Rules | None = None,  # until a phase gives its own
        part: int = m.PART,  # bytes of a payload's parts, but the last
        class_names: str = "",
        # bytes that were read of a connection, see `ServerTransport.bytes_read`
        bytes_read: Callable[[bytes], int] = lambda conn: 0,
        # how many clients there may be, where more may join the run while it goes on
        most_clients: int | None = None,
        round: int = 0,  # the last that earlier servers of the run completed
    ) -> None:
        self.run = run
        self.incarnation = incarnation
        self.clients = clients
        self.part = part
        self._beside = m.beside(part)
        self.now = now  # of the event that is being dealt with
        self.rules = rules or Rules()
        self.round = round
        self.phase = 0
        self.begun = False
        self.purpose: m.Purpose = "train"
        self.tasks: dict[int, TrackedTask] = {}
        self.roster = Roster(now, no_key, site_name)
        self.sites = Sites(class_names)
        self.refused = 0  # messages
        # By connection, messages in this round that belong to nothing, or cannot be read.
        self.strays: dict[bytes, int] = {}
        self._out: list[Instruction] = []
        self._welcome = welcome
        self._key_refusal = key_refusal
        self._declared = declared
        self._bytes_read = bytes_read
        self._alive = m.Alive(run=run, inc=incarnation)
        self._files = dict(files or {})
        self._layout = layout
        self._most = max(clients, most_clients or 0)
        # Ids that ask to join the run while it goes on: over which connection.
        self._applicants: dict[int, bytes] = {}
        self._explained: set[bytes] = set()  # connections that only read the configuration
        self._leaving: list[TrackedTask] = []  # tasks whose clients go away
        self._assignment = Assignment(self.roster)
        # By client, whose replies come in, in parts: those that may be granted more, and those of
        # which parts that were granted have not come.
        self._wanting: dict[int, TrackedTask] = {}
        self._granted: dict[int, TrackedTask] = {}

    # -- the engine's commands ---------------------------------------------------------------------
    def begin(
        self,
        round: int,
        phase: int,
        purpose: m.Purpose,
        specs: Sequence[TaskSpec],
        rules: Rules,
        now: float,
    ) -> list[Instruction]:
        """Opens a phase. What is left of the phase before is cancelled."""
        self.now = now
        self.begun = True
        self._cancel("the phase is over")
        self.strays.clear()
        self.rules = rules
        self.round = round
        self.phase = phase
        self.purpose = purpose
        self.tasks = {}
        self._leaving = []
        self._add(sorted(specs, key=lambda spec: (-spec.cost, spec.client)))
        self._expire()
        return self._take_instructions()

    def add(self, round: int, specs: Sequence[TaskSpec], now: float) -> list[Instruction]:
        """Adds tasks to those under way, each its client's only one and of the round that it names.
        round: the newest.
        """
        self.now = now
        if round > self.round:
            self.strays.clear()
        self.round = round
        self._add(specs)
        return self._take_instructions()

    def accept(self, key: Key, now: float, evaluation: str = "") -> list[Instruction]:
        """The reply was whole and sound. The round may still leave it out when it is aggregated.
        evaluation: why the one in it is refused, which changes nothing for the rest of it.
        """
        self.now = now
        t = self._current(key)
        if t is None or t.status is not TaskState.ARRIVED:
            return []
        if evaluation:
            reason = f"its evaluation: {evaluation}"
            self._note_refused("reply", reason, t.worker, client=key.client, round=key.round)
        worker = self.roster.workers.get(t.worker)
        if worker is not None:
            worker.lacks.discard(key.client)
            word = "evaluated" if key.purpose == "evaluate" else "answered for"
            worker.did = word, key.client, key.round
        self._change(t, TaskEvent.ACCEPTED)
        return self._take_instructions()

    def reject(self, key: Key, reason: str, now: float) -> list[Instruction]:
        """The reply was not what was declared: it is recorded as wasted, and the task is given out
        again a few times at most.
        """
        self.now = now
        t = self._current(key)
        if t is not None and t.status is TaskState.ARRIVED:
            self._refuse_task(t, reason)
        return self._take_instructions()

    def cancel(self, reason: str, now: float) -> list[Instruction]:
        """Ends the phase as it is."""
        self.now = now
        self._cancel(reason)
        return self._take_instructions()

    def turn_away(self, reason: str, now: float) -> list[Instruction]:
        """The clients that ask to join the run cannot."""
        self.now = now
        for conn in sorted(set(self._applicants.values())):
            self.strays.pop(conn, None)  # its requests count as strays, and many get no answer
            self._refuse(conn, f"join: {reason}", "join", final=True)
        self._applicants.clear()
        return self._take_instructions()

    def finish(self, over: bool, reason: str = "") -> list[Instruction]:
        """Tells all workers that the run is over, or that this server stops with rounds left to
        do.
        """
        for worker in self.roster.workers.values():
            if worker.conn is not None:
                self._send(worker.conn, m.End(over=over, reason=m.clean(reason, 4000)))
        return self._take_instructions()

    # -- what is known -----------------------------------------------------------------------------
    def open_tasks(self) -> list[TrackedTask]:
        """Returns the tasks that are not over."""
        return [t for t in self.tasks.values() if t.status not in ENDED]

    def accepted_clients(self) -> list[int]:
        """Returns the clients whose replies were accepted."""
        return sorted(c for c, t in self.tasks.items() if t.status is TaskState.DONE)

    def clients_wanted(self) -> int:
        """Returns how many clients the run has with those that ask to join it. Their ids have to
        follow without a gap.
        """
        wanted = self.clients
        while wanted in self._applicants:
            wanted += 1
        return wanted

    def waiting(self, offset: float = 0.0) -> list[dict[str, object]]:
        """Returns a row for each open task. offset: from the server's clock to that of `since`."""
        rows: list[dict[str, object]] = []
        for t in sorted(self.open_tasks(), key=lambda t: t.spec.client):
            client = t.spec.client
            left = self.rules.deadline
            doing = (t.status.value, 0, 0)
            worker = self.roster.workers.get(t.worker)
            if worker is not None:
                doing = worker.doing.get(client, doing if t.running else ("queued", 0, 0))
                if t.status is TaskState.ARRIVING:
                    doing = ("uploading", *doing[1:])
                if left is not None and t.running:
                    left -= self.now - t.since
            elif client in self.roster.hosting:  # its workers are at other tasks
                doing = ("queued", 0, 0)
            elif t.status is TaskState.WAITING:
                until, _ = self.roster.waited_until(client, t.since, self.rules.join)
                left = None if until is None else until - self.now
            rows.append(
                {
                    "client": client,
                    "host": "" if worker is None else worker.host,
                    "pid": 0 if worker is None else worker.pid,
                    "device": "" if worker is None else worker.device,
                    "phase": doing[0],
                    "step": doing[1],
                    "steps": doing[2],
                    "since": t.since + offset,
                    "deadline_s": left,
                }
            )
        return rows

    # -- what an event leads to --------------------------------------------------------------------
    def _take_instructions(self) -> list[Instruction]:
        out = self._out
        self._out = []
        return out

    def _note(self, event: str, /, **fields: object) -> None:
        """Something for the run's events."""
        self._out.append(Note(event, fields))

    def _send(self, conn: bytes, message: m.Message, body: Body | None = None) -> None:
        """The message is marked as this run's, and this incarnation's of its server."""
        marked = msgspec.structs.replace(message, run=self.run, inc=self.incarnation)
        self._out.append(Send(conn, marked, body))

    def _note_refused(self, what: str, reason: str, worker: str, **more: object) -> None:
        """what: a type of message, such as "join", or "frame" for one that cannot be read."""
        self.refused += 1
        self._note("refused", what=what, **more, reason=m.clean(reason), worker=worker)

    def _refuse(
        self,
        conn: bytes,
        reason: str,
        what: str,
        final: bool = False,
        unread: bool = False,
        who: Mapping[str, object] | None = None,
    ) -> None:
        """Counts a refusal; the sender is told of the first ones. who: fields on a sender that has
        not joined.
        """
        self._note_refused(what, reason, self.roster.worker_of(conn), **(who or {}))
        if self.strays.get(conn, 0) < MOST_STRAYS:
            self._send(conn, m.Refuse(reason=m.clean(reason), final=final, unread=unread))

    def _too_long(self, since: float, patience: float | None) -> bool:
        """Whether so many seconds have passed since; None: never."""
        return patience is not None and self.now - since >= patience

    def _current(self, key: Key) -> TrackedTask | None:
        """The task of that key; None for a late one, or one of another phase."""
        t = self.tasks.get(key.client)
        return t if t is not None and t.key == key else None

    def _tasks_of(self, worker: ClientProcess) -> list[TrackedTask]:
        """What a worker was handed and has not answered in full, by client."""
        return [self.tasks[client] for client in sorted(worker.held)]

    # -- the transport's events --------------------------------------------------------------------
    def received(
        self,
        conn: bytes,
        message: m.Message,
        body: Body | None,
        now: float,
        user: str | None = None,
    ) -> list[Instruction]:
        """A decoded message. What breaks the protocol is refused with a reason, counted, and
        changes nothing. The first instruction is `Stray` where the message belongs to nothing that
        is under way.
        """
        self.now = now
        try:
            if isinstance(message, m.Join):
                stray = self._join(conn, message, user)
            else:
                stray = self._from_worker(conn, message, body)
        except RemoteProtocolError as broken:
            final = isinstance(broken, _Final)
            who = None
            if isinstance(message, m.Join):
                who = self._fields_of(message, message.ids[:SHOWN])
            self._refuse(conn, str(broken), str(message.__struct_config__.tag), final, who=who)
            stray = "refused"
        if self._leaving:
            self._depart()
        if stray:
            self.strays[conn] = self.strays.get(conn, 0) + 1
            self._out.insert(0, Stray(stray))
        return self._take_instructions()

    def undecodable(self, conn: bytes, reason: str, now: float) -> list[Instruction]:
        """A message that cannot be read: noise, or a reply that its worker sends again whenever it
        is refused. After `MOST_STRAYS` of these the tasks that the worker is at are refused.
        """
        self.now = now
        self._refuse(conn, reason, "frame", unread=True)
        self.strays[conn] = self.strays.get(conn, 0) + 1
        worker = self.roster.by_conn.get(conn)
        for t in () if worker is None else self._tasks_of(worker):
            if t.running:
                t.unread = (t.unread + 1) % MOST_STRAYS
                if not t.unread:
                    unread = f"{MOST_STRAYS} messages that cannot be read"
                    self._refuse_task(t, f"{unread}, the last: {reason}")
        return self._take_instructions()

    def closed(self, conn: bytes, now: float, why: str = "") -> list[Instruction]:
        """The connection is gone. why: the reason, where this side ended it."""
        self.now = now
        self.strays.pop(conn, None)
        for client in [i for i, asked_over in self._applicants.items() if asked_over == conn]:
            del self._applicants[client]
        self.roster.joined.discard(conn)
        self._explained.discard(conn)
        worker = self.roster.by_conn.get(conn)
        if worker is not None:
            why = why or "connection closed"
            self._away(worker, WorkerEvent.CLOSED, why, self.rules.closed)
            self._restart_uploads(worker)
        return self._take_instructions()

    def tick(self, now: float) -> list[Instruction]:
        """Lets time pass: deadlines, silences, absences."""
        self.now = now
        silent = math.inf if self.rules.silent is None else self.rules.silent
        closed = self.rules.closed
        for worker in list(self.roster.workers.values()):
            # Of most, a message came a moment ago: the first question costs least.
            if now - worker.heard > silent / 2 and worker.here and self._is_silent(worker, silent):
                # It was silent for as long as it may take to come back.
                self._away(worker, WorkerEvent.SILENT, "silent", 0.0)
                self._lose(worker, worker.held)
            elif worker.gone_at is not None and self._too_long(worker.gone_at, closed):
                self._lose(worker, worker.held)
                if worker.state is WorkerState.AWAY:
                    self.roster.forget(worker)
            elif worker.gone_at is not None and self._too_long(worker.gone_at, silent):
                # Others do its tasks if they can, though the server waits for it without end.
                self._replace(worker, self.roster.hosting)
        self._expire()
        self._assign()
        self._grant()
        return self._take_instructions()

    def _is_silent(self, worker: ClientProcess, most: float) -> bool:
        """Whether nothing has come of it for `most` seconds. Bytes that came count as a message."""
        bytes_read = partial(self._bytes_read, worker.conn or b"")
        heard = worker.silence.last_sign(worker.heard, self.now, most, bytes_read)
        if heard is not None:
            worker.heard = heard
        return heard is None

    # -- who comes and goes ------------------------------------------------------------------------
    def _join(self, conn: bytes, join: m.Join, user: str | None) -> str:
        """Lets a worker in, for the first time or back: what it still holds goes on, what it lost
        on the way is handed out again. Returns "refused" if it is to ask again, else "".
        """
        if conn in self.roster.joined:
            raise RemoteProtocolError("join: this connection has joined already")
        ids = frozenset(join.ids)
        if join.share is not None:
            share = "{}/{}".format(*join.share)
            try:
                ids = frozenset(Ids(share, share=join.share).resolve(self.clients))
            except (ConfigError, ZeroDivisionError) as broken:
                raise _Final(f"join: {broken}") from None
        old = self.roster.workers.get(join.worker)
        try:
            self._check_join(join, ids, user, old)
        except RemoteProtocolError as objection:
            known = {i for i in ids if 0 <= i < self.clients}
            if not (join.explain or join.status):
                self.roster.note_refused(known, str(objection).removeprefix("join: "))
            raise
        if join.status:
            self.roster.joined.add(conn)
            self._send(conn, m.Standing(text=m.clean(self._standing(ids), 4000)))
            return ""
        if join.explain:
            self.roster.joined.add(conn)
            self._explained.add(conn)
            self._send(conn, self._welcome(sorted(ids), ""))
            self._note("explained", worker=join.worker, **self._fields_of(join, ids))
            return ""
        if new := sorted(i for i in ids if i >= self.clients):
            self._asks_to_join(conn, join, new)
            return "refused"
        if old is not None and old.conn is not None:
            self._out.append(HangUp(old.conn))
            self.roster.disconnect(old)
            self._restart_uploads(old)
        worker = self.roster.enter(conn, join, ids, user, self.now)
        self._assignment.hosts_others(worker)
        self._send(conn, self._welcome(sorted(ids), worker.session))
        self._note(
            "joined" if old is None else "rejoined",
            **worker.event_fields(),
            device=worker.device,
            versions=join.versions,
        )
        unwanted = set(join.holding)
        for t in self._tasks_of(worker):
            if t.spec.client not in ids:
                self._take_back(t, TaskEvent.MISSING, "lost")
            elif t.key not in unwanted:
                self._take_back(t, TaskEvent.MISSING, "lost", same_attempt=True)
            else:
                unwanted.discard(t.key)
        self._run_next(worker)  # it may have another number of slots than before
        # Tasks of an earlier server are not cancelled: this one may ask for the same.
        if join.inc == self.incarnation:
            for key in sorted(unwanted):
                self._send(conn, m.Cancel(key=key))
        return ""

    def _standing(self, ids: frozenset[int]) -> str:
        """What the server knows of these clients, as a sentence for their site."""
        found = ["before the first round"]
        if self.begun:
            doing = "training" if self.purpose == "train" else "evaluation"
            found = [f"round {self.round} ({doing})"]
        elif self.round:
            found = [f"after round {self.round}"]
        there = [worker for worker in self.roster.workers.values() if worker.here]
        for worker in there:
            if mine := ids & worker.ids:
                state = "connected" if worker.ready else "connected, getting ready"
                if worker.did is not None:
                    state += ", {} client {} in round {}".format(*worker.did)
                found.append(f"client(s) {as_text(mine)}: {state}")
        absent: dict[str, list[int]] = {}
        for client in sorted(ids.difference(*[worker.ids for worker in there])):
            absent.setdefault(self.roster.why_absent(client), []).append(client)
        found += [f"client(s) {as_text(mine)}: {why}" for why, mine in absent.items()]
        return "; ".join(found)

    def _fields_of(self, join: m.Join, ids: Iterable[int]) -> dict[str, object]:
        """The fields of an event on a process that does not host these clients."""
        clients = sorted(ids)
        who = {"clients": clients, "host": join.host, "pid": join.pid}
        site = self.roster.site_of(clients)
        return {**who, "site": site} if site else who

    def _check_join(
        self, join: m.Join, ids: frozenset[int], user: str | None, old: ClientProcess | None
    ) -> None:
        """Raises RemoteProtocolError for a worker that this server cannot let in. old: a worker of
        that name.
        """
        if join.speaks != m.PROTOCOL:
            release = join.versions.get("fednet", "")
            named = f" (fednet {m.clean(release)})" if release else ""
            raise _Final(
                f"join: the client{named} speaks version {join.speaks} of the protocol, this "
                f"server version {m.PROTOCOL}; install the same release of fednet on both sides."
            )
        bad = sorted(i for i in ids if not 0 <= i < self._most)
        if bad or not ids:
            known = f"this federation has ids 0 to {self._most - 1}."
            raise _Final(f"join: client id {bad[0] if bad else 'missing'}; {known}")
        if len(ids) > m.MAX_IDS:  # by a share
            raise _Final(
                f"join: {len(ids)} clients in one process, at most {m.MAX_IDS} are allowed; "
                "start several with --id K/N."
            )
        if missing := [f for f, sha in self._files.items() if sha not in join.files.values()]:
            raise _Final(
                f"join: this federation needs {', '.join(missing)} loaded on the client too "
                "(--load), with the same content."
            )
        if strangers := sorted(i for i in ids if self._key_refusal(user, i)):
            raise _Final(f"join: this key may not speak for client {strangers[0]}.")
        workers = self.roster.workers
        limit = self.roster.limit
        if old is not None:
            if old.user != user or (old.here and old.session != join.session):
                raise RemoteProtocolError("join: a worker of that name is connected.")
            return
        if len(workers) >= limit:
            for gone in list(workers.values()):
                if gone.conn is None and not gone.held:
                    self.roster.forget(gone)
        if len(workers) >= limit:
            raise RemoteProtocolError(f"join: {limit} workers are connected already.")

    def _asks_to_join(self, conn: bytes, join: m.Join, new: Sequence[int]) -> None:
        """A worker wants clients to join the run that are not in it yet. It is refused for now, and
        asks again until they have joined.
        """
        if any(self._applicants.get(i) != conn for i in new):
            named = {"worker": join.worker, "host": join.host, "pid": join.pid}
            self._note("asked_to_join", clients=list(new), **named)
        self._applicants.update(dict.fromkeys(new, conn))
        reason = f"client(s) {as_text(new)} join the run when a round ends"
        missing = [i for i in range(self.clients, new[-1]) if i not in self._applicants]
        if missing:
            reason += f", once client(s) {as_text(missing)} ask to join too"
        self._send(conn, m.Refuse(reason=m.clean(f"join: {reason}.")))

    def _ready(self, worker: ClientProcess, ready: m.Ready) -> str:
        """Data and model are in place there. Returns "doubled" if they were already, else ""."""
        if self._layout and ready.layout != self._layout:
            raise _Final(
                "ready: the model built there has other tensors than the server's; the same "
                "configuration, files and torch are needed on both sides."
            )
        if unlike := self.sites.unlike(ready.sites):
            raise _Final(unlike)
        for event, fields in self.sites.take(worker, ready.sites):
            self._note(event, **fields)
        if worker.state is WorkerState.READY:
            return "doubled"
        self.roster.came(worker, WorkerEvent.READY, WorkerState.READY)
        self._note("ready", **worker.event_fields())
        # A new process is ready: it need not wait until the one before it is given up.
        for gone in list(self.roster.workers.values()):
            if gone.gone_at is not None:
                self._replace(gone, worker.ids)
        self._assign()
        return ""

    def _away(
        self, worker: ClientProcess, event: WorkerEvent, why: str, patience: float | None
    ) -> None:
        """The worker is not there any more. patience: how long its clients may take to come back
        before they count as lost.
        """
        self.roster.away(worker, event, why, patience, self.now)
        self._note("away", **worker.event_fields(), why=why)

    def _restart_uploads(self, worker: ClientProcess) -> None:
        """Its connection is closed: when it is back, its replies are announced again."""
        for t in self._tasks_of(worker):
            if t.status is TaskState.ARRIVING:
                self._change(t, TaskEvent.RESTARTED, "cut short")

    def _replace(self, gone: ClientProcess, ids: Collection[int]) -> None:
        """Other workers are ready for these clients of a worker that is away, and get its tasks."""
        gone.replaced |= gone.ids.intersection(ids)
        self._lose(gone, gone.replaced)

    def _lose(self, worker: ClientProcess, clients: Collection[int], died: bool = True) -> None:
        """The tasks of these clients are lost with their worker. Only a running one may be the
        reason. Those behind it start to run as it is taken back, so this is asked beforehand.
        died: no task is the reason where the worker said that it leaves.
        """
        lost = [(t, died and t.running) for t in self._tasks_of(worker) if t.spec.client in clients]
        for t, running in lost:
            self._take_back(t, TaskEvent.LOST, "lost", died=running)

    # -- from a worker: each returns why the message belongs to nothing that is under way, or "" ---
    def _from_worker(self, conn: bytes, message: m.Message, body: Body | None) -> str:
        worker = self.roster.by_conn.get(conn)
        if worker is None:
            if conn in self._explained and isinstance(message, m.BEATS):
                self._out.append(Send(conn, self._alive))
                return ""
            raise RemoteProtocolError("a message before a join")
        if message.run != self.run:
            raise RemoteProtocolError(f"a message of another run ({message.run[:16]!r})")
        if message.inc != self.incarnation and not isinstance(message, m.Reply):
            raise RemoteProtocolError(
                f"a message for incarnation {message.inc} of this server, which is "
                f"{self.incarnation}"
            )
        worker.heard = self.now
        if worker.state is WorkerState.SILENT:
            before = WorkerState.READY if worker.prepared else WorkerState.WELCOMED
            self.roster.came(worker, WorkerEvent.HEARD, before)
            self._note("back", **worker.event_fields())
        if isinstance(message, m.BEATS):
            self._beat(worker, message)
            self._out.append(Send(conn, self._alive))
            return ""
        if isinstance(message, m.Ready):
            return self._ready(worker, message)
        if isinstance(message, m.Leave):
            self._note("left", **worker.event_fields())
            why = f"left: {message.reason}" if message.reason else "left"
            self._away(worker, WorkerEvent.LEFT, why, self.rules.closed)
            self._lose(worker, worker.held, died=False)
            return ""
        key: Key = message.key  # type: ignore[attr-defined]
        if key.client not in worker.ids:
            raise RemoteProtocolError(f"client {key.client} is not hosted by this worker")
        # Revoked since it joined; the key may still speak for others.
        if why := self._key_refusal(worker.user, key.client):
            self.roster.revoke(worker, key.client, why, self.now)
            if key.client in worker.held:  # it waits for another worker
                self._take_back(self.tasks[key.client], TaskEvent.REVOKED, why)
            raise RemoteProtocolError(f"this key may not speak for client {key.client} any more")
        if isinstance(message, m.Reply):
            return self._reply(conn, worker, message, body)
        if isinstance(message, m.Part):
            return self._part(conn, message, body)
        if isinstance(message, m.Pull):
            return self._pull(conn, message)
        assert isinstance(message, m.Failed)
        return self._failed(worker, message)

    def _beat(self, worker: ClientProcess, beat: m.Message) -> None:
        if isinstance(beat, m.Slots):
            worker.slots = min(beat.slots, SLOTS)
            self._run_next(worker)
            self._assign()
        elif isinstance(beat, m.Progress) and beat.client in worker.ids:
            # While its reply is sent its worker is free for the next task.
            if beat.stage == m.UPLOADING:
                self._run_next(worker, beat.client)
                self._assign(worker)
            if beat.client in worker.queue:
                self.tasks[beat.client].heard = self.now
            worker.doing[beat.client] = beat.stage, beat.step, beat.steps

    def _reply(self, conn: bytes, worker: ClientProcess, reply: m.Reply, body: Body | None) -> str:
        """A reply, whole or announced."""
        key = reply.key
        t = self._current(key)
        if (
            t is None
            or t.worker != worker.name
            or t.status is not TaskState.HANDED
            or reply.inc != self.incarnation
        ):
            state = "doubled" if t is not None and t.status in ANSWERED else "late"
            self._note(state, client=key.client, round=key.round, worker=worker.name)
            if reply.size > self._beside and state == "late":
                self._send(conn, m.Cancel(key=key))
            return state
        if body is None:
            agrees = not 0 < reply.size <= self._beside
        else:
            agrees = body.size == reply.size
        try:
            self._check_declared(t, reply, agrees)
        except RemoteProtocolError as broken:
            self._refuse_task(t, str(broken))
            return "refused"
        if reply.size == 0 or body is not None:
            self._whole(t, reply, conn, body or NOTHING)
        else:
            leaves = t.spec.leaves
            until = None if leaves is None or leaves.at is not None else leaves.up
            self._announced(t, conn, reply, until)
            self._wanting[key.client] = t
            self._grant()
        self._assign(worker)
        return ""

    def _check_declared(self, t: TrackedTask, reply: m.Reply, agrees: bool = True) -> None:
        """Raises RemoteProtocolError for a reply that is not of the form and size that the method
        declares. agrees: whether what came beside it is of that size.
        """
        if not agrees or sum([f.size for f in reply.form]) != reply.size:
            raise RemoteProtocolError("reply: announced sizes do not agree")
        self._declared(t.key, reply.form, t.spec.evaluates)

    def _announced(
        self, t: TrackedTask, conn: bytes, reply: m.Reply, until: int | None = None
    ) -> None:
        """The task's reply is to come, over that connection. until: see `Receiving`."""
        self._reply_comes(t, TaskEvent.ANNOUNCED, conn, reply)
        t.up = Receiving(reply.size, self.part, until=until)

    def _reply_comes(self, t: TrackedTask, event: TaskEvent, conn: bytes, reply: m.Reply) -> None:
        self._change(t, event)
        t.run(self.now)  # also where a task before it in the queue was never answered
        t.reply = reply
        t.up_conn = conn
        t.heard = self.now

    def _part(self, conn: bytes, part: m.Part, body: Body | None) -> str:
        """The next part of a reply that was announced."""
        t = self._current(part.key)
        if t is None or t.status is not TaskState.ARRIVING or t.up_conn != conn:
            return "late"
        assert t.up is not None
        assert t.reply is not None
        try:
            start = t.up.take(part.index, body)
        except RemoteProtocolError as broken:
            self._refuse_task(t, str(broken))
            return ""
        if start is None or body is None:
            return "doubled"
        t.heard = self.now
        self._out.append(Store(part.key, start, body))
        if t.up.whole:
            self._whole(t, t.reply, conn)
        else:
            self._wanting.setdefault(part.key.client, t)
        self._grant()
        return ""

    def _whole(self, t: TrackedTask, reply: m.Reply, conn: bytes, body: Body | None = None) -> None:
        """All of a reply is here. body: its payload, where that came beside it."""
        self._reply_comes(t, TaskEvent.WHOLE, conn, reply)
        self._out.append(Arrived(t, body))

    def _grant(self) -> None:
        """Grants parts of replies that come in, within the window and the budget, first to the
        client that has waited longest. The time does not depend on how many wait.
        """
        free = BUDGET
        for client, t in list(self._granted.items()):
            if t.up is None or not t.up.ahead:
                del self._granted[client]
            elif self.now - t.heard < UNUSED_S:
                free -= t.up.ahead
        while free > 0 and self._wanting:
            client, t = next(iter(self._wanting.items()))
            parts = None if t.up is None else t.up.grant(free)
            if parts is None:  # it is whole, or has enough on its way
                del self._wanting[client]
                continue
            first, count = parts
            self._send(t.up_conn, m.Pull(key=t.key, first=first, count=count))
            self._granted[client] = t
            free -= count

    def _pull(self, conn: bytes, pull: m.Pull) -> str:
        """The worker asks for parts of its task."""
        t = self._current(pull.key)
        if t is None or t.down is None or t.status is not TaskState.HANDED or t.conn != conn:
            return "late"
        parts = t.down.pulled(pull.first, pull.count)
        for index, data in parts or ():
            self._send(conn, m.Part(key=pull.key, index=index), data)
        return "" if parts is not None else "doubled"

    def _failed(self, worker: ClientProcess, failed: m.Failed) -> str:
        """The worker could not do its task."""
        key = failed.key
        t = self._current(failed.key)
        self._note(
            "failed",
            client=key.client,
            round=key.round,
            purpose=key.purpose,
            worker=worker.name,
            reason=failed.reason,
        )
        if t is None or t.worker != worker.name or t.status not in WITH_WORKER:
            return "late"
        if failed.base and t.spec.with_base is not None:
            self._take_back(t, TaskEvent.LACKED, "given out again")
            t.spec = t.spec.with_base()
        elif failed.lacks:
            # It lacks what the task starts from: another worker may have it. If there is none, the
            # client is dropped: as lost if it lacks a state of this round only.
            hosts = self.roster.hosting.get(key.client, {})
            t.refused_by.add(worker.name)
            if t.spec.bound:
                others = any(name not in t.refused_by for name in hosts)
                reason = f"lost: {failed.reason}"
            else:
                worker.lacks.add(key.client)
                others = any(key.client not in x.lacks for x in hosts.values())
                state_lost = t.spec.start and not failed.base
                reason = f"{STATE_LOST if state_lost else 'failed: '}{failed.reason}"
            if others:
                self._take_back(t, TaskEvent.LACKED, "its state is elsewhere")
            else:
                self._change(t, TaskEvent.LACKED, reason, TaskState.DROPPED)
        else:
            outcome = "damaged" if failed.again else "failed"
            self._refuse_task(t, failed.reason, failed.again, outcome)
        self._assign()
        return ""

    # -- handing out -------------------------------------------------------------------------------
    def _add(self, specs: Iterable[TaskSpec]) -> None:
        """These are to be handed out in this order, after those that wait already; one that is
        handed out again keeps its place. If a client had a task of the same round, the new one is
        its next attempt.
        """
        for spec in specs:
            round = spec.round or self.round
            attempt = 0
            last = self.tasks.get(spec.client)
            if last is not None and last.key.round == round:
                attempt = last.key.attempt + 1
            key = Key(round, self.phase, attempt, spec.client, self.purpose)
            t = self.tasks[spec.client] = TrackedTask(spec, key, since=self.now)
            self._assignment.add(t)
            if spec.leaves is not None:
                self._leaving.append(t)
        self._assign()

    def _assign(self, only: ClientProcess | None = None) -> None:
        """Hands waiting tasks to free workers, see `Assignment.pairs`."""
        if not self._assignment.waiting:
            return
        for t, worker in self._assignment.pairs(only):
            self._hand(t, worker)

    def _hand(self, t: TrackedTask, worker: ClientProcess) -> None:
        assert worker.conn is not None
        spec = t.spec
        client = spec.client
        self._change(t, TaskEvent.ASSIGNED)
        t.worker = worker.name
        t.conn = worker.conn
        until = None  # bytes of the task that cross before its client goes away
        if spec.leaves is not None and spec.leaves.down is not None:
            until = spec.leaves.down * self.part
        t.down = Sending(spec.body, self.part, until=until)
        worker.queue.append(client)
        worker.held.add(client)
        worker.did = "was asked for", client, t.key.round
        self.roster.recount(worker)
        t.running = len(worker.queue) <= worker.slots
        t.since = t.heard = self.now
        beside = t.down.beside() if spec.body.size <= self._beside else None
        self._out.append(Send(worker.conn, self._message(t), beside))

    def _message(self, t: TrackedTask) -> m.Task:
        """The task as it is announced in this hand-out."""
        return message_of(
            t.spec, t.key, self.run, self.incarnation, t.spec.keep, self.rules.deadline
        )

    def _run_next(self, worker: ClientProcess, done: int | None = None) -> None:
        """The first tasks of the worker's queue run, as many as it has slots, and their deadlines.
        done: a client whose task takes no slot any more.
        """
        if done is not None:
            if done in worker.queue:
                worker.queue.remove(done)
            worker.doing.pop(done, None)
        self.roster.recount(worker)
        for client in worker.queue[: worker.slots]:
            self.tasks[client].run(self.now)

    # -- taking back -------------------------------------------------------------------------------
    def _refuse_task(
        self, t: TrackedTask, reason: str, again: bool = True, outcome: str = "refused"
    ) -> None:
        """Records a useless reply as wasted. The task is handed out again, a few times at most.
        again: False if another try cannot help. outcome: what to call it: refused, failed, damaged.
        """
        t.refusals += 1
        t.refused_by.add(t.worker)
        if (worker := self.roster.workers.get(t.worker)) is not None:
            worker.did = "failed for", t.key.client, t.key.round
        event = TaskEvent.FAILED
        if outcome == "refused":
            event = TaskEvent.REFUSED
            self._note_refused("reply", reason, t.worker, client=t.key.client, round=t.key.round)
        if again and t.refusals < TRIES:
            self._take_back(t, event, "given out again", reply=outcome)
        else:
            self._change(t, event, f"{outcome}: {reason}", TaskState.DROPPED, reply=outcome)
        self._assign()

    def _take_back(
        self,
        t: TrackedTask,
        event: TaskEvent,
        reason: str,
        same_attempt: bool = False,
        died: bool = False,
        reply: str = "",
    ) -> None:
        """Takes a task from its worker, to be handed out again if it can be. died: its worker was
        lost while running it, perhaps because of it. reason, reply: see `_change`.
        """
        t.deaths += died
        if why := self._why_dropped(t):
            self._change(t, event, why, TaskState.DROPPED, reply)
        else:
            self._change(t, event, reason, TaskState.WAITING, reply)
            if not same_attempt:
                t.key = msgspec.structs.replace(t.key, attempt=t.key.attempt + 1)

    def _why_dropped(self, t: TrackedTask) -> str:
        """Why a task that comes back without a reply is not handed out again; "" where it is."""
        lost = f"failed: its worker was lost {DEATHS} times at this task"
        return lost if t.deaths >= DEATHS else ""

    def _change(
        self,
        t: TrackedTask,
        event: TaskEvent,
        reason: str = "",
        to: TaskState | None = None,
        reply: str = "",
    ) -> None:
        """Changes a task's state, and does what follows from it by the table. reason: why what
        crossed for it is wasted, and why it was dropped; reply: why its reply is wasted, if
        not for that reason. to: which state, if the event can lead to several.
        """
        following, effects = CHANGES[t.status, event, to]
        for effect in effects:
            self._carry_out(effect, t, reason, reply)
        t.status = following
        if following in NO_REPLY and t.reply is not None:
            t.forget_reply()
        if following in NOT_HANDED:
            t.forget_worker()

    def _carry_out(self, effect: Effect, t: TrackedTask, reason: str, reply: str) -> None:
        """Does what follows from a change of a task's state. reason, reply: see `_change`."""
        worker = self.roster.workers.get(t.worker)
        if effect is Effect.RELEASE:
            if worker is not None:
                worker.held.discard(t.spec.client)
        elif effect is Effect.FREE:
            if worker is not None:
                self._run_next(worker, t.spec.client)
        elif effect is Effect.RESOLVE:
            self._assignment.remove(t.spec.client)
            self._out.append(Resolved(t.key, reason))
        elif effect is Effect.CALL_OFF:
            if worker is not None and worker.conn is not None:
                self._send(worker.conn, m.Cancel(key=t.key))
        elif effect is Effect.WASTE_DOWN:
            if t.conn:
                self._out.append(ClosePayload(t.conn, "down", t.key, reason))
        elif effect is Effect.WASTE_UP:
            if t.up_conn:
                self._out.append(ClosePayload(t.up_conn, "up", t.key, reply or reason))
        elif effect is Effect.WAIT:
            self._assignment.add(t)

    def _cancel(self, reason: str) -> None:
        for t in self.open_tasks():
            self._change(t, TaskEvent.CANCELLED, reason)

    # -- how long the server waits -----------------------------------------------------------------
    def _depart(self) -> None:
        """Drops the tasks of clients that went away, by what has crossed."""
        for t in self._leaving:
            leaves = t.spec.leaves
            if leaves is None or leaves.at is not None or t.status in (TaskState.ARRIVED, *ENDED):
                continue
            if t.up is not None:
                gone = t.up.cut
            elif t.down is not None:
                gone = t.down.cut or (leaves.up == 0 and t.down.whole)
            else:
                gone = False
            if gone:
                self._change(t, TaskEvent.LEFT, LEFT)

    def _expire(self) -> None:
        """Takes back, or drops, tasks for which the server has waited long enough."""
        self._depart()
        deadline = self.rules.deadline
        tasks = list(self._assignment.waiting.values())
        if (
            deadline is not None or self._leaving
        ):  # else nothing limits a task that is with a worker
            tasks = self.open_tasks()
        for t in tasks:
            leaves = latest = math.inf
            if t.spec.leaves is not None and t.spec.leaves.at is not None:
                leaves = t.spec.leaves.at
            if deadline is not None and t.running and t.status in WITH_WORKER:
                latest = t.since + deadline
            if self.now >= min(leaves, latest) and t.status is not TaskState.ARRIVED:
                _, why = end_of(math.inf, leaves, latest)
                self._change(t, TaskEvent.LEFT if why == LEFT else TaskEvent.DEADLINE, why)
            elif t.status is TaskState.WAITING and t.spec.client not in self.roster.hosting:
                until, why = self.roster.waited_until(t.spec.client, t.since, self.rules.join)
                if until is not None and self.now >= until:
                    self._change(t, TaskEvent.ABSENT, why)
