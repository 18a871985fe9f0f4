"""Payloads to bytes and back.

The form of a payload is its declaration: field by field, tensors of the shared layout as one vector
(with buffers and counters behind it), numbers as 8 bytes, samples as their arrays. What comes is
compared with its declaration: sizes, dtype, shape, range, and that it is finite.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fednet.buffers import copy_to_lent
from fednet.errors import LocalProtocolError, RemoteProtocolError
from fednet.files import Buffer
from fednet.tensors import Layout, Tensors
from fednet.wire.body import NOTHING, Body, tensor_bytes
from fednet.wire.compress import Chain
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Field
from fednet.wire.payload import (
    DTYPES,
    NAMES,
    NUMBERS,
    DeclaredField,
    LocalRun,
    P,
    Payload,
    Samples,
    pack_number,
    tensor_mismatch,
)

SAMPLE_DTYPES = (torch.uint8, torch.int64, torch.float32)
LABEL_DTYPES = (torch.int64, torch.float32)
MAX_AXES = 8
LINE = 16  # float32 values in a line of the cache
MAX_ELEMENTS = 1 << 40

# (Empty, not zeros: no kernel may run at import, before `train.portable` chooses among them.)
_NO_FLOATS = torch.empty(0)
_NO_INTEGERS = torch.empty(0, dtype=torch.int64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def cut(
    form: Sequence[Field], body: Body, count: int
) -> tuple[tuple[Sequence[Field], Body], tuple[Sequence[Field], Body]]:
    """(form, body) of a payload's first `count` fields, and of the others behind them."""
    if count == len(form):
        return (form, body), ((), NOTHING)
    first, rest = body.split(form, count)
    return (form[:count], first), (form[count:], rest)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Its form for the header, its body, and the payload as the receiver will see it."""

    form: tuple[Field, ...]
    body: Body
    seen: Payload


NO_PAST = Memory({}, {})

# What one broadcast has compressed, by field: (its value, the bytes sent, what the receiver has
# then, what arrived there).
Cache = dict[str, tuple[Tensors, bytes, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Compression:
    """What the compression of a message takes beside the message."""

    rng: Callable[[str], np.random.Generator] | None = None
    """By a field's name, where its draws come from."""
    errors: Memory | None = None
    """What earlier messages left out, which is fed back where the sender alone remembers. It is
    read and rewritten.
    """
    past: Memory = NO_PAST
    """What the receiver remembers too, where a chain needs it."""
    reference: Tensors | None = None
    """The state that both ends have: a lossily compressed state is sent as a difference to it."""
    cache: Cache | None = None
    """What was compressed already of a broadcast, which all its clients share."""


PLAIN = Compression()


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes payloads of one direction."""

    layout: Layout
    """Of what crosses."""
    chains: Mapping[str, Chain]
    """Compressor chains by kind."""
    buffers: bool = True
    """Whether they cross."""
    exempt: frozenset[str] = frozenset()
    """Names of buffers that may hold values that are not finite, since the initial model's do."""

    @cached_property
    def shared(self) -> bool:
        """Whether a chain needs both ends to remember."""
        return any(chain.shared for chain in self.chains.values())

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """By a field's form, the layout of its tensors."""
        parameters = self.layout.parameters
        return {
            "tensors": self.layout if self.buffers else parameters,
            "parameters": parameters,
        }

    def self_contained(self, kind: type[Payload]) -> bool:
        """Whether payloads of that kind hold no more than crosses, and are decoded alike whatever
        is their `reference` and `fill`.
        """
        for field in kind.fields.values():
            if field.kind in self.chains or (field.form == "tensors" and not self.buffers):
                return False
        return True

    def compresses(self, kind: type[Payload]) -> bool:
        """Whether a field of payloads of that kind is compressed."""
        if not self.chains:
            return False
        return any(field.kind in self.chains for field in kind.fields.values())

    def base(self, kind: str, reference: Tensors | None) -> torch.Tensor | None:
        """The vector that a field of that kind is sent as a difference to: a state, if its chain
        loses anything (a difference and a sum would not give back every bit).
        """
        chain = self.chains.get(kind)
        if kind != "state" or reference is None or chain is None or not chain.lossy:
            return None
        return reference.vector.cpu()

    # -- encoding ----------------------------------------------------------------------------------
    def encode(self, payload: Payload, how: Compression = PLAIN, stay: bool = False) -> Encoded:
        """Encodes a payload. how: what its compression takes beside it. stay: tensors may stay on a
        GPU, for a receiver in this process.
        """
        form: list[Field] = []
        values: list[Buffer | Tensors] = []
        seen: dict[str, object] = {}
        compresses = False
        for name, field in payload.fields.items():
            value = getattr(payload, name)
            seen[name] = value
            layout = self.layouts.get(field.form)
            if layout is None:
                data, parts = _pack_field(field.form, value)
                values.append(data)
                form.append(Field(name, field.kind, len(data), len(data), parts))
                continue
            part = value if value.layout == layout else _with_layout(value, layout)
            chain = self.chains.get(field.kind)
            if not stay or chain is not None:
                part = part.to("cpu")
            if chain is None:
                values.append(part)
                form.append(Field(name, field.kind, layout.nbytes, layout.nbytes, []))
                continue
            compressed, decoded = self._compress(name, field.kind, chain, value, part, how)
            seen[name] = value.to("cpu").with_vector(decoded)
            compresses = True
            data = _join(
                [memoryview(compressed), tensor_bytes(part.buffers), tensor_bytes(part.counters)]
            )
            values.append(data)
            form.append(Field(name, field.kind, len(data), layout.nbytes, []))
        if compresses:
            payload = type(payload)(**seen)
        return Encoded(tuple(form), Body(values), payload)

    def _compress(
        self, name: str, kind: str, chain: Chain, value: Tensors, part: Tensors, how: Compression
    ) -> tuple[bytes, torch.Tensor]:
        """Returns the bytes of a field's vector, and the vector as the receiver will have it.
        part: what crosses of the value.
        """
        feedback = chain.feedback if chain.shared else None
        memory = None if feedback is None else how.past.of(name)
        mark = name
        if feedback is not None and memory is not None:
            mark = f"{name}/{feedback.prefix(memory).hex()}"
        # The cache holds the value: an identity alone could be a later one's.
        known = None if how.cache is None else how.cache.get(mark)
        if known is not None and known[0] is value:
            _, data, decoded, arrived = known
            if feedback is not None and memory is not None:
                feedback.repeat_sent(arrived, memory)
            return data, decoded
        # A broadcast feeds one error back, that of the value which all share; a value of one
        # client's own has none.
        if memory is None and how.errors is not None and known is None:
            memory = how.errors.of(name)
        base = self.base(kind, how.reference)
        wanted = part.vector if base is None else part.vector - base
        draws = np.random.default_rng(0) if how.rng is None else how.rng(name)
        data, arrived = chain.send(wanted, draws, memory)
        decoded = arrived if base is None else base + arrived
        if how.cache is not None:
            how.cache.setdefault(mark, (value, data, decoded, arrived))
        return data, decoded

    # -- checking ----------------------------------------------------------------------------------
    def check(
        self,
        kind: type[Payload],
        form: Sequence[Field],
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        """Raises RemoteProtocolError where a form is not what `kind` declares, before a byte of the
        body is asked for. bounds: the largest size in bytes of the fields whose declaration leaves
        it open; None: any size.
        """
        names = list(map(operator.attrgetter("name"), form))
        if names != list(kind.fields):
            raise RemoteProtocolError(f"fields {names}, expected {list(kind.fields)}")
        for got, (name, field) in zip(form, kind.fields.items()):
            if got.kind != field.kind:
                raise RemoteProtocolError(
                    f"field {name}: kind {got.kind!r}, expected {field.kind!r}"
                )
            bound = got.size if bounds is None else bounds.get(name)
            low, high = self.size_of(field.kind, field.form, bound)
            if not low <= got.size <= high:
                raise RemoteProtocolError(
                    f"field {name}: {got.size} bytes, expected "
                    f"{low if low == high else f'{low} to {high}'}"
                )
            raw = got.size
            if field.form in self.layouts:
                raw = self.layouts[field.form].nbytes
            if got.raw != raw:
                raise RemoteProtocolError(
                    f"field {name}: {got.raw} bytes before compression, expected {raw}"
                )

    def size_of(self, kind: str, form: str, bound: int | None) -> tuple[int, int]:
        """(smallest, largest) bytes of a field; equal where the declaration fixes them."""
        layout = self.layouts.get(form)
        if layout is not None:
            chain = self.chains.get(kind)
            if chain is None:
                return layout.nbytes, layout.nbytes
            rest = layout.nbytes - 4 * layout.sizes[0]
            size, exact = chain.nbytes(layout.sizes[0])
            return (size if exact else 0) + rest, size + rest
        if form in NUMBERS:
            return NUMBERS[form].size, NUMBERS[form].size
        return 0, bound or 0

    def finite(self, value: Tensors, name: str) -> None:
        """Raises RemoteProtocolError for a field with a value that is not finite, but in buffers
        that were not in the initial model either.
        """
        if not value.is_finite(self.exempt):
            raise RemoteProtocolError(f"field {name}: a value is not finite")

    # -- decoding ----------------------------------------------------------------------------------
    def decode(
        self,
        kind: type[P],
        form: Sequence[Field],
        body: Body,
        reference: Tensors | None = None,
        fill: Tensors | None = None,
        sound: bool = False,
        past: Memory = NO_PAST,
    ) -> P:
        """The payload. `fill` gives the buffers of tensors whose own do not cross (`model.buffers:
        local | server`). sound: its form was checked, and its tensors are known to be finite, or
        the caller asks by `finite`. past: as `encode` has it. Raises RemoteProtocolError where the
        form is not what `kind` declares, or the bytes are not what the form says, or not finite.
        """
        (payload,) = self.decode_all(kind, form, [body], reference, fill, sound, past)
        return payload

    def decode_all(
        self,
        kind: type[P],
        form: Sequence[Field],
        bodies: Sequence[Body],
        reference: Tensors | None = None,
        fill: Tensors | None = None,
        sound: bool = False,
        past: Memory = NO_PAST,
    ) -> list[P]:
        """Several payloads of one form, see `decode`. The bytes of tensors of several are copied
        together: they should be short.
        """
        if not sound:
            self.check(kind, form)
        size = sum(map(operator.attrgetter("size"), form))
        for body in bodies:
            if size != body.size:
                raise RemoteProtocolError(f"payload of {body.size} bytes, announced were {size}")
        columns: list[list[Any]] = []
        parts: Sequence[Any]  # of one field, by payload
        for got, (name, field), parts in zip(form, kind.fields.items(), _columns(form, bodies)):
            layout = self.layouts.get(field.form)
            if layout is None:
                columns.append([_unpack(field, part, got, name) for part in parts])
                continue
            if isinstance(parts[0], Tensors):
                values = list(parts)
            else:
                chain = self.chains.get(field.kind)
                base = self.base(field.kind, reference)
                values = self._tensors(layout, chain, parts, base, past, name)
            if not sound:
                for value in values:
                    self.finite(value, name)
            if field.form == "tensors" and fill is not None and not self.buffers:
                values = [value.with_buffers(fill) for value in values]
            columns.append(values)
        if not columns:
            return [kind() for _ in bodies]
        return [kind(*values) for values in zip(*columns)]

    def _tensors(
        self,
        layout: Layout,
        chain: Chain | None,
        parts: Sequence[memoryview],
        base: torch.Tensor | None,
        past: Memory,
        name: str,
    ) -> list[Tensors]:
        """The tensors of the field `name` of several payloads: the vector, and behind it what is
        not compressed.
        """
        cut = len(parts[0]) - (layout.nbytes - 4 * layout.sizes[0])  # the vector ends there
        if chain is None:
            vectors = rows_of_floats([part[:cut] for part in parts])
        else:
            memory = past.of(name)
            vectors = [chain.receive(part[:cut], layout.sizes[0], memory) for part in parts]
            if base is not None:
                vectors = [base + vector for vector in vectors]
        if cut == len(parts[0]):
            return [Tensors(layout, vector, _NO_FLOATS, _NO_INTEGERS) for vector in vectors]
        found: list[Tensors] = []
        end = cut + 4 * layout.sizes[1]
        for vector, part in zip(vectors, parts):
            last = np.frombuffer(part[end:], "<i8")
            counters = torch.from_numpy(last.astype(np.int64))
            found.append(Tensors(layout, vector, floats(part[cut:end]), counters))
        return found


def _columns(form: Sequence[Field], bodies: Sequence[Body]) -> Iterable[Sequence[Any]]:
    """For each field of a form, what each payload has of it."""
    if bodies[0].by_reference:  # it is alone
        return [[v if isinstance(v, Tensors) else memoryview(v)] for v in bodies[0].values]
    wholes = [body.to_bytes() for body in bodies]
    ends = itertools.accumulate([field.size for field in form])
    return [[whole[end - f.size : end] for whole in wholes] for f, end in zip(form, ends)]


def not_finite(initial: Tensors) -> frozenset[str]:
    """Names of the buffers that are not finite in the initial model (a mask of -inf, say): a
    codec's `exempt`.
    """
    buffers = (s.name for s in initial.layout.slots if s.role == "buffer")
    return frozenset(n for n in buffers if not bool(torch.isfinite(initial[n]).all()))


def _with_layout(value: Tensors, layout: Layout) -> Tensors:
    """Returns what crosses of a value of another layout in a field of that one: without buffers, or
    with zeros in place of those that it does not have. Raises LocalProtocolError for other
    parameters.
    """
    if value.layout.parameters != layout.parameters:
        raise LocalProtocolError("a payload's tensors must have the layout of what is sent")
    if layout == layout.parameters:
        return value.params
    return Tensors.zeros(layout, value.device).with_vector(value.vector)


def _pack_field(form: str, value: Any) -> tuple[Buffer, list[tuple[str, str, list[int]]]]:
    """Returns the bytes of a field other than tensors, and name, dtype and shape of each array that
    they are of.
    """
    if form in NUMBERS:
        return memoryview(pack_number(form, value)), []
    if form != "samples":
        named = {"": value}
    elif isinstance(value.x, dict):
        named = {**{f"x.{key}": x for key, x in value.x.items()}, "y": value.y}
    else:
        named = {"x": value.x, "y": value.y}
    parts = [(key, NAMES[v.dtype], list(v.shape)) for key, v in named.items()]
    return _join([tensor_bytes(v) for v in named.values()]), parts


def _join(arrays: list[memoryview]) -> Buffer:
    """Returns bytes one behind the other, without a copy where all are in the first."""
    if len(arrays[0]) == sum(map(len, arrays)):
        return arrays[0]
    return b"".join(arrays)


def floats(data: Buffer) -> torch.Tensor:
    """Values that share the memory of `data` where it may be written to and is aligned."""
    values = np.frombuffer(data, dtype="<f4")
    if not (values.flags.writeable and values.flags.aligned):
        values = copy_to_lent(values)
    return torch.from_numpy(values)


def rows_of_floats(parts: Sequence[memoryview]) -> list[torch.Tensor]:
    """The values of each of several pieces of equal length. One shares its memory as `floats` does;
    several are copied into one array, each from the beginning of a line of the cache on, as in
    memory of its own: what is computed of them then has the same bits.
    """
    if len(parts) == 1:
        return [floats(parts[0])]
    count = len(parts[0]) // 4
    rows = torch.empty(len(parts), -(-count // LINE) * LINE)
    place = rows.numpy().data.cast("B")
    for i, part in enumerate(parts):
        start = 4 * i * rows.shape[1]
        place[start : start + len(part)] = part
    return list(rows[:, :count].unbind())


def _unpack(declared: DeclaredField, data: memoryview, got: Field, name: str) -> Any:
    """The value of a field that came, other than tensors, of the type that its form says. Raises
    RemoteProtocolError for what can be none, or is not of the dtype, rank or range declared.
    """
    if declared.form == "run":
        n, steps, loss = NUMBERS["run"].unpack(data)
        if n < 0 or steps < 0 or not abs(loss) <= _FLOAT32_MAX:
            raise RemoteProtocolError(
                f"field {name}: n={n}, steps={steps}, loss={loss} are not all finite and >= 0"
            )
        return LocalRun(n, steps, loss)
    value: Any
    if declared.form in NUMBERS:
        (value,) = NUMBERS[declared.form].unpack(data)
        if not math.isfinite(value):
            raise RemoteProtocolError(f"field {name}: {value} is not finite")
        low = high = value
    else:
        arrays = _arrays(data, got, name)
        if declared.form == "samples":
            value = _samples(arrays, name)
            x = value.x
        elif list(arrays) != [""]:
            raise RemoteProtocolError(f"field {name}: expected one array")
        else:
            value = x = arrays[""]
        for part in x.values() if isinstance(x, dict) else (x,):
            other = tensor_mismatch(declared, part)
            if other is not None:
                raise RemoteProtocolError(f"field {name}: {other}")
        open_ended = declared.low == -math.inf and declared.high == math.inf
        if isinstance(x, dict) or not x.numel() or open_ended:
            return value
        low = float(x.min())
        high = float(x.max())
    if not declared.low <= low <= high <= declared.high:
        raise RemoteProtocolError(
            f"field {name}: values from {low:g} to {high:g}, declared are "
            f"{declared.low:g} to {declared.high:g}"
        )
    return value


def _arrays(data: memoryview, got: Field, name: str) -> dict[str, torch.Tensor]:
    """The arrays that a field's bytes hold, as its form says."""
    arrays = dict[str, torch.Tensor]()
    at = 0
    for part, dtype, shape in got.parts:
        if dtype not in DTYPES or len(shape) > MAX_AXES:
            raise RemoteProtocolError(f"field {name}: dtype {dtype!r} or shape {shape} not allowed")
        count = math.prod(shape)
        size = count * DTYPES[dtype].itemsize
        # An empty array may have any sides, and those that no tensor can have do not show in its
        # bytes.
        if at + size > len(data) or math.prod(s for s in shape if s) > MAX_ELEMENTS:
            raise RemoteProtocolError(
                f"field {name}: arrays of more than the {len(data)} bytes announced"
            )
        mine = data[at : at + size]
        at += size
        if dtype == "bool" and any(b > 1 for b in set(mine)):
            raise RemoteProtocolError(f"field {name}: a truth value is neither 0 nor 1")
        if count:
            value = torch.frombuffer(bytearray(mine), dtype=DTYPES[dtype]).view(shape)
        else:
            value = torch.zeros(shape, dtype=DTYPES[dtype])
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RemoteProtocolError(f"field {name}: a value is not finite")
        arrays[part] = value
    if at != len(data) or len(arrays) != len(got.parts):
        raise RemoteProtocolError(f"field {name}: arrays of {at} bytes, announced were {len(data)}")
    return arrays


def _samples(arrays: dict[str, torch.Tensor], name: str) -> Samples:
    y = arrays.pop("y", None)
    if (
        y is None
        or not arrays
        or any(v.dim() < 1 or v.shape[:1] != y.shape[:1] for v in (y, *arrays.values()))
    ):
        raise RemoteProtocolError(f"field {name}: samples need x and y of one length")
    if y.dtype not in LABEL_DTYPES or any(v.dtype not in SAMPLE_DTYPES for v in arrays.values()):
        raise RemoteProtocolError(
            f"field {name}: samples are uint8, int64 or float32, their labels int64 or float32"
        )
    if list(arrays) == ["x"]:
        return Samples(arrays["x"], y)
    if not all(k.startswith("x.") for k in arrays):
        raise RemoteProtocolError(f"field {name}: arrays {list(arrays)} are no samples")
    return Samples({k[2:]: v for k, v in arrays.items()}, y)
