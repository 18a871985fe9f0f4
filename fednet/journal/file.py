"""The events of a server on disk, in `checkpoint/journal`: the only log whose order matters.

The file is a list of records, one for each time that events were written. A record has a head, the
payloads of small replies, and the events as msgpack. The head says how long both are, and has the
checksum of these lengths and the digest of the events. So a last record that a crash cut short is
known from one that was changed: the first is cut off, the second is an error. A payload has the
digest that its reply says, and is compared with it when it is read.

A file that has grown long is written again, with one event in place of all before it.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from fednet.buffers import lend
from fednet.descriptors import flush_to_disk
from fednet.errors import StateError
from fednet.files import OWN, open_descriptor, write_aside, write_pieces
from fednet.journal.events import Accepted, Event, Snapshot

LONG = 16 << 20
"""Bytes. A file is written again after more bytes of events, and a longer file as soon as replies
in it are forgotten.
"""

_LENGTHS = struct.Struct("<QI")  # bytes of the payloads, and of the events
_HEAD = struct.Struct("<QIIQ")  # these, their CRC-32, and XXH3-64 of the events
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Event]).decode


class JournalFile:
    """The file of one run. It belongs to the thread that does the server's I/O, but any thread may
    call `payload`. fsync: events are on the disk after a power cut too.
    """

    def __init__(self, path: Path, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        self._file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | OWN)
        self.generation = 0  # how often it was begun
        self.size = 0  # in bytes
        self._kept = 0  # bytes of events at the beginning of this generation
        self._added = 0  # and since then
        self._events: list[Event] = []  # not written yet
        self._payloads: list[bytes | memoryview] = []
        self._ahead = 0  # bytes of these
        self._lock = threading.Lock()

    # -- reading -----------------------------------------------------------------------------------
    def read(self) -> Iterator[Event]:
        """Yields what is in the file, in order, and cuts off a last record that is not whole. Call
        it before anything is added. Raises StateError for any other that is not as it was written.
        """
        size = os.fstat(self._file).st_size
        while self.size < size:
            head = os.pread(self._file, _HEAD.size, self.size)
            if len(head) < _HEAD.size:
                break
            if not any(head) and not any(os.pread(self._file, size, self.size)):
                break  # a power cut may have left zeros
            payloads, length, crc, check = _HEAD.unpack(head)
            if zlib.crc32(head[: _LENGTHS.size]) != crc:
                raise self._damaged("the lengths of its record are others")
            at = self.size + _HEAD.size + payloads
            if at + length > size:
                break
            text = os.pread(self._file, length, at)
            if xxhash.xxh3_64_intdigest(text) != check:
                raise self._damaged("its events have another digest")
            try:
                events = _decode(text)
            except msgspec.MsgspecError as other:
                raise StateError(
                    f"{self.path}: another version of fednet wrote it ({other}); resume the run "
                    f"with that version, or start it again under another name."
                ) from None
            for event in events:
                if isinstance(event, Snapshot):
                    self.generation = event.generation
                    self._kept = length
                yield event
            self.size = at + length
            self._added += length
        if self.size < size:
            os.ftruncate(self._file, self.size)

    def _damaged(self, why: str) -> StateError:
        return StateError(
            f"{self.path}: at byte {self.size} it is not what was written there ({why}); restore "
            f"the run's directory from a backup, or start the run again under another name."
        )

    def payload(self, reply: Accepted) -> memoryview:
        """The payload that was added with it. Its bytes are the caller's own."""
        data = lend(reply.inline).data
        with self._lock:
            read = os.preadv(self._file, [data], reply.at)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    # -- writing -----------------------------------------------------------------------------------
    def add(self, event: Event, payload: bytes | memoryview = b"") -> None:
        """Adds an event, which `flush` writes. payload: of an accepted reply, to be kept here."""
        if len(payload):
            assert isinstance(event, Accepted)
            event.inline = len(payload)
            event.at = self.size + _HEAD.size + self._ahead
            self._payloads.append(payload)
            self._ahead += len(payload)
        self._events.append(event)

    def flush(self) -> None:
        """All events are with the operating system, or on the disk."""
        if not self._events:
            return
        parts = _record(self._events, self._payloads, self._ahead)
        try:
            write_pieces(self._file, parts)
        except OSError:
            os.ftruncate(self._file, self.size)  # no half of a record stays on a full disk
            raise
        self.size += sum(map(len, parts))
        self._added += len(parts[-1])
        self._events = []
        self._payloads = []
        self._ahead = 0
        if self._fsync:
            flush_to_disk(self._file, self.path)

    @property
    def is_long(self) -> bool:
        """Whether so many events were added that it is to be written again: seldom enough for this
        not to count, however much is kept. (Payloads are given back when replies are forgotten.)
        """
        return self._added > max(LONG, 8 * self._kept)

    def renew(self, snapshot: Callable[[int], Snapshot]) -> None:
        """Writes the file again, with this event alone. snapshot(generation): makes it."""
        self.flush()
        event = snapshot(self.generation + 1)
        payloads = list[memoryview]()
        places = list[int]()
        at = _HEAD.size
        for reply in event.accepted:
            places.append(at)
            if reply.inline:
                payloads.append(self.payload(reply))
                at += reply.inline
        moved = [msgspec.structs.replace(r, at=p) for r, p in zip(event.accepted, places)]
        written = msgspec.structs.replace(event, accepted=moved)
        parts = _record([written], payloads, at - _HEAD.size)
        write_aside(self.path, parts, fsync=self._fsync)
        file = open_descriptor(self.path, os.O_RDWR | os.O_APPEND | OWN)
        with self._lock:
            os.close(self._file)
            self._file = file
            for reply, place in zip(event.accepted, places):
                reply.at = place  # who holds it reads there from now on
        self.generation = event.generation
        self.size = sum(map(len, parts))
        self._kept = len(parts[-1])
        self._added = 0

    def close(self) -> None:
        os.close(self._file)


def _record(
    events: Sequence[Event], payloads: Sequence[bytes | memoryview], length: int
) -> list[bytes | memoryview]:
    """The pieces of a record. length: of the payloads together."""
    text = _encode(events)
    crc = zlib.crc32(_LENGTHS.pack(length, len(text)))
    head = _HEAD.pack(length, len(text), crc, xxhash.xxh3_64_intdigest(text))
    return [head, *payloads, text]
