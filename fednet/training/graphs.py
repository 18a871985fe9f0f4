"""Steps of training as CUDA graphs (`train.graphs`): a step is captured once and then replayed, so
that a GPU does not wait for Python between its kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from fednet.tensors import Inputs, mapped

Step = Callable[..., None]  # of a batch: inputs, and further tensors

KEPT = 4  # kinds of training that are kept for later ones

T = TypeVar("T")
_capturing = threading.Lock()


def usable(device: torch.device) -> bool:
    """Whether steps on the device can be captured."""
    return device.type == "cuda"


def kept(known: dict[object, T], key: object, make: Callable[[], T]) -> T:
    """Returns known[key], made where it is not there. Of others at most KEPT - 1 stay, the latest:
    with a learning rate that changes, the trainings of each round are another kind.
    """
    if key not in known:
        while len(known) >= KEPT:
            known.pop(next(iter(known)), None)
        known[key] = make()
    return known[key]


class Captured:
    """A step on the current stream. The first call captures it; each call copies the batch to where
    the graph reads it, and replays the graph. A step may not wait for the device, and must leave
    its results in tensors that it always uses.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: list[torch.Tensor] = []

    def __call__(self, x: Inputs, *more: torch.Tensor) -> None:
        if self._graph is None:
            self._graph = self._capture(x, more)
        for own, given in zip(self._batch, [*_tensors(x), *more]):
            own.copy_(given)
        self._graph.replay()

    def _capture(self, x: Inputs, more: tuple[torch.Tensor, ...]) -> torch.cuda.CUDAGraph:
        own, others = mapped(x, torch.clone), [part.clone() for part in more]
        self._batch = [*_tensors(own), *others]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Other threads go on with the device meanwhile.
        with _capturing, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._step(own, *others)
        return graph


@dataclass(eq=False)
class Replay:
    """The captured step of one kind of training of a scratch model. The first training, which
    chooses kernels, is not captured. total: the sum of the samples' losses.
    """

    total: torch.Tensor
    step: Captured | None = None
    trainings: int = 0


def _tensors(x: Inputs) -> list[torch.Tensor]:
    return list(x.values()) if isinstance(x, dict) else [x]
