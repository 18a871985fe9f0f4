from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.errors import RemoteProtocolError
from fednet.journal.events import Accepted, Verdict
from fednet.journal.journal import Journal
from fednet.journal.link import NOBODY, Incoming, Link, split
from fednet.protocol.transfers import Receiving
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import encode
from tests.books import each, open_accounts

KEY = m.Key(2, 0, 1, 5)
FORM = [m.Field("x", "state", 8, 16), m.Field("run", "statistics", 4, 4)]
DELTA = [m.Field("x", "delta", 8, 16), FORM[1]]
BODY = Body([bytes(12)])


def framing(*sizes: int) -> int:
    """A byte for each frame."""
    return sum(sizes) + len(sizes)


class Ends:
    """A client's and a server's link, joined by a list. Frames cost one byte more than they
    hold.
    """

    def __init__(self, part: int = m.PART) -> None:
        self.wire: list[list] = []
        self.stands = True
        self.up_rows: list[dict] = []
        self.down_rows: list[dict] = []
        self.client = Link(
            "client",
            self._send,
            framing,
            Journal(self.up_rows.append),
            (64, 43),
            part,
        )
        self.server = Link(
            "server",
            self._send,
            framing,
            Journal(self.down_rows.append),
            (43, 64),
            part,
        )

    def _send(self, conn, frames) -> bool:
        if self.stands:
            self.wire.append([bytes(f) for f in frames])
        return self.stands

    def up(self, message, body=None, stray="") -> int:
        """Sends from the client to the server; the bytes of its frames."""
        self.client.send([(b"c", message, body)])
        frames = self.wire.pop()
        got, got_body = self.server.receive(b"c", frames)
        assert got == message
        self.server.record_received([Incoming(b"c", got, got_body, frames, stray)])
        return sum(len(f) + 1 for f in frames)


def reply(size=12, key=KEY) -> m.Reply:
    return m.Reply(key=key, form=FORM, size=size)


@pytest.mark.parametrize(("purpose", "type"), [("train", "reply"), ("evaluate", "evaluate")])
def test_parts_share_the_row_of_their_announcement_and_pulls_have_one(purpose, type):
    ends = Ends(part=5)
    key = m.Key(2, 0, 1, 5, purpose)
    n = ends.up(reply(key=key))
    n += sum(
        ends.up(m.Part(key=key, index=i), Body([bytes(size)]))
        for i, size in ((0, 5), (1, 5), (2, 2))
    )
    ends.server.send([(b"c", m.Pull(key=key, first=0, count=3), None)])
    ends.server.close_payloads(b"c", "up", [key], True)
    reply_row, pull_row = ends.down_rows
    kinds = {"state": 8, "statistics": 4}
    wanted = {"type": type, "bytes": n, "kinds": kinds, "raw_bytes": 20}
    assert wanted.items() <= reply_row.items()
    wanted = {"type": "pull", "direction": "down", "round": 2, "useful": True}
    assert wanted.items() <= pull_row.items()
    assert ends.server.journal.book.open_accounts == {}
    assert ends.server.journal.book.forms == {}


def test_a_part_that_comes_twice_has_its_kinds_in_a_row_of_its_own():
    ends = Ends(part=5)
    n = ends.up(reply()) + ends.up(m.Part(key=KEY, index=1), Body([bytes(5)]))
    again = ends.up(m.Part(key=KEY, index=1), Body([bytes(5)]), "doubled")
    ends.server.close_payloads(b"c", "up", [KEY], True)
    kinds = {"state": 3, "statistics": 2}
    found = [(r["bytes"], r["kinds"], r.get("reason")) for r in ends.down_rows]
    assert found == [(again, kinds, "doubled"), (n, kinds, None)]


def test_a_reply_that_is_announced_twice_has_the_kinds_of_its_first_form():
    ends = Ends(part=5)
    n = ends.up(reply())
    again = ends.up(m.Reply(key=KEY, form=DELTA, size=12), stray="doubled")
    n += sum(
        ends.up(m.Part(key=KEY, index=i), Body([bytes(size)]))
        for i, size in ((0, 5), (1, 5), (2, 2))
    )
    ends.server.close_payloads(b"c", "up", [KEY], True)
    found = [(r["bytes"], r["kinds"], r.get("reason")) for r in ends.down_rows]
    assert found == [(again, {}, "doubled"), (n, {"state": 8, "statistics": 4}, None)]
    assert ends.server.journal.book.forms == {}


def test_what_cannot_be_decoded_is_billed_as_refused_in_one_row():
    ends = Ends()
    for noise in (b"abc", b"defgh"):
        with pytest.raises(RemoteProtocolError):
            ends.server.receive(b"c", [noise])
    ends.server.close_counted(b"c", worker="w")
    (row,) = ends.down_rows
    wanted = {"type": "refused", "bytes": 4 + 6, "count": 2, "useful": False, "worker": "w"}
    assert wanted.items() <= row.items()


def test_heartbeats_of_all_connections_are_one_row_of_a_round_each_way():
    ends = Ends()
    alive = m.Alive()
    doing = m.Progress(client=3)
    sizes = []
    for conn, message in ((b"c", alive), (b"d", doing), (b"d", alive)):
        ends.server.record_received([Incoming(conn, message, None, [encode(message)])])
        sizes.append(framing(len(encode(message))))
    ends.server.send([(b"d", alive, None)])
    ends.server.close_all_counted(7)
    up, down = ends.down_rows
    wanted = {"type": "beat", "direction": "up", "count": 3, "bytes": sum(sizes), "round": 7}
    assert wanted.items() <= up.items()
    assert (down["direction"], down["count"], down["bytes"]) == ("down", 1, sizes[0])
    assert not open_accounts(ends.server.journal)
    ends.server.close_all_counted(8)
    assert len(ends.down_rows) == 2


def test_closing_settles_what_is_left_and_marks_what_may_be_lost():
    ends = Ends()
    ends.up(reply(), Body([bytes(12)]))
    ends.up(reply(key=m.Key(2, 0, 1, 6)), Body([bytes(12)]))
    ends.server.send([(b"c", m.Task(key=KEY, form=FORM, size=12), Body([bytes(12)]))])
    ends.server.closed(b"c", awaited=True)
    assert ends.down_rows == []
    ends.server.closed(b"c")
    assert sorted(
        (r["direction"], r["client"], r["useful"], r.get("lost", False))
        for r in each(ends.down_rows)
    ) == [("down", 5, False, True), ("up", 5, False, False), ("up", 6, False, False)]
    assert ends.server.journal.book.open_accounts == {}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["state", "delta"]), st.integers(0, 30), st.integers(0, 90)),
        max_size=5,
    ),
    st.integers(1, 12),
)
def test_parts_of_a_payload_add_up_to_its_kinds_and_raw_bytes(fields, part):
    form = [
        m.Field(str(i), kind, size, raw if size else 0)
        for i, (kind, size, raw) in enumerate(fields)
    ]
    whole = sum(f.size for f in form)
    kinds = {}
    raw = 0
    for start in range(0, whole, part):
        found, more = split(form, start, min(whole, start + part))
        assert sum(found.values()) == min(part, whole - start)
        raw += more
        for kind, n in found.items():
            kinds[kind] = kinds.get(kind, 0) + n
    assert kinds == split(form, 0, whole)[0]
    assert raw == sum(f.raw for f in form)


def test_a_payload_in_one_piece_is_billed_as_the_parts_that_it_would_be_over_a_network(
    monkeypatch,
):
    """Of nine parts the last one's number takes no more bytes in a header; of 130 it does."""
    monkeypatch.setattr(m, "PART", 4096)
    monkeypatch.setattr(m, "BESIDE", 1024)
    for size in (1024, 1025, m.PART, m.PART + 1, 9 * m.PART, 130 * m.PART):
        form = [m.Field("x", "state", size, size)]
        message = m.Reply(run="r", inc=1, key=KEY, form=form, size=size)
        whole = Ends(m.WHOLE)
        cut = Ends(m.PART)
        body = memoryview(bytes(size))
        whole.up(message, Body([body]))
        beside = size <= m.beside(m.PART)
        cut.up(message, Body([body]) if beside else None)
        window = Receiving(size, m.PART)
        for index in range(0 if beside else -(-size // m.PART)):
            granted = window.grant()
            if granted is not None:
                pull = m.Pull(run="r", inc=1, key=KEY, first=granted[0], count=granted[1])
                cut.server.send([(b"c", pull, None)])
                cut.client.record_received([Incoming(b"c", pull, None, cut.wire.pop())])
            part = Body([body[index * m.PART : (index + 1) * m.PART]])
            cut.up(m.Part(run="r", inc=1, key=KEY, index=index), part)
            window.take(index, part)
        for ends in (whole, cut):
            for link in (ends.client, ends.server):
                link.close_payloads(b"c", "up", [KEY], True)
        assert whole.up_rows == cut.up_rows
        assert whole.down_rows == cut.down_rows
        assert sum(row["kinds"].get("state", 0) for row in whole.down_rows) == size


def test_a_connection_that_ends_has_each_byte_that_came_in_one_row():
    ends = Ends()
    where = {"round": 3, "worker": "w"}
    ends.server.opened(b"c")
    beat = ends.up(m.Progress(client=1))
    with pytest.raises(RemoteProtocolError):
        ends.server.receive(b"c", [b"noise"])
    ends.server.undecoded(b"c", 64 + beat + 6 + 100, **where)
    ends.server.closed(b"c", awaited=True, **where)
    found = [(r["type"], r["bytes"], r.get("worker")) for r in ends.down_rows if r["round"] == 3]
    assert found == [("connection", 100, "w"), ("beat", beat, "w"), ("refused", 6, "w")]
    assert ends.server.journal.book.totals["up"] == 64 + beat + 6 + 100


# -- messages that cross together ------------------------------------------------------------------
WIDE = [m.Field("x", "delta", 8, 32), FORM[1]]
STATE_BYTES = {"state": 8, "statistics": 4}
DELTA_BYTES = {"delta": 8, "statistics": 4}
PAD = "x" * len("evaluate")
# Each but the second differs from the one before in its client and in one thing more: phase,
# purpose, form, and a field that makes the header longer; the kinds and raw bytes of its row, and
# whether that is of the last evaluation.
NEIGHBOURS: list[tuple[int, m.Purpose, list[m.Field], str, dict[str, int], int, bool]] = [
    (0, "train", FORM, "", STATE_BYTES, 20, False),
    (0, "train", FORM, "", STATE_BYTES, 20, False),
    (0, "train", DELTA, "", DELTA_BYTES, 20, False),
    (0, "train", WIDE, "", DELTA_BYTES, 36, False),
    (0, "train", WIDE, PAD[: len("train")], DELTA_BYTES, 36, False),
    (1, "evaluate", WIDE, PAD[: len("train")], DELTA_BYTES, 36, True),
    (2, "evaluate", WIDE, PAD[: len("train")], DELTA_BYTES, 36, False),
    (2, "train", WIDE, PAD, DELTA_BYTES, 36, False),  # as long as the one before
]


@pytest.mark.parametrize("stray", [None, "", "late"])
def test_each_of_the_messages_that_cross_together_has_a_row_of_its_own_numbers(stray):
    """stray: of replies; None: they are tasks."""
    rows: list[dict] = []
    link = Link("server", lambda conn, frames: True, framing, Journal(rows.append))
    link.final = (2, 1)
    messages: list[m.Task | m.Reply] = []
    wanted = []
    for client, (phase, purpose, form, pad, kinds, raw, final) in enumerate(NEIGHBOURS):
        key = m.Key(2, phase, 1, client, purpose)
        if stray is None:
            messages.append(m.Task(key=key, form=form, size=12, start=pad))
        else:
            messages.append(m.Reply(key=key, form=form, size=12, state=pad))
        nbytes = framing(len(encode(messages[-1])), 12)
        type = "task" if stray is None else "reply"
        if purpose == "evaluate":
            type = purpose
        wanted.append((client, type, phase, nbytes, kinds, raw, final, stray or ""))
    assert wanted[6][3] == wanted[7][3]
    if stray is None:
        link.send([(b"c", message, BODY) for message in messages])
    else:
        link.record_received(
            [Incoming(b"c", one, BODY, [encode(one), bytes(12)], stray) for one in messages]
        )
    link.close_payloads(
        b"c", "down" if stray is None else "up", [one.key for one in messages], True
    )
    names = ("client", "type", "phase", "bytes", "kinds", "raw_bytes")
    found = [
        (*[row[name] for name in names], row.get("final", False), row.get("reason", ""))
        for row in each(rows)
    ]
    assert sorted(found, key=lambda row: row[0]) == wanted
    assert not open_accounts(link.journal)


def test_of_messages_that_leave_together_the_one_whose_connection_is_gone_is_in_no_row():
    rows: list[dict] = []
    link = Link("server", lambda conn, frames: conn != b"d", framing, Journal(rows.append))
    tasks = {
        conn: m.Task(key=m.Key(2, 0, 1, client), form=FORM, size=12)
        for client, conn in enumerate((b"c", b"d", b"e"))
    }
    sent = link.send([(conn, task, BODY) for conn, task in tasks.items()])
    assert sent == [True, False, True]
    for conn, task in tasks.items():
        link.close_payloads(conn, "down", [task.key], True)
    found = [(row["client"], row["bytes"]) for row in each(rows)]
    assert found == [(n, framing(len(encode(tasks[c])), 12)) for n, c in ((0, b"c"), (2, b"e"))]
    assert link.journal.book.crossed["down"] == sum(nbytes for _, nbytes in found)


# -- whatever crosses ------------------------------------------------------------------------------
CONNS = (b"c", b"d")
KEYS = (KEY, KEY, m.Key(2, 1, 0, 5, "evaluate"))
MESSAGES: dict[str, Callable[[m.Key], tuple[m.Message, Body | None]]] = {
    "task": lambda key: (m.Task(key=key, form=FORM, size=12), BODY),
    "reply": lambda key: (reply(key=key), BODY),
    "announcement": lambda key: (reply(key=key), None),
    "part": lambda key: (m.Part(key=key, index=0), BODY.slice(0, 5)),
    "last part": lambda key: (m.Part(key=key, index=2), BODY.slice(0, 2)),
    "pull": lambda key: (m.Pull(key=key, first=0, count=1), None),
    "cancel": lambda key: (m.Cancel(key=key), None),
    "failed": lambda key: (m.Failed(key=key, reason="x"), None),
}
FROM_SERVER = ("task", "part", "last part", "pull", "cancel")
FROM_CLIENT = ("reply", "announcement", "part", "last part", "pull", "failed")
HAPPENS = st.tuples(
    st.sampled_from(
        (
            "down",
            "down",
            "down",
            "up",
            "up",
            "up",
            "beat",
            "beat",
            "gone",
            "noise",
            "open",
            "join",
            "end",
            "close",
        )
        + ("settle", "accept", "accept", "beats", "all beats", "undecoded")
    ),
    st.sampled_from(CONNS),
    st.sampled_from(KEYS),
    st.integers(0, 9),
)


class Side:
    """Whom the bytes at one end belong to, by the rules that users read: a payload's parts to its
    announcement, with their pulls beside them; heartbeats, and what cannot be used, to their
    connection, of strangers to all strangers; every other message to itself.
    """

    def __init__(self) -> None:
        # Bytes and messages, by connection, direction and type.
        self.open: dict[tuple[object, ...], tuple[int, int]] = {}
        self.rows = Counter[tuple[object, ...]]()
        self.strangers = set[bytes]()

    def whose(self, conn: bytes) -> bytes:
        return NOBODY if conn in self.strangers else conn

    def adds(self, name: tuple[object, ...], nbytes: int) -> None:
        before, messages = self.open.get(name, (0, 0))
        self.open[name] = before + nbytes, messages + 1

    def row(
        self,
        direction: str,
        type: str,
        key: object,
        nbytes: int,
        useful: bool,
        reason: str = "",
        messages: int | None = None,
    ) -> None:
        """messages: how many, where a row is of many that belong to no task."""
        client = key.client if isinstance(key, m.Key) else -1
        if isinstance(key, m.Key) and key.purpose == "evaluate" and type in ("task", "reply"):
            type = "evaluate"
        self.rows[direction, type, client, nbytes, messages, useful, reason] += 1

    def ends(self, name: tuple[object, ...], useful: bool = False, reason: str = "") -> None:
        if name in self.open:
            _, direction, type, key = name
            nbytes, messages = self.open.pop(name)
            counted = messages if key == 0 else None
            self.row(str(direction), str(type), key, nbytes, useful, reason, counted)

    def crosses(
        self, conn: bytes, direction: m.Direction, message: m.Message, nbytes: int, stray: str
    ) -> None:
        key: m.Key | None = getattr(message, "key", None)
        type = str(message.__struct_config__.tag)
        if key is None:
            self.adds((self.whose(conn), direction, "beat", 0), nbytes)  # also one that is refused
        elif type in ("task", "reply", "part", "pull"):
            type = type if type == "pull" else {"down": "task", "up": "reply"}[direction]
            if stray:
                self.row(direction, type, key, nbytes, False, stray)
            else:
                self.adds((conn, direction, type, key), nbytes)
        else:
            self.row(direction, type, key, nbytes, False, stray)

    def close_payload(
        self, conn: bytes, way: m.Direction, key: m.Key, useful: bool, why: str
    ) -> None:
        self.ends((conn, way, {"down": "task", "up": "reply"}[way], key), useful, why)
        self.ends((conn, m.OTHER[way], "pull", key), useful, why)

    def beats_end(self, conn: bytes) -> None:
        for name in list(self.open):
            if name[0] == conn and name[3] == 0:
                self.ends(name)

    def closed(self, conn: bytes, awaited: bool) -> None:
        if conn in self.strangers:
            self.strangers.discard(conn)
            return
        self.beats_end(conn)
        for name in list(self.open):
            if name[0] == conn and not awaited:
                self.ends(name, reason="cut short")


class Crossings:
    """Two ends, and what their rows must be."""

    def __init__(self) -> None:
        self.ends = Ends(part=5)
        self.server = Side()
        self.client = Side()
        self.came: dict[bytes, int] = {}  # by connection, to the server since it was opened
        self.accepted: dict[m.Key, list[tuple[str, str, int]]] = {}  # what waits for a verdict

    def cross(self, direction: m.Direction, conn: bytes, key: m.Key, n: int) -> None:
        kinds = FROM_SERVER if direction == "down" else FROM_CLIENT
        self.message_crosses(direction, conn, *MESSAGES[kinds[n % len(kinds)]](key), n == 9)

    def message_crosses(
        self,
        direction: m.Direction,
        conn: bytes,
        message: m.Message,
        body: Body | None,
        late: bool,
    ) -> None:
        ends = self.ends
        sender = ends.client
        receiver = ends.server
        sends = self.client
        receives = self.server
        if direction == "down":
            sender, receiver = receiver, sender
            sends, receives = receives, sends
        assert sender.send([(conn, message, body)]) == [True]
        frames = ends.wire.pop()
        nbytes = framing(*map(len, frames))
        stray = "late" if late else ""
        sends.crosses(conn, direction, message, nbytes, "")
        receives.crosses(conn, direction, message, nbytes, stray)
        if direction == "up" and conn in self.came:
            self.came[conn] += nbytes
        got, got_body = receiver.receive(conn, frames)
        receiver.record_received([Incoming(conn, got, got_body, frames, stray)])

    def happens(self, what: str, conn: bytes, key: m.Key, n: int) -> None:
        ends = self.ends
        server = ends.server
        if what == "down" or what == "up":
            self.cross(what, conn, key, n)
        elif what == "beat":
            self.message_crosses("up" if n % 3 else "down", conn, m.Alive(), None, n > 7)
        elif what == "gone":
            ends.stands = False
            kind = FROM_SERVER[n % len(FROM_SERVER)]
            assert server.send([(conn, *MESSAGES[kind](key))]) == [False]
            ends.stands = True
        elif what == "noise":
            with pytest.raises(RemoteProtocolError):
                server.receive(conn, [bytes(n)])
            self.server.adds((self.server.whose(conn), "up", "refused", 0), framing(n))
            if conn in self.came:
                self.came[conn] += framing(n)
        elif what == "open" and conn not in self.came:
            server.opened(conn, stranger=n % 2 == 0)
            ends.client.opened(conn)
            self.came[conn] = 64
            for direction, nbytes in (("up", 64), ("down", 43)):
                self.client.row(direction, "connection", None, nbytes, False)
                if n % 2 == 0:
                    self.server.strangers.add(conn)
                    self.server.adds((NOBODY, direction, "connection", 0), nbytes)
                else:
                    name = self.server.whose(conn), direction, "connection"
                    self.server.row(*name[1:], None, nbytes, False)
        elif what == "join":
            server.joined(conn)
            self.server.strangers.discard(conn)
        elif what == "end":
            server.mark_cut(conn)
        elif what == "close":
            server.closed(conn, awaited=n % 2 == 0, round=n)
            self.server.closed(conn, awaited=n % 2 == 0)
            ends.client.closed(conn)
            self.client.closed(conn, awaited=False)
        elif what == "settle":
            way: m.Direction = "up" if n % 2 else "down"
            why = "" if n > 5 else "late"
            for link, side in ((server, self.server), (ends.client, self.client)):
                link.close_payloads(conn, way, [key], n > 5, why)
                side.close_payload(conn, way, key, n > 5, why)
        elif what == "accept":
            other = CONNS[n % 2]
            server.journal.note(Accepted(reply(key=key), conn, other))
            names: list[tuple[object, ...]] = [(other, "up", "reply", key)]
            names += [(other, "down", "pull", key), (conn, "down", "task", key)]
            names.append((conn, "up", "pull", key))
            bill = self.accepted.setdefault(key, [])
            for name in names:
                if name in self.server.open:
                    bill.append((str(name[1]), str(name[2]), self.server.open.pop(name)[0]))
            if n > 5:
                self.judge(key, "left out" if n == 6 else "")
        elif what == "beats":
            server.close_counted(conn, round=n)
            self.server.beats_end(conn)
        elif what == "all beats":
            server.close_all_counted(n)
            together = Counter[tuple[str, str]]()
            count = Counter[tuple[str, str]]()
            for name in list(self.server.open):
                if name[3] == 0 and name[0] != NOBODY:
                    nbytes, messages = self.server.open.pop(name)
                    together[str(name[1]), str(name[2])] += nbytes
                    count[str(name[1]), str(name[2])] += messages
            for (direction, type), nbytes in together.items():
                messages = count[direction, type]
                self.server.row(direction, type, None, nbytes, False, messages=messages)
        elif what == "undecoded" and conn in self.came:
            server.undecoded(conn, self.came.pop(conn) + n)
            if conn in self.server.strangers and n:
                self.server.adds((NOBODY, "up", "refused", 0), n)
            elif n:
                self.server.row("up", "connection", None, n, False, "not decoded")

    def judge(self, key: m.Key, why: str) -> None:
        self.ends.server.journal.note(Verdict([(key, why, None)]))
        for direction, type, nbytes in self.accepted.pop(key):
            self.server.row(direction, type, key, nbytes, not why, why)


def found(rows: list[dict]) -> Counter[tuple[object, ...]]:
    names = ("direction", "type", "client", "bytes", "count", "useful")
    return Counter((*[r.get(name) for name in names], r.get("reason", "")) for r in each(rows))


@settings(deadline=None, max_examples=200)
@given(st.tuples(*[st.integers(0, 1)] * 2), st.lists(HAPPENS, min_size=10, max_size=50))
def test_whatever_crosses_is_counted_in_the_row_that_it_belongs_to_at_each_end(opened, happened):
    crossings = Crossings()
    ends = crossings.ends
    begun = [("open", conn, KEY, n) for conn, n in zip(CONNS, opened)]
    for one in [*begun, *happened]:
        crossings.happens(*one)
    for conn in (*CONNS, NOBODY):
        for link, side in ((ends.server, crossings.server), (ends.client, crossings.client)):
            link.joined(conn)
            side.strangers.discard(conn)
            link.closed(conn)
            side.closed(conn, awaited=False)
            link.close_counted(conn)
    for key in sorted(crossings.accepted):
        crossings.judge(key, "")
    assert found(ends.down_rows) == crossings.server.rows
    assert found(ends.up_rows) == crossings.client.rows
    for link in (ends.server, ends.client):
        book = link.journal.book
        assert (book.open_accounts, book.waiting, book.forms) == ({}, {}, {})
    for row in each(ends.down_rows + ends.up_rows):
        assert row["bytes"] == row["envelope"] + sum(row["kinds"].values())
        assert not (row["useful"] and row.get("lost"))
