"""The base model, which training starts from, as the server sends it (`model.base: server`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from fednet.errors import RemoteProtocolError
from fednet.wire.payload import Payload, kind

BASE = "base"  # its kind in the books


class Base(Payload):
    """A .safetensors file of the whole model, byte for byte."""

    base: kind(BASE, "array", dtype="uint8", rank=1)  # type: ignore[valid-type]


def packed(module: nn.Module) -> Base:
    """The module's state dict."""
    named = {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
    data = np.frombuffer(bytearray(save(named)), dtype=np.uint8)
    return Base(base=torch.from_numpy(data))  # type: ignore[call-arg]


def unpacked(data: bytes) -> Mapping[str, torch.Tensor]:
    """The tensors by name. Raises RemoteProtocolError if this is no .safetensors file."""
    try:
        return load(data)
    except SafetensorError as broken:
        raise RemoteProtocolError(f"the base model of the server: {broken}") from broken
