"""One class a sample, or one a position of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from fednet.data.raw import IGNORED
from fednet.errors import ConfigError
from fednet.registry import task

if TYPE_CHECKING:
    from fednet.tensors import Inputs


BINS = 4096  # of a class's log-odds, see `bins_of`
PER_UNIT = 256  # bins for one unit of asinh(log-odds)


@task("classification")
class Classification:
    """Cross-entropy; correct and total by class.

    outputs: logits (n, C); for y (n, t), a class at each position, (n, t, C) as a Linear head gives
    them or (n, C, t) as torch.nn.CrossEntropyLoss takes them; alike for images. y: int64 classes,
    and -100 where a position has no label: it is not counted, and no part of a mean. Outputs of
    another shape are a ConfigError. class_axis: 1 or -1, where the classes are when C = t leaves
    both readings open; a run asks its model (see `class_axis`).
    """

    class_axis = -1
    class_weights: torch.Tensor | None = None  # (C,) of the loss; None: all the same

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all labels, weighted by class, as torch's; 0 without any label. A
        scalar with a graph.
        """
        outputs = self.classes_last(outputs, y).flatten(0, -2)
        mean = F.cross_entropy(outputs, y.flatten(), self.class_weights)
        # torch's mean of no labels is NaN.
        return mean if y.ndim == 1 else torch.where((y != IGNORED).any(), mean, 0.0)

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(n,) cross-entropy of each sample: for sequences the mean over its labels, 0 without
        any.
        """
        outputs = self.classes_last(outputs, y)
        each = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
        if y.ndim == 1:
            return each
        labels = (y != IGNORED).flatten(1).sum(1).clamp(min=1)
        return each.view(len(y), -1).mean(1) * (y.shape[1:].numel() / labels)

    def labels(self, y: torch.Tensor) -> torch.Tensor | None:
        """(n,) int64, the labels of each sample; None: each has one."""
        return None if y.ndim == 1 else (y != IGNORED).flatten(1).sum(1)

    def counts(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(2, C) int64: correct and total by true class. The first of equal logits is the
        prediction.
        """
        outputs = self.classes_last(outputs, y)
        classes = outputs.shape[-1]
        right = y[outputs.argmax(dim=-1) == y]
        labels = y if y.ndim == 1 else y[y != IGNORED]
        return torch.stack([torch.bincount(v, minlength=classes) for v in (right, labels)])

    def count_confusion(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(C, C) int64: samples by true class (row) and predicted class (column)."""
        outputs, y = self._labelled_positions(outputs, y)
        classes = outputs.shape[-1]
        cells = y * classes + outputs.argmax(dim=-1)
        return torch.bincount(cells, minlength=classes**2).view(classes, classes)

    def count_scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(2, C, BINS) int64: for each class, the samples of other classes [0] and its own [1] by
        the log-odds that they get for it, see `bins_of`.
        """
        outputs, y = self._labelled_positions(outputs, y)
        classes = outputs.shape[-1]
        bins = bins_of(log_odds(outputs))
        cells = (F.one_hot(y, classes) * classes + torch.arange(classes, device=y.device)) * BINS
        counts = torch.bincount((cells + bins).flatten(), minlength=2 * classes * BINS)
        return counts.view(2, classes, BINS)

    def _labelled_positions(
        self, outputs: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs (n, C) and labels (n,) of all positions that have a label."""
        outputs = self.classes_last(outputs, y).flatten(0, -2)
        y = y.flatten()
        return outputs[y != IGNORED], y[y != IGNORED]

    def classes_last(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        axes = possible_axes(outputs, y)
        if not axes:
            raise ConfigError(
                f"task: classification cannot compare outputs of shape {tuple(outputs.shape)} with "
                f"labels of shape {tuple(y.shape)}; expected (n, C) for labels (n,), and (n, t, C) "
                f"or (n, C, t) for (n, t)."
            )
        axis = axes[0] if len(axes) == 1 else self.class_axis
        return outputs if axis == -1 else outputs.movedim(1, -1)


def log_odds(outputs: torch.Tensor) -> torch.Tensor:
    """(n, C) float64, log(p / (1 - p)) of each class for logits (n, C), without a p that is rounded
    to 0 or 1.
    """
    z = outputs.double()
    top = z.argmax(-1, keepdim=True)
    largest = z.gather(-1, top)
    shares = (z - largest).exp()
    # log of the sum of exp of all other logits. Without the largest one it is summed anew: the
    # difference would have lost its digits.
    others = largest + (shares.sum(-1, keepdim=True) - shares).log()
    rest = z.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return z - others.scatter(-1, top, rest)


def bins_of(odds: torch.Tensor) -> torch.Tensor:
    """The bin of each log-odds, int64, 0 to BINS - 1: bin i holds sinh((i - BINS / 2) / PER_UNIT)
    up to that of i + 1. Bins are 0.004 wide at 0, and 0.4 % of the log-odds far from it: so a rare
    class, or a model that is sure of everything, has its scores in many bins too.
    """
    places = (torch.nan_to_num(odds, 0.0).asinh() * PER_UNIT).floor()
    return places.clamp(-BINS // 2, BINS // 2 - 1).long() + BINS // 2


def possible_axes(outputs: torch.Tensor, y: torch.Tensor) -> list[int]:
    """The axes of outputs, of -1 and 1, that may be the classes, by its shape and that of y."""
    if outputs.ndim != y.ndim + 1:
        return []
    axes = [-1] if outputs.shape[:-1] == y.shape else []
    if y.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(y.shape):
        axes.append(1)
    return axes


def class_axis(module: nn.Module, x: Inputs, y: torch.Tensor, outputs: torch.Tensor) -> int:
    """The axis, -1 or 1, of the classes in `outputs`, which the module, in eval mode, gives for the
    inputs x of sequences with the labels y (n, t).

    Where there are as many classes as positions, both readings fit. Then it is what the module says
    as its attribute `class_axis`, or the last where `head(features(x))` with a Linear head is what
    it gives. Else ConfigError: nothing tells which it is.
    """
    axes = possible_axes(outputs, y)
    if len(axes) < 2:
        return axes[0] if axes else -1
    declared = getattr(module, "class_axis", None)
    if declared in (-1, 1):
        return int(declared)
    head = getattr(module, "head", None)
    features = getattr(module, "features", None)
    if isinstance(head, nn.Linear) and callable(features):
        with torch.no_grad():
            if torch.equal(head(features(x)), outputs):
                return -1
    raise ConfigError(
        f"model: its outputs {tuple(outputs.shape)} for labels {tuple(y.shape)} may have the "
        f"classes in the second place or in the last; give the module an attribute class_axis, 1 "
        f"or -1."
    )
