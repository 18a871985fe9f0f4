"""Splits a model into a shared part and a part that stays at each client (LG-FedAvg, FedPer,
FedRep, FedBN).
"""

from __future__ import annotations

from torch import nn

from fednet.algorithms.base import ClientHost, Tensors
from fednet.models import tensor_names


def last_linears(module: nn.Module, k: int) -> set[str]:
    """Returns the names of the tensors of the last k Linear layers, in the module's order; of all
    if it has fewer. A weight that is tied to an embedding is included, under its first name.
    """
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return set(tensor_names(module, linear[len(linear) - min(k, len(linear)) :]))


def whole_model(part: Tensors, own: Tensors | None, host: ClientHost) -> Tensors:
    """Returns the client's whole model: its own part (at first the common initial one), and the
    shared part that it got.
    """
    return host.initial.to(part.device).merge(own).merge(part)


def split_model(whole: Tensors, host: ClientHost) -> tuple[Tensors, Tensors]:
    """Returns (the shared part, the client's own part)."""
    return whole.select(host.shared), whole.select(host.layout.without(host.shared.names))
