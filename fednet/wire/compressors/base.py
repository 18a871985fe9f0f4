"""The four places a compressor can take in a chain.

A part is a class under `@compressor("name")` that derives from one of these; the arguments of its
`__init__` are those in the parentheses of `topk(0.01)`, and it raises ConfigError where they are
out of range. Its attribute `paper` cites what it was taken from. What is encoded should be of a
length that follows from the number of values alone (except `Lossless`), and decoding raises
RemoteProtocolError for what it cannot make sense of.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fednet.errors import RemoteProtocolError
from fednet.wire import indices

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


class Part:
    """biased: the mean of what is decoded is not what was encoded, so that error feedback is
    needed. contracts: E||C(x) - x||^2 < ||x||^2 for x other than 0, which error feedback needs.
    omega: where E C(x) = x, or rounding is all that is lost, the least that is known with
    E||C(x) - x||^2 <= omega ||x||^2; None: where not.
    """

    paper: ClassVar[str] = ""
    lossy: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    contracts: bool = True
    omega: float | None = None


@dataclass(frozen=True)
class Memory:
    """What one end keeps from message to message for one field, by name, in a mapping of all that
    it keeps. known: as it was; next: where what follows is written.
    """

    known: Mapping[str, torch.Tensor]
    next: MutableMapping[str, torch.Tensor]
    field: str

    def get(self, name: str = "") -> torch.Tensor | None:
        """What was remembered under that name, not to be written to; None where nothing was."""
        return self.known.get(self._key(name))

    def next_of(self, name: str) -> torch.Tensor:
        """What `set` wrote."""
        return self.next[self._key(name)]

    def set(self, value: torch.Tensor, name: str = "") -> None:
        """Writes down what follows, for the next message."""
        self.next[self._key(name)] = value

    def _key(self, name: str) -> str:
        return f"{self.field}/{name}" if name else self.field


class Feedback(Part):
    """What is done about what earlier messages left out, by what the sender remembers, and, where
    it is `shared`, the receiver too; comes before all others.

    turned_off: nothing is. head: bytes before what the rest of the chain makes. scaled: whether a
    choice at random is scaled so that it has no bias, or left as it is so that it contracts.
    """

    lossy: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    turned_off: ClassVar[bool] = False
    head: ClassVar[int] = 0
    scaled: ClassVar[bool] = False

    def refused(self, select: Reduce | None, values: Values | None) -> str:
        """Why it makes no sense with these parts, as the rest of a sentence; "" where it does."""
        return ""

    def misplaced(self, way: str, kind: str) -> str:
        """Why it makes no sense in that direction, for that ledger kind; "" where it does."""
        return ""

    def over(self, lossy: bool) -> Feedback:
        """This part for a chain whose other parts lose something (`lossy`), or nothing."""
        return self

    def selecting(self, select: Reduce, round: int) -> Reduce:
        """What selects in that round, from 1."""
        return select

    # -- the sender's side -------------------------------------------------------------------------
    def wanted(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        """What is to be compressed in the place of x."""
        return x

    def said(self, memory: Memory) -> bytes:
        """What is sent before it."""
        return b""

    def kept(self, wanted: torch.Tensor, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Remembers what became of `wanted`; what the receiver has in the place of x."""
        return decoded

    def again(self, arrived: torch.Tensor, memory: Memory) -> None:
        """Remembers what `kept` returned for the same value and the same memory."""

    # -- the receiver's, where it is shared --------------------------------------------------------
    def heard(self, said: bytes, memory: Memory) -> Memory:
        """What to decode with, by what was sent before. Raises RemoteProtocolError where it is not
        here.
        """
        return memory

    def received(self, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Remembers what came; what stands in the place of x."""
        return decoded


class Reduce(Part):
    """Makes fewer numbers of a vector; comes before what writes them.

    fixed: how many follows from the length of the vector; else `count` is the most, and what is
    sent says it. remembers: something of its own from message to message.
    """

    fixed: ClassVar[bool] = True
    remembers: ClassVar[bool] = False

    def count(self, n: int) -> int:
        """How many numbers are left of n values."""
        raise NotImplementedError

    def head(self, n: int, k: int) -> int:
        """Bytes before the k numbers that are left."""
        raise NotImplementedError

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        """(what comes before the numbers, the numbers) of x, (n,)."""
        raise NotImplementedError

    def left(self, data: memoryview, n: int) -> int:
        """How many numbers are left, by what was sent; at most `count`."""
        return self.count(n)

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        """(n,) from what came before the numbers, and these."""
        raise NotImplementedError

    def fitted(self, shapes: tuple[tuple[int, ...], ...]) -> Reduce:
        """This part for vectors that hold tensors of these shapes, one behind the other."""
        return self

    def under(self, feedback: Feedback) -> Reduce:
        """This part as that kind of feedback needs it."""
        return self


class Select(Reduce):
    """Keeps some of the values, and sends where they stand."""

    def select(self, x: Floats) -> Indices:
        """(count(n),) ascending indices into x, (n,)."""
        raise NotImplementedError

    def head(self, n: int, k: int) -> int:
        return indices.nbytes(n, k)

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        kept = self.select(x)
        return indices.pack(kept, x.size), x[kept]

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        out = np.zeros(n, dtype=np.float32)
        out[indices.unpack(head, n, numbers.size)] = numbers
        return out


class Values(Part):
    """Writes values with fewer bits."""

    def nbytes(self, n: int) -> int:
        """Length of n encoded values."""
        raise NotImplementedError

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        """x: (n,) to nbytes(n) bytes. What is not finite must come out not finite, or be refused by
        `decode`.
        """
        raise NotImplementedError

    def decode(self, data: memoryview, n: int) -> Floats:
        """data, of nbytes(n) bytes as the chain has checked, to (n,)."""
        raise NotImplementedError


class Lossless(Part):
    """Shortens bytes; comes last."""

    lossy: ClassVar[bool] = False

    def bound(self, nbytes: int) -> int:
        """The longest that nbytes bytes can become."""
        raise NotImplementedError

    def encode(self, data: bytes) -> bytes:
        raise NotImplementedError

    def decode(self, data: memoryview, nbytes: int) -> bytes:
        """To exactly nbytes bytes; never allocates more than that."""
        raise NotImplementedError


def scales(data: memoryview, what: str) -> Floats:
    """Little-endian float32 scales, refused unless finite and not negative."""
    found: Floats = np.frombuffer(data, dtype="<f4")
    if not bool(np.isfinite(found).all()) or bool((found < 0).any()):
        raise RemoteProtocolError(f"{what}: a scale is negative or not finite.")
    return found.astype(np.float32)
