"""Who is there: the workers, the connections they speak over, the clients they host, and what sites
say of their data.

A worker is a client process that hosts one or many ids. Its states are in `table`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from fednet.errors import RemoteProtocolError
from fednet.ids import ranges
from fednet.plain import JsonDict, JsonMapping
from fednet.protocol.table import WORKER, WorkerEvent, WorkerState, step
from fednet.protocol.transfers import Silence
from fednet.wire import messages as m

TASKS_PER_SLOT = 2  # in a worker's queue: the one that runs, and one ahead
SLOTS = 64  # tasks that one process is taken to work on at once, whatever it says
SHOWN = 1000  # rows on client processes, connected or not, that are shown
SITES_NAMED = 8  # of one client process
REFUSED = "refused: "  # before the reason for which a client's process was not let in


@dataclass(slots=True, eq=False)
class ClientProcess:
    """A worker, as the server knows it. held: clients whose tasks it was handed and has not
    answered in full; queue: those of them that take a slot, in order; the first `slots` are
    running.
    """

    name: str
    session: str
    ids: frozenset[int]
    conn: bytes | None
    heard: float
    slots: int = 1
    host: str = ""
    pid: int = 0
    device: str = ""
    site: str = ""  # the name of its site, or their names, as its keys give them
    state: WorkerState = WorkerState.AWAY
    prepared: bool = False  # its data and model are in place, for this connection
    # clients that it hosted until their key was revoked or expired
    revoked: frozenset[int] = frozenset()
    # clients whose newest state is not at this process, which so cannot do their tasks
    lacks: set[int] = field(default_factory=set)
    # clients whose tasks go to other workers, since this one is away
    replaced: set[int] = field(default_factory=set)
    joined_at: float = 0.0
    silence: Silence = field(default_factory=Silence)
    gone_at: float | None = None  # since when it is silent or away
    listed: frozenset[int] = frozenset()  # the clients for which `Roster.hosting` names it
    held: set[int] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    free: int = 0  # slots, if it may be handed a task, to be begun or ahead
    # By client: stage, step, steps.
    doing: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    user: str | None = None
    # what it did last, such as "trained", for which client and in which round
    did: tuple[str, int, int] | None = None

    @property
    def ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def here(self) -> bool:
        """Whether it is connected and heard of."""
        return self.state in (WorkerState.WELCOMED, WorkerState.READY)

    def change(self, event: WorkerEvent, to: WorkerState | None = None) -> None:
        self.state = step(WORKER, self.state, event, to)

    def event_fields(self) -> dict[str, object]:
        """The fields by which the run's events name this worker. One that hosts nobody any more is
        named by the clients that it hosted.
        """
        ids = sorted(self.ids or self.revoked)
        who = {"worker": self.name, "clients": ids, "host": self.host, "pid": self.pid}
        return {**who, "site": self.site} if self.site else who


class Roster:
    """limit: of workers. now: when this server started; until an id has been there once, its
    absence counts from then. no_key(client): why no key may speak for it, "" if one may.
    site_name(client): the name of its site, "" where it has none.
    """

    limit = 10_000

    def __init__(
        self,
        now: float,
        no_key: Callable[[int], str] = lambda client: "",
        site_name: Callable[[int], str] = lambda client: "",
    ) -> None:
        self._no_key = no_key
        self._site_name = site_name
        self.workers: dict[str, ClientProcess] = {}
        self._started = now
        self.by_conn: dict[bytes, ClientProcess] = {}  # who has joined over a connection
        self.joined: set[bytes] = set()  # connections that have used up their join
        # id -> when it counts as lost, since its last worker went
        self._lost_at: dict[int, float] = {}
        self._known: set[int] = set()  # ids that were ready once
        # By id: why it went when it last did, and its worker as it was then; or why it was refused
        # before it first came.
        self._absent: dict[int, tuple[str, ClientProcess | None]] = {}
        self.free_slots = 0  # of all workers
        # By id: the workers, by name, that are ready and host it. No id without a worker.
        self.hosting: dict[int, dict[str, ClientProcess]] = {}

    # -- what is known -----------------------------------------------------------------------------
    def present(self) -> frozenset[int]:
        """Ids hosted by a worker that is ready."""
        return frozenset(self.hosting)

    def recount(self, worker: ClientProcess) -> None:
        """To be called after each change of what a worker does, and of whether it is there."""
        self.free_slots -= worker.free
        worker.free = 0
        if worker.ready and len(worker.queue) < TASKS_PER_SLOT * worker.slots:
            worker.free = worker.slots
            self.free_slots += worker.slots

    def _changes(self, worker: ClientProcess) -> None:
        """The worker came, went, or hosts other clients."""
        ids = worker.ids if worker.ready else frozenset()
        for i in worker.listed - ids:
            del self.hosting[i][worker.name]
            if not self.hosting[i]:
                del self.hosting[i]
        for i in ids - worker.listed:
            self.hosting.setdefault(i, {})[worker.name] = worker
        worker.listed = ids
        self.recount(worker)

    def worker_of(self, conn: bytes) -> str:
        """The name of the worker behind a connection, "" if none has joined over it."""
        worker = self.by_conn.get(conn)
        return "" if worker is None else worker.name

    def waited_until(
        self, client: int, since: float, join: float | None
    ) -> tuple[float | None, str]:
        """(until when a client that is not present is waited for, None: for as long as it takes;
        why it is missed then). since: when its task began to wait for it; join: how long it may
        take to come at all, or to be ready, see `Rules`.
        """
        preparing = [x.joined_at for x in self.workers.values() if x.here and client in x.ids]
        absence, _ = self._absence(client)
        why = f": {absence}" if absence else ""
        if not preparing and client in self._known:
            until = self._lost_at.get(client, since)
            return (None if math.isinf(until) else until), f"lost{why}"
        start = max(preparing, default=self._started)
        return (None if join is None else start + join), f"absent{why}"

    def why_absent(self, client: int) -> str:
        """Why a client that is not connected is not, in words."""
        return self._absence(client)[0] or "has not connected"

    def site_of(self, ids: Iterable[int]) -> str:
        """The name of these clients' site; several names, where they are of several sites."""
        names = dict.fromkeys(self._site_name(client) for client in sorted(ids))
        return ", ".join([name for name in names if name][:SITES_NAMED])

    def _absence(self, client: int) -> tuple[str, ClientProcess | None]:
        """Why a client is not there, as far as that is known, and its worker as it was when it
        went. A key that has expired meanwhile is the reason too.
        """
        why, gone = self._absent.get(client, ("", None))
        if why.startswith("key "):
            return why, gone
        return self._no_key(client) or why, gone

    def sites(self, clients: int, offset: float) -> list[dict[str, object]]:
        """A row for each worker that is there, and for the clients that are not: by why, since when
        they were connected, when they were last heard of, and what they did last. Of more than
        `SHOWN` rows some of the workers that are there are left out. offset: of the clock that
        these times are to be read on.
        """
        connected = [x for x in self.workers.values() if x.here]
        hosted = self.present().union(*[x.ids for x in connected if not x.ready])
        absent: dict[tuple[str, ClientProcess | None, str], list[int]] = {}
        for client in range(clients) if len(hosted) < clients else ():
            if client not in hosted:
                alike = self.why_absent(client), self._absence(client)[1], self._site_name(client)
                absent.setdefault(alike, []).append(client)
        rows: list[dict[str, object]] = []

        def show(
            ids: Sequence[int], why: str, x: ClientProcess | None, site: str, connected: bool
        ) -> None:
            did = None if x is None else x.did
            rows.append(
                {
                    "clients": ranges(ids),
                    "site": site,
                    "connected": connected,
                    "host": "" if x is None else x.host,
                    "pid": 0 if x is None else x.pid,
                    "since": None if x is None else x.joined_at + offset,
                    "seen": None if x is None else x.heard + offset,
                    "did": "" if did is None else "{} client {} in round {}".format(*did),
                    "round": None if did is None else did[2],
                    "why": why,
                }
            )

        for x in connected[: max(0, SHOWN - len(absent))]:
            show(sorted(x.ids), "" if x.ready else "getting ready", x, x.site, True)
        for (why, gone, site), ids in list(absent.items())[:SHOWN]:
            show(ids, why, gone, site, False)
        return rows

    # -- coming ------------------------------------------------------------------------------------
    def enter(
        self, conn: bytes, join: m.Join, ids: frozenset[int], user: str | None, now: float
    ) -> ClientProcess:
        """Lets a worker in: for the first time, or back over another connection."""
        worker = self.workers.get(join.worker)
        if worker is None:
            worker = ClientProcess(join.worker, secrets.token_hex(8), ids, conn, now)
        worker.change(WorkerEvent.JOINED)
        worker.prepared = False
        worker.conn = conn
        worker.ids = ids
        worker.revoked = frozenset()
        worker.heard = worker.joined_at = now
        worker.gone_at = None
        worker.slots = min(join.slots, SLOTS)
        worker.host = join.host
        worker.pid = join.pid
        worker.device = join.device
        worker.site = self.site_of(ids)
        worker.user = user
        worker.doing.clear()
        worker.replaced.clear()
        self.workers[worker.name] = worker
        self.by_conn[conn] = worker
        self.joined.add(conn)
        self._changes(worker)
        return worker

    def came(self, worker: ClientProcess, event: WorkerEvent, to: WorkerState) -> None:
        """It is ready, or was silent and is heard again."""
        worker.change(event, to)
        worker.gone_at = None
        worker.replaced.clear()
        if to is WorkerState.READY:
            worker.prepared = True
            self._known |= worker.ids
        self._changes(worker)

    # -- going -------------------------------------------------------------------------------------
    def disconnect(self, worker: ClientProcess) -> None:
        """Its connection leads to it no more, and may not be joined over again."""
        if worker.conn is not None:
            del self.by_conn[worker.conn]
            worker.conn = None

    def away(
        self,
        worker: ClientProcess,
        event: WorkerEvent,
        why: str,
        patience: float | None,
        now: float,
    ) -> None:
        """It is not there any more. patience: how long its ids may take to come back before they
        count as lost.
        """
        worker.change(event)
        if event is not WorkerEvent.SILENT:
            self.disconnect(worker)
        worker.gone_at = now
        self._absent |= dict.fromkeys(worker.ids, (why, copy(worker)))
        self._changes(worker)
        for i in worker.ids:
            self._lost_at[i] = float("inf") if patience is None else now + patience

    def revoke(self, worker: ClientProcess, client: int, why: str, now: float) -> None:
        """The worker no longer hosts this client, since its key may not speak for it. why: such as
        "key expired".
        """
        worker.ids -= {client}
        worker.revoked |= {client}
        self._absent[client] = why, copy(worker)
        self._lost_at[client] = now
        self._changes(worker)

    def note_refused(self, ids: Iterable[int], reason: str) -> None:
        """Somebody who would host these ids was not let in."""
        for i in ids:
            known = self._absent.get(i)
            if known is None or known[0].startswith(REFUSED):
                self._absent[i] = f"{REFUSED}{reason}", None

    def forget(self, worker: ClientProcess) -> None:
        worker.change(WorkerEvent.FORGOTTEN)
        del self.workers[worker.name]
        self._changes(worker)


class Sites:
    """What sites say of the data that they bring (`data.dataset: site`), which nobody can check.

    A client's samples count as many as its site declared when it first joined the run, however many
    it says later: else a site could give itself more weight in the middle of a run. One whose data
    grew may go on with them, and weighs what it did; one that has fewer now weighs less.

    All sites have the same names of classes in the same order, or one number would stand for two
    classes: those of the configuration, else those of the first site that has any.
    """

    def __init__(
        self,
        # digest of the names that the configuration gives, "" where it gives none
        names: str = "",
    ) -> None:
        # Samples to train on by client, at its first join. An earlier server's are put back by
        # `recall`.
        self.declared: dict[int, int] = {}
        self.facts: dict[int, m.SiteFacts] = {}  # what was said last, by client
        self._names = names
        self._named_by = "the server's configuration"

    def recall(self, notes: Iterable[JsonMapping]) -> None:
        """notes: the fields of the notes `declared`, in their order."""
        for note in notes:
            for client, n in note["samples"].items():
                self.declared.setdefault(int(client), n)
            for client, names in note.get("names", {}).items():
                if not self._names:
                    self._names = names
                    self._named_by = f"client {client}"

    def unlike(self, facts: Sequence[m.SiteFacts]) -> str:
        """Why these sites cannot take part with the others, or ""."""
        names = self._names
        named_by = self._named_by
        for said in facts:
            if names and said.names and said.names != names:
                return (
                    f"ready: the classes of client {said.client} have other names than those of "
                    f"{named_by}, or another order: the same number would mean two classes. "
                    f"Name them alike at all sites, and all in order in the server's configuration "
                    f"(data.classes: [...]) where a site lacks some."
                )
            if said.names and not names:
                names = said.names
                named_by = f"client {said.client}"
        return ""

    def take(
        self, worker: ClientProcess, facts: Sequence[m.SiteFacts]
    ) -> list[tuple[str, JsonDict]]:
        """Returns what is new, as events with their fields. Raises RemoteProtocolError for clients
        of another worker.
        """
        new = dict[str, int]()
        changed = dict[str, int]()
        names = dict[str, str]()
        for said in facts:
            if said.client not in worker.ids:
                raise RemoteProtocolError(
                    f"facts of client {said.client}, which this worker does not host"
                )
            before = self.facts.get(said.client)
            last = self.declared.get(said.client) if before is None else before.train
            if last is None:
                new[str(said.client)] = said.train
                if said.names:
                    names[str(said.client)] = said.names
            elif last != said.train:
                changed[str(said.client)] = said.train
        self.facts.update((said.client, said) for said in facts)
        who = {"worker": worker.name}
        declared = {"samples": new, **({"names": names} if names else {})}
        self.recall([declared])
        notes: list[tuple[str, JsonDict]] = []
        if new:
            notes.append(("declared", {**who, **declared}))
        if changed:
            first = {c: self.declared[int(c)] for c in changed}
            notes.append(("data_changed", {**who, "samples": changed, "first": first}))
        return notes
