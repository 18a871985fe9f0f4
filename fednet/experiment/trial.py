"""A trial before anything starts: one batch of two samples, forward and backward. An error of the
first round is found here, and the message says what to do about it.

The trial draws from its own random stream and works on a module that is thrown away, so it changes
no bit of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fednet import models, seeds
from fednet.algorithms.base import Algorithm
from fednet.config import Config
from fednet.data import Data
from fednet.data.base import named
from fednet.errors import ConfigError, DataError, FednetError
from fednet.files import digest
from fednet.loading import place
from fednet.models.adapters import adapted, merged
from fednet.models.calls import unnamed
from fednet.tensors import Inputs, Layout
from fednet.training import metrics
from fednet.training.evaluation import other_width
from fednet.training.samples import length
from fednet.training.tasks.classification import BINS, Classification, class_axis
from fednet.wire.compress import Chain
from fednet.wire.compressors.feedback import DGC

if TYPE_CHECKING:
    from fednet.training.setting import Setting
    from fednet.training.tasks import Task

SAMPLES = 2
CHUNK = 2**22  # values of a float split that are looked at at a time


def finite(data: object) -> None:
    """Raises DataError if an input or target is not finite."""
    for which in ("train", "test"):
        x, y = getattr(data, which)
        parts = {f"inputs {name!r}" if name else "inputs": part for name, part in named(x).items()}
        for where, part in (parts | {"targets": y}).items():
            if part.is_floating_point() and (row := _not_finite(part)) is not None:
                raise DataError(
                    f"data: sample {row} of the {which}ing data has {where} that are not finite "
                    f"(NaN or infinite); leave it out, or fill it in, before the data are given."
                )


def _not_finite(part: torch.Tensor) -> int | None:
    """Returns the first row with a value that is not finite. A sum in float64 of finite float32
    values is finite.
    """
    step = max(1, CHUNK // max(1, part[:1].numel()))
    for start in range(0, len(part), step):
        some = part[start : start + step]
        if not math.isfinite(float(some.sum(dtype=torch.float64))):
            bad = ~torch.isfinite(some).flatten(1 if some.dim() > 1 else 0)
            return start + int((bad.any(1) if some.dim() > 1 else bad).nonzero()[0])
    return None


def fits(algorithm: Algorithm, setting: Setting, data: Data) -> None:
    """Tries the model, the task, and what the method needs of the model, on two training samples.
    Raises ConfigError.
    """
    if not len(data.train[1]):
        return
    config = setting.config
    task = setting.task
    module = setting.module()
    if config.train.memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    x, y = samples(data)
    if config.task == "classification" and y.is_floating_point():
        raise ConfigError(
            "data: the targets are floats, and the task is classification; set task: regression, "
            "or give whole numbers, the classes."
        )
    if algorithm.classes_only and y.ndim > 1:
        raise ConfigError(
            f"algorithm {config.algorithm.name}: it trains with a loss of its own about one class "
            f"a sample, and here a sample has labels of shape {tuple(y.shape[1:])}; take another "
            f"method, such as fedavg."
        )
    given = [part.clone() for part in named(x).values()]
    shown = f"model {config.model.name}"
    x, raw = data.inputs(x), x
    module.train(length(x) > 1)  # BatchNorm refuses to train on one sample
    asked = [(f"{shown}: it fails for {_batch(x)}", Algorithm.outputs)]
    if type(algorithm).outputs is not Algorithm.outputs:
        asked.append(
            (
                f"{shown}: it is not what {config.algorithm.name} needs, which asks it for "
                f"features(x), what its last Linear gets, and head, that layer",
                type(algorithm).outputs,
            )
        )
    held = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    still = {name: _digest(p) for name, (p, _) in held.items() if not p.requires_grad}
    kept = module.state_dict().keys()
    with seeds.scope(config.seed, "trial"):
        for what, outputs in asked:
            try:
                out = outputs(algorithm, module, x)
            except FednetError:
                raise
            except Exception as broken:
                raise ConfigError(f"{what}: {_message(broken)}{_hint(module, x)}") from broken
            out = tensor(shown, out)
            if isinstance(task, Classification) and data.classes is not None:
                width = task.classes_last(out, y).shape[-1]
                if width != data.classes:
                    raise ConfigError(
                        f"{shown}: it gives {width} outputs for {data.classes} classes; its last "
                        f"layer needs as many as `classes` says."
                    )
            _check_loss(shown, task, config.task, out, y)
    for name, p in module.named_parameters():
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ConfigError(
                f"{shown}: the gradient of its parameter {name!r} is sparse; fednet trains with "
                f"dense gradients: build the layer with sparse=False."
            )
    width = counted(config.task, task, out, y).shape[1]
    if width != setting.counts_width:
        raise other_width(task, setting.counts_width, width)
    for name, p in module.named_parameters():
        before, at = held.get(name, (None, 0))
        if before is not p or p.data_ptr() != at:
            raise ConfigError(
                f"model: it puts another tensor in the place of its parameter {name!r}, which "
                f"would not be trained; change it in place, under torch.no_grad()."
            )
        if name in still and _digest(p) != still[name]:
            raise ConfigError(
                f"model: it changes its parameter {name!r}, which takes no gradient and so is not "
                f"sent; register it as a buffer."
            )
    for name in module.state_dict().keys() - kept:
        raise ConfigError(
            f"{shown}: its state dict has {name!r} once it was called, and not before; register it "
            f"with its shape where the model is built."
        )
    if not all(map(torch.equal, named(raw).values(), given)):
        raise ConfigError(
            f"{shown}: it changes its inputs in place, and so the data; begin with x = x.clone()."
        )
    losses = _called(config.task, task.losses, out.detach(), y)
    if not isinstance(losses, torch.Tensor) or losses.shape != y.shape[:1]:
        raise ConfigError(
            f"task {config.task}: losses ({place(task.losses)}) gave {_form(losses)}, expected "
            f"({len(y)},), the loss of each sample."
        )


def merges(setting: Setting, shapes: tuple[tuple[int, ...], int], data: Data) -> None:
    """Tries, if the model has adapters, whether the model that will be written, with the adapters
    merged into its weights, gives the outputs of the adapted one. shapes: as `models.build` takes
    them. Raises ConfigError.
    """
    config = setting.config
    if config.model.adapters is None or not len(data.train[1]):
        return
    shown = f"model {config.model.name}"
    x, _ = samples(data)
    section = {**models.section(models.without_files(config.model)), "adapters": None}
    module = setting.module()
    plain = models.build(section, *shapes, config.seed)
    begun = _evaluated(config, module, data.inputs(x))
    draw = seeds.torch_rng(config.seed, "trial/adapters")
    with torch.no_grad():
        for _, layer in adapted(module):
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=draw))
            # So that a tenth of the weight is the adapters'.
            size = float(layer.delta().norm()) or 1.0
            layer.lora_B.mul_(0.1 * float(layer.weight.norm()) / size)
    try:
        plain.load_state_dict(merged(module), strict=True)
    except RuntimeError as other:
        raise ConfigError(
            f"model.adapters: merged into {shown} they are not its state dict: {_message(other)}"
        ) from None
    expected = _evaluated(config, module, data.inputs(x)).double()
    found = _evaluated(config, plain, data.inputs(x)).double()
    moved = float((expected - begun).norm())
    off = float((expected - found).norm())
    if not off <= 0.01 * moved + 1e-4 * float(expected.norm()):
        raise ConfigError(
            f"model.adapters: {shown} with the adapters merged into its weights, as it would be "
            f"written, gives other outputs than with the adapters beside them; another part of it "
            f"computes with these weights, or computes them. Let model.adapters.target leave those "
            f"layers out."
        )


def samples(data: Data) -> tuple[Inputs, torch.Tensor]:
    """Returns two training samples, as they are stored: the first with the smallest label and the
    first with the largest. So they differ, and at least one has a label where some value means
    "none".
    """
    y = data.train[1].flatten(1) if data.train[1].ndim > 1 else data.train[1][:, None]
    if not y.numel():
        return data.take(slice(0, SAMPLES))
    lowest = int(y.amin(1).argmin())
    highest = int(y.amax(1).argmax())
    if lowest == highest:
        return data.take(slice(0, SAMPLES))
    x, labels = data.take(np.array([lowest, highest]))
    return x, labels


def check_class_weights(config: Config, classes: int) -> None:
    """Raises ConfigError if a loss has more or fewer class weights than there are classes."""
    places = {"train": config.train.class_weights}
    for clients, own in config.train.per_client.items():
        places[f"train.per_client.{clients}"] = own.class_weights or ()
    for where, weights in places.items():
        if weights and len(weights) != classes:
            raise ConfigError(
                f"{where}.class_weights: expected one weight for each of the {classes} classes, "
                f"got {len(weights)}."
            )


def counts_width(config: Config, module: nn.Module, task: Task, data: Data) -> int:
    """Returns the number of classes C by which the task counts, found with two training samples."""
    x, y = samples(data)
    out = _evaluated(config, module, data.inputs(x))
    return counted(config.task, task, out, y).shape[1]


def more_counts(
    config: Config,
    factory: Callable[[int], nn.Module],
    task: Task,
    classes: int,
    data: Data | None,
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the counts that `evaluate.metrics` need, by name, found with two
    training samples. Raises ConfigError if the task does not have them, or they are no counts.
    """
    names, shown = config.evaluate.metrics, config.task
    metrics.check_offered(names, task, shown)
    needed = metrics.needed(names)
    if not needed:
        return {}
    if data is not None and len(data.train[1]):
        x, y = samples(data)
        out = _evaluated(config, factory(config.seed), data.inputs(x))
        found = {name: _more(config, name, task, out, y) for name in needed}
        shapes = {name: tuple(counts.shape) for name, counts in found.items()}
        arrays = {k: v.numpy() if v.ndim else v.item() for k, v in found.items()}
        metrics.values(names, {**arrays, "loss": 1.0})
    else:
        known = {"n": (), "confusion": (classes, classes), "scores": (2, classes, BINS)}
        if not isinstance(task, Classification) or not {*needed} <= {*known}:
            raise ConfigError(
                f"evaluate.metrics: they need {', '.join(needed)}, and there are no data here to "
                f"try the task {shown} on; leave those metrics out."
            )
        shapes = {name: known[name] for name in needed}
    if metrics.size(shapes) > metrics.MOST:
        raise ConfigError(
            f"evaluate.metrics: {', '.join(f'{k} {v}' for k, v in shapes.items())} are more than "
            f"{metrics.MOST} counts a model; take fewer metrics, or a task with fewer classes."
        )
    return shapes


def _more(
    config: Config, name: str, task: Task, out: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Returns the counts of two samples. Raises ConfigError if they are no counts, or not the sum
    of those of each.
    """

    def counted(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return metrics.count(task, name, out, y)

    counted.__name__ = shown = f"count_{name}"
    batches = [(out[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    if len(out) != len(y):
        batches = [(out, y)]  # the outputs have no sample axis to cut
    found = []
    for batch in ((out, y), *batches):
        counts = _called(config.task, counted, *batch)
        if (
            not isinstance(counts, torch.Tensor)
            or counts.dtype != torch.int64
            or bool((counts < 0).any())
        ):
            raise ConfigError(
                f"task {config.task}: {shown} gave {_form(counts)}, expected int64 of at least 0."
            )
        found.append(counts)
    whole, *each = found
    sums: dict[str, torch.Tensor] = {}
    for one in each:
        metrics.add(sums, {name: one}, task)
    if sums[name].shape != whole.shape or not torch.equal(sums[name], whole):
        raise ConfigError(
            f"task {config.task}: {shown} of two samples together is not the sum of those of each; "
            f"expected counts of a fixed shape that batches of any size add up to."
        )
    return whole


def sequence_axis(config: Config, module: nn.Module, data: Data) -> int:
    """Returns the axis of the classes in the model's outputs for sequences; see `class_axis`."""
    x, y = samples(data)
    x = data.inputs(x)
    return class_axis(module, x, y, _evaluated(config, module, x))


def _evaluated(config: Config, module: nn.Module, x: Inputs) -> torch.Tensor:
    """Returns the model's outputs in eval mode, one tensor. Raises ConfigError."""
    shown = f"model {config.model.name}"
    with torch.no_grad(), seeds.scope(config.seed, "trial"):
        try:
            out = module.eval()(x)
        except FednetError:
            raise
        except Exception as broken:
            raise ConfigError(
                f"{shown}: it fails for {_batch(x)}: {_message(broken)}{_hint(module, x)}"
            ) from broken
    return tensor(shown, out)


def _batch(x: Inputs) -> str:
    return f"{length(x)} training samples ({_forms(x)})"


def tensor(shown: str, out: object) -> torch.Tensor:
    """Returns the outputs of a model. Raises ConfigError if they are not one tensor."""
    if not isinstance(out, torch.Tensor):
        raise ConfigError(
            f"{shown}: it returns a {type(out).__name__}; expected the outputs (n, classes) as a "
            f"tensor, as the first tensor of a tuple, or as `logits` of a dict."
        )
    return out


def _digest(parameter: torch.Tensor) -> bytes:
    return digest([parameter.detach().reshape(-1).view(torch.uint8).numpy().data])


def check_chains(config: Config, algorithm: Algorithm, direction: str) -> None:
    """Raises ConfigError for a compressor of a kind that the method sends, but not as tensors of
    the model. A kind that it does not send at all is no error: one configuration may serve several
    methods.
    """
    payloads = [getattr(e, direction) for e in algorithm.exchanges]
    if direction == "down" and algorithm.Enrolment is not None:
        payloads.append(algorithm.Enrolment)
    fields = [(name, f) for payload in payloads for name, f in payload.fields.items()]
    for booked, chain in getattr(config.wire, direction).items():
        ours = [(name, f) for name, f in fields if f.kind == booked]
        if chain and ours and not any(f.form in ("tensors", "parameters") for _, f in ours):
            can = sorted({f.kind for _, f in fields if f.form in ("tensors", "parameters")})
            raise ConfigError(
                f"wire.{direction}.{booked}: {config.algorithm.name} sends {ours[0][0]!r} of this "
                f"kind, which is no tensor of the model; "
                f"compressors apply to {' and '.join(can) or 'nothing that it sends'}."
            )


OWN_MOMENTUM = (
    "diloco",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedcm",
    "fedsmu",
)


def check_memory(config: Config, chains: Mapping[str, Chain], where: str) -> None:
    """Raises ConfigError for compressors with a memory that does not fit the schedule or method."""
    for kind, chain in chains.items():
        name = chain.text[0]
        if config.schedule.mode != "sync" and chain.shared:
            raise ConfigError(
                f"{where}.{kind}: {name} needs both ends in step, round by round, which "
                f"schedule.mode: {config.schedule.mode} does not have; use ef."
            )
        unasked = chain.needs_feedback and chain.feedback is None
        if config.algorithm.name == "fedsmu" and (where, kind) == ("wire.up", "delta") and unasked:
            raise ConfigError(
                f"{where}.{kind}: {chain} adds error feedback, so that the values sent are no "
                f"longer fedsmu's signs; qsgd(2) sends -1, 0 and 1 exactly, in two bits a value "
                f"(write noef or ef in front to choose)."
            )
        if isinstance(chain.feedback, DGC) and config.algorithm.name in OWN_MOMENTUM:
            raise ConfigError(
                f"{where}.{kind}: dgc brings a momentum, and {config.algorithm.name} has one of "
                f"its own; use one of the two."
            )


def check_shared(config: Config, algorithm: Algorithm, shared: Layout) -> None:
    """Raises ConfigError for a method that shares only what is not trained."""
    part = config.train.only or config.model.adapters is not None
    if part and type(algorithm).shares() and not shared.sizes[0]:
        key = "train.only" if config.train.only else "model.adapters"
        raise ConfigError(
            f"{key}: with it {config.algorithm.name} has nothing to send, because the part of "
            f"the model that it shares is frozen. Train more of the model, or use a method "
            f"that shares all of it (fedavg)."
        )


def check_sizes(name: str, algorithm: Algorithm) -> None:
    """Raises ConfigError for a method without `sizes` that declares a field of samples or an array:
    its declaration has no size, and every reply would be refused as too long.
    """
    if type(algorithm).sizes is not Algorithm.sizes:
        return
    payloads = [p for e in algorithm.exchanges for p in (e.down, e.up)]
    if algorithm.Enrolment is not None:
        payloads.append(algorithm.Enrolment)
    for payload in payloads:
        for field, about in payload.fields.items():
            if about.form in ("samples", "array"):
                raise ConfigError(
                    f"algorithm {name}: {payload.__qualname__}.{field} is of the form "
                    f"{about.form}, whose size its declaration leaves open; define "
                    f"sizes(payload, client), which gives its bytes for a client, at most."
                )


def _check_loss(shown: str, task: Task, name: str, out: torch.Tensor, y: torch.Tensor) -> None:
    """Computes the loss and a backward pass. Raises ConfigError if that is not possible."""
    if not out.requires_grad:
        raise ConfigError(
            f"{shown}: no gradient comes to its parameters from its outputs; look for no_grad or "
            f"detach in its forward."
        )
    loss = scalar(name, task, _called(name, task.loss, out, y))
    loss.backward()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ConfigError(
            f"{shown}: its loss is {value} before any training; look at its initialisation and at "
            f"the scale of the data."
        )


def _called(
    name: str,
    function: Callable[[torch.Tensor, torch.Tensor], object],
    out: torch.Tensor,
    y: torch.Tensor,
) -> object:
    """Returns the result of a function of the task. Raises ConfigError if it fails."""
    try:
        return function(out, y)
    except FednetError:
        raise
    except Exception as broken:
        raise ConfigError(
            f"task {name}: {function.__name__} fails for outputs of shape {tuple(out.shape)} and "
            f"targets of shape {tuple(y.shape)}, {y.dtype}: {_message(broken)}"
        ) from broken


def scalar(name: str, task: Task, loss: object) -> torch.Tensor:
    """Returns the task's loss of a batch. Raises ConfigError if it is no scalar with a graph."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        raise ConfigError(
            f"task {name}: loss ({place(task.loss)}) gave {_form(loss)}, expected a scalar with a "
            f"graph, the mean over the samples."
        )
    return loss


def counted(name: str, task: Task, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the task's counts of a batch. Raises ConfigError if they are no counts, or not the
    sum of the counts of single samples: then batches of another size would give other sums.
    """
    counts = scored(name, task, out, y)
    total = int(counts[1].sum())
    targets = y.numel()
    if total > targets:
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) gave a total of {total} for {targets} "
            f"labels or values; expected at most one each."
        )
    if len(out) != len(y):
        return counts  # the outputs have no sample axis to cut
    each = [scored(name, task, out[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    if any(one.shape != counts.shape for one in each):
        forms = " and ".join(sorted({str(tuple(one.shape)) for one in (*each, counts)}))
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) gave shapes {forms}, by which samples "
            f"there are; expected (2, C) with the same C, as by torch.bincount(y, minlength=C)."
        )
    if not torch.equal(sum(each, torch.zeros_like(counts)), counts):
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) of two samples together are not the sum "
            f"of those of each; expected numbers that batches of any size add up to."
        )
    return counts


def scored(name: str, task: Task, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the task's counts of a batch. Raises ConfigError if they are no counts."""
    counts = _called(name, task.counts, out.detach(), y)
    if not (
        isinstance(counts, torch.Tensor)
        and counts.dtype == torch.int64
        and (counts.ndim, *counts.shape[:1]) == (2, 2)
    ):
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) gave {_form(counts)}, expected (2, C) of "
            f"int64, correct and total by class, so that sums are exact."
        )
    return counts


def _message(broken: Exception) -> str:
    lines = str(broken).strip().splitlines() or [""]
    return f"{type(broken).__name__}: {lines[0].rstrip('.')}."


def _form(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _forms(x: Inputs) -> str:
    return ", ".join(
        f"{name + ': ' if name else ''}{str(part.dtype).removeprefix('torch.')} of shape "
        f"{tuple(part.shape[1:])}"
        for name, part in named(x).items()
    )


def _hint(module: nn.Module, x: Inputs) -> str:
    if isinstance(x, dict) and (names := unnamed(module, x)):
        return (
            f" Its forward has no parameter {' and '.join(names)}, so it gets one dict of all "
            f"inputs; name its parameters as the inputs are, {', '.join(x)}, to get each by name."
        )
    if any(not part.is_floating_point() for part in named(x).values()):
        return (
            " Whole numbers come to the model as they are: give floats, or a model that embeds "
            "them."
        )
    return ""
