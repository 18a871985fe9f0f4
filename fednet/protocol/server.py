"""The server's side of the protocol: a state machine without I/O.

A job of a phase goes through these states:

    waiting ── handed to a free worker ──> handed ── reply announced ──> arriving ── all parts in ──> arrived
       ^                                     │                               │                          │
       └── worker lost, or reply refused ────┴───────────────────────────────┘            accept ──> done
    any but done ── deadline, lost for good, cancelled ──> dropped                        reject ──> waiting | dropped

A worker (a client process hosting one or many ids) is connecting -> welcomed -> ready, and away when its connection is
closed or its heartbeat silent. All times are seconds on the caller's clock, handed in as `now`.

What a peer may make the server hold or send is bounded: one join a connection, a form that is checked before a byte of
its body is asked for, each part of a task once a hand-out, and a connection whose messages keep belonging to nothing
is hung up on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids
from fednet.protocol.rules import (
    BUDGET,
    HOSTED,
    LOSSES,
    SLOTS,
    STRIKES,
    TOLD,
    TRIES,
    UNUSED_S,
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
    Stray,
)
from fednet.wire import messages as m
from fednet.wire.messages import PART, Field, Key

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
    stalled: bool = False  # it sat on a task: until it answers one, others that host the same clients are asked first
    joined_at: float = 0.0
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
    judge_conn: bytes = b""  # where the evaluation within this task came from, if it has come
    refusals: int = 0
    refused_by: set[str] = field(default_factory=set)  # workers that failed at it: others are asked first
    sat_by: str = ""  # the worker that it was taken from because it made no progress there
    losses: int = 0
    undecided: bool = False  # done, in a phase whose usefulness is decided at its end
    reason: str = ""
    heard: float = 0.0  # hand-out, or the last that was heard of this task
    moved: float = 0.0  # hand-out, or its last progress: another step or phase, another part
    struck: bool = False  # its planned faults went out with it


class ServerProtocol:
    """Feed it `received`, `closed`, `tick`, and the engine's `begin`, `accept`, `reject`, `finish`; do what it returns.

    welcome(ids, session): the answer to a join. may_speak_for(user, client): whether that key may. declared(key, form):
    raises RemoteProtocolError for a reply that is not of the form and size that the method declares.
    """

    def __init__(self, run: str, incarnation: int, clients: int, welcome: Callable[[list[int], str], m.Welcome], now: float, *,
                 files: Mapping[str, str] | None = None, layout: str = "", may_speak_for: Callable[[str | None, int], bool] | None = None,
                 declared: Callable[[Key, Sequence[Field]], None] | None = None, max_workers: int = 10_000) -> None:
        self.run, self.incarnation, self.clients = run, incarnation, clients
        self.files, self.layout = dict(files or {}), layout
        self.rules = Rules()
        self.round, self.phase = 0, 0
        self.purpose: m.Purpose = "train"
        self.work: dict[int, Work] = {}
        self.workers: dict[str, Worker] = {}
        self.sites: dict[int, m.SiteFacts] = {}
        self.refused = 0
        self._by_conn: dict[bytes, str] = {}
        self._last: dict[int, str] = {}  # client -> the worker that had its last task
        self._joined: set[bytes] = set()  # connections that have used up their join
        self._strikes: dict[bytes, int] = {}
        self._lost_at: dict[int, float] = {}  # id -> when it counts as lost, since its last worker went
        self._known: set[int] = set()  # ids that were ready once
        self._here: frozenset[int] | None = None
        self._welcome = welcome
        self._may = may_speak_for or (lambda user, client: True)
        self._declared = declared or (lambda key, form: None)
        self._started = now
        self._max_workers = max_workers
        self._order: list[Work] = []  # in which tasks are handed out: longest first
        self._out: list[Instruction] = []
        self._now = now

    # -- what is known -----------------------------------------------------------------------------------------------
    def present(self) -> frozenset[int]:
        """Ids hosted by a worker that is ready."""
        if self._here is None:
            self._here = frozenset(i for w in self.workers.values() if w.ready and w.gone_at is None for i in w.ids)
        return self._here

    def worker_of(self, conn: bytes) -> str:
        """The name of the worker behind a connection, "" if none has joined over it."""
        return self._by_conn.get(conn, "")

    def connections(self) -> list[tuple[bytes, str]]:
        """Connections that workers have joined over, and the workers' names."""
        return list(self._by_conn.items())

    def open(self) -> list[Work]:
        return [w for w in self.work.values() if w.status not in ENDED]

    def awaits(self, conn: bytes, direction: str, key: Key) -> bool:
        """Whether it is still to be told if that payload, which went over `conn`, was of use."""
        w = self._current(key)
        if w is None or key.purpose != self.purpose or not (w.undecided or w.status not in ENDED):
            return False
        return conn == (w.conn if direction == "down" else w.up_conn)

    def _key(self, w: Work, purpose: m.Purpose | None = None) -> Key:
        return Key(self.round, self.phase, w.attempt, w.job.client, purpose or self.purpose)

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _say(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    # -- the engine's commands ---------------------------------------------------------------------------------------
    def begin(self, round: int, phase: int, purpose: m.Purpose, jobs: Sequence[Job], rules: Rules, now: float,
              attempts: Mapping[int, int] | None = None) -> list[Instruction]:
        """Opens a phase. `attempts`: the first attempt number by client, where an earlier server got further than 0.
        What is left of the phase before is called off without a word to the caller, who has gone on."""
        self._now = now
        for w in self.open():
            self._drop(w, "the phase is over")
        self._decide({w.job.client: False for w in self.work.values() if w.undecided})
        self._out = [i for i in self._out if not isinstance(i, Resolved)]
        self._strikes.clear()
        self.rules = rules
        self.round, self.phase, self.purpose = round, phase, purpose
        self.work = {j.client: Work(j, attempt=(attempts or {}).get(j.client, 0), since=now) for j in jobs}
        self._order = sorted(self.work.values(), key=lambda w: (-w.job.cost, w.job.client))
        self._assign()
        self._expire()
        return self._take()

    def accept(self, key: Key, now: float) -> list[Instruction]:
        """The reply was whole and sound."""
        self._now = now
        w = self._current(key)
        if w is not None and key.purpose != self.purpose:
            self._say(Settle(w.judge_conn, "up", key, True))
            return self._take()
        if w is None or w.status != "arrived":
            return self._take()
        w.status, w.undecided = "done", self.rules.defer
        if w.worker in self.workers:
            self.workers[w.worker].stalled = False
        if not w.undecided:
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
        if w is not None and key.purpose != self.purpose:
            self._say(Settle(w.judge_conn, "up", key, False, "refused"))
            self._count_refusal("reply", reason, w.worker, client=key.client, round=key.round)
        elif w is not None and w.status == "arrived":
            self._refuse_reply(w, reason, again)
            self._assign()
        return self._take()

    def decide(self, useful: Mapping[int, bool]) -> list[Instruction]:
        """Settles the bytes of a deferred phase."""
        self._decide(useful)
        return self._take()

    def _decide(self, useful: Mapping[int, bool]) -> None:
        for client, good in useful.items():
            w = self.work.get(client)
            if w is not None and w.undecided:
                w.undecided = False
                self._say(Settle(w.conn, "down", self._key(w), good), Settle(w.up_conn, "up", self._key(w), good))

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
                self._send(w.conn, m.End(run=self.run, inc=self.incarnation, over=over, reason=m.printable(reason, 4000)))
        return self._take()

    # -- the transport's events --------------------------------------------------------------------------------------
    def received(self, conn: bytes, message: m.Message, body: memoryview | None, now: float, user: str | None = None) -> list[Instruction]:
        """A decoded message. What breaks the protocol is refused with a reason, counted, and changes nothing."""
        self._now = now
        try:
            stray = self._join(conn, message, user) if isinstance(message, m.Join) else self._from_worker(conn, message, body)
        except RemoteProtocolError as broken:
            self.refuse(conn, str(broken), str(message.__struct_config__.tag))
            stray = "refused"
        if stray:
            self._out.insert(0, Stray(stray))
            self._strike(conn)
        return self._take()

    def refuse(self, conn: bytes, reason: str, what: str = "frame", final: bool = False, unread: bool = False) -> None:
        """Counts a refusal; the sender is told of the first ones."""
        self._count_refusal(what, reason, self._by_conn.get(conn, ""))
        if self._strikes.get(conn, 0) < TOLD:
            self._send(conn, m.Refuse(run=self.run, inc=self.incarnation, reason=m.printable(reason), final=final, unread=unread))

    def _count_refusal(self, what: str, reason: str, worker: str, **more: object) -> None:
        self.refused += 1
        self._say(Note("refused", {"what": what, **more, "reason": reason[:m.MAX_REASON], "worker": worker}))

    def _strike(self, conn: bytes) -> None:
        self._strikes[conn] = self._strikes.get(conn, 0) + 1
        if self._strikes[conn] == STRIKES:
            self._say(Note("hung_up", {"reason": f"{STRIKES} messages that belong to nothing", "worker": self._by_conn.get(conn, "")}),
                      Forget(conn, hang_up=True))

    def undecodable(self, conn: bytes, reason: str, now: float) -> list[Instruction]:
        self._now = now
        self.refuse(conn, reason, unread=True)
        self._strike(conn)
        return self._take()

    def closed(self, conn: bytes, now: float) -> list[Instruction]:
        """The connection is gone."""
        self._now = now
        self._joined.discard(conn)
        self._strikes.pop(conn, None)
        worker = self.workers.get(self._by_conn.pop(conn, ""))
        if worker is not None and worker.conn == conn:
            worker.conn, worker.ready = None, False
            self._away(worker, "connection closed", self.rules.closed)
        self._say(Forget(conn))
        return self._take()

    def tick(self, now: float) -> list[Instruction]:
        """Lets time pass: deadlines, silences, absences."""
        self._now = now
        silent = self.rules.silent
        for worker in list(self.workers.values()):
            if worker.gone_at is None and silent is not None and now - worker.heard > silent:
                self._away(worker, "silent", 0.0)  # the silence was its time to come back
                self._give_on(worker)
            elif worker.gone_at is not None and self._over(worker.gone_at, self.rules.closed):
                self._give_on(worker)
                if worker.conn is None:
                    del self.workers[worker.name]
        self._expire()
        self._assign()
        self._grant()
        return self._take()

    # -- joining -----------------------------------------------------------------------------------------------------
    def _join(self, conn: bytes, join: m.Join, user: str | None) -> str:
        """Lets a worker in, anew or back. Returns why it was not let in, for the books."""
        if conn in self._joined:
            raise RemoteProtocolError("join: this connection has joined already")
        try:
            ids = frozenset(Ids("{}/{}".format(*join.share), share=join.share).resolve(self.clients) if join.share is not None else join.ids)
        except (ConfigError, ZeroDivisionError) as broken:
            self.refuse(conn, f"join: {broken}", "join", final=True)
            return "refused"
        old = self.workers.get(join.worker)
        reason, final = self._objection(join, ids, user), True
        if not reason and old is not None and (old.user != user or (
                old.conn is not None and old.gone_at is None and old.session != join.session)):
            reason, final = "join: a worker of that name is connected.", False
        if not reason and old is None and not self._room():
            reason, final = f"join: {self._max_workers} workers are connected already.", False
        if reason:
            self.refuse(conn, reason, "join", final)
            return "refused"
        if old is not None and old.conn is not None:
            self._by_conn.pop(old.conn, None)
            self._say(Forget(old.conn, hang_up=True))
        worker = old or Worker(join.worker, secrets.token_hex(8), ids, conn, self._now)
        worker.conn, worker.ids, worker.heard, worker.joined_at, worker.gone_at, worker.ready = conn, ids, self._now, self._now, None, False
        worker.slots, worker.host, worker.pid, worker.device, worker.user = min(join.slots, SLOTS), join.host, join.pid, join.device, user
        worker.doing.clear()
        self.workers[worker.name] = worker
        self._by_conn[conn] = worker.name
        self._joined.add(conn)
        self._here = None
        self._send(conn, self._welcome(sorted(ids), worker.session))
        self._say(Note("joined" if old is None else "rejoined", {"worker": worker.name, "clients": sorted(ids), "host": worker.host,
                                                                  "pid": worker.pid, "device": worker.device}))
        self._pick_up(worker, set(join.holding), join.inc == self.incarnation)
        return ""

    def _objection(self, join: m.Join, ids: frozenset[int], user: str | None) -> str:
        """Why this server can never let that worker in, or ""."""
        bad = sorted(i for i in ids if not 0 <= i < self.clients)
        if bad or not ids:
            return f"join: client id {bad[0] if bad else 'missing'}; this federation has ids 0 to {self.clients - 1}."
        if len(ids) > HOSTED:
            return f"join: {len(ids)} clients in one process, at most {HOSTED} are allowed; start several with --id K/N."
        if missing := [f for f, sha in self.files.items() if sha not in join.files.values()]:
            return f"join: this federation needs {', '.join(missing)} loaded on the client too (--load), with the same content."
        if strangers := sorted(i for i in ids if not self._may(user, i)):
            return f"join: this key may not speak for client {strangers[0]}."
        return ""

    def _room(self) -> bool:
        """Whether another worker may join; those that are gone and have nothing in hand make room."""
        if len(self.workers) >= self._max_workers:
            busy = {w.worker for w in self.open()}
            for gone in [x for x in self.workers.values() if x.conn is None and x.name not in busy]:
                del self.workers[gone.name]
        return len(self.workers) < self._max_workers

    def _pick_up(self, worker: Worker, holding: set[Key], ours: bool) -> None:
        """A worker is back: what it still holds goes on, what it lost on the way is handed out anew. ours: this server
        handed out what it holds, and can tell what is not wanted any more; of an earlier one's tasks it may ask again."""
        kept: set[Key] = set()
        for w in self.open():
            if w.worker != worker.name or w.status not in ("handed", "arriving"):
                continue
            if w.job.client not in worker.ids:
                self._take_back(w, "lost", lost=True)
            elif self._key(w) not in holding:
                self._take_back(w, "lost", lost=True, same_attempt=True)
            else:
                kept.add(self._key(w, "train"))
                self._restart_upload(w)  # it announces its reply anew
                if w.job.client not in worker.queue:
                    worker.queue.append(w.job.client)
        for key in sorted(holding) if ours else ():
            if msgspec.structs.replace(key, purpose="train") not in kept:
                self._call_off(worker.conn or b"", key)

    def _ready(self, worker: Worker, ready: m.Ready) -> str:
        if self.layout and ready.layout != self.layout:
            self.refuse(worker.conn or b"", "ready: the model built there has other tensors than the server's; the same configuration, "
                        "files and torch are needed on both sides.", "ready", final=True)
            return "refused"
        for facts in ready.sites:
            if facts.client not in worker.ids:
                raise RemoteProtocolError(f"facts of client {facts.client}, which this worker does not host")
        self.sites.update((facts.client, facts) for facts in ready.sites)
        if worker.ready:
            return ""
        worker.ready, self._here = True, None
        self._known |= worker.ids
        self._say(Note("ready", {"worker": worker.name, "clients": sorted(worker.ids)}))
        for w in self.open():  # a process started anew need not wait until its forerunner is given up
            holder = self.workers.get(w.worker)
            if w.job.client in worker.ids and w.status in ("handed", "arriving") and holder is not None and holder.conn is None:
                self._take_back(w, "lost", lost=True)
        self._assign()
        return ""

    # -- from a worker -----------------------------------------------------------------------------------------------
    def _from_worker(self, conn: bytes, message: m.Message, body: memoryview | None) -> str:
        """Returns why the message belongs to nothing that is under way, or ""."""
        worker = self.workers.get(self._by_conn.get(conn, ""))
        if worker is None:
            raise RemoteProtocolError("a message before a join")
        if message.run != self.run:
            raise RemoteProtocolError(f"a message of another run ({message.run[:16]!r})")
        if message.inc != self.incarnation and not isinstance(message, m.Reply):
            raise RemoteProtocolError(f"a message for incarnation {message.inc} of this server, which is {self.incarnation}")
        worker.heard = self._now
        if worker.gone_at is not None:
            worker.gone_at, self._here = None, None  # it was silent, and is back
            self._say(Note("back", {"worker": worker.name, "clients": sorted(worker.ids)}))
        if isinstance(message, m.Beat):
            if message.slots:
                worker.slots = min(message.slots, SLOTS)
                self._run_heads(worker)
                self._assign()
            if message.client in worker.ids:
                if message.phase == m.UPLOADING:  # its link is slow, not its worker, which is free for the next
                    self._start_next(worker, message.client)
                    self._assign()
                doing = message.phase, message.step, message.steps
                if message.client in worker.queue and message.client in self.work:
                    w = self.work[message.client]
                    w.heard, w.moved = self._now, w.moved if worker.doing.get(message.client) == doing else self._now
                worker.doing[message.client] = doing
            self._send(conn, m.Beat(run=self.run, inc=self.incarnation))
            return ""
        if isinstance(message, m.Ready):
            return self._ready(worker, message)
        if isinstance(message, m.Leave):
            self._leave(conn, worker)
            return ""
        key: Key = message.key  # type: ignore[attr-defined]
        if key.client not in worker.ids:
            raise RemoteProtocolError(f"client {key.client} is not hosted by this worker")
        if not self._may(worker.user, key.client):  # revoked since it joined; the key may still speak for others
            self._leave_out(worker, key.client)
            raise RemoteProtocolError(f"this key may not speak for client {key.client} any more")
        if isinstance(message, m.Reply):
            return self._reply(conn, worker, message, body)
        if isinstance(message, m.Part):
            return self._part(conn, message, body)
        if isinstance(message, m.Pull):
            return self._pull(conn, worker, message)
        assert isinstance(message, m.Failed)
        return self._failed(worker, message)

    def _leave(self, conn: bytes, worker: Worker) -> None:
        self._say(Note("left", {"worker": worker.name, "clients": sorted(worker.ids)}))
        del self._by_conn[conn]
        worker.conn, worker.ready = None, False
        self._away(worker, "left", self.rules.closed)
        self._give_on(worker)

    def _leave_out(self, worker: Worker, client: int) -> None:
        """The worker hosts this id no longer; its task waits for another that does."""
        worker.ids -= {client}
        self._lost_at[client] = self._now
        self._here = None
        w = self.work.get(client)
        if w is not None and w.worker == worker.name and w.status in ("handed", "arriving"):
            self._take_back(w, "its key was revoked")

    def _current(self, key: Key) -> Work | None:
        """The work that a key belongs to, or None for what is late or of another phase."""
        w = self.work.get(key.client)
        return w if w is not None and self._key(w, key.purpose) == key else None

    def _reply(self, conn: bytes, worker: Worker, reply: m.Reply, body: memoryview | None) -> str:
        key = reply.key
        w = self._current(key)
        if w is None or w.worker != worker.name or w.status != "handed" or reply.inc != self.incarnation:
            state = "doubled" if w is not None and w.status in ("arriving", "arrived", "done") else "late"
            self._say(Note(state, {"client": key.client, "round": key.round, "worker": worker.name}))
            if reply.size > PART and state == "late":
                self._call_off(conn, key)
            return state
        agrees = sum(f.size for f in reply.form) == reply.size and (len(body) == reply.size if body is not None else not 0 < reply.size <= PART)
        if key.purpose != self.purpose:  # evaluated within the training task: small, beside the reply, gates nothing
            if key.purpose != "evaluate" or not w.job.judge or not agrees or body is None:
                raise RemoteProtocolError(f"an evaluation of client {key.client} that was not asked for")
            if w.judge_conn:
                return "doubled"
            self._declared(key, reply.form)
            w.judge_conn = conn
            self._say(Store(key, 0, body), self._arrived(reply, worker))
            return ""
        try:
            if not agrees:
                raise RemoteProtocolError("reply: announced sizes do not agree")
            self._declared(key, reply.form)
        except RemoteProtocolError as broken:
            self._refuse_reply(w, str(broken), True)
            self._assign()
            return "refused"
        w.status, w.reply, w.up_conn, w.got, w.granted, w.moved = "arriving", reply, conn, 0, 0, self._now
        self._start_next(worker, key.client)
        if body is not None or reply.size == 0:
            self._say(Store(key, 0, body if body is not None else memoryview(b"")))
            self._whole(w, worker)
        else:
            self._grant()
        self._assign()
        return ""

    def _arrived(self, reply: m.Reply, worker: Worker) -> Arrived:
        return Arrived(reply.key, reply.form, reply.size, reply.check, reply.state, reply.kept, reply.seconds, worker.name,
                       tuple(reply.split), self._now - self.work[reply.key.client].since)

    def _whole(self, w: Work, worker: Worker) -> None:
        assert w.reply is not None
        w.status = "arrived"
        self._say(self._arrived(w.reply, worker))

    def _part(self, conn: bytes, part: m.Part, body: memoryview | None) -> str:
        w = self._current(part.key)
        if w is None or part.key.purpose != self.purpose or w.status != "arriving" or w.up_conn != conn or w.reply is None:
            return "late"
        if part.index < w.got:
            return "doubled"
        expected = min(PART, w.reply.size - part.index * PART)
        if part.index != w.got or part.index >= w.granted or body is None or len(body) != expected:
            self._refuse_reply(w, f"part {part.index} of {0 if body is None else len(body)} bytes, expected part {w.got} of {expected}", True)
            self._assign()
            return ""
        self._say(Store(part.key, part.index * PART, body))
        w.got += 1
        w.heard = w.moved = self._now
        if w.got * PART >= w.reply.size:
            self._whole(w, self.workers[w.worker])
        self._grant()
        return ""

    def _grant(self) -> None:
        """Grants parts to those whose replies are coming in, oldest first, within the window and the budget."""
        arriving = [w for w in self.work.values() if w.status == "arriving" and w.reply is not None]
        free = BUDGET - sum(w.granted - w.got for w in arriving if self._now - w.moved < UNUSED_S)
        for w in arriving:
            assert w.reply is not None
            parts = -(-w.reply.size // PART)
            ahead = w.granted - w.got
            n = min(WINDOW - ahead, parts - w.granted, free)
            if n > 0 and ahead <= WINDOW // 2:
                self._send(w.up_conn, m.Pull(run=self.run, inc=self.incarnation, key=self._key(w), first=w.granted, count=n))
                w.granted += n
                free -= n

    def _pull(self, conn: bytes, worker: Worker, pull: m.Pull) -> str:
        w = self._current(pull.key)
        if w is None or pull.key.purpose != self.purpose or w.worker != worker.name or w.conn != conn or w.status != "handed":
            return "late"
        parts = w.job.body.parts()
        if pull.first != w.sent_parts or pull.first + pull.count > parts or pull.count > WINDOW:
            raise RemoteProtocolError(f"pull of parts {pull.first} to {pull.first + pull.count - 1}; {w.sent_parts} of {parts} were sent")
        for index in range(pull.first, pull.first + pull.count):
            self._send(conn, m.Part(run=self.run, inc=self.incarnation, key=pull.key, index=index), w.job.body.part(index))
        w.sent_parts += pull.count
        return ""

    def _failed(self, worker: Worker, failed: m.Failed) -> str:
        w = self._current(failed.key)
        self._say(Note("failed", {"client": failed.key.client, "round": failed.key.round, "worker": worker.name, "reason": failed.reason}))
        if w is None or failed.key.purpose != self.purpose or w.worker != worker.name or w.status not in ("handed", "arriving"):
            return "late"
        self._refuse_reply(w, failed.reason, failed.again, "damaged" if failed.again else "failed")
        self._assign()
        return ""

    def _refuse_reply(self, w: Work, reason: str, again: bool, what: str = "refused") -> None:
        """A reply that cannot be used: the task goes out anew, a few times at most."""
        if w.up_conn:
            self._say(Settle(w.up_conn, "up", self._key(w), False, what))
            w.up_conn = b""
        w.refusals += 1
        w.refused_by.add(w.worker)
        if what == "refused":
            self._count_refusal("reply", reason, w.worker, client=w.job.client, round=self.round)
            worker = self.workers.get(w.worker)
            if worker is not None and worker.conn is not None:
                self._call_off(worker.conn, self._key(w))  # it may still wait to be asked for the rest
        if again and w.refusals < TRIES:
            self._take_back(w, "given out again")
        else:
            self._drop(w, f"{what}: {reason}")

    def _call_off(self, conn: bytes, key: Key) -> None:
        self._send(conn, m.Cancel(run=self.run, inc=self.incarnation, key=key))

    # -- handing out -------------------------------------------------------------------------------------------------
    def _assign(self) -> None:
        """Waiting tasks to free workers, longest first; one task ahead, but never the phase's last ones."""
        free = [x for x in self.workers.values() if x.ready and x.gone_at is None and len(x.queue) <= x.slots]
        waiting = [w for w in self._order if w.status == "waiting"] if free else []
        left, slots = len(waiting), sum(x.slots for x in free)
        for w in waiting:
            if not free:
                break  # as after most replies: one worker has room, for one task
            able = [x for x in free if w.job.client in x.ids and (not (w.refused_by or w.sat_by or x.stalled) or self._may_try(w, x))]
            hosts = [x for x in able if len(x.queue) < x.slots]
            if not hosts and left > slots:
                hosts = [x for x in able if len(x.queue) <= x.slots]
            if hosts:
                # Among equally free ones, whoever had this client last: its data are there already.
                self._hand(w, min(hosts, key=lambda x: (len(x.queue) / x.slots, self._last.get(w.job.client) != x.name, x.name)))
                left -= 1
                free = [x for x in free if len(x.queue) <= x.slots]

    def _may_try(self, w: Work, worker: Worker) -> bool:
        """A worker that failed at a task, or sat on one, tries again only where no other hosts its client."""
        others = [x for x in self._hosts(w) if x.name != w.sat_by]
        if worker.name == w.sat_by and others:
            return False
        return not (worker.stalled or worker.name in w.refused_by) or not any(not x.stalled and x.name not in w.refused_by for x in others)

    def _hosts(self, w: Work) -> list[Worker]:
        return [x for x in self.workers.values() if x.ready and x.gone_at is None and w.job.client in x.ids]

    def _hand(self, w: Work, worker: Worker) -> None:
        assert worker.conn is not None
        job = w.job
        w.status, w.worker, w.conn, w.up_conn, w.judge_conn, w.reply = "handed", worker.name, worker.conn, b"", b"", None
        worker.queue.append(job.client)
        self._last[job.client] = worker.name
        w.running = len(worker.queue) <= worker.slots
        w.since = w.heard = w.moved = self._now
        faults, w.struck = [] if w.struck else list(job.faults), True
        for fault in faults:
            self._say(Note("fault", {"round": self.round, "client": job.client, "kind": fault.kind, "amount": fault.amount, "worker": worker.name}))
        inline = job.body.size <= PART
        w.sent_parts = job.body.parts() if inline else 0
        task = m.Task(run=self.run, inc=self.incarnation, key=self._key(w), form=list(job.form), size=job.body.size, check=job.check,
                      start=job.start, keep=job.keep, enrol=job.enrol, judge=job.judge, deadline_s=self.rules.deadline, faults=faults)
        self._send(worker.conn, task, job.body.whole() if inline and job.body.size else None)

    def _start_next(self, worker: Worker, client: int) -> None:
        """`client` is off the worker's hands: the next in its queue is running, and its deadline with it."""
        if client in worker.queue:
            worker.queue.remove(client)
        worker.doing.pop(client, None)
        self._run_heads(worker)

    def _run_heads(self, worker: Worker) -> None:
        for other in worker.queue[:worker.slots]:
            w = self.work.get(other)
            if w is not None and not w.running:
                w.running, w.since, w.heard, w.moved = True, self._now, self._now, self._now

    def _take_back(self, w: Work, reason: str, lost: bool = False, same_attempt: bool = False) -> None:
        """The task is to be handed out again; what crossed for it so far was of no use."""
        if w.job.lost and w.struck:
            return self._drop(w, f"lost: {w.job.lost}")
        w.losses += lost
        if w.losses >= LOSSES:
            return self._drop(w, "lost")
        self._let_go(w, reason)
        w.status, w.worker, w.conn, w.up_conn, w.reply, w.running = "waiting", "", b"", b"", None, False
        if not same_attempt:
            w.attempt += 1

    def _restart_upload(self, w: Work) -> None:
        if w.status == "arriving":
            self._say(Settle(w.up_conn, "up", self._key(w), False, "cut short"))
            w.status, w.reply, w.up_conn = "handed", None, b""

    def _let_go(self, w: Work, reason: str) -> None:
        """Settles what crossed as of no use, and frees the worker's slot."""
        if w.conn:
            self._say(Settle(w.conn, "down", self._key(w), False, reason))
        if w.up_conn:
            self._say(Settle(w.up_conn, "up", self._key(w), False, reason))
        worker = self.workers.get(w.worker)
        if worker is not None:
            self._start_next(worker, w.job.client)

    def _drop(self, w: Work, reason: str) -> None:
        worker = self.workers.get(w.worker)
        if w.status in ("handed", "arriving") and worker is not None and worker.conn is not None:
            self._call_off(worker.conn, self._key(w))
        self._let_go(w, reason)
        w.status, w.reason = "dropped", reason
        self._say(Resolved(w.job.client, w.attempt, reason))

    # -- time --------------------------------------------------------------------------------------------------------
    def _over(self, since: float, patience: float | None) -> bool:
        return patience is not None and self._now - since >= patience

    def _away(self, worker: Worker, why: str, patience: float | None) -> None:
        """patience: how long its ids may take to come back before they count as lost."""
        worker.gone_at, self._here = self._now, None
        for i in worker.ids:
            self._lost_at[i] = float("inf") if patience is None else self._now + patience
        for w in self.open():
            if w.worker == worker.name and w.status == "arriving" and worker.conn is None:
                self._restart_upload(w)
                worker.queue.insert(0, w.job.client)
        self._say(Note("away", {"worker": worker.name, "clients": sorted(worker.ids), "why": why}))

    def _give_on(self, worker: Worker) -> None:
        """The worker did not come back in time: its tasks go to others that host the same ids, or are counted out."""
        for w in self.open():
            if w.worker == worker.name and w.status in ("handed", "arriving"):
                if worker.conn is not None:
                    self._call_off(worker.conn, self._key(w))
                self._take_back(w, "lost", lost=True)
        worker.queue.clear()

    def _unstall(self, worker: Worker) -> None:
        """A worker that is heard of and makes no progress may be one that takes tasks to keep them: what it has goes to others
        that host the same clients. Where there is no other it is waited for, as long as `deadline` lets it."""
        worker.stalled = True
        given = [w for w in self.open() if w.worker == worker.name and w.status in ("handed", "arriving") and len(self._hosts(w)) > 1]
        for w in given:
            w.sat_by = worker.name
            self._call_off(worker.conn or b"", self._key(w))
            self._take_back(w, "stalled", lost=True)
        if given:
            self._say(Note("stalled", {"worker": worker.name, "clients": sorted(w.job.client for w in given)}))

    def _expire(self) -> None:
        """Deadlines, tasks without progress, and tasks that nobody is there to take."""
        present = self.present()
        # Twice as long each time, so that one that is slow everywhere gets done.
        patience = self.rules.stalled
        for worker in sorted({w.worker for w in self.open() if w.running and patience is not None and self._over(w.moved, patience * 2**w.losses)}):
            found = self.workers.get(worker)
            if found is not None and found.gone_at is None:
                self._unstall(found)
        for w in self.open():
            i = w.job.client
            if w.status in ("handed", "arriving"):
                if w.running and self._over(w.since, self.rules.deadline):
                    self._drop(w, "deadline")
                elif w.job.lost and w.running and self._over(w.heard, self.rules.closed):
                    self._drop(w, f"lost: {w.job.lost}")  # planned: the worker lives on, for its other clients
            elif w.status == "waiting" and i not in present:
                preparing = [x.joined_at for x in self.workers.values() if x.conn is not None and x.gone_at is None and i in x.ids]
                if preparing:
                    if self._over(max(preparing), self.rules.join):
                        self._drop(w, "absent")
                elif i in self._known:
                    if self._now >= self._lost_at.get(i, w.since):
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
            deadline = self.rules.deadline
            left = deadline - (self._now - w.since) if deadline is not None and w.running else deadline  # it runs once its worker is free
            rows.append({"client": w.job.client, "host": worker.host if worker else "", "pid": worker.pid if worker else 0,
                         "device": worker.device if worker else "", "phase": phase if w.status != "arriving" else "uploading",
                         "step": step, "steps": steps, "since": w.since, "deadline_s": left})
        return rows
