"""What a method's functions get of the process that they run in: a `ClientHost` gives a client's
data and local training, a `ServerHost` the server's public set.

A `ClientHost` exists for one task of one client. A `ServerHost` exists for the whole run; `begin`
starts each round.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import msgspec
import numpy as np
import torch
from torch import nn

from fednet import seeds
from fednet.config import TrainSection
from fednet.data.augment import augment_with_targets as moved_together
from fednet.data.base import Data
from fednet.data.federation import Site
from fednet.tensors import Inputs, Layout, Tensors, map_inputs
from fednet.training.evaluation import Counts, counts_of, drawing, evaluate, recalibrate
from fednet.training.loop import Descent, Hooks, Loss, Trained, autocast, descend
from fednet.training.samples import piece
from fednet.training.scratch import Scratch, may_draw
from fednet.training.setting import Pair, SecureMachines, Setting, Splits, move_inputs
from fednet.training.tasks import LearningTask, labels_of
from fednet.wire.payload import LocalRun, Samples


class ClientHost:
    """What the client's functions of a method get. All of it is the site's own, or public."""

    client_id: int
    round: int
    """From 1."""
    phase: int
    device: torch.device
    n: int
    """This client's training samples."""
    classes: int
    """C."""
    lr: float
    """The local learning rate of this round, after the schedule. `client_update` may set it for its
    own `train`.
    """
    momentum: float
    train_config: TrainSection
    """The client's `train` section. `client_update` may set it for its own `train`."""
    task: LearningTask
    """Its loss and counts."""
    initial: Tensors
    """The whole model as initialised from the run's seed."""
    layout: Layout
    """Of the whole model."""
    shared: Layout
    """Of the part of the model that crosses."""
    head: tuple[str, ...]
    """Names of the last Linear's tensors."""
    trained: Tensors | None
    """The whole local model, by which the client is evaluated: `train` sets it. A loop of the
    method's own sets it (`Tensors.of(module)`) where it does not send the whole model up.
    """
    memory: dict[str, torch.Tensor] | None
    """Where `train.keep_optimizer` has its state; of several trainings in a task each has its own.
    """

    def __init__(
        self,
        setting: Setting,
        scratch: Scratch,
        client_id: int,
        round: int,
        phase: int = 0,
        *,
        splits: Splits | Site,
        rest: Tensors | None = None,
        progress: Callable[[int, int], None] | None = None,
        pack: Callable[[Descent], LocalRun] | None = None,
    ) -> None:
        """The process that makes it for a task gives it all of this.

        scratch: a model to work with; with `pack` one that all clients of the process have in
        common. splits: the client's samples, on the scratch's device. rest: tensors that are not
        sent (a client's own buffers); None: those of `initial`. progress(step, steps) is called
        after each optimizer step. pack(descent) trains this client together with others
        (`train.pack`), if the method uses the task's loss.
        """
        self.setting = setting
        self.pack = pack
        self._given = scratch
        self._lent: list[Scratch] = []
        self.secrets: SecureMachines | None = None
        self.client_id = client_id
        self.round = round
        self.phase = phase
        self._splits = splits
        self.rest = setting.initial if rest is None else setting.initial.to(rest.device).merge(rest)
        self.progress = progress
        self.memory = None
        self.trainings = 0
        self.trained = None
        self.reported: dict[str, float] = {}
        self.layout = setting.layout
        self.shared = setting.shared
        self.head = setting.head
        self.initial = setting.initial
        self.classes = setting.classes
        self.device = scratch.device
        self.train_config = train_config = setting.config.train_of(client_id)
        self.task = setting.task
        if train_config.class_weights:
            own = copy.copy(setting.task)  # a `Classification`, says the configuration
            own.class_weights = torch.tensor(train_config.class_weights, device=self.device)  # type: ignore[attr-defined]
            self.task = own
        self.n = splits.n
        self.lr = train_config.lr_at(round, setting.config.rounds)
        self.momentum = float(train_config.momentum)

    def close(self) -> None:
        """Gives back the models that it worked with: the next task may overwrite them."""
        if self._lent:
            self._given.take_back(self._lent)
            self._lent = []

    @cached_property
    def scratch(self) -> Scratch:
        """A model to work with. Clients that are trained together have one each if they need it."""
        return self._given if self.pack is None else self._borrow_scratch()

    def _borrow_scratch(self) -> Scratch:
        lent = self._given.lend()
        self._lent.append(lent)
        return lent

    @cached_property
    def data(self) -> Pair:
        """The client's training samples as model inputs (x, y), on `device`."""
        return self._splits.train

    @property
    def data_in_pack(self) -> Pair | Site:
        """The same, or their site, where they are gathered from a dataset of all clients."""
        splits = self._splits
        return splits if isinstance(splits, Site) and splits.together else self.data

    @cached_property
    def test(self) -> Pair:
        """The client's test samples, in the same form."""
        return self._splits.test

    @cached_property
    def class_counts(self) -> np.ndarray:
        """(C,) int64 training samples by class; all 0 if the targets are not classes."""
        y = self.data[1]
        if y.is_floating_point() or not self.classes:
            return np.zeros(self.classes or 0, dtype=np.int64)
        return torch.bincount(y[y >= 0].cpu(), minlength=self.classes).numpy()

    # -- models ------------------------------------------------------------------------------------
    def complete(self, x: Tensors) -> Tensors:
        """Returns x completed with the site's own tensors."""
        return x if x.layout == self.layout else self.rest.to(x.device).merge(x)

    def model(self, x: Tensors) -> nn.Module:
        """Returns a scratch module holding x (overwritten by the next call)."""
        self.scratch.load(self.complete(x))
        return self.scratch.in_eval_mode()

    def frozen(self, x: Tensors) -> nn.Module:
        """Returns a further module of the same architecture holding x, in eval mode, without
        gradients.
        """
        scratch = self._borrow_scratch()
        scratch.load(self.complete(x))
        module = scratch.in_eval_mode()
        for p in module.parameters():
            p.requires_grad_(False)
        return module

    def fresh(self, purpose: str, k: int) -> Tensors:
        """Returns a fresh random initialisation of the model, from the stream (purpose, k)."""
        seed = seeds.key(self.setting.config.seed, f"{purpose}/{k}", self.round, self.client_id)
        return Tensors.of(self.setting.factory(seed), self.layout)

    def drawing(
        self, purpose: str, loss: Callable[..., torch.Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Inside, the model's random draws (dropout) come from this client's stream of that name;
        `train` has its own. Only if something may draw is torch's generator seeded, which excludes
        other clients of the process meanwhile.
        """
        parts = (self.task,) if loss is None else (self.task, loss)
        if not self.scratch.may_draw and not any(map(may_draw, parts)):
            return contextlib.nullcontext()
        seed = self.setting.config.seed
        return seeds.scope(seed, purpose, self.round, self.client_id, self.device)

    # -- learning ----------------------------------------------------------------------------------
    def train(
        self,
        x: Tensors,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        loss: Loss | None = None,
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
        optimizer of the client's `train` section. x may be a part of the model (`shared`); the
        result has x's layout.

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
        setting = self.setting
        config = self.train_config
        start = self.complete(x)
        own: Pair | Site = (
            self.data_in_pack if self.pack is not None and loss is None else self.data
        )
        if more is not None and len(more):
            inputs, labels = self.data
            added, given = self.inputs(more)
            labels = torch.cat([labels, given.to(labels.dtype)])
            own = map_inputs(inputs, lambda *parts: torch.cat(parts), added), labels
        where = "" if stream == "order" else f"/{stream}"  # part of the names of random draws
        recipe = msgspec.structs.replace(
            config,
            lr=float(self.lr),
            epochs=config.epochs if epochs is None else epochs,
            steps=config.steps if epochs is None and steps is None else steps,
        )
        descent = Descent(
            self._given,
            own,
            recipe,
            self.rng(stream),
            Hooks(proximal, toward, add_to_grad, scale_grad, add_to_step, only),
            progress=self.progress,
            graphs=config.graphs and loss is None and self.task is setting.task,
        )
        place = f"optimizer/{self.phase}/{self.trainings}/"
        self.trainings += 1
        kept = self.memory
        if kept is not None:
            found = {k.removeprefix(place): v for k, v in kept.items() if k.startswith(place)}
            descent.memory = found
        if self.pack is not None and loss is None and descent.steps and descent.trained:
            seed = setting.config.seed
            if self._given.may_draw:
                name = "dropout" + where
                descent.draws = seeds.key(seed, name, self.round, self.client_id)
            descent.start = start
            run = self.pack(descent)
            self.trained = descent.after
        else:
            descent.scratch = self.scratch
            self.scratch.load(start)
            augment = None
            if (change := setting.augment) is not None:
                seed = setting.config.seed
                draws = seeds.torch_rng(seed, "augment" + where, self.round, self.client_id)
                augment = lambda x, y: moved_together(change, x, y, draws)  # noqa: E731
            beside = None if extra is None else extra.to(self.device)
            with self.drawing("dropout" + where, loss):
                run, extra = descend(descent, self.task, loss, extra=beside, augment=augment)
            self.trained = self.scratch.values(give_away=True)
        if kept is not None:
            kept.update({place + name: value for name, value in (descent.memory or {}).items()})
        assert self.trained is not None
        return Trained(self.trained.select(x.layout), run, extra)

    def gradient(self, x: Tensors) -> Trained:
        """Returns the gradient of the mean loss over the whole local set at x, in eval mode for
        buffers. `.x` has x's layout: the gradient, and x's own buffers.
        """
        at = self.complete(x)
        self.scratch.load(at)
        # A method that never trains is evaluated with the model of its gradient.
        if self.trained is None:
            self.trained = at
        scratch = self.scratch
        inputs, labels = self.data
        module = scratch.module.eval()
        size = self.train_config.batch_size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        cast, scale = autocast(self.train_config.precision, self.device)
        counts = labels_of(self.task, labels)  # batches are weighted by their size
        sizes = [1] * self.n if counts is None else counts.tolist()
        whole = max(1, sum(sizes))
        try:
            for start in range(0, self.n, size):
                end = min(start + size, self.n)
                with cast:
                    value = self.task.loss(module(piece(inputs, start, end)), labels[start:end])
                share = sum(sizes[start:end]) / whole
                (value if share * scale == 1.0 else value * (share * scale)).backward()
                total.add_(value.detach(), alpha=share)
            gradient = scratch.values()
            gradient.vector.zero_()
            for name, p in scratch.parameters.items():
                if p.grad is not None:
                    gradient[name].copy_(p.grad if scale == 1.0 else p.grad / scale)
        finally:
            for p in scratch.parameters.values():
                p.grad = None
        return Trained(gradient.select(x.layout), LocalRun(self.n, 0, float(total)))

    def recalibrate(self, x: Tensors) -> Tensors:
        """Returns the whole model x with BatchNorm statistics of the client's training samples."""
        size = self.setting.config.evaluate.batch_size
        return recalibrate(self.scratch, self.complete(x), self.data[0], size)

    def evaluate(
        self, model: Tensors | Callable[[Inputs], torch.Tensor], data: Pair | None = None
    ) -> Counts:
        """Evaluates weights, or a function from `Algorithm.personal_model`, on the client's test
        split or on given inputs.
        """
        data = data or self.test
        task = self.setting.task
        size = self.setting.config.evaluate.batch_size
        more = tuple(self.setting.more)
        with drawing(self.scratch, self.device):  # a function may call the module
            if isinstance(model, Tensors):
                return counts_of(self.model(model), data, task, size, more)
            return evaluate(model, data, task, size, more)

    # -- the rest ----------------------------------------------------------------------------------
    def inputs(self, samples: Samples) -> Pair:
        """Raw samples as model inputs (normalised), on `device`."""
        return self.setting.inputs(samples, self.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """This client's stream of that name for this round."""
        return seeds.rng(self.setting.config.seed, purpose, self.round, self.client_id)

    def report(self, **values: float) -> None:
        """Records numbers in this client's line of clients.jsonl, at most 16 per round. They are
        sent with its reply, if the site's policy allows statistics.
        """
        self.reported.update({name: float(value) for name, value in values.items()})


class ServerHost:
    """What the server's functions of a method get."""

    round: int
    """From 1."""
    device: torch.device
    clients: int
    """N, how many may train."""
    cohort: tuple[int, ...]
    """Ids whose replies were accumulated in this phase."""
    staleness: int
    """Updates between the model that a reply started from and the server's."""
    lr: float
    """The clients' local learning rate of this round."""
    lr_decay: float
    """The same, divided by that of round 1."""
    momentum: float
    """The clients'."""
    epochs: int
    """The clients'."""
    task: LearningTask
    """Its loss and counts."""
    public: Data | None
    """Held-out public samples, `public.train`; None where there are none."""
    classes: int
    """C."""
    features: int
    """Width of what the model's head gets."""
    layout: Layout
    """Of the whole model."""
    shared: Layout
    """Of the part of the model that crosses."""
    reported: dict[str, object]
    """What the method reported in this round."""
    warnings: list[str]
    """What the method warned of in this round."""
    blamed: dict[int, str]
    """By client, how it broke a protocol of secure aggregation."""

    def __init__(
        self,
        setting: Setting,
        scratch: Callable[[], Scratch],
        clients: int,
        public: Data | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.setting = setting
        self._scratch = scratch
        self.clients = clients
        self.public = public
        self.layout = setting.layout
        self.shared = setting.shared
        self.task = setting.task
        self.classes = setting.classes
        self.features = setting.features
        self.device = torch.device(device)
        self.epochs = int(setting.config.train.epochs)
        self.momentum = float(setting.config.train.momentum)
        self.staleness = 0
        # Of secure aggregation, by client: the round and the digest of its last masked vector.
        self.last_masked: dict[int, tuple[int, bytes]] = {}
        self.begin(1)

    def begin(self, round: int, phase: int = 0, cohort: Sequence[int] = ()) -> None:
        """Begins a phase. cohort: the clients whose replies are aggregated, in ascending order."""
        self.round = round
        self.phase = phase
        self.cohort = tuple(cohort)
        self.lr = self.setting.lr(round)
        self.lr_decay = self.lr / self.setting.lr(1)
        if phase == 0:
            self.reported = {}
            self.warnings = []
            self.blamed = {}

    @cached_property
    def scratch(self) -> Scratch:
        """A model to work with, on `device`, made when it is first needed; a server that only
        aggregates needs none.
        """
        return self._scratch()

    @cached_property
    def public_inputs(self) -> Pair:
        """The public set as model inputs on `device`, normalised once."""
        assert self.public is not None
        x, y = self.public.train
        return self.setting.inputs(Samples(x, y), self.device)

    def model(self, x: Tensors) -> nn.Module:
        """Returns a scratch module holding x, in eval mode (overwritten by the next call)."""
        return self.scratch.load(
            x if x.layout == self.layout else self.setting.initial.to(x.device).merge(x)
        ).eval()

    def recalibrate(self, x: Tensors, inputs: Inputs) -> Tensors:
        """Returns x with BatchNorm statistics of `inputs`, which are on `device`."""
        whole = self.setting.initial.to(x.device).merge(x)
        size = self.setting.config.evaluate.batch_size
        return recalibrate(self.scratch, whole, inputs, size).select(x.layout)

    def evaluate(self, x: Tensors) -> Counts:
        """Evaluates x on the public set."""
        size = self.setting.config.evaluate.batch_size
        return evaluate(self.model(x), self.public_inputs, self.task, size)

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
        self.model(x)
        inputs = move_inputs(samples.x, self.device), samples.y.to(self.device)
        precision = self.setting.config.train.precision
        recipe = TrainSection(lr=lr, epochs=epochs, batch_size=batch_size, precision=precision)
        descent = Descent(self.scratch, inputs, recipe, self.rng("fit"))
        with seeds.scope(self.setting.config.seed, "dropout/fit", self.round, device=self.device):
            descend(descent, self.task, loss)
        return self.scratch.values().select(x.layout)

    def rng(self, purpose: str) -> np.random.Generator:
        """Returns the server's stream of that name for this round."""
        return seeds.rng(self.setting.config.seed, purpose, self.round)

    def report(self, **values: object) -> None:
        """Records these values for this round, under `algorithm`."""
        self.reported.update(values)

    def warn(self, text: str) -> None:
        """Adds a sentence to the round's record; it is shown during the run."""
        self.warnings.append(text)
