"""Builds models by name, from a run's seed.

A model is a function or an `nn.Module` class under `@model("name")`. It is called with
`input_shape` and `classes`, if it takes them, and with its options, its annotated keyword
arguments. The module has

    head            the last Linear
    features(x)     the input of the last Linear: head(features(x)) == forward(x)

Its trained parameters are float32; bf16 and fp16 are ways to compute (`train.precision`). Frozen
ones may be of any type. Its layers have their sizes when it is built. A buffer may not have
a name that nn.Module has. `models/calls.py` says how it is called, and which tensor of what it
returns is used.
"""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec

from fednet import capacity, places, registry, seeds
from fednet.config import ModelSection
from fednet.config.fit import fit
from fednet.config.parts import declared_options
from fednet.config.tree import wrap
from fednet.errors import ConfigError, FednetError, unknown
from fednet.options import takes
from fednet.plain import JsonDict, JsonMapping

if typing.TYPE_CHECKING:
    from torch import nn

# Keys of the `model:` section that are not options of the model.
ENGINE_KEYS = frozenset({"buffers", "adapters", "base", "sha256", "clients", "others"})


def section(settings: ModelSection) -> JsonDict:
    """Returns the `model:` section of a configuration as `build` takes it."""
    own = {"name": settings.name, "weights": settings.weights, "adapters": settings.adapters}
    return {**own, **settings.options}


def without_files(settings: ModelSection) -> ModelSection:
    """Returns the `model:` section of a configuration without the files that it names."""
    adapters = settings.adapters
    if adapters is not None:
        adapters = msgspec.structs.replace(adapters, weights=None)
    return msgspec.structs.replace(settings, weights=None, adapters=adapters)


def build(section: JsonMapping, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Builds the model of a `model:` section, initialised from (seed, "init"). torch's global
    generator does not change.

    input_shape: of one sample, (c, h, w) or (f,). classes: outputs of the head. `weights` names a
    .safetensors file to start from; `adapters` (a section, or None) are added last. Raises
    ConfigError for an unknown name or option, a shape or file that does not fit, or a model larger
    than this machine's memory.
    """
    size = nbytes(section, input_shape, classes)
    if size is not None:
        # The module, and a copy of its initial values.
        capacity.check_memory(2 * size, f"model {section.get('name')}")
    try:
        with seeds.scope(seed, "init"):
            module = make(section, input_shape, classes)
    except FednetError:
        raise
    except Exception as broken:
        raise ConfigError(
            f"model {section['name']}: it cannot be built for inputs of shape "
            f"{tuple(input_shape)} and {classes} classes: {type(broken).__name__}: {broken}"
        ) from broken
    if section.get("weights") is not None:
        load(module, section["weights"])
    if section.get("adapters") is not None:
        from fednet.models.adapters import adapt, read_peft

        adapt(module, section["adapters"], seed)
        if section["adapters"].weights is not None:
            read_peft(module, section["adapters"].weights)
    return module


def nbytes(section: JsonMapping, input_shape: tuple[int, ...], classes: int) -> int | None:
    """Returns the bytes of the model's parameters and buffers, without allocating them; None for a
    builder that needs their values.
    """
    import torch

    try:
        with torch.device("meta"):
            module = make(section, input_shape, classes)
    except ConfigError:
        raise
    except Exception as broken:  # whatever a user's builder makes of tensors without values
        if "overflow" in str(broken).lower():  # a size that 64 bits cannot hold
            raise ConfigError(
                f"model {section.get('name')}: it is larger than any memory ({broken})."
            ) from broken
        return None
    return bytes_of(module)


def bytes_of(module: nn.Module) -> int:
    """Returns the bytes of the module's parameters and buffers, the frozen ones too."""
    held = (*module.parameters(), *module.buffers())
    return sum(t.numel() * t.element_size() for t in held)


def make(section: JsonMapping, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Builds the model as `build` does, but initialised from torch's current generator, never from
    a file.
    """
    from torch import nn
    from torch.nn.parameter import is_lazy

    from fednet.models.calls import add_call_hooks

    own = {
        k: v for k, v in section.items() if k not in ENGINE_KEYS and k not in ("name", "weights")
    }
    if "name" not in section:
        raise ConfigError(f"model.name is missing; known: {', '.join(registry.model.names())}.")
    name = section["name"]
    factory = registry.model.get(name)
    shape = tuple(int(n) for n in input_shape)
    if not shape or min(shape) < 1 or classes < 1:
        raise ConfigError(
            f"model {name}: cannot be built for inputs of shape {shape} and {classes} classes."
        )
    options = declared_options(factory, "model")
    if options is not None:
        made = fit(wrap(own, f"model {name!r}"), options, "model")
        own = {field: getattr(made, field) for field in made.__struct_fields__}
    given = {"input_shape": shape, "classes": int(classes)}
    module = factory(**{k: v for k, v in given.items() if takes(factory, k)}, **own)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model {name}: its builder returned a {type(module).__name__}, not a torch.nn.Module."
        )
    for tensor, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise ConfigError(
                f"model {name}: {tensor} is of a lazy layer, whose shape is known after its "
                f"first batch only; give the layer its sizes, from input_shape and classes."
            )
    return add_call_hooks(module)


def head_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the tensors of `module.head` if that is a Linear, else of the last
    Linear; () if there is none. A tied tensor has its first name, as in the layout.
    """
    from torch import nn

    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    head = getattr(module, "head", None)
    chosen = [part for part in linear if part is head] or linear[-1:]
    return tensor_names(module, chosen)


def tensor_names(module: nn.Module, parts: typing.Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns the names of the parameters of these parts of the module. A tied one has its first
    name, as in the layout.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return tuple(dict.fromkeys(names[id(p)] for part in parts for p in part.parameters()))


def head_width(module: nn.Module) -> int:
    """Returns the width of the last Linear's input; 0 if there is none."""
    state = module.state_dict(keep_vars=True)
    return next((state[n].shape[1] for n in head_names(module) if state[n].dim() == 2), 0)


def load(module: nn.Module, path: str | Path) -> nn.Module:
    """Fills a module from a .safetensors file, in place.

    The file holds the model's tensors by name, or all except the head's, which then keep their
    initialisation (a backbone trained on other classes). One name of a tied tensor is enough. Half
    precision is converted. Raises ConfigError for anything else.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from fednet.tensors.layout import first_names

    file = places.expand_home(path, "model.weights")
    source = f"model.weights: {str(path)!r}"
    if not file.is_file():
        raise ConfigError(f"model.weights: there is no file {str(path)!r}.")
    try:
        given = load_file(file)
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{source} cannot be read as .safetensors, the only format ({e}).") from e
    state = module.state_dict(keep_vars=True)
    firsts = first_names(module)
    for name, value in given.items():
        if name not in state:
            raise ConfigError(f"{source} holds {unknown('tensor', name, list(state)[:12])}")
        wanted = state[name]
        kind, wanted_kind = (t.is_floating_point() for t in (value, wanted))
        if value.shape != wanted.shape or kind != wanted_kind:
            raise ConfigError(
                f"{source} holds {name!r} as {value.dtype} of shape {tuple(value.shape)}, the "
                f"model's is {wanted.dtype} of shape {tuple(wanted.shape)}; a file may leave out "
                f"the head, but not change it."
            )
        if not bool(torch.isfinite(value.float() if kind else value).all()):
            raise ConfigError(f"{source} holds {name!r} with values that are not finite.")
        first = firsts[name]
        if first in given and not torch.equal(given[first], value):
            raise ConfigError(
                f"{source} holds other values for {first!r} than for {name!r}, which are one "
                f"tensor of the model (tied)."
            )
    absent = set(firsts.values()) - {firsts[name] for name in given}
    head = set(head_names(module))
    if absent and absent != head:
        few = ", ".join(sorted(absent)[:4])
        raise ConfigError(
            f"{source} lacks {len(absent)} of the model's tensors ({few}); only the head "
            f"({', '.join(sorted(head))}) may be left out."
        )
    with torch.no_grad():
        for name, value in given.items():
            state[name].copy_(value)
    return module


def image(name: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Returns (c, h, w). Raises ConfigError unless inputs are images of at least smallest x
    smallest.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model {name} needs images (channels, height, width), got inputs of shape "
            f"{input_shape}; "
            "for other shapes there is mlp."
        )
    c, h, w = input_shape
    if min(h, w) < smallest:
        raise ConfigError(
            f"model {name} needs images of at least {smallest}x{smallest}, got {c}x{h}x{w}."
        )
    return c, h, w
