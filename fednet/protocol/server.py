"""The server's side of the protocol: a state machine without I/O.

Events and the time go in, instructions come out: all times are seconds on the caller's clock,
handed in as `now`. Who is there is in `workers`, what each was handed and how long is waited for it
in `tasks`, how a payload crosses in `transfers`, what an event is answered with in `instructions`.

What a peer may make the server hold or send is bounded: one join a connection; a form is checked
before a byte of its body is asked for; parts are granted within a window and a budget; each part of
a task is sent once a hand-out. Who sends many messages that belong to nothing is hung up on by
`server.io`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids, as_text
from fednet.protocol.instructions import Arrived, Forget, Instruction, Send, Store, Turn
from fednet.protocol.table import WITH_WORKER, TaskEvent, TaskState, WorkerEvent, WorkerState
from fednet.protocol.tasks import Job, Rules, Task, Tasks
from fednet.protocol.transfers import Receiving
from fednet.protocol.workers import SLOTS, Roster, Sites, Worker
from fednet.wire import messages as m
from fednet.wire.codec import Content
from fednet.wire.messages import Field, Key

BUDGET = 64  # parts granted to all senders together
# A grant of which no part has come for so long does not count: a few who send nothing must not use
# up the budget of all.
UNUSED_S = 2.0
ANSWERED = (TaskState.ARRIVING, TaskState.ARRIVED, TaskState.DONE)


class ServerProtocol:
    """Feed it `received`, `closed`, `tick`, and the engine's `begin`, `accept`, `reject`, `finish`;
    do what it returns. What it knows can be read: the client processes in `roster`, the tasks of
    the open phase in `tasks`, what was refused in `turn`.

    welcome(ids, session): the answer to a join.
    key_refusal(user, client): why that key may not speak for the client; "" if it may.
    declared(key, form): raises RemoteProtocolError for a reply that is not of the form and size
    that the method declares. rules: until a phase gives its own.
    part: bytes of a payload's parts, but the last. open: how many clients there may be, where more
    may join the run while it goes on.
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
        key_refusal: Callable[[str | None, int], str] = lambda user, client: "",
        declared: Callable[[Key, Sequence[Field]], None] = lambda key, form: None,
        rules: Rules | None = None,
        part: int = m.PART,
        class_names: str = "",
        open: int | None = None,
    ) -> None:
        self.run, self.incarnation, self.clients = run, incarnation, clients
        self._most = max(clients, open or 0)
        self._asking: dict[int, bytes] = {}  # ids that ask to join the run: over which connection
        self._key_refusal = key_refusal
        self.roster = Roster(now)
        self.turn = Turn(run, incarnation, now, part, self.roster.by_conn)
        self.tasks = Tasks(self.turn, self.roster, rules or Rules())
        self._welcome = welcome
        self._alive = m.Alive(run=run, inc=incarnation)
        self._files = dict(files or {})
        self._layout, self._declared = layout, declared
        self.sites = Sites(class_names)
        # By client, whose replies come in, in parts: those that may be granted more, and those of
        # which parts that were granted have not come.
        self._wanting: dict[int, Task] = {}
        self._asked: dict[int, Task] = {}

    # -- the engine's commands ---------------------------------------------------------------------
    def begin(
        self,
        round: int,
        phase: int,
        purpose: m.Purpose,
        jobs: Sequence[Job],
        rules: Rules,
        now: float,
    ) -> list[Instruction]:
        """Opens a phase. What is left of the phase before is cancelled."""
        self.turn.now = now
        self.turn.strikes.clear()
        self.tasks.begin(round, phase, purpose, jobs, rules)
        self.tasks.expire()
        return self.turn.take()

    def accept(self, key: Key, now: float) -> list[Instruction]:
        """The reply was whole and sound."""
        self.turn.now = now
        self.tasks.accept(key)
        return self.turn.take()

    def reject(self, key: Key, reason: str, now: float) -> list[Instruction]:
        """The reply was not what was declared: it is billed, and the task is given out again a few
        times at most.
        """
        self.turn.now = now
        self.tasks.reject(key, reason)
        return self.turn.take()

    def add(self, round: int, jobs: Sequence[Job], now: float) -> list[Instruction]:
        """More tasks in the phase that is open, each of the round that it names."""
        self.turn.now = now
        if round > self.tasks.round:
            self.turn.strikes.clear()
        self.tasks.add(round, jobs)
        return self.turn.take()

    def cancel(self, reason: str, now: float) -> list[Instruction]:
        """Ends the phase as it is."""
        self.turn.now = now
        self.tasks.cancel(reason)
        return self.turn.take()

    def clients_wanted(self) -> int:
        """Returns how many clients the run has with those that ask to join it. Their ids have to
        follow without a gap.
        """
        wanted = self.clients
        while wanted in self._asking:
            wanted += 1
        return wanted

    def turn_away(self, reason: str, now: float) -> list[Instruction]:
        """The clients that ask to join the run cannot."""
        self.turn.now = now
        for conn in sorted(set(self._asking.values())):
            self.turn.strikes.pop(conn, None)  # by asking, for which it gets no answer
            self.turn.refuse(conn, f"join: {reason}", "join", final=True)
        self._asking.clear()
        return self.turn.take()

    def finish(self, over: bool, reason: str = "") -> list[Instruction]:
        """Tells all workers that the run is over, or that this server stops with rounds left to
        do.
        """
        for w in self.roster.workers.values():
            if w.conn is not None:
                self.turn.send(
                    w.conn,
                    m.End(over=over, reason=m.clean(reason, 4000)),
                )
        return self.turn.take()

    # -- the transport's events --------------------------------------------------------------------
    def received(
        self,
        conn: bytes,
        message: m.Message,
        body: Content | None,
        now: float,
        user: str | None = None,
    ) -> list[Instruction]:
        """A decoded message. What breaks the protocol is refused with a reason, counted, and
        changes nothing.
        """
        self.turn.now = now
        try:
            if isinstance(message, m.Join):
                stray = self._join(conn, message, user)
            else:
                stray = self._from_worker(conn, message, body)
        except RemoteProtocolError as broken:
            self.turn.refuse(conn, str(broken), str(message.__struct_config__.tag))
            stray = "refused"
        self.tasks.depart()
        if stray:
            self.turn.strike(conn)
        return self.turn.take(stray)

    def undecodable(self, conn: bytes, reason: str, now: float) -> list[Instruction]:
        self.turn.now = now
        self.turn.refuse(conn, reason, unread=True)
        self.turn.strike(conn)
        worker = self.roster.by_conn.get(conn)
        if worker is not None:
            self.tasks.unread(worker, reason)
        return self.turn.take()

    def closed(self, conn: bytes, now: float, why: str = "") -> list[Instruction]:
        """The connection is gone. why: the reason, where this side ended it."""
        self.turn.now = now
        self.turn.strikes.pop(conn, None)
        for client in [i for i, asked_over in self._asking.items() if asked_over == conn]:
            del self._asking[client]
        worker = self.roster.part(conn, closed=True)
        if worker is not None:
            why = why or "connection closed"
            self._away(worker, WorkerEvent.CLOSED, why, self.tasks.rules.closed)
        self.turn.say(Forget(conn))
        return self.turn.take()

    def tick(self, now: float) -> list[Instruction]:
        """Lets time pass: deadlines, silences, absences."""
        self.turn.now = now
        silent, closed = self.tasks.rules.silent, self.tasks.rules.closed
        for worker in list(self.roster.workers.values()):
            if worker.here and silent is not None and now - worker.heard > silent:
                # The silence was its time to come back.
                self._away(worker, WorkerEvent.SILENT, "silent", 0.0)
                self.tasks.give_on(worker)
            elif worker.gone_at is not None and self.turn.over(worker.gone_at, closed):
                self.tasks.give_on(worker)
                if worker.state is WorkerState.AWAY:
                    self.roster.forget(worker)
            elif worker.gone_at is not None and self.turn.over(worker.gone_at, silent):
                # It may be awaited for ever, but not where others can do its tasks.
                self.tasks.replace(worker, self.roster.hosting)
        self.tasks.expire()
        self.tasks.assign()
        self._grant()
        return self.turn.take()

    def _away(self, worker: Worker, event: WorkerEvent, why: str, patience: float | None) -> None:
        self.roster.away(worker, event, why, patience, self.turn.now)
        self.tasks.pause(worker)
        self.turn.note("away", **worker.named(), why=why)

    # -- from a worker -----------------------------------------------------------------------------
    def _from_worker(self, conn: bytes, message: m.Message, body: Content | None) -> str:
        """Returns why the message belongs to nothing that is under way, or ""."""
        worker = self.roster.by_conn.get(conn)
        if worker is None:
            raise RemoteProtocolError("a message before a join")
        if message.run != self.run:
            raise RemoteProtocolError(f"a message of another run ({message.run[:16]!r})")
        if message.inc != self.incarnation and not isinstance(message, m.Reply):
            raise RemoteProtocolError(
                f"a message for incarnation {message.inc} of this server, which is "
                f"{self.incarnation}"
            )
        worker.heard = self.turn.now
        if worker.state is WorkerState.SILENT:
            self.roster.back(worker)
            self.turn.note("back", **worker.named())
        if isinstance(message, m.BEATS):
            if isinstance(message, m.Slots):
                worker.slots = min(message.slots, SLOTS)
                self.roster.recount(worker)
                self.tasks.run_heads(worker)
                self.tasks.assign()
            elif isinstance(message, m.Progress) and message.client in worker.ids:
                self._progress(worker, message)
            self.turn.say(Send(conn, self._alive))
            return ""
        if isinstance(message, m.Ready):
            return self._ready(conn, worker, message)
        if isinstance(message, m.Leave):
            self._leave(conn, worker, message.reason)
            return ""
        key: Key = message.key  # type: ignore[attr-defined]
        if key.client not in worker.ids:
            raise RemoteProtocolError(f"client {key.client} is not hosted by this worker")
        # Revoked since it joined; the key may still speak for others.
        if why := self._key_refusal(worker.user, key.client):
            self.roster.leave_out(worker, key.client, why, self.turn.now)
            t = self.tasks.by_client.get(key.client)
            if t is not None and t.worker == worker.name and t.status in WITH_WORKER:
                self.tasks.take_back(t, TaskEvent.REVOKED, why)  # it waits for another worker
            raise RemoteProtocolError(f"this key may not speak for client {key.client} any more")
        if isinstance(message, m.Reply):
            return self._reply(conn, worker, message, body)
        if isinstance(message, m.Part):
            return self._part(conn, message, body)
        if isinstance(message, m.Pull):
            return self._pull(conn, worker, message)
        assert isinstance(message, m.Failed)
        return self._failed(worker, message)

    def _progress(self, worker: Worker, progress: m.Progress) -> None:
        client, tasks = progress.client, self.tasks
        # Its link is slow, not its worker, which is free for the next.
        if progress.phase == m.UPLOADING:
            tasks.start_next(worker, client)
            tasks.assign(worker)
        t = tasks.by_client.get(client)
        if t is not None and client in worker.queue:
            t.heard = self.turn.now
        worker.doing[client] = progress.phase, progress.step, progress.steps

    def _leave(self, conn: bytes, worker: Worker, reason: str) -> None:
        self.turn.note("left", **worker.named())
        self.roster.part(conn)
        why = f"left: {reason}" if reason else "left"
        self._away(worker, WorkerEvent.LEFT, why, self.tasks.rules.closed)
        self.tasks.give_on(worker)

    # -- joining: each returns why the message was refused, or "" --------------------------------
    def _join(self, conn: bytes, join: m.Join, user: str | None) -> str:
        """Lets a worker in: for the first time, or back."""
        if conn in self.roster.joined:
            raise RemoteProtocolError("join: this connection has joined already")
        try:
            ids = frozenset(
                Ids("{}/{}".format(*join.share), share=join.share).resolve(self.clients)
                if join.share is not None
                else join.ids
            )
        except (ConfigError, ZeroDivisionError) as broken:
            self.turn.refuse(conn, f"join: {broken}", "join", final=True)
            return "refused"
        old = self.roster.workers.get(join.worker)
        reason, final = self._objection(join, ids, user, old)
        if reason:
            self.turn.refuse(conn, reason, "join", final)
            known = {i for i in ids if i < self.clients}
            self.roster.refused(known, reason.removeprefix("join: "))
            return "refused"
        if new := sorted(i for i in ids if i >= self.clients):
            self._ask(conn, join, new)
            return "refused"
        if old is not None and old.conn is not None:
            self.turn.say(Forget(old.conn, hang_up=True))
        worker = self.roster.enter(conn, join, ids, user, self.turn.now)
        self.turn.send(conn, self._welcome(sorted(ids), worker.session))
        self.turn.note(
            "joined" if old is None else "rejoined",
            worker=worker.name,
            clients=sorted(ids),
            host=worker.host,
            pid=worker.pid,
            device=worker.device,
            versions=join.versions,
        )
        self._pick_up(worker, set(join.holding), join.inc == self.turn.incarnation)
        return ""

    def _ask(self, conn: bytes, join: m.Join, new: Sequence[int]) -> None:
        """A worker asks that clients join the run, which are not in it yet: it tries again until
        they are.
        """
        if any(self._asking.get(i) != conn for i in new):
            named = {"worker": join.worker, "host": join.host, "pid": join.pid}
            self.turn.note("asked_to_join", clients=list(new), **named)
        self._asking.update(dict.fromkeys(new, conn))
        reason = f"client(s) {as_text(new)} join the run when a round ends"
        missing = [i for i in range(self.clients, new[-1]) if i not in self._asking]
        if missing:
            reason += f", once client(s) {as_text(missing)} ask to join too"
        self.turn.send(conn, m.Refuse(reason=m.clean(f"join: {reason}.")))

    def _objection(
        self, join: m.Join, ids: frozenset[int], user: str | None, old: Worker | None
    ) -> tuple[str, bool]:
        """(why this server cannot let that worker in, or ""; whether it never can). old: a worker
        of that name.
        """
        if join.speaks != m.PROTOCOL:
            return foreign(join.speaks, join.versions.get("fednet", "")), True
        bad = sorted(i for i in ids if not 0 <= i < self._most)
        if bad or not ids:
            known = f"this federation has ids 0 to {self._most - 1}."
            return f"join: client id {bad[0] if bad else 'missing'}; {known}", True
        if len(ids) > m.MAX_IDS:  # by a share
            return (
                f"join: {len(ids)} clients in one process, at most {m.MAX_IDS} are allowed; "
                "start several with --id K/N."
            ), True
        if missing := [f for f, sha in self._files.items() if sha not in join.files.values()]:
            return (
                f"join: this federation needs {', '.join(missing)} loaded on the client too "
                "(--load), with the same content."
            ), True
        if strangers := sorted(i for i in ids if self._key_refusal(user, i)):
            return f"join: this key may not speak for client {strangers[0]}.", True
        if old is not None:
            taken = old.user != user or (old.here and old.session != join.session)
            return "join: a worker of that name is connected." if taken else "", False
        if len(self.roster.workers) >= self.roster.limit:
            self.roster.make_room({w.worker for w in self.tasks.open()})
        if len(self.roster.workers) >= self.roster.limit:
            return f"join: {self.roster.limit} workers are connected already.", False
        return "", False

    def _ready(self, conn: bytes, worker: Worker, ready: m.Ready) -> str:
        """Data and model are in place there."""
        if self._layout and ready.layout != self._layout:
            self.turn.refuse(
                conn,
                "ready: the model built there has other tensors than the server's; the same "
                "configuration, files and torch are needed on both sides.",
                "ready",
                final=True,
            )
            return "refused"
        if unlike := self.sites.unlike(ready.sites):
            self.turn.refuse(conn, unlike, "ready", final=True)
            return "refused"
        for event, fields in self.sites.take(worker, ready.sites):
            self.turn.note(event, **fields)
        if worker.state is WorkerState.READY:
            return ""
        self.roster.ready(worker)
        self.turn.note("ready", **worker.named())
        self._supersede(worker)
        return ""

    def _pick_up(self, worker: Worker, holding: set[Key], ours: bool) -> None:
        """A worker is back: what it still holds goes on, what it lost on the way is handed out
        again. ours: this server handed out what it holds, and can tell what is not wanted any more;
        of an earlier one's tasks it may ask again.
        """
        kept: set[Key] = set()
        for w in self.tasks.held_by(worker):
            if w.job.client not in worker.ids:
                self.tasks.take_back(w, TaskEvent.LOST, "lost")
            elif self.tasks.key(w) not in holding:
                self.tasks.take_back(w, TaskEvent.LOST, "lost", same_attempt=True)
            else:
                kept.add(self.tasks.key(w, "train"))
                if w.status is TaskState.ARRIVING:  # it announces its reply again
                    self.tasks.restart_upload(w)
                if w.job.client not in worker.queue:
                    worker.queue.append(w.job.client)
                    self.roster.recount(worker)
        for key in sorted(holding) if ours else ():
            if msgspec.structs.replace(key, purpose="train") not in kept:
                self.turn.send(worker.conn or b"", m.Cancel(key=key))

    def _supersede(self, worker: Worker) -> None:
        """A new process is ready: it need not wait until the one before it is given up."""
        for gone in list(self.roster.workers.values()):
            if gone.gone_at is not None:
                if gone.ids <= worker.ids:
                    self.turn.note("superseded", **gone.named(), by=worker.name)
                self.tasks.replace(gone, worker.ids)
        self.tasks.assign()

    # -- payloads: each returns why the message belongs to nothing that is under way, or "" --------
    def _reply(self, conn: bytes, worker: Worker, reply: m.Reply, body: Content | None) -> str:
        """A reply, whole or announced."""
        key, tasks, turn = reply.key, self.tasks, self.turn
        w = tasks.current(key)
        if (
            w is None
            or w.worker != worker.name
            or w.status is not TaskState.HANDED
            or reply.inc != turn.incarnation
        ):
            state = "doubled" if w is not None and w.status in ANSWERED else "late"
            turn.note(state, client=key.client, round=key.round, worker=worker.name)
            if reply.size > self.turn.part and state == "late":
                turn.send(conn, m.Cancel(key=key))
            return state
        cut = w.job.short(reply.size)
        ends = (reply.size, cut if reply.size <= turn.part else reply.size)
        agrees = sum([f.size for f in reply.form]) == reply.size and (
            len(body) in ends if body is not None else not 0 < reply.size <= turn.part
        )
        # Evaluated within the training task: small, beside the reply, gates nothing.
        if key.purpose != tasks.purpose:
            if key.purpose != "evaluate" or not w.job.judge or not agrees or body is None:
                raise RemoteProtocolError(
                    f"an evaluation of client {key.client} that was not asked for"
                )
            if w.judge_conn:
                return "doubled"
            self._declared(key, reply.form)
            w.judge_conn = conn
            turn.say(Store(key, 0, body, reply.size))
            turn.say(Arrived(reply, worker.name, turn.now - w.since, conn, None))
            return ""
        try:
            if not agrees:
                raise RemoteProtocolError("reply: announced sizes do not agree")
            self._declared(key, reply.form)
        except RemoteProtocolError as broken:
            tasks.refuse(w, str(broken), True)
            return "refused"
        w.change(TaskEvent.ANNOUNCED)
        w.run(turn.now)  # though one before it was dropped without a word, and seems to
        w.reply, w.up_conn, w.moved = reply, conn, turn.now
        w.up = Receiving(reply.size, turn.part, until=w.job.cut("up", turn.part), short=cut)
        tasks.start_next(worker, key.client)
        if body is not None and len(body) < reply.size:
            w.up.ended = True
        elif body is not None or reply.size == 0:
            turn.say(Store(key, 0, body if body is not None else memoryview(b""), reply.size))
            self._whole(w, reply)
        else:
            self._wanting[key.client] = w
            self._grant()
        tasks.assign(worker)
        return ""

    def _failed(self, worker: Worker, failed: m.Failed) -> str:
        """The worker could not do its task."""
        w = self.tasks.current(failed.key)
        self.turn.note(
            "failed",
            client=failed.key.client,
            round=failed.key.round,
            purpose=failed.key.purpose,
            worker=worker.name,
            reason=failed.reason,
        )
        if (
            w is None
            or failed.key.purpose != self.tasks.purpose
            or w.worker != worker.name
            or w.status not in WITH_WORKER
        ):
            return "late"
        if failed.base and w.job.with_base is not None:
            self.tasks.take_back(w, TaskEvent.LACKED, "given out again")
            w.job = w.job.with_base()
            self.tasks.assign()
            return ""
        if failed.lacks:
            self.tasks.elsewhere(w, worker, failed)
            return ""
        self.tasks.refuse(w, failed.reason, failed.again, "damaged" if failed.again else "failed")
        return ""

    def _part(self, conn: bytes, part: m.Part, body: Content | None) -> str:
        """The next part of a reply that was announced."""
        w = self.tasks.current(part.key)
        if w is None or w.up is None or w.reply is None or w.status is not TaskState.ARRIVING:
            return "late"
        if part.key.purpose != self.tasks.purpose or w.up_conn != conn:
            return "late"
        try:
            start = w.up.take(part.index, body)
        except RemoteProtocolError as broken:
            self.tasks.refuse(w, str(broken), True)
            return ""
        if start is None or body is None:
            return "doubled"
        w.heard = w.moved = self.turn.now
        if w.up.ended:
            return ""
        self.turn.say(Store(part.key, start, body, w.reply.size))
        if w.up.whole:
            self._whole(w, w.reply)
        else:
            self._wanting.setdefault(part.key.client, w)
        self._grant()
        return ""

    def _whole(self, w: Task, reply: m.Reply) -> None:
        w.change(TaskEvent.WHOLE)
        taken_s = self.turn.now - w.since
        self.turn.say(Arrived(reply, w.worker, taken_s, w.up_conn, w.conn))

    def _grant(self) -> None:
        """Grants parts of replies that come in, within the window and the budget, first to the
        client that has waited longest. The time does not depend on how many wait.
        """
        now, turn = self.turn.now, self.turn
        self._asked = {c: t for c, t in self._asked.items() if _ahead(t)}
        free = BUDGET - sum([_ahead(t) for t in self._asked.values() if now - t.moved < UNUSED_S])
        while free > 0 and self._wanting:
            client, t = next(iter(self._wanting.items()))
            parts = t.up.grant(free) if t.up is not None else None
            if parts is None:  # it is whole, has ended, or has enough on its way
                del self._wanting[client]
                continue
            first, count = parts
            turn.send(t.up_conn, m.Pull(key=self.tasks.key(t), first=first, count=count))
            self._asked[client] = t
            free -= count

    def _pull(self, conn: bytes, worker: Worker, pull: m.Pull) -> str:
        """The worker asks for parts of its task."""
        w, turn = self.tasks.current(pull.key), self.turn
        if w is None or w.down is None or w.status is not TaskState.HANDED:
            return "late"
        if pull.key.purpose != self.tasks.purpose or w.worker != worker.name or w.conn != conn:
            return "late"
        parts = w.down.pulled(pull.first, pull.count)
        for index, data in parts or ():
            turn.send(conn, m.Part(key=pull.key, index=index), data)
        return "" if parts is not None else "doubled"


def _ahead(t: Task) -> int:
    """Parts of a reply that were granted and have not come."""
    return 0 if t.up is None else t.up.ahead


def foreign(speaks: int, release: str) -> str:
    """Why two sides do not understand each other, and what to do."""
    named = f" (fednet {m.clean(release)})" if release else ""
    return (
        f"join: the client{named} speaks version {speaks} of the protocol, this server version "
        f"{m.PROTOCOL}; install the same release of fednet on both sides."
    )
