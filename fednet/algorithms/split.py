"""Models split in two: a part that crosses and a part that stays at each client (LG-FedAvg, FedPer,
FedRep).
"""

from __future__ import annotations

from torch import nn

from fednet.algorithms.base import ClientHost, ServerHost, Tensors
from fednet.models import tensor_names


def last_linears(module: nn.Module, k: int) -> set[str]:
    """Names of the tensors of the last k Linear layers, in the module's own order; of all where it
    has fewer. A weight that is tied to an embedding is one of them, under its first name.
    """
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return set(tensor_names(module, linear[len(linear) - min(k, len(linear)) :]))


def joined(part: Tensors, own: Tensors | None, host: ClientHost) -> Tensors:
    """The client's whole model: what came down over its own part, which is the common initial one
    at first.
    """
    return host.initial.to(part.device).merge(own).merge(part)


def parted(whole: Tensors, host: ClientHost) -> tuple[Tensors, Tensors]:
    """(what goes up, what stays)."""
    return whole.select(host.shared), whole.select(host.layout.without(host.shared.names))


def say_if_whole(host: ServerHost) -> None:
    """Warns, in the first round, where the split is none: nothing crosses, or all of it does."""
    kept, sent = len(host.layout.slots) - len(host.shared.slots), len(host.shared.slots)
    if host.round == 1 and not sent:
        host.warn("no part of the model is shared: every client trains alone (as `local` does).")
    elif host.round == 1 and not kept:
        host.warn("the whole model is shared and no part stays at the clients: this is FedAvg.")
