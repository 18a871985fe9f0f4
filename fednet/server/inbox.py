"""The replies of the rounds that are under way: checked as they arrive, and kept until they count.

    a small payload    in the journal, with the event that says that the reply was accepted
    a large one        in a file of its own, written part by part as it comes

The next server finds both. The decoded payload also stays in memory until it is accumulated, up to
`HELD_BYTES` of all replies together; beyond that, and where the file holds the values as they are,
it is read from the disk again. A file of a finished round is reused by a later one, unless
something still maps it: to write over a file costs a tenth of writing a new one (3 ms against 12 to
40 ms for 45 MB where this was measured).

In one process a crash ends the clients too, and their round is done again: a large reply, which
comes as tensors, is not written as long as there is room for it in memory. On a GPU there is more
room, `GPU_BYTES`.

A payload that does not have the digest that its reply says is asked for again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import torch

from fednet.errors import RemoteProtocolError, StateError
from fednet.experiment.evaluations import EvaluationReply
from fednet.files import (
    OWN,
    Digest,
    is_read,
    list_folder,
    open_descriptor,
    pages,
    remove_folder,
    write_all,
)
from fednet.journal.book import without_attempt
from fednet.journal.events import Accepted, Forgotten, Revoked
from fednet.journal.journal import Journal
from fednet.loading import WrongPart
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, SMALL_BYTES, Body
from fednet.wire.messages import Key
from fednet.wire.payload import Payload

HELD_BYTES = 64 << 20  # of decoded payloads in memory
GPU_BYTES = 1 << 30  # the same where tensors stay on a GPU: to write them to a file takes long
SPARE_BYTES = 1 << 30  # of files that wait to be written over


class HeldMemory:
    """Counts the bytes of payloads in memory, by round, up to `most` in all. For several threads:
    the one that does the I/O takes, the one that aggregates gives back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, int] = {}  # bytes, by round
        self._lock = threading.Lock()

    def reserve(self, round: int, size: int) -> bool:
        """Whether there is room for so much more; it counts as held then."""
        with self._lock:
            if sum(self._held.values()) + size > self._most:
                return False
            self._held[round] = self._held.get(round, 0) + size
            return True

    def release(self, round: int, size: int) -> None:
        with self._lock:
            if round in self._held:
                self._held[round] -= size

    def clear(self, up_to: int, but: Collection[int]) -> None:
        """Counts no payloads of rounds up to this one any more, except of those in `but`."""
        with self._lock:
            for round in [r for r in self._held if r <= up_to and r not in but]:
                del self._held[round]


class ReceivedReply(msgspec.Struct, eq=False):
    """A reply that was checked, and is in the journal."""

    record: Accepted
    """The event, which has the client's message."""
    memory: HeldMemory
    journal: Journal
    path: str = ""
    """The file of its payload, if it has one."""
    data: Body | None = None
    """In one process, the payload where it is not on disk."""
    payload: Payload | None = None
    """Decoded, until `take_payload`; None where there was no room for it, or an earlier server
    received it.
    """
    held: int = 0
    """Bytes of `data` or `payload`, as they count in `memory`."""
    evaluation: EvaluationReply | None = None
    """The one within the task."""
    evaluation_refused: str = ""
    """Why that is left out."""
    norms: dict[str, float] = {}
    """By field that is sent as it is, the norm of its tensors."""
    remembered: dict[str, torch.Tensor] = {}
    """What compressors remember if the reply counts."""
    small: bool = False
    """Whether it came to this process with a payload for the journal: several such are decoded and
    added up together.
    """
    arrived: float = 0.0
    """When, on this process's clock."""
    earlier: bool = False
    """Received by an earlier server."""

    @property
    def message(self) -> m.Reply:
        """As the client sent it, see `Accepted`."""
        return self.record.message

    @property
    def key(self) -> Key:
        """Of its task."""
        return self.record.message.key

    def body(self) -> Body:
        """Its payload. Bytes are the caller's own: to write to them changes no file, nor what the
        next call returns.
        """
        if self.data is not None:
            return self.data
        if self.record.inline:
            return Body([self.journal.payload(self.record)])
        return _map(self.path, self.message.size)

    def take_payload(self) -> Payload | None:
        """Its decoded payload, the caller's own; None from the second call on, and where it was not
        kept: then it is decoded from `body`.
        """
        payload = self.payload
        self.payload = None
        if payload is not None and self.data is None:
            self.memory.release(self.message.key.round, self.held)
        return payload

    def let_go(self) -> None:
        """The reply does not count: keeps nothing of it in memory."""
        if self.data is not None or self.payload is not None:
            self.data = self.payload = None
            self.memory.release(self.message.key.round, self.held)


def _are_alike(one: ReceivedReply, other: ReceivedReply) -> bool:
    """Whether two replies can be decoded together."""
    a = one.record.message
    b = other.record.message
    if not other.small or a.form != b.form:
        return False
    return (a.key.round, a.key.phase, a.key.purpose) == (b.key.round, b.key.phase, b.key.purpose)


def _map(path: str, size: int) -> Body:
    """A file's bytes, as the system has them in its cache; to write to them does not change it."""
    if not size:  # which cannot be mapped
        return NOTHING
    whole = pages(path)
    if len(whole) != size:
        raise StateError(f"{path}: {len(whole)} bytes, {size} were there.")
    return Body([whole])


class _Upload(msgspec.Struct):
    """A payload that is coming in, in parts."""

    file: int
    """A descriptor."""
    got: int = 0
    """Bytes."""
    written: Digest = msgspec.field(default_factory=Digest)
    """Of each part as it comes, while it is in the processor's cache."""


class Inbox:
    """The files of large replies: `checkpoint/round-T/PHASE-CLIENT-PURPOSE.bin`; in
    `checkpoint/spare/` files to write over. It belongs to the thread that owns the server's I/O.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        decode: Callable[[Sequence[ReceivedReply], Sequence[Body]], Sequence[Payload | None]],
        on_gpu: bool = False,
    ) -> None:
        """decode(replies, bodies): of replies to one exchange, of one form. Raises
        RemoteProtocolError or WrongPart where the methods could not use one of the payloads; else
        returns them, or None for one that depends on a model which is not known yet.
        """
        self.folder = folder
        self._journal = journal
        self._decode = decode
        self._uploads: dict[Key, _Upload] = {}
        self._memory = HeldMemory(GPU_BYTES if on_gpu else HELD_BYTES)
        self._spares: list[str] = []
        self._spares_made = 0
        remove_folder(folder / "spare")  # an earlier server's

    def _path(self, key: Key) -> str:
        """The file of a large reply."""
        return f"{self.folder}/round-{key.round}/{key.phase}-{key.client}-{key.purpose}.bin"

    # -- writing -----------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: Body) -> None:
        """Bytes of a payload, in order; offset 0 starts it again."""
        if offset == 0:
            self.abandon(key)
            self.withdraw(key)  # before a byte of the file changes: half of it is no reply
            path = self._path(key)
            # Only the round's folder: a run's directory that was deleted is not made again.
            Path(path).parent.mkdir(exist_ok=True)
            if os.path.exists(path) and is_read(path):
                os.unlink(path)
            if self._spares and not os.path.exists(path):
                os.replace(self._spares.pop(), path)
            self._uploads[key] = _Upload(open_descriptor(path, os.O_RDWR | os.O_CREAT | OWN))
        upload = self._uploads[key]
        if upload.got != offset:
            raise StateError(
                f"spool of client {key.client}: {upload.got} bytes are there, the next come at "
                f"{offset}"
            )
        for piece in data.segments:
            write_all(upload.file, piece)
            upload.written.update(piece)
        upload.got += data.size

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. A later attempt may write over its file already."""
        upload = self._uploads.pop(key, None)
        if upload is not None:
            os.close(upload.file)

    def accept(
        self, arrived: Sequence[tuple[Accepted, Body | None]]
    ) -> list[ReceivedReply | RemoteProtocolError | WrongPart]:
        """Checks, decodes and accepts replies whose payloads are whole: the only way in. Once the
        journal is on disk, a resumed run uses a reply without asking the client again. Each comes
        with its payload, None where that was stored. Returns, in their order, the replies, and the
        error in place of one that cannot be used; nothing of it is kept then.
        """
        found: list[ReceivedReply | RemoteProtocolError | WrongPart] = []
        alike: list[tuple[ReceivedReply, Body]] = []  # of one exchange and form, and small
        for record, body in arrived:
            try:
                reply, content = self._check_payload(record, body)
            except RemoteProtocolError as broken:
                found += self._accept_alike(alike)
                found.append(broken)
                alike = []
                continue
            if alike and not (reply.small and _are_alike(reply, alike[-1][0])):
                found += self._accept_alike(alike)
                alike = []
            alike.append((reply, content))
        return found + self._accept_alike(alike)

    def _check_payload(self, record: Accepted, body: Body | None) -> tuple[ReceivedReply, Body]:
        """Returns the reply, and its payload where it is kept: in memory, in a file or for the
        journal. Raises RemoteProtocolError where it is not what its client sent.
        """
        message = record.message
        key = message.key
        size = message.size
        now = time.monotonic()
        reply = ReceivedReply(record, self._memory, self._journal, arrived=now)
        found = b""  # the digest of what came
        if body is not None and body.by_reference and self._memory.reserve(key.round, size):
            reply.data = body
            reply.held = size
        elif body is None or body.by_reference or size > SMALL_BYTES:
            here = body is not None and body.by_reference
            if body is not None:
                self.store(key, 0, body)
            body, found = self._finish(key, size)
            reply.path = self._path(key)
            if here:
                message = msgspec.structs.replace(message, check=found)
        else:
            reply.small = True
        if not all(map(math.isfinite, message.reported.values())):
            reported = {n: v for n, v in message.reported.items() if math.isfinite(v)}
            message = msgspec.structs.replace(message, reported=reported)
        record.message = message
        if not body.by_reference and (found or body.digest()) != message.check:
            self._discard(reply)
            raise RemoteProtocolError("the payload was damaged on its way")
        return reply, body

    def _finish(self, key: Key, size: int) -> tuple[Body, bytes]:
        """The bytes of a file that is whole, and their digest."""
        upload = self._uploads.pop(key)
        if os.fstat(upload.file).st_size != size:  # what was there before was longer
            os.truncate(upload.file, size)
        os.close(upload.file)
        return _map(self._path(key), size), upload.written.digest()

    def _discard(self, reply: ReceivedReply) -> None:
        """The reply is not accepted."""
        reply.let_go()
        if reply.path:
            os.unlink(reply.path)

    def _accept_alike(
        self, replies: Sequence[tuple[ReceivedReply, Body]]
    ) -> list[ReceivedReply | RemoteProtocolError | WrongPart]:
        """Decodes replies of one exchange and form, and accepts them; an error in place of one that
        cannot be used.
        """
        if not replies:
            return []
        try:
            payloads = self._decode([r for r, _ in replies], [body for _, body in replies])
        except (RemoteProtocolError, WrongPart) as broken:
            if len(replies) == 1:
                self._discard(replies[0][0])
                return [broken]
            return [found for one in replies for found in self._accept_alike([one])]
        for (reply, body), payload in zip(replies, payloads):
            record = reply.record
            message = record.message
            if body.by_reference:  # it is in memory alone, and the payload refers to it
                record.stored = False
                reply.payload = payload
                self._journal.note(record)
                continue
            self._journal.note(record, body.to_bytes() if reply.small else b"")
            decoded = max(message.size, sum([f.raw for f in message.form]))
            # A file with the values as they are is read again: it is in the system's cache, and
            # all the replies of a round would count as this process's memory.
            from_file = reply.path and decoded == message.size
            if payload is None or from_file:
                continue
            if self._memory.reserve(message.key.round, decoded):
                reply.payload = payload
                reply.held = decoded
        return [reply for reply, _ in replies]

    def withdraw(self, key: Key) -> None:
        """The reply, if it was accepted, does not count."""
        if without_attempt(key) in self._journal.book.accepted:
            self._journal.note(Revoked(key))
            self._journal.flush()

    # -- reading -----------------------------------------------------------------------------------
    def earlier_replies(self, round: int, index: int) -> dict[int, ReceivedReply]:
        """By client, the replies to an exchange that were accepted, and whose payloads are as they
        were received.
        """
        self._journal.flush()
        found: dict[int, ReceivedReply] = {}
        for record in self._journal.book.accepted.values():
            key = record.message.key
            if (key.round, key.phase) != (round, index):
                continue
            path = "" if record.inline else self._path(key)
            reply = ReceivedReply(record, self._memory, self._journal, path, earlier=True)
            # A power cut may have lost its payload, or left an earlier one's bytes in its place.
            size = record.message.size
            there = bool(record.inline) or not size
            there = there or (os.path.exists(path) and os.path.getsize(path) == size)
            body = reply.body() if there else None
            if body is not None and body.digest() == record.message.check:
                found[key.client] = reply
        return found

    # -- the end of rounds -------------------------------------------------------------------------
    def clear(self, up_to: int, under_way: Collection[tuple[int, int]] = ()) -> list[str]:
        """Removes rounds that are over. under_way: (round, client) of their tasks that may still be
        answered. Returns files for the caller to delete once it does not hold up the I/O any more:
        the system takes seconds for one of a GB.
        """
        gone: list[str] = []
        rounds = {round for round, _ in under_way}
        self._memory.clear(up_to, rounds)
        self._journal.forget(Forgotten(up_to, sorted(under_way)))
        kept = set(under_way)
        place = self.folder / "spare"
        busy = {self._path(key) for key in self._uploads}  # not cancelled yet
        size = sum(os.path.getsize(p) for p in self._spares)
        for folder in list_folder(self.folder, "round-*"):
            round = int(folder.name.split("-")[1])
            if round > up_to:
                continue
            place.mkdir(exist_ok=True)
            # Later rounds take their files from those that nobody needs any more.
            for path in map(str, list_folder(folder, "*.bin")):
                client = int(os.path.basename(path).split("-")[1])
                if (round, client) in kept or path in busy or is_read(path):
                    continue
                self._spares_made += 1
                spare = str(place / f"{self._spares_made}.bin")
                os.replace(path, spare)
                nbytes = os.path.getsize(spare)
                if size + nbytes <= SPARE_BYTES:
                    size += nbytes
                    self._spares.append(spare)
                else:
                    gone.append(spare)
            if round not in rounds:
                remove_folder(folder)
        return gone

    def close(self) -> None:
        """No other round comes to this process."""
        self._spares = []
        remove_folder(self.folder / "spare")
