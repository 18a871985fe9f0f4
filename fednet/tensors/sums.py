"""Weighted sums of tensors, in float64: the one definition of a mean in fednet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fednet import buffers
from fednet.tensors.layout import Layout
from fednet.tensors.values import PIECE, Tensors, accumulate, blockwise, room

OTHER_LAYOUT = "tensors of another layout cannot be added to this sum"


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """Sums Tensors with weights, one at a time, in float64.

    n_i * x_i and n_i are summed and divided once at the end, since the denominator is not known
    before. Float buffers are averaged with the same weights; counters take the largest, without
    weights. `add` takes over the accumulator: the sum it was called on must not be used again.
    """

    vector: torch.Tensor  # (P,) float64
    buffers: torch.Tensor  # (B,) float64
    counters: torch.Tensor  # (I,) int64
    layout: Layout | None = None
    weight: float = 0.0
    count: int = 0

    @classmethod
    def empty(cls) -> Sum:
        """Returns the sum of nothing: it takes the layout of what is added first."""
        none = torch.zeros(0, dtype=torch.float64)
        return cls(none, none, torch.zeros(0, dtype=torch.int64))

    def add(
        self, x: Tensors, weight: float = 1.0, *, scale: float = 1.0, less: Tensors | None = None
    ) -> Sum:
        """Returns the sum with x added at this weight. scale: a factor on its parameters alone,
        beside the weight. less: what is subtracted from its parameters before.
        """
        factor = weight if scale == 1.0 else weight * scale
        other = None if less is None else less.vector
        if self.layout is None:
            vector = accumulate(None, x.vector, factor, other)
            buffers = accumulate(None, x.buffers, weight)
            counters = x.counters.clone()
        elif x.layout is self.layout or x.layout == self.layout:
            vector = accumulate(self.vector, x.vector, factor, other)
            buffers = self.buffers
            counters = self.counters
            if buffers.shape[0]:
                buffers = accumulate(buffers, x.buffers, weight)
            if counters.shape[0]:
                counters = torch.maximum(counters, x.counters.to(counters.device))
        else:
            raise ValueError(OTHER_LAYOUT)
        return Sum(vector, buffers, counters, x.layout, self.weight + weight, self.count + 1)

    def add_all(self, values: Sequence[tuple[Tensors, float]]) -> Sum:
        """Returns the sum with each of these (tensors, weight) added, as by `add` one after the
        other. For small tensors this takes half the time.
        """
        total = self
        for k, (x, weight) in enumerate(values):
            if total.layout is not None and total.layout is total.layout.parameters:
                return total._add_vectors(values[k:])
            total = total.add(x, weight)
        return total

    def _add_vectors(self, values: Sequence[tuple[Tensors, float]]) -> Sum:
        """The same of tensors that have parameters alone."""
        vector = self.vector
        weights = self.weight
        for x, weight in values:
            if x.layout is not self.layout and x.layout != self.layout:
                raise ValueError(OTHER_LAYOUT)
            vector = accumulate(vector, x.vector, weight)
            weights += weight
        count = self.count + len(values)
        return Sum(vector, self.buffers, self.counters, self.layout, weights, count)

    def around(self, vector: torch.Tensor) -> Tensors:
        """Returns these parameters, with the buffers of the mean."""
        if self.layout is None:
            raise ValueError("the sum is empty")
        buffers = self.buffers / self.weight if self.weight else self.buffers
        return Tensors(self.layout, vector, buffers.float(), self.counters.clone())

    def mean(self) -> Tensors:
        """Returns sum of weight * x over the sum of weights."""
        return self.total(self.weight)

    def spend(self) -> Tensors:
        """Returns the mean, and leaves the sum empty. A large one gives its memory back while it is
        read, so that sum and mean together take no more than the sum did.
        """
        total = self.vector
        if total.device.type != "cpu" or total.nbytes <= buffers.KEPT_BYTES:
            mean = self.mean()
        else:
            vector = room(len(total), torch.float32)
            for into, part in zip(vector.split(PIECE), total.split(PIECE)):
                into.copy_(self._over(part, self.weight))
                buffers.give_back_read(part.numpy())
            mean = self.around(vector)
        none = Sum.empty()
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(none, field.name))
        return mean

    def total(self, divisor: float = 1.0) -> Tensors:
        """Returns sum of weight * x, over `divisor` (SCAFFOLD's N). Buffers are averaged all the
        same.
        """
        return self.around(self._over(self.vector, divisor))

    @staticmethod
    def _over(total: torch.Tensor, divisor: float) -> torch.Tensor:
        return blockwise(lambda part: (part / divisor).float(), total)

    def step(self, x: Tensors, rate: float = 1.0, divisor: float | None = None) -> Tensors:
        """Returns x + rate * mean in one pass, with the buffers of the mean; `divisor` as in
        `total`.
        """
        over = self.weight if divisor is None else divisor
        moved = blockwise(lambda total, x: x + rate * (total / over).float(), self.vector, x)
        return self.around(moved)


@dataclass(frozen=True, eq=False, slots=True)
class TwoSums:
    """Holds the sum of Tensors, and their sum under other weights.

    As long as those weights are all alike, the second is a multiple of the first. A vector of its
    own holds only what departs from that: the sum of (weight - common) * x, where common is the
    first value's weight.
    """

    plain: Sum
    common: float = 0.0
    rest: torch.Tensor | None = None  # (P,) float64

    @classmethod
    def empty(cls) -> TwoSums:
        """Returns both sums of nothing."""
        return cls(Sum.empty())

    def add(self, x: Tensors, weight: float) -> TwoSums:
        """Returns the sums with x added, at this weight in the second. Takes over the accumulators,
        as `Sum.add` does.
        """
        common = self.common if self.plain.count else weight
        plain = self.plain.add(x)
        rest = self.rest
        if weight != common:
            if rest is None:
                rest = torch.zeros_like(plain.vector)
            rest = accumulate(rest, x.vector, weight - common)
        return TwoSums(plain, common, rest)

    def add_all(self, values: Sequence[tuple[Tensors, float]]) -> TwoSums:
        """Returns the sums with each of these (tensors, weight) added, as by `add`."""
        total = self
        for x, weight in values:
            total = total.add(x, weight)
        return total

    def weighted(self, divisor: float) -> Tensors:
        """Returns the parameters of the second sum, over `divisor`."""
        common = self.common

        def over(total: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return (sum(rest, total * common) / divisor).float()

        rest = () if self.rest is None else (self.rest,)
        return self.plain.around(blockwise(over, self.plain.vector, *rest)).params


def mean(values: Iterable[tuple[Tensors, float]]) -> Tensors:
    """Returns weighted mean of (tensors, weight) pairs, in float64, in the order given."""
    total = Sum.empty()
    for x, weight in values:
        total = total.add(x, weight)
    return total.mean()
