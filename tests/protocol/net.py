"""Both protocol machines, with their links and books, joined by wires in memory. Time is a number,
parts are 8 bytes.
"""

from __future__ import annotations

from collections import deque

from fednet.errors import RemoteProtocolError
from fednet.journal.events import Accepted, Verdict, Welcomed
from fednet.journal.journal import Journal
from fednet.journal.link import Incoming, Link
from fednet.protocol import client as c
from fednet.protocol import instructions as s
from fednet.protocol.client import ClientProtocol
from fednet.protocol.server import ServerProtocol
from fednet.protocol.tasks import Rules, TaskSpec
from fednet.transport.framing import framing
from fednet.wire import messages as m
from fednet.wire.body import Body

PART = 8
GREETING = (107, 107)


def form(size: int, kind: str = "state") -> list[m.Field]:
    return [m.Field("x", kind, size, size)]


def spec(client: int, size: int = 5, cost: int = 0, **more) -> TaskSpec:
    body = Body([bytes([client]) * size])
    return TaskSpec(client, form(size), body, body.digest(), cost, **more)


def machine(run: str, inc: int, clients: int, **options) -> ServerProtocol:
    """The server's machine, started at second 0."""

    def welcome(ids: list[int], session: str) -> m.Welcome:
        named = {"session": session, "name": "n", "config": "c"}
        return m.Welcome(run=run, inc=inc, ids=ids, beat_s=1.0, **named)

    return ServerProtocol(run, inc, clients, welcome, 0.0, layout="L", **options)


class Site:
    """A client process. given: tasks that it has and has not answered; work: (key, payload of the
    task) it was given.
    """

    def __init__(self, net: Net, name: str, ids, slots: int = 1) -> None:
        self.net = net
        self.name = name
        join = m.Join(worker=name, ids=list(ids), slots=slots)
        self.protocol = ClientProtocol(join, part=net.part)
        self.rows: list[dict] = []
        self.journal = Journal(self.rows.append)
        self.link = Link("client", self._send, framing, self.journal, GREETING, net.part)
        self.conn = b""
        self.given: dict[m.Key, c.DoTask] = {}
        self.seen: list[object] = []
        self.up: deque[tuple[bytes, ...]] = deque()
        self.down: deque[tuple[bytes, ...]] = deque()
        self.prepares = True  # answers a welcome by ready at once
        self.hushed = False

    def _send(self, conn: bytes, frames) -> bool:
        if not self.conn:
            return False
        self.up.append(tuple(bytes(f) for f in frames))
        return True

    def do(self, instructions) -> None:
        for i in instructions:
            self.seen.append(i)
            if isinstance(i, c.Send):
                self.link.send([(b"", i.message, i.body)])
            elif isinstance(i, c.DoTask):
                assert i.task.key not in self.given
                self.given[i.task.key] = i
            elif isinstance(i, c.Cancelled):
                self.given.pop(i.key, None)
            elif isinstance(i, c.ClosePayload):
                self.link.close_payloads(b"", i.direction, [i.key], i.whole)
            elif isinstance(i, c.Prepare) and self.prepares and not i.again:
                self.do(self.protocol.ready("L"))
            elif isinstance(i, c.Reconnect):
                self.net.cut(self)
                self.net.connect(self)

    def receive(self, frames) -> None:
        try:
            message, body = self.link.receive(b"", frames)
        except RemoteProtocolError:
            return self.do([c.Reconnect()])
        instructions = []
        stray = ""
        try:
            instructions = self.protocol.received(message, body, self.net.now)
        except RemoteProtocolError:
            stray = "refused"
        if instructions and isinstance(instructions[0], c.Stray):
            stray = instructions[0].reason
        self.link.record_received([Incoming(b"", message, body, frames, stray)])
        self.do(instructions)

    def answer(self, key: m.Key, payload: bytes, kind: str = "delta", **more) -> None:
        """The task is done."""
        self.given.pop(key, None)
        body = Body([payload])
        run = self.protocol.run
        inc = self.protocol.inc
        reply = m.Reply(
            run=run,
            inc=inc,
            key=key,
            form=form(len(payload), kind),
            size=len(payload),
            check=body.digest(),
            **more,
        )
        self.do(self.protocol.finish([(reply, body)]))


class Net:
    def __init__(self, clients: int = 4, part: int = PART, **options) -> None:
        self.now = 0.0
        self.part = part
        self.rows: list[dict] = []
        self.journal = Journal(self.rows.append)
        self.journal.note(Welcomed(1))
        self.link = Link("server", self._send, framing, self.journal, GREETING, part)
        self.server = machine("run", 1, clients, part=part, **options)
        self.by_conn: dict[bytes, Site] = {}
        self.sites: list[Site] = []
        self.spool: dict[m.Key, bytearray] = {}
        self.done: dict[m.Key, bytes] = {}
        self.resolved: list[s.Resolved] = []
        self.notes: list[s.Note] = []
        self.sent: list[m.Message] = []
        self.bad: set[bytes] = set()  # payloads that the caller refuses
        self.first: int | None = None  # replies after which the caller cancels a phase
        self._conns = self.cuts = 0

    # -- the server's side -------------------------------------------------------------------------
    def _send(self, conn: bytes, frames) -> bool:
        site = self.by_conn.get(conn)
        if site is None:
            return False
        site.down.append(tuple(bytes(f) for f in frames))
        return True

    def do(self, instructions) -> None:
        pending = deque(instructions)
        while pending:
            i = pending.popleft()
            if isinstance(i, s.Send):
                self.sent.append(i.message)
                self.link.send([(i.conn, i.message, i.body)])
            elif isinstance(i, s.Store):
                if i.offset == 0:
                    self.spool[i.key] = bytearray()
                assert len(self.spool[i.key]) == i.offset
                self.spool[i.key] += i.data.to_bytes()
            elif isinstance(i, s.Arrived):
                reply = i.task.reply
                key = reply.key
                payload = bytes(self.spool.pop(key) if i.body is None else i.body)
                assert len(payload) == reply.size
                if payload in self.bad:
                    pending.extend(self.server.reject(key, "bad", self.now))
                else:
                    self.done[key] = payload
                    self.journal.note(Accepted(reply, i.task.conn, i.task.up_conn))
                    self.journal.note(Verdict([(key, "", None)]))
                    pending.extend(self.server.accept(key, self.now))
            elif isinstance(i, s.Resolved):
                key = i.key
                server = self.server
                if key.phase == server.phase and key.purpose == server.purpose:
                    self.resolved.append(i)
                done = [one for one in self.resolved if not one.reason]
                if len(done) == self.first and not i.reason:
                    pending.extend(server.cancel("closed", self.now))
            elif isinstance(i, s.ClosePayload):
                if i.direction == "up":
                    self.spool.pop(i.key, None)
                self.link.close_payloads(i.conn, i.direction, [i.key], False)
            elif isinstance(i, s.Note):
                self.notes.append(i)
            elif isinstance(i, s.HangUp) and i.conn in self.by_conn:
                self.cut(self.by_conn[i.conn])

    def receive(self, conn: bytes, frames) -> None:
        try:
            message, body = self.link.receive(conn, frames)
        except RemoteProtocolError as broken:
            return self.do(self.server.undecodable(conn, str(broken), self.now))
        instructions = self.server.received(conn, message, body, self.now)
        stray = (
            instructions[0].reason if instructions and isinstance(instructions[0], s.Stray) else ""
        )
        self.link.record_received([Incoming(conn, message, body, frames, stray)])
        self.do(instructions)

    def begin(
        self,
        specs,
        rules: Rules | None = None,
        round: int = 1,
        purpose: str = "train",
        phase: int = 0,
    ) -> None:
        self.resolved.clear()
        self.do(self.server.begin(round, phase, purpose, specs, rules or Rules(), self.now))

    # -- the wires ---------------------------------------------------------------------------------
    def site(self, name: str, ids, slots: int = 1, join: bool = True) -> Site:
        site = Site(self, name, ids, slots)
        self.sites.append(site)
        if join:
            self.connect(site)
            self.settle()
        return site

    def connect(self, site: Site) -> None:
        self._conns += 1
        site.conn = b"%d" % self._conns
        self.by_conn[site.conn] = site
        self.link.opened(site.conn)
        site.link.opened(b"")
        site.do(site.protocol.opened(self.now))

    def cut(self, site: Site) -> None:
        """The connection ends; what is on its way is lost."""
        conn = site.conn
        site.conn = b""
        if not conn:
            return
        self.cuts += 1
        del self.by_conn[conn]
        site.up.clear()
        site.down.clear()
        site.link.mark_cut(b"")
        site.do(site.protocol.closed())
        site.link.closed(b"")
        self.link.mark_cut(conn)
        self.do(self.server.closed(conn, self.now))
        self.link.closed(conn, awaited=True)

    def move(self, site: Site, direction: str) -> bool:
        """One message arrives."""
        wire = site.up if direction == "up" else site.down
        if not wire or not site.conn or (direction == "down" and site.hushed):
            return False
        frames = wire.popleft()
        if direction == "up":
            self.receive(site.conn, frames)
        else:
            site.receive(frames)
        return True

    def settle(self) -> None:
        """Everything on its way arrives."""
        while sum(self.move(site, d) for site in self.sites for d in ("up", "down")):
            pass

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.server.tick(self.now))
        for site in self.sites:
            if not site.hushed and site.conn:
                site.do(site.protocol.tick(self.now))
