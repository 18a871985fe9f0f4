"""The files of large replies, case by case; what holds in any order is in `test_inbox`."""

from __future__ import annotations

import os
from types import SimpleNamespace

from fednet.errors import RemoteProtocolError
from fednet.files import digest
from fednet.journal.events import Accepted
from fednet.server import inbox
from fednet.server.clients import Clients
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.messages import Field, Key
from tests.books import journal_in

KEY = Key(1, 0, 0, 3)
CONNS = (b"down", b"up")
LARGE = bytes(range(256)) * (1 + inbox.SMALL_BYTES // 256)


def inbox_in(folder, decode=lambda replies, bodies: [None] * len(replies)):
    return inbox.Inbox(folder, journal_in(folder), decode)


def whole(spool, key, data, part=None):
    if part is None:
        return taken(spool, key, data, Body([data]))
    for at in range(0, max(1, len(data)), part):
        spool.store(key, at, Body([memoryview(data)[at : at + part]]))
    return taken(spool, key, data)


def taken(spool, key, data, body=None):
    form = [Field("x", "state", len(data), len(data))]
    message = m.Reply(key=key, form=form, size=len(data), check=digest([data]))
    return taken_one(spool, message, body)


def taken_one(spool, message, body=None):
    (found,) = spool.accept([(Accepted(message, *CONNS), body)])
    if isinstance(found, Exception):
        raise found
    return found


def logged(spool, key, data, part=None):
    reply = whole(spool, key, data, part)
    spool._journal.flush()
    return reply


def found(spool, round=1):
    return {name: bytes(reply.body()) for name, reply in spool.earlier_replies(round, 0).items()}


def test_a_file_is_not_written_over_while_something_holds_its_bytes(tmp_path):
    spool = inbox_in(tmp_path)
    other = LARGE[::-1]
    body = logged(spool, KEY, LARGE, part=1000).body().to_bytes()
    again = logged(spool, KEY, other, part=1000).body().to_bytes()
    spool.clear(1)
    logged(spool, Key(2, 0, 0, 3), bytes(len(LARGE)), part=1000)
    assert (bytes(body), bytes(again)) == (LARGE, other)


def test_of_replies_that_come_together_only_the_one_that_cannot_be_used_is_refused(tmp_path):
    def decode(replies, bodies):
        if b"NaN" in map(bytes, bodies):
            raise RemoteProtocolError("not finite")
        return [bytes(body) for body in bodies]

    spool = inbox_in(tmp_path, decode)
    arrived = []
    for client, data in enumerate([b"one", b"NaN", b"two", b"bad", b"six"]):
        check = digest([b"another" if data == b"bad" else data])
        form = [Field("x", "state", 3, 3)]
        message = m.Reply(key=Key(1, 0, 0, client), form=form, size=3, check=check)
        arrived.append((Accepted(message, *CONNS), Body([data])))
    results = spool.accept(arrived)
    assert [str(r) for r in results if isinstance(r, Exception)] == [
        "not finite",
        "the payload was damaged on its way",
    ]
    assert [results[c].take_payload() for c in (0, 2, 4)] == [b"one", b"two", b"six"]
    spool._journal.flush()
    assert found(inbox_in(tmp_path)) == {0: b"one", 2: b"two", 4: b"six"}


def test_a_later_round_writes_over_the_files_of_an_earlier_one(tmp_path):
    spool = inbox_in(tmp_path)
    logged(spool, KEY, LARGE + b"longer")
    there = (tmp_path / "round-1" / "0-3-train.bin").stat().st_ino
    spool.clear(1)
    spool.store(Key(2, 0, 0, 5), 0, Body([LARGE]))
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
        gone = spool.clear(round)
        assert len(gone) == 2
        for path in gone:
            os.unlink(path)
        assert len(list((tmp_path / "spare").iterdir())) == 3


def test_what_is_too_much_to_keep_is_deleted_while_clients_are_served(tmp_path):
    path = tmp_path / "large.bin"

    class IO:
        inbox = SimpleNamespace(clear=lambda up_to, under_way: [str(path)])

        def __enter__(self):
            path.touch()
            return self

        def __exit__(self, *why):
            assert path.exists()  # it is not deleted yet

    clients = Clients(IO(), None, None, None, None)
    clients.forget(3)
    assert not path.exists()
