from __future__ import annotations

import os

import pytest
import torch

from fednet.errors import RemoteProtocolError, StateError
from fednet.files import digest
from fednet.journal.events import Accepted
from fednet.server import inbox
from fednet.tensors import Layout, Tensors
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import WHOLE, Field, Key
from tests.books import journal_in

KEY = Key(1, 0, 0, 3)
CONNS = (b"down", b"up")
LARGE = bytes(range(256)) * (1 + inbox.SMALL_BYTES // 256)


def inbox_in(folder, decode=lambda replies, bodies: [None] * len(replies)):
    return inbox.Inbox(folder, journal_in(folder), decode)


def whole(spool, key, data, part=None):
    if part is None:
        return taken(spool, key, data, memoryview(data))
    for at in range(0, max(1, len(data)), part):
        spool.store(key, at, memoryview(data)[at : at + part], len(data))
    return taken(spool, key, data)


def taken(spool, key, data, body=None):
    form = [Field("x", "state", len(data), len(data))]
    message = m.Reply(key=key, form=form, size=len(data), check=digest([data]))
    return taken_one(spool, message, body)


def taken_one(spool, message, body=None):
    (found,) = spool.take([(Accepted(message, *CONNS), body)])
    if isinstance(found, Exception):
        raise found
    return found


def logged(spool, key, data, part=None):
    reply = whole(spool, key, data, part)
    spool._journal.flush()
    return reply


def by_an_earlier_server(folder, data=b"sealed"):
    logged(inbox_in(folder), KEY, data)
    return inbox_in(folder)


def found(spool, round=1):
    return {name: bytes(reply.body()) for name, reply in spool.earlier_replies(round, 0).items()}


# -- coming in -------------------------------------------------------------------------------------


def test_an_upload_begun_again_replaces_what_was_there_of_it(tmp_path):
    spool = inbox_in(tmp_path)
    spool.store(KEY, 0, memoryview(b"old"), 5)
    spool.store(KEY, 0, memoryview(b"ne"), 3)
    spool.store(KEY, 2, memoryview(b"w"), 3)
    assert bytes(taken(spool, KEY, b"new").body()) == b"new"


@pytest.mark.parametrize("data", [b"", b"payload", LARGE], ids=["none", "small", "large"])
@pytest.mark.parametrize("part", [None, 3000])
def test_who_writes_to_a_payload_does_not_change_what_is_read_later(tmp_path, data, part):
    reply = logged(inbox_in(tmp_path), KEY, data, part)
    body = reply.body()
    body[:] = bytes(len(data))
    assert bytes(reply.body()) == data


def test_a_file_is_not_written_over_while_something_holds_its_bytes(tmp_path):
    spool, other = inbox_in(tmp_path), LARGE[::-1]
    body = logged(spool, KEY, LARGE, part=1000).body()
    again = logged(spool, KEY, other, part=1000).body()
    spool.clear(1)
    logged(spool, Key(2, 0, 0, 3), bytes(len(LARGE)), part=1000)
    assert (bytes(body), bytes(again)) == (LARGE, other)


@pytest.mark.parametrize(("data", "kept"), [(b"payload", True), (LARGE, False)])
def test_a_decoded_payload_is_taken_once_and_one_that_is_its_file_is_not_kept(tmp_path, data, kept):
    payload = object()
    spool = inbox_in(tmp_path, lambda replies, bodies: [payload])
    reply = logged(spool, KEY, data, part=None)
    assert reply.take_payload() is (payload if kept else None)
    assert reply.take_payload() is None
    assert bytes(reply.body()) == data


def test_what_was_decoded_of_a_large_compressed_payload_is_kept(tmp_path):
    payload = object()
    spool = inbox_in(tmp_path, lambda replies, bodies: [payload])
    spool.store(KEY, 0, memoryview(LARGE), len(LARGE))
    form = [Field("x", "delta", len(LARGE), 4 * len(LARGE))]
    message = m.Reply(key=KEY, form=form, size=len(LARGE), check=digest([LARGE]))
    assert taken_one(spool, message).take_payload() is payload


def test_of_what_a_client_reports_only_finite_numbers_are_kept(tmp_path):
    """JSON has no others: a log with them could not be read."""
    reported = {"loss": float("nan"), "drift": 0.5, "norm": float("inf"), "least": -float("inf")}
    spool = inbox_in(tmp_path)
    message = m.Reply(key=KEY, form=[], size=0, check=digest([]), reported=reported)
    here = taken_one(spool, message, memoryview(b""))
    spool._journal.flush()
    there = inbox_in(tmp_path).earlier_replies(1, 0)[3]
    assert here.message.reported == there.message.reported == {"drift": 0.5}


@pytest.mark.parametrize("freed_by", ["taking", "leaving out", "the end of the round"])
def test_decoded_payloads_are_kept_as_long_as_there_is_room(tmp_path, monkeypatch, freed_by):
    monkeypatch.setattr(inbox, "HELD_BYTES", 7)
    spool = inbox_in(tmp_path, lambda replies, bodies: [object()])
    first, second = (logged(spool, Key(1, 0, 0, c), b"payload") for c in (1, 2))
    assert first.payload is not None
    assert second.payload is None
    assert bytes(second.body()) == b"payload"
    if freed_by == "taking":
        first.take_payload()
    elif freed_by == "leaving out":
        first.let_go()
    else:
        spool.clear(1)
    assert logged(spool, Key(2, 0, 0, 3), b"payload").payload is not None


def test_a_reply_that_is_refused_leaves_nothing(tmp_path):
    def refuse(reply, body):
        raise RemoteProtocolError("not as declared")

    spool = inbox_in(tmp_path, refuse)
    for data in (b"payload", LARGE):
        with pytest.raises(RemoteProtocolError):
            whole(spool, KEY, data)
    spool._journal.flush()
    assert list(tmp_path.glob("round-1/*.bin")) == []
    assert inbox_in(tmp_path).earlier_replies(1, 0) == {}


def test_of_replies_that_come_together_only_the_one_that_cannot_be_used_is_refused(tmp_path):
    def decode(replies, bodies):
        if b"NaN" in bodies:
            raise RemoteProtocolError("not finite")
        return [bytes(body) for body in bodies]

    spool = inbox_in(tmp_path, decode)
    arrived = []
    for client, data in enumerate([b"one", b"NaN", b"two", b"bad", b"six"]):
        check = digest([b"another" if data == b"bad" else data])
        form = [Field("x", "state", 3, 3)]
        message = m.Reply(key=Key(1, 0, 0, client), form=form, size=3, check=check)
        arrived.append((Accepted(message, *CONNS), memoryview(data)))
    results = spool.take(arrived)
    assert [str(r) for r in results if isinstance(r, Exception)] == [
        "not finite",
        "the payload was damaged on its way",
    ]
    assert [results[c].take_payload() for c in (0, 2, 4)] == [b"one", b"two", b"six"]
    spool._journal.flush()
    assert found(inbox_in(tmp_path)) == {0: b"one", 2: b"two", 4: b"six"}


# -- the disk --------------------------------------------------------------------------------------


def test_a_later_round_writes_over_the_files_of_an_earlier_one(tmp_path):
    spool = inbox_in(tmp_path)
    logged(spool, KEY, LARGE + b"longer")
    there = (tmp_path / "round-1" / "0-3-train.bin").stat().st_ino
    spool.clear(1)
    spool.store(Key(2, 0, 0, 5), 0, memoryview(LARGE), len(LARGE))
    assert spool.earlier_replies(2, 0) == {}  # not checked yet
    later = taken(spool, Key(2, 0, 0, 5), LARGE)
    assert (os.stat(later.path).st_ino, bytes(later.body())) == (there, LARGE)
    assert list(spool.earlier_replies(2, 0)) == [5]


def test_the_files_to_write_over_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(inbox, "SPARE_BYTES", 3 * len(LARGE))
    spool = inbox_in(tmp_path)
    for round in (1, 2):
        for client in range(5):
            logged(spool, Key(round, 0, 0, client), LARGE)
        spool.clear(round)
        assert len(list((tmp_path / "spare").iterdir())) == 3


# -- the next server -------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [b"", b"sealed", LARGE], ids=["none", "small", "large"])
def test_what_is_on_record_is_found_by_the_next_server_as_it_was(tmp_path, data):
    replies = by_an_earlier_server(tmp_path, data).earlier_replies(1, 0)
    assert list(replies) == [3]
    reply = replies[3]
    form = (Field("x", "state", len(data), len(data)),)
    assert (bytes(reply.body()), reply.message.key, tuple(reply.message.form)) == (data, KEY, form)


def test_a_file_that_is_being_written_over_is_not_found(tmp_path):
    spool, again, other = by_an_earlier_server(tmp_path, LARGE), Key(1, 0, 1, 3), LARGE[::-1]
    assert spool.earlier_replies(1, 0)
    # Of another attempt, of which the rest may never come.
    spool.store(again, 0, memoryview(other)[:4], len(LARGE))
    assert inbox_in(tmp_path).earlier_replies(1, 0) == {}
    spool.store(again, 4, memoryview(other)[4:], len(LARGE))
    taken(spool, again, other)
    spool._journal.flush()
    assert found(inbox_in(tmp_path)) == {3: other}


def test_a_reply_that_still_counts_outlives_its_round(tmp_path):
    """As of an asynchronous run, where a later update takes it: the next server finds it."""
    spool = inbox_in(tmp_path)
    for key in (KEY, Key(1, 0, 0, 4)):
        logged(spool, key, LARGE, part=1000)
    spool.clear(1, [(1, KEY.client)])
    assert found(inbox_in(tmp_path)) == {KEY.client: LARGE}


def test_a_file_that_is_still_written_to_is_not_given_to_another(tmp_path):
    """A reply of a round that is over, which has not been called off yet."""
    spool, late, half = inbox_in(tmp_path), Key(1, 0, 0, 3), len(LARGE) // 2
    spool.store(late, 0, memoryview(LARGE[:half]), len(LARGE))
    spool.clear(1)
    logged(spool, Key(2, 0, 0, 4), LARGE[::-1])
    spool.store(late, half, memoryview(LARGE[half:]), len(LARGE))
    assert list(inbox_in(tmp_path).earlier_replies(2, 0)) == [4]


@pytest.mark.parametrize("left", [None, b"", LARGE[:3], LARGE[::-1]])
def test_a_large_payload_that_was_lost_cut_short_or_is_another_is_not_found(left, tmp_path):
    by_an_earlier_server(tmp_path, LARGE)
    payload = tmp_path / "round-1" / "0-3-train.bin"
    if left is None:
        payload.unlink()
    else:  # the last as after a power cut: the file's place on the disk was another reply's
        payload.write_bytes(left)
    spool = inbox_in(tmp_path)
    assert spool.earlier_replies(1, 0) == {}
    # The same bytes, in answer to another task, and never checked.
    spool.store(Key(1, 0, 1, 3), 0, memoryview(LARGE), len(LARGE))
    assert inbox_in(tmp_path).earlier_replies(1, 0) == {}


# -- in one process --------------------------------------------------------------------------------
@pytest.mark.parametrize("freed_by", ["the end of the round", "leaving out", "refusing"])
def test_in_one_process_large_replies_stay_in_memory_while_there_is_room(
    tmp_path, monkeypatch, freed_by
):
    x = Tensors.zeros(Layout.of(torch.nn.Linear(200, 200)))
    x.vector.normal_()
    size = x.layout.nbytes
    monkeypatch.setattr(inbox, "HELD_BYTES", int(2.5 * size))
    refused = []

    def decode(replies, bodies):
        if refused:
            raise RemoteProtocolError("not as declared")
        return [None]

    spool = inbox_in(tmp_path, decode)

    def reply_of(key):
        message = m.Reply(key=key, form=[Field("x", "state", size, size)], size=size)
        reply = taken_one(spool, message, Body([x]).crossing(WHOLE))
        spool._journal.flush()
        return reply

    replies = [reply_of(Key(1, 0, 0, client)) for client in range(3)]
    assert [len(list(tmp_path.glob(f"round-1/0-{c}-train.bin"))) for c in range(3)] == [0, 0, 1]
    for reply in replies[:2]:
        assert reply.body().values == [x]
    assert bytes(replies[2].body()) == bytes(Body([x]).whole())
    assert list(spool.earlier_replies(1, 0)) == [2]
    if freed_by == "the end of the round":
        spool.clear(1)
    elif freed_by == "leaving out":
        replies[0].let_go()
        assert replies[0].data is None
    else:
        replies[0].let_go()
        refused.append(1)
        with pytest.raises(RemoteProtocolError):
            reply_of(Key(2, 0, 0, 1))
        refused.clear()
    reply_of(Key(2, 0, 0, 0))
    assert not list(tmp_path.glob("round-2/*.bin"))


@pytest.mark.parametrize("size", [100, len(LARGE)])
def test_an_upload_of_which_no_more_comes_is_forgotten(tmp_path, size):
    spool = inbox_in(tmp_path)
    spool.store(KEY, 0, memoryview(bytes(50)), size)
    spool.abandon(KEY)
    with pytest.raises(KeyError):
        taken(spool, KEY, bytes(size))
    assert spool.earlier_replies(1, 0) == {}


def test_a_reply_that_turned_out_to_be_unusable_is_not_found(tmp_path):
    spool = inbox_in(tmp_path)
    spool.withdraw(logged(spool, KEY, b"payload").message.key)
    assert inbox_in(tmp_path).earlier_replies(1, 0) == {}


def test_nothing_to_write_over_is_left_when_a_run_has_ended(tmp_path):
    spool = inbox_in(tmp_path)
    logged(spool, KEY, LARGE)
    spool.clear(1)
    assert list((tmp_path / "spare").iterdir())
    spool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize("data", [b"payload", LARGE], ids=["small", "large"])
def test_a_payload_that_was_damaged_on_its_way_is_refused_and_leaves_nothing(tmp_path, data):
    spool = inbox_in(tmp_path)
    damaged = memoryview(data[:-1] + b"?")
    with pytest.raises(RemoteProtocolError, match="damaged on its way"):
        taken(spool, KEY, data, damaged)
    spool._journal.flush()
    assert spool.earlier_replies(1, 0) == {}
    assert not list(tmp_path.glob("round-1/*.bin"))


def test_bytes_at_another_place_than_the_next_are_an_error(tmp_path):
    spool = inbox_in(tmp_path)
    spool.store(KEY, 0, memoryview(b"one"), 9)
    with pytest.raises(StateError, match="3 bytes are there, the next come at 6"):
        spool.store(KEY, 6, memoryview(b"two"), 9)


@pytest.mark.parametrize("size", [m.PART - 1, m.PART, m.PART + 1])
def test_a_payload_of_about_one_part_is_found_as_it_was(tmp_path, size):
    data = bytes(range(251)) * (size // 251 + 1)
    logged(inbox_in(tmp_path), KEY, data[:size], part=m.PART)
    assert found(inbox_in(tmp_path)) == {3: data[:size]}


def test_a_reply_that_came_again_after_it_was_revoked_is_found(tmp_path):
    """Also by a server that begins between the two."""
    spool, again = inbox_in(tmp_path), Key(1, 0, 1, 3)
    spool.withdraw(logged(spool, KEY, b"first").message.key)
    for later in (spool, inbox_in(tmp_path)):
        assert later.earlier_replies(1, 0) == {}
    logged(inbox_in(tmp_path), again, b"second")
    replies = inbox_in(tmp_path).earlier_replies(1, 0)
    assert [reply.message.key for reply in replies.values()] == [again]


def test_a_reply_to_one_exchange_is_not_found_by_another(tmp_path):
    spool, second = inbox_in(tmp_path), Key(1, 1, 0, 3)
    logged(spool, KEY, b"first")
    logged(spool, second, b"second")
    for phase, data in ((0, b"first"), (1, b"second"), (2, None)):
        replies = inbox_in(tmp_path).earlier_replies(1, phase)
        assert [bytes(r.body()) for r in replies.values()] == [data] * (data is not None)
