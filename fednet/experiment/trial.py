"""One batch of two samples, forward and backward, before anything starts: what would fail in the
first round is said at the start, with what to do about it.

It draws from a stream of its own, works on a module that is thrown away, and so changes no bit of
the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import nn

from fednet import seeds
from fednet.algorithms.base import Algorithm
from fednet.config import Config
from fednet.data import Data
from fednet.data.base import named, said_of
from fednet.errors import ConfigError, DataError, FednetError
from fednet.experiment.judging import asked
from fednet.files import digest
from fednet.loading import place
from fednet.tensors import Inputs, Layout
from fednet.training.samples import FEW, length, piece
from fednet.training.scratch import replaced, unmoved
from fednet.wire.compress import Chain
from fednet.wire.compressors.dgc import DGC

if TYPE_CHECKING:
    from fednet.experiment.build import Experiment
    from fednet.training.tasks import Task

SAMPLES = 2
CHUNK = 2**22  # values of a float split that are looked at at a time


def finite(data: object) -> None:
    """Raises DataError where `data`, or an array or tensor in it, has a value that is not finite.
    Bytes and whole numbers always are.
    """
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
    """The first such row. A sum in float64 of finite float32 values is finite."""
    step = max(1, CHUNK // max(1, part[:1].numel()))
    for start in range(0, len(part), step):
        some = part[start : start + step]
        if not math.isfinite(float(some.sum(dtype=torch.float64))):
            bad = ~torch.isfinite(some).flatten(1 if some.dim() > 1 else 0)
            return start + int((bad.any(1) if some.dim() > 1 else bad).nonzero()[0])
    return None


def fits(config: Config, algorithm: Algorithm, module: nn.Module, task: Task, data: Data) -> None:
    """Tries the model, the task's loss and what the method asks of the model on the first training
    samples. module is spoiled. Raises ConfigError.
    """
    if not len(data.train[1]):
        return
    x, y = piece(data.train[0], 0, SAMPLES), data.train[1][:SAMPLES]
    if config.task == "classification" and y.is_floating_point():
        raise ConfigError(
            "data: the targets are floats, and the task is classification; set task: regression, "
            f"or give whole numbers, the classes.{said_of(y)}"
        )
    given = [part.clone() for part in named(x).values()]
    shown = f"model {config.model.name}"
    x, raw = data.inputs(x), x
    module.train(length(x) > 1)  # BatchNorm refuses to train on one sample
    batch = f"{length(x)} training samples ({_forms(x)})"
    asked = [(f"{shown}: it fails for {batch}", Algorithm.outputs)]
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
                raise ConfigError(f"{what}: {_said(broken)}{_hint(x)}") from broken
            _loss(shown, task, config.task, out, y)
    counts = scored(config.task, task, out, y)
    if data.classes is not None and config.task == "classification":
        _wide(shown, counts, data.classes)
    for name, p in module.named_parameters():
        before, at = held.get(name, (None, 0))
        if before is not p or p.data_ptr() != at:
            raise ConfigError(replaced(name))
        if name in still and _digest(p) != still[name]:
            raise ConfigError(unmoved(name))
    for name in module.state_dict().keys() - kept:
        raise ConfigError(
            f"{shown}: its state dict has {name!r} once it was called, and not before; register it "
            f"with its shape where the model is built."
        )
    if not all(map(torch.equal, named(raw).values(), given)):
        raise ConfigError(
            f"{shown}: it changes its inputs in place, and so the data; begin with x = x.clone()."
        )


def _digest(parameter: torch.Tensor) -> bytes:
    return digest([parameter.detach().reshape(-1).view(torch.uint8).numpy().data])


def check_chains(config: Config, algorithm: Algorithm, direction: str) -> None:
    """A kind that the method sends, but not as tensors of the model, cannot be compressed, and is
    not left so silently. A kind that it does not send at all may be named: one configuration may
    serve several methods.
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
    """Refuses chains that remember what this run's schedule or method does not keep in step."""
    for kind, chain in chains.items():
        name = chain.text[0]
        if config.schedule.mode != "sync" and chain.shared:
            raise ConfigError(
                f"{where}.{kind}: {name} needs both ends in step, round by round, which "
                f"schedule.mode: {config.schedule.mode} does not have; use ef."
            )
        if isinstance(chain.feedback, DGC) and config.algorithm.name in OWN_MOMENTUM:
            raise ConfigError(
                f"{where}.{kind}: dgc brings a momentum, and {config.algorithm.name} has one of "
                f"its own; use one of the two."
            )


def check_shared(config: Config, algorithm: Algorithm, shared: Layout) -> None:
    """Refuses a method that would share what is not trained."""
    part = config.train.only or config.model.adapters is not None
    if part and type(algorithm).shares() and not shared.sizes[0]:
        key = "train.only" if config.train.only else "model.adapters"
        raise ConfigError(
            f"{key}: it leaves {config.algorithm.name} nothing to share, since the part of the "
            f"model that crosses with it is frozen. Train more of the model, or take a method "
            f"that shares all of it (fedavg)."
        )


def check_sizes(name: str, algorithm: Algorithm) -> None:
    """A field of samples or of an array has no size in its declaration: without `sizes` every reply
    would be refused as too long.
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


def _loss(shown: str, task: Task, name: str, out: object, y: torch.Tensor) -> None:
    """One loss, backward."""
    if not isinstance(out, torch.Tensor):
        raise ConfigError(
            f"{shown}: it returns a {type(out).__name__}; expected one tensor, the outputs (n, "
            f"classes)."
        )
    if not out.requires_grad:
        raise ConfigError(
            f"{shown}: no gradient comes to its parameters from its outputs; look for no_grad or "
            f"detach in its forward."
        )
    forms = f"outputs of shape {tuple(out.shape)} and targets of shape {tuple(y.shape)}"
    try:
        loss = task.loss(out, y)
    except FednetError:
        raise
    except Exception as broken:
        raise ConfigError(
            f"task {name}: its loss fails for {forms}, {y.dtype}: {_said(broken)}"
        ) from broken
    scalar(name, task, loss).backward()
    if not math.isfinite(float(loss.detach())):
        raise ConfigError(
            f"{shown}: its loss is {float(loss.detach())} before any training; look at its "
            f"initialisation and at the scale of the data."
        )


def scalar(name: str, task: Task, loss: object) -> torch.Tensor:
    """The task's loss of a batch. Raises ConfigError where it is no scalar with a graph."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        raise ConfigError(
            f"task {name}: loss ({place(task.loss)}) gave {_form(loss)}, expected a scalar with a "
            f"graph, the mean over the samples."
        )
    return loss


def scored(name: str, task: Task, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The task's counts of a batch. Raises ConfigError where they are none."""
    counts = task.counts(out.detach(), y)
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


def _wide(shown: str, counts: torch.Tensor, classes: int) -> None:
    width = counts.shape[1]
    if width < classes:
        raise ConfigError(
            f"{shown}: it gives {width} outputs for {classes} classes; its last layer needs as "
            f"many as `classes` says."
        )


def _said(broken: Exception) -> str:
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


def _hint(x: Inputs) -> str:
    if any(not part.is_floating_point() for part in named(x).values()):
        return (
            " Whole numbers come to the model as they are: give floats, or a model that embeds "
            "them."
        )
    return ""


# -- what a run says once at its start -------------------------------------------------------------
def remarks(experiment: Experiment) -> Iterator[str]:
    """What the configuration comes to on its data, one sentence each."""
    config = experiment.config
    few = small_last_batches(experiment)
    if few:
        done = {"auto": "left out", "drop": "left out", "merge": "merged with the one before"}
        what = done.get(config.train.last_batch, "trained on, and may spoil the running statistics")
        yield (
            f"under BatchNorm the last batch of {few} of {config.clients} clients has only "
            f"{FEW} samples or 1; it is {what} (train.last_batch: {config.train.last_batch})."
        )
    judged = asked(config)
    if config.evaluate.every and config.evaluate.clients != "none" and len(judged) < config.clients:
        yield (
            f"an evaluation of all asks {len(judged)} of {config.clients} clients, drawn from the "
            f"seed (evaluate.most)."
        )
    yield from without_effect(config)


def without_effect(config: Config) -> Iterator[str]:
    """What is set beside a protection, an attack or a clock that is not. It is no error: a sweep
    may give it to all of its cells.
    """
    privacy, faults, link = config.privacy, config.faults, config.link
    for where, section, key, keys in (
        ("aggregation", config.aggregation, "rule", ()),
        ("privacy", privacy, "noise", ("where", "delta")),
        ("privacy.secagg", privacy.secagg, "protocol", ()),
        ("faults.malicious", faults.malicious, "clients", ()),
        ("link", link, "clock", ("step_ms",)),
    ):
        given, plain = structs.asdict(section), structs.asdict(type(section)())
        set_ = [k for k in keys or given if given[k] != plain[k]]
        if given[key] == plain[key] and set_:
            named = " and ".join(f"{where}.{k}" for k in set_)
            have = "have" if len(set_) > 1 else "has"
            yield f"{named} {have} no effect, since {where}.{key} is {given[key]}."


def small_last_batches(experiment: Experiment) -> int:
    """Clients whose epochs end with a batch, not their only one, of at most FEW samples, where the
    model has BatchNorm.
    """
    size, federation = experiment.config.train.batch_size, experiment.federation
    if federation is None or not any(own.batch_norm for own in experiment.settings):
        return 0
    return sum(
        len(p) > size and 0 < len(p) % size <= FEW and experiment.setting_of(client).batch_norm
        for client, p in enumerate(federation.parts)
    )
