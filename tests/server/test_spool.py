from __future__ import annotations

import os

import pytest

from fednet.errors import StateError
from fednet.files import digest
from fednet.server.spool import Spool
from fednet.wire.messages import Field, Key

KEY = Key(1, 0, 0, 3)


def whole(spool, key, data):
    spool.store(key, 0, memoryview(data))
    return ended(spool, key, data)


def ended(spool, key, data):
    return spool.whole(
        key,
        (Field("x", "state", len(data), len(data)),),
        digest([data]),
        "",
        False,
        (b"", ""),
        0.0,
        {},
    )


def test_an_upload_of_which_no_more_comes_is_forgotten(tmp_path):
    spool = Spool(tmp_path)
    spool.store(KEY, 0, memoryview(bytes(100)))
    assert spool._open
    spool.abandon(KEY)
    assert not spool._open
    assert spool.found(1, 0) == {}


def test_an_upload_begun_anew_replaces_what_was_there_of_it(tmp_path):
    spool = Spool(tmp_path)
    spool.store(KEY, 0, memoryview(b"older"))
    spool.store(KEY, 0, memoryview(b"ne"))
    spool.store(KEY, 2, memoryview(b"w"))
    assert bytes(spool.whole(KEY, (), b"", "", False, (b"", ""), 0.0, {}).body()) == b"new"


def test_a_later_round_writes_over_the_files_of_an_earlier_one(tmp_path):
    spool = Spool(tmp_path)
    spool.seal(whole(spool, KEY, b"a longer payload"))
    there = (tmp_path / "round-1" / "0-3-train.bin").stat().st_ino
    spool.clear(1)
    later = whole(spool, Key(2, 0, 0, 5), b"short")
    assert (os.stat(later.path).st_ino, bytes(later.body())) == (there, b"short")
    assert spool.found(2, 0) == {}  # not sealed
    spool.seal(later)
    assert list(spool.found(2, 0)) == [(5, "train")]


def test_what_is_still_written_to_is_not_written_over(tmp_path):
    spool = Spool(tmp_path)
    spool.store(KEY, 0, memoryview(b"late"))
    spool.clear(1)
    other = whole(spool, Key(2, 0, 0, 5), b"reply")
    spool.store(KEY, 4, memoryview(b"r still"))
    assert bytes(other.body()) == b"reply"


def test_a_payload_does_not_change_when_its_file_is_written_over(tmp_path):
    spool = Spool(tmp_path)
    first = whole(spool, KEY, b"first")
    body = first.body()
    spool.clear(1)
    whole(spool, Key(2, 0, 0, 3), b"later")
    assert bytes(body) == b"first"


def test_a_glance_shows_what_a_reading_reads(tmp_path):
    spool = Spool(tmp_path)
    assert bytes(whole(spool, KEY, b"payload").glance()) == b"payload"
    assert bytes(whole(spool, KEY, b"").glance()) == b""


def test_nothing_to_write_over_is_left_when_a_run_has_ended(tmp_path):
    spool = Spool(tmp_path)
    whole(spool, KEY, b"payload")
    spool.clear(1)
    assert list((tmp_path / "spare").iterdir())
    spool.close()
    assert list(tmp_path.iterdir()) == []


def sealed_by_an_earlier_server(folder):
    spool = Spool(folder)
    spool.seal(whole(spool, KEY, b"sealed"))
    return Spool(folder)


def test_what_was_sealed_is_found_by_the_next_server_as_it_was(tmp_path):
    found = sealed_by_an_earlier_server(tmp_path).found(1, 0)
    assert {name: (bytes(r.body()), r.key, r.form) for name, r in found.items()} == {
        (3, "train"): (b"sealed", KEY, (Field("x", "state", 6, 6),))
    }


def test_nothing_vouches_for_a_payload_that_is_being_written_over(tmp_path):
    spool = sealed_by_an_earlier_server(tmp_path)
    assert spool.found(1, 0)
    # Of another attempt, of which the rest may never come.
    spool.store(Key(1, 0, 1, 3), 0, memoryview(b"seal"))
    assert Spool(tmp_path).found(1, 0) == {}
    spool.store(Key(1, 0, 1, 3), 4, memoryview(b"2!"))
    spool.seal(ended(spool, Key(1, 0, 1, 3), b"seal2!"))
    assert bytes(Spool(tmp_path).found(1, 0)[3, "train"].body()) == b"seal2!"


def test_a_seal_that_was_torn_counts_for_nothing_and_spoils_none_after_it(tmp_path):
    sealed_by_an_earlier_server(tmp_path)
    with (tmp_path / "round-1" / "seals.jsonl").open("ab") as book:
        book.write(b'{"key":[1,0,0,4,"tra')
    spool = Spool(tmp_path)
    assert list(spool.found(1, 0)) == [(3, "train")]
    spool.seal(whole(spool, Key(1, 0, 0, 5), b"another"))
    assert sorted(Spool(tmp_path).found(1, 0)) == [(3, "train"), (5, "train")]


def test_a_whole_line_that_is_no_seal_is_told_of(tmp_path):
    sealed_by_an_earlier_server(tmp_path)
    with (tmp_path / "round-1" / "seals.jsonl").open("ab") as book:
        book.write(b"5\n")
    with pytest.raises(StateError, match=r"seals\.jsonl:2: not what was written there"):
        Spool(tmp_path).found(1, 0)


def test_a_payload_cut_short_is_not_found(tmp_path):
    sealed_by_an_earlier_server(tmp_path)
    os.truncate(tmp_path / "round-1" / "0-3-train.bin", 3)
    assert Spool(tmp_path).found(1, 0) == {}


def test_a_payload_that_is_not_what_was_received_is_not_found(tmp_path):
    sealed_by_an_earlier_server(tmp_path)
    # As after a power cut: the file's place on the disk was another reply's.
    (tmp_path / "round-1" / "0-3-train.bin").write_bytes(b"spared")
    assert Spool(tmp_path).found(1, 0) == {}


@pytest.mark.parametrize("left", [None, b"sea"])
def test_a_seal_whose_payload_was_lost_does_not_vouch_for_the_next_one(left, tmp_path):
    sealed_by_an_earlier_server(tmp_path)
    payload = tmp_path / "round-1" / "0-3-train.bin"
    payload.unlink() if left is None else payload.write_bytes(left)
    spool = Spool(tmp_path)
    assert spool.found(1, 0) == {}
    # The same bytes, in answer to another task, and never sealed.
    whole(spool, Key(1, 0, 1, 3), b"sealed")
    assert Spool(tmp_path).found(1, 0) == {}
