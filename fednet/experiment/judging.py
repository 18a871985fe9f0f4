"""The messages of an evaluation. A client answers with integer counts, so that sums over clients
are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, get_type_hints

import numpy as np
import torch

from fednet import seeds
from fednet.algorithms.base import Algorithm, Nothing, Payload, Weights, kind
from fednet.config import Config
from fednet.errors import RemoteProtocolError
from fednet.records import JUDGED
from fednet.training.evaluation import Counts

__all__ = [
    "JUDGED",
    "SPLIT",
    "GlobalModel",
    "Judgement",
    "Stopwatch",
    "evaluated_clients",
    "evaluation_due",
    "evaluation_payload",
    "judgements",
    "keeps_local",
]
BALANCED = ("balanced", "finetuned_balanced")  # of `JUDGED`, on a test set of all classes alike
SPLIT = ("training", "evaluating", "encoding")  # what a reply's `split` tells the seconds of


class GlobalModel(Payload):
    """What the server sends for an evaluation: the global model, or the newest shared part of a
    method that shares no more.
    """

    x: Weights


def evaluation_due(config: Config, round: int) -> bool:
    """Whether a round is evaluated."""
    every = config.evaluate.every
    return every > 0 and (round % every == 0 or round == config.rounds)


def evaluation_payload(method: type[Algorithm], latest: bool) -> type[Payload]:
    """What the server sends for an evaluation: the model, where the method shares one, and its
    `shared_state`, where clients are evaluated with the latest of that (`evaluate.shared`).
    """
    base = GlobalModel if method.has_global or method.shares() else Nothing
    if not latest or not method.shared_state:
        return base
    hints = get_type_hints(method.exchanges[method.main].down, include_extras=True)
    kinds = {name: hints[name] for name in method.shared_state}
    return type("Evaluation", (base,), {"__annotations__": kinds, "__module__": method.__module__})


if TYPE_CHECKING:
    Sums = torch.Tensor
else:
    Sums = kind("accuracy")


class Judgement(Payload):
    """What a client answers: (5, 2, C) int64, correct and total by class, in the order of `JUDGED`
    (zeros for a model that it does not have), and (5,) float64 sums of the loss.
    """

    counts: Sums
    losses: Sums

    def check(self, width: int, own: int, balanced: int) -> None:
        """Raises RemoteProtocolError where these cannot be counts of this client: a model was
        tested on more than its test set has, for example. width: C of what the task counts; own,
        balanced: labels or values in the client's own and in the class-balanced test set.
        """
        counts, losses = self.counts, self.losses
        if (
            counts.dtype != torch.int64
            or losses.dtype != torch.float64
            or tuple(counts.shape) != (len(JUDGED), 2, width)
            or tuple(losses.shape) != (len(JUDGED),)
            or bool((counts[:, 0] < 0).any())
            or bool((counts[:, 0] > counts[:, 1]).any())
        ):
            raise RemoteProtocolError(
                f"a judgement of shape {tuple(counts.shape)} in which more are correct than were "
                f"tested, or that is none at all"
            )
        for name, row in zip(JUDGED, counts[:, 1].tolist()):
            tested, there = sum(row), balanced if name in BALANCED else own
            if tested > there:  # as Python's numbers: a sum of int64 may wrap
                raise RemoteProtocolError(
                    f"its {name} model was tested on {tested} labels or values, it says; there are "
                    f"{there} to test it on"
                )


def evaluated_clients(config: Config) -> list[int]:
    """The clients that an evaluation asks: all, or the same sample each time (`evaluate.most`)."""
    most = config.evaluate.most
    if most is None or config.clients <= most:
        return list(range(config.clients))
    draw = seeds.rng(config.seed, "evaluate/clients")
    return sorted(int(i) for i in draw.choice(config.clients, most, replace=False))


def keeps_local(config: Config, personalised: bool) -> bool:
    """Whether clients keep their last local model, to evaluate it."""
    section = config.evaluate
    if not section.every or section.clients == "none":
        return False
    few = section.most is None or config.clients <= section.most
    return personalised or few


def judgements(payload: Judgement) -> dict[str, Counts]:
    """The counts by model; models that were not evaluated are left out."""
    found = {}
    for row, name in enumerate(JUDGED):
        table = payload.counts[row].numpy().astype(np.int64)
        n = int(table[1].sum())
        if n:
            found[name] = Counts(table, float(payload.losses[row]), n)
    return found


class Stopwatch:
    """Measures what a task's seconds are spent on. progress: called at each new stage."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self._progress = progress
        self._began = self._since = time.perf_counter()
        self._doing, self._spent = "loading", dict[str, float]()

    def turn(self, stage: str, done: int, of: int) -> None:
        """Begins another stage of the task, of which `done` of `of` steps are done."""
        now = time.perf_counter()
        self._spent[self._doing] = self._spent.get(self._doing, 0.0) + now - self._since
        self._doing, self._since = stage, now
        self._progress(stage, done, of)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def split(self) -> list[float]:
        return [self._spent.get(name, 0.0) for name in SPLIT]
