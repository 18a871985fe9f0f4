"""The model that training starts from, where the server sends it (`model.base: server`): it comes
with a client's first task, and is kept beside the clients' states under its digest, for all of them
and for a process that is started anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from fednet.descriptors import named
from fednet.errors import BaseAbsent, RemoteProtocolError
from fednet.files import write_aside
from fednet.wire import messages as m
from fednet.wire.payload import Payload, kind

if TYPE_CHECKING:
    from fednet.experiment.build import Experiment

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
    """Named tensors. Raises RemoteProtocolError for what is no such file."""
    try:
        return load(data)
    except SafetensorError as broken:
        raise RemoteProtocolError(f"the model that training starts from: {broken}") from broken


# -- at a client -----------------------------------------------------------------------------------
def apart(
    experiment: Experiment, task: m.Task, body: memoryview
) -> tuple[m.Task, memoryview, memoryview | None]:
    """(the task and its payload without that model, the model's bytes; None where it did not
    come).
    """
    if not experiment.base_comes or not task.enrol or task.form[0].kind != BASE:
        return task, body, None
    n = task.form[0].size
    rest = msgspec.structs.replace(
        task, form=list(task.form[1:]), enrol=task.enrol - 1, size=task.size - n
    )
    return rest, body[n:], body[:n]


def grounded(experiment: Experiment, root: Path, sent: memoryview | None) -> Experiment:
    """The experiment with the model that training starts from: as it was sent, or as it lies in
    `root`. Raises BaseAbsent where it is not there, ConfigError where it is another.
    """
    path = root / f"base-{experiment.config.model.sha256}.safetensors"
    here = path.exists()
    if sent is None and not here:
        raise BaseAbsent(
            f"the model that training starts from is not in {root}, as the server sent it; it is "
            f"asked for again."
        )
    data = named(path).read_bytes() if here else bytes(sent or b"")
    found = experiment.starting_from(unpacked(data))
    if not here:
        write_aside(path, data)
    return found
