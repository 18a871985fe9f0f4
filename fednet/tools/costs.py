"""What a method sends for a model, from its declarations alone."""

from __future__ import annotations

import math

import msgspec

from fednet.algorithms.base import ClientFacts
from fednet.config import Config
from fednet.registry import algorithm, dataset


def payload_bytes(config: Config, name: str) -> tuple[int, int, tuple[bool, bool]]:
    """(down, up, open): payload bytes of a client and a round for the configured model, before
    compression; open: whether that direction also has fields whose size depends on the client's
    data.
    """
    from fednet import models
    from fednet.tensors import Layout

    method = algorithm.get(name)()
    shape, classes = _shape(config)
    module = models.build(
        {"name": config.model.name, **config.model.options}, shape, classes, config.seed
    )
    layout = method.shared(Layout.of(module, config.model.trainable), module)
    whole = layout.nbytes if config.model.buffers == "average" else layout.parameters.nbytes
    fixed = {
        "tensors": whole,
        "parameters": layout.parameters.nbytes,
        "float": 8,
        "int": 8,
        "run": 24,
    }
    sizes, is_open = [], []
    for direction in ("down", "up"):
        forms = [
            f.form
            for exchange in method.exchanges
            for f in getattr(exchange, direction).fields.values()
        ]
        sizes.append(sum(fixed.get(form, 0) for form in forms))
        is_open.append(any(form not in fixed for form in forms))
    return sizes[0], sizes[1], (is_open[0], is_open[1])


def enrolment_bytes(config: Config, public: int) -> int:
    """What crosses to a client once, when it joins: of `public` samples that the server has, those
    that the method shares.
    """
    method = algorithm.get(config.algorithm.name)
    if method.Enrolment is None or not public:
        return 0
    shape, _ = _shape(config)
    # Images of bytes.
    facts = ClientFacts(
        n=0, class_counts=(), sample_nbytes=math.prod(shape), input_shape=shape, public_n=public
    )
    sizes = method(msgspec.convert(config.algorithm.options, method.Config), config.clients).sizes(
        method.Enrolment, facts
    )
    return sum(sizes.values())


# Of datasets that need files only to be told their shape.
KNOWN = {
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "digits": ((1, 28, 28), 10),
    "svhn": ((3, 32, 32), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tiny-imagenet": ((3, 64, 64), 200),
}


def _shape(config: Config) -> tuple[tuple[int, ...], int]:
    """Of one input, and the number of classes."""
    data = config.data
    if data.dataset in KNOWN:
        return KNOWN[data.dataset]
    if data.dataset == "synthetic":
        return tuple(data.options["shape"]), int(data.options["classes"])
    from fednet.data import load

    dataset.get(data.dataset)
    loaded = load(data, data.root, config.seed)
    return tuple(loaded.inputs(loaded.train[0][:1]).shape[1:]), int(loaded.classes or 1)
