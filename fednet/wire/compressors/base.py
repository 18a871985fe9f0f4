"""The four places a compressor can take in a chain.

A part is a class under `@compressor("name")` that derives from one of these; the arguments of its
`__init__` are those in the parentheses of `topk(0.01)`, and it raises ConfigError where they are
out of range. Its attribute `paper` cites what it was taken from. What is encoded should be of a
length that follows from the number of values alone (except `Lossless`), and decoding raises
RemoteProtocolError for what it cannot make sense of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fednet.errors import RemoteProtocolError

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


class CompressorPart:
    """A step of a compressor chain. C(x) is what is decoded from x."""

    paper: ClassVar[str] = ""
    lossy: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    """E C(x) is not x, so that error feedback is needed."""
    contracts: bool = True
    """E||C(x) - x||^2 < ||x||^2 for x other than 0, which error feedback needs."""
    omega: float | None = None
    """The least that is known with E||C(x) - x||^2 <= omega ||x||^2, where E C(x) = x or rounding
    is all that is lost; None: where not.
    """


@dataclass(frozen=True)
class Memory:
    """What one end keeps from message to message, by name."""

    known: Mapping[str, torch.Tensor]
    """As it was."""
    next: dict[str, torch.Tensor]
    """Where what follows is written."""
    field: str = ""
    """Before each name."""

    def of(self, field: str) -> Memory:
        """Returns what is kept for one field of the messages."""
        return dataclasses.replace(self, field=self.field + field)

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


class Feedback(CompressorPart):
    """What is done about what earlier messages left out, by what the sender remembers, and, where
    it is `shared`, the receiver too. It comes before all others.
    """

    lossy: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    """Whether the receiver remembers too."""
    way: ClassVar[str] = ""
    """The only direction it is for, "up" or "down"; "" for both."""
    turned_off: ClassVar[bool] = False
    """Whether nothing is done."""
    head: ClassVar[int] = 0
    """Bytes before what the rest of the chain makes."""
    scaled: ClassVar[bool] = False
    """Whether a choice at random is scaled so that it has no bias, or left as it is so that it
    contracts.
    """

    def conflict(self, select: Reduce | None, values: Values | None) -> str:
        """Why it makes no sense with these parts, as the rest of a sentence; "" where it does."""
        return ""

    def wrong_place(self, way: str, kind: str) -> str:
        """Why it makes no sense in that direction, for that ledger kind; "" where it does."""
        if self.way in ("", way):
            return ""
        if self.way == "down":
            return "is for what comes down; ef21 is the same for uploads"
        return "is for uploads; delta is for what comes down"

    # -- the sender's side -------------------------------------------------------------------------
    def target(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        """What is to be compressed in the place of x."""
        return x

    def prefix(self, memory: Memory) -> bytes:
        """What is sent before it."""
        return b""

    def remember_sent(
        self, target: torch.Tensor, decoded: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """Remembers what became of `target`; what the receiver has in the place of x."""
        return decoded

    def repeat_sent(self, arrived: torch.Tensor, memory: Memory) -> None:
        """Remembers what `remember_sent` returned for the same value and the same memory."""

    # -- the receiver's, where it is shared --------------------------------------------------------
    def read_prefix(self, prefix: bytes, memory: Memory) -> Memory:
        """What to decode with, by what was sent before. Raises RemoteProtocolError where it is not
        here.
        """
        return memory

    def remember_received(self, decoded: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Remembers what came. Returns the vector that replaces x at the receiver."""
        return decoded


class Reduce(CompressorPart):
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

    def read_count(self, data: memoryview, n: int) -> int:
        """How many numbers are left, by what was sent; at most `count`."""
        return self.count(n)

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        """(n,) from what came before the numbers, and these."""
        raise NotImplementedError

    def for_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Reduce:
        """This part for vectors that hold tensors of these shapes, one behind the other."""
        return self

    def with_feedback(self, feedback: Feedback) -> Reduce:
        """This part as that kind of feedback needs it."""
        return self


class Select(Reduce):
    """Keeps some of the values, and sends where they stand."""

    def select(self, x: Floats) -> Indices:
        """(count(n),) different indices into x, (n,)."""
        raise NotImplementedError

    def head(self, n: int, k: int) -> int:
        return index_bytes(n, k)

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        kept = np.sort(self.select(x))
        return pack_indices(kept, x.size), x[kept]

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        out = np.zeros(n, dtype=np.float32)
        out[unpack_indices(head, n, numbers.size)] = numbers
        return out


class Values(CompressorPart):
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


class Lossless(CompressorPart):
    """Shortens bytes; comes last."""

    lossy: ClassVar[bool] = False

    def bound(self, nbytes: int) -> int:
        """The longest that nbytes bytes can become."""
        raise NotImplementedError

    def encode(self, data: bytes) -> bytes:
        raise NotImplementedError

    def decode(self, data: memoryview, most: int) -> bytes:
        """To at most so many bytes, and never allocates more: the chain checks the length."""
        raise NotImplementedError


# -- the places of values --------------------------------------------------------------------------
# k ascending indices below n, in as many bits as n and k alone say. Such a length needs no header
# and can be predicted; that of a code of the gaps (Golomb-Rice, delta) depends on the values.
#
# Elias-Fano (Elias 1974; Vigna 2013, Quasi-succinct indices, arXiv:1206.4300, Section 3): the
# lowest l bits of each index as they are, and of the rest a bit vector in which bit (i_j >> l) + j
# is 1 for the j-th index i_j. l is the one that makes it shortest, about log2(n/k): 2 + log2(n/k)
# bits an index, half a bit above the entropy of a set of k in n. Where a bitmap of n bits is no
# longer, from about k = n/4 on, it is that.
def index_bytes(n: int, k: int) -> int:
    """Bytes of k indices below n; n below 2**32."""
    low, high = _bits(n, k)
    return -(-n // 8) if low < 0 else -(-k * low // 8) + -(-high // 8)


def pack_indices(indices: npt.NDArray[np.uint32], n: int) -> bytes:
    """indices: (k,), ascending, below n. To index_bytes(n, k) bytes."""
    k = indices.size
    low, high = _bits(n, k)
    marks = np.zeros(n if low < 0 else high, dtype=np.uint8)
    if low < 0:
        marks[indices] = 1
        return np.packbits(marks, bitorder="little").tobytes()
    marks[(indices >> np.uint32(low)).astype(np.int64) + np.arange(k)] = 1
    four = indices.astype("<u4").view(np.uint8).reshape(k, 4)
    lowest = np.unpackbits(four, axis=1, bitorder="little")[:, :low].reshape(-1)
    return (
        np.packbits(lowest, bitorder="little").tobytes()
        + np.packbits(marks, bitorder="little").tobytes()
    )


def unpack_indices(data: memoryview, n: int, k: int) -> npt.NDArray[np.int64]:
    """(k,) indices from index_bytes(n, k) bytes. Raises RemoteProtocolError where these are
    none.
    """
    low, high = _bits(n, k)
    if low < 0:
        return _ones(data, n, k)
    cut = -(-k * low // 8)
    lowest = np.unpackbits(np.frombuffer(data[:cut], dtype=np.uint8), bitorder="little")
    wide = np.zeros((k, 32), dtype=np.uint8)
    wide[:, :low] = lowest[: k * low].reshape(k, low)
    small = np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(k).astype(np.int64)
    found = ((_ones(data[cut:], high, k) - np.arange(k)) << low) | small
    if found.size and (int(found[-1]) >= n or bool((found[1:] <= found[:-1]).any())):
        raise RemoteProtocolError(f"the indices do not ascend, or reach beyond {n} values.")
    return found


def _bits(n: int, k: int) -> tuple[int, int]:
    """(bits of an index that are written as they are, bits of the vector of the rest); (-1, n) for
    a bitmap.
    """
    if k == 0:
        return 0, 0
    near = max(1, n // k).bit_length()
    low = min(range(max(0, near - 2), near + 1), key=lambda b: k * b + ((n - 1) >> b))
    high = k + ((n - 1) >> low)
    return (low, high) if k * low + high < n else (-1, n)


def _ones(data: memoryview, bits: int, k: int) -> npt.NDArray[np.int64]:
    """The places of the k ones in so many bits."""
    marks = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    found = np.flatnonzero(marks)
    if found.size != k or (k and int(found[-1]) >= bits):
        raise RemoteProtocolError(f"indices: {found.size} marks in {bits} bits, expected {k}.")
    return found
