"""The replies of the rounds that are under way: checked as they arrive, kept in memory and on disk.

A small reply stays in memory until it is accumulated; for a server that comes after this one it is
in the round's one log, which is only ever appended to. A large one has a file of its own: it comes
in many parts, which are written once, as they come; and it is checked and accumulated where its
bytes then are, in the system's cache. A file that a round is done with is written over by a later
one, unless something still reads it: that costs a tenth of writing a new one, whose pages the
system would have to find and clear first (3 ms against 12 to 40 ms for 45 MB where this was
measured). Other decoded replies wait for the sum, `HELD_BYTES` of all together.

In one process (`in_memory`) a crash ends the clients too, and their round is done again: of a large
reply nothing is written as long as there is room for it in memory, `IN_MEMORY_BYTES`.

A record of the log is a line of JSON that ends with the digest of its text (see `files`), and
behind it as many bytes of payload as it says are `inline`. The last record may be torn, by a crash
or a full disk: it counts for nothing, and the next server cuts it off. Any other that is not as it
was written is an error; a payload that is not, by the digest in its record, is asked for again.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fednet.buffers import lend
from fednet.config import TrainSection
from fednet.descriptors import reaching
from fednet.errors import RemoteProtocolError, StateError
from fednet.files import OWN, checked, digest, opened, unchecked, write_all
from fednet.loading import WrongPart
from fednet.pages import is_read, pages
from fednet.plain import JsonDict
from fednet.wire import messages as m
from fednet.wire.ledger import Bill
from fednet.wire.messages import Field, Key
from fednet.wire.payload import Payload

if TYPE_CHECKING:
    import torch

    from fednet.experiment.build import Experiment
    from fednet.tensors import Tensors
    from fednet.wire.codec import Past
    from fednet.wire.payload import Payload, Run, Samples


LOG = "replies.log"


class ReplyRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A reply that was checked, as the log has it, see `Reply`. inline: bytes of its payload that
    follow there. broken: an earlier record of it does not count any more, its payload is being
    written over. at: where its payload begins in the log, known once it is read.
    """

    key: Key
    form: list[Field] = []
    check: bytes = b""
    state: str = ""
    kept: bool = False
    task: tuple[bytes, str] = (b"", "")
    seconds: float = 0.0
    worker: JsonDict = {}
    split: list[float] = []
    taken_s: float = 0.0
    reported: dict[str, float] = {}
    inline: int = 0
    broken: bool = False
    at: int = 0


class Log:
    """The log of a round, to be written to. Not for several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = _end(records_in(path))
        self._file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self._file, whole)
        self._size = whole  # with what is not written yet
        self._unwritten: list[bytes | memoryview] = []

    def add(self, record: ReplyRecord, payload: bytes | memoryview) -> int:
        """Where the payload begins. It is on the disk once `flush` has returned."""
        text = checked(_encode(record))
        self._unwritten += [text, payload]
        at = self._size + len(text)
        self._size = at + len(payload)
        return at

    def flush(self) -> None:
        if self._unwritten:
            data, self._unwritten = b"".join(self._unwritten), []
            write_all(self._file, data)

    def close(self) -> None:
        os.close(self._file)


def records_in(log: Path) -> list[ReplyRecord]:
    """The whole records of a log, in order. Raises StateError for one that is not as it was
    written.
    """
    found: list[ReplyRecord] = []
    if not log.exists():
        return found
    size = log.stat().st_size
    with reaching(lambda: log.open("rb")) as file:
        for number in range(1, size + 1):
            text = file.readline()
            if not text.endswith(b"\n"):
                break
            try:
                record = _decode(unchecked(text))
            except (ValueError, RecursionError) as broken:
                raise StateError(
                    f"{log}: record {number} is not what was written there ({broken}); without "
                    f"this file, the clients of its round are asked again."
                ) from broken
            at = file.tell()
            if record.inline < 0 or at + record.inline > size:
                break
            record.at = at
            found.append(record)
            file.seek(at + record.inline)
    return found


def _end(found: list[ReplyRecord]) -> int:
    """Bytes of whole records."""
    return found[-1].at + found[-1].inline if found else 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReplyRecord).decode


HELD_BYTES = 256 << 20  # of payloads in memory that are not folded yet
IN_MEMORY_BYTES = 1 << 30  # the same in one process, with those that are on no disk


class HeldMemory:
    """How much is held of each round's payloads, up to `most` bytes. For several threads."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._held: dict[int, int] = {}  # bytes, by round
        self._lock = threading.Lock()

    def take(self, round: int, size: int) -> bool:
        """Whether there is room for so much more; it counts as held then."""
        with self._lock:
            if sum(self._held.values()) + size > self._most:
                return False
            self._held[round] = self._held.get(round, 0) + size
            return True

    def give(self, round: int, size: int) -> None:
        with self._lock:
            if round in self._held:
                self._held[round] -= size

    def clear(self, up_to: int, but: Collection[int]) -> None:
        """Nobody will ask for what is held of rounds up to this one, but for those."""
        with self._lock:
            for round in [r for r in self._held if r <= up_to and r not in but]:
                del self._held[round]


@dataclass(slots=True)
class Reply:
    """A reply that was checked, and is in the log. `path` and `at` say where its payload is on the
    disk, once the inbox was flushed. task: the digest of what it answers, and the version of the
    client's state that it started from. payload: as it was decoded, until it is taken; None where
    there was no room for it in memory, or an earlier server received it. remembered: what
    compressors remember once it counts. bill: what crossed for it, until that is settled.
    """

    key: Key
    form: tuple[Field, ...]
    path: str
    check: bytes
    state: str
    kept: bool
    task: tuple[bytes, str]
    seconds: float = 0.0
    worker: JsonDict = field(default_factory=dict)
    split: tuple[float, ...] = ()  # of `seconds`: training, evaluating, encoding
    taken_s: float = 0.0  # from the hand-out to the whole reply
    arrived: float = 0.0  # when, on this process's clock
    reported: dict[str, float] = field(default_factory=dict)  # by the method, of its client
    at: int = 0
    earlier: bool = False  # received by an earlier server
    payload: Payload | None = None
    remembered: dict[str, torch.Tensor] = field(default_factory=dict)
    held: memoryview | None = None  # the payload's bytes, of a small one that is not decoded
    memory: HeldMemory | None = None  # where it counts as held, and may stay
    counted: int = 0  # bytes, there
    written: bool = True  # its payload is on the disk, or will be; else `held` stays
    bill: Bill = field(default_factory=Bill)

    @property
    def size(self) -> int:
        return sum(f.size for f in self.form)

    @property
    def decoded_size(self) -> int:
        return max(self.size, sum(f.raw for f in self.form))

    def body(self) -> memoryview:
        """Its payload, the caller's own: to write to it changes no file, nor what who asks again
        gets.
        """
        if not self.written:
            data = lend(self.size).data
            data[:] = self.view()
            return data
        if (held := self.let_go()) is not None:
            return held
        if not self.at:  # a file of its own
            return self.view()
        data = lend(self.size).data
        file = opened(self.path, os.O_RDONLY)
        try:
            read = os.preadv(file, [data], self.at)
        finally:
            os.close(file)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    def take_payload(self) -> Payload | None:
        """Its payload as it was decoded, the caller's own; None from the second call on, and where
        it was not kept: then it is decoded from `body`.
        """
        payload = self.payload
        if payload is not None and self.written:
            self.let_go()
        elif payload is not None:
            self.payload = None
            self._give(self.counted - self.size)
        return payload

    def keep(self, payload: Payload) -> None:
        """Keeps the decoded payload in place of its bytes, where there is room. One whose values
        are those of its file is read from there again: the system has the file in its cache, to map
        it costs little, and all the replies of a round would count as this process's memory.
        """
        if self.held is None and not self.at and self.decoded_size == self.size:
            self.let_go()
            return
        more = self.decoded_size
        if self.written:
            more -= self.counted
        if self.memory is None or (more and not self.memory.take(self.key.round, more)):
            return
        self.counted += more
        self.payload = payload
        if self.written:
            self.held = None

    def let_go(self) -> memoryview | None:
        """Nothing of it is held in memory any more."""
        held, self.held, self.payload = self.held, None, None
        self._give(self.counted)
        self.memory = None
        return held

    def _give(self, size: int) -> None:
        if self.memory is not None:
            self.memory.give(self.key.round, size)
            self.counted -= size

    def intact(self) -> bool:
        """Whether its payload is as it was received: a power cut may have lost it, or left an
        earlier one's bytes in its place.
        """
        if not os.path.exists(self.path):
            return False
        if not self.at and os.path.getsize(self.path) != self.size:  # a file of its own
            return False
        return digest([self.view()]) == self.check

    def view(self) -> memoryview:
        """Its payload as memory or the system has it already: to be let go of at once."""
        if self.held is not None:
            return self.held
        if not self.size:  # which cannot be mapped
            return memoryview(b"")
        whole = pages(self.path)
        if len(whole) < self.at + self.size:
            raise StateError(f"{self.path}: {len(whole)} bytes, {self.at + self.size} were there.")
        return whole[self.at : self.at + self.size]


SMALL_BYTES = 64 << 10  # the largest payload that is written into the log itself
SPARE_BYTES = 1 << 30  # of files that wait to be written over


@dataclass(slots=True)
class _Upload:
    """A payload that is coming in. file: its descriptor, of a large one. memory: in which it
    counts as held.
    """

    size: int
    memory: HeldMemory | None
    got: int = 0
    file: int | None = None
    held: memoryview | None = None

    def add(self, data: memoryview) -> None:
        if self.file is not None:
            write_all(self.file, data)
        if self.held is None and len(data) == self.size:
            self.held = data  # whole at once, in memory that is the receiver's to keep
        elif self.held is not None:
            self.held[self.got : self.got + len(data)] = data
        self.got += len(data)


class Inbox:
    """`checkpoint/round-T/`: `replies.log` with the records of the round's replies and the payloads
    of small ones, `PHASE-CLIENT-PURPOSE.bin` with the payload of each large one; in
    `checkpoint/spare/` files to write over.

    It belongs to the thread that owns the server's I/O. A record is on the disk once `flush` has
    returned.
    """

    def __init__(
        self,
        folder: Path,
        decode: Callable[[Reply, memoryview], Payload | None],
        in_memory: bool = False,
    ) -> None:
        """decode(reply, body): raises RemoteProtocolError or WrongPart for a payload that the
        methods could not use; else returns it, or None where what it comes to is not known yet.
        """
        self.folder, self._decode = folder, decode
        self._uploads: dict[Key, _Upload] = {}
        self._recorded: dict[int, set[str]] = {}  # by round: names of replies that have a record
        self._logs: dict[int, Log] = {}  # by round
        self._in_memory = in_memory
        self._memory = HeldMemory(IN_MEMORY_BYTES if in_memory else HELD_BYTES)
        self.bills: dict[Key, Bill] = {}  # of earlier servers
        self._over: list[Reply] = []  # for whose payloads there is no room in memory
        self._spares: list[str] = []
        self._named = 0
        shutil.rmtree(folder / "spare", ignore_errors=True)  # an earlier server's

    def _path(self, key: Key) -> str:
        """A reply's file, as text: to put paths together costs more than a small reply."""
        return f"{self.folder}/round-{key.round}/{_name(key)}.bin"

    # -- writing -----------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: memoryview, size: int) -> None:
        """Bytes of a payload of that size, in order; offset 0 starts it again."""
        if offset == 0:
            self.abandon(key)
            self._uploads[key] = self._begin(key, size, data)
        upload = self._uploads[key]
        if upload.got != offset:
            raise StateError(
                f"spool of client {key.client}: {upload.got} bytes are there, the next come at "
                f"{offset}"
            )
        upload.add(data)

    def _begin(self, key: Key, size: int, first: memoryview) -> _Upload:
        """What an earlier attempt or a spare has in a file is written over. first: what comes of it
        now.
        """
        # Before a byte of it changes: half of it must not be taken for the whole.
        if _name(key) in self._recorded.get(key.round, ()):
            self._withdraw(key)
        upload = _Upload(size, self._memory if self._memory.take(key.round, size) else None)
        in_memory = self._in_memory and upload.memory is not None and len(first) == size
        if len(first) < size <= SMALL_BYTES:
            upload.held = lend(size).data
        if size > SMALL_BYTES and not in_memory:
            path = self._path(key)
            self._log(key.round)  # and the folder
            if os.path.exists(path) and is_read(path):
                os.unlink(path)
            if self._spares and not os.path.exists(path):
                os.replace(self._spares.pop(), path)
            upload.file = opened(path, os.O_RDWR | os.O_CREAT | OWN)
        return upload

    def _log(self, round: int) -> Log:
        if round not in self._logs:
            self._logs[round] = Log(self.folder / f"round-{round}" / LOG)
        return self._logs[round]

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. What is there of it may be overwritten by a later attempt
        already.
        """
        upload = self._uploads.pop(key, None)
        if upload is not None and upload.file is not None:
            os.close(upload.file)
        if upload is not None and upload.memory is not None:
            upload.memory.give(key.round, upload.size)

    def take(
        self, message: m.Reply, taken_s: float, task: tuple[bytes, str], worker: JsonDict
    ) -> Reply:
        """Checks, decodes and logs a reply whose payload is whole: the only way in. A resume uses
        it without asking again, once `flush` was called. task: see `Reply`. Raises
        RemoteProtocolError or WrongPart where it cannot be used; nothing of it is left then.
        """
        reply = self._whole(message, taken_s, task, worker)
        try:
            body = reply.view()
            if digest([body]) != reply.check:
                raise RemoteProtocolError("the payload was damaged on its way")
            payload = self._decode(reply, body)
        except (RemoteProtocolError, WrongPart):  # a compressor made nothing of its bytes
            reply.let_go()
            if reply.size > SMALL_BYTES and reply.written:
                os.unlink(reply.path)
            raise
        if reply.written:
            self._append(reply)
        if payload is not None:
            reply.keep(payload)
        if reply.memory is None:
            self._over.append(reply)
        return reply

    def _whole(
        self, message: m.Reply, taken_s: float, task: tuple[bytes, str], worker: JsonDict
    ) -> Reply:
        key = message.key
        upload = self._uploads.pop(key)
        if upload.file is not None:
            if os.fstat(upload.file).st_size != upload.got:  # what was there before was longer
                os.truncate(upload.file, upload.got)
            os.close(upload.file)
        return Reply(
            key,
            tuple(message.form),
            self._path(key),
            message.check,
            message.state,
            message.kept,
            task,
            message.seconds,
            worker,
            tuple(message.split),
            taken_s,
            time.monotonic(),
            {n: v for n, v in message.reported.items() if math.isfinite(v)},
            held=upload.held,
            memory=upload.memory,
            counted=0 if upload.memory is None else upload.size,
            written=upload.file is not None or upload.size <= SMALL_BYTES,
            bill=self.bills.pop(key, Bill()),
        )

    def _append(self, reply: Reply) -> None:
        """Puts the reply's record into the log, which `flush` writes."""
        inline = reply.size <= SMALL_BYTES
        record = ReplyRecord(
            key=reply.key,
            form=list(reply.form),
            check=reply.check,
            state=reply.state,
            kept=reply.kept,
            task=reply.task,
            seconds=reply.seconds,
            worker=reply.worker,
            split=list(reply.split),
            taken_s=reply.taken_s,
            reported=reply.reported,
            inline=reply.size if inline else 0,
        )
        log = self._log(reply.key.round)
        at = log.add(record, reply.held if inline and reply.held is not None else b"")
        if inline:
            reply.path, reply.at = str(log.path), at
        self._recorded.setdefault(reply.key.round, set()).add(_name(reply.key))

    def flush(self) -> None:
        """All records are with the operating system, and what may not be held is on disk
        alone.
        """
        for log in self._logs.values():
            log.flush()
        for reply in self._over:
            reply.let_go()
        self._over.clear()

    def _withdraw(self, key: Key) -> None:
        log = self._log(key.round)
        log.add(ReplyRecord(key=key, broken=True), b"")
        log.flush()
        self._recorded[key.round].remove(_name(key))

    def revoke(self, reply: Reply) -> None:
        """The reply was checked and turned out to be unusable: its record does not count."""
        if _name(reply.key) in self._recorded.get(reply.key.round, ()):
            self._withdraw(reply.key)

    # -- reading -----------------------------------------------------------------------------------
    def found(self, round: int, phase: int) -> dict[tuple[int, str], Reply]:
        """The replies of a phase on record whose payloads are as they were received, by client and
        purpose: of a client whose training or evaluation is not, neither, so that it is asked for
        both again. Raises StateError where a whole record is not what was written.
        """
        if round in self._logs:
            self._logs[round].flush()
        log = self.folder / f"round-{round}" / LOG
        recorded = [s for s in _last(records_in(log)) if s.key.phase == phase]
        # Whatever became of the payloads: the next ones are others.
        self._recorded.setdefault(round, set()).update(_name(s.key) for s in recorded)
        replies = (
            Reply(
                s.key,
                tuple(s.form),
                str(log) if s.inline else self._path(s.key),
                s.check,
                s.state,
                s.kept,
                s.task,
                s.seconds,
                s.worker,
                tuple(s.split),
                s.taken_s,
                reported=s.reported,
                at=s.at if s.inline else 0,
                earlier=True,
                bill=self.bills.get(s.key) or Bill(),
            )
            for s in recorded
        )
        found = {(r.key.client, r.key.purpose): r for r in replies}
        damaged = {client for (client, _), r in found.items() if not r.intact()}
        return {name: r for name, r in found.items() if name[0] not in damaged}

    def on_record(self) -> set[Key]:
        """The replies that were checked, of all rounds that no checkpoint holds."""
        logs = self.folder.glob(f"round-*/{LOG}")
        return {found.key for log in logs for found in _last(records_in(log))}

    # -- the end of rounds -------------------------------------------------------------------------
    def clear(self, up_to: int, under_way: Collection[tuple[int, int]] = ()) -> None:
        """Lets go of rounds that are over. under_way: (round, client) of their tasks that may still
        be answered.
        """
        rounds = {round for round, _ in under_way}
        self._memory.clear(up_to, rounds)
        for folder in self.folder.glob("round-*"):
            round = int(folder.name.split("-")[1])
            if round <= up_to:
                self._spare(folder, {c for r, c in under_way if r == round})
            if round <= up_to and round not in rounds:
                log = self._logs.pop(round, None)
                self._recorded.pop(round, None)
                shutil.rmtree(folder)
                if log is not None:
                    log.close()

    def close(self) -> None:
        """Closes the files: no other round comes to this process."""
        for log in self._logs.values():
            log.close()
        self._logs, self._spares = {}, []
        shutil.rmtree(self.folder / "spare", ignore_errors=True)

    def _spare(self, round: Path, but: Collection[int]) -> None:
        """Moves a round's payloads to where later ones take their files from, but those of these
        clients.
        """
        place = self.folder / "spare"
        place.mkdir(exist_ok=True)
        busy = {self._path(key) for key in self._uploads}  # a late one's, not called off yet
        size = sum(os.path.getsize(p) for p in self._spares)
        for path in map(str, round.glob("*.bin")):
            if int(os.path.basename(path).split("-")[1]) in but or path in busy:
                continue
            self._named += 1
            name = str(place / f"{self._named}.bin")
            if not is_read(path) and (size := size + os.path.getsize(path)) <= SPARE_BYTES:
                os.replace(path, name)
                self._spares.append(name)


def _name(key: Key) -> str:
    return f"{key.phase}-{key.client}-{key.purpose}"


def _last(found: list[ReplyRecord]) -> list[ReplyRecord]:
    """The replies that are whole by their last record: of several of one reply the last counts."""
    by_name = {_name(record.key): record for record in found}
    return [record for record in by_name.values() if not record.broken]


STEPS = 100


HUGE = 1.8e19  # the square of a larger norm is no float32


class Sent(dict[int, "Tensors"]):
    """What replies are decoded with: the weights that each client was sent with its last task.
    remembered: what compressors remembered as the exchange was opened. fill: the model that buffers
    are taken from where the clients' do not cross; None: not known before a reply is counted. The
    rounds write it before tasks go out, the inbox reads it.
    """

    remembered: Mapping[str, torch.Tensor]
    fill: Tensors | None

    def __init__(self) -> None:
        super().__init__()
        self.remembered, self.fill = {}, None

    def past(self, key: Key, following: dict[str, torch.Tensor]) -> Past:
        """What compressors remember of the client's earlier replies. following: takes what
        follows from this one.
        """
        from fednet.wire.codec import Past

        return Past(self.remembered, following, f"client {key.client}/up/{key.phase}/", key.round)


def declared(exp: Experiment) -> Callable[[Key, Sequence[Field]], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is
    asked for.
    """
    from fednet.experiment.judging import Judgement

    def check(key: Key, form: Sequence[Field]) -> None:
        kind = Judgement if key.purpose == "evaluate" else exp.algorithm.exchanges[key.phase].up
        exp.up.check(kind, form, exp.bounds(kind, key.client, key.round), key.round)

    return check


def decoder(
    exp: Experiment,
    sent: Sent,
    samples: Callable[[int], int | None],
    tested: Callable[[int], tuple[int, int]],
) -> Callable[[Reply, memoryview], Payload | None]:
    """Decodes a reply, and checks what it must be beyond its form: finite values, samples as this
    federation has them, no more of them than there can be, and an update within
    `security.max_norm`. What passes, the methods can use; it is returned but where it depends on
    the model that it will be added to. samples(client): how many it may have trained on, by the
    partition or as its site declared; None: not known. tested(client): labels or values that it may
    have tested a model on, in its own test set and in the balanced one.
    """
    from fednet.errors import RemoteProtocolError
    from fednet.experiment.judging import Judgement
    from fednet.experiment.privacy import updates
    from fednet.tensors import Tensors
    from fednet.wire.payload import Samples, run_of

    initial = exp.setting.initial.select(exp.shared)
    alone = {exchange.up for exchange in exp.algorithm.exchanges if exp.up.alone(exchange.up)}

    def decode(reply: Reply, body: memoryview) -> Payload | None:
        key = reply.key
        if key.purpose == "evaluate":
            judgement = exp.up.decode(Judgement, reply.form, body, sound=True)
            judgement.check(exp.setting.counts_width, *tested(key.client))
            return judgement
        kind, x = exp.algorithm.exchanges[key.phase].up, sent.get(key.client)
        following: dict[str, torch.Tensor] = {}
        payload = exp.up.decode(
            kind,
            reply.form,
            body,
            initial if x is None else x,  # a compressed state is a difference to it
            initial if sent.fill is None else sent.fill,
            True,
            sent.past(key, following),
        )
        for name in payload.fields:
            value = getattr(payload, name)
            if isinstance(value, Tensors):
                exp.up.finite(value, name)
                # the mean, or the next training, would leave the finite numbers: one peer could end
                # everybody's run
                if not math.isfinite(value.square):
                    raise RemoteProtocolError(
                        f"field {name}: a norm above {HUGE:.2g}, where float32 ends"
                    )
            if isinstance(value, Samples):
                _check_samples(value, name, exp)
        run = run_of(payload)
        most_samples = samples(key.client)
        if run is not None and most_samples is not None:
            _check_run(run, most_samples, exp.config.train)
        most = exp.config.security.max_norm
        if isinstance(most, float):
            for name, _, norm in updates(payload, x):
                if norm > most:
                    raise RemoteProtocolError(
                        f"{name} is an update of norm {norm:.4g}; security.max_norm allows {most:g}"
                    )
        if kind not in alone and sent.fill is None:
            return None
        reply.remembered = following
        return payload

    return decode


def _check_samples(value: Samples, name: str, exp: Experiment) -> None:
    """Samples are as those of this federation: of its shape, in a mapping only where its own are,
    with one label each below `classes`.
    """
    from fednet.errors import RemoteProtocolError

    classes, labels, x = exp.setting.classes, value.y, value.x
    mapped = exp.data is not None and isinstance(exp.data.train[0], dict)
    if isinstance(x, dict) != mapped:
        raise RemoteProtocolError(
            f"field {name}: samples {'in' if isinstance(x, dict) else 'without'} a mapping, unlike "
            f"this federation's"
        )
    if not isinstance(x, dict) and tuple(x.shape[1:]) != tuple(exp.input_shape):
        raise RemoteProtocolError(
            f"field {name}: samples of shape {tuple(x.shape[1:])}, expected "
            f"{tuple(exp.input_shape)}"
        )
    if not classes:
        return
    if labels.dim() != 1 or labels.is_floating_point():
        raise RemoteProtocolError(
            f"field {name}: labels of shape {tuple(labels.shape)} and type {labels.dtype}, "
            f"expected one whole number a sample"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise RemoteProtocolError(
            f"field {name}: labels from {int(labels.min())} to {int(labels.max())}, expected 0 to "
            f"{classes - 1}"
        )


def _check_run(run: Run, samples: int, train: TrainSection) -> None:
    """No more samples than the client has, and no more steps than `STEPS` passes in batches of one
    would take for each pass that the configuration asks for: methods may train more than once.
    """
    from fednet.errors import RemoteProtocolError

    if run.n > samples:
        raise RemoteProtocolError(f"it reports {run.n} samples, but has {samples}")
    most = STEPS * max(train.steps or 0, max(1, train.epochs) * max(1, samples))
    if run.steps > most:
        raise RemoteProtocolError(
            f"it says it took {run.steps} steps; {most} would be {STEPS} times those "
            f"of its configuration"
        )
