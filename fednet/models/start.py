"""The model that a run starts from, and further models of its kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from fednet import models
from fednet.errors import ConfigError, RemoteProtocolError
from fednet.models.trained import layout_of
from fednet.tensors import Layout, combine
from fednet.wire.payload import Payload, kind

if TYPE_CHECKING:
    from fednet.config import Config


@dataclass(frozen=True, eq=False)
class Start:
    """The initial model of a run."""

    module: nn.Module
    layout: Layout
    """Of its trained part."""
    factory: Callable[[int], nn.Module]
    """factory(seed): builds another module, initialised from that seed, with the same frozen
    tensors.
    """
    sha256: str
    """Of the module; "" if it is not needed."""
    hollow: bool
    """Whether the server has not sent the values yet."""


def start(
    config: Config,
    input_shape: tuple[int, ...],
    outputs: int,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Start:
    """Builds the model that training starts from. given: its values, if they come from elsewhere.
    Raises ConfigError.
    """
    unread = models.section(models.without_files(config.model))
    section = models.section(config.model) if given is None else unread
    module = models.build(section, input_shape, outputs, config.seed)
    if given is not None:
        try:
            module.load_state_dict(dict(given), strict=True)
        except RuntimeError as other:
            raise ConfigError(
                f"model.base: what the server sent is no model of this configuration: {other}"
            ) from None
    wanted = config.model.sha256
    found = sha256(module) if wanted is not None or pinned_by_sites(config) else ""
    hollow = wanted is not None and found != wanted
    if hollow and (given is not None or config.model.base == "sites"):
        which = f"SHA-256 {found[:12]}, the server's {(wanted or '')[:12]}"
        weights = config.model.weights
        if given is not None:
            why = f"model.base: the model that the server sent has {which}."
        elif weights is not None:
            why = (
                f"model.weights: the model of {weights!r} has {which}, and frozen tensors are "
                f"never sent; put the server's file there, or set model.base: server."
            )
        else:
            why = (
                f"model: as the seed initialises it here it has {which}, as another version of "
                f"torch does, and frozen tensors are never sent; install the server's, or set "
                f"model.base: server."
            )
        raise ConfigError(why)
    layout = layout_of(config, module)
    frozen = {n: t.detach().clone() for n, t in _tensors(module) if n not in layout.places}

    def factory(seed: int) -> nn.Module:
        made = models.build(unread, input_shape, outputs, seed)
        own = dict(_tensors(made))
        with torch.no_grad():
            for name, value in frozen.items():
                own[name].copy_(value)
        return made

    return Start(module, layout, factory, wanted or found, hollow)


def pinned_by_sites(config: Config) -> bool:
    """Whether sites need the digest of the initial model: part of it is never sent, or all of it
    comes from the server.
    """
    part = config.train.only or config.model.adapters is not None
    return bool(part) or config.model.base == "server"


def with_model_digest(config: Config, sha256: str | None) -> Config:
    """Returns the configuration as the server sends it to clients: with this digest of the initial
    model, if they need it; None: without.
    """
    if not pinned_by_sites(config):
        return config
    return config.replace(model=msgspec.structs.replace(config.model, sha256=sha256))


def without_server_files(config: Config) -> Config:
    """Returns the configuration as a client uses it: without files that only the server has."""
    if config.model.base == "sites":
        return config
    return config.replace(model=models.without_files(config.model))


def sha256(module: nn.Module) -> str:
    """Returns the SHA-256 of a state dict. Sites compare it if a part of the model is never
    sent.
    """
    digests = []
    for name, t in module.state_dict().items():
        content = name.encode()
        if t.numel():
            values = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
            content = f"{name} {t.dtype} {tuple(t.shape)}".encode() + values.numpy().tobytes()
        digests.append(hashlib.sha256(content).hexdigest())
    return combine(digests)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


# -- the model that the server sends (`model.base: server`) ----------------------------------------
BASE = "base"  # its kind in the ledger


class BaseModelFile(Payload):
    """A .safetensors file of the whole model, byte for byte."""

    base: kind(BASE, "array", dtype="uint8", rank=1)  # type: ignore[valid-type]


def pack_state_dict(module: nn.Module) -> BaseModelFile:
    """Returns the module's state dict as a payload."""
    named = {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
    data = np.frombuffer(bytearray(save(named)), dtype=np.uint8)
    return BaseModelFile(base=torch.from_numpy(data))  # type: ignore[call-arg]


def unpack_state_dict(data: bytes) -> Mapping[str, torch.Tensor]:
    """Returns the tensors by name. Raises RemoteProtocolError if it is no .safetensors file."""
    try:
        return load(data)
    except SafetensorError as broken:
        raise RemoteProtocolError(f"the base model of the server: {broken}") from broken
