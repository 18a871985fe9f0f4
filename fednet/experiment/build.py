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
from fednet.algorithms.secure import Secure, made, planned
from fednet.config import Config, parts
from fednet.data.base import Data
from fednet.data.federation import Federation
from fednet.errors import FednetError
from fednet.experiment import determinism, selection, trial
from fednet.experiment.judging import JUDGED, Judgement, evaluation_payload
from fednet.experiment.settled import Source, settled
from fednet.models.adapters import merged
from fednet.models.base import packed
from fednet.models.start import unpinned
from fednet.tensors import Layout
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting
from fednet.wire import compress
from fednet.wire.codec import Codec, Encoded, not_finite


@dataclass(frozen=True, eq=False)
class Experiment:
    """See the module. federation: None where sites bring their own data. shapes: of a model input,
    and the number of outputs. sha256, hollow: see `models.start`.
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
    unlike: Mapping[int, Setting] = dataclasses.field(default_factory=dict)  # by client, if another
    remarks: tuple[str, ...] = ()  # of its data and its trial

    def setting_of(self, client: int) -> Setting:
        """The setting of the client's own model."""
        return self.unlike.get(client, self.setting)

    @functools.cached_property
    def settings(self) -> tuple[Setting, ...]:
        """One a model, the first model's first."""
        return tuple(dict.fromkeys((self.setting, *self.unlike.values())))

    @property
    def divided(self) -> Federation:
        """The run's data; nobody may ask for them where sites bring their own."""
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
        """What comes down to be judged is judged as it is: only lossless compressors apply."""
        return Codec(
            self.shared,
            {k: c.plain() for k, c in self.down.chains.items() if not c.lossy and c.plain().parts},
            self.down.buffers,
        )

    @functools.cached_property
    def agreed(self) -> Tensors:
        """The last model that every client has, whenever it took part: the initial one. A lossily
        compressed state comes down as the difference to it.
        """
        return self.setting.initial.select(self.shared)

    @functools.cached_property
    def digest(self) -> str:
        """What both sides must agree on before the first task: the layout, and the values that
        differences are to, which may be yet to come.
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
    def base_comes(self) -> bool:
        return bool(self.config.model.base == "server")

    @functools.cached_property
    def base(self) -> Encoded | None:
        """The model that training starts from, as it crosses to each client once; None where the
        sites make it.
        """
        sent = packed(self.holding(self.setting.initial)) if self.base_comes else None
        return None if sent is None else self.down.encode(sent)

    def starting_from(self, named: Mapping[str, torch.Tensor]) -> Experiment:
        """This, where that model came. Raises ConfigError where it is another."""
        source = Source(self.data, self.federation, self.shapes, self.setting.classes)
        made = _fitted(self.config, self.algorithm, source, named)
        return dataclasses.replace(made, down=self.down, up=self.up)

    def scratch(
        self, device: str | torch.device = "cpu", setting: Setting | None = None
    ) -> Scratch:
        """A model of its own to work with; setting: of a client's own model."""
        setting, wanted = setting or self.setting, self.config.train.memory_format
        last = wanted == "channels_last" or (
            wanted == "auto" and torch.device(device).type == "cpu" and setting.innermost
        )
        return Scratch(setting.module(), setting.layout, device, channels_last=last)

    def state_dict(self, x: Tensors, setting: Setting | None = None) -> dict[str, torch.Tensor]:
        """What `load_state_dict(strict=True)` of the configuration's model takes: x, what it leaves
        out as it was initially, and all that is not trained, its adapters merged; tied tensors
        under each of their names, each tensor of the type that the model gives it.
        """
        return merged(self.holding(x, setting))

    def holding(self, x: Tensors, setting: Setting | None = None) -> nn.Module:
        """The module to look at, holding x, and what it leaves out as it was initially."""
        own = setting or self.setting
        return own.initial.merge(x.to("cpu")).into(own.blank)

    def facts(self, client: int) -> ClientFacts:
        if self.federation is None:
            # A site's own data: any class may be there, in any number, so what is predicted is a
            # bound.
            many = (2**31,) * (self.setting.classes or 0)
            return ClientFacts(0, many, 0, self.input_shape, 0, self.setting.features)
        features = self.setting_of(client).features
        return ClientFacts(**self.federation.facts(client), features=features)

    def samples(self, client: int) -> int:
        """The most samples that the client can train on: its own, and the public ones."""
        return len(self.divided.parts[client]) + len(self.divided.public)

    def bounds(self, payload: type[Payload], client: int, round: int = 1) -> dict[str, int]:
        """Largest size in bytes of the fields whose declaration leaves it open."""
        if payload is Judgement:
            return {
                "counts": len(JUDGED) * 2 * self.setting.counts_width * 8,
                "losses": len(JUDGED) * 8,
            }
        if isinstance(self.algorithm, Secure):
            return self.algorithm.most(payload, round)
        if not self.sized_by_client:
            # nothing is left open; to count a client's classes for it would be the dearest part of
            # a small reply
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
        """Bytes by kind of one payload for one client: exact, but a bound with zstd or a site's own
        data. sizes: of fields whose declaration leaves them open, where they are known.
        """
        codec, kinds = getattr(self, direction), dict[str, int]()
        bounds = self.bounds(payload, client) if sizes is None else sizes
        for name, field in payload.fields.items():
            kinds[field.kind] = (
                kinds.get(field.kind, 0)
                + codec.size_of(field.kind, field.form, bounds.get(name), round)[1]
            )
        return kinds

    @property
    def sized_by_client(self) -> bool:
        """Whether one client's payloads may be larger than another's."""
        own = type(self.algorithm).sizes is not Algorithm.sizes
        return own or isinstance(self.algorithm, Secure)

    @property
    def predictable(self) -> bool:
        """Whether sizes are known here: not where they depend on data that the sites keep to
        themselves.
        """
        return self.federation is not None or type(self.algorithm).sizes is Algorithm.sizes

    @functools.cached_property
    def evaluation(self) -> type[Payload]:
        """What comes down when all clients are asked to evaluate."""
        latest = self.config.evaluate.shared == "latest"
        return evaluation_payload(type(self.algorithm), latest)

    @property
    def uncalibrated(self) -> bool:
        """Whether the shared model's BatchNorm statistics are the initial ones: what the clients
        measured does not come up.
        """
        return self.config.model.buffers != "average" and self.setting.batch_norm


_shared: tuple[Config, str, Experiment] | None = None  # built by a process before it forked others


def build_to_share(config: Config, root: Path | None) -> None:
    """Builds what the processes that are forked from this one will ask `build` for, so that they
    share its memory: only of fednet's own parts, which start no thread and no CUDA. What is wrong
    with the configuration or the data is not said here but by the server, which meets it again.
    """
    global _shared
    with contextlib.suppress(FednetError, OSError):
        determinism.choose(config.train.portable)
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
            # Else OpenMP would have threads, which do not live through a fork.
            torch.set_num_threads(1)
            # Tried by those that ask for it: a backward pass here could start threads.
            _shared = config, str(root), _built(config, root, None)


def build(
    config: Config, root: Path | str | None = None, data: Data | None = None, tried: bool = False
) -> Experiment:
    """Everything from the configuration, tried on one batch. `data`: a site's own `Data`, where
    sites bring their own. tried: what was built before a fork is, by another process. Raises
    ConfigError, DataError.
    """
    known = _shared if data is None and _shared is not None else None
    same = known is not None and known[:2] == (unpinned(config), str(root))
    if known is not None and same and config.model.sha256 in (None, known[2].sha256):
        exp = known[2]
    else:
        exp, tried = _built(config, root, data), False
    if exp.data is None or tried:
        return exp
    found = (*exp.data.notes, *try_on(exp, exp.data))
    return dataclasses.replace(exp, remarks=tuple(dict.fromkeys(found)))


def try_on(experiment: Experiment, data: Data) -> list[str]:
    """Tries each client's model on two samples of the data. Returns remarks; raises ConfigError."""
    found = []
    for setting in experiment.settings:
        found += trial.fits(experiment.algorithm, setting, data)
        trial.merges(setting, experiment.shapes, data)
    return found


def _built(config: Config, root: Path | str | None, data: Data | None) -> Experiment:
    from fednet import data as rooms

    algorithm, federation = made(config), None
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
        input_shape, classes, width = data.input_shape, data.classes, data.outputs
        trial.finite(data)  # a site's own are looked through where they are read
    source = Source(data, federation, (input_shape, width), classes or 0)
    return _fitted(config, algorithm, source)


def _fitted(
    config: Config,
    algorithm: Algorithm,
    source: Source,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Experiment:
    """Model and method over data. given: as of `settled`."""
    begun, setting, unlike = settled(config, algorithm, source, given)
    shared = setting.shared
    for direction in ("up", "down"):
        trial.check_chains(config, algorithm, direction)
    trial.check_sizes(config.algorithm.name, algorithm)
    if isinstance(algorithm, Secure):
        held = None if source.federation is None else source.federation.parts
        cohort = functools.partial(selection.cohort, config)
        algorithm.plan = planned(config, algorithm, shared, cohort, held)
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


def _codecs(config: Config, shared: Layout, exempt: frozenset[str]) -> tuple[Codec, Codec]:
    """What encodes on the way down, and on the way up."""
    shapes = tuple(slot.shape for slot in shared.slots if slot.role == "parameter")

    def codec(way: str) -> Codec:
        chains = compress.chains(getattr(config.wire, way), f"wire.{way}", shapes)
        trial.check_memory(config, chains, f"wire.{way}")
        return Codec(shared, chains, buffers_cross(config.model.buffers, way == "down"), exempt)

    return codec("down"), codec("up")


def buffers_cross(buffers: str, down: bool) -> bool:
    """Whether BatchNorm's statistics cross under `model.buffers`: to the client, or from it."""
    return buffers == "average" or (down and buffers == "server")
