"""N clients trained at once: their descents as one, every operation batched over the lanes
(`train.pack`).

A small model leaves a GPU idle between its kernels; N of the same shape take hardly longer than
one. The forward pass is torch.func's vmap over stacked weights, the backward pass autograd's own,
the step the same fused one as in `descend`, over stacked tensors.

There are always exactly N lanes: idle ones train a copy of the first client. So each operation has
the same shape, and each lane the same arithmetic, whatever the others hold: a client's bits depend
neither on its company nor on its place. They are not those of `descend`, whose kernels are others;
the mathematics is the same, but dropout draws other samples.

On a GPU convolutions are computed as products of matrices, because cuDNN's grouped convolutions,
to which vmap would lead, are slow.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors, mapped
from fednet.training.correction import Correction
from fednet.training.graphs import kept
from fednet.training.lanes import Feed, Lane, computed
from fednet.training.loop import Course
from fednet.training.optimizers import SGD
from fednet.training.samples import piece
from fednet.training.scratch import OwnState, draws

if TYPE_CHECKING:
    from fednet.training.tasks import Task

# Devices on which a lane's weights are stepped as tensors of their own: a processor computes the
# last few elements of a tensor another way than the others, so that in one long tensor a lane's
# bits would depend on its place.
APART = ("cpu",)
# Devices on which a convolution is computed as a product of matrices.
AS_PRODUCTS = ("cuda",)

Plans = dict[object, "Plan"]


def descend(lanes: Sequence[Lane], n: int, task: Task, plans: Plans | None = None) -> None:
    """Descends in at most n lanes of one kind, each from what its scratch holds, in place; sets
    each one's course, or its error where its own `progress` raised one. Nothing waits for the
    device before the end. plans: what earlier packs of the same kind have prepared, kept for the
    next ones.
    """
    assert 0 < len(lanes) <= n
    first = lanes[0]
    key = (first.scratch.layout, first.scratch.device, first.kind)
    plan = kept({} if plans is None else plans, key, lambda: Plan(first, n, task))
    with plan.lock, plan.on_stream():
        for lane in lanes:
            if plan.stream is not None and lane.loaded is not None:
                plan.stream.wait_event(lane.loaded)
        plan.train(list(lanes))
        # What a lane holds is its own thread's again, in another stream.
        if plan.stream is not None:
            plan.stream.synchronize()


class Plan:
    """What packs of one kind share: a copy of the module, and stacked weights. One pack at a time,
    under `lock`.
    """

    def __init__(self, first: Lane, n: int, task: Task) -> None:
        self.n, self.task, self.device = n, task, first.scratch.device
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.apart = self.device.type in APART
        self.module = self._module(first)
        self._own = OwnState(self.module, first.scratch.layout)
        self.dropout = Dropout(self.module, n, self.device)
        if self.device.type in AS_PRODUCTS:
            for part in self.module.modules():
                if isinstance(part, nn.Conv2d) and is_plain(part):
                    part.forward = functools.partial(convolved, part)  # type: ignore[method-assign]
        held = {
            name: p.detach().new_empty((n, *p.shape))
            for name, p in first.scratch.parameters.items()
        }
        self.parameters = [nn.Parameter(held[name]) for name in first.trained]
        self.stacked = held
        self.held = held | dict(zip(first.trained, self.parameters))
        self.weights = [part for p in self.parameters for part in _parts(p.detach(), self.apart)]
        self.forward = vmap(self._one)
        self.total = torch.zeros(n, dtype=torch.float64, device=self.device)
        if self.stream is not None:  # what was made above is made in this thread's stream
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _module(self, first: Lane) -> nn.Module:
        """A copy of the first lane's module, in training mode, that this plan may change."""
        scratch = first.scratch
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in first.trained)
        try:
            scratch.train_mode(alone=False)
            return copy.deepcopy(scratch.module)
        finally:
            for parameter in scratch.parameters.values():
                parameter.requires_grad_(True)

    def _one(
        self, held: dict[str, torch.Tensor], x: Inputs, masks: list[torch.Tensor]
    ) -> torch.Tensor:
        """One lane's outputs, under vmap."""
        self.dropout.masks = masks
        return computed(self.module, held, x)

    def on_stream(self) -> AbstractContextManager[object]:
        """Returns this plan's CUDA stream as a context; on the CPU one that does nothing."""
        if self.stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.stream)

    def train(self, lanes: list[Lane]) -> None:
        """Trains the lanes from what their scratches hold, in place."""
        first, n = lanes[0], self.n
        rows = lanes + [first] * (n - len(lanes))
        self._own.restore()
        with torch.no_grad():
            for name, stack in self.stacked.items():
                torch.stack([row.scratch.parameters[name].detach() for row in rows], out=stack)
            self.total.zero_()
        change, still = _corrected(rows, self.weights, self.apart)
        for i in range(len(lanes), n):
            still(i)
        feed = Feed(lanes, n)
        self.dropout.begin([row.draws for row in rows], piece(first.data[0], 0, 1), first.width)
        step_of = self._step_of(first, change)
        losses: dict[int, torch.Tensor] = {}
        most = max(lane.steps for lane in lanes)
        step = 0
        while step < most:
            xs, ys, shares, sizes = feed.next(min(feed.chunk, most - step))
            for k in range(len(shares)):
                step_of(_step(xs, k), ys[:, k], shares[k], sizes[k])
                step += 1
                ended = [i for i, lane in enumerate(lanes) if self._ends(lane, step, i in losses)]
                for i in ended:
                    lane = lanes[i]
                    if lane.error is None:
                        losses[i] = self.total[i].clone()
                        with torch.no_grad():
                            torch._foreach_copy_(
                                [lane.scratch.parameters[name].detach() for name in first.trained],
                                [p.detach()[i] for p in self.parameters],
                            )
                    # It goes on without a gradient: to leave it out would cost the others.
                    still(i)
                if all(lane.error is not None or lane.steps <= step for lane in lanes):
                    step = most
                    break
        if losses:
            for i, summed in zip(losses, torch.stack(list(losses.values())).tolist()):
                lanes[i].course = Course(lanes[i].steps, summed / feed.seen[i])

    def _ends(self, lane: Lane, step: int, has_ended: bool) -> bool:
        """Whether the lane ends with this step: it was its last one, or its `progress` raised."""
        if has_ended or lane.error is not None or step > lane.steps:
            return False
        return not _tell(lane, step) or step == lane.steps

    def _step_of(
        self, first: Lane, change: Correction | None
    ) -> Callable[[Inputs, torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """Returns what takes one step with a batch (x, y, shares, sizes)."""
        recipe = first.recipe
        made = SGD(self.weights, recipe.lr, recipe.momentum, recipe.weight_decay)
        take = made.step if change is None else change.sgd(made)
        return functools.partial(self._compute, first, take)

    def _compute(
        self,
        first: Lane,
        take: Callable[[], object],
        x: Inputs,
        y: torch.Tensor,
        shares: torch.Tensor,
        sizes: torch.Tensor,
    ) -> None:
        masks = self.dropout.next()
        outputs = self.forward(self.held, x, masks)
        # All lanes' samples as one batch: a sample's loss is its own.
        each = self.task.losses(outputs.flatten(0, 1), y.flatten(0, 1)).view(self.n, -1)
        value = (each * shares).sum(1)
        value.sum().backward()
        if first.recipe.clip_norm is not None:
            _clip(self.parameters, first.recipe.clip_norm)
        _hand_over(self.parameters, self.weights, self.apart)
        take()
        for w in self.weights:
            w.grad = None
        self.total += value.detach() * sizes


class Dropout:
    """The dropout of all lanes. Whether a value is kept is a hash of its place, of the step and of
    the lane's own number: so that no lane's draws depend on the others.
    """

    def __init__(self, module: nn.Module, n: int, device: torch.device) -> None:
        self.n, self.device = n, device
        self.parts = [part for part in module.modules() if drops(part)]
        self.masks: list[torch.Tensor] = []
        self._shapes: list[tuple[int, ...]] | None = None
        self._module = module
        self._keys = torch.zeros(n, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        for k, part in enumerate(self.parts):
            part.forward = functools.partial(self._apply, k)  # type: ignore[method-assign]

    def _apply(self, k: int, x: torch.Tensor) -> torch.Tensor:
        if self._shapes is None:
            self.masks.append(x)
            return x
        return x * self.masks[k]

    def begin(self, keys: Sequence[int], one: Inputs, width: int) -> None:
        """A training begins. keys: a number of each lane's; one: a sample, to see the shapes of
        what is dropped from.
        """
        if not self.parts:
            return
        if self._shapes is None:
            self.masks = []
            with torch.no_grad():
                self._module(one)
            self._shapes = [(width, *x.shape[1:]) for x in self.masks]
        self._keys.copy_(torch.tensor(list(keys), dtype=torch.int64))
        self._step.zero_()

    def next(self) -> list[torch.Tensor]:
        """The masks of the next step, (N, width, ...) each: 0, or 1 / (1 - p)."""
        if not self.parts:
            return []
        assert self._shapes is not None
        made = []
        for k, (part, shape) in enumerate(zip(self.parts, self._shapes)):
            size = 1
            for length in shape:
                size *= length
            key = mixed(self._keys + (self._step * 64 + k) * STEP)
            place = torch.arange(-(-size // 4), device=self.device) * STEP
            # Sixteen bits decide, so that one number is enough for four values.
            drawn = mixed(key.unsqueeze(1) + place).view(torch.int16)[:, :size]
            p = float(part.p)  # type: ignore[arg-type]
            kept = drawn >= round(p * 65536) - 32768
            made.append((kept * (1.0 / (1.0 - p))).view(self.n, *shape))
        self._step += 1
        return made


def drops(part: nn.Module) -> bool:
    """Whether it is a dropout that packed clients can have."""
    return type(part) is nn.Dropout and 0.0 < part.p < 1.0 and not part.inplace


# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def mixed(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's hash of int64 numbers, which overflow as they are meant to."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def is_plain(part: nn.Conv2d) -> bool:
    """Whether `convolved` computes what it does."""
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.dilation == (1, 1)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
    )


def convolved(part: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """A convolution as a product of matrices: each patch of x is a column."""
    (height, width), (down, right) = part.kernel_size, part.stride
    assert not isinstance(part.padding, str)
    above, left = part.padding
    if above or left:
        x = F.pad(x, (left, left, above, above))
    patches = x.unfold(2, height, down).unfold(3, width, right)  # (b, c, h, w, kh, kw)
    rows, columns = patches.shape[2:4]
    flat = patches.permute(0, 1, 4, 5, 2, 3).reshape(x.shape[0], -1, rows * columns)
    out = part.weight.flatten(1) @ flat
    if part.bias is not None:
        out = out + part.bias.unsqueeze(1)
    return out.view(x.shape[0], part.out_channels, rows, columns)


def _parts(x: torch.Tensor, apart: bool) -> Sequence[torch.Tensor]:
    """A stacked tensor as what a step takes: whole, or each lane's row by itself."""
    return x.unbind(0) if apart else [x]


def _hand_over(parameters: list[nn.Parameter], weights: list[torch.Tensor], apart: bool) -> None:
    """The gradients, None where the loss does not reach them, to the parts that a step takes."""
    into = iter(weights)
    for p in parameters:
        for part in _parts(p.detach() if p.grad is None else p.grad, apart):
            next(into).grad = None if p.grad is None else part
        p.grad = None


def _step(xs: Inputs, k: int) -> Inputs:
    return mapped(xs, lambda part: part[:, k])


def _tell(lane: Lane, step: int) -> bool:
    """Whether the lane is to go on: it may be cancelled, or fail as was planned, at each step."""
    try:
        if lane.progress is not None:
            lane.progress(step, lane.steps)
    except BaseException as broken:  # raised again by the thread whose lane it is
        lane.error = broken
    return lane.error is None


def _corrected(
    lanes: Sequence[Lane], weights: list[torch.Tensor], apart: bool
) -> tuple[Correction | None, Callable[[int], None]]:
    """The lanes' corrections as one, None where there is nothing to correct: of tensors that are N
    times as long or, apart, N times as many. And what takes from a lane all that would move it
    without a gradient.
    """
    first, n = lanes[0], len(lanes)

    def flat(which: Callable[[Lane], Tensors | None]) -> list[torch.Tensor] | None:
        given = [(lane, x) for lane in lanes if (x := which(lane)) is not None]
        if not given:
            return None
        views = zip(*(lane.scratch.views(x, lane.trained) for lane, x in given))
        return [
            part.reshape(-1).clone()
            for parts in views
            for part in (parts if apart else [torch.stack(parts)])
        ]

    anchor = None
    if first.hooks.proximal != 0.0:
        anchor = (
            [w.clone().view(-1) for w in weights]
            if first.hooks.toward is None
            else flat(lambda lane: lane.hooks.toward)
        )
    change = Correction.between(
        first.hooks.scale_grad,
        flat(lambda lane: lane.hooks.add_to_grad),
        first.hooks.proximal,
        anchor,
        first.hooks.toward is None,
        flat(lambda lane: lane.hooks.add_to_step),
    )

    def still(i: int) -> None:
        for vectors in () if change is None else (change.added, change.constant, change.drift):
            if vectors is not None:
                for v in vectors[i::n] if apart else [v.view(n, -1)[i] for v in vectors]:
                    v.zero_()

    return change, still


def _clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """torch's clip_grad_norm_, of each lane for itself."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(
        [torch.linalg.vector_norm(g.unsqueeze(-1).flatten(1), dim=1) for g in gradients], dim=1
    )
    factor = (most / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))


# -- whether the run's model and task can be packed ------------------------------------------------
LEAVE = "; leave train.pack out."


def check_model(module: nn.Module, stateful: bool) -> None:
    """Raises ConfigError for a model that cannot be packed. stateful: it has buffers."""
    if stateful or any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise ConfigError(
            "train.pack: the model has buffers or BatchNorm; packed clients keep no buffers apart, "
            f"and BatchNorm would see the samples that fill up a batch{LEAVE}"
        )
    for part in module.modules():
        if draws(part) and not drops(part):
            raise ConfigError(
                f"train.pack: the model draws at random while it trains ({type(part).__name__}), "
                f"which packed clients cannot{LEAVE}"
            )


def check_lane(task: Task, lane: Lane) -> None:
    """Raises ConfigError for a model that cannot be computed for several clients at once, or that
    mixes the samples of a batch, or a task whose loss is not the mean of its losses, tried on a
    lane's own samples. Waits for the device: to be asked once.
    """
    (x, y), module = lane.data, lane.scratch.module
    n = min(lane.n, lane.width)
    lane.scratch.train_mode(alone=False)
    for part in module.modules():
        if drops(part):
            part.eval()  # its draws differ in a pack
    one = {name: p.unsqueeze(0) for name, p in lane.scratch.parameters.items()}
    with torch.no_grad():
        try:
            many = vmap(functools.partial(computed, module), in_dims=(0, None))
            outputs = many(one, piece(x, 0, n))[0]
            half = many(one, piece(x, 0, -(-n // 2)))[0]
        except RuntimeError as broken:
            if "out of memory" in str(broken):
                raise
            raise ConfigError(
                f"train.pack: the model cannot be computed for several clients at once "
                f"({str(broken).splitlines()[0][:300]}){LEAVE}"
            ) from broken
        whole = task.loss(outputs, y[:n]).double()
        mean = task.losses(outputs, y[:n]).double().mean()
    # What tf32 leaves of a small output is a share of what it was summed from.
    close = max(1e-3, 1e-2 * float(outputs.nan_to_num().abs().max()))
    if not torch.allclose(outputs[: len(half)], half, rtol=1e-2, atol=close, equal_nan=True):
        raise ConfigError(
            f"train.pack: what the model makes of a sample depends on the others of its batch, "
            f"which in a pack are partly there to fill it up{LEAVE}"
        )
    if not torch.isclose(whole, mean, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"train.pack: the task's loss, {float(whole):.6g}, is not the mean of its losses, "
            f"{float(mean):.6g}, on which packed clients are trained{LEAVE}"
        )
