"""What stands in a fold where a sum would: replies kept side by side, until all are there.

A method folds by `Sum.add` and finishes by the sum's `mean`. With `aggregation.rule`, or with
attackers that know each other's replies, the fields of its fold that are sums begin as stacks; once
all replies are in, `settled` puts in the place of each a sum whose mean is what the rule makes of
them. A stack holds every reply of the round in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from fednet.config import Config
from fednet.plain import part_of
from fednet.robust import attacks, rules
from fednet.tensors import Sum, Tensors

if TYPE_CHECKING:
    from fednet.algorithms.state import S


def needed(config: Config) -> bool:
    """Whether a plain sum will not do."""
    section = config.faults.malicious
    together = section.clients > 0 and section.attack not in attacks.BY_ITSELF
    return config.aggregation.rule != "mean" or together


def alike(config: Config) -> bool:
    """Whether all replies count the same, whatever the method says: clipped, or by a rule that
    bears liars.
    """
    return config.privacy.clip is not None or config.aggregation.rule != "mean"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Replies in the order in which they were added. x: what they started from; None: updates."""

    x: Tensors | None = None
    rows: tuple[Tensors, ...] = ()
    weights: tuple[float, ...] = ()

    def add(
        self, x: Tensors, weight: float = 1.0, *, scale: float = 1.0, less: Tensors | None = None
    ) -> Stack:
        """Takes one reply; the arguments are those of `Sum.add`."""
        if less is not None:
            x = x.with_vector(x.vector - less.vector.to(x.vector.device))
        if scale != 1.0:
            x = x.with_vector(x.vector * scale)
        return Stack(self.x, (*self.rows, x), (*self.weights, weight))

    def settle(self, config: Config, liars: Collection[int]) -> Sum:
        """The sum whose mean is the rule's. liars: numbers of the rows that attackers sent."""
        first = self.rows[0]
        zero = torch.zeros_like(first.vector) if self.x is None else self.x.vector
        updates = torch.stack([row.vector - zero.to(row.vector.device) for row in self.rows])
        section = config.faults.malicious
        honest = [r for r in range(len(updates)) if r not in liars]
        if section.attack not in attacks.BY_ITSELF and honest and len(honest) < len(updates):
            lie = attacks.together(updates[honest], section.attack, attacks.strength(config))
            for r in liars:
                updates[r] = lie.float()
        total, kept = self._ruled(updates, config)
        buffers = torch.stack([row.buffers for row in self.rows])[kept]
        counters = torch.stack([row.counters for row in self.rows])[kept]
        weight = float(sum(self.weights)) or 1.0
        return Sum(
            (total + zero.to(total.device)) * weight,
            rules.median(buffers) * weight,
            counters.max(dim=0).values,
            first.layout,
            weight,
            len(self.rows),
        )

    def _ruled(self, updates: torch.Tensor, config: Config) -> tuple[torch.Tensor, list[int]]:
        """(what the rule makes of the updates, the replies whose buffers count)."""
        section, m = config.aggregation, len(updates)
        f, everyone = part_of(section.tolerate, m), list(range(m))
        match section.rule:
            case "mean":
                return rules.mean(updates, self.weights), everyone
            case "median":
                return rules.median(updates), everyone
            case "trimmed_mean":
                return rules.trimmed_mean(updates, f), everyone
            case "norm_bound":
                return rules.norm_bound(updates, section.bound), everyone
            case "rfa":
                made = rules.geometric_median(updates, section.iterations)
                return made, everyone
            case "krum" | "multi_krum":
                keep = 1 if section.rule == "krum" else m - f
                chosen = rules.krum(updates, f, keep)
                return rules.mean(updates[sorted(chosen)]), chosen
        raise AssertionError(section.rule)


def stacked(fold: S, x: Tensors | None, kinds: dict[str, str]) -> S:
    """A method's fresh fold with stacks for its sums. kinds: of the reply's fields of tensors; a
    reply of weights is measured from x, the shared model.
    """
    start = x if "state" in kinds.values() else None
    return fold.replace(
        **{
            f.name: Stack(start)
            for f in dataclasses.fields(fold)
            if isinstance(getattr(fold, f.name), Sum)
        }
    )


def settled(fold: S, config: Config, completed: Sequence[int]) -> S:
    """The fold with sums for its stacks. completed: the clients folded, in their order."""
    liars = attacks.malicious(config)
    rows = [k for k, client in enumerate(completed) if client in liars]
    return fold.replace(
        **{
            f.name: value.settle(config, rows)
            for f in dataclasses.fields(fold)
            if isinstance(value := getattr(fold, f.name), Stack)
        }
    )
