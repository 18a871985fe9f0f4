"""Evaluates models. Results are integer counts, so that sums over clients are exact in any
order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednet import seeds
from fednet.errors import ConfigError
from fednet.loading import place
from fednet.tensors import Inputs, Tensors
from fednet.training import metrics
from fednet.training.samples import length, piece
from fednet.training.scratch import KNOWN, Scratch
from fednet.training.tasks import LearningTask, labels_of


@dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """The result of an evaluation. table: (2, C) int64, correct and total by class; loss: sum over
    n samples, or over n labels where samples have several; more(): the counts that metrics need, by
    name.
    """

    table: np.ndarray
    loss: float = 0.0
    n: int = 0
    more: Callable[[], Mapping[str, Any]] = dict

    @property
    def accuracy(self) -> float:
        """Correct over total, 0..1; 0 without samples."""
        total = int(self.table[1].sum())
        return int(self.table[0].sum()) / total if total else 0.0

    @property
    def mean_loss(self) -> float:
        """The task's mean loss over the samples or labels; 0 without any."""
        return self.loss / self.n if self.n else 0.0

    def metrics(self, names: Iterable[str]) -> dict[str, float]:
        """Returns these metrics, without those that are not defined for the counts."""
        return metrics.values(names, {**self.more(), "loss": self.loss}) if self.n else {}


def drawing(model: object, device: torch.device) -> AbstractContextManager[None]:
    """Seeds torch's generator for a user's own model, which may draw even in eval mode: its
    evaluation is then the same in every process. torch's own modules draw nothing in eval mode.
    model: a module, a scratch with one, or a function.
    """
    if isinstance(model, Scratch):
        known = model.known
    else:
        parts = model.modules() if isinstance(model, nn.Module) else ()
        known = all(type(part).__module__.startswith(KNOWN) for part in parts)
    return contextlib.nullcontext() if known else seeds.scope(0, "evaluation", device=device)


@torch.no_grad()
def logits(model: nn.Module, x: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns the model's outputs (n, C) for n samples, computed in batches."""
    with drawing(model, x.device):
        return torch.cat([model(part) for part in x.split(batch)])


def recalibrate(scratch: Scratch, x: Tensors, inputs: Inputs, batch_size: int) -> Tensors:
    """Returns the whole model x with new statistics of its BatchNorm layers: the mean of the means
    and variances of the batches of `inputs`. All other layers are in eval mode.
    """
    scratch.load(x)
    module = scratch.in_eval_mode()
    norms = [
        (part, part.momentum)
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        and part.track_running_stats
        and not any(part is frozen for frozen in scratch.frozen)
    ]
    for part, _ in norms:
        part.reset_running_stats()
        part.momentum = None  # a mean over all batches
        part.train()
    with torch.no_grad(), drawing(scratch, scratch.device):
        n = length(inputs)
        count = max(1, n // batch_size)  # a small rest joins the last batch
        for i in range(count):
            module(piece(inputs, i * batch_size, n if i == count - 1 else (i + 1) * batch_size))
    for part, momentum in norms:
        part.momentum = momentum
        part.eval()
    return scratch.values()


def evaluate(
    model: nn.Module | Callable[[Inputs], torch.Tensor],
    data: tuple[Inputs, torch.Tensor],
    task: LearningTask,
    batch_size: int = 512,
    more: Sequence[str] = (),
) -> Counts:
    """Evaluates a model on samples (x, y) on its device, in eval mode.

    model: a module, or a function from inputs to outputs (`Algorithm.personal_model`). task: see
    `fednet.training.tasks`. more: names of the counts that metrics need.
    """
    if isinstance(model, nn.Module):
        model.eval()
    with drawing(model, data[1].device):
        return counts_of(model, data, task, batch_size, more)


def counts_of(
    model: Callable[[Inputs], torch.Tensor],
    data: tuple[Inputs, torch.Tensor],
    task: LearningTask,
    batch_size: int = 512,
    more: Sequence[str] = (),
) -> Counts:
    """The same of a function, or of a module that is in eval mode, as it is."""
    x, y = data
    n = length(x)
    counted = 0
    table: torch.Tensor | None = None
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=y.device)
    with torch.inference_mode():
        for start in range(0, n, batch_size):
            end = min(start + batch_size, n)
            outputs = model(piece(x, start, end))
            truth = y[start:end]
            counts = task.counts(outputs, truth)
            if table is not None and counts.shape != table.shape:
                raise other_width(task, table.shape[-1], counts.shape[-1])
            table = counts if table is None else table + counts
            for name in more:
                found = metrics.count(task, name, outputs, truth)
                if name in sums and sums[name].shape != found.shape:
                    raise ConfigError(
                        f"task: count_{name} ({place(getattr(task, f'count_{name}'))}) gave the "
                        f"shape {tuple(sums[name].shape)} for some samples and "
                        f"{tuple(found.shape)} for others; expected the same shape for any samples."
                    )
                sums[name] = sums[name] + found if name in sums else found
            losses = task.losses(outputs, truth)
            labels = labels_of(task, truth)
            if labels is not None:
                losses = losses * labels
            counted += len(truth) if labels is None else int(labels.sum())
            total = total + losses.sum(dtype=torch.float64)
    if table is None:
        return Counts(np.zeros((2, 0), dtype=np.int64))
    arrays = {k: v.cpu().numpy() if v.ndim else v.item() for k, v in sums.items()}
    return Counts(table.cpu().numpy().copy(), float(total), counted, lambda: arrays)


def other_width(task: LearningTask, width: int, found: int) -> ConfigError:
    """Returns the error for counts with different numbers of classes."""
    return ConfigError(
        f"task: counts ({place(task.counts)}) gave {width} classes for some samples and {found} "
        f"for others; expected (2, C) with the same C, as by torch.bincount(y, minlength=C)."
    )
