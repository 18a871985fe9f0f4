"""The replies of the rounds that are under way: checked as they arrive, and kept until they count.

    a small payload    in the round's log, `replies.log`, behind its record
    a large one        in a file of its own, written part by part as it comes; its record in the log

The next server finds both. The decoded payload also stays in memory until it is accumulated, up to
`HELD_BYTES` of all replies together; beyond that, and where the file holds the values as they are,
it is read from the disk again. A file of a finished round is reused by a later one, unless
something still maps it: to write over a file costs a tenth of writing a new one (3 ms against 12 to
40 ms for 45 MB where this was measured).

In one process a crash ends the clients too, and their round is done again: a large reply, which
comes as tensors, is not written as long as there is room for it in memory. On a GPU there is more
room, `GPU_BYTES`.

A record of the log is a line of JSON that ends with the digest of its text (see `files`); as many
bytes of payload follow as it says are `inline`. The last record may be incomplete, after a crash or
on a full disk: it is ignored, and the next server cuts it off. Any other record that was changed is
an error. A payload that does not have the digest in its record is asked for again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from fednet.buffers import lend
from fednet.descriptors import reaching
from fednet.errors import FednetError, RemoteProtocolError, StateError, no_memory
from fednet.experiment.build import Experiment
from fednet.experiment.privacy import updates
from fednet.files import (
    OWN,
    checked,
    digest,
    is_read,
    listed,
    named,
    opened,
    pages,
    remove_folder,
    unchecked,
    write_all,
)
from fednet.loading import WrongPart, raised
from fednet.plain import JsonDict
from fednet.tensors import Tensors
from fednet.wire import messages as m
from fednet.wire.codec import SMALL_BYTES, Body, Content
from fednet.wire.compressors.base import Memory
from fednet.wire.ledger import Bill
from fednet.wire.messages import Field, Key
from fednet.wire.payload import Payload, Samples, run_of

LOG = "replies.log"
HELD_BYTES = 64 << 20  # of decoded payloads in memory
GPU_BYTES = 1 << 30  # the same where tensors stay on a GPU: to write them to a file takes long
SPARE_BYTES = 1 << 30  # of files that wait to be written over
STEPS = 100  # passes in batches of one, for each that is configured: more steps are refused
HUGE = 1.8e19  # the square of a larger norm is no float32


class ReplyRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A reply that was checked, as a line of the log.

    message: as the client sent it, but for values of `reported` that are not finite. task: the
    digest of the task's payload, and the version of the client's state that it started from.
    worker: where it was made. taken_s: from the hand-out of the task to the whole reply. inline:
    bytes of payload that follow the line. broken: earlier records of this reply do not count any
    more.
    """

    message: m.Reply
    task: tuple[bytes, str] = (b"", "")
    worker: JsonDict = {}
    taken_s: float = 0.0
    inline: int = 0
    broken: bool = False


class Log:
    """The log of a round, to be written to. Not for several threads.

    recorded: the phase, client and purpose of the replies that have a record that counts.
    unwritten: what `Inbox.flush` writes.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)  # a run's directory that is gone is not made anew
        found = records_in(path)
        self.recorded = {_which(record.message.key) for record, _ in _last(found)}
        self._size = 0  # with what is not written yet
        if found:
            last, at = found[-1]
            self._size = at + last.inline
        self.path = path
        self.file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self.file, self._size)
        self.unwritten: list[bytes | memoryview] = []

    def add(self, record: ReplyRecord, payload: bytes | memoryview = b"") -> int:
        """Returns where the payload begins."""
        text = checked(_encode(record))
        self.unwritten += [text, payload]
        at = self._size + len(text)
        self._size = at + len(payload)
        return at


def records_in(log: Path) -> list[tuple[ReplyRecord, int]]:
    """The complete records of a log, in order, and where the payload of each begins. Raises
    StateError for one that is not as it was written.
    """
    found: list[tuple[ReplyRecord, int]] = []
    if not log.exists():
        return found
    size = log.stat().st_size
    with reaching(lambda: log.open("rb")) as file, named(log):
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
            found.append((record, at))
            file.seek(at + record.inline)
    return found


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReplyRecord).decode


def _which(key: Key) -> tuple[int, int, str]:
    """Which reply of its round: later attempts at a task take the place of earlier ones."""
    return key.phase, key.client, key.purpose


def _last(found: list[tuple[ReplyRecord, int]]) -> list[tuple[ReplyRecord, int]]:
    """The replies that count: of several records of one reply the last."""
    last = {_which(record.message.key): (record, at) for record, at in found}
    return [(record, at) for record, at in last.values() if not record.broken]


class HeldMemory:
    """Counts the bytes of payloads in memory, by round, up to `most` in all. For several threads:
    the one that does the I/O takes, the one that aggregates gives back.
    """

    def __init__(self, most: int) -> None:
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
        """Nobody will ask for payloads of rounds up to this one, but for those."""
        with self._lock:
            for round in [r for r in self._held if r <= up_to and r not in but]:
                del self._held[round]


class ReceivedReply(msgspec.Struct, eq=False):
    """A reply that was checked and logged.

    message: of the record. path, at: the file with its payload, and where it begins there, once the
    inbox was flushed; at 0: a file of its own. data: in one process, the payload where no file has
    it. payload: decoded, until `take_payload`; None where there was no room for it, or an earlier
    server received it. held: bytes of `data` or `payload`, as they count in `memory`. remembered:
    what compressors remember if the reply counts. arrived: when, on this process's clock. earlier:
    received by an earlier server. bill: the bytes that crossed for it, until they are recorded.
    """

    record: ReplyRecord
    message: m.Reply
    memory: HeldMemory
    path: str
    at: int = 0
    data: Body | None = None
    payload: Payload | None = None
    held: int = 0
    remembered: dict[str, torch.Tensor] = {}
    arrived: float = 0.0
    earlier: bool = False
    bill: Bill = []

    def body(self) -> Content:
        """Its payload. Bytes are the caller's own: to write to them changes no file, nor what the
        next call returns.
        """
        if self.data is not None:
            return self.data
        if not self.at:
            return _mapped(self.path, self.message.size)
        data = lend(self.message.size).data
        file = opened(self.path, os.O_RDONLY)
        try:
            read = os.preadv(file, [data], self.at)
        finally:
            os.close(file)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    def take_payload(self) -> Payload | None:
        """Its decoded payload, the caller's own; None from the second call on, and where it was not
        kept: then it is decoded from `body`.
        """
        payload, self.payload = self.payload, None
        if payload is not None:
            self.memory.give(self.message.key.round, self.held)
        return payload

    def let_go(self) -> None:
        """The reply does not count: keeps nothing of it in memory."""
        if self.data is not None or self.payload is not None:
            self.data = self.payload = None
            self.memory.give(self.message.key.round, self.held)


def _mapped(path: str, size: int) -> memoryview:
    """A file's bytes, as the system has them in its cache; to write to them does not change it."""
    if not size:  # which cannot be mapped
        return memoryview(b"")
    whole = pages(path)
    if len(whole) != size:
        raise StateError(f"{path}: {len(whole)} bytes, {size} were there.")
    return whole


class _Upload(msgspec.Struct):
    """A payload that is coming in: into `file`, a descriptor, or whole at once, as `data`. tensors:
    it came as these, without a digest.
    """

    size: int
    tensors: bool
    got: int = 0
    file: int | None = None
    data: Content = memoryview(b"")


class Inbox:
    """`checkpoint/round-T/`: `replies.log` with the records of the round's replies and the payloads
    of small ones, `PHASE-CLIENT-PURPOSE.bin` with the payload of each large one; in
    `checkpoint/spare/` files to write over.

    It belongs to the thread that owns the server's I/O. A record is on the disk once `flush` has
    returned. bills: of the tasks that earlier servers sent.
    """

    def __init__(
        self,
        folder: Path,
        decode: Callable[[ReceivedReply, Content], Payload | None],
        on_gpu: bool = False,
    ) -> None:
        """decode(reply, body): raises RemoteProtocolError or WrongPart for a payload that the
        methods could not use; else returns it, or None where what it comes to is not known yet.
        """
        self.folder, self._decode = folder, decode
        self._uploads: dict[Key, _Upload] = {}
        self._logs: dict[int, Log] = {}  # by round
        self._memory = HeldMemory(GPU_BYTES if on_gpu else HELD_BYTES)
        self.bills: dict[Key, Bill] = {}
        self._spares: list[str] = []
        self._named = 0
        remove_folder(folder / "spare")  # an earlier server's

    def _path(self, key: Key) -> str:
        """The file of a large reply."""
        return f"{self.folder}/round-{key.round}/{key.phase}-{key.client}-{key.purpose}.bin"

    def _log(self, round: int) -> Log:
        if round not in self._logs:
            self._logs[round] = Log(self.folder / f"round-{round}" / LOG)
        return self._logs[round]

    # -- writing -----------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: Content, size: int) -> None:
        """Bytes of a payload of that size, in order; offset 0 starts it again. `data` is this
        inbox's to keep.
        """
        if offset == 0:
            self.abandon(key)
            tensors = isinstance(data, Body)
            upload = self._uploads[key] = _Upload(size, tensors)
            if tensors:
                in_memory = self._memory.take(key.round, size)
            else:
                in_memory = len(data) == size <= SMALL_BYTES
            if in_memory:
                upload.data = data
            else:
                self.revoke(key)  # before a byte of the file changes: half of it is no reply
                path = self._path(key)
                if os.path.exists(path) and is_read(path):
                    os.unlink(path)
                if self._spares and not os.path.exists(path):
                    os.replace(self._spares.pop(), path)
                upload.file = opened(path, os.O_RDWR | os.O_CREAT | OWN)
        upload = self._uploads[key]
        if upload.got != offset:
            raise StateError(
                f"spool of client {key.client}: {upload.got} bytes are there, the next come at "
                f"{offset}"
            )
        if upload.file is not None:
            for piece in [data] if isinstance(data, memoryview) else data.segments:
                write_all(upload.file, piece)
        upload.got += len(data)

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. A later attempt may write over its file already."""
        upload = self._uploads.pop(key, None)
        if upload is None:
            return
        if upload.file is not None:
            os.close(upload.file)
        elif upload.tensors:
            self._memory.give(key.round, upload.size)

    def take(
        self, message: m.Reply, taken_s: float, task: tuple[bytes, str], worker: JsonDict
    ) -> ReceivedReply:
        """Checks, decodes and logs a reply whose payload is whole: the only way in. After `flush` a
        resumed run uses the reply without asking the client again. taken_s, task, worker: see
        `ReplyRecord`. Raises RemoteProtocolError or WrongPart for a reply that cannot be used, and
        keeps nothing of it then.
        """
        key, size = message.key, message.size
        upload = self._uploads.pop(key)
        body, file, path = upload.data, upload.file, self._path(key)
        if file is not None:
            if os.fstat(file).st_size != size:  # what was there before was longer
                os.truncate(file, size)
            os.close(file)
            body = _mapped(path, size)
            if upload.tensors:
                message = msgspec.structs.replace(message, check=digest([body]))
        if not all(map(math.isfinite, message.reported.values())):
            reported = {n: v for n, v in message.reported.items() if math.isfinite(v)}
            message = msgspec.structs.replace(message, reported=reported)
        record = ReplyRecord(message=message, task=task, worker=worker, taken_s=taken_s)
        reply = ReceivedReply(record, message, self._memory, path, arrived=time.monotonic())
        if isinstance(body, Body):
            reply.data = body
            reply.held = size
        try:
            if isinstance(body, memoryview) and digest([body]) != message.check:
                raise RemoteProtocolError("the payload was damaged on its way")
            payload = self._decode(reply, body)
        except (RemoteProtocolError, WrongPart):  # a compressor made nothing of its bytes
            reply.let_go()
            if file is not None:
                os.unlink(path)
            raise
        if isinstance(body, memoryview):  # else it is in memory alone
            log = self._log(key.round)
            if file is None:
                record.inline = size
                reply.path = str(log.path)
                reply.at = log.add(record, body)
            else:
                log.add(record)
            log.recorded.add(_which(key))
            decoded = max(size, sum([f.raw for f in message.form]))
            # A file with the values as they are is read again: it is in the system's cache, and
            # all the replies of a round would count as this process's memory.
            from_file = file is not None and decoded == size
            if payload is not None and not from_file and self._memory.take(key.round, decoded):
                reply.payload = payload
                reply.held = decoded
        if key in self.bills:
            reply.bill = self.bills.pop(key)
        return reply

    def flush(self) -> None:
        """All records are with the operating system."""
        for log in self._logs.values():
            if log.unwritten:
                data, log.unwritten = b"".join(log.unwritten), []
                write_all(log.file, data)

    def revoke(self, key: Key) -> None:
        """The reply's record, if it has one, does not count."""
        log = self._log(key.round)
        if _which(key) in log.recorded:
            log.recorded.remove(_which(key))
            log.add(ReplyRecord(message=m.Reply(key=key, form=[], size=0), broken=True))
            self.flush()

    # -- reading -----------------------------------------------------------------------------------
    def found(self, round: int, phase: int) -> dict[tuple[int, str], ReceivedReply]:
        """The replies of a phase on record whose payloads are as they were received, by client and
        purpose: of a client whose training or evaluation is not, neither, so that it is asked for
        both again. Raises StateError where a whole record is not what was written.
        """
        self.flush()
        log = self.folder / f"round-{round}" / LOG
        found: dict[tuple[int, str], ReceivedReply] = {}
        damaged: set[int] = set()
        for record, at in _last(records_in(log)):
            message, key = record.message, record.message.key
            if key.phase != phase:
                continue
            reply = ReceivedReply(record, message, self._memory, self._path(key), earlier=True)
            if record.inline or not message.size:
                reply.path = str(log)
                reply.at = at
            if key in self.bills:
                reply.bill = self.bills[key]
            found[key.client, key.purpose] = reply
            # A power cut may have lost its payload, or left an earlier one's bytes in its place.
            there = os.path.exists(reply.path)
            if there and not reply.at:
                there = os.path.getsize(reply.path) == message.size
            body = reply.body() if there else None
            if not isinstance(body, memoryview) or digest([body]) != message.check:
                damaged.add(key.client)
        return {name: r for name, r in found.items() if name[0] not in damaged}

    def on_record(self) -> set[Key]:
        """The replies that were checked, of all rounds that no checkpoint holds."""
        logs = [folder / LOG for folder in listed(self.folder, "round-*")]
        return {record.message.key for log in logs for record, _ in _last(records_in(log))}

    # -- the end of rounds -------------------------------------------------------------------------
    def clear(self, up_to: int, under_way: Collection[tuple[int, int]] = ()) -> None:
        """Removes rounds that are over. under_way: (round, client) of their tasks that may still be
        answered.
        """
        rounds = {round for round, _ in under_way}
        self._memory.clear(up_to, rounds)
        kept, place = set(under_way), self.folder / "spare"
        busy = {self._path(key) for key in self._uploads}  # a late one's, not called off yet
        size = sum(os.path.getsize(p) for p in self._spares)
        for folder in listed(self.folder, "round-*"):
            round = int(folder.name.split("-")[1])
            if round > up_to:
                continue
            place.mkdir(exist_ok=True)
            # Later rounds take their files from those that nobody needs any more.
            for path in map(str, listed(folder, "*.bin")):
                client = int(os.path.basename(path).split("-")[1])
                if (round, client) in kept or path in busy or is_read(path):
                    continue
                size += os.path.getsize(path)
                if size <= SPARE_BYTES:
                    self._named += 1
                    self._spares.append(str(place / f"{self._named}.bin"))
                    os.replace(path, self._spares[-1])
            if round not in rounds:
                log = self._logs.pop(round, None)
                remove_folder(folder)
                if log is not None:
                    os.close(log.file)

    def close(self) -> None:
        """Closes the files: no other round comes to this process."""
        for log in self._logs.values():
            os.close(log.file)
        self._logs, self._spares = {}, []
        remove_folder(self.folder / "spare")


class Sent(dict[int, Tensors]):
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


def declared(exp: Experiment) -> Callable[[Key, Sequence[Field]], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is
    asked for.
    """

    def check(key: Key, form: Sequence[Field]) -> None:
        kind: type[Payload] = exp.evaluation_reply
        if key.purpose != "evaluate":
            kind = exp.algorithm.exchanges[key.phase].up
        exp.up.check(kind, form, exp.bounds(kind, key.client, key.round))

    return check


def decoder(
    exp: Experiment,
    sent: Sent,
    samples: Callable[[int], int | None],
    tested: Callable[[int], tuple[int, int]],
) -> Callable[[ReceivedReply, Content], Payload | None]:
    """Decodes a reply, and checks what it must be beyond its form: finite values, samples as this
    federation has them, no more of them than there can be, and an update within
    `security.max_norm`. What passes, the methods can use; it is returned but where it depends on
    the model that it will be added to. samples(client): how many it may have trained on, by the
    partition or as its site declared; None: not known. tested(client): labels or values that it may
    have tested a model on, in its own test set and in the balanced one.
    """
    initial = exp.setting.initial.select(exp.shared)
    alone = {exchange.up for exchange in exp.algorithm.exchanges if exp.up.alone(exchange.up)}

    def decode(reply: ReceivedReply, body: Content) -> Payload | None:
        key, form = reply.message.key, reply.message.form
        if key.purpose == "evaluate":
            counts = exp.up.decode(exp.evaluation_reply, form, body, sound=True)
            setting = exp.setting
            counts.check(setting.counts_width, *tested(key.client), setting.more)
            return counts
        kind, x = exp.algorithm.exchanges[key.phase].up, sent.get(key.client)
        following: dict[str, torch.Tensor] = {}
        try:
            payload = exp.up.decode(
                kind,
                form,
                body,
                initial if x is None else x,  # a compressed state is a difference to it
                initial if sent.fill is None else sent.fill,
                True,
                Memory(sent.remembered, following, f"client {key.client}/up/{key.phase}/"),
            )
        except Exception as broken:
            if isinstance(broken, FednetError) or no_memory(broken):
                raise
            # A compressor of the user's own failed at bytes that a client may choose: the run goes
            # on without them.
            raise WrongPart(m.clean(raised(broken, anywhere=True))) from broken
        for name in payload.fields:
            value = getattr(payload, name)
            if isinstance(value, Tensors):
                exp.up.finite(value, name)
                # the mean, or the next training, would leave the finite numbers: one peer could end
                # everybody's run
                if not math.isfinite(value.rough_norm):
                    raise RemoteProtocolError(
                        f"field {name}: a norm above {HUGE:.2g}, where float32 ends"
                    )
            if isinstance(value, Samples):
                _check_samples(value, name, exp)
        run = run_of(payload)
        most_samples = samples(key.client)
        if run is not None and most_samples is not None:
            if run.n > most_samples:
                raise RemoteProtocolError(f"it reports {run.n} samples, but has {most_samples}")
            # Methods may train more often than the configuration asks for.
            train = exp.config.train_of(key.client)
            most_steps = STEPS * max(train.steps or 0, max(1, train.epochs) * max(1, most_samples))
            if run.steps > most_steps:
                raise RemoteProtocolError(
                    f"it says it took {run.steps} steps; {most_steps} would be {STEPS} times those "
                    f"of its configuration"
                )
        most = exp.config.security.max_norm
        if isinstance(most, float):
            for name, _, update in updates(payload, x):
                norm = update.norm()
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
    classes, labels, x = exp.setting.classes, value.y, value.x
    mapped = exp.data is not None and isinstance(exp.data.train[0], dict)
    alike = isinstance(x, dict) == mapped
    if alike and not isinstance(x, dict):
        alike = tuple(x.shape[1:]) == tuple(exp.input_shape)
    if classes and (labels.dim() != 1 or labels.is_floating_point()):
        alike = False
    elif classes and len(labels):
        alike = alike and 0 <= int(labels.min()) <= int(labels.max()) < classes
    if not alike:
        raise RemoteProtocolError(
            f"field {name}: samples of another form than this federation's, of shape "
            f"{tuple(exp.input_shape)} with a label below {classes}"
        )
