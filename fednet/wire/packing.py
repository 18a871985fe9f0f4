"""One field of a payload to bytes and back. What comes is held against its declaration: dtype,
shape, range, and that it is finite.
"""

from __future__ import annotations

import math
import struct
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
import torch

from fednet.buffers import copied
from fednet.errors import RemoteProtocolError
from fednet.files import Buffer
from fednet.tensors import Layout, Tensors
from fednet.wire.messages import Field
from fednet.wire.payload import Field as Declared
from fednet.wire.payload import Payload, Run, Samples

DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAMPLE_DTYPES = (torch.uint8, torch.int64, torch.float32)
_TENSORS = (Tensors, "Tensors of the model, whole (such as `done.x`)")
VALUES: dict[str, tuple[type, str]] = {  # by a field's form
    "tensors": _TENSORS,
    "parameters": _TENSORS,
    "run": (Run, "what a training was (Statistics, such as `done.run`)"),
    "float": (SupportsFloat, "a number"),
    "int": (SupportsIndex, "a whole number"),
    "samples": (Samples, "Samples"),
    "array": (torch.Tensor, "a tensor"),
}
MAX_AXES = 8
MAX_ELEMENTS = 1 << 40


def floats(data: Buffer) -> torch.Tensor:
    """Values that share the memory of `data` where it may be written to and lies aligned."""
    values = np.frombuffer(data, dtype="<f4")
    if not (values.flags.writeable and values.flags.aligned):
        values = copied(values)
    return torch.from_numpy(values)


def tensors(layout: Layout, data: Buffer, buffers: torch.Tensor, counters: torch.Tensor) -> Tensors:
    """Tensors whose parameters share the memory of `data` where it may be written to and lies
    aligned.
    """
    return Tensors(layout, floats(data), buffers, counters)


def raw(values: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it lies contiguous on the CPU."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().cpu().contiguous().view(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return flat.numpy().data.cast("B")


def undeclared(payload: Payload) -> str | None:
    """What a field was expected to be that is not as its declaration says; None where all are."""
    for name, field in payload.fields.items():
        value = getattr(payload, name)
        found = misfit(field.form, value)
        if found is None and field.form == "array":
            found = _other(field, value)
        if found is not None:
            return f"{VALUES[field.form][1]} as {type(payload).__qualname__}.{name}, not {found}"
    return None


def misfit(form: str, value: object) -> str | None:
    """What a value is that `pack` cannot lay out."""
    if not isinstance(value, VALUES[form][0]):
        return type(value).__name__
    try:
        if form in ("run", "float", "int"):
            pack(form, value)
    except (struct.error, TypeError, ValueError, RuntimeError):  # as torch, of two elements, has it
        return repr(value) if isinstance(value, Run) else type(value).__name__
    if isinstance(value, Samples):
        arrays = [*value.x.values()] if isinstance(value.x, dict) else [value.x]
        others = [v for v in (*arrays, value.y) if not isinstance(v, torch.Tensor)]
        return f"Samples of {type(others[0]).__name__}" if others else None
    if isinstance(value, torch.Tensor) and value.dtype not in NAMES:
        return str(value.dtype)
    return None


def _other(declared: Declared, part: torch.Tensor) -> str | None:
    """What a tensor is that is not of the dtype and rank declared."""
    if declared.dtype not in ("", NAMES[part.dtype]):
        return f"{NAMES[part.dtype]}, declared is {declared.dtype}"
    if declared.rank not in (None, part.dim()):
        return f"{part.dim()} axes, declared are {declared.rank}"
    return None


def pack(
    form: str,
    value: Any,  # of the type that the form says, see `undeclared`
) -> tuple[list[Buffer], list[tuple[str, str, list[int]]]]:
    """Lays out a field's value for the wire. Returns (a value's bytes, the (name, dtype, shape) of
    its arrays).
    """
    if form == "run":
        return [struct.pack("<qqd", value.n, value.steps, value.loss)], []
    if form == "float":
        return [struct.pack("<d", value)], []
    if form == "int":
        return [struct.pack("<q", value)], []
    if form == "samples":
        x = value.x if isinstance(value.x, dict) else {"x": value.x}
        arrays = [
            *((f"x.{k}" if isinstance(value.x, dict) else "x", v) for k, v in x.items()),
            ("y", value.y),
        ]
    else:
        arrays = [("", value)]
    return [raw(v) for _, v in arrays], [(n, NAMES[v.dtype], list(v.shape)) for n, v in arrays]


def within(declared: Declared, value: object, name: str) -> None:
    """Raises RemoteProtocolError for a value of another type, rank or range than is declared."""
    if isinstance(value, (int, float)):
        found = value, value
    elif isinstance(value, (torch.Tensor, Samples)):
        x = value.x if isinstance(value, Samples) else value
        for part in x.values() if isinstance(x, dict) else (x,):
            if (other := _other(declared, part)) is not None:
                raise RemoteProtocolError(f"field {name}: {other}")
        if isinstance(x, dict) or not x.numel():
            return
        if declared.low == -math.inf and declared.high == math.inf:
            return
        found = float(x.min()), float(x.max())
    else:
        return
    if not declared.low <= found[0] <= found[1] <= declared.high:
        raise RemoteProtocolError(
            f"field {name}: values from {found[0]:g} to {found[1]:g}, declared are "
            f"{declared.low:g} to {declared.high:g}"
        )


# Of the type that the form says.
def unpack(form: str, data: memoryview, got: Field, name: str) -> Any:
    """The value of a field that came. Raises RemoteProtocolError for what can be none."""
    if form == "run":
        n, steps, loss = struct.unpack("<qqd", data)
        # A mean of float32 losses is none of float64's other numbers.
        if n < 0 or steps < 0 or not abs(loss) <= torch.finfo(torch.float32).max:
            raise RemoteProtocolError(
                f"field {name}: n={n}, steps={steps}, loss={loss} are not all finite and >= 0"
            )
        return Run(n, steps, loss)
    if form == "float":
        (number,) = struct.unpack("<d", data)
        if not math.isfinite(number):
            raise RemoteProtocolError(f"field {name}: {number} is not finite")
        return number
    if form == "int":
        return struct.unpack("<q", data)[0]
    arrays = _arrays(data, got, name)
    if form == "array":
        if list(arrays) != [""]:
            raise RemoteProtocolError(f"field {name}: expected one array")
        return arrays[""]
    return _samples(arrays, name)


def _arrays(data: memoryview, got: Field, name: str) -> dict[str, torch.Tensor]:
    """The arrays that a field's bytes hold, as its form says."""
    arrays, at = dict[str, torch.Tensor](), 0
    for part, dtype, shape in got.parts:
        if dtype not in DTYPES or len(shape) > MAX_AXES:
            raise RemoteProtocolError(f"field {name}: dtype {dtype!r} or shape {shape} not allowed")
        count = math.prod(shape)
        size = count * DTYPES[dtype].itemsize
        # An empty array may have any sides, and those that no tensor can have are not told by its
        # bytes.
        if at + size > len(data) or math.prod(s for s in shape if s) > MAX_ELEMENTS:
            raise RemoteProtocolError(
                f"field {name}: arrays of more than the {len(data)} bytes announced"
            )
        if dtype == "bool" and any(b > 1 for b in set(data[at : at + size])):
            raise RemoteProtocolError(f"field {name}: a truth value is neither 0 nor 1")
        value = (
            torch.frombuffer(bytearray(data[at : at + size]), dtype=DTYPES[dtype]).view(shape)
            if count
            else torch.zeros(shape, dtype=DTYPES[dtype])
        )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RemoteProtocolError(f"field {name}: a value is not finite")
        arrays[part] = value
        at += size
    if at != len(data) or len(arrays) != len(got.parts):
        raise RemoteProtocolError(f"field {name}: arrays of {at} bytes, announced were {len(data)}")
    return arrays


def _samples(arrays: dict[str, torch.Tensor], name: str) -> Samples:
    if (
        "y" not in arrays
        or len(arrays) < 2
        or any(v.dim() < 1 or v.shape[0] != arrays["y"].shape[0] for v in arrays.values())
    ):
        raise RemoteProtocolError(f"field {name}: samples need x and y of one length")
    y = arrays.pop("y")
    if y.dtype not in (torch.int64, torch.float32) or any(
        v.dtype not in SAMPLE_DTYPES for v in arrays.values()
    ):
        raise RemoteProtocolError(
            f"field {name}: samples are uint8, int64 or float32, their labels int64 or float32"
        )
    if list(arrays) == ["x"]:
        return Samples(arrays["x"], y)
    if not all(k.startswith("x.") for k in arrays):
        raise RemoteProtocolError(f"field {name}: arrays {list(arrays)} are no samples")
    return Samples({k[2:]: v for k, v in arrays.items()}, y)
