from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.errors import RemoteProtocolError
from fednet.journal.journal import Journal
from fednet.journal.link import NOBODY, Link, split
from fednet.protocol.transfers import Receiving
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.books import open_accounts

KEY = m.Key(2, 0, 1, 5)
FORM = [m.Field("x", "state", 8, 16), m.Field("run", "statistics", 4, 4)]


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
        self.client.send(b"c", message, body)
        frames = self.wire.pop()
        got, got_body = self.server.receive(b"c", frames)
        assert got == message
        self.server.record_received(b"c", got, got_body, frames, stray)
        return sum(len(f) + 1 for f in frames)


def reply(size=12, key=KEY) -> m.Reply:
    return m.Reply(key=key, form=FORM, size=size)


@pytest.mark.parametrize(("purpose", "type"), [("train", "reply"), ("evaluate", "evaluate")])
def test_parts_share_the_row_of_their_announcement_and_pulls_have_one(purpose, type):
    ends, key = Ends(part=5), m.Key(2, 0, 1, 5, purpose)
    n = ends.up(reply(key=key))
    n += sum(
        ends.up(m.Part(key=key, index=i), memoryview(bytes(size)))
        for i, size in ((0, 5), (1, 5), (2, 2))
    )
    ends.server.send(b"c", m.Pull(key=key, first=0, count=3))
    ends.server.settle(b"c", "up", key, True)
    reply_row, pull_row = ends.down_rows
    kinds = {"state": 8, "statistics": 4}
    wanted = {"type": type, "bytes": n, "kinds": kinds, "raw_bytes": 20}
    assert wanted.items() <= reply_row.items()
    wanted = {"type": "pull", "direction": "down", "round": 2, "useful": True}
    assert wanted.items() <= pull_row.items()
    assert ends.server.journal.book.open == {}
    assert ends.server.journal.book.forms == {}


def test_doubled_reply_leaves_the_account_of_the_first_alone():
    ends = Ends()
    n = ends.up(reply(), memoryview(bytes(12)))
    assert ends.up(reply(), memoryview(bytes(12)), "doubled") == n
    assert [(r["useful"], r["reason"], r["bytes"]) for r in ends.down_rows] == [
        (False, "doubled", n)
    ]
    ends.server.settle(b"c", "up", KEY, True)
    assert (ends.down_rows[1]["useful"], ends.down_rows[1]["bytes"]) == (True, n)


def test_a_part_that_comes_twice_has_its_kinds_in_a_row_of_its_own():
    ends = Ends(part=5)
    n = ends.up(reply()) + ends.up(m.Part(key=KEY, index=1), memoryview(bytes(5)))
    again = ends.up(m.Part(key=KEY, index=1), memoryview(bytes(5)), "doubled")
    ends.server.settle(b"c", "up", KEY, True)
    kinds = {"state": 3, "statistics": 2}
    found = [(r["bytes"], r["kinds"], r.get("reason")) for r in ends.down_rows]
    assert found == [(again, kinds, "doubled"), (n, kinds, None)]


def test_what_cannot_be_decoded_is_billed_as_refused_in_one_row():
    ends = Ends()
    for noise in (b"abc", b"defgh"):
        with pytest.raises(RemoteProtocolError):
            ends.server.receive(b"c", [noise])
    ends.server.settle_counted(b"c", worker="w")
    (row,) = ends.down_rows
    wanted = {"type": "refused", "bytes": 4 + 6, "count": 2, "useful": False, "worker": "w"}
    assert wanted.items() <= row.items()


def test_heartbeats_are_counted_by_connection_and_not_by_client():
    ends = Ends()
    n = [ends.up(m.Progress(client=i)) for i in (3, 4)]
    ends.server.settle_counted(b"c", round=7)
    (row,) = ends.down_rows
    wanted = {"type": "beat", "bytes": sum(n), "count": 2, "client": -1, "round": 7}
    assert wanted.items() <= row.items()


def test_heartbeats_of_all_connections_are_one_row_of_a_round_each_way():
    ends = Ends()
    alive, doing = m.Alive(), m.Progress(client=3)
    sizes = []
    for conn, message in ((b"c", alive), (b"d", doing), (b"d", alive)):
        ends.server.record_received(conn, message, None, [encode(message)])
        sizes.append(framing(len(encode(message))))
    ends.server.send(b"d", alive)
    ends.server.settle_all_counted(7)
    up, down = ends.down_rows
    wanted = {"type": "beat", "direction": "up", "count": 3, "bytes": sum(sizes), "round": 7}
    assert wanted.items() <= up.items()
    assert (down["direction"], down["count"], down["bytes"]) == ("down", 1, sizes[0])
    assert not open_accounts(ends.server.journal)
    ends.server.settle_all_counted(8)
    assert len(ends.down_rows) == 2


def test_nothing_is_billed_for_a_connection_that_is_gone():
    ends = Ends()
    ends.stands = False
    assert ends.client.send(b"c", m.Leave()) is False
    assert ends.up_rows == []
    assert ends.client.journal.book.crossed == {"up": 0, "down": 0}


def test_closing_settles_what_is_left_and_marks_what_may_be_lost():
    ends = Ends()
    ends.up(reply(), memoryview(bytes(12)))
    ends.up(reply(key=m.Key(2, 0, 1, 6)), memoryview(bytes(12)))
    ends.server.send(b"c", m.Task(key=KEY, form=FORM, size=12), memoryview(bytes(12)))
    ends.server.closed(b"c", awaited=True)
    assert ends.down_rows == []
    ends.server.closed(b"c")
    assert sorted(
        (r["direction"], r["client"], r["useful"], r.get("lost", False)) for r in ends.down_rows
    ) == [("down", 5, False, True), ("up", 5, False, False), ("up", 6, False, False)]
    assert ends.server.journal.book.open == {}


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
    kinds, raw = {}, 0
    for start in range(0, whole, part):
        found, more = split(form, start, min(whole, start + part))
        assert sum(found.values()) == min(part, whole - start)
        raw += more
        for kind, n in found.items():
            kinds[kind] = kinds.get(kind, 0) + n
    assert kinds == split(form, 0, whole)[0]
    assert raw == sum(f.raw for f in form)


def test_a_payload_in_one_piece_is_billed_as_the_parts_that_it_would_be_over_a_network():
    """Of the longest the ninth part's number takes no more bytes in a header; of 130 parts it
    does.
    """
    for size in (m.PART + 1, 9 * m.PART, 130 * m.PART):
        form = [m.Field("x", "state", size, size)]
        message = m.Reply(run="r", inc=1, key=KEY, form=form, size=size)
        whole, cut = Ends(m.WHOLE), Ends()
        body = memoryview(bytes(size))
        whole.up(message, body)
        cut.up(message)
        window = Receiving(size, m.PART)
        for index in range(-(-size // m.PART)):
            granted = window.grant()
            if granted is not None:
                pull = m.Pull(run="r", inc=1, key=KEY, first=granted[0], count=granted[1])
                cut.server.send(b"c", pull)
                cut.client.record_received(b"c", pull, None, cut.wire.pop())
            part = body[index * m.PART : (index + 1) * m.PART]
            cut.up(m.Part(run="r", inc=1, key=KEY, index=index), part)
            window.take(index, part)
        for ends in (whole, cut):
            for link in (ends.client, ends.server):
                link.settle(b"c", "up", KEY, True)
        assert whole.up_rows == cut.up_rows
        assert whole.down_rows == cut.down_rows
        assert sum(row["kinds"].get("state", 0) for row in whole.down_rows) == size


def test_connection_is_billed_both_ways():
    ends = Ends()
    ends.server.opened(b"c")
    ends.client.opened(b"c")
    assert (
        sorted((r["direction"], r["bytes"]) for r in ends.up_rows)
        == sorted((r["direction"], r["bytes"]) for r in ends.down_rows)
        == [("down", 43), ("up", 64)]
    )


def test_strangers_have_one_row_of_each_kind_together_however_many_they_are():
    """Also of what came over their connections and was no message."""
    ends = Ends()
    for conn in (b"1", b"2", b"3"):
        ends.server.opened(conn, stranger=True)
        ends.server.undecoded(conn, 64 + 500, round=1, worker="")
        ends.server.closed(conn, awaited=True)
    assert ends.down_rows == []
    ends.server.settle_counted(NOBODY)
    found = [(r["direction"], r["type"], r["count"], r["bytes"]) for r in ends.down_rows]
    assert sorted(found) == [
        ("down", "connection", 3, 3 * 43),
        ("up", "connection", 3, 3 * 64),
        ("up", "refused", 3, 3 * 500),
    ]


def test_a_connection_that_ends_has_each_byte_that_came_in_one_row():
    ends, where = Ends(), {"round": 3, "worker": "w"}
    ends.server.opened(b"c")
    beat = ends.up(m.Progress(client=1))
    with pytest.raises(RemoteProtocolError):
        ends.server.receive(b"c", [b"noise"])
    ends.server.undecoded(b"c", 64 + beat + 6 + 100, **where)
    ends.server.closed(b"c", awaited=True, **where)
    found = [(r["type"], r["bytes"], r.get("worker")) for r in ends.down_rows if r["round"] == 3]
    assert found == [("connection", 100, "w"), ("beat", beat, "w"), ("refused", 6, "w")]
    assert ends.server.journal.book.totals["up"] == 64 + beat + 6 + 100
