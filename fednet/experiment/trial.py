"""A trial before anything starts: one batch of two samples, forward and backward. An error of the
first round is found here, and the message says what to do about it.

The trial draws from its own random stream and works on a module that is thrown away, so it changes
no bit of the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fednet import models, seeds
from fednet.algorithms.base import Algorithm
from fednet.config import Config
from fednet.data.base import Data
from fednet.errors import ConfigError, DataError, FednetError
from fednet.loading import place
from fednet.models.adapters import lora_layers, merged_state_dict
from fednet.models.calls import names_without_parameter
from fednet.tensors import Inputs, by_name
from fednet.training import metrics
from fednet.training.samples import length
from fednet.training.tasks import labels_of
from fednet.training.tasks.classification import BINS, Classification, class_axis
from fednet.training.tasks.regression import Regression

if TYPE_CHECKING:
    from fednet.training.setting import Setting
    from fednet.training.tasks import LearningTask


def finite(data: Data) -> None:
    """Raises DataError if an input or target is not finite."""
    for which in ("train", "test"):
        x, y = getattr(data, which)
        parts = {
            f"inputs {name!r}" if name else "inputs": part for name, part in by_name(x).items()
        }
        for where, part in (parts | {"targets": y}).items():
            if not part.is_floating_point():
                continue
            bad = ~torch.isfinite(part)
            if bool(bad.any()):
                raise DataError(
                    f"data: sample {int(bad.nonzero()[0, 0])} of the {which}ing data has {where} "
                    f"that are not finite (NaN or infinite); leave it out, or fill it in, before "
                    f"the data are given."
                )


def fits(algorithm: Algorithm, setting: Setting, data: Data) -> None:
    """Tries the model, the task, and what the method needs of the model, on two training samples.
    Raises ConfigError.
    """
    config = setting.config
    task = setting.task
    module = setting.borrowed()
    if config.train.memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    x, y = samples(data)
    if algorithm.classes_only and y.ndim > 1:
        raise ConfigError(
            f"algorithm {config.algorithm.name}: it trains with a loss of its own about one class "
            f"a sample, and here a sample has labels of shape {tuple(y.shape[1:])}; take another "
            f"method, such as fedavg."
        )
    shown = f"model {config.model.name}"
    given = {name: part.clone() for name, part in by_name(x).items()}
    raw = x
    x = data.inputs(raw)
    held = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    frozen = {name: p.clone() for name, (p, _) in held.items() if not p.requires_grad}
    kept = module.state_dict().keys()
    module.train(length(x) > 1)  # BatchNorm refuses to train on one sample
    asked = [(f"{shown}: it fails", Algorithm.outputs)]
    if type(algorithm).outputs is not Algorithm.outputs:
        asked.append(
            (
                f"{shown}: it is not what {config.algorithm.name} needs, which asks it for "
                f"features(x), what its last Linear gets, and head, that layer",
                type(algorithm).outputs,
            )
        )
    with seeds.scope(config.seed, "trial"):
        for what, outputs in asked:
            out = _outputs(config, what, functools.partial(outputs, algorithm, module), module, x)
            if isinstance(task, Classification) and data.classes is not None:
                width = task.classes_last(out, y).shape[-1]
                if width != data.classes:
                    raise ConfigError(
                        f"{shown}: it gives {width} outputs for {data.classes} classes; its last "
                        f"layer needs as many as `classes` says."
                    )
            if not out.requires_grad:
                raise ConfigError(
                    f"{shown}: no gradient comes to its parameters from its outputs; look for "
                    f"no_grad or detach in its forward."
                )
            loss = scalar(config.task, task, _call_part(config.task, "loss", task.loss, out, y))
            loss.backward()
            value = float(loss.detach())
            if not math.isfinite(value):
                raise ConfigError(
                    f"{shown}: its loss is {value} before any training; look at its initialisation "
                    f"and at the scale of the data."
                )
    if not all(torch.equal(part, given[name]) for name, part in by_name(raw).items()):
        raise ConfigError(
            f"{shown}: it changes its inputs in place, and so the data; begin with x = x.clone()."
        )
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"{shown}: the gradient of its parameter {name!r} is sparse; fednet trains with "
                f"dense gradients: build the layer with sparse=False."
            )
        before, at = held.get(name, (None, 0))
        if parameter is not before or parameter.data_ptr() != at:
            raise ConfigError(
                f"{shown}: it puts another tensor in the place of its parameter {name!r}, which "
                f"would not be trained; change it in place, under torch.no_grad()."
            )
        if name in frozen and not torch.equal(parameter, frozen[name]):
            raise ConfigError(
                f"{shown}: it changes its parameter {name!r}, which takes no gradient and so is "
                f"not sent; register it as a buffer."
            )
    for name in module.state_dict().keys() - kept:
        raise ConfigError(
            f"{shown}: its state dict has {name!r} once it was called, and not before, so that it "
            f"would not be sent; register it with its shape where the model is built."
        )
    check_counts(config.task, task, out, y)
    losses = _call_part(config.task, "losses", task.losses, out.detach(), y)
    if not isinstance(losses, torch.Tensor) or losses.shape != y.shape[:1]:
        raise ConfigError(
            f"task {config.task}: losses ({place(task.losses)}) gave {_form(losses)}, expected "
            f"({len(y)},), the loss of each sample."
        )


def unlike_losses(
    name: str, task: LearningTask, out: torch.Tensor, y: torch.Tensor
) -> Iterator[str]:
    """Yields a remark if the task's `loss` of a batch is not the mean of its `losses`."""
    each = task.losses(out, y).double()
    labels = labels_of(task, y)
    shares = torch.ones_like(each) if labels is None else labels.double()
    mean = float((each * shares).sum().detach() / shares.sum().clamp(min=1))
    whole = float(task.loss(out, y).detach())
    if not math.isclose(whole, mean, rel_tol=1e-3, abs_tol=1e-5):
        yield (
            f"task {name}: loss gives {whole:.4g} for a batch, and losses a mean of {mean:.4g} for "
            f"the same, so train_loss and test_loss cannot be compared."
        )


def remarks(setting: Setting, data: Data) -> Iterator[str]:
    """Yields what a user should know of the task, tried on a sample of each class."""
    config = setting.config
    task = setting.task
    if type(task) not in (Classification, Regression):
        x, y = of_each_class(data)
        out = _outputs_in_eval(config, setting.module(), data.inputs(x))
        yield from unlike_losses(config.task, task, out, y)


def merges(setting: Setting, data: Data) -> None:
    """Tries, if the model has adapters, whether the model that will be written, with the adapters
    merged into its weights, gives the outputs of the adapted one. It does not if another part of
    the model computes with these weights. Raises ConfigError.
    """
    config = setting.config
    if config.model.adapters is None:
        return
    x = data.inputs(samples(data)[0])
    module = setting.module()
    begun = _outputs_in_eval(config, module, x)
    draw = seeds.torch_rng(config.seed, "trial/adapters")
    with torch.no_grad():
        for _, layer in lora_layers(module):
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=draw))
            # So that the adapters change the weight by a tenth.
            size = float(layer.delta().norm()) or 1.0
            layer.lora_B.mul_(0.1 * float(layer.weight.norm()) / size)
    section = {**models.section(models.without_files(config.model)), "adapters": None}
    plain = models.build(section, data.input_shape, data.outputs, config.seed)
    plain.load_state_dict(merged_state_dict(module))
    expected, found = (_outputs_in_eval(config, one, x).double() for one in (module, plain))
    changed = float((expected - begun).norm())
    # Weights of half precision round what is merged into them.
    kinds = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    rounding = max(1e-4, *(2 * torch.finfo(kind).eps for kind in kinds))
    if not float((expected - found).norm()) <= 0.01 * changed + rounding * float(expected.norm()):
        raise ConfigError(
            f"model.adapters: model {config.model.name} with the adapters merged into its weights, "
            f"as it would be written, gives other outputs than with the adapters beside them; "
            f"another part of it computes with these weights. Let model.adapters.target leave "
            f"those layers out."
        )


def samples(data: Data) -> tuple[Inputs, torch.Tensor]:
    """Returns two training samples, as they are stored: the first with the smallest label and the
    first with the largest. So they differ, and at least one has a label where some value means
    "none".
    """
    y = data.train[1].view(data.n_train, -1)
    lowest = int(y.amin(1).argmin())
    highest = int(y.amax(1).argmax())
    alike = lowest == highest
    return data.take(np.arange(min(2, len(y))) if alike else np.array([lowest, highest]))


def of_each_class(data: Data) -> tuple[Inputs, torch.Tensor]:
    """Returns the first training sample of each of up to 64 classes; where samples are of no class,
    those of `samples`.
    """
    if data.classes is None or data.train[1].ndim != 1:
        return samples(data)
    _, first = np.unique(data.labels(), return_index=True)
    return data.take(first[:64])


def counting(
    config: Config,
    factory: Callable[[int], nn.Module],
    task: LearningTask,
    classes: int,
    data: Data | None,
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Returns C, the number of classes by which the task counts, and by name the shapes of the
    counts that `evaluate.metrics` need. Both are found with two training samples, and so is the
    axis of the classes in a model's outputs for sequences. classes: 0 if there are none. Raises
    ConfigError if the task does not have these counts, or they are no counts.
    """
    names = config.evaluate.metrics
    shown = config.task
    metrics.check_offered(names, task, shown)
    needed = metrics.counts_needed(names)
    width = max(1, classes)
    shapes: dict[str, tuple[int, ...]] = {}
    if data is not None:
        counts_alone = type(task) not in (Classification, Regression)
        positions = isinstance(task, Classification) and data.train[1].ndim > 1
        if not (needed or counts_alone or positions):
            return width, shapes
        x, y = samples(data)
        x = data.inputs(x)
        module = factory(config.seed)  # not used again: a call may change what it keeps
        out = _outputs_in_eval(config, module, x)
        if isinstance(task, Classification) and positions:
            task.class_axis = class_axis(module, x, y, out)
        if counts_alone:
            width = check_counts(shown, task, out, y).shape[1]
        found = {}
        for name in needed:
            count = functools.partial(metrics.count, task, name)
            found[name] = _check_additive(shown, f"count_{name}", count, out, y)
        shapes = {name: tuple(counts.shape) for name, counts in found.items()}
        arrays = {k: v.numpy() if v.ndim else v.item() for k, v in found.items()}
        metrics.values(names, {**arrays, "loss": 1.0})
    elif needed:
        known = {"n": (), "confusion": (width, width), "scores": (2, width, BINS)}
        if not isinstance(task, Classification) or not {*needed} <= {*known}:
            raise ConfigError(
                f"evaluate.metrics: they need {', '.join(needed)}, and there are no data here to "
                f"try the task {shown} on; leave those metrics out."
            )
        shapes = {name: known[name] for name in needed}
    if metrics.size(shapes) > metrics.MAX_COUNTS:
        raise ConfigError(
            f"evaluate.metrics: {', '.join(f'{k} {v}' for k, v in shapes.items())} are more than "
            f"{metrics.MAX_COUNTS} counts a model; take fewer metrics, or a task with fewer "
            f"classes."
        )
    return width, shapes


def _outputs_in_eval(config: Config, module: nn.Module, x: Inputs) -> torch.Tensor:
    """Returns the model's outputs in eval mode, one tensor. Raises ConfigError."""
    module.eval()
    with torch.no_grad(), seeds.scope(config.seed, "trial"):
        return _outputs(config, f"model {config.model.name}: it fails", module, module, x)


def _outputs(
    config: Config, what: str, call: Callable[[Inputs], object], module: nn.Module, x: Inputs
) -> torch.Tensor:
    """Returns the outputs of a model. Raises ConfigError, which begins with `what`, if the call
    fails, or gives no tensor.
    """
    try:
        out = call(x)
    except FednetError:
        raise
    except Exception as broken:  # a user's own model may raise anything
        inputs = by_name(x)
        forms = [
            f"{name + ': ' if name else ''}{str(part.dtype).removeprefix('torch.')} of shape "
            f"{tuple(part.shape[1:])}"
            for name, part in inputs.items()
        ]
        hint = ""
        if isinstance(x, dict) and (names := names_without_parameter(module, x)):
            hint = (
                f" Its forward has no parameter {' and '.join(names)}, so it gets one dict of all "
                f"inputs; name its parameters as the inputs are, {', '.join(x)}, to get each by "
                f"name."
            )
        elif any(not part.is_floating_point() for part in inputs.values()):
            hint = (
                " Whole numbers come to the model as they are: give floats, or a model that embeds "
                "them."
            )
        raise ConfigError(
            f"{what} for {length(x)} training samples ({', '.join(forms)}): {_message(broken)}"
            f"{hint}"
        ) from broken
    return tensor(f"model {config.model.name}", out)


def tensor(shown: str, out: object) -> torch.Tensor:
    """Returns the outputs of a model. Raises ConfigError if they are not one tensor."""
    if not isinstance(out, torch.Tensor):
        raise ConfigError(
            f"{shown}: it returns a {type(out).__name__}; expected the outputs (n, classes) as a "
            f"tensor, as the first tensor of a tuple, or as `logits` of a dict."
        )
    return out


def _call_part(
    name: str,
    shown: str,
    function: Callable[[torch.Tensor, torch.Tensor], object],
    out: torch.Tensor,
    y: torch.Tensor,
) -> object:
    try:
        return function(out, y)
    except FednetError:
        raise
    except Exception as broken:
        raise ConfigError(
            f"task {name}: {shown} fails for outputs of shape {tuple(out.shape)} and "
            f"targets of shape {tuple(y.shape)}, {y.dtype}: {_message(broken)}"
        ) from broken


def scalar(name: str, task: LearningTask, loss: object) -> torch.Tensor:
    """Returns the task's loss of a batch. Raises ConfigError if it is no scalar with a graph."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        raise ConfigError(
            f"task {name}: loss ({place(task.loss)}) gave {_form(loss)}, expected a scalar with a "
            f"graph, the mean over the samples."
        )
    return loss


def check_counts(name: str, task: LearningTask, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the task's counts of a batch. Raises ConfigError if they are no counts."""
    counts = _check_additive(name, f"counts ({place(task.counts)})", task.counts, out.detach(), y)
    if (counts.ndim, *counts.shape[:1]) != (2, 2):
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) gave {_form(counts)}, expected (2, C) of "
            f"int64, correct and total by class."
        )
    total = int(counts[1].sum())
    if total > y.numel():
        raise ConfigError(
            f"task {name}: counts ({place(task.counts)}) gave a total of {total} for {y.numel()} "
            f"labels or values; expected at most one each."
        )
    return counts


def _check_additive(
    name: str,
    shown: str,
    function: Callable[[torch.Tensor, torch.Tensor], object],
    out: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Returns what a function of the task counts in a batch. Raises ConfigError if that is no
    count, or not the sum of the counts of single samples: batches of another size would give other
    sums.
    """
    batches = [(out, y)]
    if len(out) == len(y):  # else the outputs have no sample axis to cut
        batches += [(out[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    found = []
    for batch in batches:
        counts = _call_part(name, shown, function, *batch)
        if not isinstance(counts, torch.Tensor) or counts.dtype != torch.int64:
            raise ConfigError(f"task {name}: {shown} gave {_form(counts)}, expected int64.")
        if bool((counts < 0).any()):
            raise ConfigError(f"task {name}: {shown} gave counts below 0.")
        found.append(counts)
    whole, *each = found
    alike = all(one.shape == whole.shape for one in each)
    if each and not (alike and torch.equal(torch.stack(each).sum(0), whole)):
        raise ConfigError(
            f"task {name}: {shown} of two samples together is not the sum of those of each; "
            f"expected counts of a fixed shape that batches of any size add up to."
        )
    return whole


def _message(broken: Exception) -> str:
    lines = str(broken).strip().splitlines() or [""]
    return f"{type(broken).__name__}: {lines[0].rstrip('.')}."


def _form(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
