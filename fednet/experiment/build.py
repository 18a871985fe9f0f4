"""An experiment: what both sides build from one configuration.

Server and clients build the same data division, model, layout, algorithm and codecs, each on its
own machine, from the same configuration and seed; a digest of the layout, compared at join, tells
where they differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednet import models, registry
from fednet.algorithms.base import Algorithm, ClientFacts, Payload, Tensors
from fednet.algorithms.making import is_secure, make_method
from fednet.config import Config, parts
from fednet.data import ahead, augment, division, loading
from fednet.data.base import Data
from fednet.data.datasets import site
from fednet.data.federation import Federation
from fednet.errors import ConfigError, FednetError
from fednet.experiment import determinism, selection, trial
from fednet.experiment.evaluations import (
    EVALUATED_MODELS,
    DetailedEvaluationReply,
    EvaluationReply,
    evaluation_payload,
)
from fednet.models.adapters import merged_state_dict
from fednet.models.start import Start, pack_state_dict, start, with_model_digest
from fednet.models.trained import moves
from fednet.tensors import Layout
from fednet.training import metrics
from fednet.training.packed import check_model
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting
from fednet.wire import compress
from fednet.wire.codec import Codec, Encoded, not_finite
from fednet.wire.compress import Chain
from fednet.wire.payload import TENSORS


@dataclass(frozen=True, eq=False)
class Experiment:
    """Holds what both sides build from one configuration."""

    config: Config
    algorithm: Algorithm
    setting: Setting
    data: Data | None
    federation: Federation | None
    """None if sites bring their own data."""
    down: Codec
    up: Codec
    sha256: str
    """Of the initial model (see `models.start`); "" if it is not needed."""
    hollow: bool
    """Whether the server has not sent the initial model's values yet."""
    unlike: Mapping[int, Setting]
    """The settings of clients with a model of their own."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Returns what a user should know of how the data were read, and of the task."""
        if self.data is None:
            return ()
        return *self.data.notes, *trial.remarks(self.setting, self.data)

    def setting_of(self, client: int) -> Setting:
        """Returns the setting of the client's own model."""
        return self.unlike.get(client, self.setting)

    @functools.cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Returns a setting for each model; the first is that of the run's model."""
        return tuple(dict.fromkeys((self.setting, *self.unlike.values())))

    @functools.cached_property
    def known_federation(self) -> Federation:
        """Returns the run's data. Not to be used where sites bring their own."""
        assert self.federation is not None
        return self.federation

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.setting.input_shape

    @property
    def shared(self) -> Layout:
        return self.setting.shared

    @functools.cached_property
    def exact(self) -> Codec:
        """Encodes the model for an evaluation, with lossless compressors only."""
        return Codec(
            self.shared,
            {
                kind: Chain(lossless=chain.lossless, text=chain.text[-1:])
                for kind, chain in self.down.chains.items()
                if not chain.lossy and chain.lossless is not None
            },
            self.down.buffers,
        )

    @functools.cached_property
    def initial_shared(self) -> Tensors:
        """Returns the model that every client has: the initial one. A state that is compressed with
        loss is sent as the difference to it.
        """
        return self.setting.initial.select(self.shared)

    @functools.cached_property
    def digest(self) -> str:
        """Returns a digest of what both sides must agree on before the first task: the layout, and
        the model that differences are to.
        """
        chain = self.down.chains.get("state")
        if self.unlike:
            layouts = "".join(setting.layout.digest for setting in self.settings)
            return hashlib.sha256(layouts.encode()).hexdigest()
        if chain is None or not chain.lossy:
            return self.shared.digest
        return (
            self.shared.digest[:32]
            + (self.sha256 if self.base_comes else self.initial_shared.sha256())[:32]
        )

    @functools.cached_property
    def base_comes(self) -> bool:
        return self.config.model.base == "server"

    @functools.cached_property
    def base(self) -> Encoded | None:
        """Returns the model that training starts from, encoded, where the server sends it to each
        client once; None if sites make it.
        """
        if not self.base_comes:
            return None
        return self.down.encode(pack_state_dict(self.holding(self.setting.initial)))

    def starting_from(self, named: Mapping[str, torch.Tensor]) -> Experiment:
        """Returns this experiment, started from these tensors. Raises ConfigError if their model is
        not the configuration's.
        """
        made = _build_around_data(self.config, self.algorithm, self.data, self.federation, named)
        return dataclasses.replace(made, down=self.down, up=self.up)

    def scratch(
        self, device: str | torch.device = "cpu", setting: Setting | None = None
    ) -> Scratch:
        """Returns a new model to work with. setting: of a client's own model."""
        setting = setting or self.setting
        last = self.channels_last(setting, device)
        return Scratch(setting.borrowed, setting.layout, device, channels_last=last)

    def channels_last(self, setting: Setting, device: str | torch.device) -> bool:
        """Returns whether kernels of the model have their channels innermost in memory there."""
        wanted = self.config.train.memory_format
        if wanted != "auto":
            return wanted == "channels_last"
        return torch.device(device).type == "cpu" and setting.innermost

    def state_dict(self, x: Tensors, setting: Setting | None = None) -> dict[str, torch.Tensor]:
        """Returns the state dict of the configuration's model, as `load_state_dict(strict=True)`
        takes it: x, with adapters merged, and the initial values of all tensors that x lacks. Tied
        tensors stand under each of their names, each tensor with the model's type. Valid until the
        next call of this or of `holding`.
        """
        return merged_state_dict(self.holding(x, setting))

    def holding(self, x: Tensors, setting: Setting | None = None) -> nn.Module:
        """Returns a module with x, and the initial values of what x lacks. Do not change it."""
        own = setting or self.setting
        return own.initial.merge(x.to("cpu")).into(own.blank)

    def facts(self, client: int) -> ClientFacts:
        if self.federation is None:
            # Any class may be there, in any number, so predictions are bounds.
            many = (2**31,) * (self.setting.classes or 0)
            return ClientFacts(0, many, 0, self.input_shape, 0, self.setting.features)
        site = self.federation.site(client)
        return ClientFacts(
            site.n,
            tuple(site.class_counts.tolist()),
            site.data.sample_nbytes,
            self.input_shape,
            len(self.federation.public),
            self.setting_of(client).features,
        )

    def samples(self, client: int) -> int:
        """Returns the most samples that the client can train on: its own, and the public ones."""
        return len(self.known_federation.parts[client]) + len(self.known_federation.public)

    def bounds(self, payload: type[Payload], client: int, round: int = 1) -> dict[str, int]:
        """Returns the largest size in bytes of each field whose declaration leaves it open."""
        if issubclass(payload, EvaluationReply):
            return {
                "more": len(EVALUATED_MODELS) * 2 * metrics.size(self.setting.more) * 8,
                "counts": len(EVALUATED_MODELS) * 2 * self.setting.counts_width * 8,
                "losses": len(EVALUATED_MODELS) * 8,
            }
        if not self.sized_by_client:
            # Nothing is left open. Counting a client's classes would be slow.
            return {}
        if is_secure(self.algorithm):
            return self.algorithm.most(payload, round)
        return self.algorithm.sizes(payload, self.facts(client))

    def payload_bytes(
        self,
        payload: type[Payload],
        direction: str,
        client: int,
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Returns the bytes by kind of one payload for one client: exact, but a bound with zstd or
        where sites bring their own data. sizes: of fields whose declaration leaves them open, if
        known.
        """
        codec = getattr(self, direction)
        kinds = dict[str, int]()
        bounds = self.bounds(payload, client) if sizes is None else sizes
        for name, field in payload.fields.items():
            kinds[field.kind] = (
                kinds.get(field.kind, 0)
                + codec.size_of(field.kind, field.form, bounds.get(name))[1]
            )
        return kinds

    @functools.cached_property
    def sized_by_client(self) -> bool:
        """Returns whether the payloads of clients may differ in size."""
        own = type(self.algorithm).sizes is not Algorithm.sizes
        return own or is_secure(self.algorithm)

    @property
    def predictable(self) -> bool:
        """Returns whether sizes can be predicted: not where they depend on data that only sites
        have.
        """
        return self.federation is not None or type(self.algorithm).sizes is Algorithm.sizes

    @functools.cached_property
    def evaluation(self) -> type[Payload]:
        """Returns the type of the message that asks a client to evaluate."""
        latest = self.config.evaluate.shared == "latest"
        return evaluation_payload(type(self.algorithm), latest)

    @functools.cached_property
    def evaluation_reply(self) -> type[EvaluationReply]:
        """Returns the type of a client's reply to an evaluation."""
        return DetailedEvaluationReply if self.setting.more else EvaluationReply

    @property
    def uncalibrated(self) -> bool:
        """Returns whether the shared model has the initial BatchNorm statistics, since clients do
        not send theirs.
        """
        return self.config.model.buffers != "average" and self.setting.batch_norm


_shared: tuple[Config, str, Experiment] | None = None  # built by a process before it forked others


def build_to_share(config: Config, root: Path | None, device: str) -> None:
    """Builds the experiment in a process that will fork others, so that they share its memory. Only
    for fednet's own parts, which start no thread and no CUDA. Errors are ignored here: the server
    meets them again and reports them. device: of the others.
    """
    global _shared
    with contextlib.suppress(FednetError, OSError):
        determinism.choose_kernels(config.train.portable)
        named = (
            registry.algorithm.get(config.algorithm.name),
            *(registry.model.get(own.model.name) for own in parts.each_model(config)),
            registry.dataset.get(config.data.dataset),
        )
        if (
            config.data.dataset != "site"
            and not config.load
            and all(registry.shipped(part.__module__) for part in named)
        ):
            # OpenMP must have no threads, which do not survive a fork.
            torch.set_num_threads(1)
            # The trial is left to the forked processes: a backward pass could start threads.
            built = _build_from(config, root, None)
            for setting in built.settings:
                # A model is made and tried for it: here once, instead of once a worker.
                built.channels_last(setting, device)
            _shared = config, str(root), built


def build(
    config: Config,
    root: Path | str | None = None,
    data: Data | None = None,
    tried: bool = False,
    like: Experiment | None = None,
    for_client: bool = False,
) -> Experiment:
    """Builds an experiment from its configuration, and tries it on one batch. data: a site's own
    data. tried: another process tries what was built before a fork. like: one of this process, that
    has the run's data already. for_client: a client needs no test samples where no client is
    evaluated. Raises ConfigError, DataError.
    """
    known = _shared if data is None else None
    if (
        known is not None
        and known[:2] == (with_model_digest(config, None), str(root))
        and config.model.sha256 in (None, known[2].sha256)
    ):
        exp = known[2]
    elif like is not None:
        exp = _build_around_data(config, make_method(config), like.data, like.federation)
    else:
        exp = _build_from(config, root, data, for_client)
        tried = False
    if exp.data is not None and not tried:
        try_on(exp, exp.data)
    return exp


def try_on(experiment: Experiment, data: Data) -> None:
    """Tries each model on two samples of the data. Raises ConfigError."""
    for setting in experiment.settings:
        trial.fits(experiment.algorithm, setting, data)
        trial.merges(setting, data)


def _build_from(
    config: Config, root: Path | str | None, data: Data | None, for_client: bool = False
) -> Experiment:
    algorithm = make_method(config)
    if config.data.dataset == "site":
        return _build_around_data(config, algorithm, data, None)
    with_test = ahead.with_test(config, for_client)
    federation = division.split(
        loading.load(config.data, root, config.seed, with_test=with_test),
        config.data,
        config.clients,
        config.seed,
        uses_public=algorithm.uses_public,
    )
    trial.finite(federation.data)  # a site's own data are checked where they are read
    return _build_around_data(config, algorithm, federation.data, federation)


def _build_around_data(
    config: Config,
    algorithm: Algorithm,
    data: Data | None,
    federation: Federation | None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Experiment:
    """Builds all but the data. given: the tensors that training starts from, where the server sent
    them.
    """
    if federation is not None:
        input_shape = federation.data.input_shape
        outputs = federation.data.outputs
        classes = federation.data.classes or 0
    else:
        input_shape, declared, outputs = site.declared_form(config.data)
        classes = declared or 0
        augment.check_shape(config.data.augment, input_shape)
    first, *others = parts.each_model(config)
    begun = start(first, input_shape, outputs, given)
    starts = [begun, *(start(own, input_shape, outputs) for own in others)]
    setting, *unlike = (
        _setting(own, algorithm, one, data, input_shape, classes)
        for own, one in zip((first, *others), starts)
    )
    # A message has to have the same size with all clients' models.
    payloads = [p for e in algorithm.exchanges for p in (e.down, e.up)]
    for other in unlike:
        one, two = (
            ClientFacts(0, (1,) * classes, 0, input_shape, 0, s.features) for s in (setting, other)
        )
        if any(algorithm.sizes(p, one) != algorithm.sizes(p, two) for p in payloads):
            names = [s.config.model.name for s in (setting, other)]
            raise ConfigError(
                f"model: the heads of {names[0]} and {names[1]} get {one.features} and "
                f"{two.features} features, and {config.algorithm.name} sends features; give models "
                f"whose heads get as many."
            )
    shared = setting.shared
    if is_secure(algorithm):
        from fednet.algorithms.secure import plan_sums

        held = None if federation is None else federation.parts
        cohort = functools.partial(selection.cohort, config)
        plan_sums(config, algorithm, shared, cohort, held)
    exempt = not_finite(setting.initial)
    owners = parts.model_owners(config)
    return Experiment(
        config,
        algorithm,
        setting,
        data,
        federation,
        down=_codec(config, algorithm, "down", shared, exempt),
        up=_codec(config, algorithm, "up", shared, exempt),
        sha256=begun.sha256,
        hollow=begun.hollow,
        unlike={client: unlike[place] for client, place in owners.items()},
    )


def _setting(
    config: Config,
    algorithm: Algorithm,
    begun: Start,
    data: Data | None,
    input_shape: tuple[int, ...],
    classes: int,
) -> Setting:
    """Builds the setting of one model. Raises ConfigError if the model or the task does not fit the
    configuration or the method.
    """
    layout = begun.layout
    module = begun.module
    shared = algorithm.shared(layout, module)
    part = config.train.only or config.model.adapters is not None
    if part and type(algorithm).shares() and not shared.sizes[0]:
        key = "train.only" if config.train.only else "model.adapters"
        raise ConfigError(
            f"{key}: with it {config.algorithm.name} has nothing to send, because the part of "
            f"the model that it shares is frozen. Train more of the model, or use a method "
            f"that shares all of it (fedavg)."
        )
    if config.train.pack > 1:
        check_model(module, any(slot.role != "parameter" for slot in layout.slots))
    weights = {"train": config.train.class_weights}
    for clients, own in config.train.per_client.items():
        weights[f"train.per_client.{clients}"] = own.class_weights or ()
    for where, given in weights.items():
        if classes and given and len(given) != classes:
            raise ConfigError(
                f"{where}.class_weights: expected one weight for each of the {classes} classes, "
                f"got {len(given)}."
            )
    task = registry.task.get(config.task)()
    width, more = trial.counting(config, begun.factory, task, classes, data)
    if config.data.dataset == "site" and width != max(1, classes):
        raise ConfigError(
            f"task {config.task}: it counts {width} classes, and the server, which has no data to "
            f"try it on, expects {max(1, classes)}; let it count those that data.classes says, or "
            f"one where there are none."
        )
    initial = Tensors.of(module, layout)
    # A user's model may hold functions that refer to it, and so would those of a copy.
    own = registry.shipped(registry.model.get(config.model.name).__module__)
    built = initial.within(module) if own and config.model.adapters is None else None
    return Setting(
        layout=layout,
        shared=shared,
        head=models.head_names(module),
        initial=initial,
        config=config,
        task=task,
        classes=classes,
        counts_width=width,
        more=more,
        factory=begun.factory,
        normalise=None if data is None else data.inputs,
        augment=augment.get(config.data.augment),
        features=models.head_width(module),
        input_shape=input_shape,
        batch_norm=moves(module, layout, _BatchNorm),
        convolutions=any(isinstance(part, nn.Conv2d) for part in module.modules()),
        built=built,
    )


def _codec(
    config: Config, algorithm: Algorithm, way: str, shared: Layout, exempt: frozenset[str]
) -> Codec:
    """Returns the codec of messages to clients (way: down) or to the server (up). Raises
    ConfigError for compressors that do not fit what the method sends, or the schedule.
    """
    payloads = [getattr(e, way) for e in algorithm.exchanges]
    if way == "down" and algorithm.Enrolment is not None:
        payloads.append(algorithm.Enrolment)
    fields = [(name, f) for payload in payloads for name, f in payload.fields.items()]
    can = sorted({f.kind for _, f in fields if f.form in TENSORS})
    section = getattr(config.wire, way)
    for kind, items in section.items():
        # A kind that the method does not send at all is no error: one configuration may serve
        # several methods.
        ours = [name for name, f in fields if f.kind == kind]
        if items and ours and kind not in can:
            raise ConfigError(
                f"wire.{way}.{kind}: {config.algorithm.name} sends {ours[0]!r} of this kind, which "
                f"is no tensor of the model; "
                f"compressors apply to {' and '.join(can) or 'nothing that it sends'}."
            )
    shapes = tuple(slot.shape for slot in shared.slots if slot.role == "parameter")
    chains = compress.chains(section, f"wire.{way}", shapes)
    for kind, chain in chains.items():
        if config.schedule.mode != "sync" and chain.shared:
            raise ConfigError(
                f"wire.{way}.{kind}: {chain.text[0]} needs both ends in step, round by round, "
                f"which schedule.mode: {config.schedule.mode} does not have; use ef."
            )
    return Codec(shared, chains, buffers_cross(config.model.buffers, way == "down"), exempt)


def buffers_cross(buffers: str, down: bool) -> bool:
    """Returns whether BatchNorm's statistics are sent, to clients (down) or to the server, by
    `model.buffers`.
    """
    return buffers == "average" or (down and buffers == "server")
