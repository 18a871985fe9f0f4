"""N clients trained at once: their descents as one, every operation batched over the lanes
(`train.pack`).

A small model leaves a GPU idle between its kernels; N of the same shape take hardly longer than
one. The forward pass is torch.func's vmap over stacked weights, the backward pass autograd's own,
the step the same fused one as in `descend`, over stacked tensors.

There are always exactly N lanes, whoever is in them: idle ones go through the motions with a copy
of the first. So each operation has the same shape, and each lane the same arithmetic, whatever the
others hold: a client's bits depend neither on its company nor on its place. They are not those of
`descend`, whose kernels are others; the mathematics is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fednet.errors import ConfigError
from fednet.tensors import Tensors, to_device
from fednet.training.correction import Correction
from fednet.training.descent import optimizer
from fednet.training.loop import Course, Recipe, batches, chosen, length, piece
from fednet.training.scratch import Scratch, draws

# Devices on which a lane's weights are stepped as tensors of their own: a processor computes the
# last few elements of a tensor another way than the others, so that in one long tensor a lane's
# bits would depend on its place.
APART = ("cpu",)
CHUNK_BYTES = 128 << 20  # of samples that are gathered at once, for some steps


@dataclass(eq=False)
class Lane:
    """One client's descent, by the arguments of `training.descend`; course or error is what came of
    it.
    """

    scratch: Scratch
    data: tuple[Any, torch.Tensor]
    recipe: Recipe
    order: np.random.Generator
    proximal: float = 0.0
    toward: Tensors | None = None
    add_to_grad: Tensors | None = None
    scale_grad: float = 1.0
    add_to_step: Tensors | None = None
    only: Sequence[str] | None = None
    progress: Callable[[int, int], None] | None = None
    course: Course | None = None
    error: BaseException | None = None

    @functools.cached_property
    def n(self) -> int:
        return length(self.data[0])

    @functools.cached_property
    def cuts(self) -> list[tuple[int, int]]:
        return batches(self.n, self.recipe.batch_size, self.recipe.last_batch)

    @property
    def steps(self) -> int:
        return (
            self.recipe.steps
            if self.recipe.steps is not None
            else self.recipe.epochs * len(self.cuts)
        )

    @functools.cached_property
    def trained(self) -> list[str]:
        return chosen(self.scratch, self.only)

    @property
    def width(self) -> int:
        """Rows of a batch as it is computed: the batch size, or the power of two above n where all
        samples are fewer. It depends on this client alone, else its bits would depend on the
        others.
        """
        return min(self.recipe.batch_size, 1 << (self.n - 1).bit_length())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the lanes of one pack have in common."""
        x, y = self.data
        shapes = tuple(
            (k, v.dtype, v.shape[1:]) for k, v in (x.items() if isinstance(x, dict) else [("", x)])
        )
        return (
            self.recipe,
            self.width,
            shapes,
            y.dtype,
            y.shape[1:],
            tuple(self.trained),
            self.proximal,
            self.toward is None,
            self.add_to_grad is None,
            self.scale_grad,
            self.add_to_step is None,
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to train."""
        return self.n == 0 or self.steps == 0 or not self.trained

    def draw(self) -> Iterator[tuple[np.ndarray, int]]:
        """(rows of each step's batch, filled up with its first one; how many of them count): the
        order of `training.descend`.
        """
        step = 0
        while step < self.steps:
            order = self.order.permutation(self.n)
            for start, end in self.cuts[: self.steps - step]:
                rows = np.full(self.width, order[start])
                rows[: end - start] = order[start:end]
                yield rows, end - start
                step += 1


class Pack(Protocol):
    """What a `SiteHost` is given where clients are packed."""

    def descend(self, lane: Lane) -> Course:
        """Trains the lane together with others; raises what its `progress` raised."""
        ...


LEAVE = "; leave train.pack out."


def check(module: nn.Module, stateful: bool) -> None:
    """Raises ConfigError for a model that cannot be packed. stateful: it has buffers."""
    if stateful or any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise ConfigError(
            "train.pack: the model has buffers or BatchNorm; packed clients keep no buffers "
            "apart, and BatchNorm would see the "
            "samples that fill up a batch" + LEAVE
        )
    for part in module.modules():
        if draws(part):
            raise ConfigError(
                f"train.pack: the model draws at random while it trains ({type(part).__name__}), "
                f"which packed clients cannot{LEAVE}"
            )


def check_lane(task: Any, lane: Lane) -> None:
    """Raises ConfigError where what a pack rests on does not hold for the run's model and task,
    tried on a lane's own samples. Waits for the device: to be asked once.
    """
    (x, y), module = lane.data, lane.scratch.module
    few, more = -(-min(lane.n, lane.width) // 2), min(lane.n, lane.width)
    lane.scratch.train_mode(alone=False)
    with torch.no_grad():
        outputs = module(piece(x, 0, few))
        whole, losses, again = (
            task.loss(outputs, y[:few]).double(),
            task.losses(outputs, y[:few]).double(),
            task.losses(outputs, y[:few]).double(),
        )
        mean = losses.mean()
        try:
            batched = vmap(functools.partial(_outputs, module), in_dims=(0, None))(
                {name: torch.stack([p, p]) for name, p in lane.scratch.parameters.items()},
                piece(x, 0, more),
            )
        except RuntimeError as broken:
            if "out of memory" in str(broken):
                raise
            raise ConfigError(
                f"train.pack: the model cannot be computed for several clients at once "
                f"({str(broken).splitlines()[0][:300]}){LEAVE}"
            ) from broken
    # What tf32 leaves of a small output is a share of what it was summed from.
    largest = float(outputs.nan_to_num().abs().max())
    if not torch.allclose(
        batched[1][:few], outputs, rtol=1e-2, atol=max(1e-3, 1e-2 * largest), equal_nan=True
    ):
        raise ConfigError(
            "train.pack: what the model makes of a sample depends on the others of its batch, "
            "which in a pack are partly there to fill "
            f"it up{LEAVE}"
        )
    if not torch.allclose(losses, again, equal_nan=True):
        raise ConfigError(
            f"train.pack: the task's losses of the same outputs differ from call to call, as of "
            f"one that draws at random, which packed "
            f"clients cannot{LEAVE}"
        )
    if not torch.isclose(whole, mean, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"train.pack: the task's loss, {float(whole):.6g}, is not the mean of its losses, "
            f"{float(mean):.6g}, on which packed "
            f"clients are trained{LEAVE}"
        )


def descend(lanes: Sequence[Lane], n: int, task: Any) -> None:
    """Descends in at most n lanes of one kind, each from what its scratch holds, in place; sets
    each one's course, or its error where its own `progress` raised one. The module of the first
    one's scratch does the work. Nothing waits for the device before the end.
    """
    assert 0 < len(lanes) <= n
    first = lanes[0]
    for name, parameter in first.scratch.parameters.items():
        parameter.requires_grad_(name in first.trained)
    try:
        first.scratch.train_mode(alone=False)
        _run(list(lanes), n, task)
    finally:
        for parameter in first.scratch.parameters.values():
            parameter.requires_grad_(True)
        # What a lane holds is its own thread's again, in another stream.
        if first.scratch.device.type == "cuda":
            torch.cuda.current_stream(first.scratch.device).synchronize()


def _run(lanes: list[Lane], n: int, task: Any) -> None:
    first, device = lanes[0], lanes[0].scratch.device
    rows = lanes + [first] * (n - len(lanes))
    held = {
        name: _stacked([lane.scratch.parameters[name].detach() for lane in rows])
        for name in first.scratch.parameters
    }
    parameters = [nn.Parameter(held[name]) for name in first.trained]
    held |= dict(zip(first.trained, parameters))
    apart = device.type in APART
    weights = [part for p in parameters for part in _parts(p.detach(), apart)]
    take_step, still = _stepping(rows, weights, apart)
    for i in range(len(lanes), n):
        still(i)
    forward = vmap(functools.partial(_outputs, first.scratch.module))
    feed = _Feed(lanes, n)
    total = torch.zeros(n, dtype=torch.float64, device=device)
    losses: dict[int, torch.Tensor] = {}
    most = max(lane.steps for lane in lanes)
    for start in range(0, most, feed.chunk):
        xs, ys, shares, sizes = feed.next(min(feed.chunk, most - start))
        for k in range(len(shares)):
            outputs = forward(held, _step(xs, k))
            # All lanes' samples as one batch: a sample's loss is its own.
            each = task.losses(outputs.flatten(0, 1), ys[:, k].flatten(0, 1)).view(n, -1)
            value = (each * shares[k]).sum(1)
            value.sum().backward()
            if first.recipe.clip_norm is not None:
                _clip(parameters, first.recipe.clip_norm)
            gradients = [g for p in parameters for g in _parts(p.grad, apart, n)]
            for w, g in zip(weights, gradients):
                w.grad = g
            for p in parameters:
                p.grad = None
            take_step()
            total += value.detach() * sizes[k]
            step = start + k + 1
            for i, lane in enumerate(lanes):
                if (
                    step > lane.steps
                    or lane.error is not None
                    or (_tell(lane, step) and step < lane.steps)
                ):
                    continue
                if lane.error is None:
                    for name, p in zip(first.trained, parameters):
                        lane.scratch.parameters[name].detach().copy_(p.detach()[i])
                    losses[i] = total[i].clone()
                # It goes on to no avail, without a gradient: to leave it out of each step would
                # cost the others.
                still(i)
            if all(lane.error is not None or lane.steps <= step for lane in lanes):
                break
        else:
            continue
        break
    if losses:
        for i, summed in zip(losses, torch.stack(list(losses.values())).tolist()):
            lanes[i].course = Course(lanes[i].steps, summed / feed.seen[i])


def _outputs(module: nn.Module, parameters: dict[str, torch.Tensor], x: Any) -> Any:
    return functional_call(module, parameters, (x,))


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(N, ...), in the usual order in memory."""
    return torch.stack(list(parts)).contiguous()


def _parts(x: Any, apart: bool, n: int = 1) -> Sequence[Any]:
    """A stacked tensor as what a step takes: whole, or each lane's row by itself. None, where the
    loss does not reach it, stands for n.
    """
    return ([None] * n if x is None else x.unbind(0)) if apart else [x]


def _step(xs: Any, k: int) -> Any:
    return {name: part[:, k] for name, part in xs.items()} if isinstance(xs, dict) else xs[:, k]


def _tell(lane: Lane, step: int) -> bool:
    """Whether the lane is to go on: it may be cancelled, or fail as was planned, at each step."""
    try:
        if lane.progress is not None:
            lane.progress(step, lane.steps)
    except BaseException as broken:  # raised again by the thread whose lane it is
        lane.error = broken
    return lane.error is None


def _stepping(
    lanes: Sequence[Lane], weights: list[torch.Tensor], apart: bool
) -> tuple[Callable[[], Any], Callable[[int], None]]:
    """One step of all lanes: `training.descend`'s own, with tensors that are N times as long or,
    apart, with N times as many. And what takes from a lane all that would drive it without a
    gradient.
    """
    first, recipe, n = lanes[0], lanes[0].recipe, len(lanes)

    def flat(which: Callable[[Lane], Tensors | None]) -> list[torch.Tensor] | None:
        given = [(lane, x) for lane in lanes if (x := which(lane)) is not None]
        if not given:
            return None
        views = zip(*(lane.scratch.views(x, lane.trained) for lane, x in given))
        return [
            part.reshape(-1).clone()
            for parts in views
            for part in (parts if apart else [_stacked(parts)])
        ]

    anchor = None
    if first.proximal != 0.0:
        anchor = (
            [w.clone().view(-1) for w in weights]
            if first.toward is None
            else flat(lambda lane: lane.toward)
        )
    change = Correction.between(
        first.scale_grad,
        flat(lambda lane: lane.add_to_grad),
        first.proximal,
        anchor,
        first.toward is None,
        flat(lambda lane: lane.add_to_step),
    )

    def still(i: int) -> None:
        for vectors in () if change is None else (change.added, change.constant, change.drift):
            own = (
                []
                if vectors is None
                else vectors[i::n]
                if apart
                else [v.view(n, -1)[i] for v in vectors]
            )
            for v in own:
                v.zero_()

    if change is not None:
        return change.sgd(weights, recipe.lr, recipe.momentum, recipe.weight_decay), still
    return optimizer(
        "sgd", weights, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    ).step, still


def _clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """torch's clip_grad_norm_, of each lane for itself."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(
        [torch.linalg.vector_norm(g.unsqueeze(-1).flatten(1), dim=1) for g in gradients], dim=1
    )
    factor = (most / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))


@dataclass(eq=False)
class _Feed:
    """The lanes' batches, some steps at a time: one gather a lane, into one tensor for all."""

    lanes: list[Lane]
    n: int
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws = [lane.draw() for lane in self.lanes]
        self.seen = [0] * len(self.lanes)
        x, width = self.lanes[0].data[0], self.lanes[0].width
        sample = sum(part[:1].nbytes for part in (x.values() if isinstance(x, dict) else [x]))
        self.chunk = max(1, CHUNK_BYTES // (self.n * width * sample))  # steps

    def next(self, steps: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x (N, steps, width, ...), y alike, shares (steps, N, width): of each sample in its
        batch's mean, sizes (steps, N): of the batches). Where a lane has no more steps its first
        sample stands in, with a share of 0.
        """
        first = self.lanes[0]
        width, device = first.width, first.scratch.device
        index = np.zeros((self.n, steps, width), dtype=np.int64)
        shares, sizes = (
            np.zeros((steps, self.n, width), dtype=np.float32),
            np.zeros((steps, self.n), dtype=np.float64),
        )
        for i, draw in enumerate(self.draws):
            for s, (rows, size) in zip(range(steps), draw):
                index[i, s], shares[s, i, :size], sizes[s, i] = rows, 1.0 / size, size
            self.seen[i] += int(sizes[:, i].sum())
        at = to_device(torch.from_numpy(index), device)
        from_rows = [lane.data for lane in self.lanes] + [first.data] * (self.n - len(self.lanes))

        def gathered(parts: list[torch.Tensor]) -> torch.Tensor:
            out = torch.empty(
                (self.n, steps * width, *parts[0].shape[1:]), dtype=parts[0].dtype, device=device
            )
            for i, part in enumerate(parts):
                torch.index_select(part, 0, at[i].view(-1), out=out[i])
            return out.view(self.n, steps, width, *parts[0].shape[1:])

        x = first.data[0]
        xs = (
            {name: gathered([data[0][name] for data in from_rows]) for name in x}
            if isinstance(x, dict)
            else gathered([d[0] for d in from_rows])
        )
        return (
            xs,
            gathered([data[1] for data in from_rows]),
            to_device(torch.from_numpy(shares), device),
            to_device(torch.from_numpy(sizes), device),
        )
