"""Steps of training as CUDA graphs (`train.graphs`): a step is captured once and then replayed, so
that a GPU does not wait for Python between its kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from fednet.tensors import Inputs, by_name, map_inputs

DEVICES = ("cuda",)  # on which steps can be captured
KEPT = 4  # kinds of training that are kept for later ones

T = TypeVar("T")
_capturing = threading.Lock()


def get_or_make(known: dict[object, T], key: object, make: Callable[[], T]) -> T:
    """Returns known[key], made where it is not there. Of others at most KEPT - 1 stay, the latest:
    with a learning rate that changes, the trainings of each round are another kind.
    """
    if key not in known:
        while len(known) >= KEPT:
            known.pop(next(iter(known)), None)
        known[key] = make()
    return known[key]


class Captured:
    """The step of one kind of training of a scratch model, captured on the current stream. The
    first call captures it; each call copies the batch to where the graph reads it, and replays the
    graph. A step may not wait for the device, and must leave its results in tensors that it always
    uses. total: the sum of the samples' losses; trainings: that there have been.
    """

    step: Callable[..., None]  # of a batch: inputs, and further tensors

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.trainings = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: list[torch.Tensor] = []

    def __call__(self, x: Inputs, *more: torch.Tensor) -> None:
        if self._graph is None:
            own = map_inputs(x, torch.clone)
            others = [part.clone() for part in more]
            self._batch = [*by_name(own).values(), *others]
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            mode = "thread_local"  # other threads go on with the device meanwhile
            with _capturing, torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                self.step(own, *others)
            self._graph = graph
        for held, given in zip(self._batch, [*by_name(x).values(), *more]):
            held.copy_(given)
        self._graph.replay()
