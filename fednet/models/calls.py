"""Calls of models that take their inputs by name, or return more than one tensor, such as those of
the package `transformers`.

A run calls a model with one argument, a tensor or a dict of tensors, and computes with one tensor.
Two hooks on a user's own model do the rest; a call with other arguments is left as PyTorch has it.
A third one makes what a model of half precision returns float32, in which losses are computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

OWN = ("torch.", "fednet.")  # models written there take one argument and return one tensor


HALVES = (torch.bfloat16, torch.float16)


class Named(dict[str, Any]):
    """Arguments of a call that were one dict."""


def add_call_hooks(module: nn.Module) -> nn.Module:
    """Returns the module, where `module(x)` passes the inputs of a dict x by name, if its forward
    names them all, and returns the tensor of `outputs`; of half precision, as float32.
    """
    if not type(module).__module__.startswith(OWN):
        module.register_forward_pre_hook(_by_name, with_kwargs=True)
        module.register_forward_hook(_outputs_only, with_kwargs=True)
    if any(p.dtype in HALVES for p in module.parameters()):
        module.register_forward_hook(_in_float32)
    return module


def outputs(returned: object) -> object:
    """Returns `logits` of a dict, or else the first tensor of a tuple or dict that has an axis, and
    a single tensor itself. A loss that the model computed, as `loss` of a dict, becomes an
    attribute of the tensor. Anything else is returned as it is.
    """
    if isinstance(returned, Mapping):
        parts = [returned.get("logits"), *returned.values()]
    elif isinstance(returned, (tuple, list)):
        parts = list(returned)
    else:
        return returned
    for part in parts:
        if isinstance(part, torch.Tensor) and part.ndim:
            if isinstance(returned, Mapping) and returned.get("loss") is not None:
                part.loss = returned["loss"]  # type: ignore[attr-defined]
            return part
    return returned


def names_without_parameter(module: nn.Module, names: Mapping[str, object]) -> list[str]:
    """Returns those of the names that forward has no parameter for. A forward that declares only
    *args and **kwargs, as a wrapper's, takes all names.
    """
    parameters = _parameters(type(module).forward)
    return [] if parameters is None else [name for name in names if name not in parameters]


def required_arguments(module: nn.Module) -> list[str]:
    """Returns the names of the arguments without which forward cannot be called."""
    return [
        name
        for name, default in (_parameters(type(module).forward) or {}).items()
        if default is inspect.Parameter.empty
    ]


@functools.cache
def _parameters(forward: Callable[..., object]) -> dict[str, object] | None:
    """The defaults of the parameters after self that can be given by name; None if there are only
    *args and **kwargs.
    """
    _, *given = inspect.signature(forward).parameters.values()
    kinds = {p.kind for p in given}
    if kinds and kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return None
    return {p.name: p.default for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (
        kwargs
        or len(args) != 1
        or not isinstance(args[0], dict)
        or names_without_parameter(module, args[0])
    ):
        return None
    return (), Named(args[0])


def _outputs_only(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
) -> object:
    if isinstance(kwargs, Named) or (len(args) == 1 and not kwargs):
        return outputs(returned)
    return returned


def _in_float32(module: nn.Module, args: tuple[Any, ...], returned: object) -> object:
    if not isinstance(returned, torch.Tensor) or returned.dtype not in HALVES:
        return returned
    found = returned.float()
    if hasattr(returned, "loss"):
        found.loss = returned.loss  # type: ignore[attr-defined]
    return found
