"""Which tensors a model has, and where each lies in the flat vector of its role."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from fednet.errors import ConfigError

Role = Literal["parameter", "buffer", "counter"]
ITEM = {"parameter": 4, "buffer": 4, "counter": 8}  # bytes of an element


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of a layout."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def numel(self) -> int:
        n = 1
        for side in self.shape:
            n *= side
        return n


@dataclass(frozen=True)
class Layout:
    """Which tensors there are, in state-dict order, and where each lies in the vector of its
    role.
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module, trainable: str | Iterable[str] = "*") -> Layout:
        """The layout of a module: its trainable parameters and its buffers, tied tensors once.

        `trainable`: glob pattern(s) over parameter names; what matches none stays out, and so never
        crosses. Buffers that are neither floats nor int64 (masks, tables) stay out too: they are
        constants. Raises ConfigError for a parameter that is not float32, and
        for what no tensor can be written to.
        """
        patterns = [trainable] if isinstance(trainable, str) else list(trainable)
        parameters = dict(module.named_parameters())
        state = module.state_dict(keep_vars=True)
        buffers = dict(module.named_buffers())
        slots = []
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"{name} of the model, from get_extra_state, is a {type(tensor).__name__}; "
                    f"fednet averages, sends and saves tensors: register it as a buffer."
                )
            shape = tuple(tensor.shape)
            if tensor.is_meta or tensor.layout != torch.strided:
                form = "on the meta device" if tensor.is_meta else str(tensor.layout)
                raise ConfigError(
                    f"{name} of the model is {form}; expected a dense tensor with values."
                )
            if any(side > 1 and step == 0 for side, step in zip(shape, tensor.stride())):
                raise ConfigError(
                    f"{name} of the model is one value seen many times (expand), which cannot be "
                    f"written to: build it with .clone()."
                )
            if name in parameters:
                if tensor.dtype != torch.float32:
                    raise ConfigError(
                        f"parameter {name!r} of the model is {tensor.dtype}; fednet trains "
                        f"float32 parameters, as which they cross: build it with .float(); "
                        f"train.precision is what is computed in."
                    )
                if tensor.requires_grad and any(fnmatch.fnmatchcase(name, p) for p in patterns):
                    slots.append(Slot(name, shape, "parameter"))
            elif name in buffers:
                if tensor.is_floating_point():
                    slots.append(Slot(name, shape, "buffer"))
                elif tensor.dtype == torch.int64:
                    slots.append(Slot(name, shape, "counter"))
        if not parameters:
            raise ConfigError("the model has no parameters; there is nothing to train.")
        if not any(s.role == "parameter" for s in slots):
            if not any(p.requires_grad for p in parameters.values()):
                raise ConfigError("no parameter of the model requires a gradient; nothing learns.")
            raise ConfigError(
                f"model.trainable: {trainable!r} matches none of the parameters "
                f"{', '.join(list(parameters)[:8])}."
            )
        return cls(tuple(slots))

    @cached_property
    def places(self) -> dict[str, tuple[Role, int, int, tuple[int, ...]]]:
        """name -> (role, start, end, shape) in the vector of that role."""
        ends: dict[str, int] = {"parameter": 0, "buffer": 0, "counter": 0}
        places = {}
        for s in self.slots:
            start = ends[s.role]
            ends[s.role] = start + s.numel
            places[s.name] = (s.role, start, ends[s.role], s.shape)
        return places

    def size(self, role: Role) -> int:
        """Number of elements of that role."""
        return sum(s.numel for s in self.slots if s.role == role)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of parameters, buffers, counters."""
        return self.size("parameter"), self.size("buffer"), self.size("counter")

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors, uncompressed: 4 an element, 8 a counter."""
        return sum(s.numel * ITEM[s.role] for s in self.slots)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.slots)

    def select(self, keep: Iterable[str] | Callable[[str], bool]) -> Layout:
        """The part of the layout with these names, in the same order. An unknown name raises
        KeyError.
        """
        if callable(keep):
            return Layout(tuple(s for s in self.slots if keep(s.name)))
        wanted = set(keep)
        if missing := wanted - set(self.names):
            raise KeyError(f"no tensor of that name: {', '.join(sorted(missing))}")
        return Layout(tuple(s for s in self.slots if s.name in wanted))

    def without(self, names: Iterable[str]) -> Layout:
        """The layout less these names; those that it does not have are passed over."""
        gone = set(names)
        return Layout(tuple(s for s in self.slots if s.name not in gone))

    @cached_property
    def parameters(self) -> Layout:
        """The layout of the trainable parameters alone."""
        return Layout(tuple(s for s in self.slots if s.role == "parameter"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes and roles: two sides with the same digest mean the same
        bytes.
        """
        return hashlib.sha256(repr(self.slots).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)
