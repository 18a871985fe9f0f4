"""Named tensors over one contiguous buffer, as a value; below it the arithmetic on flat vectors.

Sums are in float64, block by block, so that no float64 copy of a whole vector is made.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, overload

import torch
from torch import nn

from fednet.buffers import FROM_BYTES, lend
from fednet.errors import StateError
from fednet.tensors.layout import Layout

# Huge pages for 2 MB or more (torch reads this once): 45 MB are 11,000 faults of small pages else.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# Elements whose float64 copies stay in the cache: some 5 times faster. A dot product's bits
# depend on it.
CHUNK = 1 << 16
# Elements that are computed at once where no bits depend on it; on a GPU, where each call costs.
BLOCK = 1 << 18
GPU_BLOCK = 1 << 25
PIECE = 1 << 22  # elements after which memory that was read for the last time is given back
FLOAT32_MOST = torch.finfo(torch.float32).max
# Devices that the host waits for when it reads a value: there a norm that is known counts until
# torch writes to the vector. On a processor NumPy may write to it, which leaves no trace.
WAITING = ("cuda",)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A value: named tensors laid out by `layout`. Treat them as immutable: operations return new
    ones and may share what they do not change.

    Arithmetic (`+`, `-`, `*`, `/`, `plus`) is on the parameters alone. The result has the buffers
    and counters of the left operand; `with_buffers` gives it those of another.
    """

    layout: Layout
    vector: torch.Tensor
    """(P,) float32, the parameters."""
    buffers: torch.Tensor
    """(B,) float32."""
    counters: torch.Tensor
    """(I,) int64."""

    # -- making ------------------------------------------------------------------------------------
    @classmethod
    def zeros(cls, layout: Layout, device: torch.device | str = "cpu") -> Tensors:
        """Returns parameters, buffers and counters of zeros."""
        p, b, i = layout.sizes
        return cls(
            layout,
            torch.zeros(p, dtype=torch.float32, device=device),
            torch.zeros(b, dtype=torch.float32, device=device),
            torch.zeros(i, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(cls, module: nn.Module, layout: Layout | None = None) -> Tensors:
        """Returns a copy of a module's tensors."""
        layout = layout or Layout.of(module)
        return cls.pack(layout, module.state_dict())

    @classmethod
    def pack(cls, layout: Layout, named: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies named tensors into one buffer. Raises StateError for a missing name or a wrong
        shape.
        """
        device = next(iter(named.values())).device if named else "cpu"
        out = cls.zeros(layout, device)
        for slot in layout.slots:
            if slot.name not in named:
                raise StateError(f"tensor {slot.name!r} is missing.")
            value = named[slot.name].detach()
            if tuple(value.shape) != slot.shape:
                raise StateError(
                    f"tensor {slot.name!r} has shape {tuple(value.shape)}, expected {slot.shape}."
                )
            out[slot.name].copy_(value)
        return out

    # -- reading -----------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a view of one tensor, shaped; by any name of a tied one."""
        role, start, end, shape = self.layout.places[self.layout.firsts[name]]
        flat = {"parameter": self.vector, "buffer": self.buffers, "counter": self.counters}[role]
        return flat[start:end].view(shape)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, view) of each tensor, in state-dict order."""
        for slot in self.layout.slots:
            yield slot.name, self[slot.name]

    def into(self, module: nn.Module) -> nn.Module:
        """Writes these tensors into a module of that layout, in place."""
        state = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.items():
                state[name].copy_(value)
        return module

    def within(self, module: nn.Module) -> nn.Module:
        """Returns a module of that layout, of which the parameters now lie in these tensors."""
        parameters = dict(module.named_parameters())
        for slot in self.layout.slots:
            if slot.role == "parameter":
                parameters[slot.name].data = self[slot.name]
        return module

    @property
    def device(self) -> torch.device:
        return self.vector.device

    @property
    def params(self) -> Tensors:
        """Returns the parameters alone: what control variates and momenta are shaped like."""
        return Tensors(self.layout.parameters, self.vector, self.buffers[:0], self.counters[:0])

    def select(self, layout: Layout) -> Tensors:
        """Returns the part that `layout` names: a copy, unless it is the whole."""
        if layout == self.layout:
            return self
        if not layout.slots:
            return Tensors.zeros(layout)
        return Tensors.pack(layout, {s.name: self[s.name] for s in layout.slots})

    def merge(self, part: Tensors | None) -> Tensors:
        """Returns these tensors with those of `part` in their places. `part` may name only what is
        here.
        """
        if part is None or not part.layout.slots:
            return self
        if part.layout == self.layout:
            return part
        out = self.clone()
        for name, value in part.items():
            out[name].copy_(value)
        return out

    # -- changing ----------------------------------------------------------------------------------
    def with_vector(self, vector: torch.Tensor) -> Tensors:
        """Returns these buffers and counters with other parameters, (P,) float32."""
        return Tensors(self.layout, vector, self.buffers, self.counters)

    def with_buffers(self, other: Tensors) -> Tensors:
        """Returns these parameters with the buffers and counters of `other`."""
        buffers = other.buffers.to(self.device)
        counters = other.counters.to(self.device)
        return Tensors(other.layout, self.vector, buffers, counters)

    def clone(self) -> Tensors:
        """Returns a copy that shares no memory with this one."""
        copy = Tensors(self.layout, *map(_copy_vector, (self.vector, self.buffers, self.counters)))
        known = self._known_norm()
        return copy if known is None else copy.with_norm(known)

    def with_norm(self, norm: float) -> Tensors:
        """Returns the same, with its `rough_norm`, which counts until torch writes to it."""
        self.__dict__["_norm"] = norm, self.vector._version
        return self

    def _known_norm(self) -> float | None:
        known: tuple[float, int] | None = self.__dict__.get("_norm")
        if known is None or self.vector.device.type not in WAITING:
            return None
        return known[0] if known[1] == self.vector._version else None

    def zeros_like(self) -> Tensors:
        """Returns zeros of the same layout, on the same device; buffers and counters too."""
        return Tensors.zeros(self.layout, self.device)

    def to(self, device: torch.device | str) -> Tensors:
        """Returns the same on another device; itself where it is there already."""
        if self.vector.device == torch.device(device):
            return self
        parts = [to_device(part, device) for part in (self.vector, self.buffers, self.counters)]
        return Tensors(self.layout, *parts)

    # -- algebra: parameters only ------------------------------------------------------------------
    def _other(self, other: Tensors) -> torch.Tensor:
        if not isinstance(other, Tensors):
            raise TypeError(
                f"expected Tensors, got {type(other).__name__}; x.with_vector(v) makes some of the "
                f"values v of all parameters"
            )
        if other.vector.shape != self.vector.shape:
            raise ValueError(f"{self.vector.numel()} parameters against {other.vector.numel()}")
        return to_device(other.vector, self.vector.device)

    def __add__(self, other: Tensors) -> Tensors:
        return self.with_vector(self.vector + self._other(other))

    def __sub__(self, other: Tensors) -> Tensors:
        return self.with_vector(self.vector - self._other(other))

    def __mul__(self, factor: float) -> Tensors:
        return self.with_vector(self.vector * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Tensors:
        return self.with_vector(self.vector / divisor)

    def __neg__(self) -> Tensors:
        return self.with_vector(-self.vector)

    def plus(self, other: Tensors, factor: float = 1.0) -> Tensors:
        """Returns these parameters + factor * those of `other`, in one pass."""
        return self.with_vector(blockwise(lambda a, b: a + factor * b, self, other))

    def dot(self, other: Tensors) -> float:
        """Returns inner product over the parameters, in float64."""
        return dot(self.vector, self._other(other))

    def norm(self) -> float:
        """Returns Euclidean norm over the parameters, in float64."""
        return self.dot(self) ** 0.5

    # What comes is asked for it twice: whether it is finite, and how it compares with others.
    @cached_property
    def rough_norm(self) -> float:
        """Returns Euclidean norm over the parameters, in float32: not finite where a parameter is
        not, or its square is too large.
        """
        known = self._known_norm()
        if known is None:
            return math.sqrt(torch.dot(self.vector, self.vector))
        return known if known * known <= FLOAT32_MOST else math.inf

    # -- identity ----------------------------------------------------------------------------------
    # A round's record and its checkpoint both ask, of a value that does not change.
    @cached_property
    def tensor_sha256(self) -> dict[str, str]:
        """Returns SHA-256 of each tensor as contiguous little-endian bytes, in state-dict order."""
        here = self.to("cpu")
        return {
            name: hashlib.sha256(value.contiguous().view(-1).numpy().data).hexdigest()
            for name, value in here.items()
        }

    def sha256(self) -> str:
        """Returns SHA-256 of the tensors' SHA-256s: the run's `model_sha256`."""
        return combine(self.tensor_sha256.values())

    def is_finite(self, exempt: Collection[str] = ()) -> bool:
        """Returns whether every parameter and buffer is finite, but for those of these names. The
        norm and the sum first: a NaN or an infinity leaves neither finite.
        """
        whole = (math.isfinite(self.rough_norm) or bool(torch.isfinite(self.vector).all())) and (
            not self.buffers.shape[0]
            or bool(torch.isfinite(self.buffers.sum()))
            or bool(torch.isfinite(self.buffers).all())
        )
        if whole or not exempt:
            return whole
        return all(bool(torch.isfinite(v).all()) for n, v in self.items() if n not in exempt)


def combine(hashes: Iterable[str]) -> str:
    """Returns SHA-256 of the concatenation of hex digests."""
    whole = hashlib.sha256()
    for h in hashes:
        whole.update(bytes.fromhex(h))
    return whole.hexdigest()


# -- tensors by client ---------------------------------------------------------------------------
class Rows(Protocol):
    """Keeps rows that memory does not hold (`server.rows.RowStore`)."""

    def write(self, row: Tensors) -> str:
        """Keeps a row; returns the name that `read` takes."""
        ...

    def read(self, name: str, layout: Layout) -> Tensors:
        """Returns the row of that name. Raises StateError if it is gone, or of another layout."""
        ...


class PerClient(Mapping[int, Tensors]):
    """Maps each client to its `Tensors`, such as FedVARP's y_i; a missing row reads as zeros of
    `like`.

    A value: `put` returns a new mapping and leaves this one as it was. With a `store` (see the
    engine), rows are on disk, one file a row, and memory holds none of them.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Mapping[int, Tensors | str] | None = None,
        store: Rows | None = None,
    ) -> None:
        self.layout = layout
        self.rows: Mapping[int, Tensors | str] = rows or {}
        self.store = store

    @property
    def names(self) -> dict[int, str]:
        """Returns, by client, the name of its row in the store. Empty without a store."""
        return {c: row for c, row in self.rows.items() if isinstance(row, str)}

    def __getitem__(self, client: int) -> Tensors:
        row = self.rows.get(client)
        if row is None:
            return Tensors.zeros(self.layout)
        if isinstance(row, Tensors):
            return row
        assert self.store is not None
        return self.store.read(row, self.layout)

    def known(self, client: int) -> Tensors | None:
        """Returns the client's row, None if there is none yet."""
        return self[client] if client in self.rows else None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, client: int, row: Tensors) -> PerClient:
        """Returns the mapping with this row in the place of the client's."""
        kept = row if self.store is None else self.store.write(row)
        return PerClient(self.layout, {**self.rows, client: kept}, self.store)


# -- flat vectors ----------------------------------------------------------------------------------
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
    """Returns function(*vectors), computed over the same cache-sized blocks of flat vectors of one
    length, one after the other.

    values: vectors, or Tensors for their parameters, brought to the device of the first. function:
    elementwise; it gives one vector, or a tuple of vectors. What is between its operations stays
    in the cache: an expression of several operations is one pass through memory, with the bits that
    it has without.
    """
    vectors = [v if isinstance(v, torch.Tensor) else v.vector for v in values]
    vectors = [v.to(vectors[0].device) for v in vectors]
    n = len(vectors[0])
    block = CHUNK if vectors[0].device.type == "cpu" else GPU_BLOCK
    if n <= block:
        return function(*vectors)
    made: list[torch.Tensor] = []
    for start, *parts in zip(range(0, n, block), *(v.split(block) for v in vectors)):
        found = function(*parts)
        results = found if isinstance(found, tuple) else (found,)
        made = made or [room(n, r.dtype, r.device) for r in results]
        for into, result in zip(made, results):
            into[start : start + len(result)].copy_(result)
    return tuple(made) if isinstance(found, tuple) else made[0]


def room(n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns a vector of n elements with arbitrary contents; on the CPU a large one is lent."""
    nbytes = n * dtype.itemsize
    if nbytes < FROM_BYTES or torch.device(device).type != "cpu":
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(lend(nbytes)).view(dtype)


def _copy_vector(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a flat vector; of one without elements itself."""
    if not x.shape[0]:
        return x
    if x.nbytes < FROM_BYTES or x.device.type != "cpu":
        return x.clone()
    return room(x.shape[0], x.dtype).copy_(x)


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns inner product of two flat vectors in float64, without a float64 copy of either."""
    total = 0.0
    for left, right in zip(a.split(CHUNK), b.split(CHUNK)):
        wide = left.double()
        total += torch.dot(wide, wide if a is b else right.double()).item()
    return total


def accumulate(
    total: torch.Tensor | None, x: torch.Tensor, weight: float, less: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds weight * (x - less) to `total`, in float64 and in place, and returns it: on the device
    of `total`; None for a new sum, on that of x. The difference is rounded to float32.
    """
    length = BLOCK if x.is_cpu else GPU_BLOCK
    size = x.shape[0]
    fresh = total is None
    if total is None:
        total = room(size, torch.float64, x.device)
    elif less is None and size <= length and x.device == total.device:
        return total.add_(x, alpha=weight)  # which torch computes in float64
    if not size:
        return total
    if x.device != total.device:
        x = x.to(total.device)
        length = BLOCK if total.is_cpu else GPU_BLOCK
    lesser = itertools.repeat(None) if less is None else less.to(x.device).split(length)
    for into, part, other in zip(total.split(length), x.split(length), lesser):
        wide = (part if other is None else part - other).double()
        if fresh:
            torch.mul(wide, weight, out=into)
        else:
            into.add_(wide, alpha=weight)
    return total


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns x on `device`. To a GPU by way of pinned memory: the copy has its place in the
    current stream, and nobody waits for it. torch keeps the pinned block until the copy is done,
    and for the next one of its size.
    """
    if torch.device(device).type != "cuda" or x.device.type != "cpu" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
