"""Models split in two: a part that crosses and a part that stays at each client (LG-FedAvg, FedPer,
FedRep).
"""

from __future__ import annotations

from torch import nn

from fednet.algorithms.base import ClientHost, Tensors


def last_linears(module: nn.Module, k: int) -> set[str]:
    """Names of the tensors of the last k Linear layers, in the module's own order; of all where it
    has fewer.
    """
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return {
        f"{name}.{leaf}" if name else leaf
        for name in linear[len(linear) - min(k, len(linear)) :]
        for leaf in ("weight", "bias")
        if getattr(module.get_submodule(name), leaf, None) is not None
    }


def joined(part: Tensors, own: Tensors | None, host: ClientHost) -> Tensors:
    """The client's whole model: what came down over its own part, which is the common initial one
    at first.
    """
    return host.initial.to(part.device).merge(own).merge(part)


def parted(whole: Tensors, host: ClientHost) -> tuple[Tensors, Tensors]:
    """(what goes up, what stays)."""
    return whole.select(host.shared), whole.select(host.layout.without(host.shared.names))
