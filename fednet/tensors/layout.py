"""What a model takes, which tensors it has, and where each is in the flat vector of its role."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from fednet.errors import ConfigError

Role = Literal["parameter", "buffer", "counter"]
ITEM = {"parameter": 4, "buffer": 4, "counter": 8}  # bytes of an element


Inputs = torch.Tensor | dict[str, torch.Tensor]
"""Of n samples: a tensor (n, ...), or one by name for a model of several inputs."""


def by_name(x: Inputs) -> dict[str, torch.Tensor]:
    """Returns x as a dict; a single tensor has the empty name."""
    return x if isinstance(x, dict) else {"": x}


def map_inputs(x: Inputs, one: Callable[..., torch.Tensor], *others: Inputs) -> Inputs:
    """Returns `one(x, *others)`, or of several inputs that of each, by name."""
    if isinstance(x, dict):
        return {name: one(part, *(by_name(o)[name] for o in others)) for name, part in x.items()}
    return one(x, *others)


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of a layout. aliases: the other names of a tied tensor, which the state dict
    has too; they are no part of what two sides compare.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    aliases: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the tensor, the first one first."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Layout:
    """Says which tensors there are, in state-dict order, and where each is in the vector of its
    role.
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Returns the layout of a module: its trainable parameters and its buffers, tied tensors
        once.

        Buffers that are neither floats nor int64 (masks, tables) are left out, and so are those of
        less than float32 beside no trainable parameter: they are constants. Raises ConfigError for
        a trainable parameter that is not float32, and for a tensor that cannot be written to.
        """
        aliases: dict[str, list[str]] = {}
        for alias, first in first_names(module).items():
            aliases.setdefault(first, []).append(alias)
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        trained = {owner(name) for name, p in parameters.items() if p.requires_grad}
        memory: dict[int, str] = {}
        slots = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.is_meta
                or tensor.layout != torch.strided
                or any(side > 1 and step == 0 for side, step in zip(tensor.shape, tensor.stride()))
            ):
                raise ConfigError(
                    f"{name} of the model cannot be written to; expected a dense tensor with "
                    f"values of its own, not one of the meta device, expand or get_extra_state."
                )
            shape = tuple(tensor.shape)
            also = tuple(aliases.get(name, ())[1:])
            if name in parameters:
                if tensor.requires_grad and tensor.dtype != torch.float32:
                    raise ConfigError(
                        f"parameter {name!r} of the model is {tensor.dtype}; what is trained and "
                        f"sent is float32: build it with .float() (train.precision sets the number "
                        f"format of the computation), or freeze it, with model.adapters, "
                        f"train.only or requires_grad_(False)."
                    )
                other = memory.setdefault(tensor.data_ptr(), name)
                if other != name and tensor.numel():
                    raise ConfigError(
                        f"the model's parameters {other} and {name} are two over the same memory; "
                        f"to tie them, assign the parameter itself, as in self.out.weight = "
                        f"self.embed.weight."
                    )
                if tensor.requires_grad:
                    slots.append(Slot(name, shape, "parameter", also))
            elif name in buffers:
                constant = tensor.dtype.itemsize < 4 and owner(name) not in trained
                if tensor.is_floating_point() and not constant:
                    slots.append(Slot(name, shape, "buffer", also))
                elif tensor.dtype == torch.int64:
                    slots.append(Slot(name, shape, "counter", also))
        if not any(s.role == "parameter" for s in slots):
            raise ConfigError("no parameter of the model requires a gradient; nothing learns.")
        return cls(tuple(slots))

    @cached_property
    def places(self) -> dict[str, tuple[Role, int, int, tuple[int, ...]]]:
        """Returns, by name, (role, start, end, shape) in the vector of that role."""
        ends: dict[str, int] = {"parameter": 0, "buffer": 0, "counter": 0}
        places = {}
        for s in self.slots:
            start = ends[s.role]
            ends[s.role] = start + s.numel
            places[s.name] = (s.role, start, ends[s.role], s.shape)
        return places

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Returns elements of parameters, buffers, counters."""
        found = dict.fromkeys(ITEM, 0)
        for s in self.slots:
            found[s.role] += s.numel
        return found["parameter"], found["buffer"], found["counter"]

    @cached_property
    def nbytes(self) -> int:
        """Returns the bytes of all tensors, uncompressed: 4 an element, 8 a counter."""
        return sum(s.numel * ITEM[s.role] for s in self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.slots)

    @cached_property
    def firsts(self) -> dict[str, str]:
        """Returns each name of each tensor, which may be tied -> the name that its slot has."""
        return {name: s.name for s in self.slots for name in s.names}

    def has(self, name: str) -> bool:
        """Returns whether the layout has a tensor of that name, the first or another one."""
        return name in self.firsts

    def select(self, names: Iterable[str]) -> Layout:
        """Returns the part of the layout with these names, in the same order; any name of a tied
        tensor will do. An unknown name raises KeyError.
        """
        wanted = set(names)
        if missing := wanted - self.firsts.keys():
            raise KeyError(f"no tensor of that name: {', '.join(sorted(missing))}")
        firsts = {self.firsts[name] for name in wanted}
        return Layout(tuple(s for s in self.slots if s.name in firsts))

    def without(self, names: Iterable[str]) -> Layout:
        """Returns the layout less these names; those that it does not have are passed over."""
        gone = {self.firsts.get(name) for name in names}
        return Layout(tuple(s for s in self.slots if s.name not in gone))

    @cached_property
    def parameters(self) -> Layout:
        """Returns the layout of the trainable parameters alone."""
        own = tuple(s for s in self.slots if s.role == "parameter")
        return self if len(own) == len(self.slots) else Layout(own)

    @cached_property
    def digest(self) -> str:
        """Returns SHA-256 over names, shapes and roles: two sides with the same digest mean the
        same bytes.
        """
        return hashlib.sha256(repr(self.slots).encode()).hexdigest()

    # Layouts are compared for each reply; slot by slot would take longest where all are equal.
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def owner(name: str) -> str:
    """Returns the name of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def first_names(module: nn.Module) -> dict[str, str]:
    """Returns each name of the module's state dict -> the first name of that tensor: a tied tensor
    stands there under several, and a layout has it under the first.
    """
    found: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found[name] = seen.setdefault(id(tensor), name)
    return found
