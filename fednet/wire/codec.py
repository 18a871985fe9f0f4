"""Payloads to bytes and back.

The form of a payload is its declaration: field by field, tensors of the shared layout as one vector
(with buffers and counters behind it), numbers as 8 bytes, samples as their arrays. Large values are
not copied: a `Body` is a list of segments that are read in ranges, so that a broadcast is encoded
once and all sends share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fednet.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from fednet.files import Buffer, digest
from fednet.tensors import Layout, Tensors
from fednet.wire import packing
from fednet.wire import payload as payloads
from fednet.wire.compress import Chain
from fednet.wire.messages import PART, Field
from fednet.wire.payload import P, Payload
from fednet.wire.sending import ANEW, Cache, Past, Sender

# (Empty, not zeros: no kernel may run at import, before `train.portable` chooses among them.)
_NO_FLOATS, _NO_INTEGERS = torch.empty(0), torch.empty(0, dtype=torch.int64)


class Body:
    """An encoded payload: segments one behind the other, never written to."""

    def __init__(self, segments: Sequence[Buffer] = ()) -> None:
        self.segments = [memoryview(s).cast("B") for s in segments if len(s)]
        self.size = sum(len(s) for s in self.segments)

    def slice(self, start: int, end: int) -> memoryview:
        """Bytes [start, end): a view where they lie in one segment, else a copy."""
        found, at = [], 0
        for s in self.segments:
            if at < end and start < at + len(s):
                found.append(s[max(0, start - at) : end - at])
            at += len(s)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def parts(self, size: int = PART) -> int:
        """How many parts of `size` bytes it has; the last may be shorter."""
        return math.ceil(self.size / size)

    def part(self, index: int, size: int = PART) -> memoryview:
        return self.slice(index * size, min(self.size, (index + 1) * size))

    def whole(self) -> memoryview:
        return self.slice(0, self.size)

    def check(self) -> bytes:
        """The digest of its bytes, however they are cut into segments."""
        return digest(self.segments)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Its form for the header, its body, and the payload as the receiver will see it."""

    form: tuple[Field, ...]
    body: Body
    seen: Payload

    @property
    def raw(self) -> int:
        return sum(f.raw for f in self.form)


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes payloads of one direction.

    layout: of what crosses. chains: compressor chains by kind. buffers: whether they cross. exempt:
    names of buffers that may hold what is not finite, since the initial model's do.
    """

    layout: Layout
    chains: Mapping[str, Chain]
    buffers: bool = True
    exempt: frozenset[str] = frozenset()

    @property
    def shared(self) -> bool:
        """Whether a chain needs both ends to remember."""
        return any(chain.shared for chain in self.chains.values())

    def crossing(self, form: str) -> Layout:
        """The layout of a field: parameters only, or with buffers where these cross."""
        return self.layout if form == "tensors" and self.buffers else self.layout.parameters

    # -- encoding ----------------------------------------------------------------------------------
    def encode(
        self,
        payload: Payload,
        rng: Callable[[str], np.random.Generator] | None = None,
        residuals: dict[str, torch.Tensor] | None = None,
        reference: Tensors | None = None,
        cache: Cache | None = None,
        slot: str = "",
        past: Past = ANEW,
    ) -> Encoded:
        """Encodes a payload. `residuals` (read and rewritten) feeds errors back, each under `slot`
        and its field's name, so that the exchanges of a round keep apart; `reference` is what a
        lossily compressed state is sent as a difference to; `cache`: what one broadcast has
        compressed first, by field: what all its clients share; `past`: what the receiver remembers
        too, where a chain says that it does.
        """
        sender = Sender(rng, residuals, cache, slot, past)
        form: list[Field] = []
        segments: list[Buffer] = []
        seen: dict[str, object] = {}
        for name, field in payload.fields.items():
            value = getattr(payload, name)
            if (found := packing.misfit(field.form, value)) is not None:
                where = f"{type(payload).__qualname__}.{name}"
                raise ConfigError(f"{where}: expected {packing.VALUES[field.form][1]}, got {found}")
            chain = self.chains.get(field.kind)
            if field.form in ("tensors", "parameters"):
                part = self._tensors(value, field.form)
                raw, kept = part.layout.nbytes, value
                if chain is None:
                    segments.append(packing.raw(part.vector))
                else:
                    base = self.base(field.kind, reference)
                    data, decoded = sender.send(chain, name, value, part.vector, base)
                    segments.append(data)
                    kept = value.to("cpu").with_vector(decoded)
                segments += [packing.raw(part.buffers), packing.raw(part.counters)]
                size = sum(len(s) for s in segments[-3:])
                seen[name] = kept
                form.append(Field(name, field.kind, size, raw))
                continue
            arrays, parts = packing.pack(field.form, value)
            size = sum(len(d) for d in arrays)
            segments += arrays
            seen[name] = value
            form.append(Field(name, field.kind, size, size, parts))
        return Encoded(tuple(form), Body(segments), type(payload)(**seen))

    def base(self, kind: str, reference: Tensors | None) -> torch.Tensor | None:
        """What a field of that kind is sent as a difference to: a state, if its chain loses
        anything (a difference and a sum would not give back every bit).
        """
        chain = self.chains.get(kind)
        if kind != "state" or reference is None or chain is None or not chain.lossy:
            return None
        return reference.vector.cpu()

    def _tensors(self, value: Tensors, form: str) -> Tensors:
        layout = self.crossing(form)
        if value.layout == layout:
            return value.to("cpu")
        if value.layout.parameters != layout.parameters:
            raise LocalProtocolError("a payload's tensors must have the layout of what crosses")
        value = value.to("cpu")
        if form == "parameters" or not self.buffers:
            return value.params
        return Tensors(
            layout,
            value.vector,
            torch.zeros(layout.size("buffer")),
            torch.zeros(layout.size("counter"), dtype=torch.int64),
        )

    # -- decoding ----------------------------------------------------------------------------------
    def check(
        self,
        kind: type[Payload],
        form: Sequence[Field],
        bounds: Mapping[str, int] | None = None,
        round: int = 0,
    ) -> None:
        """Raises RemoteProtocolError where a form is not what `kind` declares, before a byte of the
        body is asked for. bounds: the largest size in bytes of the fields whose declaration leaves
        it open; None: what is here is here.
        """
        declared = list(kind.fields.items())
        if [f.name for f in form] != [name for name, _ in declared]:
            raise RemoteProtocolError(
                f"fields {[f.name for f in form]}, expected {[n for n, _ in declared]}"
            )
        for got, (name, field) in zip(form, declared):
            if got.kind != field.kind:
                raise RemoteProtocolError(
                    f"field {name}: kind {got.kind!r}, expected {field.kind!r}"
                )
            bound = got.size if bounds is None else bounds.get(name)
            low, high = self.size_of(field.kind, field.form, bound, round)
            if not low <= got.size <= high:
                raise RemoteProtocolError(
                    f"field {name}: {got.size} bytes, expected "
                    f"{low if low == high else f'{low} to {high}'}"
                )
            raw = got.size
            if field.form in ("tensors", "parameters"):
                raw = self.crossing(field.form).nbytes
            if got.raw != raw:
                raise RemoteProtocolError(
                    f"field {name}: {got.raw} bytes before compression, expected {raw}"
                )

    def size_of(self, kind: str, form: str, bound: int | None, round: int = 0) -> tuple[int, int]:
        """(smallest, largest) bytes of a field; equal where the declaration fixes them. round: see
        `compress.Chain.nbytes`.
        """
        if form in ("tensors", "parameters"):
            layout = self.crossing(form)
            chain = self.chains.get(kind)
            rest = layout.nbytes - 4 * layout.sizes[0]
            if chain is None:
                return layout.nbytes, layout.nbytes
            size, exact = chain.nbytes(layout.sizes[0], round)
            return (size if exact else 0) + rest, size + rest
        if form == "run":
            return 24, 24
        if form in ("float", "int"):
            return 8, 8
        return 0, bound if bound is not None else 0

    def decode(
        self,
        kind: type[P],
        form: Sequence[Field],
        body: Buffer,
        reference: Tensors | None = None,
        fill: Tensors | None = None,
        sound: bool = False,
        past: Past = ANEW,
    ) -> P:
        """The payload. `fill` gives the buffers of tensors whose own do not cross (`model.buffers:
        local | server`). sound: its form was held against its declaration (`check`), and its
        tensors are known to be finite, or the caller asks by `finite`. past: as `encode` has it.
        Raises RemoteProtocolError where the form is not what `kind` declares, or the bytes are not
        what the form says, or not finite.
        """
        if not sound:
            self.check(kind, form, None, past.round)
        view, at, values = memoryview(body).cast("B"), 0, {}
        if sum([f.size for f in form]) != len(view):
            raise RemoteProtocolError(
                f"payload of {len(view)} bytes, announced were {sum(f.size for f in form)}"
            )
        for got, (name, field) in zip(form, kind.fields.items()):
            data = view[at : at + got.size]
            at += got.size
            if field.form in ("tensors", "parameters"):
                base = self.base(field.kind, reference)
                value = self._read(data, field, base, past, name)
                if not sound:
                    self.finite(value, name)
                whole = field.form == "tensors" and fill is not None and not self.buffers
                values[name] = value.with_buffers(fill) if whole and fill is not None else value
            else:
                values[name] = packing.unpack(field.form, data, got, name)
                packing.within(field, values[name], name)
        return kind(**values)

    def _read(
        self,
        data: memoryview,
        field: payloads.Field,
        base: torch.Tensor | None,
        past: Past,
        name: str,
    ) -> Tensors:
        layout = self.crossing(field.form)
        p, b, i = layout.sizes
        rest = 4 * b + 8 * i
        head, buffers, counters = data, _NO_FLOATS, _NO_INTEGERS
        if rest:
            head, tail = data[: len(data) - rest], data[len(data) - rest :]
            buffers = packing.floats(tail[: 4 * b])
            counters = torch.from_numpy(np.frombuffer(tail[4 * b :], "<i8").astype(np.int64))
        chain = self.chains.get(field.kind)
        if chain is None:
            return packing.tensors(layout, head, buffers, counters)
        vector = chain.receive(head, p, past.of(name), past.round)
        return Tensors(layout, vector if base is None else base + vector, buffers, counters)

    def alone(self, kind: type[Payload]) -> bool:
        """Whether payloads of that kind hold no more than crosses, and are decoded alike whatever
        is their `reference` and `fill`.
        """
        return not any(
            f.kind in self.chains or (f.form == "tensors" and not self.buffers)
            for f in kind.fields.values()
        )

    def finite(self, value: Tensors, name: str) -> None:
        """Raises RemoteProtocolError for a field with a value that is not finite, but in buffers
        that were not in the initial model either.
        """
        if not value.is_finite(self.exempt):
            raise RemoteProtocolError(f"field {name}: a value is not finite")


def not_finite(initial: Tensors) -> frozenset[str]:
    """Names of the buffers that are not finite in a model as it begins (a mask of -inf, say): a
    codec's `exempt`.
    """
    buffers = (s.name for s in initial.layout.slots if s.role == "buffer")
    return frozenset(n for n in buffers if not bool(torch.isfinite(initial[n]).all()))
