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

from fednet import registry
from fednet.algorithms.base import Algorithm, ClientFacts, Payload, Tensors
from fednet.algorithms.secure import Secure, made, plan_sums
from fednet.config import Config, parts
from fednet.data.base import Data
from fednet.data.federation import Federation
from fednet.errors import ConfigError, FednetError
from fednet.experiment import determinism, selection, trial
from fednet.experiment.evaluations import (
    EVALUATED_MODELS,
    DetailedEvaluationReply,
    EvaluationReply,
    evaluation_payload,
)
from fednet.models.adapters import merged
from fednet.models.start import Start, packed, start, unpinned
from fednet.tensors import Layout
from fednet.training import metrics
from fednet.training.packed import check_model
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting
from fednet.training.tasks.classification import Classification
from fednet.training.tasks.regression import Regression
from fednet.wire import compress
from fednet.wire.codec import Codec, Encoded, not_finite
from fednet.wire.compress import Chain


@dataclass(frozen=True, eq=False)
class Experiment:
    """Holds what both sides build from one configuration. federation: None if sites bring their own
    data. shapes: of a model input, and the number of outputs. sha256, hollow: see `models.start`.
    unlike: the settings of clients with a model of their own.
    """

    config: Config
    algorithm: Algorithm
    setting: Setting
    data: Data | None
    federation: Federation | None
    down: Codec
    up: Codec
    shapes: tuple[tuple[int, ...], int]
    clients: int
    sha256: str = ""
    hollow: bool = False
    unlike: Mapping[int, Setting] = dataclasses.field(default_factory=dict)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Returns what a user should know of how the data were read."""
        return () if self.data is None else self.data.notes

    def setting_of(self, client: int) -> Setting:
        """Returns the setting of the client's own model."""
        return self.unlike.get(client, self.setting)

    @functools.cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Returns a setting for each model; the first is that of the run's model."""
        return tuple(dict.fromkeys((self.setting, *self.unlike.values())))

    @property
    def divided(self) -> Federation:
        """Returns the run's data. Not to be used where sites bring their own."""
        assert self.federation is not None
        return self.federation

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shapes[0]

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
    def agreed(self) -> Tensors:
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
            + (self.sha256 if self.base_comes else self.agreed.sha256())[:32]
        )

    @property
    def source(self) -> Source:
        """Returns the run's data, and what a model has to know of them."""
        return Source(self.data, self.federation, self.shapes, self.setting.classes)

    @property
    def base_comes(self) -> bool:
        return bool(self.config.model.base == "server")

    @functools.cached_property
    def base(self) -> Encoded | None:
        """Returns the model that training starts from, encoded, where the server sends it to each
        client once; None if sites make it.
        """
        sent = packed(self.holding(self.setting.initial)) if self.base_comes else None
        return None if sent is None else self.down.encode(sent)

    def starting_from(self, named: Mapping[str, torch.Tensor]) -> Experiment:
        """Returns this experiment, started from these tensors. Raises ConfigError if their model is
        not the configuration's.
        """
        made = _fitted(self.config, self.algorithm, self.source, named)
        return dataclasses.replace(made, down=self.down, up=self.up)

    def scratch(
        self, device: str | torch.device = "cpu", setting: Setting | None = None
    ) -> Scratch:
        """Returns a new model to work with. setting: of a client's own model."""
        setting, wanted = setting or self.setting, self.config.train.memory_format
        last = wanted == "channels_last" or (
            wanted == "auto" and torch.device(device).type == "cpu" and setting.innermost
        )
        return Scratch(setting.module, setting.layout, device, channels_last=last)

    def state_dict(self, x: Tensors, setting: Setting | None = None) -> dict[str, torch.Tensor]:
        """Returns the state dict of the configuration's model, as `load_state_dict(strict=True)`
        takes it: x, with adapters merged, and the initial values of all tensors that x lacks. Tied
        tensors stand under each of their names, each tensor with the model's type.
        """
        return merged(self.holding(x, setting))

    def holding(self, x: Tensors, setting: Setting | None = None) -> nn.Module:
        """Returns a module with x, and the initial values of what x lacks. Do not change it."""
        own = setting or self.setting
        return own.initial.merge(x.to("cpu")).into(own.blank)

    def facts(self, client: int) -> ClientFacts:
        if self.federation is None:
            # Any class may be there, in any number, so predictions are bounds.
            many = (2**31,) * (self.setting.classes or 0)
            return ClientFacts(0, many, 0, self.input_shape, 0, self.setting.features)
        features = self.setting_of(client).features
        return ClientFacts(**self.federation.facts(client), features=features)

    def samples(self, client: int) -> int:
        """Returns the most samples that the client can train on: its own, and the public ones."""
        return len(self.divided.parts[client]) + len(self.divided.public)

    def bounds(self, payload: type[Payload], client: int, round: int = 1) -> dict[str, int]:
        """Returns the largest size in bytes of each field whose declaration leaves it open."""
        if issubclass(payload, EvaluationReply):
            return {
                "more": len(EVALUATED_MODELS) * 2 * metrics.size(self.setting.more) * 8,
                "counts": len(EVALUATED_MODELS) * 2 * self.setting.counts_width * 8,
                "losses": len(EVALUATED_MODELS) * 8,
            }
        if isinstance(self.algorithm, Secure):
            return self.algorithm.most(payload, round)
        if not self.sized_by_client:
            # Nothing is left open. Counting a client's classes would be slow.
            return {}
        return self.algorithm.sizes(payload, self.facts(client))

    def predicted(
        self,
        payload: type[Payload],
        direction: str,
        client: int,
        sizes: Mapping[str, int] | None = None,
        round: int = 0,
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
                + codec.size_of(field.kind, field.form, bounds.get(name), round)[1]
            )
        return kinds

    @property
    def sized_by_client(self) -> bool:
        """Returns whether the payloads of clients may differ in size."""
        own = type(self.algorithm).sizes is not Algorithm.sizes
        return own or isinstance(self.algorithm, Secure)

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

    @property
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


def build_to_share(config: Config, root: Path | None) -> None:
    """Builds the experiment in a process that will fork others, so that they share its memory. Only
    for fednet's own parts, which start no thread and no CUDA. Errors are ignored here: the server
    meets them again and reports them.
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
            and all(part.__module__.partition(".")[0] == "fednet" for part in named)
        ):
            # OpenMP must have no threads, which do not survive a fork.
            torch.set_num_threads(1)
            # The trial is left to the forked processes: a backward pass could start threads.
            _shared = config, str(root), _built(config, root, None)


def build(
    config: Config,
    root: Path | str | None = None,
    data: Data | None = None,
    tried: bool = False,
    source: Source | None = None,
) -> Experiment:
    """Builds an experiment from its configuration, and tries it on one batch. data: a site's own
    data. tried: another process tries what was built before a fork. source: the run's data, where
    this process has them already. Raises ConfigError, DataError.
    """
    known = _shared if data is None and _shared is not None else None
    same = known is not None and known[:2] == (unpinned(config), str(root))
    if known is not None and same and config.model.sha256 in (None, known[2].sha256):
        exp = known[2]
    elif source is not None:
        exp = _fitted(config, made(config), source)
    else:
        exp = _built(config, root, data)
        tried = False
    if exp.data is not None and not tried:
        try_on(exp, exp.data)
    return exp


def try_on(experiment: Experiment, data: Data) -> None:
    """Tries each model on two samples of the data. Raises ConfigError."""
    for setting in experiment.settings:
        trial.fits(experiment.algorithm, setting, data)
        trial.merges(setting, experiment.shapes, data)


def _built(config: Config, root: Path | str | None, data: Data | None) -> Experiment:
    from fednet import data as rooms

    algorithm = made(config)
    federation = None
    if config.data.dataset == "site":
        from fednet.data.site import declared, outputs

        input_shape, classes = declared(config.data)
        width = outputs(config.data)
    else:
        data = rooms.load(config.data, root, config.seed)
        federation = rooms.split(
            data, config.data, config.clients, config.seed, uses_public=algorithm.uses_public
        )
        data = federation.data
        input_shape = data.input_shape
        classes = data.classes
        width = data.outputs
        trial.finite(data)  # a site's own data are checked where they are read
    source = Source(data, federation, (input_shape, width), classes or 0)
    return _fitted(config, algorithm, source)


def _fitted(
    config: Config,
    algorithm: Algorithm,
    source: Source,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Experiment:
    """Builds all but the data. given: see `settings_of`."""
    begun, setting, unlike = settings_of(config, algorithm, source, given)
    shared = setting.shared
    for direction in ("up", "down"):
        trial.check_chains(config, algorithm, direction)
    if isinstance(algorithm, Secure):
        held = None if source.federation is None else source.federation.parts
        cohort = functools.partial(selection.cohort, config)
        plan_sums(config, algorithm, shared, cohort, held)
    return Experiment(
        config,
        algorithm,
        setting,
        source.data,
        source.federation,
        *_codecs(config, shared, not_finite(setting.initial)),
        source.shapes,
        config.clients,
        begun.sha256,
        begun.hollow,
        unlike,
    )


# -- the settings of the models --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Source:
    """The run's data, and what a model has to know of them. data, federation: None if sites bring
    their own. shapes: of a model input, and the number of outputs.
    """

    data: Data | None
    federation: Federation | None
    shapes: tuple[tuple[int, ...], int]
    classes: int


def settings_of(
    config: Config,
    algorithm: Algorithm,
    source: Source,
    given: Mapping[str, torch.Tensor] | None,
) -> tuple[Start, Setting, dict[int, Setting]]:
    """Returns what training starts from, the setting of the run's model, and by client the settings
    of other models. given: the tensors that training starts from, where the server sent them.
    """
    first, *others = parts.each_model(config)
    begun = start(first, *source.shapes, given)
    setting = _setting(first, algorithm, source, begun)
    unlike = [_setting(own, algorithm, source, start(own, *source.shapes)) for own in others]
    _check_sizes(config, algorithm, source.shapes[0], [setting, *unlike])
    owners = parts.model_owners(config)
    return begun, setting, {client: unlike[place] for client, place in owners.items()}


def _setting(config: Config, algorithm: Algorithm, source: Source, begun: Start) -> Setting:
    module = begun.module
    layout = begun.layout
    shared = algorithm.shared(layout, module)
    trial.check_shared(config, algorithm, shared)
    if config.train.pack > 1:
        check_model(module, any(slot.role != "parameter" for slot in layout.slots))
    task = registry.task.get(config.task)()
    if source.classes:
        trial.check_class_weights(config, source.classes)
    classes = max(1, source.classes)
    width = classes
    data = source.data
    if data is not None and len(data.train[1]):
        # Tried on a module that is thrown away: a call may change what it keeps.
        if isinstance(task, Classification) and data.train[1].ndim > 1:
            task.class_axis = trial.sequence_axis(config, begun.factory(config.seed), data)
        if type(task) not in (Classification, Regression):
            width = trial.counts_width(config, begun.factory(config.seed), task, data)
    if config.data.dataset == "site" and width != classes:
        raise ConfigError(
            f"task {config.task}: it counts {width} classes, and the server, which has no data to "
            f"try it on, expects {classes}; let it count those that data.classes says, or one "
            f"where there are none."
        )
    more = trial.more_counts(config, begun.factory, task, classes, data)
    shape = source.shapes[0]
    return Setting.of(config, begun, shared, task, source.classes, width, more, data, shape)


def _check_sizes(
    config: Config, algorithm: Algorithm, input_shape: tuple[int, ...], settings: list[Setting]
) -> None:
    """Raises ConfigError if a message would not have the same size with all clients' models."""
    first, *others = settings
    payloads = [p for e in algorithm.exchanges for p in (e.down, e.up)]
    for other in others:
        one, two = (
            ClientFacts(0, (1,) * s.classes, 0, input_shape, 0, s.features) for s in (first, other)
        )
        if any(algorithm.sizes(p, one) != algorithm.sizes(p, two) for p in payloads):
            names = [s.config.model.name for s in (first, other)]
            raise ConfigError(
                f"model: the heads of {names[0]} and {names[1]} get {one.features} and "
                f"{two.features} features, and {config.algorithm.name} sends features; give models "
                f"whose heads get as many."
            )


# -- the codecs ------------------------------------------------------------------------------------
def _codecs(config: Config, shared: Layout, exempt: frozenset[str]) -> tuple[Codec, Codec]:
    """Returns the codecs for messages to clients, and to the server."""
    shapes = tuple(slot.shape for slot in shared.slots if slot.role == "parameter")

    def codec(way: str) -> Codec:
        chains = compress.chains(getattr(config.wire, way), f"wire.{way}", shapes)
        trial.check_memory(config, chains, f"wire.{way}")
        return Codec(shared, chains, buffers_cross(config.model.buffers, way == "down"), exempt)

    return codec("down"), codec("up")


def buffers_cross(buffers: str, down: bool) -> bool:
    """Returns whether BatchNorm's statistics are sent, to clients (down) or to the server, by
    `model.buffers`.
    """
    return buffers == "average" or (down and buffers == "server")
