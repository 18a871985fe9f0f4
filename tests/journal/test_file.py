"""The journal on disk: what is read back of a file that was cut short, changed or written anew."""

from __future__ import annotations

import errno
import os
import random
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednet.errors import StateError
from fednet.journal import file as files
from fednet.journal.book import Row
from fednet.journal.events import (
    Accepted,
    AccountsClosed,
    Crossed,
    Event,
    Forgotten,
    Snapshot,
    Started,
)
from fednet.journal.file import JournalFile
from fednet.journal.journal import Journal
from fednet.wire.messages import Key, Reply
from tests.journal.streams import streams


def of_client(client: int) -> Crossed:
    name = b"conn", "down", "task", Key(1, 0, 0, client)
    return Crossed([name], "task", 1, {"state": 5}, 5)


def accepted(client: int, payload: bytes) -> Accepted:
    return Accepted(Reply(key=Key(1, 0, 0, client), form=[], size=len(payload)), b"a", b"b")


def written(path: Path, batches: Sequence[Sequence[tuple[Event, bytes]]]) -> list[int]:
    """Write each of these with one flush; return the sizes of the file after each."""
    file = JournalFile(path)
    list(file.read())
    sizes = [file.size]
    for batch in batches:
        for event, payload in batch:
            file.add(event, payload)
        file.flush()
        sizes.append(file.size)
    file.close()
    return sizes


def read(path: Path) -> list[Event]:
    file = JournalFile(path)
    found = list(file.read())
    file.close()
    return found


BATCHES: list[list[tuple[Event, bytes]]] = [
    [(Started(1), b"")],
    [(of_client(0), b""), (of_client(1), b"")],
    [(accepted(0, b"first"), b"first"), (of_client(2), b""), (accepted(1, b"second"), b"second")],
    [(AccountsClosed(of_client(2).names, reason="deadline"), b"")],
]
EVENTS = [event for batch in BATCHES for event, _ in batch]


def test_a_file_that_ends_at_any_byte_has_the_records_before_and_goes_on_after_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    cut = tmp_path / "cut"
    sizes = written(path, BATCHES)
    data = path.read_bytes()
    assert len(data) == sizes[-1]
    for end in range(len(data) + 1):
        cut.write_bytes(data[:end])
        whole = sum(size <= end for size in sizes[1:])
        before = [event for batch in BATCHES[:whole] for event, _ in batch]
        assert read(cut) == before
        if end % 5 == 0:
            written(cut, [[(Started(2), b"")]])
            assert read(cut) == [*before, Started(2)]


def test_events_that_this_version_does_not_know_are_said_to_be_of_another(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, BATCHES)
    text = msgspec.msgpack.encode([[99, "an event of another version"]])
    lengths = struct.pack("<QI", 0, len(text))
    head = lengths + struct.pack("<IQ", zlib.crc32(lengths), xxhash.xxh3_64_intdigest(text))
    with path.open("ab") as file:
        file.write(head + text)
    with pytest.raises(StateError, match=r"journal: another version of fednet wrote it"):
        read(path)


def test_a_tail_of_zeros_as_after_a_power_cut_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, BATCHES)
    with path.open("ab") as file:
        file.write(bytes(5000))
    assert read(path) == EVENTS
    assert path.stat().st_size < 5000


def test_no_byte_of_the_events_can_change_unseen(tmp_path: Path) -> None:
    """A payload that was changed is another one than its reply says: it is asked for again."""
    path = tmp_path / "journal"
    changed = tmp_path / "changed"
    written(path, BATCHES)
    data = path.read_bytes()
    draw = random.Random(1)
    payloads = 0
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << draw.randrange(8)
        changed.write_bytes(spoilt)
        try:
            found = read(changed)
        except StateError as error:
            assert str(changed) in str(error)  # noqa: PT017
            assert "restore the run's directory" in str(error)  # noqa: PT017
        else:
            assert found == EVENTS
            payloads += 1
    assert payloads == len(b"firstsecond")


@pytest.mark.parametrize("seed", range(200))
def test_a_file_that_was_spoilt_is_refused_by_name_or_read_as_far_as_it_is_whole(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "journal"
    draw = random.Random(seed)
    written(path, BATCHES)
    data = bytearray(path.read_bytes())
    a, b = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    kind = draw.choice(["cut", "without", "twice", "noise", "zeros"])
    if kind == "cut":
        data = data[:a]
    elif kind == "without":
        data = data[:a] + data[b:]
    elif kind == "twice":
        data = data[:b] + data[a:]
    elif kind == "noise":
        data[a:b] = draw.randbytes(b - a)
    else:
        data[a:b] = bytes(b - a)
    path.write_bytes(data)
    try:
        found = read(path)
    except StateError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert found == EVENTS[: len(found)] or kind in ("without", "twice")


def test_payloads_are_read_where_they_are_also_after_the_file_was_written_anew(
    tmp_path: Path,
) -> None:
    rows: list[Row] = []
    journal = Journal(rows.append, file=JournalFile(tmp_path / "journal"))
    journal.recall()
    replies = {}
    for client in range(4):
        payload = bytes([client]) * (100 + client)
        replies[client] = accepted(client, payload), payload
        journal.note(*replies[client])
        if client == 1:
            journal.flush()
            journal.renew()
    journal.flush()
    for _ in range(2):
        for reply, payload in replies.values():
            assert bytes(journal.payload(reply)) == payload
        journal.renew()
    journal.close()
    later = Journal(rows.append, file=JournalFile(tmp_path / "journal"))
    later.recall()
    found = {a.message.key.client: a for a in later.book.accepted.values()}
    assert found.keys() == replies.keys()
    for client, reply in found.items():
        data = later.payload(reply)
        assert bytes(data) == replies[client][1]
        data[:] = bytes(len(data))  # its bytes are the caller's own
        assert bytes(later.payload(reply)) == replies[client][1]
    later.close()


def test_a_long_file_is_written_anew_with_what_is_open_and_loses_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONG", 1000)
    path = tmp_path / "journal"
    rows = list[Row]()
    sizes = []
    journal = Journal(rows.append, file=JournalFile(path))
    journal.recall()
    for client in range(200):
        journal.note(of_client(client))
        if client % 10:  # of ten tasks nine are over at once
            journal.note(AccountsClosed(of_client(client).names))
        journal.flush()
        sizes.append(path.stat().st_size)
    assert sum(b < a for a, b in pairwise(sizes)) >= 2
    generation, size = journal.position
    assert (generation > 2, size) == (True, sizes[-1])
    journal.close()
    later = Journal([].append, file=JournalFile(path))
    later.recall()
    clients = {name[3].client for name in later.book.open_accounts[b"conn"]}
    assert clients == set(range(0, 200, 10))
    assert len(rows) == 180
    later.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_crash_as_the_file_is_written_anew_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    path = tmp_path / "journal"
    write_aside = files.write_aside

    def crash(*given: object, **how: object) -> None:
        if replaced:
            write_aside(*given, **how)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    journal = Journal([].append, file=JournalFile(path))
    journal.recall()
    for client in range(3):
        journal.note(of_client(client))
    journal.note(accepted(1, b"payload"), b"payload")
    monkeypatch.setattr(files, "write_aside", crash)
    with pytest.raises(KeyboardInterrupt):
        journal.renew()
    monkeypatch.undo()
    later = Journal([].append, file=JournalFile(path))
    later.recall()
    assert len(later.book.open_accounts[b"conn"]) == 3
    (reply,) = later.book.accepted.values()
    assert bytes(later.payload(reply)) == b"payload"


def test_half_of_a_record_on_a_full_disk_is_taken_back_and_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    write = os.write
    journal = Journal([].append, file=JournalFile(path))
    journal.recall()

    def half(file: int, pieces: Sequence[bytes]) -> int:
        data = b"".join(pieces)
        return write(file, data[: len(data) // 2])

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    journal.note(accepted(0, b"payload"), b"payload")
    with monkeypatch.context() as disk:
        disk.setattr(os, "writev", half)
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space"):
            journal.flush()
    assert [type(event) for event in read(path)] == [Snapshot]
    journal.note(of_client(1))
    journal.flush()
    assert [type(event) for event in read(path)] == [Snapshot, Accepted, Crossed]
    journal.close()


def test_replies_that_are_forgotten_give_back_their_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    payload = bytes(1000)
    monkeypatch.setattr("fednet.journal.journal.LONG", 5000)
    journal = Journal([].append, file=JournalFile(path))
    journal.recall()
    for client in range(10):
        journal.note(accepted(client, payload), payload)
    journal.flush()
    assert path.stat().st_size > 10_000
    journal.forget(Forgotten(1))
    assert path.stat().st_size < 1000
    journal.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(streams(), st.data())
def test_the_rows_of_a_server_that_was_killed_are_made_again_from_its_journal(
    tmp_path: Path, events: list[Event], data: st.DataObject
) -> None:
    """Wherever it was killed, however often it had written its file anew: the file of rows is cut
    to the length that the journal names, and the rest of it follows.
    """
    path = tmp_path / "journal"
    rows = list[Row]()
    path.unlink(missing_ok=True)
    file = JournalFile(path)
    journal = Journal(rows.append, file=file, written=lambda: len(rows))
    journal.recall()
    for event in events:
        journal.note(event)
        action = data.draw(st.sampled_from(["", "", "flush", "renew"]))
        if action:
            getattr(journal, action)()
    journal.flush()
    journal.close()
    again = list(rows)

    def cut(length: int) -> None:
        del again[length:]

    later = Journal(again.append, file=JournalFile(path))
    later.recall(cut)
    assert again == rows
    assert later.book.snapshot(1, 0) == journal.book.snapshot(1, 0)
    later.close()


def test_events_are_written_as_they_are_read() -> None:
    for event in EVENTS:
        text = msgspec.msgpack.encode([event])
        assert msgspec.msgpack.decode(text, type=list[Event]) == [event]
