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

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors, map_inputs, to_device
from fednet.training.graphs import get_or_make
from fednet.training.loop import Descent
from fednet.training.optimizers import SGD, Corrected
from fednet.training.samples import piece
from fednet.training.scratch import OwnState, draws
from fednet.wire.payload import LocalRun

if TYPE_CHECKING:
    from fednet.data.federation import Site
    from fednet.training.tasks import LearningTask

# Devices on which a lane's weights are stepped as tensors of their own: a processor computes the
# last few elements of a tensor another way than the others, so that in one long tensor a lane's
# bits would depend on its place.
APART = ("cpu",)
# Devices on which a convolution is computed as a product of matrices.
AS_PRODUCTS = ("cuda",)
CHUNK_BYTES = 128 << 20  # of samples that are gathered at once, for some steps

Plans = dict[object, "Plan"]


def descend(
    lanes: Sequence[Descent], n: int, task: LearningTask, plans: Plans | None = None
) -> None:
    """Descends in at most n lanes of one kind, each from its `start`; sets each one's `run` and
    `after`, or its error where its own `progress` raised one. Nothing waits for the device before
    the end. plans: what earlier packs of the same kind have prepared, kept for the next ones.
    """
    assert 0 < len(lanes) <= n
    first = lanes[0]
    key = (first.scratch.layout, first.scratch.device, first.kind)
    get_or_make({} if plans is None else plans, key, lambda: Plan(first, n, task)).train(
        list(lanes)
    )


class Plan:
    """What packs of one kind share, one after the other: a copy of the module, stacked weights."""

    def __init__(self, first: Descent, n: int, task: LearningTask) -> None:
        scratch = first.scratch
        self.n = n
        self.task = task
        self.device = scratch.device
        self.apart = self.device.type in APART
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in first.trained)
        try:
            scratch.train_mode(alone=False)
            self.module = copy.deepcopy(scratch.module)
        finally:
            for parameter in scratch.parameters.values():
                parameter.requires_grad_(True)
        self._own = OwnState(self.module, scratch.layout)
        self.dropout = Dropout(self.module, n, self.device)
        if self.device.type in AS_PRODUCTS:
            for part in self.module.modules():
                if isinstance(part, nn.Conv2d) and is_plain(part):
                    part.forward = functools.partial(convolved, part)  # type: ignore[method-assign]
        places = scratch.layout.places
        # By name of a parameter: where it is in a model's vector.
        self.places = {name: places[name][1:3] for name in scratch.parameters}
        self.size = scratch.layout.sizes[0]
        self.stacked = {
            name: torch.empty((n, *places[name][3]), device=self.device)
            for name in scratch.parameters
        }
        self.parameters = [nn.Parameter(self.stacked[name]) for name in first.trained]
        self.held = self.stacked | dict(zip(first.trained, self.parameters))
        self.weights = [part for p in self.parameters for part in self._parts(p.detach())]
        self.total = torch.zeros(n, dtype=torch.float64, device=self.device)

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """A stacked tensor as what a step takes: whole, or each lane's row by itself."""
        return x.unbind(0) if self.apart else [x]

    def _load(self, starts: Sequence[Tensors]) -> torch.Tensor:
        """Loads the model that each of the n lanes begins with. Returns them as rows, (n, P): once
        one row, repeated, where all begin with the same tensors, as after a broadcast within a
        process.
        """
        vectors = [start.vector for start in starts]
        if all(vector is vectors[0] for vector in vectors):
            models = to_device(vectors[0], self.device).expand(self.n, -1)
        else:
            models = torch.stack([to_device(vector, self.device) for vector in vectors])
        with torch.no_grad():
            for name, stack in self.stacked.items():
                start, end = self.places[name]
                stack.view(self.n, -1).copy_(models[:, start:end])
        return models

    def train(self, lanes: list[Descent]) -> None:
        first = lanes[0]
        n = self.n
        recipe = lanes[0].recipe
        assert recipe.lr is not None
        rows = lanes + [first] * (n - len(lanes))
        self._own.restore()
        starts = [row.start for row in rows if row.start is not None]
        models = self._load(starts)
        self.total.zero_()
        # What each comes to: replies are views of it.
        after = torch.empty((len(lanes), self.size), device=self.device)
        if len(first.trained) < len(self.stacked):
            after.copy_(models[: len(lanes)])
        del models
        made = SGD(self.weights, recipe.lr, recipe.momentum, recipe.weight_decay)
        corrected = None if first.hooks.neutral else self._corrected(rows, made)

        def freeze(i: int) -> None:
            """Takes from a lane all that would move it without a gradient."""
            if corrected is None:
                return
            for vectors in (corrected.added, corrected.constant, corrected.drift):
                if vectors is not None:
                    own = vectors[i::n] if self.apart else [v.view(n, -1)[i] for v in vectors]
                    for v in own:
                        v.zero_()

        def one(
            held: dict[str, torch.Tensor], x: Inputs, masks: list[torch.Tensor]
        ) -> torch.Tensor:
            self.dropout.masks = masks
            return computed(self.module, held, x)

        forward = vmap(one)
        for i in range(len(lanes), n):
            freeze(i)
        if self.dropout.parts:
            sample = piece(first.pair[0], 0, 1)
            self.dropout.begin([row.draws for row in rows], sample, first.width)
        losses = torch.zeros_like(self.total)
        seen = [0] * len(lanes)
        for step, (x, y, shares, sizes) in enumerate(joint_batches(lanes, n, seen), 1):
            outputs = forward(self.held, x, self.dropout.next())
            # All lanes' samples as one batch: a sample's loss is its own.
            each = self.task.losses(outputs.flatten(0, 1), y.flatten(0, 1)).view(n, -1)
            value = (each * shares).sum(1)
            value.sum().backward()
            if recipe.clip_norm is not None:
                _clip(self.parameters, recipe.clip_norm)
            # To the parts that a step takes; None where the loss does not reach them.
            into = iter(self.weights)
            for p in self.parameters:
                for part in self._parts(p.detach() if p.grad is None else p.grad):
                    next(into).grad = None if p.grad is None else part
                p.grad = None
            (corrected or made).step()
            for w in self.weights:
                w.grad = None
            self.total += value.detach() * sizes
            over: list[int] = []  # lanes
            for i, lane in enumerate(lanes):
                if lane.error is not None or step > lane.steps:
                    continue
                try:  # a lane may be cancelled, or fail as was planned, at each step
                    if lane.progress is not None:
                        lane.progress(step, lane.steps)
                except BaseException as broken:  # raised again by the thread whose lane it is
                    lane.error = broken
                if lane.error is None and step < lane.steps:
                    continue
                if lane.error is None:
                    over.append(i)
                # It goes on without a gradient: to leave it out would cost the others.
                freeze(i)
            self._read(over, after, losses)
            if all(lane.error is not None or lane.steps <= step for lane in lanes):
                break
        # What the host has to know of them, in one read.
        norms = torch.linalg.vector_norm(after, dim=1).double()
        found = torch.stack([losses[: len(lanes)], norms], dim=1).tolist()
        for i, (lane, model, (loss, norm)) in enumerate(zip(lanes, after, found)):
            if lane.error is None:
                assert lane.start is not None
                lane.after = lane.start.with_vector(model).with_norm(norm)
                lane.run = LocalRun(lane.n, lane.steps, loss / seen[i])

    def _read(self, over: list[int], after: torch.Tensor, losses: torch.Tensor) -> None:
        """Reads what these lanes came to into their rows of after, (lanes, P), and their losses."""
        if not over:
            return
        # All are mostly over at once; a slice needs no copy.
        at: slice | list[int] = over
        if over == list(range(len(after))):
            at = slice(len(after))
        losses[at] = self.total[at]
        for name, stack in self.held.items():
            if isinstance(stack, nn.Parameter):
                start, end = self.places[name]
                after[at, start:end] = stack.detach().view(self.n, -1)[at]

    def _corrected(self, rows: Sequence[Descent], made: SGD) -> Corrected:
        """The lanes' corrections as one: of tensors that are N times as long or, apart, N times as
        many.
        """
        first = rows[0]
        hooks = first.hooks

        def flat(which: Callable[[Descent], Tensors | None]) -> list[torch.Tensor] | None:
            each = [(row, which(row)) for row in rows]
            given = [(row, x) for row, x in each if x is not None]
            if not given:
                return None
            views = zip(*(row.scratch.views(x, row.trained) for row, x in given))
            return [
                part.reshape(-1).clone()
                for parts in views
                for part in (parts if self.apart else [torch.stack(parts)])
            ]

        anchor = None
        if hooks.proximal != 0.0:
            anchor = flat(lambda row: row.hooks.toward)
            if hooks.toward is None:
                anchor = [w.clone().view(-1) for w in self.weights]
        added = flat(lambda row: row.hooks.add_to_grad)
        drift = flat(lambda row: row.hooks.add_to_step)
        at_anchor = hooks.toward is None
        return Corrected(made, hooks.scale_grad, added, hooks.proximal, anchor, at_anchor, drift)


def joint_batches(
    lanes: Sequence[Descent], n: int, seen: list[int]
) -> Iterator[tuple[Inputs, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields of each step (x (N, width, ...), y alike, shares (N, width): of each sample in its
    batch's mean, sizes (N,): of the batches). A lane without further steps repeats its first
    sample, with a share of 0. seen: each lane's samples are counted there.

    They are gathered for some steps at a time: where they all are rows of one dataset by one
    gather, else by one a lane, into one tensor for all.
    """
    first = lanes[0]
    width = first.width
    device = first.scratch.device
    draws = [_batches(lane) for lane in lanes]
    rows = [*lanes, *[first] * (n - len(lanes))]
    take = _of_one_dataset(rows) or _of_each(rows)
    chunk = max(1, CHUNK_BYTES // (n * width * first.sample_nbytes))
    most = max(lane.steps for lane in lanes)

    for begun in range(0, most, chunk):
        steps = min(chunk, most - begun)
        index = np.zeros((n, steps, width), dtype=np.int64)
        shares = np.zeros((steps, n, width), dtype=np.float32)
        sizes = np.zeros((steps, n), dtype=np.float64)
        for i, draw in enumerate(draws):
            for s, (rows, size) in zip(range(steps), draw):
                index[i, s] = rows
                shares[s, i, :size] = 1.0 / size
                sizes[s, i] = size
            seen[i] += int(sizes[:, i].sum())
        xs, ys = take(index)
        part_of, samples = (to_device(torch.from_numpy(a), device) for a in (shares, sizes))
        for k in range(steps):
            yield map_inputs(xs, lambda part: part[:, k]), ys[:, k], part_of[k], samples[k]  # noqa: B023


Take = Callable[[np.ndarray], tuple[Inputs, torch.Tensor]]
"""Gathers samples (x, y): from rows of each lane, (N, ...), to tensors (N, ..., sample's shape)."""


def _of_one_dataset(rows: Sequence[Descent]) -> Take | None:
    """None where the lanes' samples are not all rows of one dataset."""
    sites: list[Site] = []
    for row in rows:
        site = row.data
        if isinstance(site, tuple) or not site.together or site.data is not rows[0].data.data:
            return None
        sites.append(site)
    parts = np.concatenate([site.part for site in sites])
    begins = np.cumsum([0, *[site.n for site in sites[:-1]]])

    def take(index: np.ndarray) -> tuple[Inputs, torch.Tensor]:
        at = parts[index + begins.reshape(-1, *[1] * (index.ndim - 1))]
        x, y = sites[0].rows(at.reshape(-1))
        return map_inputs(x, lambda p: p.view(*at.shape, *p.shape[1:])), y.view(
            *at.shape, *y.shape[1:]
        )

    return take


def _of_each(rows: Sequence[Descent]) -> Take:
    device = rows[0].scratch.device
    pairs = [row.pair for row in rows]

    def take(index: np.ndarray) -> tuple[Inputs, torch.Tensor]:
        at = to_device(torch.from_numpy(index), device)

        def gathered(*parts: torch.Tensor) -> torch.Tensor:
            shape = parts[0].shape[1:]
            out = torch.empty(
                (len(rows), at[0].numel(), *shape), dtype=parts[0].dtype, device=device
            )
            for i, part in enumerate(parts):
                torch.index_select(part, 0, at[i].view(-1), out=out[i])
            return out.view(*at.shape, *shape)

        x = map_inputs(pairs[0][0], gathered, *[x for x, _ in pairs[1:]])
        return x, gathered(*[y for _, y in pairs])

    return take


def _batches(lane: Descent) -> Iterator[tuple[np.ndarray, int]]:
    """(rows of each step's batch, filled up with its first one; how many of them count): the order
    of a `Descent` by itself.
    """
    step = 0
    while step < lane.steps:
        order = lane.order.permutation(lane.n)
        for start, end in lane.cuts[: lane.steps - step]:
            rows = np.full(lane.width, order[start])
            rows[: end - start] = order[start:end]
            yield rows, end - start
            step += 1


def computed(module: nn.Module, parameters: dict[str, torch.Tensor], x: Inputs) -> torch.Tensor:
    """The module's outputs for x, (n, ...), with these parameters in the place of its own."""
    return functional_call(module, parameters, (x,))


class Dropout:
    """The dropout of all lanes. Whether a value is kept is a hash of its place, of the step and of
    the lane's own number: so that no lane's draws depend on the others.
    """

    def __init__(self, module: nn.Module, n: int, device: torch.device) -> None:
        self.n = n
        self.device = device
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
    height, width = part.kernel_size
    down, right = part.stride
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


def check_lane(task: LearningTask, lane: Descent) -> None:
    """Raises ConfigError for a model that cannot be computed for several clients at once, or that
    mixes the samples of a batch, or a task whose loss is not the mean of its losses, tried on a
    lane's own samples. Waits for the device: to be asked once.
    """
    x, y = lane.pair
    module = lane.scratch.module
    n = min(lane.n, lane.width)
    lane.scratch.train_mode(alone=False)
    for part in module.modules():
        if drops(part):
            part.eval()  # its draws differ in a pack
    assert lane.start is not None
    one = {name: lane.start[name].to(lane.scratch.device)[None] for name in lane.scratch.parameters}
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
