"""What a pack is made of: clients' descents side by side, their samples some steps at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fednet.tensors import Inputs, to_device
from fednet.training.loop import Course, Descent

CHUNK_BYTES = 128 << 20  # of samples that are gathered at once, for some steps


@dataclass(eq=False)
class Lane(Descent):
    """One client's descent in a pack; course or error is what came of it. draws: a number of this
    client's task, from which its dropout is drawn. loaded: after it the scratch holds what the
    descent begins with; None: it does already.
    """

    draws: int = 0
    loaded: torch.cuda.Event | None = None
    course: Course | None = None
    error: BaseException | None = None

    @classmethod
    def of(cls, alone: Descent, draws: int = 0) -> Lane:
        """A descent that can be trained alone as well."""
        a = alone
        return cls(
            a.scratch,
            a.data,
            a.recipe,
            a.order,
            a.hooks,
            progress=a.progress,
            draws=draws,
        )

    @property
    def width(self) -> int:
        """Rows of a batch as it is computed: the batch size, or the power of two above n where all
        samples are fewer. It depends on this client alone, else its bits would depend on the
        others.
        """
        return min(self.recipe.batch_size, 1 << (self.n - 1).bit_length())

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What the lanes of one pack have in common."""
        (x, y), hooks = self.data, self.hooks
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
            hooks.proximal,
            hooks.toward is None,
            hooks.add_to_grad is None,
            hooks.scale_grad,
            hooks.add_to_step is None,
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to train."""
        return self.n == 0 or self.steps == 0 or not self.trained

    def draw(self) -> Iterator[tuple[np.ndarray, int]]:
        """(rows of each step's batch, filled up with its first one; how many of them count): the
        order of a `Descent` by itself.
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
    """What a `ClientHost` is given where clients are packed."""

    def descend(self, lane: Lane) -> Course:
        """Trains the lane together with others; raises what its `progress` raised."""
        ...


def computed(module: nn.Module, parameters: dict[str, torch.Tensor], x: Inputs) -> torch.Tensor:
    """The module's outputs for x, (n, ...), with these parameters in the place of its own."""
    out: torch.Tensor = functional_call(module, parameters, (x,))
    return out


@dataclass(eq=False)
class Feed:
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

    def next(self, steps: int) -> tuple[Inputs, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x (N, steps, width, ...), y alike, shares (steps, N, width): of each sample in its
        batch's mean, sizes (steps, N): of the batches). A lane without further steps repeats its
        first sample, with a share of 0.
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

        x, parts = first.data[0], [data[0] for data in from_rows]
        xs: Inputs = (
            {name: gathered([p[name] for p in parts if isinstance(p, dict)]) for name in x}
            if isinstance(x, dict)
            else gathered([p for p in parts if isinstance(p, torch.Tensor)])
        )
        return (
            xs,
            gathered([data[1] for data in from_rows]),
            to_device(torch.from_numpy(shares), device),
            to_device(torch.from_numpy(sizes), device),
        )
