"""What the functions of a user's own compressor return (`loading.held`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fednet.loading import Check, Given
from fednet.wire.compressors.base import Feedback, Lossless, Part, Reduce, Select, Values


def _count(part: Part, given: Given, found: object) -> str | None:
    return None if isinstance(found, (int, np.integer)) and found >= 0 else "a whole number"


def _bytes(part: Part, given: Given, found: object) -> str | None:
    return None if isinstance(found, bytes) else "bytes"


def _tensor(part: Part, given: Given, found: object) -> str | None:
    return None if isinstance(found, torch.Tensor) else "a tensor"


def _exactly(found: object, size: int) -> str | None:
    if isinstance(found, bytes) and len(found) == size:
        return None
    more = f", not {len(found)}" if isinstance(found, bytes) else ""
    return f"bytes, {size} of them{more}"


def _floats(found: object, n: int, most: bool = False) -> str | None:
    """n: how many there are, or may be at `most`."""
    if not isinstance(found, np.ndarray):
        return f"a float32 array of {n} values"
    right = found.ndim == 1 and (found.size <= n if most else found.size == n)
    if right and found.dtype == np.float32:
        return None
    return f"a float32 array of {n} values, not {found.dtype} of shape {found.shape}"


def _encoded(part: Values, given: Given, found: object) -> str | None:
    return _exactly(found, part.nbytes(len(given[0])))


def _decoded(part: Values, given: Given, found: object) -> str | None:
    return _floats(found, given[1])


def _reduced(part: Reduce, given: Given, found: object) -> str | None:
    head, numbers = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    most = part.count(len(given[0]))
    if isinstance(head, bytes) and _floats(numbers, most, not part.fixed) is None:
        return None
    return f"(bytes, a float32 array of {most} values)"


def _expanded(part: Reduce, given: Given, found: object) -> str | None:
    return _floats(found, given[2])


def _selected(part: Select, given: Given, found: object) -> str | None:
    n, most = len(given[0]), part.count(len(given[0]))
    expected = f"an array of {most} ascending indices below {n}"
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        what = f", not {found.dtype}" if isinstance(found, np.ndarray) else ""
        return f"{expected}{what}"
    if found.size != most if part.fixed else found.size > most:
        return f"{expected}, not {found.size}"
    ascend = bool((found[1:] > found[:-1]).all())
    inside = not found.size or (int(found[0]) >= 0 and int(found[-1]) < n)
    return None if ascend and inside else expected


def _lengthened(part: Lossless, given: Given, found: object) -> str | None:
    return _exactly(found, given[1])


_REDUCE: Mapping[str, Check] = {
    "count": _count,
    "head": _count,
    "reduce": _reduced,
    "left": _count,
    "expand": _expanded,
}
RETURNS: Mapping[type[Part], Mapping[str, Check]] = {
    Feedback: {"wanted": _tensor, "said": _bytes, "kept": _tensor, "received": _tensor},
    Select: {**_REDUCE, "select": _selected},
    Reduce: _REDUCE,
    Values: {"nbytes": _count, "encode": _encoded, "decode": _decoded},
    Lossless: {"bound": _count, "encode": _bytes, "decode": _lengthened},
}
