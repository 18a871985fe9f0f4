"""A cell of a results table: one run, and what the paper prints for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fednet.plain import JsonDict, JsonMapping
from fednet.sweep.grid import Values

DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion-mnist",
    "SVHN": "svhn",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Tiny-ImageNet": "tiny-imagenet",
}
CHOOSERS = ("name", "dataset", "scheme")  # of a mapping: another part's options do not stay


@dataclass(frozen=True, slots=True)
class Cell:
    """One run behind a table.

    config: its whole configuration, in the configuration's keys, for `fednet.config.from_mapping`.
    figures: by measure, what the paper prints (accuracies in percent), None where it prints none;
    the first is the one the table is about. grids: dotted key -> the values that the paper
    searched, or that stand for an unstated one. versus: the cell's method is measured against this
    method of the same column; target_round: by the accuracy that has after so many rounds. kept:
    what the mini scale leaves as it says here.

    Measures: final_accuracy, best_accuracy, best_round, accuracy_at_T (the best up to round T),
    accuracy_in_T (in round T itself), solo_accuracy (mean over clients on the global test set),
    pfl_accuracy, drift_accuracy, class_spread, max_drop, avg_drop, avg_increase, rounds_to_target,
    speedup, seconds_per_round, flat_after_round, steady_after_round, points_gained (over `versus`),
    client_accuracy (the global model on the clients' own test samples), rounds_to_P and mb_to_P (to
    P percent for the first time), mean_accuracy (over all rounds), final_train_loss, emd (class
    shares of the clients).
    """

    paper: str
    table: str
    method: str
    dataset: str
    heterogeneity: str
    config: JsonDict
    figures: dict[str, float | None] = field(default_factory=dict)
    grids: dict[str, Values] = field(default_factory=dict)
    variant: str = ""  # what else tells it from its neighbours: a model, a number of epochs
    versus: str | None = None
    target_round: int | None = None
    kept: JsonDict = field(default_factory=dict)
    by_search: bool = False  # the cell is the winner of its grid: without a search it is nothing

    @property
    def name(self) -> str:
        """Name of the run, of letters that a directory may have; the same in two tables that one
        run stands behind.
        """
        words = (self.paper, self.dataset, self.variant, self.heterogeneity, self.method)
        text = "-".join(w.replace("+", "plus").replace(" ", "-") for w in words if w)
        return re.sub(r"[^A-Za-z0-9._=-]", "", text).lower()

    @property
    def measure(self) -> str | None:
        """What the table is about."""
        return next(iter(self.figures), None)

    @property
    def figure(self) -> float | None:
        """What the paper prints for `measure`."""
        return self.figures[self.measure] if self.measure else None

    def swapped(self, method: str, algorithm: JsonMapping) -> Cell:
        """The same cell for a method that is not in the paper: all but the method's own mapping
        stays.
        """
        empty: dict[str, float | None] = dict.fromkeys(self.figures)
        other = replace(self, method=method, figures=empty, grids={})
        return replace(
            other, config={**self.config, "algorithm": dict(algorithm), "name": other.name}
        )


def lay(below: JsonMapping, over: JsonMapping) -> JsonDict:
    """`over` laid on `below`, key by key. A mapping that names another part replaces the one below,
    but for `data`, whose partition and splits stay.
    """
    out = dict(below)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            other = key != "data" and any(k in value and value[k] != old.get(k) for k in CHOOSERS)
            out[key] = dict(value) if other else lay(old, value)
        else:
            out[key] = value
    return out
