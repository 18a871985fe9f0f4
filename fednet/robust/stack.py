"""Stacks, which keep all replies of a round in place of their sum.

A method accumulates by `Sum.add` and uses the sum's `mean`. With `aggregation.rule`, or with
malicious clients that know the others' replies, `with_stacks` replaces the sums of its accumulator
by stacks. After the last reply `with_sums` replaces each stack by a sum whose mean is the rule's
result. A stack holds every reply of the round in float32.
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


def needs_stack(config: Config) -> bool:
    """Whether stacks are needed in place of sums."""
    section = config.faults.malicious
    colluding = section.clients > 0 and section.attack not in attacks.BY_ITSELF
    return config.aggregation.rule != "mean" or colluding


def equal_weights(config: Config) -> bool:
    """Whether all replies count the same, whatever the method's weights are: with clipping, or
    with a robust rule.
    """
    return config.privacy.clip is not None or config.aggregation.rule != "mean"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Holds the replies of a round, in the order in which they were added. x: the model that they
    started from; None: the replies are updates, and not models.
    """

    x: Tensors | None = None
    rows: tuple[Tensors, ...] = ()
    weights: tuple[float, ...] = ()

    def add(
        self, x: Tensors, weight: float = 1.0, *, scale: float = 1.0, less: Tensors | None = None
    ) -> Stack:
        """Adds a reply; the arguments are those of `Sum.add`."""
        if less is not None:
            x = x.with_vector(x.vector - less.vector.to(x.vector.device))
        if scale != 1.0:
            x = x.with_vector(x.vector * scale)
        return Stack(self.x, (*self.rows, x), (*self.weights, weight))

    def add_all(self, values: Sequence[tuple[Tensors, float]]) -> Stack:
        """Adds replies, each with its weight."""
        rows = [x for x, _ in values]
        weights = [weight for _, weight in values]
        return Stack(self.x, (*self.rows, *rows), (*self.weights, *weights))

    def aggregate(self, config: Config, malicious: Collection[int]) -> Sum:
        """Returns a sum whose mean is the rule's. malicious: numbers of the malicious rows."""
        first = self.rows[0]
        zero = torch.zeros_like(first.vector) if self.x is None else self.x.vector
        updates = torch.stack([row.vector - zero.to(row.vector.device) for row in self.rows])
        section = config.faults.malicious
        honest = [r for r in range(len(updates)) if r not in malicious]
        if section.attack not in attacks.BY_ITSELF and honest and len(honest) < len(updates):
            sent = attacks.colluding(updates[honest], section.attack, attacks.strength(config))
            for r in malicious:
                updates[r] = sent.float()
        total, kept = self._apply_rule(updates, config)
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

    def _apply_rule(self, updates: torch.Tensor, config: Config) -> tuple[torch.Tensor, list[int]]:
        """Returns the rule's result, and the replies whose buffers count."""
        section = config.aggregation
        m = len(updates)
        f = part_of(section.tolerate, m)
        everyone = list(range(m))
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
                return rules.geometric_median(updates, section.iterations), everyone
            case "krum" | "multi_krum":
                keep = 1 if section.rule == "krum" else m - f
                chosen = rules.krum(updates, f, keep)
                return rules.mean(updates[sorted(chosen)]), chosen
        raise AssertionError(section.rule)


def with_stacks(accumulator: S, x: Tensors | None, kinds: dict[str, str]) -> S:
    """Returns a method's new accumulator with stacks in place of its sums. kinds: of the reply's
    tensors, by field. The update of weights is their difference to x, the shared model.
    """
    start = x if "state" in kinds.values() else None
    names = [f.name for f in dataclasses.fields(accumulator)]
    sums = [name for name in names if isinstance(getattr(accumulator, name), Sum)]
    return accumulator.replace(**{name: Stack(start) for name in sums})


def with_sums(accumulator: S, config: Config, clients: Sequence[int]) -> S:
    """Returns the accumulator with sums in place of its stacks. clients: of the replies, in their
    order.
    """
    attackers = attacks.malicious(config)
    malicious = [k for k, client in enumerate(clients) if client in attackers]
    values = {f.name: getattr(accumulator, f.name) for f in dataclasses.fields(accumulator)}
    sums = {n: v.aggregate(config, malicious) for n, v in values.items() if isinstance(v, Stack)}
    return accumulator.replace(**sums)
