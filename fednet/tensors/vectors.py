"""Sums over flat vectors in float64, block by block; vectors on their way to a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, overload

import torch

from fednet.buffers import FROM_BYTES, lend
from fednet.capacity import processors

if TYPE_CHECKING:
    from fednet.tensors.values import Tensors

# Elements whose float64 copies stay in the cache: some 5 times faster. A dot product's bits
# depend on it.
CHUNK = 1 << 16
# Elements of a vector whose sum is over before its parts would have been named.
SHORT = 1 << 14
# Elements that are gone through together where what is made of them has its place already, and no
# bits depend on it: a shorter way is over before the processor has seen where it leads, and took a
# third longer.
BLOCK = 1 << 18
SHARED = 1 << 22  # elements that two threads share


@overload
def blockwise(
    function: Callable[..., torch.Tensor], *values: torch.Tensor | Tensors
) -> torch.Tensor: ...
@overload
def blockwise(
    function: Callable[..., tuple[torch.Tensor, ...]], *values: torch.Tensor | Tensors
) -> tuple[torch.Tensor, ...]: ...
def blockwise(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    *values: torch.Tensor | Tensors,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """function(*vectors), computed over the same cache-sized blocks of flat vectors of one length,
    one after the other.

    values: vectors, or Tensors for their parameters, brought to the device of the first. function:
    elementwise; it gives one vector, or a tuple of vectors. What lies between its operations stays
    in the cache: an expression of several operations is one pass through memory, with the bits that
    it has without.
    """
    vectors = [v if isinstance(v, torch.Tensor) else v.vector for v in values]
    vectors = [v.to(vectors[0].device) for v in vectors]
    n = len(vectors[0])
    if n <= CHUNK:
        return function(*vectors)
    made: list[torch.Tensor] = []
    for start, *parts in zip(range(0, n, CHUNK), *(v.split(CHUNK) for v in vectors)):
        found = function(*parts)
        results = found if isinstance(found, tuple) else (found,)
        made = made or [room(n, r.dtype, r.device) for r in results]
        for into, result in zip(made, results):
            into[start : start + len(result)].copy_(result)
    return tuple(made) if isinstance(found, tuple) else made[0]


def room(
    n: int, dtype: torch.dtype, device: torch.device | str = "cpu", sent: bool = False
) -> torch.Tensor:
    """A vector of n elements that hold anything; on the CPU a large one is lent. sent: see
    `lend`.
    """
    nbytes = n * dtype.itemsize
    if nbytes < FROM_BYTES or torch.device(device).type != "cpu":
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(lend(nbytes, sent=sent)).view(dtype)


def blocks(x: torch.Tensor, n: int = CHUNK) -> Sequence[torch.Tensor]:
    """x in parts of n elements."""
    return (x,) if x.numel() <= n else x.split(n)


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Inner product of two flat vectors in float64, without a float64 copy of either."""
    total = 0.0
    for left, right in zip(blocks(a), blocks(b)):
        wide = left.double()
        total += torch.dot(wide, wide if a is b else right.double()).item()
    return total


def dots(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(<a, a>, <a, b>) as `dot` gives them, in one pass."""
    square = product = 0.0
    for left, right in zip(blocks(a), blocks(b)):
        wide = left.double()
        square += torch.dot(wide, wide).item()
        product += torch.dot(wide, right.double()).item()
    return square, product


def fold(
    x: torch.Tensor,
    *totals: tuple[torch.Tensor, float],
    less: torch.Tensor | None = None,
    fresh: bool = False,
    measure: bool = False,
) -> float:
    """total += weight * (x - less) for each (total, weight), in float64 and in one pass; fresh:
    total = instead. The difference is rounded to float32. Returns ||x||^2 if it is to be
    measured.
    """
    if len(x) <= SHORT and less is None and not (fresh or measure):
        for total, weight in totals:
            total.add_(x, alpha=weight)
        return 0.0
    if measure:
        return _fold(x, totals, less, fresh, True)
    _halves(
        len(x),
        x.device,
        lambda s: _fold(
            x[s], [(t[s], w) for t, w in totals], None if less is None else less[s], fresh
        ),
    )
    return 0.0


def _fold(
    x: torch.Tensor,
    totals: Sequence[tuple[torch.Tensor, float]],
    less: torch.Tensor | None,
    fresh: bool,
    measure: bool = False,
) -> float:
    square, place = 0.0, torch.empty(min(len(x), BLOCK), dtype=torch.float64, device=x.device)
    others = itertools.repeat(None) if less is None else blocks(less, BLOCK)
    for part, other, *into in zip(blocks(x, BLOCK), others, *(blocks(t, BLOCK) for t, _ in totals)):
        wide = place[: len(part)].copy_(part if other is None else part - other)
        for block, (_, weight) in zip(into, totals):
            if fresh:
                torch.mul(wide, weight, out=block)
            else:
                block.add_(wide, alpha=weight)
        if measure:
            square = sum((torch.dot(w, w).item() for w in blocks(wide)), square)
    return square


def _halves(n: int, device: torch.device, work: Callable[[slice], object]) -> None:
    """Elementwise work on n elements, by two threads where they are many: a round's last reply
    kept a processor busy that is free by now.
    """
    if n < SHARED or device.type != "cpu" or processors() < 2:
        work(slice(n))
        return
    middle = n // 2 // BLOCK * BLOCK
    other = _second[0].submit(work, slice(middle, n))
    try:
        work(slice(middle))
    finally:
        other.result()


def _renew() -> None:
    _second[:] = [ThreadPoolExecutor(1, "fednet-second")]


_second: list[ThreadPoolExecutor] = []
_renew()
if hasattr(os, "register_at_fork"):  # a forked process has no thread but the one that forked
    os.register_at_fork(after_in_child=_renew)


def quotient(total: torch.Tensor, divisor: float) -> torch.Tensor:
    """total / divisor in float64, rounded to float32."""
    made = room(len(total), torch.float32, total.device)

    def divide(s: slice) -> None:
        place = torch.empty_like(total[s][:BLOCK])
        for into, part in zip(blocks(made[s], BLOCK), blocks(total[s], BLOCK)):
            into.copy_(torch.div(part, divisor, out=place[: len(part)]))

    _halves(len(total), total.device, divide)
    return made


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """x on `device`. To a GPU by way of pinned memory: the copy has its place in the current
    stream, and nobody waits for it. torch keeps the pinned block until the copy is done, and for
    the next one of its size.
    """
    if torch.device(device).type != "cuda" or x.device.type != "cpu" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
