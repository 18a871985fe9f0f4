"""What a cell's measures (see `papers.Cell`) are on a run, in the papers' units."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fednet.plain import JsonDict
from fednet.report import metrics

if TYPE_CHECKING:
    from fednet.report.read import Run

FLAT_POINTS = 0.1
STEADY_SHARE = 0.05  # of the loss of the first round
COMPARED = ("points_gained", "rounds_to_target", "speedup")  # with another run of the same seed


def measured(
    name: str, run: Run, versus: Run | None = None, target_round: int | None = None
) -> float | None:
    """A measure of a cell (see `papers.Cell`) on a run, in the papers' units; None where the run
    does not have it.

    flat_after_round: the first round from which on no later accuracy is more than 0.1 points above
    the best so far. steady_after_round: the last round whose training loss lies above the one
    before by more than 5 % of the first round's. mean_accuracy: over all evaluated rounds. emd:
    mean over clients of the L1 distance of their class shares, with what is shared, to those of all
    clients together. points_gained: of the personal accuracy where the run has one, else of the
    best accuracy.
    """
    a = metrics.curve(run)
    if name in ("pfl_accuracy", "drift_accuracy", "solo_accuracy"):
        own = metrics.personal(run) or {}
        return percent(own.get("pfl" if name == "pfl_accuracy" else "drift"))
    if name == "client_accuracy":
        return percent(metrics.pooled(metrics.latest(run, "global").values(), "global"))
    if name == "seconds_per_round":
        return metrics.summary(run).seconds_per_round
    if name == "points_gained":
        ours, theirs = _standing(run), None if versus is None else _standing(versus)
        return None if ours is None or theirs is None else ours - theirs
    if name in ("final_train_loss", "steady_after_round"):
        return of_loss(name, metrics.curve(run, "train_loss"))
    if name == "emd":
        return emd(run)
    if not a:
        return None
    if match := re.fullmatch(r"accuracy_(at|in)_(\d+)", name):
        T = int(match[2])
        if match[1] == "in":
            return percent(dict(a).get(T))
        return percent(max((v for t, v in a if t <= T), default=None))
    if match := re.fullmatch(r"(rounds|mb)_to_(\d+)", name):
        return metrics.to_target(run, int(match[2]) / 100, match[1])
    if name in ("rounds_to_target", "speedup"):
        if versus is None:
            return None
        reached: JsonDict = metrics.speedup(run, versus, target_round)
        return reached["round" if name == "rounds_to_target" else "speedup"]
    if name in ("max_drop", "avg_drop", "avg_increase"):
        return percent(metrics.differences(a)[name])
    top = metrics.best(a)
    assert top is not None
    plain: JsonDict = {
        "final_accuracy": lambda: percent(metrics.final(a)),
        "best_accuracy": lambda: percent(top[0]),
        "mean_accuracy": lambda: percent(math.fsum(v for _, v in a) / len(a)),
        "best_round": lambda: top[1],
        "class_spread": lambda: percent((metrics.class_stability(run) or {}).get("class_spread")),
        "flat_after_round": lambda: next(
            t for t, v in a if 100 * (top[0] - max(w for s, w in a if s <= t)) <= FLAT_POINTS
        ),
    }
    value: float | None = plain[name]()
    return value


def of_loss(name: str, losses: Sequence[tuple[int, float]]) -> float | None:
    """A measure of the training loss over the rounds; None where there is no loss."""
    if not losses:
        return None
    if name == "final_train_loss":
        return losses[-1][1]
    rise = STEADY_SHARE * losses[0][1]
    late = (t for (_, v), (t, w) in itertools.pairwise(losses) if w - v > rise)
    return max(late, default=losses[0][0])


def emd(run: Run) -> float | None:
    """See `measured`. What is shared has the class shares of all data, as it is drawn by them."""
    counts = np.asarray(run.partition.get("samples_by_class") or [], dtype=np.float64)
    if counts.ndim != 2 or not counts.sum():
        return None
    whole = counts.sum(0) / counts.sum()
    alpha = float(run.config["algorithm"].get("alpha", 0.0))
    held = counts + alpha * float(run.partition.get("public") or 0) * whole
    shares = held / held.sum(1, keepdims=True)
    return float(np.abs(shares - whole).sum(1).mean())


def _standing(run: Run) -> float | None:
    if own := metrics.personal(run):
        return percent(own["pfl"])
    top = metrics.best(metrics.curve(run))
    return percent(top[0]) if top else None


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
