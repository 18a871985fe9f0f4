"""Decides which tensors of a model are trained, and so sent (`train.only`, `model.adapters`), and
which of its modules are frozen.

Patterns are globs over the names of the state dict; a tied tensor is matched by any of its names. A
module without a trained tensor is frozen, as by `requires_grad_(False)` and `eval()`: its dropout
is off, and its BatchNorm uses its running statistics without changing them. A buffer is trained and
sent if a parameter of its module is; in a module without parameters, if a pattern names it.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from fednet.errors import ConfigError, nearest
from fednet.tensors import Layout, Slot
from fednet.tensors.layout import owner

ADAPTERS = "*lora_[AB]"  # what `adapters` adds to layers

if TYPE_CHECKING:
    from torch import nn

    from fednet.config import Config


def layout_of(config: Config, module: nn.Module) -> Layout:
    """Returns the layout of a module's trained part. Of the parameters that patterns leave out,
    those that are not float32 take no gradient from then on. Raises ConfigError for a pattern that
    matches no tensor that can be trained.
    """
    only = config.train.only
    if config.model.adapters is not None:
        only = (*only, ADAPTERS)
    if only:
        freeze_others(module, only)
    whole = Layout.of(module)
    return named_by(whole, only) if only else whole


def freeze_others(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freezes the parameters that are not float32 and that no pattern names: a layout has none."""
    import torch

    names: dict[int, list[str]] = {}
    for name, first in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(first), []).append(name)
    for parameter in module.parameters():
        own = names[id(parameter)]
        if parameter.dtype != torch.float32 and not any(_fits(name, patterns) for name in own):
            parameter.requires_grad_(False)


def named_by(whole: Layout, patterns: tuple[str, ...]) -> Layout:
    """Returns the part of a layout that patterns name, with its buffers."""
    parameters = {s.name: s for s in whole.slots if s.role == "parameter"}
    owners = {owner(name) for s in parameters.values() for name in s.names}
    free = {s.name: s for s in whole.slots if s.role != "parameter" and owner(s.name) not in owners}
    nameable = {**parameters, **free}
    found = set[str]()
    for pattern in patterns:
        some = {first for first, s in nameable.items() if _matches(s, pattern)}
        if not some:
            if any(_matches(slot, pattern) for slot in whole.slots):
                raise ConfigError(
                    f"train.only: {pattern!r} names only buffers, which go with the parameters of "
                    f"their modules; name one of these."
                )
            known = sorted(name for s in nameable.values() for name in s.names)
            modules = sorted({f"{owner(n)}.*" for n in known if owner(n)})
            near = nearest(pattern, [*known, *modules])
            hint = f" Did you mean {near!r}?" if near else ""
            few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise ConfigError(
                f"train.only: {pattern!r} matches no tensor of the model; it has {few}.{hint}"
            )
        found |= some
    if not found & parameters.keys():
        raise ConfigError(f"train.only: {', '.join(patterns)} names buffers alone; nothing learns.")
    trained = {owner(name) for first in found for name in nameable[first].names}
    follow = {
        s.name for s in whole.slots if s.role != "parameter" and owner(s.name) in trained & owners
    }
    return whole.select(found | follow)


def _matches(slot: Slot, pattern: str) -> bool:
    return any(_fits(name, (pattern,)) for name in slot.names)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def moves(module: nn.Module, layout: Layout, kind: type[nn.Module]) -> bool:
    """Whether a module has parts of that kind that are not frozen."""
    frozen = {id(part) for part in frozen_parts(module, layout)}
    return any(isinstance(part, kind) and id(part) not in frozen for part in module.modules())


def frozen_parts(module: nn.Module, layout: Layout) -> list[nn.Module]:
    """Returns the modules with parameters or numeric buffers of which the layout has none."""
    import torch

    state = module.state_dict(keep_vars=True)
    trained = {id(state[name]) for name in layout.names}
    found = []
    for part in module.modules():
        held = [
            t
            for t in part.state_dict(keep_vars=True).values()
            if t.is_floating_point() or t.dtype == torch.int64
        ]
        if held and not any(id(t) in trained for t in held):
            found.append(part)
    return found
