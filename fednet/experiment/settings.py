"""The settings of a run's models: of the run's model, and of each model that some clients have
instead. Server and clients make the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fednet import registry
from fednet.algorithms.base import Algorithm, ClientFacts
from fednet.config import Config, parts
from fednet.data.base import Data
from fednet.data.federation import Federation
from fednet.errors import ConfigError
from fednet.experiment import trial
from fednet.models.start import Start, start
from fednet.training import packable
from fednet.training.setting import Setting
from fednet.training.tasks.classification import Classification
from fednet.training.tasks.regression import Regression


@dataclass(frozen=True, slots=True)
class Source:
    """The run's data, and what a model has to know of them. data, federation: None where sites
    bring their own. shapes: of a model input, and the number of outputs.
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
    """What training starts from, the setting of the run's model, and by client the settings of
    other models. given: the tensors that training starts from, where the server sent them.
    """
    first, *others = parts.each_model(config)
    begun = start(first, *source.shapes, given)
    setting = _setting(first, algorithm, source, begun)
    unlike = [_setting(own, algorithm, source, start(own, *source.shapes)) for own in others]
    _check_sizes(config, algorithm, source.shapes[0], [setting, *unlike])
    owners = parts.model_owners(config)
    return begun, setting, {client: unlike[place] for client, place in owners.items()}


def _setting(config: Config, algorithm: Algorithm, source: Source, begun: Start) -> Setting:
    module, layout = begun.module, begun.layout
    shared = algorithm.shared(layout, module)
    trial.check_shared(config, algorithm, shared)
    if config.train.pack > 1:
        packable.check(module, any(slot.role != "parameter" for slot in layout.slots))
    task = registry.task.get(config.task)()
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
    shape = source.shapes[0]
    return Setting.of(config, begun, shared, task, source.classes, width, data, shape)


def _check_sizes(
    config: Config, algorithm: Algorithm, input_shape: tuple[int, ...], settings: list[Setting]
) -> None:
    """Raises ConfigError where a message would not have the same size with all clients' models."""
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
