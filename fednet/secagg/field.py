"""Arithmetic in the prime field F_q, q = 2^32 - 5, on whole arrays; on it, Shamir's secret
sharing.

Values are uint64 arrays of numbers below q, so that a product of two fits. Products of matrices go
through float64, whose sums of 16-bit halves are exact.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint64]
Random = Callable[[int], bytes]

Q = (1 << 32) - 5
_Q = np.uint64(Q)
SECRET = 32  # bytes of a secret that is shared
LIMB = 31  # bits of it in one element of the field
LIMBS = -(-8 * SECRET // LIMB)
SHARE = 4 * LIMBS  # bytes of a share


def uniform(n: int, random: Random = secrets.token_bytes) -> Array:
    """Draws n elements uniformly: numbers that are not below q are drawn again."""
    found = np.frombuffer(random(4 * n), "<u4").astype(np.uint64)
    while (high := np.flatnonzero(found >= _Q)).size:
        found[high] = np.frombuffer(random(4 * high.size), "<u4")
    return found


def product(a: Array, b: Array) -> Array:
    """Returns the matrix product a @ b, (n, m) @ (m, k)."""
    low = np.uint64(0xFFFF)
    high = np.uint64(16)
    a0 = (a & low).astype(np.float64)
    a1 = (a >> high).astype(np.float64)
    b0 = (b & low).astype(np.float64)
    b1 = (b >> high).astype(np.float64)
    # Each sum is below m * 2^33, and so exact for any m that could be asked for.
    parts = [(a0 @ b0, 0), (a0 @ b1 + a1 @ b0, 16), (a1 @ b1, 32)]
    total = np.zeros(parts[0][0].shape, dtype=np.uint64)
    for part, shift in parts:
        total += (part.astype(np.uint64) % _Q) * np.uint64(pow(2, shift, Q)) % _Q
    return total % _Q


def weights(points: Sequence[int]) -> list[int]:
    """Returns 1 / prod_(j != i) (x_i - x_j) for each of some points, all different."""
    found = []
    for i, x in enumerate(points):
        bottom = 1
        for j, other in enumerate(points):
            if i != j:
                bottom = bottom * (x - other) % Q
        found.append(pow(bottom, -1, Q))
    return found


@functools.lru_cache(maxsize=8)
def lagrange(known: tuple[int, ...], wanted: tuple[int, ...]) -> Array:
    """Returns the (wanted, known) matrix that takes the values of a polynomial at the points
    `known` to its values at the points `wanted`. All points differ. The matrix must not be changed:
    holders of many clients' shares have the same points, and the same one is returned for them.
    """
    slopes = weights(known)
    rows = []
    for z in wanted:
        if z in known:
            rows.append([int(x == z) for x in known])
            continue
        whole = 1
        for x in known:
            whole = whole * (z - x) % Q
        rows.append([whole * pow(z - x, -1, Q) * s % Q for x, s in zip(known, slopes)])
    return np.array(rows, dtype=np.uint64).reshape(len(wanted), len(known))


# -- Shamir's secret sharing -----------------------------------------------------------------------
def split_secret(
    secret: bytes, n: int, t: int, random: Random = secrets.token_bytes
) -> list[bytes]:
    """Returns n shares of a secret, at the points 1 to n, of which any t reconstruct it (Shamir,
    1979): polynomials of degree t - 1, one a limb, by Horner's rule at all points at once.
    """
    number = int.from_bytes(secret, "little")
    limbs = [number >> (LIMB * i) & ((1 << LIMB) - 1) for i in range(LIMBS)]
    above = uniform((t - 1) * LIMBS, random).reshape(t - 1, LIMBS)
    points = np.arange(1, n + 1, dtype=np.uint64)[:, None]
    values = np.zeros((n, LIMBS), dtype=np.uint64)
    for coefficients in [*above, np.array(limbs, dtype=np.uint64)]:
        values = (values * points + coefficients) % _Q
    return [row.astype("<u4").tobytes() for row in values]


def as_rows(shares: Sequence[bytes]) -> Array:
    """Returns shares as elements of the field, (shares, LIMBS)."""
    return np.stack([np.frombuffer(share, "<u4") for share in shares]).astype(np.uint64)


def secret_of(limbs: Array) -> bytes | None:
    """Returns the secret that has these limbs; None if none has."""
    values = [int(limb) for limb in limbs]
    if any(value >> LIMB for value in values):
        return None
    number = sum(value << (LIMB * i) for i, value in enumerate(values))
    return None if number >> (8 * SECRET) else number.to_bytes(SECRET, "little")


def numbers(data: bytes) -> bool:
    """Whether these are elements of the field, 4 bytes each."""
    return not bool((np.frombuffer(data, "<u4") >= Q).any())
