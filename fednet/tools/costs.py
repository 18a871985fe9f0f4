"""The bytes that a method sends for a model, from its declarations."""

from __future__ import annotations

import math

import msgspec

from fednet.algorithms.base import Algorithm, ClientFacts
from fednet.config import Config
from fednet.experiment.build import buffers_cross
from fednet.models.trained import layout_of
from fednet.registry import algorithm, dataset
from fednet.wire.codec import Codec

OPEN = ("samples", "array")  # forms whose size depends on a client's data


def cost(config: Config, name: str) -> dict[str, tuple[int, bool]]:
    """The payload bytes of one client, before compression: `down` and `up` in each round, `once`
    with its first task; and whether there are fields beside that whose size is not known here.

    name: of the method, for the configured model, with the configured options if the configuration
    names this method, else with its defaults. Raises ConfigError.
    """
    from fednet import models

    kind = algorithm.get(name)
    own = config.algorithm.options if name == config.algorithm.name else {}
    method: Algorithm = kind(msgspec.convert(own, kind.Config), config.clients)
    facts, classes = _facts(config)
    section = models.section(models.without_files(config.model))
    module = models.build(section, facts.input_shape, classes, config.seed)
    layout = method.shared(layout_of(config, module), module)
    payloads = {
        "down": [exchange.down for exchange in method.exchanges],
        "up": [exchange.up for exchange in method.exchanges],
        "once": [] if method.Enrolment is None else [method.Enrolment],
    }
    found = {}
    for direction, kinds in payloads.items():
        codec = Codec(layout, {}, buffers_cross(config.model.buffers, direction != "up"))
        size = 0
        is_open = False
        for payload in kinds:
            known = direction == "once" and not config.data.public.fraction
            bounds = method.sizes(payload, facts) if known else {}
            for field, about in payload.fields.items():
                size += codec.size_of(about.kind, about.form, bounds.get(field))[1]
                if about.form in OPEN and not known:
                    is_open = True
        found[direction] = size, is_open
    return found


# The shape of an input and the outputs of a model, for datasets that would have to be read for it.
KNOWN = {
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "digits": ((1, 28, 28), 10),
    "svhn": ((3, 32, 32), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tiny-imagenet": ((3, 64, 64), 200),
}


def _facts(config: Config) -> tuple[ClientFacts, int]:
    """The facts that hold for every client, and the number of classes."""
    data = config.data
    shape: tuple[int, ...]
    classes: int
    if data.dataset in KNOWN:
        shape, classes = KNOWN[data.dataset]
        nbytes = math.prod(shape)
    elif data.dataset == "synthetic":
        shape = tuple(data.options["shape"])
        classes = int(data.options["classes"])
        nbytes = math.prod(shape) * (1 if len(shape) == 3 else 4)
    elif data.dataset == "site":
        from fednet.data.datasets.site import declared_form

        shape, _, classes = declared_form(data)
        nbytes = 0
    else:
        from fednet.data.loading import load

        dataset.get(data.dataset)
        loaded = load(data, data.root, config.seed)
        shape = loaded.input_shape
        classes = loaded.outputs
        nbytes = loaded.sample_nbytes
    return ClientFacts(0, (), nbytes, shape, data.public.samples), int(classes)
