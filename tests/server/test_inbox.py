"""Replies come in, are read, are asked for again and end with their rounds, in any order, and
servers are killed: what is found is what was accepted, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
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
from fednet.journal.events import Accepted
from fednet.server import inbox
from fednet.server.inbox import Inbox, ReceivedReply
from fednet.tensors import Layout, Tensors
from fednet.wire import body as bodies
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.messages import Field, Key
from tests.books import journal_in

SMALL = 16  # bytes up to which a payload is in the journal
HELD = 100  # bytes of decoded payloads in memory
SPARE = 120  # bytes of files to write over
CLIENTS = st.integers(0, 1)
PHASES = st.integers(0, 1)
SIZES = st.sampled_from([0, 5, SMALL, SMALL + 1, 40, 40, 100])
WRONG = st.sampled_from(["", "", "", "", "damaged", "refused"])
LAYOUT = Layout.of(torch.nn.Linear(9, 1))  # 40 bytes
Place = tuple[int, int, int]  # round, phase and client
# The key, what comes (None: it was stored), its bytes, their number before compression, and what is
# wrong with it.
Arriving = tuple[Key, Body | None, bytes, int, str]


def place_of(key: Key) -> Place:
    return key.round, key.phase, key.client


@pytest.fixture(scope="module", autouse=True)
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbox, "SMALL_BYTES", SMALL)
        patch.setattr(bodies, "SMALL_BYTES", SMALL)
        patch.setattr(inbox, "HELD_BYTES", HELD)
        patch.setattr(inbox, "SPARE_BYTES", SPARE)
        yield


class Coming:
    """A payload that comes in parts."""

    def __init__(self, data: bytes, raw: int) -> None:
        self.data = data
        self.raw = raw  # bytes before compression
        self.got = 0
        self.late = False  # its round is over


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
        self.on_disk: dict[Place, tuple[Key, bytes]] = {}
        self.begin_server()

    def begin_server(self) -> None:
        if self.servers:
            self.journal.close()
        self.servers += 1
        self.journal = journal_in(self.folder, self.rows, self.servers)
        self.refused = set[bytes]()
        self.inbox = Inbox(self.folder, self.journal, self.decode)
        self.coming: dict[Key, Coming] = {}
        self.accepted = dict(self.on_disk)
        self.taken: list[tuple[ReceivedReply, bytes]] = []  # by this server, with their payloads
        self.read: list[tuple[memoryview, bytes]] = []  # what somebody holds, and what it was

    def decode(self, replies: Sequence[ReceivedReply], bodies: Sequence[Body]) -> Any:
        found = [bytes(body) for body in bodies]
        if self.refused.intersection(found):
            raise RemoteProtocolError("not as declared")
        return found

    def flush(self) -> None:
        self.journal.flush()
        self.on_disk = dict(self.accepted)

    @property
    def held(self) -> int:
        """Bytes of payloads in memory, of rounds that go on."""
        return sum(r.held for r, _ in self.taken if r.data is not None or r.payload is not None)

    def next_key(self, phase: int, client: int) -> tuple[Key, bytes]:
        """Of the next attempt, and 100 bytes that no other has."""
        self.attempts += 1
        key = Key(self.round, phase, self.attempts, client)
        return key, (b"%d of %d, " % (self.attempts, client) * 20)[:100]

    # -- payloads come in parts --------------------------------------------------------------------
    @rule(client=CLIENTS, phase=PHASES, size=SIZES, raw=st.booleans())
    def announce(self, client: int, phase: int, size: int, raw: bool) -> None:
        key, data = self.next_key(phase, client)
        self.begin(key, data[:size], raw)

    @precondition(lambda self: self.accepted)
    @rule(which=st.integers(0, 9), then=st.sampled_from(["", "the same", "killed", "is read"]))
    def ask_again(self, which: int, then: str) -> None:
        """Another attempt gives the same bytes, or is the last that this server hears of, or comes
        while somebody holds what the one before gave.
        """
        first, data = self.accepted[sorted(self.accepted)[which % len(self.accepted)]]
        if then == "is read":
            found = self.inbox.earlier_replies(first.round, first.phase)[first.client].body()
            self.read.append((found.to_bytes(), data))
        key, other = self.next_key(first.phase, first.client)
        if first.round > self.over:
            key = Key(first.round, key.phase, key.attempt, key.client)
        self.begin(key, other if then == "is read" else data, False)
        if then == "killed":
            self.kill("", 0)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), size=SIZES)
    def announce_again(self, which: int, size: int) -> None:
        """The same attempt, over another connection."""
        key = self.one(which)
        if not self.coming[key].late:
            self.begin(key, (b"again " * 20)[:size], False)

    def begin(self, key: Key, data: bytes, raw: bool) -> None:
        self.drop_others(key)
        self.coming[key] = Coming(data, (4 if raw else 1) * len(data))
        self.changes_file(key)
        self.send(key, 7)

    def changes_file(self, key: Key) -> None:
        """What was accepted is withdrawn before a byte of its file changes."""
        if self.accepted.pop(place_of(key), None):
            self.on_disk = dict(self.accepted)

    def drop_others(self, key: Key) -> None:
        """Another attempt at a reply that comes was called off before."""
        self.coming.pop(key, None)
        for other in list(self.coming):
            if place_of(other) == place_of(key):
                self.inbox.abandon(other)
                del self.coming[other]

    def one(self, which: int) -> Key:
        return sorted(self.coming)[which % len(self.coming)]

    def send(self, key: Key, part: int) -> None:
        coming = self.coming[key]
        piece = Body([coming.data[coming.got : coming.got + part]])
        self.inbox.store(key, coming.got, piece)
        coming.got += len(piece)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), part=st.sampled_from([7, 50]))
    def go_on(self, which: int, part: int) -> None:
        key = self.one(which)
        coming = self.coming[key]
        with pytest.raises(StateError, match=f"{coming.got} bytes are there, the next come at"):
            self.inbox.store(key, coming.got + 1, Body([b"x"]))
        if coming.got < len(coming.data):
            self.send(key, part)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9))
    def call_off(self, which: int) -> None:
        key = self.one(which)
        del self.coming[key]
        self.inbox.abandon(key)
        with pytest.raises(KeyError):
            self.inbox.accept([self.arrived(key, 0, 0, b"")])

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), wrong=WRONG)
    def arrive(self, which: int, wrong: str) -> None:
        """The rest of a payload comes."""
        key = self.one(which)
        coming = self.coming[key]
        if not coming.late:
            while coming.got < len(coming.data):
                self.send(key, 30)
            del self.coming[key]
            self.take([(key, None, coming.data, coming.raw, wrong)])

    # -- or whole ----------------------------------------------------------------------------------
    @rule(several=st.lists(st.tuples(CLIENTS, PHASES, SIZES, st.booleans(), WRONG), min_size=1))
    def come(self, several: list[tuple[int, int, int, bool, str]]) -> None:
        """Several at a time."""
        whole: dict[Place, Arriving] = {}
        for client, phase, size, raw, wrong in several:
            key, data = self.next_key(phase, client)
            data = data[:size]
            self.drop_others(key)
            arriving = key, Body([data]), data, (4 if raw else 1) * size, wrong
            whole.setdefault(place_of(key), arriving)
        self.take(list(whole.values()))

    @rule(client=CLIENTS, phase=PHASES, wrong=WRONG)
    def come_as_tensors(self, client: int, phase: int, wrong: str) -> None:
        """Within the process."""
        key, _ = self.next_key(phase, client)
        x = Tensors.zeros(LAYOUT)
        x.vector.fill_(self.attempts)
        body = Body([x])
        self.drop_others(key)
        self.take([(key, body, bytes(body), len(body), "refused" if wrong else "")])

    def take(self, several: Sequence[Arriving]) -> None:
        before = self.held
        files = len(self.files())
        arrived = []
        for key, body, data, raw, wrong in several:
            if wrong == "refused" and data:
                self.refused.add(data)
            check = digest([data + b"?" if wrong == "damaged" else data])
            if body is not None and body.by_reference:  # which come without a digest
                check = b""
            arrived.append(self.arrived(key, len(data), raw, check, body))
        results = self.inbox.accept(arrived)
        self.refused.clear()
        for (key, body, data, raw, wrong), reply in zip(several, results):
            room = len(several) == 1 and before + max(len(data), raw) <= HELD
            stored = body is None  # in parts
            by_reference = body is not None and body.by_reference
            in_memory = by_reference and before + len(data) <= HELD
            in_file = not in_memory and (stored or by_reference or len(data) > SMALL)
            if in_file:
                self.changes_file(key)
            if isinstance(reply, Exception):
                assert (str(reply) == "not as declared") == (wrong == "refused")
                assert wrong
                continue
            assert not (wrong and data)
            assert reply.message.reported == {"drift": 0.5}
            assert (reply.data is not None) == in_memory
            if len(several) == 1:
                is_file = in_file and raw <= len(data)
                assert (reply.payload is not None) == (in_memory or (not is_file and room))
            self.taken.append((reply, data))
            if not in_memory:
                self.accepted[place_of(key)] = key, data
        if len(several) == 1 and isinstance(results[0], Exception):
            assert len(self.files()) <= files
        self.flush()

    def arrived(
        self, key: Key, size: int, raw: int, check: bytes, body: Body | None = None
    ) -> tuple[Accepted, Body | None]:
        message = m.Reply(
            key=key,
            form=[Field("x", "state", size, raw)],
            size=size,
            check=check,
            reported={"loss": float("nan"), "drift": 0.5, "norm": float("inf")},
        )
        return Accepted(message, b"down", b"up"), body

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*/*.bin"))

    # -- and are used ------------------------------------------------------------------------------
    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def read_payload(self, which: int, keep: bool) -> None:
        self.flush()
        reply, data = self.taken[which % len(self.taken)]
        key = reply.message.key
        there = self.accepted.get(place_of(key)) == (key, data)
        if reply.data is None and there:
            body = reply.body().to_bytes()
            if keep:
                self.read.append((body, data))
            elif data:
                body[:] = bytes(len(body))  # its bytes are the reader's own
                assert bytes(reply.body()) == data

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

    @rule(late=st.sets(st.tuples(st.integers(0, 2), CLIENTS), max_size=3), goes_on=st.booleans())
    def end_round(self, late: set[tuple[int, int]], goes_on: bool) -> None:
        """late: how many rounds ago clients were asked whose replies still count. goes_on: large
        replies come then, and more of those that came and were not called off.
        """
        self.over += 1
        over = self.over
        under_way = {(over - ago, client) for ago, client in late}
        for path in self.inbox.clear(over, under_way):
            Path(path).unlink()
        rounds = {round for round, _ in under_way}
        for place in list(self.accepted):
            if place[0] <= over and (place[0], place[2]) not in under_way:
                del self.accepted[place]
        self.on_disk = dict(self.accepted)

        def counts(key: Key) -> bool:
            return key.round > over or key.round in rounds

        self.taken = [(r, d) for r, d in self.taken if counts(r.message.key)]
        for key, coming in self.coming.items():
            coming.late = coming.late or key.round <= over
        self.round = max(self.round, over + 1)
        left = {int(path.name.split("-")[1]) for path in self.folder.glob("round-*")}
        assert {round for round in left if round <= over} <= rounds
        if goes_on:
            self.come([(client, 0, 100, False, "") for client in range(2)])
            for key, coming in self.coming.items():
                if coming.got < len(coming.data):
                    self.send(key, 30)
        self.check_found()

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
        if spoilt:
            self.come([(which % 2, 0, 100, False, "")])  # then one has a file at least
        self.begin_server()
        places = [p for p, (_, data) in self.accepted.items() if len(data) > SMALL]
        if spoilt:
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

    def check_found(self, without: Place | None = None) -> None:
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
                    client: (reply.message.key, bytes(reply.body()))
                    for client, reply in found.items()
                } == wanted
                assert all(r.message.reported == {"drift": 0.5} for r in found.values())
        # It takes none for received that was in memory alone.
        known = self.journal.book.accepted.values()
        assert {place_of(record.message.key) for record in known} == set(self.accepted)

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
