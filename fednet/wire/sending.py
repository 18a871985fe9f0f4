"""Sending one vector by its chain: with what is remembered of earlier messages, and what the other
receivers of a broadcast were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fednet.tensors import Tensors
from fednet.wire.compress import Chain
from fednet.wire.compressors.base import Memory


@dataclass(frozen=True)
class Past:
    """What one end remembers of its earlier messages with one peer, and the round, from 1. known:
    as it was; next: where what follows from this message is written; where: before each field's
    name.
    """

    known: Mapping[str, torch.Tensor]
    next: dict[str, torch.Tensor]
    where: str = ""
    round: int = 0

    def of(self, field: str) -> Memory:
        """What is remembered for one field."""
        return Memory(self.known, self.next, self.where + field)


ANEW = Past({}, {})


# By field: (its value, the bytes sent, what the receiver has then, what arrived there).
Cache = dict[str, tuple[Tensors, bytes, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sender:
    """What `codec.Codec.encode` is given, and how it sends a vector with it."""

    rng: Callable[[str], np.random.Generator] | None
    residuals: dict[str, torch.Tensor] | None
    cache: Cache | None
    slot: str
    past: Past

    def send(
        self,
        chain: Chain,
        name: str,
        value: Tensors,
        vector: torch.Tensor,
        base: torch.Tensor | None,
    ) -> tuple[bytes, torch.Tensor]:
        """(its bytes, what the receiver has in its place)."""
        feedback, memory, mark = chain.feedback if chain.shared else None, None, name
        if feedback is not None:
            memory = self.past.of(name)
            mark = f"{name}/{feedback.said(memory).hex()}"
        # The cache holds the value: an identity alone could be a later one's.
        known = self.cache.get(mark) if self.cache is not None else None
        if known is not None and known[0] is value:
            if feedback is not None and memory is not None:
                feedback.again(known[3], memory)
            return known[1], known[2]
        # A broadcast feeds one error back, that of the value all share; what is some client's own
        # has none.
        if memory is None and self.residuals is not None and known is None:
            memory = Memory(self.residuals, self.residuals, (self.slot or self.past.where) + name)
        draws = self.rng(name) if self.rng else np.random.default_rng(0)
        wanted = vector if base is None else vector - base
        data, arrived = chain.send(wanted, draws, memory, self.past.round)
        decoded = arrived if base is None else base + arrived
        if self.cache is not None:
            self.cache.setdefault(mark, (value, data, decoded, arrived))
        return data, decoded
