"""Weighted sums of tensors, in float64: the one definition of a mean in fednet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fednet.tensors.layout import Layout
from fednet.tensors.values import Tensors, blockwise, fold, quotient, room


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """A weighted sum of Tensors, folded one at a time in float64.

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
        """The sum of nothing: it takes the layout of what is added first."""
        none = torch.zeros(0, dtype=torch.float64)
        return cls(none, none, torch.zeros(0, dtype=torch.int64))

    def add(
        self, x: Tensors, weight: float = 1.0, *, scale: float = 1.0, less: Tensors | None = None
    ) -> Sum:
        """The sum with x added at this weight. scale: a factor on its parameters alone, beside the
        weight. less: what is subtracted from its parameters before.
        """
        return self._add(x, weight, scale, less)[0]

    def measure(self, x: Tensors, weight: float = 1.0) -> tuple[Sum, float]:
        """(the sum with x at this weight, ||x||^2 over its parameters): one pass for both."""
        return self._add(x, weight, measure=True)

    def _add(
        self,
        x: Tensors,
        weight: float,
        scale: float = 1.0,
        less: Tensors | None = None,
        measure: bool = False,
        also: tuple[torch.Tensor, float] | None = None,
    ) -> tuple[Sum, float]:
        total, fresh = self, self.layout is None
        if fresh:
            wide, device = torch.float64, x.vector.device
            total = Sum(
                room(len(x.vector), wide, device),
                room(len(x.buffers), wide, device),
                x.counters.clone(),
                x.layout,
            )
        elif x.layout != self.layout:
            raise ValueError("tensors of another layout cannot be added to this sum")
        device, factor = total.vector.device, weight if scale == 1.0 else weight * scale
        square = fold(
            x.vector.to(device),
            (total.vector, factor),
            *([] if also is None else [also]),
            less=None if less is None else less.vector.to(device),
            fresh=fresh,
            measure=measure,
        )
        if len(total.buffers):
            fold(x.buffers.to(device), (total.buffers, weight), fresh=fresh)
        if len(total.counters) and not fresh:
            torch.maximum(total.counters, x.counters.to(device), out=total.counters)
        return Sum(
            total.vector,
            total.buffers,
            total.counters,
            total.layout,
            self.weight + weight,
            self.count + 1,
        ), square

    def around(self, vector: torch.Tensor) -> Tensors:
        """These parameters, with the buffers of the mean."""
        if self.layout is None:
            raise ValueError("the sum is empty")
        buffers = self.buffers / self.weight if self.weight else self.buffers
        return Tensors(self.layout, vector, buffers.float(), self.counters.clone())

    def mean(self) -> Tensors:
        """Sum of weight * x over the sum of weights."""
        return self.total(self.weight)

    def total(self, divisor: float = 1.0) -> Tensors:
        """Sum of weight * x, over `divisor` (SCAFFOLD's N). Buffers are averaged all the same."""
        return self.around(quotient(self.vector, divisor))

    def step(self, x: Tensors, rate: float = 1.0, divisor: float | None = None) -> Tensors:
        """x + rate * mean in one pass, with the buffers of the mean; `divisor` as in `total`."""
        over = self.weight if divisor is None else divisor
        return self.around(
            blockwise(lambda total, x: x + rate * (total / over).float(), self.vector, x)
        )


@dataclass(frozen=True, eq=False, slots=True)
class TwoSums:
    """The sum of Tensors, and their sum under other weights, folded in one pass.

    As long as those weights are all alike, the second is a multiple of the first. A vector of its
    own holds only what departs from that: the sum of (weight - common) * x, where common is the
    first value's weight.
    """

    plain: Sum
    common: float = 0.0
    rest: torch.Tensor | None = None  # (P,) float64

    @classmethod
    def empty(cls) -> TwoSums:
        """Both sums of nothing."""
        return cls(Sum.empty())

    def add(self, x: Tensors, weight: float) -> TwoSums:
        """The sums with x added, at this weight in the second. Takes over the accumulators, as
        `Sum.add` does.
        """
        common = self.common if self.plain.count else weight
        more, rest = weight - common, self.rest
        if more and rest is None:
            rest = torch.zeros_like(self.plain.vector)
        plain, _ = self.plain._add(x, 1.0, also=(rest, more) if more and rest is not None else None)
        return TwoSums(plain, common, rest)

    def weighted(self, divisor: float) -> Tensors:
        """The parameters of the second sum, over `divisor`."""
        common, whole = self.common, self.plain.around(self.plain.vector).params
        if self.rest is None:
            return whole.with_vector(
                blockwise(lambda total: (total * common / divisor).float(), whole.vector)
            )
        return whole.with_vector(
            blockwise(
                lambda total, rest: ((total * common + rest) / divisor).float(),
                whole.vector,
                self.rest,
            )
        )


def mean(values: Iterable[tuple[Tensors, float]]) -> Tensors:
    """Weighted mean of (tensors, weight) pairs, in float64, in the order given."""
    total = Sum.empty()
    for x, weight in values:
        total = total.add(x, weight)
    return total.mean()
