"""Chains of compressors: `[topk(0.01), qsgd(8), zstd]`, either way, for the kinds that a
configuration names.

A chain takes a vector of float32, and nothing else: integer counters and labels never pass through
one. Its parts come in this order, each at most once: one that sees to what was left out (ef, noef,
dgc, ...), one that leaves fewer numbers (topk, randk, ...), one that writes them (fp16, bf16, int8,
qsgd, sign, ...), one that shortens bytes (zstd). The number of values is known to both ends, and
the length of what a chain makes follows from it; with zstd, or where the values decide how many
cross, that is a bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fednet import registry
from fednet.errors import ConfigError, RemoteProtocolError
from fednet.loading import Arguments, Check, check_returns
from fednet.options import instance
from fednet.wire.compressors.base import (
    CompressorPart,
    Feedback,
    Floats,
    Lossless,
    Memory,
    Reduce,
    Select,
    Values,
)
from fednet.wire.compressors.feedback import ErrorFeedback

ORDER = (
    "the order is one of ef, noef, ef21, diana, dgc, delta, one of topk, randk, threshold, "
    "powersgd, one of fp16, bf16, int8, int4, qsgd, sign, zstd, each at most once."
)


@dataclass(frozen=True, slots=True)
class Chain:
    """Compressors in order; the empty chain writes float32. `text` is its configuration."""

    feedback: Feedback | None = None
    select: Reduce | None = None
    values: Values | None = None
    lossless: Lossless | None = None
    text: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[CompressorPart, ...]:
        all_ = (self.feedback, self.select, self.values, self.lossless)
        return tuple(p for p in all_ if p is not None)

    @property
    def lossy(self) -> bool:
        return any(p.lossy for p in self.parts)

    @property
    def remembers(self) -> bool:
        """Whether the sender keeps anything from message to message."""
        return (self.feedback is not None and not self.feedback.turned_off) or (
            self.select is not None and self.select.remembers
        )

    @property
    def shared(self) -> bool:
        """Whether both ends must remember the same of earlier messages."""
        return self.feedback is not None and self.feedback.shared

    @property
    def fixed(self) -> bool:
        """Whether the length of what it makes follows from the number of values."""
        return self.lossless is None and (self.select is None or self.select.fixed)

    def __str__(self) -> str:
        return "[" + ", ".join(self.text) + "]"

    def nbytes(self, numel: int) -> tuple[int, bool]:
        """Length of numel encoded values, and whether that is exact; without, it is an upper
        bound.
        """
        head = 0 if self.feedback is None else self.feedback.head
        size = self._raw(numel)
        if self.lossless is not None:
            size = self.lossless.bound(size)
        return head + size, self.fixed

    # -- with what is remembered -------------------------------------------------------------------
    def send(
        self, x: torch.Tensor, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, torch.Tensor]:
        """(what crosses, what the receiver makes of it) of a vector. memory: read and written;
        None: what is left out is lost.
        """
        if self.feedback is None or memory is None:
            data = self.encode(x, rng, memory)
            return data, self.decode(data, x.numel())
        target = self.feedback.target(x, memory)
        data = self.encode(target, rng, memory)
        decoded = self.decode(data, x.numel())
        return self.feedback.prefix(memory) + data, self.feedback.remember_sent(
            target, decoded, memory
        )

    def receive(self, data: memoryview, numel: int, memory: Memory) -> torch.Tensor:
        """What `send` made, for whoever remembers the same. Raises RemoteProtocolError as `decode`
        does, and where something else is remembered.
        """
        if self.feedback is None or not self.feedback.shared:
            return self.decode(data, numel)
        head = self.feedback.head
        if len(data) < head:
            raise RemoteProtocolError(f"{self}: {len(data)} bytes for {numel} values.")
        memory = self.feedback.read_prefix(bytes(data[:head]), memory)
        return self.feedback.remember_received(self.decode(data[head:], numel), memory)

    # -- without -----------------------------------------------------------------------------------
    def encode(
        self, vector: torch.Tensor, rng: np.random.Generator, memory: Memory | None = None
    ) -> bytes:
        """vector: (n,) float32 on the CPU. Draws from `rng` only where the chain is stochastic.

        Values that are not finite are not hidden: `decode` gives them back so, or refuses.
        """
        x: Floats = vector.detach().numpy()
        head = b""
        if self.select is not None:
            head, x = self.select.reduce(x, rng, memory)
        if self.values is None:
            raw = head + x.astype("<f4", copy=False).tobytes()
        else:
            raw = head + self.values.encode(x, rng)
        return raw if self.lossless is None else self.lossless.encode(raw)

    def decode(self, data: bytes | bytearray | memoryview, numel: int) -> torch.Tensor:
        """(numel,) float32, perhaps not finite. Raises RemoteProtocolError for bytes of another
        length than numel values have, and for indices and codes that there cannot be.
        """
        view = memoryview(data).cast("B")
        select = self.select
        if self.lossless is not None:
            view = memoryview(self.lossless.decode(view, self._raw(numel)))
        k = numel  # how many numbers cross
        head = 0
        if select is not None:
            k = select.read_count(view, numel)
            head = select.head(numel, k)
        expected = self._raw(numel, k)
        if len(view) != expected:
            raise RemoteProtocolError(
                f"{self}: {len(view)} bytes for {k} of {numel} values, expected {expected}."
            )
        values: Floats
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                if self.values is None:
                    values = np.frombuffer(view[head:], dtype="<f4").astype(np.float32)
                else:
                    values = self.values.decode(view[head:], k)
                if select is not None:
                    values = select.expand(view[:head], values, numel)
        except RemoteProtocolError as wrong:
            raise RemoteProtocolError(f"{self}: {wrong}") from None
        if values.shape != (numel,):
            raise RemoteProtocolError(
                f"{self}: an array of shape {values.shape}, expected ({numel},)."
            )
        return torch.from_numpy(values.astype(np.float32, copy=False))

    def _raw(self, numel: int, kept: int | None = None) -> int:
        """Bytes before they are shortened. kept: how many numbers cross; None: at most."""
        k = numel
        head = 0
        if self.select is not None:
            k = self.select.count(numel) if kept is None else kept
            head = self.select.head(numel, k)
        return head + (4 * k if self.values is None else self.values.nbytes(k))


def parse(items: Sequence[str], shapes: tuple[tuple[int, ...], ...] = ()) -> Chain:
    """The chain of a configuration's list, such as ["topk(0.01)", "qsgd(8)"]. Raises
    ConfigError. shapes: of the tensors in the vectors.
    """
    places = {"feedback": Feedback, "select": Reduce, "values": Values, "lossless": Lossless}
    chain = Chain()
    for item in items:
        part: Any = instance(registry.compressor, item)
        place = next((name for name, base in places.items() if isinstance(part, base)), None)
        if place is None:
            raise ConfigError(
                f"compressor {item!r} derives from none of Feedback, Reduce, Select, Values and "
                f"Lossless."
            )
        for base, returns in RETURNS.items():
            if isinstance(part, base):
                check_returns(type(part), returns)
        after = list(places)[list(places).index(place) :]
        if any(getattr(chain, name) is not None for name in after):
            raise ConfigError(f"{chain}: {item!r} cannot follow; {ORDER}")
        chain = dataclasses.replace(
            chain, **{place: part}, text=(*chain.text, str(item).replace(" ", ""))
        )
    feedback = chain.feedback
    select = chain.select
    if feedback is not None:
        if why := feedback.conflict(select, chain.values):
            raise ConfigError(f"{chain}: {chain.text[0]} {why}.")
        select = None if select is None else select.with_feedback(feedback)
    elif any(p.biased for p in chain.parts):
        # What is lost must be sent later (topk, sign); what qsgd loses has no bias, and rounding is
        # small.
        feedback = ErrorFeedback()
    select = None if select is None else select.for_shapes(shapes)
    return dataclasses.replace(chain, feedback=feedback, select=select)


def chains(
    section: Mapping[str, Sequence[str]],
    where: str = "wire.up",
    shapes: tuple[tuple[int, ...], ...] = (),
) -> dict[str, Chain]:
    """The chains of `wire.up` or `wire.down`, by kind; kinds with an empty list are left out.
    Errors name the key. shapes: see `parse`.
    """
    found = {}
    for kind, items in section.items():
        try:
            chain = parse(items, shapes)
        except ConfigError as e:
            raise ConfigError(f"{where}.{kind}: {e}") from e
        way = where.rpartition(".")[2]
        if chain.feedback is not None and (why := chain.feedback.wrong_place(way, kind)):
            raise ConfigError(f"{where}.{kind}: {chain}: {chain.text[0]} {why}.")
        if chain.parts:
            found[kind] = chain
    return found


# -- what the functions of a user's own compressor return ------------------------------------------
def _a(kind: type | tuple[type, ...], expected: str) -> Check:
    """Returns a check that says what was expected where something else was returned."""

    def check(part: CompressorPart, given: Arguments, found: object) -> str | None:
        return None if isinstance(found, kind) else expected

    return check


_BYTES = _a(bytes, "bytes")
_TENSOR = _a(torch.Tensor, "a tensor")
_ARRAY = _a(np.ndarray, "an array")
_NUMBER = _a((int, np.integer), "a whole number")
# Of another length, the chain itself refuses it.
RETURNS: Mapping[type[CompressorPart], Mapping[str, Check]] = {
    Feedback: {
        "target": _TENSOR,
        "prefix": _BYTES,
        "remember_sent": _TENSOR,
        "remember_received": _TENSOR,
    },
    Reduce: {
        "count": _NUMBER,
        "head": _NUMBER,
        "reduce": _a(tuple, "(bytes, an array)"),
        "read_count": _NUMBER,
        "expand": _ARRAY,
    },
    Select: {"select": _ARRAY},
    Values: {"nbytes": _NUMBER, "encode": _BYTES, "decode": _ARRAY},
    Lossless: {"bound": _NUMBER, "encode": _BYTES, "decode": _BYTES},
}
