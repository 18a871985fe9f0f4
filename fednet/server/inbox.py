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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from fednet.errors import FednetError, RemoteProtocolError, StateError, no_memory
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import EvaluationReply
from fednet.experiment.privacy import updates
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
from fednet.loading import WrongPart, error_text
from fednet.tensors import Tensors
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, SMALL_BYTES, Body
from fednet.wire.codec import cut
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Field, Key
from fednet.wire.payload import Payload, Samples, run_of

HELD_BYTES = 64 << 20  # of decoded payloads in memory
GPU_BYTES = 1 << 30  # the same where tensors stay on a GPU: to write them to a file takes long
SPARE_BYTES = 1 << 30  # of files that wait to be written over
STEPS = 100  # passes in batches of one, for each that is configured: more steps are refused
HUGE = 1.8e19  # the square of a larger norm is no float32


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


class SentModels(dict[int, Tensors]):
    """What replies are decoded with: the weights that each client was sent with its last task.
    remembered: what compressors remembered as the exchange was opened. fill: the model that buffers
    are taken from where the clients' do not cross; None: not known before a reply is counted. The
    rounds write it before tasks go out, the inbox reads it.
    """

    remembered: Mapping[str, torch.Tensor]
    fill: Tensors | None

    def __init__(self) -> None:
        super().__init__()
        self.remembered = {}
        self.fill = None


def form_check(exp: Experiment) -> Callable[[Key, Sequence[Field], bool], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is
    asked for; with an evaluation behind it where the task asks for one.
    """

    # By phase, purpose and whether an evaluation is within: a form that is as declared, where this
    # depends on nothing else.
    known: dict[tuple[int, str, bool], Sequence[Field]] = {}

    def check(key: Key, form: Sequence[Field], evaluates: bool) -> None:
        case = key.phase, key.purpose, evaluates
        if form != known.get(case):
            compare(key, form, evaluates)
            if not exp.sized_by_client:
                known[case] = form

    def compare(key: Key, form: Sequence[Field], evaluates: bool) -> None:
        kind: type[Payload]
        if key.purpose == "train":
            kind = exp.algorithm.exchanges[key.phase].up
            own = form[: len(kind.fields)] if evaluates else form
            exp.up.check(kind, own, exp.bounds(kind, key.client, key.round))
            form = form[len(kind.fields) :]
        if evaluates or key.purpose == "evaluate":
            kind = exp.evaluation_reply
            exp.up.check(kind, form, exp.bounds(kind, key.client, key.round))

    return check


def evaluation_in(
    exp: Experiment, form: Sequence[Field], body: Body, tested: tuple[int, int]
) -> EvaluationReply:
    """A client's evaluation, whose form was checked when it was announced. Raises
    RemoteProtocolError for one that cannot be of this client.
    """
    counts = exp.up.decode(exp.evaluation_reply, form, body, sound=True)
    counts.check(exp.setting.counts_width, *tested, exp.setting.more)
    return counts


def decoder(
    exp: Experiment,
    sent: SentModels,
    samples: Callable[[int], int | None],
    tested: Callable[[int], tuple[int, int]],
) -> Callable[[Sequence[ReceivedReply], Sequence[Body]], Sequence[Payload | None]]:
    """Decodes replies, and checks what they must be beyond their form: finite values, samples as
    this federation has them, no more of them than there can be, and an update within
    `security.max_norm`. What passes can be used by the methods; it is returned, except where it
    depends on the model to which it will be added. samples(client): how many it may have trained
    on, by the partition or as its site declared; None: not known. tested(client): labels or values
    that it may have tested a model on, in its own test set and in the balanced one.
    """
    initial = exp.setting.initial.select(exp.shared)
    alone = {exchange.up for exchange in exp.algorithm.exchanges if exp.up.alone(exchange.up)}
    most_norm = exp.config.security.max_norm

    def decode(
        replies: Sequence[ReceivedReply], bodies: Sequence[Body]
    ) -> Sequence[Payload | None]:
        first = replies[0].message
        key = first.key
        form: Sequence[Field] = first.form
        if key.purpose == "evaluate":
            clients = [reply.key.client for reply in replies]
            return [evaluation_in(exp, form, b, tested(c)) for c, b in zip(clients, bodies)]
        kind = exp.algorithm.exchanges[key.phase].up
        evaluation_form: Sequence[Field] = ()
        evaluations: list[Body] = []
        if len(form) > len(kind.fields):
            cuts = [cut(form, body, len(kind.fields)) for body in bodies]
            (form, _), (evaluation_form, _) = cuts[0]
            bodies = [own for (_, own), _ in cuts]
            evaluations = [rest for _, (_, rest) in cuts]
        fill = initial if sent.fill is None else sent.fill
        try:
            if exp.up.compresses(kind):
                payloads = [
                    compressed(reply, kind, form, body, fill)
                    for reply, body in zip(replies, bodies)
                ]
            else:
                payloads = exp.up.decode_all(kind, form, bodies, fill=fill, sound=True)
        except Exception as broken:
            if isinstance(broken, FednetError) or no_memory(broken):
                raise
            # A compressor of the user's own failed at bytes that a client may choose: the run goes
            # on without them.
            raise WrongPart(m.clean(error_text(broken, anywhere=True))) from broken
        for reply, payload in zip(replies, payloads):
            check(reply, payload)
        for reply, body in zip(replies, evaluations):
            client = reply.key.client
            try:
                reply.evaluation = evaluation_in(exp, evaluation_form, body, tested(client))
            except RemoteProtocolError as broken:  # it decides nothing of the training
                reply.evaluation_refused = str(broken)
        if kind not in alone and sent.fill is None:
            for reply in replies:
                reply.remembered.clear()
            return [None] * len(payloads)
        return payloads

    def compressed(
        reply: ReceivedReply,
        kind: type[Payload],
        form: Sequence[Field],
        body: Body,
        fill: Tensors,
    ) -> Payload:
        key = reply.key
        x = sent.get(key.client, initial)  # a compressed state is a difference to it
        past = Memory(sent.remembered, reply.remembered, f"client {key.client}/up/{key.phase}/")
        return exp.up.decode(kind, form, body, x, fill, True, past)

    def check(reply: ReceivedReply, payload: Payload) -> None:
        client = reply.key.client
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
                if payload.fields[name].kind not in exp.up.chains:
                    reply.norms[name] = value.rough_norm
            if isinstance(value, Samples):
                _check_samples(value, name, exp)
        run = run_of(payload)
        most_samples = samples(client)
        if run is not None and most_samples is not None:
            if run.n > most_samples:
                raise RemoteProtocolError(f"it reports {run.n} samples, but has {most_samples}")
            # Methods may train more often than the configuration asks for.
            train = exp.config.train_of(client)
            most_steps = STEPS * max(train.steps or 0, max(1, train.epochs) * max(1, most_samples))
            if run.steps > most_steps:
                raise RemoteProtocolError(
                    f"it says it took {run.steps} steps; {most_steps} would be {STEPS} times those "
                    f"of its configuration"
                )
        if isinstance(most_norm, float):
            for name, _, update in updates(payload, sent.get(client)):
                norm = update.norm()
                if norm > most_norm:
                    raise RemoteProtocolError(
                        f"{name} is an update of norm {norm:.4g}; security.max_norm allows "
                        f"{most_norm:g}"
                    )

    return decode


def _check_samples(value: Samples, name: str, exp: Experiment) -> None:
    """Samples are as those of this federation: of its shape, in a mapping only where its own are,
    with one label each below `classes`.
    """
    classes = exp.setting.classes
    labels = value.y
    x = value.x
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
