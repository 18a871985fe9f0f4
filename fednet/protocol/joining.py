"""Who is let in: a worker's join, and its word that it is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.ids import Ids
from fednet.plain import JsonMapping
from fednet.protocol.roster import Roster, Worker, differs
from fednet.protocol.rules import Forget, Note
from fednet.protocol.tasks import Tasks
from fednet.protocol.turn import Refusals, Turn
from fednet.wire import messages as m
from fednet.wire.messages import Key


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What a worker has to fit. clients: there are ids 0 to clients - 1. welcome(ids,
    session): the answer to a join. may_speak_for(user, client):
    whether that key may. files: that it must have loaded, with their SHA-256; versions: of what
    computes here; layout: of the server's model; class_names: digest of the names of the classes,
    "" where the configuration gives none.
    """

    clients: int
    welcome: Callable[[list[int], str], m.Welcome]
    may_speak_for: Callable[[str | None, int], bool]
    files: Mapping[str, str]
    versions: Mapping[str, str]
    layout: str
    class_names: str = ""


def foreign(speaks: int, release: str) -> str:
    """Why two sides do not understand each other, and what to do."""
    named = f" (fednet {m.clean(release)})" if release else ""
    return (
        f"join: the client{named} speaks version {speaks} of the protocol, this server version "
        f"{m.PROTOCOL}; install the same release of fednet on both sides."
    )


class Sites:
    """What sites say of the data that they bring (`data.dataset: site`), which nobody can check.

    A client's samples count as many as its site declared when it first joined the run, however many
    it says later: else a site could give itself more weight in the middle of a run. One whose data
    grew may go on with them, and weighs what it did; one that has fewer now weighs less.

    All sites have the same names of classes in the same order, or one number would stand for two
    classes: those of the configuration, else those of the first site that has any.

    declared: samples to train on by client, at its first join; an earlier server's are put back by
    `recall`. names: digest of the names that the configuration gives, "" where it gives none.
    """

    def __init__(self, names: str = "") -> None:
        self.declared: dict[int, int] = {}
        self._facts: dict[int, m.SiteFacts] = {}
        self._names, self._named_by = names, "the server's configuration"

    def get(self, client: int) -> m.SiteFacts | None:
        """What was said last."""
        return self._facts.get(client)

    def recall(self, notes: Iterable[JsonMapping]) -> None:
        """notes: the fields of the notes `declared`, in their order."""
        for note in notes:
            for client, n in note["samples"].items():
                self.declared.setdefault(int(client), n)
            for client, names in note.get("names", {}).items():
                self._name(int(client), names)

    def _name(self, client: int, names: str) -> None:
        if not self._names:
            self._names, self._named_by = names, f"client {client}"

    def unlike(self, facts: Sequence[m.SiteFacts]) -> str:
        """Why these sites cannot take part with the others, or ""."""
        names, named_by = self._names, self._named_by
        for said in facts:
            if names and said.names and said.names != names:
                return (
                    f"ready: the classes of client {said.client} have other names than those of "
                    f"{named_by}, or another order: the same number would stand for two classes. "
                    f"Name them alike at all sites, and all in order in the server's configuration "
                    f"(data.classes: [...]) where a site lacks some."
                )
            if said.names and not names:
                names, named_by = said.names, f"client {said.client}"
        return ""

    def take(self, worker: Worker, facts: Sequence[m.SiteFacts]) -> list[Note]:
        """Notes what is new. Raises RemoteProtocolError for clients of another worker."""
        new, changed, names = dict[str, int](), dict[str, int](), dict[str, str]()
        for said in facts:
            if said.client not in worker.ids:
                raise RemoteProtocolError(
                    f"facts of client {said.client}, which this worker does not host"
                )
            before = self._facts.get(said.client)
            last = self.declared.get(said.client) if before is None else before.train
            if last is None:
                new[str(said.client)] = said.train
                if said.names:
                    names[str(said.client)] = said.names
            elif last != said.train:
                changed[str(said.client)] = said.train
        self._facts.update((said.client, said) for said in facts)
        who = {"worker": worker.name}
        declared = {"samples": new, **({"names": names} if names else {})}
        self.recall([declared])
        notes = [Note("declared", {**who, **declared})] if new else []
        if changed:
            first = {c: self.declared[int(c)] for c in changed}
            notes.append(Note("data_changed", {**who, "samples": changed, "first": first}))
        return notes


class Joining:
    """What is done with a message returns why it was refused, for the books, or ""."""

    def __init__(
        self, turn: Turn, roster: Roster, refusals: Refusals, tasks: Tasks, terms: JoinTerms
    ) -> None:
        self._turn, self._roster, self._refusals, self._tasks = turn, roster, refusals, tasks
        self._terms = terms
        self.sites = Sites(terms.class_names)

    def join(self, conn: bytes, join: m.Join, user: str | None) -> str:
        """Lets a worker in, anew or back."""
        if self._roster.has_joined(conn):
            raise RemoteProtocolError("join: this connection has joined already")
        try:
            ids = frozenset(
                Ids("{}/{}".format(*join.share), share=join.share).resolve(self._terms.clients)
                if join.share is not None
                else join.ids
            )
        except (ConfigError, ZeroDivisionError) as broken:
            self._refusals.tell(conn, f"join: {broken}", "join", final=True)
            return "refused"
        old = self._roster.workers.get(join.worker)
        reason, final = self._never(join, ids, user), True
        if not reason:
            reason, final = self._not_now(join, user, old), False
        if reason:
            self._refusals.tell(conn, reason, "join", final)
            known = {i for i in ids if i < self._terms.clients}
            self._roster.refused(known, reason.removeprefix("join: "))
            return "refused"
        if old is not None and old.conn is not None:
            self._turn.say(Forget(old.conn, hang_up=True))
        worker = self._roster.enter(conn, join, ids, user, self._turn.now)
        self._turn.send(conn, self._terms.welcome(sorted(ids), worker.session))
        self._turn.note(
            "joined" if old is None else "rejoined",
            worker=worker.name,
            clients=sorted(ids),
            host=worker.host,
            pid=worker.pid,
            device=worker.device,
            versions=join.versions,
            **differs(join.versions, self._terms.versions),
        )
        self._pick_up(worker, set(join.holding), join.inc == self._turn.incarnation)
        return ""

    def _never(self, join: m.Join, ids: frozenset[int], user: str | None) -> str:
        """Why this server can never let that worker in, or ""."""
        terms = self._terms
        if join.speaks != m.PROTOCOL:
            return foreign(join.speaks, join.versions.get("fednet", ""))
        bad = sorted(i for i in ids if not 0 <= i < terms.clients)
        if bad or not ids:
            known = f"this federation has ids 0 to {terms.clients - 1}."
            return f"join: client id {bad[0] if bad else 'missing'}; {known}"
        if len(ids) > m.MAX_IDS:  # by a share
            return (
                f"join: {len(ids)} clients in one process, at most {m.MAX_IDS} are allowed; "
                "start several with --id K/N."
            )
        if missing := [f for f, sha in terms.files.items() if sha not in join.files.values()]:
            return (
                f"join: this federation needs {', '.join(missing)} loaded on the client too "
                "(--load), with the same content."
            )
        if strangers := sorted(i for i in ids if not terms.may_speak_for(user, i)):
            return f"join: this key may not speak for client {strangers[0]}."
        return ""

    def _not_now(self, join: m.Join, user: str | None, old: Worker | None) -> str:
        """Why that worker may be let in later at most, or "". old: a worker of that name."""
        if old is not None:
            here = old.conn is not None and old.gone_at is None
            taken = old.user != user or (here and old.session != join.session)
            return "join: a worker of that name is connected." if taken else ""
        if not self._roster.room(lambda: {w.worker for w in self._tasks.open()}):
            return f"join: {self._roster.limit} workers are connected already."
        return ""

    def ready(self, conn: bytes, worker: Worker, ready: m.Ready) -> str:
        """Data and model are in place there."""
        if self._terms.layout and ready.layout != self._terms.layout:
            self._refusals.tell(
                conn,
                "ready: the model built there has other tensors than the server's; the same "
                "configuration, files and torch are needed on both sides.",
                "ready",
                final=True,
            )
            return "refused"
        if unlike := self.sites.unlike(ready.sites):
            self._refusals.tell(conn, unlike, "ready", final=True)
            return "refused"
        self._turn.say(*self.sites.take(worker, ready.sites))
        if worker.ready:
            return ""
        self._roster.ready(worker)
        self._turn.note("ready", **worker.named())
        self._supersede(worker)
        return ""

    # -- what it had before ------------------------------------------------------------------------
    def _pick_up(self, worker: Worker, holding: set[Key], ours: bool) -> None:
        """A worker is back: what it still holds goes on, what it lost on the way is handed out
        anew. ours: this server handed out what it holds, and can tell what is not wanted any more;
        of an earlier one's tasks it may ask again.
        """
        kept: set[Key] = set()
        for w in self._tasks.held_by(worker):
            if w.job.client not in worker.ids:
                self._tasks.take_back(w, "lost", lost=True)
            elif self._tasks.key(w) not in holding:
                self._tasks.take_back(w, "lost", lost=True, same_attempt=True)
            else:
                kept.add(self._tasks.key(w, "train"))
                self._tasks.restart_upload(w)  # it announces its reply anew
                if w.job.client not in worker.queue:
                    worker.queue.append(w.job.client)
                    self._roster.recount(worker)
        for key in sorted(holding) if ours else ():
            if msgspec.structs.replace(key, purpose="train") not in kept:
                self._turn.call_off(worker.conn or b"", key)

    def _supersede(self, worker: Worker) -> None:
        """A process started anew is ready: it need not wait until its forerunner is given up."""
        for gone in self._roster.away_workers():
            if gone is not worker and gone.ids <= worker.ids:
                self._turn.note("superseded", **gone.named(), by=worker.name)
            self._tasks.replace(gone, worker.ids)
        self._tasks.assign()
