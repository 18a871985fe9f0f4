"""Dataset condensation by gradient matching: makes one synthetic image per class, on which a random
net has the same gradient as on the real images.

The inner loop of FedDC's Algorithm 1, and its Eq. 6 and 8; the matching itself is Zhao, Mopuri and
Bilen, "Dataset Condensation with Gradient Matching", ICLR 2021 (arXiv:2006.05929).

    theta   a fresh random net
    P_i     the classes present on the client
    x_c     the synthetic image of class c
    gD, gS  gradients at theta of the cross-entropy over real images of class c, and over x_c
    D       their distance

The synthetic gradients of all classes are computed in one batched pass (`vmap`), where
the plain loop makes |P_i| passes over single images. On a CPU a real batch passes through the net a
few images at a time, so that activations stay in the cache: half the time at 256 images. If the
images of one batch influence each other (BatchNorm) or the net draws at random (dropout), the plain
loop over whole batches runs instead. Each class has random streams of its own, so the result does
not depend on the order of the classes or on which other classes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fednet.algorithms.base import Count, Positive, WeightedConfig
from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors
from fednet.wire.payload import Samples

# Takes a stacked gradient to what is compared of it, row by row.
Compared = Callable[[torch.Tensor], torch.Tensor]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
# Floats of stacked gradients at a time: 256 MB each of gD, gS and what the second derivative
# keeps.
GROUP = 2**26
CPU_IMAGES = 16  # real images a pass on a CPU
_NOT_BATCHED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RNNBase)


class Condensation(WeightedConfig):
    """The options of the condensation."""

    iterations: Count = 500
    """Iterations K of the condensation of a client's images."""
    cond_lr: Positive = 3.0
    """Learning rate of the condensed images."""
    clip_v: Positive = 1.0
    """Norm v that the images' gradient is clipped to (Eq. 8)."""
    real_batch: AtLeastOne = 256
    """Real samples per class in each iteration."""
    cond_min: AtLeastOne = 1
    """Real samples that a client needs of a class to send an image of it; one image of one
    sample shows that sample.
    """


def present(class_counts: Sequence[int] | np.ndarray, minimum: int = 1) -> list[int]:
    """P_i: the classes with at least `minimum` (and at least one) training samples, ascending."""
    return [c for c, n in enumerate(class_counts) if n >= max(1, minimum)]


# -- what of a gradient is compared by one cosine --------------------------------------------------
def by_output(g: torch.Tensor) -> torch.Tensor:
    """Returns (C, out, ...) as (C, out, n): the weights of an output, as the reference does."""
    return g.flatten(2)


def by_layer(g: torch.Tensor) -> torch.Tensor:
    """Returns (C, out, ...) as (C, 1, n): the weights of a layer, as Eq. 6 prints it."""
    return g.flatten(1)[:, None]


def condense(
    model: nn.Module,
    fresh: Callable[[int], Tensors],
    x: torch.Tensor,
    y: torch.Tensor,
    rng: Callable[[str], np.random.Generator],
    how: Condensation,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    compared: Compared = by_output,
) -> tuple[Samples, float]:
    """Condenses (x, y) to one image a class present, with its hard label, in ascending order of
    label.

    model: a scratch module, overwritten by each net. fresh(k): the k-th random initialisation. x:
    (n, c, h, w) float32 model inputs; y: (n,) int64. rng(purpose): the stream of that name.
    momentum, weight_decay: of the optimizer of the images. compared: what of a gradient is compared
    by one cosine. Returns the samples (float32, on the CPU, not clamped) and the mean over classes
    of D at the last iteration (nan where nothing was condensed).
    """
    counts = torch.bincount(y.cpu()).tolist()
    labels = present(counts, how.cond_min)
    if not labels:
        none = Samples(torch.zeros(0, *x.shape[1:]), torch.zeros(0, dtype=torch.int64))
        return none, float("nan")
    real = {c: x[y == c] for c in labels}  # gathered once; a batch is then a slice of its class
    starts = []
    for c in labels:
        draws = rng(f"condense/start/{c}")
        noise = draws.standard_normal(tuple(x.shape[1:]), dtype=np.float32)
        starts.append(torch.from_numpy(noise).to(x.device))
    batches = {c: rng(f"condense/batch/{c}") for c in labels}
    images = torch.stack(starts)
    targets = torch.tensor(labels, device=x.device)
    velocity = torch.zeros_like(images)
    batched = not any(isinstance(m, _NOT_BATCHED) for m in model.modules())
    at_once = CPU_IMAGES if batched and x.device.type == "cpu" else how.real_batch
    # It stays on x's device until the end: reading it would make the GPU wait.
    distance = torch.zeros(len(labels), device=x.device)
    model.train()
    for k in range(how.iterations):
        fresh(k).into(model)
        # Biases and the affine parts of norms are not matched.
        matched = {n: p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
        # Classes taken together, so that many classes and a large net still fit in memory.
        together = max(1, GROUP // max(1, sum(p.numel() for p in matched.values())))
        for first in range(0, len(labels), together):
            group = slice(first, first + together)
            g_real = []
            for c in labels[group]:
                batch = real[c]
                if len(batch) > how.real_batch:
                    rows = batches[c].choice(len(batch), how.real_batch, replace=False)
                    batch = batch[torch.from_numpy(rows).to(batch.device)]
                g_real.append(real_gradient(model, matched, batch, c, at_once))
            goal = {name: torch.stack([g[name] for g in g_real]) for name in matched}
            ask = synthetic_batched if batched else synthetic_plain
            distance[group], g = ask(model, matched, images[group], targets[group], goal, compared)
            g = clip_gradients(g, how.clip_v)
            if weight_decay:  # after the clipping, as an optimizer adds it
                g = g + weight_decay * images[group]
            if momentum:
                g = momentum * velocity[group] + g
                velocity[group] = g
            images[group] = images[group] - how.cond_lr * g
    return Samples(images.cpu(), targets.cpu()), float(distance.cpu().mean())


def check(model: nn.Module, x: Inputs) -> None:
    """Raises ConfigError if samples like x cannot be condensed with this model. In train mode each
    image is alone in its pass.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        found = "a dict of tensors" if isinstance(x, dict) else x.dtype
        raise ConfigError(
            f"condensation makes images: it needs samples that are one float tensor each, not "
            f"{found}."
        )
    try:
        model(x[:1])
    except ValueError as alone:
        raise ConfigError(
            f"condensation matches the gradients of one image at a time, for which this model "
            f"fails in train mode: {str(alone).rstrip('.')}. BatchNorm needs several values a "
            f"channel: of one image these are its pixels."
        ) from alone


# -- gradients -------------------------------------------------------------------------------------
def real_gradient(
    model: nn.Module,
    matched: Mapping[str, nn.Parameter],
    batch: torch.Tensor,
    label: int,
    at_once: int,
) -> dict[str, torch.Tensor]:
    """gD: the gradient of the mean cross-entropy over real images of one class, at the net's
    weights; `at_once` images a pass.
    """
    weights = list(matched.values())
    y = torch.full((len(batch),), label, device=batch.device)
    total: Sequence[torch.Tensor] = ()
    for images, labels in zip(batch.split(at_once), y.split(at_once)):
        loss = F.cross_entropy(model(images), labels, reduction="sum") / len(batch)
        g = torch.autograd.grad(loss, weights)
        total = torch._foreach_add(total, g) if total else g  # type: ignore[call-overload]
    return dict(zip(matched, total))


def synthetic_plain(
    model: nn.Module,
    matched: Mapping[str, nn.Parameter],
    images: torch.Tensor,
    labels: torch.Tensor,
    goal: Mapping[str, torch.Tensor],
    compared: Compared,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (D, dD/dx) for each image, one pass an image, as Algorithm 1 is written. D: (C,);
    dD/dx: shaped as `images`. Both are on the device of `images`.
    """
    distances = []
    gradients = []
    for j in range(len(images)):
        x = images[j : j + 1].detach().requires_grad_()
        g = torch.autograd.grad(
            F.cross_entropy(model(x), labels[j : j + 1]), list(matched.values()), create_graph=True
        )
        d = match_distance(
            dict(zip(matched, (t[None] for t in g))),
            {n: t[j : j + 1] for n, t in goal.items()},
            compared,
        )
        gradients.append(torch.autograd.grad(d.sum(), x)[0])
        distances.append(d.detach())
    return torch.cat(distances), torch.cat(gradients)


def synthetic_batched(
    model: nn.Module,
    matched: Mapping[str, nn.Parameter],
    images: torch.Tensor,
    labels: torch.Tensor,
    goal: Mapping[str, torch.Tensor],
    compared: Compared,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `synthetic_plain` in one pass: per-image gradients by vmap. No image sees
    another, so the gradient of the sum of D is each one's own.
    """
    weights = {name: p.detach() for name, p in matched.items()}
    rest = {name: p.detach() for name, p in model.named_parameters() if name not in weights}

    def loss(w: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, {**w, **rest}, (image[None],)), label[None])

    x = images.detach().requires_grad_()
    d = match_distance(vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, labels), goal, compared)
    return d.detach(), torch.autograd.grad(d.sum(), x)[0]


# -- distance and clipping -------------------------------------------------------------------------
def match_distance(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], compared: Compared = by_output
) -> torch.Tensor:
    """D of Eq. 6 for stacked gradients {name: (C, out, ...)}: (C,), each in 0..2 times the number
    of rows.

    1 - cos, summed; 1e-6 is added to the product of norms, as the reference does, so a row of zeros
    counts 1.
    """
    total = torch.zeros((), device=next(iter(a.values())).device)
    for name in a:
        u = compared(a[name])
        v = compared(b[name])
        cosine = (u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1) + 1e-6)
        total = total + (1 - cosine).sum(-1)
    return total


def clip_gradients(g: torch.Tensor, v: float) -> torch.Tensor:
    """Returns the stacked images' gradients, each with a norm of at most v (Eq. 8)."""
    norm = g.flatten(1).norm(dim=1).view(-1, *[1] * (g.dim() - 1))
    return torch.where(norm > v, g * (v / norm), g)
