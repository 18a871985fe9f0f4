"""Splits a model into a shared part and a part that stays at each client (LG-FedAvg, FedPer,
FedRep, FedBN).
"""

from __future__ import annotations

from torch import nn

from fednet.algorithms.base import ClientHost, ServerHost, Tensors
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


def warn_if_not_split(host: ServerHost) -> None:
    """Warns, in the first round, if the model is not split: nothing is shared, or all of it."""
    kept, sent = len(host.layout.slots) - len(host.shared.slots), len(host.shared.slots)
    if host.round == 1 and not sent:
        host.warn("no part of the model is shared: every client trains alone (as `local` does).")
    elif host.round == 1 and not kept:
        host.warn("the whole model is shared and no part stays at the clients: this is FedAvg.")
