"""Metrics that are no quotient of two counts: functions of counts that are summed over samples and
clients.

    @fednet.metric("specificity")
    def specificity(confusion):  # (C, C) int64: row: true class, column: predicted class
        ...

The names of a metric's arguments say which counts it needs: `n`, the number of samples, or of
labels where samples have several; `loss`, the sum of their losses; or what the task counts in a
method `count_NAME(outputs, y)`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from fednet import registry
from fednet.errors import ConfigError, FednetError, unknown
from fednet.loading import place
from fednet.training.tasks import LearningTask, labels_of

F = TypeVar("F", bound=Callable[..., Any])
LOWER = "lower_is_better"
ERROR = "error"
MAX_COUNTS = 2**23  # values of all counts of a model, 64 MiB


def metric(
    name: str, lower_is_better: bool = False, error: Callable[..., float] | None = None
) -> Callable[[F], F]:
    """Returns the decorator of a metric. lower_is_better: for `stop.metric`. error: a function of
    the same counts, by how much the metric may be off.
    """

    def keep(function: F) -> F:
        setattr(function, LOWER, lower_is_better)
        setattr(function, ERROR, error)
        return registry.metric(name)(function)

    return keep


def lower_is_better(name: str) -> bool:
    """Whether a smaller value is better. name: of a metric, or accuracy or test_loss."""
    if name in registry.metric.names():
        return bool(getattr(registry.metric.get(name), LOWER, False))
    return name == "test_loss"


def errors(names: Iterable[str], counts: Mapping[str, object]) -> dict[str, float]:
    """Returns by how much these metrics of summed counts may be off, of those that may be."""
    found = {}
    for name in names:
        error = getattr(registry.metric.get(name), ERROR, None)
        if error is not None:
            found[name] = float(error(**{count: counts[count] for count in _arguments(name)}))
    return found


def counts_needed(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the counts that these metrics need beside the loss, sorted."""
    found = {count for name in names for count in _arguments(name)}
    return tuple(sorted(found - {"loss"}))


def _arguments(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(registry.metric.get(name)).parameters)


def check_offered(names: Iterable[str], task: LearningTask, shown: str) -> None:
    """Raises ConfigError for a metric that needs counts that the task does not have."""
    counts = {n.removeprefix("count_") for n in dir(task) if n.startswith("count_")}
    for name in names:
        for count in _arguments(name):
            if count not in counts | {"loss", "n"}:
                raise ConfigError(
                    f"evaluate.metrics: {name} needs {count!r}, and the task {shown} has no method "
                    f"count_{count}: {unknown('count', count, counts | {'loss', 'n'})}"
                )


def count(task: LearningTask, name: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the counts of that name over a batch, int64."""
    if name == "n":
        labels = labels_of(task, y)
        return torch.tensor(len(y)) if labels is None else labels.sum().cpu()
    return getattr(task, f"count_{name}")(outputs, y)


def values(names: Iterable[str], counts: Mapping[str, object]) -> dict[str, float]:
    """Returns the metrics of summed counts, without those that are not defined for them. Raises
    ConfigError if one fails.
    """
    found = {}
    for name in names:
        function = registry.metric.get(name)
        # A copy: a user's function may change what it gets.
        arguments = {count: copy.copy(counts[count]) for count in _arguments(name)}
        try:
            with np.errstate(all="ignore"):
                value = float(function(**arguments))
        except ArithmeticError:  # it divides by zero
            continue
        except FednetError:
            raise
        except Exception as broken:  # a user's function may raise anything
            raise ConfigError(
                f"metric {name} ({place(function)}) fails: {type(broken).__name__}: {broken}"
            ) from broken
        if math.isfinite(value):
            found[name] = value
    return found


# -- as they are sent ------------------------------------------------------------------------------
def flat(more: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Returns these counts in one vector, in the order of `shapes`."""
    parts = [np.asarray(more[name], dtype=np.int64).reshape(-1) for name in shapes]
    return np.concatenate(parts)


def counts_by_name(vector: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the counts of a vector by name; those without a shape as numbers."""
    found: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape)
        found[name] = vector[at:end].reshape(shape) if shape else vector[at].item()
        at = end
    return found


def size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
