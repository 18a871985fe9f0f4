"""Replies come in, are read, are asked for again and end with their rounds, in any order, and
servers are killed: what is found is what was accepted, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fednet.errors import RemoteProtocolError, StateError
from fednet.files import digest
from fednet.server import inbox
from fednet.server.inbox import Inbox, ReceivedReply
from fednet.tensors import Layout, Tensors
from fednet.wire import messages as m
from fednet.wire.codec import Body, Content
from fednet.wire.messages import Field, Key
from tests.books import journal_in

SMALL = 16  # bytes up to which a payload is in the journal
HELD = 70  # bytes of decoded payloads in memory
SPARE = 120  # bytes of files to write over
CONNS = (b"down", b"up")
CLIENTS = st.integers(0, 1)
PHASES = st.integers(0, 1)
SIZES = st.sampled_from([0, 5, SMALL, SMALL + 1, 40, 40, 100])
LAYOUT = Layout.of(torch.nn.Linear(9, 1))  # 40 bytes


@pytest.fixture(scope="module", autouse=True)
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbox, "SMALL_BYTES", SMALL)
        patch.setattr(inbox, "HELD_BYTES", HELD)
        patch.setattr(inbox, "SPARE_BYTES", SPARE)
        yield


class Coming:
    """A payload of which something has come."""

    def __init__(self, payload: Content, raw: int) -> None:
        self.payload = payload
        self.raw = raw  # bytes before compression
        self.got = 0
        self.in_file = False
        self.late = False  # its round is over
        self.counts = False  # as held in memory

    @property
    def data(self) -> bytes:
        return bytes_of(self.payload)


def bytes_of(payload: Content) -> bytes:
    return bytes(payload.whole() if isinstance(payload, Body) else payload)


class Replies(RuleBasedStateMachine):
    """What the server does with its inbox. Of one reply of a client in a phase, later attempts take
    the place of earlier ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.round = 1  # the newest
        self.over = 0  # rounds that are over
        self.attempts = 0
        self.servers = 0
        self.rows: list[dict[str, Any]] = []

    def teardown(self) -> None:
        self.taken.clear()
        self.read.clear()
        self.inbox.close()
        assert not (self.folder / "spare").exists()
        self.place.cleanup()

    @initialize()
    def first_server(self) -> None:
        self.on_disk: dict[tuple[int, int, int], tuple[Key, bytes]] = {}
        self.begin_server()

    def begin_server(self) -> None:
        if self.servers:
            self.journal.close()
        self.servers += 1
        self.journal = journal_in(self.folder, self.rows, self.servers)
        self.refuses = False
        self.inbox = Inbox(self.folder, self.journal, self.decode)
        self.coming: dict[Key, Coming] = {}
        self.accepted = dict(self.on_disk)  # key and payload, by round, phase and client
        self.taken: list[tuple[ReceivedReply, bytes]] = []  # by this server, with their payloads
        self.read: list[tuple[memoryview, bytes]] = []  # what somebody holds, and what it was

    def decode(self, reply: ReceivedReply, body: Content) -> Any:
        if self.refuses:
            raise RemoteProtocolError("not as declared")
        return bytes_of(body)

    def flush(self) -> None:
        self.journal.flush()
        self.on_disk = dict(self.accepted)

    @property
    def held(self) -> int:
        """Bytes of payloads in memory, and of what comes as tensors, of rounds that go on."""
        replies = [r for r, _ in self.taken if r.data is not None or r.payload is not None]
        coming = sum(len(c.payload) for c in self.coming.values() if c.counts)
        return sum(r.held for r in replies) + coming

    # -- payloads come -----------------------------------------------------------------------------
    @rule(
        client=CLIENTS, phase=PHASES, size=SIZES, part=st.sampled_from([7, 100]), raw=st.booleans()
    )
    def announce(self, client: int, phase: int, size: int, part: int, raw: bool) -> None:
        """A payload begins to come, or all of it is there at once."""
        self.attempts += 1
        data = (b"%d of %d, " % (self.attempts, client) * 20)[:size]
        self.begin(Key(self.round, phase, self.attempts, client), memoryview(data), raw, part)

    @precondition(lambda self: self.accepted)
    @rule(which=st.integers(0, 9), part=st.sampled_from([7, 100]), killed=st.booleans())
    def announce_the_same(self, which: int, part: int, killed: bool) -> None:
        """Another attempt gives the same bytes."""
        self.attempts += 1
        key, data = self.accepted[sorted(self.accepted)[which % len(self.accepted)]]
        again = Key(key.round, key.phase, self.attempts, key.client)
        if key.round > self.over:
            self.begin(again, memoryview(data), False, part)
        if killed:
            self.kill("", 0)

    @rule(client=CLIENTS, phase=PHASES)
    def hand_over(self, client: int, phase: int) -> None:
        """Tensors come within the process."""
        self.attempts += 1
        x = Tensors.zeros(LAYOUT)
        x.vector.fill_(self.attempts)
        self.begin(Key(self.round, phase, self.attempts, client), Body([x]), False, 100)

    @rule(client=CLIENTS, phase=PHASES, size=SIZES, raw=st.booleans(), flush=st.booleans())
    def come_whole(self, client: int, phase: int, size: int, raw: bool, flush: bool) -> None:
        self.announce(client, phase, size, 100, raw)
        self.check(max(self.coming, key=lambda key: key.attempt), "", flush)

    @rule(client=CLIENTS, phase=PHASES, wrong=st.sampled_from(["", "", "refused"]))
    def come_as_tensors(self, client: int, phase: int, wrong: str) -> None:
        self.hand_over(client, phase)
        self.check(max(self.coming, key=lambda key: key.attempt), wrong, True)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), size=SIZES, part=st.sampled_from([7, 100]))
    def announce_again(self, which: int, size: int, part: int) -> None:
        """The same attempt, over another connection."""
        key = self.one(which)
        if not self.coming[key].late:
            self.begin(key, memoryview((b"again " * 20)[:size]), False, part)

    def begin(self, key: Key, payload: Content, raw: bool, part: int) -> None:
        self.drop_others(key)
        before = self.held
        coming = self.coming[key] = Coming(payload, (4 if raw else 1) * len(payload))
        if isinstance(payload, Body):
            coming.in_file = before + len(payload) > HELD
            coming.counts = not coming.in_file
        else:
            coming.in_file = not len(payload) <= min(part, SMALL)
        if coming.in_file and self.accepted.pop((key.round, key.phase, key.client), None):
            self.on_disk = dict(self.accepted)  # before a byte of its file changes
        self.send(key, part)

    def drop_others(self, key: Key) -> None:
        """Another attempt at a reply that comes was called off before."""
        self.coming.pop(key, None)
        for other in list(self.coming):
            if (other.round, other.phase, other.client) == (key.round, key.phase, key.client):
                self.inbox.abandon(other)
                del self.coming[other]

    def one(self, which: int) -> Key:
        return sorted(self.coming)[which % len(self.coming)]

    def send(self, key: Key, part: int) -> None:
        coming = self.coming[key]
        piece: Content = coming.payload
        if isinstance(piece, memoryview):
            piece = piece[coming.got : coming.got + part]
        self.inbox.store(key, coming.got, piece, len(coming.payload))
        coming.got += len(piece)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), part=st.sampled_from([7, 50]))
    def go_on(self, which: int, part: int) -> None:
        key = self.one(which)
        coming = self.coming[key]
        with pytest.raises(StateError, match=f"{coming.got} bytes are there, the next come at"):
            self.inbox.store(key, coming.got + 1, memoryview(b"x"), len(coming.payload))
        if coming.got < len(coming.payload):
            self.send(key, part)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9))
    def call_off(self, which: int) -> None:
        key = self.one(which)
        del self.coming[key]
        self.inbox.abandon(key)
        with pytest.raises(KeyError):
            self.take(key, 0, 0, b"")

    @precondition(lambda self: self.coming)
    @rule(
        which=st.integers(0, 9),
        wrong=st.sampled_from(["", "", "", "damaged", "refused"]),
        flush=st.booleans(),
    )
    def arrive(self, which: int, wrong: str, flush: bool) -> None:
        """The rest of a payload comes."""
        key = self.one(which)
        if not self.coming[key].late:
            self.check(key, wrong, flush)

    def check(self, key: Key, wrong: str, flush: bool) -> None:
        coming = self.coming[key]
        while coming.got < len(coming.payload):
            self.send(key, 30)
        data = coming.data
        check = b"" if isinstance(coming.payload, Body) else digest([data])
        if wrong == "damaged" and not isinstance(coming.payload, Body):
            check = digest([data + b"?"])
        else:
            self.refuses = wrong == "damaged" or wrong == "refused"
        files = self.files()
        del self.coming[key]
        room = self.held + max(len(data), coming.raw)
        if wrong:
            with pytest.raises(RemoteProtocolError):
                self.take(key, len(data), coming.raw, check)
            self.refuses = False
            assert len(files) - len(self.files()) == coming.in_file
            return
        reply = self.take(key, len(data), coming.raw, check)
        assert reply.message.reported == {"drift": 0.5}
        in_memory = isinstance(coming.payload, Body) and not coming.in_file
        is_file = coming.in_file and coming.raw <= len(data)
        assert (reply.payload is not None) == (in_memory or (not is_file and room <= HELD))
        self.taken.append((reply, data))
        if not in_memory:
            self.accepted[key.round, key.phase, key.client] = key, data
        if flush:
            self.flush()

    def take(self, key: Key, size: int, raw: int, check: bytes) -> ReceivedReply:
        message = m.Reply(
            key=key,
            form=[Field("x", "state", size, raw)],
            size=size,
            check=check,
            reported={"loss": float("nan"), "drift": 0.5, "norm": float("inf")},
        )
        return self.inbox.take(message, CONNS, 0.0, (b"", ""), {})

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*/*.bin"))

    # -- and are used ------------------------------------------------------------------------------
    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def read_payload(self, which: int, keep: bool) -> None:
        self.flush()
        reply, data = self.taken[which % len(self.taken)]
        key = reply.message.key
        there = self.accepted.get((key.round, key.phase, key.client)) == (key, data)
        if reply.data is None and there:
            body = reply.body()
            assert isinstance(body, memoryview)
            if keep:
                self.read.append((body, data))
            else:
                body[:] = bytes(len(body))  # its bytes are the reader's own
                assert bytes_of(reply.body()) == data

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 9))
    def use(self, which: int) -> None:
        reply, data = self.taken[which % len(self.taken)]
        kept = reply.payload
        assert reply.take_payload() is kept
        assert kept is None or kept == data
        assert reply.take_payload() is None

    @precondition(lambda self: self.taken)
    @rule()
    def use_all(self) -> None:
        for which in range(len(self.taken)):
            self.use(which)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 9))
    def leave_out(self, which: int) -> None:
        reply, _ = self.taken.pop(which % len(self.taken))
        reply.let_go()
        assert reply.data is reply.payload is None

    @precondition(lambda self: self.accepted)
    @rule(which=st.integers(0, 9), killed=st.booleans())
    def withdraw(self, which: int, killed: bool) -> None:
        place = sorted(self.accepted)[which % len(self.accepted)]
        key, _ = self.accepted.pop(place)
        self.inbox.withdraw(key)
        self.on_disk = dict(self.accepted)
        if killed:
            self.kill("", 0)

    @rule()
    def begin_next_round(self) -> None:
        """Before the last one is over."""
        self.round += 1

    @rule(late=st.sets(st.tuples(st.integers(0, 2), CLIENTS), max_size=3))
    def end_round(self, late: set[tuple[int, int]]) -> None:
        """late: how many rounds ago clients were asked whose replies still count."""
        self.over += 1
        over = self.over
        under_way = {(over - ago, client) for ago, client in late}
        self.inbox.clear(over, under_way)
        rounds = {round for round, _ in under_way}
        for place in list(self.accepted):
            if place[0] <= over and (place[0], place[2]) not in under_way:
                del self.accepted[place]
        self.on_disk = dict(self.accepted)

        def goes_on(key: Key) -> bool:
            return key.round > over or key.round in rounds

        self.taken = [(r, d) for r, d in self.taken if goes_on(r.message.key)]
        for key, coming in self.coming.items():
            coming.late = coming.late or key.round <= over
            coming.counts = coming.counts and goes_on(key)
        self.round = max(self.round, over + 1)
        left = {int(path.name.split("-")[1]) for path in self.folder.glob("round-*")}
        assert {round for round in left if round <= over} <= rounds

    @rule()
    def write_journal_again(self) -> None:
        self.journal.renew()
        self.on_disk = dict(self.accepted)

    # -- and servers are killed --------------------------------------------------------------------
    @rule(
        spoilt=st.sampled_from(["", "", "lost", "cut", "longer", "another"]),
        which=st.integers(0, 9),
    )
    def kill(self, spoilt: str, which: int) -> None:
        """Another server begins; a file of this one may have been lost with the power."""
        self.begin_server()
        places = [p for p, (_, data) in self.accepted.items() if len(data) > SMALL]
        if spoilt and places:
            place = sorted(places)[which % len(places)]
            key, data = self.accepted[place]
            path = self.folder / f"round-{key.round}" / f"{key.phase}-{key.client}-train.bin"
            if spoilt == "lost":
                path.unlink()
            else:
                found = {"cut": data[:3], "longer": data + b"?", "another": data[::-1]}
                path.write_bytes(found[spoilt])
            self.check_found(without=place)
            self.inbox.withdraw(key)
            del self.accepted[place]
            self.on_disk = dict(self.accepted)
        self.check_found()

    @rule()
    def look(self) -> None:
        self.flush()
        self.check_found()

    def check_found(self, without: tuple[int, int, int] | None = None) -> None:
        """The next server finds what is in the journal now."""
        for round in range(1, self.round + 1):
            for phase in range(2):
                wanted = {
                    place[2]: one
                    for place, one in self.accepted.items()
                    if place[:2] == (round, phase) and place != without
                }
                found = self.inbox.earlier_replies(round, phase)
                assert {
                    client: (reply.message.key, bytes_of(reply.body()))
                    for client, reply in found.items()
                } == wanted
                assert all(r.message.reported == {"drift": 0.5} for r in found.values())

    # -- what must hold ----------------------------------------------------------------------------
    @invariant()
    def what_somebody_holds_does_not_change(self) -> None:
        for body, data in self.read:
            assert bytes(body) == data

    @invariant()
    def what_is_kept_in_memory_and_on_disk_is_bounded(self) -> None:
        if self.servers:
            assert self.held <= HELD
            spare = self.folder / "spare"
            assert sum(path.stat().st_size for path in spare.glob("*")) <= SPARE


TestReplies = Replies.TestCase
TestReplies.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
