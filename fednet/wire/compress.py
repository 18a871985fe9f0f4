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
from fednet.loading import Check, Given, held
from fednet.options import instance
from fednet.wire.compressors.base import (
    Feedback,
    Floats,
    Lossless,
    Memory,
    Part,
    Reduce,
    Select,
    Values,
)
from fednet.wire.compressors.feedback import ErrorFeedback

ORDER = (
    "the order is one of ef, noef, ef21, diana, dgc, delta, one of topk, randk, threshold, "
    "powersgd, one of fp16, bf16, int8, int4, qsgd, sign, zstd, each at most once."
)
LENGTH = 4  # bytes that say how long what follows is, before it was shortened


@dataclass(frozen=True, slots=True)
class Chain:
    """Compressors in order; the empty chain writes float32. `text` is its configuration."""

    feedback: Feedback | None = None
    select: Reduce | None = None
    values: Values | None = None
    lossless: Lossless | None = None
    text: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        all_ = (self.feedback, self.select, self.values, self.lossless)
        return tuple(p for p in all_ if p is not None)

    @property
    def lossy(self) -> bool:
        return any(p.lossy for p in self.parts)

    @property
    def needs_feedback(self) -> bool:
        """True if what is lost must be sent later (topk, sign); what qsgd loses has no bias, and
        rounding is small.
        """
        if self.feedback is not None:
            return not self.feedback.turned_off
        return any(p.biased for p in self.parts)

    @property
    def remembers(self) -> bool:
        """Whether the sender keeps anything from message to message."""
        return self.needs_feedback or (self.select is not None and self.select.remembers)

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

    def plain(self) -> Chain:
        """Only what loses nothing and remembers nothing of it."""
        return Chain(lossless=self.lossless, text=self.text[-1:] if self.lossless else ())

    def fitted(self, shapes: tuple[tuple[int, ...], ...]) -> Chain:
        """The chain for vectors that hold tensors of these shapes, one behind the other."""
        return (
            self
            if self.select is None
            else dataclasses.replace(self, select=self.select.fitted(shapes))
        )

    def nbytes(self, numel: int, round: int = 0, kept: int | None = None) -> tuple[int, bool]:
        """Length of numel encoded values, and whether that is exact; without, it is an upper
        bound. round: from 1; 0: past any warm-up. kept: how many values cross, where these decide.
        """
        raw = self._raw(numel, self._select(round), kept) + self._head
        exact = self.fixed or (self.lossless is None and kept is not None)
        if self.lossless is None:
            return raw, exact
        more = 0 if self.select is None or self.select.fixed else LENGTH
        return self.lossless.bound(raw - self._head) + more + self._head, False

    # -- with what is remembered -------------------------------------------------------------------
    def send(
        self, x: torch.Tensor, rng: np.random.Generator, memory: Memory | None, round: int = 0
    ) -> tuple[bytes, torch.Tensor]:
        """(what crosses, what the receiver makes of it) of a vector. memory: read and written;
        None: what is left out is lost.
        """
        feedback = self._feedback
        if feedback is None or memory is None:
            data = self.encode(x, rng, memory, round)
            return data, self.decode(data, x.numel(), round)
        wanted = feedback.wanted(x, memory)
        data = self.encode(wanted, rng, memory, round)
        decoded = self.decode(data, x.numel(), round)
        return feedback.said(memory) + data, feedback.kept(wanted, decoded, memory)

    def receive(self, data: memoryview, numel: int, memory: Memory, round: int = 0) -> torch.Tensor:
        """What `send` made, for whoever remembers the same. Raises RemoteProtocolError as `decode`
        does, and where something else is remembered.
        """
        if not self.shared or self.feedback is None:
            return self.decode(data, numel, round)
        if len(data) < self._head:
            raise RemoteProtocolError(f"{self}: {len(data)} bytes for {numel} values.")
        memory = self.feedback.heard(bytes(data[: self._head]), memory)
        return self.feedback.received(self.decode(data[self._head :], numel, round), memory)

    # -- without -----------------------------------------------------------------------------------
    def encode(
        self,
        vector: torch.Tensor,
        rng: np.random.Generator,
        memory: Memory | None = None,
        round: int = 0,
    ) -> bytes:
        """vector: (n,) float32 on the CPU. Draws from `rng` only where the chain is stochastic.

        Values that are not finite are not hidden: `decode` gives them back so, or refuses.
        """
        if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != "cpu":
            found = f"{tuple(vector.shape)} {vector.dtype} {vector.device}"
            raise TypeError(f"expected a (n,) float32 tensor on the CPU, got {found}")
        x: Floats = vector.detach().numpy()
        pieces, select = [], self._select(round)
        if select is not None:
            head, x = select.reduce(x, rng, memory)
            pieces.append(head)
        pieces.append(
            x.astype("<f4", copy=False).tobytes()
            if self.values is None
            else self.values.encode(x, rng)
        )
        raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self.lossless is None:
            return raw
        packed = self.lossless.encode(raw)
        open_ended = select is not None and not select.fixed
        return len(raw).to_bytes(LENGTH, "little") + packed if open_ended else packed

    def decode(
        self, data: bytes | bytearray | memoryview, numel: int, round: int = 0
    ) -> torch.Tensor:
        """(numel,) float32. Raises RemoteProtocolError for what `encode` cannot have made of numel
        values.
        """
        view, select = memoryview(data).cast("B"), self._select(round)
        expected = self._raw(numel, select)
        if self.lossless is not None:
            view = self._lengthened(view, numel, select, expected)
        elif self.fixed and len(view) != expected:
            raise RemoteProtocolError(
                f"{self}: {len(view)} bytes for {numel} values, expected {expected}."
            )
        if select is None:
            return self._vector(self._written(view, numel), numel)
        k = select.left(view, numel)
        cut, most = select.head(numel, k), self._raw(numel, select, k)
        if len(view) != most:
            raise RemoteProtocolError(
                f"{self}: {len(view)} bytes for {k} of {numel} values, expected {most}."
            )
        try:
            values = select.expand(view[:cut], self._written(view[cut:], k), numel)
        except RemoteProtocolError as wrong:
            raise RemoteProtocolError(f"{self}: {wrong}") from None
        return self._vector(values, numel)

    def _vector(self, values: Floats, numel: int) -> torch.Tensor:
        if values.shape != (numel,):
            raise RemoteProtocolError(
                f"{self}: an array of shape {values.shape}, expected ({numel},)."
            )
        return torch.from_numpy(values.astype(np.float32, copy=False))

    def _lengthened(
        self, view: memoryview, numel: int, select: Reduce | None, expected: int
    ) -> memoryview:
        """What lies in the bytes that `lossless` shortened."""
        assert self.lossless is not None
        if select is not None and not select.fixed:
            said = int.from_bytes(view[:LENGTH], "little")
            if said > expected:
                raise RemoteProtocolError(
                    f"{self}: {said} bytes announced for {numel} values, expected at most "
                    f"{expected}."
                )
            expected, view = said, view[LENGTH:]
        most = self.lossless.bound(expected)
        if len(view) > most:
            raise RemoteProtocolError(
                f"{self}: {len(view)} bytes for {numel} values, expected at most {most}."
            )
        return memoryview(self.lossless.decode(view, expected))

    @property
    def _feedback(self) -> Feedback | None:
        """What sees to what is left out: where none is named and it is needed, error feedback."""
        if self.feedback is None and self.needs_feedback:
            return ErrorFeedback()
        return self.feedback

    @property
    def _head(self) -> int:
        return 0 if self.feedback is None else self.feedback.head

    def _select(self, round: int) -> Reduce | None:
        if self.select is None or self.feedback is None or not round:
            return self.select
        return self.feedback.selecting(self.select, round)

    def _raw(self, numel: int, select: Reduce | None, kept: int | None = None) -> int:
        if select is None:
            return 4 * numel if self.values is None else self.values.nbytes(numel)
        k = select.count(numel) if kept is None else kept
        return select.head(numel, k) + (4 * k if self.values is None else self.values.nbytes(k))

    def _written(self, view: memoryview, n: int) -> Floats:
        if self.values is None:
            return np.frombuffer(view, dtype="<f4").astype(np.float32)
        return self.values.decode(view, n)


def parse(items: Sequence[str]) -> Chain:
    """The chain of a configuration's list, such as ["topk(0.01)", "qsgd(8)"]. Raises
    ConfigError.
    """
    chain = Chain()
    for item in items:
        part = _part(item)
        place = next(
            i
            for i, kind in enumerate((Feedback, Reduce, Values, Lossless))
            if isinstance(part, kind)
        )
        taken = (chain.feedback, chain.select, chain.values, chain.lossless)
        if any(p is not None for p in taken[place:]):
            raise ConfigError(f"{chain}: {item!r} cannot follow; {ORDER}")
        name = ("feedback", "select", "values", "lossless")[place]
        # Its field has the part's type.
        more: dict[str, Any] = {name: part, "text": (*chain.text, str(item).replace(" ", ""))}
        chain = dataclasses.replace(chain, **more)
    if chain.feedback is None:
        return chain
    why = chain.feedback.refused(chain.select, chain.values)
    if why:
        raise ConfigError(f"{chain}: {chain.text[0]} {why}.")
    select = None if chain.select is None else chain.select.under(chain.feedback)
    return dataclasses.replace(chain, select=select)


def chains(
    section: Mapping[str, Sequence[str]],
    where: str = "wire.up",
    shapes: tuple[tuple[int, ...], ...] = (),
) -> dict[str, Chain]:
    """The chains of `wire.up` or `wire.down`, by kind; kinds with an empty list are left out.
    Errors name the key. shapes: of the tensors in the vectors.
    """
    found = {}
    for kind, items in section.items():
        try:
            chain = parse(items)
        except ConfigError as e:
            raise ConfigError(f"{where}.{kind}: {e}") from e
        way = where.rpartition(".")[2]
        if chain.feedback is not None and (why := chain.feedback.misplaced(way, kind)):
            raise ConfigError(f"{where}.{kind}: {chain}: {chain.text[0]} {why}.")
        if chain.parts:
            found[kind] = chain.fitted(shapes)
    return found


def _part(item: str) -> Part:
    part = instance(registry.compressor, item)
    for base, returns in RETURNS.items():
        if isinstance(part, base):
            held(type(part), returns)
            return part
    raise ConfigError(
        f"compressor {item!r} derives from none of Feedback, Reduce, Select, Values and Lossless."
    )


# -- what the functions of a user's own compressor return ------------------------------------------
# Each check returns what was expected where something else came (`loading.held`). How long it is,
# the chain itself checks.
def _a(kind: type | tuple[type, ...], expected: str) -> Check:
    def check(part: Part, given: Given, found: object) -> str | None:
        return None if isinstance(found, kind) else expected

    return check


_BYTES, _TENSOR = _a(bytes, "bytes"), _a(torch.Tensor, "a tensor")
_ARRAY, _NUMBER = _a(np.ndarray, "an array"), _a((int, np.integer), "a whole number")
_REDUCE = {
    "count": _NUMBER,
    "head": _NUMBER,
    "reduce": _a(tuple, "(bytes, an array)"),
    "left": _NUMBER,
    "expand": _ARRAY,
}
RETURNS: Mapping[type[Part], Mapping[str, Check]] = {
    Feedback: {"wanted": _TENSOR, "said": _BYTES, "kept": _TENSOR, "received": _TENSOR},
    Select: {**_REDUCE, "select": _ARRAY},
    Reduce: _REDUCE,
    Values: {"nbytes": _NUMBER, "encode": _BYTES, "decode": _ARRAY},
    Lossless: {"bound": _NUMBER, "encode": _BYTES, "decode": _BYTES},
}
