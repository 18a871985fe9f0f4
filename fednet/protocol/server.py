"""The server's side of the protocol: a state machine without I/O.

A job of a phase goes through these states:

    waiting ── handed to a free worker ──> handed ── reply announced ──> arriving ── all parts in ──> arrived
       ^                                     │                               │                          │
       └── worker lost, or reply refused ────┴───────────────────────────────┘            accept ──> done
    any but done ── deadline, lost for good, cancelled ──> dropped                        reject ──> waiting | dropped

A worker (a client process hosting one or many ids) is connecting -> welcomed -> ready, and away when its connection is
closed or its heartbeat silent. All times are seconds on the caller's clock, handed in as `now`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids
from fednet.protocol.rules import (
    BUDGET,
    TRIES,
    WINDOW,
    Arrived,
    Forget,
    Instruction,
    Job,
    Note,
    Resolved,
    Rules,
    Send,
    Settle,
    Store,
)
from fednet.wire import messages as m
from fednet.wire.messages import PART, Key

ENDED = ("done", "dropped")


@dataclass(slots=True)
class Worker:
    """A client process. `queue`: tasks it was handed and has not answered, in order; the first `slots` are running."""

    name: str
    session: str
    ids: frozenset[int]
    conn: bytes | None
    heard: float
    slots: int = 1
    host: str = ""
    pid: int = 0
    device: str = ""
    ready: bool = False
    gone_at: float | None = None
    queue: list[int] = field(default_factory=list)
    doing: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # client -> phase, step, steps
    user: str | None = None


@dataclass(slots=True)
class Work:
    """A job and how far it is."""

    job: Job
    status: str = "waiting"
    attempt: int = 0
    worker: str = ""
    conn: bytes = b""  # where the task went
    up_conn: bytes = b""  # where its reply comes from
    since: float = 0.0  # hand-out, or when it got to the head of its worker's queue
    running: bool = False
    sent_parts: int = 0
    reply: m.Reply | None = None
    got: int = 0
    granted: int = 0
    refusals: int = 0
    reason: str = ""


class ServerProtocol:
    """Feed it `received`, `closed`, `tick`, and the engine's `begin`, `accept`, `reject`, `finish`; do what it returns."""

    def __init__(self, run: str, incarnation: int, clients: int, welcome: Callable[[list[int], str], m.Welcome], now: float, *,
                 files: Mapping[str, str] | None = None, layout: str = "", may_speak_for: Callable[[str | None, int], bool] | None = None,
                 max_workers: int = 10_000) -> None:
        self.run, self.incarnation, self.clients = run, incarnation, clients
        self.files, self.layout = dict(files or {}), layout
        self.rules = Rules()
        self.round, self.phase, self.purpose = 0, 0, "train"
        self.work: dict[int, Work] = {}
        self.workers: dict[str, Worker] = {}
        self.sites: dict[int, m.SiteFacts] = {}
        self.refused = 0
        self._by_conn: dict[bytes, str] = {}
        self._left_at: dict[int, float] = {}  # id -> when its last worker went
        self._known: set[int] = set()
        self._last: dict[int, str] = {}  # client -> the worker that had its last task
        self._welcome = welcome
        self._may = may_speak_for or (lambda user, client: True)
        self._started = now
        self._max_workers = max_workers
        self._out: list[Instruction] = []
        self._now = now
        self._users: dict[bytes, str | None] = {}

    # -- what is known -----------------------------------------------------------------------------------------------
    def present(self) -> set[int]:
        """Ids hosted by a worker that is ready."""
        return {i for w in self.workers.values() if w.ready and w.gone_at is None for i in w.ids}

    def open(self) -> list[Work]:
        return [w for w in self.work.values() if w.status not in ENDED]

    def _key(self, w: Work, purpose: str | None = None) -> Key:
        return Key(self.round, self.phase, w.attempt, w.job.client, purpose or self.purpose)

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _say(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    # -- the engine's commands ---------------------------------------------------------------------------------------
    def begin(self, round: int, phase: int, purpose: str, jobs: Sequence[Job], rules: Rules, now: float,
              attempts: Mapping[int, int] | None = None) -> list[Instruction]:
        """Opens a phase. `attempts`: the first attempt number by client, where an earlier server got further than 0."""
        self._now, self.rules = now, rules
        self.round, self.phase, self.purpose = round, phase, purpose
        self.work = {j.client: Work(j, attempt=(attempts or {}).get(j.client, 0), since=now) for j in jobs}
        self._assign()
        self._expire()
        return self._take()

    def accept(self, key: Key, now: float) -> list[Instruction]:
        """The reply was whole and sound."""
        self._now = now
        w = self._current(key)
        if w is None or w.status != "arrived":
            return self._take()
        w.status = "done"
        if not self.rules.defer:
            self._say(Settle(w.conn, "down", self._key(w), True), Settle(w.up_conn, "up", self._key(w), True))
        self._say(Resolved(w.job.client, w.attempt))
        first = self.rules.first
        if first is not None and sum(1 for x in self.work.values() if x.status == "done") >= first:
            for other in self.open():
                self._drop(other, f"not among the first {first}")
        self._assign()
        return self._take()

    def reject(self, key: Key, reason: str, now: float, again: bool = True) -> list[Instruction]:
        """The reply was not what was declared: it is billed, and the task is given out again a few times at most."""
        self._now = now
        w = self._current(key)
        if w is not None and w.status == "arrived":
            self._refuse_reply(w, reason, again)
            self._assign()
        return self._take()

    def decide(self, useful: Mapping[int, bool]) -> list[Instruction]:
        """Settles the bytes of a deferred phase."""
        for client, good in useful.items():
            w = self.work[client]
            if w.status == "done":
                self._say(Settle(w.conn, "down", self._key(w), good), Settle(w.up_conn, "up", self._key(w), good))
        return self._take()

    def cancel(self, reason: str, now: float) -> list[Instruction]:
        """Ends the phase as it is."""
        self._now = now
        for w in self.open():
            self._drop(w, reason)
        return self._take()

    def finish(self, over: bool, reason: str = "") -> list[Instruction]:
        """Tells all workers that the run is over, or that this server stops with rounds left to do."""
        for w in self.workers.values():
            if w.conn is not None:
                self._send(w.conn, m.End(run=self.run, inc=self.incarnation, over=over, reason=reason))
        return self._take()

    # -- the transport's events --------------------------------------------------------------------------------------
    def received(self, conn: bytes, message: m.Message, body: memoryview | None, now: float, user: str | None = None) -> list[Instruction]:
        """A decoded message. What breaks the protocol is refused with a reason, counted, and changes nothing."""
        self._now = now
        self._users[conn] = user
        try:
            if isinstance(message, m.Join):
                self._join(conn, message, user)
            else:
                self._from_worker(conn, message, body)
        except RemoteProtocolError as broken:
            self.refuse(conn, str(broken), str(message.__struct_config__.tag))
        return self._take()

    def refuse(self, conn: bytes, reason: str, what: str = "frame", final: bool = False) -> None:
        """Counts a refusal; the sender is told if it may be told."""
        self.refused += 1
        self._say(Note("refused", {"what": what, "reason": reason, "worker": self._by_conn.get(conn, "")}))
        if final or conn in self._by_conn:
            self._send(conn, m.Refuse(run=self.run, inc=self.incarnation, reason=reason[:4000], final=final))

    def undecodable(self, conn: bytes, reason: str, now: float) -> list[Instruction]:
        self._now = now
        self.refuse(conn, reason)
        return self._take()

    def closed(self, conn: bytes, now: float) -> list[Instruction]:
        """The connection is gone."""
        self._now = now
        self._users.pop(conn, None)
        name = self._by_conn.pop(conn, None)
        worker = self.workers.get(name or "")
        if worker is not None and worker.conn == conn:
            worker.conn, worker.ready = None, False
            self._away(worker, "connection closed")
        self._say(Forget(conn))
        return self._take()

    def tick(self, now: float) -> list[Instruction]:
        """Lets time pass: deadlines, silences, absences."""
        self._now = now
        silent = self.rules.silent
        for worker in list(self.workers.values()):
            if worker.gone_at is None and silent is not None and now - worker.heard > silent:
                self._away(worker, "silent")
                worker.gone_at = now - (self.rules.closed or 0.0)  # the silence was its time to come back
            if worker.gone_at is not None and self._over(worker.gone_at, self.rules.closed):
                self._give_on(worker)
                if worker.conn is None and not any(w.worker == worker.name for w in self.open()):
                    del self.workers[worker.name]
        self._expire()
        self._assign()
        return self._take()

    # -- joining -----------------------------------------------------------------------------------------------------
    def _join(self, conn: bytes, join: m.Join, user: str | None) -> None:
        try:
            ids = Ids("%d/%d" % join.share, share=join.share).resolve(self.clients) if join.share is not None else tuple(join.ids)
        except (ConfigError, ZeroDivisionError) as broken:
            return self.refuse(conn, f"join: {broken}", "join", final=True)
        bad = [i for i in ids if i >= self.clients]
        missing = [f for f, sha in self.files.items() if sha not in join.files.values()]
        strangers = [i for i in ids if not self._may(user, i)]
        old = self.workers.get(join.worker)
        if bad or not ids:
            return self.refuse(conn, f"join: client id {bad[0] if bad else 'missing'}; this federation has ids 0 to {self.clients - 1}.", "join", True)
        if missing:
            return self.refuse(conn, f"join: this federation needs {', '.join(missing)} loaded on the client too (--load), with the same content.", "join", True)
        if strangers:
            return self.refuse(conn, f"join: this key may not speak for client {strangers[0]}.", "join", True)
        if old is not None and old.conn is not None and old.conn != conn and old.session != join.session:
            return self.refuse(conn, "join: a worker of that name is connected.", "join")
        if old is None and len(self.workers) >= self._max_workers:
            return self.refuse(conn, f"join: {self._max_workers} workers are connected already.", "join")
        if old is not None and old.conn is not None and old.conn != conn:
            self._by_conn.pop(old.conn, None)
            self._say(Forget(old.conn))
        worker = old or Worker(join.worker, secrets.token_hex(8), frozenset(ids), conn, self._now)
        worker.conn, worker.ids, worker.heard, worker.gone_at, worker.ready = conn, frozenset(ids), self._now, None, False
        worker.slots, worker.host, worker.pid, worker.device, worker.user = join.slots, join.host, join.pid, join.device, user
        self.workers[worker.name] = worker
        self._by_conn[conn] = worker.name
        holding = set(join.holding)
        for w in self.open():
            if w.worker == worker.name and w.status in ("handed", "arriving"):
                if self._key(w) in holding and w.sent_parts >= w.job.body.parts():
                    self._restart_upload(w)  # it announces its reply anew
                    if w.job.client not in worker.queue:
                        worker.queue.append(w.job.client)
                else:
                    self._take_back(w, same_attempt=True)
        welcome = self._welcome(sorted(ids), worker.session)
        self._send(conn, welcome)
        self._say(Note("joined" if old is None else "rejoined", {"worker": worker.name, "clients": sorted(ids), "host": worker.host,
                                                                  "pid": worker.pid, "device": worker.device}))

    def _ready(self, worker: Worker, ready: m.Ready) -> None:
        if self.layout and ready.layout != self.layout:
            return self.refuse(worker.conn or b"", "ready: the model built there has other tensors than the server's; the same configuration, "
                               "files and torch are needed on both sides.", "ready", final=True)
        for facts in ready.sites:
            if facts.client not in worker.ids:
                raise RemoteProtocolError(f"facts of client {facts.client}, which this worker does not host")
            self.sites[facts.client] = facts
        worker.ready = True
        self._known |= worker.ids
        self._say(Note("ready", {"worker": worker.name, "clients": sorted(worker.ids)}))
        self._assign()

    # -- from a worker -----------------------------------------------------------------------------------------------
    def _from_worker(self, conn: bytes, message: m.Message, body: memoryview | None) -> None:
        worker = self.workers.get(self._by_conn.get(conn, ""))
        if worker is None:
            raise RemoteProtocolError("a message before a join")
        if message.run != self.run:
            raise RemoteProtocolError(f"a message of another run ({message.run[:16]!r})")
        worker.heard = self._now
        if worker.gone_at is not None and worker.conn == conn:
            worker.gone_at = None  # silent, and back before its tasks were given on
        if isinstance(message, m.Beat):
            if message.client in worker.ids:
                worker.doing[message.client] = (message.phase, message.step, message.steps)
            self._send(conn, m.Beat(run=self.run, inc=self.incarnation))
        elif isinstance(message, m.Ready):
            self._ready(worker, message)
        elif isinstance(message, m.Leave):
            self._say(Note("left", {"worker": worker.name, "clients": sorted(worker.ids)}))
            worker.ready = False
            worker.gone_at = self._now - (self.rules.closed or 0.0)
            self._give_on(worker)
        else:
            key: Key = message.key  # type: ignore[attr-defined]
            if key.client not in worker.ids:
                raise RemoteProtocolError(f"client {key.client} is not hosted by this worker")
            if isinstance(message, m.Reply):
                self._reply(conn, worker, message, body)
            elif isinstance(message, m.Part):
                self._part(conn, message, body)
            elif isinstance(message, m.Pull):
                self._pull(conn, worker, message)
            elif isinstance(message, m.Failed):
                self._failed(worker, message)

    def _current(self, key: Key) -> Work | None:
        """The open work that a key belongs to, or None for what is late, doubled or of another phase."""
        w = self.work.get(key.client)
        return w if w is not None and self._key(w, key.purpose) == key else None

    def _reply(self, conn: bytes, worker: Worker, reply: m.Reply, body: memoryview | None) -> None:
        key = reply.key
        w = self._current(key)
        if w is None or w.worker != worker.name or w.status != "handed" or reply.inc != self.incarnation:
            state = "doubled" if w is not None and w.status in ("arriving", "arrived", "done") else "late"
            self._say(Settle(conn, "up", key, False, state), Note(state, {"client": key.client, "round": key.round, "worker": worker.name}))
            if key.client in worker.queue and w is not None and w.status in ENDED:
                worker.queue.remove(key.client)
                self._assign()
            return
        if key.purpose != self.purpose:  # evaluated within the training task: small, beside the reply, gates nothing
            if key.purpose != "evaluate" or not w.job.judge or body is None or len(body) != reply.size:
                self._say(Settle(conn, "up", key, False, "refused"))
                raise RemoteProtocolError(f"an evaluation of client {key.client} that was not asked for")
            self._say(Store(key, 0, body), self._arrived(reply, worker), Settle(conn, "up", key, True))
            return
        if sum(f.size for f in reply.form) != reply.size or (body is not None and len(body) != reply.size) or (body is None and 0 < reply.size <= PART):
            self._say(Settle(conn, "up", key, False, "refused"))
            w.up_conn = b""
            return self._refuse_reply(w, "reply: announced sizes do not agree", True, settle=False)
        w.status, w.reply, w.up_conn, w.got, w.granted = "arriving", reply, conn, 0, 0
        self._start_next(worker, key.client)
        if body is not None or reply.size == 0:
            self._say(Store(key, 0, body if body is not None else memoryview(b"")))
            self._whole(w, worker)
        else:
            self._grant()
        self._assign()

    def _arrived(self, reply: m.Reply, worker: Worker) -> Arrived:
        return Arrived(reply.key, reply.form, reply.size, reply.check, reply.state, reply.kept, reply.seconds, worker.name)

    def _whole(self, w: Work, worker: Worker) -> None:
        assert w.reply is not None
        w.status = "arrived"
        self._say(self._arrived(w.reply, worker))

    def _part(self, conn: bytes, part: m.Part, body: memoryview | None) -> None:
        w = self._current(part.key)
        if w is None or w.status != "arriving" or w.up_conn != conn or w.reply is None:
            return  # billed to its reply's row; what is not awaited is not used
        expected = min(PART, w.reply.size - part.index * PART)
        if part.index != w.got or part.index >= w.granted or body is None or len(body) != expected:
            self._refuse_reply(w, f"part {part.index} of {0 if body is None else len(body)} bytes, expected part {w.got} of {expected}", True)
            return self._assign()
        self._say(Store(part.key, part.index * PART, body))
        w.got += 1
        if w.got * PART >= w.reply.size:
            self._whole(w, self.workers[w.worker])
        self._grant()

    def _grant(self) -> None:
        """Grants parts to those whose replies are coming in, oldest first, within the window and the budget."""
        arriving = [w for w in self.work.values() if w.status == "arriving" and w.reply is not None]
        free = BUDGET - sum(w.granted - w.got for w in arriving)
        for w in arriving:
            assert w.reply is not None
            parts = -(-w.reply.size // PART)
            ahead = w.granted - w.got
            n = min(WINDOW - ahead, parts - w.granted, free)
            if n > 0 and ahead <= WINDOW // 2:
                self._send(w.up_conn, m.Pull(run=self.run, inc=self.incarnation, key=self._key(w), first=w.granted, count=n))
                w.granted += n
                free -= n

    def _pull(self, conn: bytes, worker: Worker, pull: m.Pull) -> None:
        w = self._current(pull.key)
        if w is None or w.worker != worker.name or w.conn != conn:
            return
        parts = w.job.body.parts()
        if pull.first != w.sent_parts or pull.first + pull.count > parts or pull.count > BUDGET:
            raise RemoteProtocolError(f"pull of parts {pull.first} to {pull.first + pull.count - 1}; {w.sent_parts} of {parts} were sent")
        for index in range(pull.first, pull.first + pull.count):
            self._send(conn, m.Part(run=self.run, inc=self.incarnation, key=pull.key, index=index), w.job.body.part(index))
        w.sent_parts += pull.count

    def _failed(self, worker: Worker, failed: m.Failed) -> None:
        w = self._current(failed.key)
        self._say(Note("failed", {"client": failed.key.client, "round": failed.key.round, "worker": worker.name, "reason": failed.reason}))
        if w is None or w.worker != worker.name or w.status not in ("handed", "arriving"):
            return
        self._start_next(worker, failed.key.client)
        self._refuse_reply(w, failed.reason, failed.again, "failed")
        self._assign()

    def _refuse_reply(self, w: Work, reason: str, again: bool, what: str = "refused", settle: bool = True) -> None:
        """A reply that cannot be used: the task goes out anew, a few times at most."""
        if settle and w.up_conn:
            self._say(Settle(w.up_conn, "up", self._key(w), False, what))
        w.refusals += 1
        if what == "refused":
            self.refused += 1
            self._say(Note("refused", {"what": "reply", "client": w.job.client, "round": self.round, "reason": reason, "worker": w.worker}))
        worker = self.workers.get(w.worker)
        if worker is not None:
            self._start_next(worker, w.job.client)
        if again and w.refusals < TRIES:
            self._take_back(w)
        else:
            self._drop(w, f"{what}: {reason}")

    # -- handing out -------------------------------------------------------------------------------------------------
    def _assign(self) -> None:
        """Waiting tasks to free workers, longest first; one task ahead, but never the phase's last ones."""
        waiting = sorted((w for w in self.work.values() if w.status == "waiting"), key=lambda w: (-w.job.cost, w.job.client))
        free = [x for x in self.workers.values() if x.ready and x.gone_at is None]
        left = len(waiting)
        for w in waiting:
            hosts = [x for x in free if w.job.client in x.ids and len(x.queue) < x.slots]
            if not hosts and left > sum(x.slots for x in free):
                hosts = [x for x in free if w.job.client in x.ids and len(x.queue) < x.slots + 1]
            if hosts:
                # Among equally free ones, whoever had this client last: its data are there already.
                self._hand(w, min(hosts, key=lambda x: (len(x.queue) / x.slots, self._last.get(w.job.client) != x.name, x.name)))
                left -= 1

    def _hand(self, w: Work, worker: Worker) -> None:
        assert worker.conn is not None
        job = w.job
        w.status, w.worker, w.conn, w.up_conn, w.reply = "handed", worker.name, worker.conn, b"", None
        worker.queue.append(job.client)
        self._last[job.client] = worker.name
        w.running = len(worker.queue) <= worker.slots
        w.since = self._now
        inline = job.body.size <= PART
        w.sent_parts = job.body.parts() if inline else 0
        task = m.Task(run=self.run, inc=self.incarnation, key=self._key(w), form=list(job.form), size=job.body.size, check=job.check,
                      start=job.start, keep=job.keep, enrol=job.enrol, judge=job.judge, deadline_s=self.rules.deadline)
        self._send(worker.conn, task, job.body.whole() if inline and job.body.size else None)

    def _start_next(self, worker: Worker, client: int) -> None:
        """`client` is off the worker's hands: the next in its queue is running, and its deadline with it."""
        if client in worker.queue:
            worker.queue.remove(client)
        worker.doing.pop(client, None)
        for other in worker.queue[:worker.slots]:
            w = self.work.get(other)
            if w is not None and not w.running:
                w.running, w.since = True, self._now

    def _take_back(self, w: Work, same_attempt: bool = False) -> None:
        """The task is to be handed out again; what crossed for it so far was of no use."""
        key = self._key(w)
        if w.conn:
            self._say(Settle(w.conn, "down", key, False, "given out again"))
        if w.status == "arriving" and w.up_conn:
            self._say(Settle(w.up_conn, "up", key, False, "cut short"))
        worker = self.workers.get(w.worker)
        if worker is not None and w.job.client in worker.queue:
            worker.queue.remove(w.job.client)
        w.status, w.worker, w.conn, w.up_conn, w.reply, w.running = "waiting", "", b"", b"", None, False
        if not same_attempt:
            w.attempt += 1

    def _restart_upload(self, w: Work) -> None:
        if w.status == "arriving":
            self._say(Settle(w.up_conn, "up", self._key(w), False, "cut short"))
            w.status, w.reply, w.up_conn = "handed", None, b""

    def _drop(self, w: Work, reason: str) -> None:
        key = self._key(w)
        worker = self.workers.get(w.worker)
        if w.status in ("handed", "arriving") and worker is not None and worker.conn is not None:
            self._send(worker.conn, m.Cancel(run=self.run, inc=self.incarnation, key=key))
        if w.conn:
            self._say(Settle(w.conn, "down", key, False, reason))
        if w.status == "arriving" and w.up_conn:
            self._say(Settle(w.up_conn, "up", key, False, reason))
        w.status, w.reason = "dropped", reason
        if worker is not None:
            self._start_next(worker, w.job.client)
        self._say(Resolved(w.job.client, w.attempt, reason))

    # -- time --------------------------------------------------------------------------------------------------------
    def _over(self, since: float, patience: float | None) -> bool:
        return patience is not None and self._now - since >= patience

    def _away(self, worker: Worker, why: str) -> None:
        worker.gone_at = self._now
        for i in worker.ids:
            self._left_at[i] = self._now
        for w in self.open():
            if w.worker == worker.name and w.status == "arriving" and worker.conn is None:
                self._restart_upload(w)
                worker.queue.insert(0, w.job.client)
        self._say(Note("away", {"worker": worker.name, "clients": sorted(worker.ids), "why": why}))

    def _give_on(self, worker: Worker) -> None:
        """The worker did not come back in time: its tasks go to others that host the same ids, or are counted out."""
        for w in self.open():
            if w.worker == worker.name and w.status in ("handed", "arriving"):
                self._take_back(w)
        worker.queue.clear()

    def _expire(self) -> None:
        """Deadlines, and tasks that nobody is there to take."""
        if not self.work:
            return
        present = None
        for w in self.open():
            if w.status in ("handed", "arriving") and w.running and self._over(w.since, self.rules.deadline):
                self._drop(w, "deadline")
            elif w.status == "waiting":
                present = self.present() if present is None else present
                i = w.job.client
                if i in present:
                    continue
                if i in self._known:
                    if self._over(self._left_at.get(i, w.since), self.rules.closed):
                        self._drop(w, "lost")
                elif self._over(self._started, self.rules.join):
                    self._drop(w, "absent")

    def _send(self, conn: bytes, message: m.Message, body: memoryview | None = None) -> None:
        self._say(Send(conn, message, body))

    def waiting(self) -> list[dict[str, object]]:
        """Whom the phase waits for: for the display and `fednet status`."""
        rows: list[dict[str, object]] = []
        for w in self.open():
            worker = self.workers.get(w.worker)
            phase, step, steps = worker.doing.get(w.job.client, ("queued" if not w.running else w.status, 0, 0)) if worker else (w.status, 0, 0)
            rows.append({"client": w.job.client, "host": worker.host if worker else "", "pid": worker.pid if worker else 0,
                         "device": worker.device if worker else "", "phase": phase if w.status != "arriving" else "uploading",
                         "step": step, "steps": steps, "since": w.since, "deadline_s": self.rules.deadline})
        return rows
