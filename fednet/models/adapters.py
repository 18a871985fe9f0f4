"""Adapters of low rank: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022
(arXiv:2106.09685), Section 4.1.

W    weight of a layer, frozen: (out, in), or (out, in, kh, kw) of a convolution
A    (r, in), or (r, in, kh, kw): as torch initialises such a layer
B    (out, r): zero at the start, so that the adapted model begins as the model

    h = W x + (alpha / r) B A x

A and B are float32 whatever W is: beside one of bf16 or fp16 they take x as float32, and what they
give is rounded to the type of W x.

A layer keeps its name and the names of its tensors, and gets `lora_A` and `lora_B`. Layers whose
weights are read without calling them (inside torch's MultiheadAttention and Transformer layers) and
grouped convolutions get none.

A run also writes its adapters alone, in the form of the package `peft` (`adapter_config.json` and
`adapter_model.safetensors`). The package is not needed to read or write them.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fednet import capacity, places, seeds
from fednet.config.schema import AdaptersSection
from fednet.errors import ConfigError, nearest
from fednet.plain import JsonDict

LEAVES = ("lora_A", "lora_B")
# Their forward passes read the weights of the layers below them.
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
PREFIX = "base_model.model."
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Lora(nn.Module):
    """Base of adapted layers. scale: alpha / r."""

    weight: Any  # the layer's own: torch types it as Linear and Conv2d each do
    scale: float
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def delta(self) -> torch.Tensor:
        """(alpha / r) B A in the weight's shape, (float64)."""
        product = self.lora_B.double() @ self.lora_A.double().flatten(1)
        return (self.scale * product).view(self.weight.shape)

    def in_factor_type(self, x: torch.Tensor) -> torch.Tensor:
        """x as A takes it."""
        return x if self.weight.dtype == self.lora_A.dtype else x.to(self.lora_A.dtype)

    def sum(self, whole: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """W x + (alpha / r) B A x, of the type of W x."""
        return whole + (self.scale * low).to(whole.dtype)


class LoraLinear(Lora, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.linear(self.in_factor_type(x), self.lora_A), self.lora_B)
        return self.sum(super().forward(x), low)


class LoraConv2d(Lora, nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self._conv_forward(self.in_factor_type(x), self.lora_A, None)
        return self.sum(super().forward(x), F.conv2d(low, self.lora_B[:, :, None, None]))


ADAPTED: dict[type[nn.Module], type[Lora]] = {nn.Linear: LoraLinear, nn.Conv2d: LoraConv2d}


def adapt(module: nn.Module, section: AdaptersSection, seed: int) -> nn.Module:
    """Puts adapters on a module's layers, in place. section: of `model.adapters`; A is drawn from
    (seed, "adapters"). Raises ConfigError for a pattern that names no layer that can carry one.
    """
    can = carriers(module)
    chosen = set[str]()
    for pattern in section.target:
        named = fnmatch.filter(can, pattern)
        if not named:
            near = nearest(pattern, can)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"model.adapters.target: {pattern!r} names no layer of the model that can have an "
                f"adapter: Linear or Conv2d without groups, not inside of attention, with a weight "
                f"of its own. Such are {', '.join(can[:8]) or 'none'}"
                f"{', ...' if len(can) > 8 else ''}.{hint}"
            )
        chosen |= set(named)
    weights = [module.get_submodule(name).get_parameter("weight") for name in chosen]
    nbytes = 4 * sum(w[0].numel() + len(w) for w in weights) * section.rank
    capacity.check_memory(2 * nbytes, f"model.adapters.rank: {section.rank}")
    with seeds.scope(seed, "adapters"):
        for name in (n for n in can if n in chosen):
            # A Linear or Conv2d, which becomes the Lora of that: no type has both.
            part: Any = module.get_submodule(name)
            weight = part.weight
            made = torch.empty(section.rank, *weight.shape[1:])
            nn.init.kaiming_uniform_(made, a=math.sqrt(5))
            # As torch.nn.utils.parametrize does it: an attribute that holds the layer, such as
            # `module.head`, goes on holding it.
            part.__class__ = ADAPTED[type(part)]
            part.scale = section.alpha / section.rank
            part.lora_A = nn.Parameter(made)
            part.lora_B = nn.Parameter(torch.zeros(weight.shape[0], section.rank))
    return module


def carriers(module: nn.Module) -> list[str]:
    """Returns the names of the layers that can have adapters: their weights are read by themselves
    alone, and are no function of other tensors (as by torch.nn.utils.spectral_norm).
    """
    found = list[str]()
    within: list[str] = []
    holders = Counter[int]()  # of each parameter; a module with several names counts once
    for part in module.modules():
        holders.update(id(parameter) for parameter in part.parameters(recurse=False))
    for name, part in module.named_modules():
        if isinstance(part, READERS):
            within.append(f"{name}.")
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if type(part) not in ADAPTED or weight is None or holders[id(weight)] > 1:
            continue
        grouped = isinstance(part, nn.Conv2d) and part.groups > 1
        if not grouped and not any(name.startswith(above) for above in within):
            found.append(name)
    return found


# -- merging ---------------------------------------------------------------------------------------
def lora_layers(module: nn.Module) -> Iterator[tuple[str, Lora]]:
    for name, part in module.named_modules():
        if isinstance(part, Lora):
            yield name, part


def merged_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict of the model without adapters, with W + (alpha / r) B A for W. What
    has no adapter is the module's own memory.
    """
    state = {name: t.detach() for name, t in module.state_dict().items()}
    for name, part in module.named_modules(remove_duplicate=False):
        if not isinstance(part, Lora):
            continue
        at = f"{name}." if name else ""
        for leaf in LEAVES:
            del state[at + leaf]
        whole = part.weight.detach().double() + part.delta().detach()
        state[f"{at}weight"] = whole.to(part.weight.dtype)
    return state


# -- peft ------------------------------------------------------------------------------------------
def to_peft(module: nn.Module, beside: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Returns the adapters with peft's names and shapes. beside: names of other trained tensors."""
    state = module.state_dict()
    found = {f"{PREFIX}{name}": state[name].clone() for name in beside}
    for name, part in lora_layers(module):
        b = part.lora_B.detach()
        a = part.lora_A.detach()
        found[f"{PREFIX}{name}.lora_A.weight"] = a.clone()
        found[f"{PREFIX}{name}.lora_B.weight"] = b.reshape(*b.shape, *[1] * (a.dim() - 2)).clone()
    return found


def peft_config(module: nn.Module, rank: int, alpha: float, beside: Iterable[str] = ()) -> JsonDict:
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [name for name, _ in lora_layers(module)],
        "modules_to_save": sorted({name.rpartition(".")[0] for name in beside}) or None,
    }


def read_peft(module: nn.Module, folder: Path | str) -> nn.Module:
    """Fills a module's adapters, in place, from a folder that `peft` or a run has written, and
    other tensors of the module that are there. Raises ConfigError if the folder has no adapters, or
    those of other layers, another rank or another scale.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    source = f"model.adapters.weights: {str(folder)!r}"
    about, tensors = (places.expand_home(folder, "model.adapters.weights") / name for name in FILES)
    try:
        config = json.loads(about.read_text(encoding="utf-8"))
        given = load_file(tensors)
        r = int(config["r"])
        alpha = float(config["lora_alpha"])
        scale = alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as e:
        raise ConfigError(
            f"{source} is no folder with {' and '.join(FILES)} of a LoRA adapter ({e})."
        ) from e
    known = {f"{PREFIX}{name}" for name in module.state_dict()}
    beside = [name.removeprefix(PREFIX) for name in sorted(known & given.keys())]
    wanted = to_peft(module, beside)
    if more := given.keys() - wanted.keys():
        raise ConfigError(
            f"{source}: it holds {min(more)!r}, which model.adapters.target does not name."
        )
    if less := wanted.keys() - given.keys():
        raise ConfigError(f"{source}: it lacks {min(less)!r}.")
    for name, t in wanted.items():
        if given[name].shape != t.shape:
            found = tuple(given[name].shape)
            here = tuple(t.shape)
            raise ConfigError(f"{source}: {name!r} is of shape {found}, here it is {here}.")
        if not bool(torch.isfinite(given[name]).all()):
            raise ConfigError(f"{source}: {name!r} has values that are not finite.")
    with torch.no_grad():
        for name in beside:
            module.state_dict()[name].copy_(given[PREFIX + name])
        for name, part in lora_layers(module):
            if not math.isclose(scale, part.scale):
                raise ConfigError(
                    f"{source} has alpha / rank {scale:g}, model.adapters {part.scale:g}."
                )
            a, b = (given[f"{PREFIX}{name}.{leaf}.weight"] for leaf in LEAVES)
            part.lora_A.copy_(a)
            part.lora_B.copy_(b.reshape(part.lora_B.shape))
    return module
