"""Where the values of a sparse vector stand: k ascending indices below n, in as many bits as n and
k alone say.

Elias-Fano (Elias 1974; Vigna 2013, Quasi-succinct indices, arXiv:1206.4300, Section 3): the lowest
l bits of each index as they are, and of the rest a bit vector in which bit (i_j >> l) + j is 1 for
the j-th index i_j. l is the one that makes it shortest, about log2(n/k): 2 + log2(n/k) bits an
index, half a bit above the entropy of a set of k in n. Where a bitmap of n bits is no longer, from
about k = n/4 on, it is that.

Such a length needs no header and can be predicted, which is why it is this and no code of the gaps
(Golomb-Rice, delta and bit packing), whose length depends on where the values are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fednet.errors import RemoteProtocolError


def nbytes(n: int, k: int) -> int:
    """Bytes of k indices below n; n below 2**32."""
    low, high = _bits(n, k)
    return n // 8 + (n % 8 > 0) if low < 0 else -(-k * low // 8) + -(-high // 8)


def pack(indices: npt.NDArray[np.uint32], n: int) -> bytes:
    """indices: (k,), ascending, below n. To nbytes(n, k) bytes."""
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


def unpack(data: memoryview, n: int, k: int) -> npt.NDArray[np.int64]:
    """(k,) indices from nbytes(n, k) bytes. Raises RemoteProtocolError where these are none."""
    low, high = _bits(n, k)
    if low < 0:
        return _ones(data, n, k)
    cut = -(-k * low // 8)
    lowest = np.unpackbits(_bytes(data[:cut]), bitorder="little")
    if bool(lowest[k * low :].any()):
        raise RemoteProtocolError("indices: the bits after the last are not 0.")
    wide = np.zeros((k, 32), dtype=np.uint8)
    wide[:, :low] = lowest[: k * low].reshape(k, low)
    small = np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(k).astype(np.int64)
    found = ((_ones(data[cut:], high, k) - np.arange(k)) << low) | small
    return ascending(found, n)


def ascending(found: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """The indices, which must ascend and lie below n."""
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


def _bytes(data: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _ones(data: memoryview, bits: int, k: int) -> npt.NDArray[np.int64]:
    """Where the k ones of so many bits stand."""
    marks = np.unpackbits(_bytes(data), bitorder="little")
    found = np.flatnonzero(marks)
    if found.size != k or (k and int(found[-1]) >= bits):
        raise RemoteProtocolError(f"indices: {found.size} marks in {bits} bits, expected {k}.")
    return found
