"""Whether the run's model and task can be trained in packs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fednet.errors import ConfigError
from fednet.training.lanes import Lane, computed
from fednet.training.packed import drops
from fednet.training.samples import piece
from fednet.training.scratch import draws

if TYPE_CHECKING:
    from fednet.training.tasks import Task

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
        if draws(part) and not drops(part):
            raise ConfigError(
                f"train.pack: the model draws at random while it trains ({type(part).__name__}), "
                f"which packed clients cannot{LEAVE}"
            )


def check_lane(task: Task, lane: Lane) -> None:
    """Raises ConfigError where what a pack rests on does not hold for the run's model and task,
    tried on a lane's own samples. Waits for the device: to be asked once.
    """
    (x, y), module = lane.data, lane.scratch.module
    few, more = -(-min(lane.n, lane.width) // 2), min(lane.n, lane.width)
    lane.scratch.train_mode(alone=False)
    for part in module.modules():
        if drops(part):
            part.eval()  # its draws differ in a pack
    with torch.no_grad():
        outputs = module(piece(x, 0, few))
        whole, losses, again = (
            task.loss(outputs, y[:few]).double(),
            task.losses(outputs, y[:few]).double(),
            task.losses(outputs, y[:few]).double(),
        )
        mean = losses.mean()
        try:
            batched = vmap(functools.partial(computed, module), in_dims=(0, None))(
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
