"""The payloads of an evaluation's messages. A client answers with integer counts, so that sums over
clients are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_type_hints

import numpy as np
import torch

from fednet.algorithms.base import Algorithm, Nothing, Payload, Weights, kind
from fednet.errors import RemoteProtocolError
from fednet.plain import JsonDict
from fednet.records import EVALUATED_MODELS
from fednet.training import metrics

# Of `EVALUATED_MODELS`, those that are tested on as many samples of each class.
BALANCED = ("balanced", "finetuned_balanced")
SPLIT = ("training", "evaluating", "encoding")  # the parts of a task whose seconds a reply has


class GlobalModel(Payload):
    """Asks a client to evaluate the global model, or the newest shared part of it."""

    x: Weights


def evaluation_payload(method: type[Algorithm], latest: bool) -> type[Payload]:
    """Returns the payload type that asks a client to evaluate. It has the model, if the method
    shares one, and its `shared_state`, if clients are evaluated with the latest of that
    (`evaluate.shared`).
    """
    base = GlobalModel if method.has_global or method.shares() else Nothing
    if not latest or not method.shared_state:
        return base
    hints = get_type_hints(method.exchanges[method.main].down, include_extras=True)
    kinds = {name: hints[name] for name in method.shared_state}
    return type("Evaluation", (base,), {"__annotations__": kinds, "__module__": method.__module__})


if TYPE_CHECKING:
    Sums = torch.Tensor
    Sparse = torch.Tensor
else:
    Sums = kind("accuracy")
    Sparse = kind("accuracy", dtype="int64", rank=2)


class EvaluationReply(Payload):
    """Holds what a client counted. counts: (5, 2, C) int64, correct and total by class, in the
    order of `EVALUATED_MODELS` (zeros for a model that it does not have). losses: (5,) float64,
    sums of the loss.
    """

    counts: Sums
    losses: Sums

    def check(
        self, width: int, own: int, balanced: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raises RemoteProtocolError if these cannot be counts of this client: for example, a model
        was tested on more than its test set has. width: C of what the task counts; own, balanced:
        labels or values in the client's own and in the class-balanced test set; shapes:
        `Setting.more`.
        """
        counts = self.counts
        losses = self.losses
        if (
            counts.dtype != torch.int64
            or losses.dtype != torch.float64
            or tuple(counts.shape) != (len(EVALUATED_MODELS), 2, width)
            or tuple(losses.shape) != (len(EVALUATED_MODELS),)
            or bool((counts[:, 0] < 0).any())
            or bool((counts[:, 0] > counts[:, 1]).any())
        ):
            raise RemoteProtocolError(
                f"the counts of an evaluation, of shape {tuple(counts.shape)}, do not have the "
                f"declared form, or more are correct than were tested"
            )
        for name, row in zip(EVALUATED_MODELS, counts[:, 1].tolist()):
            tested = sum(row)
            there = balanced if name in BALANCED else own
            if tested > there:  # as Python's numbers: a sum of int64 may wrap
                raise RemoteProtocolError(
                    f"its {name} model was tested on {tested} labels or values, it says; there are "
                    f"{there} to test it on"
                )


class DetailedEvaluationReply(EvaluationReply):
    """Holds also the counts that `evaluate.metrics` need. more: (2, m), those that are not 0: place
    and count. A model's counts are one vector (`metrics.flat`). The vectors of all models follow
    one another.
    """

    more: Sparse

    def check(
        self, width: int, own: int, balanced: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().check(width, own, balanced, shapes)
        size = metrics.size(shapes)
        rows = len(self.more)
        places = self.more[0] if rows else self.more
        if (
            rows != 2
            or bool((places[1:] <= places[:-1]).any())
            or bool((places < 0).any() or (places >= len(EVALUATED_MODELS) * size).any())
            or bool((self.more[1] < 1).any())
        ):
            raise RemoteProtocolError("the counts of an evaluation have no place, or are below 1")
        for row, name in enumerate(EVALUATED_MODELS):
            there = balanced if name in BALANCED else own
            counts = self.of(row, shapes)
            # No count may be larger than what there is to test on, nor the sum of a confusion
            # matrix or of a class's scores. The counts themselves first: their sum may wrap.
            largest = {n: there << 32 if n.startswith("sum_") else there for n in counts}
            if any(bool((np.asarray(v) > largest[n]).any()) for n, v in counts.items()) or (
                ("confusion" in counts and counts["confusion"].sum() > there)
                or ("scores" in counts and bool((counts["scores"].sum((0, 2)) > there).any()))
            ):
                raise RemoteProtocolError(
                    f"the counts of its {name} model are of more than the {there} labels or values "
                    f"that there are to test it on"
                )

    def of(self, row: int, shapes: Mapping[str, tuple[int, ...]]) -> JsonDict:
        """Returns the counts by name of the model in that row of `EVALUATED_MODELS`."""
        size = metrics.size(shapes)
        places, counts = self.more.numpy()
        vector = np.zeros(size, dtype=np.int64)
        mine = (places >= row * size) & (places < (row + 1) * size)
        vector[places[mine] - row * size] = counts[mine]
        return metrics.counts_by_name(vector, shapes)
