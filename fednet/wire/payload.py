"""What crosses the wire, declared.

An algorithm declares its messages as payloads: frozen records whose field types say what form a
value has and under which **kind** the ledger books it.

    class Up(Payload):
        dy: Delta          # tensors of the shared layout, buffers beside them
        dc: Control        # parameters only
        run: Statistics    # n_i, K_i and the mean loss

The declarations are all that is needed to encode, check, decode, bill and predict a message: see
`codec`.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    ClassVar,
    Literal,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    get_args,
)

import torch

from fednet.errors import ConfigError
from fednet.tensors import Tensors, by_name

FieldForm = Literal["tensors", "parameters", "float", "int", "run", "samples", "array"]


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """How a payload's field travels: its ledger kind and its form."""

    kind: str
    form: FieldForm
    """tensors: the shared layout with its buffers; parameters: without them; float, int: 8 bytes;
    run: a `LocalRun` (24 bytes); samples: a `Samples`; array: one tensor of any shape.
    """
    dtype: str = ""
    """Of an array's tensor, or of the inputs of samples; "" leaves it open."""
    rank: int | None = None
    """Of an array's tensor, or of the inputs of samples, where it counts the samples' axis; None
    leaves it open.
    """
    low: float = -math.inf
    """The least value of a number, or of what is in an array. What is outside is refused when it
    arrives.
    """
    high: float = math.inf
    """The largest value of the same."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What a local training was: every reply carries one."""

    n: int
    """Training samples (n_i)."""
    steps: int
    """Optimizer steps taken (K_i)."""
    loss: float
    """Mean training loss over the steps' samples."""


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """Samples on the wire. x: (n, ...) uint8 or float32, or a dict of such tensors; y: (n,) int64
    or float32.
    """

    x: torch.Tensor | dict[str, torch.Tensor]
    y: torch.Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])


if typing.TYPE_CHECKING:
    Weights = Delta = Control = Tensors
    Accuracy = Scalar = float
    Statistics = LocalRun
    Condensed = Shared = Samples
else:
    Weights = Annotated[Tensors, DeclaredField("state", "tensors")]
    Delta = Annotated[Tensors, DeclaredField("delta", "tensors")]
    Control = Annotated[Tensors, DeclaredField("control", "parameters")]
    Accuracy = Annotated[float, DeclaredField("accuracy", "float", low=0, high=1)]
    Scalar = Annotated[float, DeclaredField("statistics", "float")]
    Statistics = Annotated[LocalRun, DeclaredField("statistics", "run")]
    Condensed = Annotated[Samples, DeclaredField("condensed", "samples", "float32")]
    Shared = Annotated[Samples, DeclaredField("shared", "samples")]

TENSORS = ("tensors", "parameters")  # forms
KINDS = ("state", "delta", "control", "condensed", "accuracy", "shared", "statistics")


def kind(
    name: str,
    form: FieldForm = "array",
    *,
    dtype: str = "",
    rank: int | None = None,
    low: float = -math.inf,
    high: float = math.inf,
) -> object:
    """A field type of a user's own kind: `Sketch = fednet.kind("sketch", "array", dtype="float32",
    rank=2)`; see `DeclaredField`. A method whose fields are arrays or samples says their bytes in
    `sizes`.
    """
    return Annotated[object, DeclaredField(name, form, dtype, rank, low, high)]


P = TypeVar("P", bound="Payload")


@dataclass(frozen=True, eq=False)
class Payload:
    """Base of declared messages. Subclasses become frozen dataclasses; every annotation must be a
    kind.

    Two fields have a part in what the server does beside the method; they follow from the declared
    kinds, whatever they are called, and None is where there is none. weights_field: the first of
    kind `state`, the model that updates are differences to. run_field: the first of form `run`,
    what the local training was. tensor_fields: those that hold tensors of the model.
    """

    fields: ClassVar[Mapping[str, DeclaredField]] = {}
    weights_field: ClassVar[str | None] = None
    run_field: ClassVar[str | None] = None
    tensor_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        # A class body nested in an algorithm's class sees its module's names only.
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {}
        for f in dataclasses.fields(cls):
            marks = [a for a in get_args(hints[f.name]) if isinstance(a, DeclaredField)]
            if not marks:
                raise ConfigError(
                    f"{cls.__qualname__}.{f.name}: a payload's field needs a kind (Weights, "
                    f"Delta, Control, Accuracy, Scalar, Statistics, Condensed, Shared, or "
                    f"fednet.kind(...)), got {hints[f.name]!r}."
                )
            fields[f.name] = marks[0]
        cls.fields = fields
        models = (n for n, f in fields.items() if (f.kind, f.form) == ("state", "tensors"))
        cls.weights_field = next(models, None)
        cls.run_field = next((n for n, f in fields.items() if f.form == "run"), None)
        cls.tensor_fields = tuple(n for n, f in fields.items() if f.form in TENSORS)

    @classmethod
    def kinds(cls) -> set[str]:
        """The ledger kinds that its fields have."""
        return {f.kind for f in cls.fields.values()}


def weights_of(payload: Payload | None) -> Tensors | None:
    """The model that a payload carries; None where it declares none."""
    name = None if payload is None else payload.weights_field
    return None if name is None else getattr(payload, name)


def tensors_of(payload: Payload) -> dict[str, Tensors]:
    """Its fields that hold tensors of the model, by name."""
    return {name: getattr(payload, name) for name in payload.tensor_fields}


def run_of(payload: Payload) -> LocalRun | None:
    """What a reply says of its local training; None where it declares nothing of the kind."""
    name = payload.run_field
    return None if name is None else getattr(payload, name)


class Nothing(Payload):
    """A payload without fields: local-only training receives one each round."""


# -- values and their declarations -----------------------------------------------------------------
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
_TENSORS = (Tensors, "Tensors of the model, whole (such as `done.x`)")
VALUES: dict[str, tuple[type, str]] = {  # by a field's form
    "tensors": _TENSORS,
    "parameters": _TENSORS,
    "run": (LocalRun, "what a training was (Statistics, such as `done.run`)"),
    "float": (SupportsFloat, "a number"),
    "int": (SupportsIndex, "a whole number"),
    "samples": (Samples, "Samples"),
    "array": (torch.Tensor, "a tensor"),
}
NUMBERS = {"run": struct.Struct("<qqd"), "float": struct.Struct("<d"), "int": struct.Struct("<q")}


def pack_number(form: str, value: typing.Any) -> bytes:
    """The bytes of a number, or of a `LocalRun`."""
    if isinstance(value, LocalRun):
        return NUMBERS[form].pack(value.n, value.steps, value.loss)
    return NUMBERS[form].pack(value)


def value_mismatch(payload: Payload) -> str | None:
    """What a field was expected to be that is not as its declaration says; None where all are."""
    for name, field in payload.fields.items():
        value = getattr(payload, name)
        found = misfit(field.form, value)
        if found is None and field.form == "array":
            found = tensor_mismatch(field, value)
        if found is not None:
            return f"{VALUES[field.form][1]} as {type(payload).__qualname__}.{name}, not {found}"
    return None


def misfit(form: str, value: object) -> str | None:
    """What a value is that a field of that form cannot hold; None where it can."""
    if not isinstance(value, VALUES[form][0]):
        return type(value).__name__
    try:
        if form in NUMBERS:
            pack_number(form, value)
    except (
        struct.error,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # RuntimeError: of torch, for two elements
        return repr(value) if isinstance(value, LocalRun) else type(value).__name__
    if isinstance(value, Samples):
        arrays = by_name(value.x).values()
        others = [v for v in (*arrays, value.y) if not isinstance(v, torch.Tensor)]
        return f"Samples of {type(others[0]).__name__}" if others else None
    if isinstance(value, torch.Tensor) and value.dtype not in NAMES:
        return str(value.dtype)
    return None


def tensor_mismatch(declared: DeclaredField, part: torch.Tensor) -> str | None:
    """What a tensor is that is not of the dtype and rank declared."""
    if declared.dtype not in ("", NAMES[part.dtype]):
        return f"{NAMES[part.dtype]}, declared is {declared.dtype}"
    if declared.rank not in (None, part.dim()):
        return f"{part.dim()} axes, declared are {declared.rank}"
    return None
