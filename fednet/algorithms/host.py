"""The interfaces that a method's functions get of the process that they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from fednet.tensors import Inputs, Layout, Tensors
from fednet.training.evaluation import Counts
from fednet.training.loop import Trained
from fednet.wire.payload import Samples

if TYPE_CHECKING:
    from fednet.config.schema import TrainSection
    from fednet.data import Data
    from fednet.training.setting import Pair
    from fednet.training.tasks import Task


class ClientHost(Protocol):
    """The interface for the client's functions. All of it is the site's own, or public.

    client_id, round (from 1), phase, device.
    n: this client's training samples; classes: C. data: these samples as model inputs (x, y), on
    `device`.
    lr: the local learning rate of this round (after the schedule). momentum. train_config: the
    client's `train` section. `client_update` may set lr and train_config for its own `train`.
    task: its loss and counts.
    initial: the whole model as initialised from the run's seed. layout: of the whole model; shared:
    of the part that crosses. head: names of the last Linear's tensors.
    trained: the whole local model, by which the client is evaluated: `train` sets it. A loop of the
    method's own sets it (`Tensors.of(module)`) where it does not send the whole model up.
    """

    client_id: int
    round: int
    phase: int
    classes: int
    n: int
    lr: float
    momentum: float
    device: torch.device
    data: tuple[Inputs, torch.Tensor]
    initial: Tensors
    layout: Layout
    shared: Layout
    head: tuple[str, ...]
    task: Task
    train_config: TrainSection
    trained: Tensors | None

    @property
    def class_counts(self) -> np.ndarray:
        """(C,) int64: this client's training samples by class."""
        ...

    def train(
        self,
        x: Tensors,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        loss: Callable[[nn.Module, Inputs, torch.Tensor], torch.Tensor] | None = None,
        proximal: float = 0.0,
        toward: Tensors | None = None,
        add_to_grad: Tensors | None = None,
        scale_grad: float = 1.0,
        add_to_step: Tensors | None = None,
        only: Sequence[str] | None = None,
        extra: Tensors | None = None,
        more: Samples | None = None,
        stream: str = "order",
    ) -> Trained:
        """Local training LT(w, loss, E, B): E epochs over the shuffled local set from `x`, with the
        optimizer of the client's `train` section.

        epochs, steps: passes over the set, or SGD steps, at most one of them; default: the run's.
        loss(model, x, y): mean loss of a batch; default: the task's. With `extra`, loss(model, x,
        y, extra) where extra maps names to tensors trained beside the model by the same optimizer.
        proximal, toward: adds proximal * (w - toward) to the gradient, toward = x if not given.
        add_to_grad: a constant added to each step's gradient (after clipping). scale_grad: the
        gradient's factor before that. add_to_step: added to the weights after each optimizer step,
        outside momentum. only: names of the parameters to train; modules all of whose parameters
        stay frozen are in eval mode. more: samples trained on too. stream: name of the random
        stream for the order of samples. Each of the arguments is in some paper's local update.
        """
        ...

    def gradient(self, x: Tensors, more: Samples | None = None) -> Trained:
        """Returns the gradient of the mean loss over the whole local set at x, in eval mode for
        buffers. `.x` holds it.
        """
        ...

    def model(self, x: Tensors) -> nn.Module:
        """Returns a scratch module holding x (overwritten by the next call)."""
        ...

    def frozen(self, x: Tensors) -> nn.Module:
        """Returns a further module of the same architecture holding x, in eval mode, without
        gradients.
        """
        ...

    def inputs(self, samples: Samples) -> tuple[Inputs, torch.Tensor]:
        """Raw samples as model inputs (normalised), on `device`."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """This client's stream of that name for this round."""
        ...

    def fresh(self, purpose: str, k: int) -> Tensors:
        """Returns a fresh random initialisation of the model, from the stream (purpose, k)."""
        ...

    def drawing(self, purpose: str) -> AbstractContextManager[None]:
        """Inside, the model's random draws (dropout) come from this client's stream of that name;
        `train` has its own.
        """
        ...

    def report(self, **values: float) -> None:
        """Records numbers in this client's line of clients.jsonl, at most 16 per round. They are
        sent with its reply, if the site's policy allows statistics.
        """
        ...


class ServerHost(Protocol):
    """The interface for the server's functions.

    round (from 1), device. clients: N, how many may train. cohort: ids whose replies were
    accumulated in this phase.
    staleness: updates between the model that a reply started from and the server's.
    lr: the clients' local learning rate of this round; lr_decay: over that of round 1. momentum,
    epochs: theirs. task: its loss and counts.
    public: held-out public samples, `public.train`; None where there are none. classes: C.
    features: width of what the model's head gets. layout: of the whole model; shared: of the part
    that crosses.
    """

    round: int
    staleness: int
    clients: int
    cohort: tuple[int, ...]
    lr: float
    lr_decay: float
    momentum: float
    epochs: int
    public: Data | None
    classes: int
    features: int
    device: torch.device
    layout: Layout
    shared: Layout
    task: Task

    def evaluate(self, x: Tensors, samples: Samples | Pair | None = None) -> Counts:
        """Counts of x on the public set, or on given samples: raw `Samples`, or model inputs (x, y)
        on `device`.
        """
        ...

    def fit(
        self,
        x: Tensors,
        samples: Samples,
        *,
        epochs: int,
        lr: float,
        batch_size: int,
        loss: Callable[[nn.Module, Inputs, torch.Tensor], torch.Tensor] | None = None,
    ) -> Tensors:
        """SGD on the server from x over samples of model inputs. loss(model, x, y): another mean
        loss than the task's.
        """
        ...

    def model(self, x: Tensors) -> nn.Module:
        """Returns a scratch module holding x, in eval mode (overwritten by the next call)."""
        ...

    def rng(self, purpose: str, client: int = -1) -> np.random.Generator:
        """Returns the server's stream of that name for this round; client: one for each client."""
        ...

    def report(self, **values: object) -> None:
        """Records these values for this round, under `algorithm`."""
        ...

    def warn(self, text: str) -> None:
        """Adds a sentence to the round's record; it is shown during the run."""
        ...
