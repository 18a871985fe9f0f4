"""A client's evaluations: within its training task, or when all clients are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from fednet.algorithms.base import Algorithm, Payload, Tensors
from fednet.config import Config
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import EVALUATED_MODELS, DetailedEvaluationReply, EvaluationReply
from fednet.experiment.store import Record
from fednet.loading import WrongPart, place
from fednet.training import metrics
from fednet.training.evaluation import Counts, other_width
from fednet.training.hosts import ClientHost
from fednet.training.setting import Pair
from fednet.wire import messages as m
from fednet.wire.payload import tensors_of, weights_of


def keeps_local(config: Config, personalised: bool) -> bool:
    """Returns whether clients keep their last local model, to evaluate it."""
    section = config.evaluate
    if not section.every or section.clients == "none":
        return False
    return personalised or section.most is None or config.clients <= section.most


def evaluate_in_training_task(
    exp: Experiment, state: object, x: Tensors | None, record: Record, host: ClientHost
) -> dict[str, Counts]:
    """Evaluates the model that came down and the client's own, within its training task."""
    method = exp.algorithm
    trained = host.initial if host.trained is None else host.trained
    own = method.personal_model(state, trained, host)
    found: dict[str, Counts] = {}
    if x is not None and method.has_global:
        found["global"] = host.evaluate(_calibrate(exp, x, record, host))
    # If the method does not say what it trained, the initial model is not evaluated instead.
    if own is not host.initial:
        found["personal"] = host.evaluate(own)
    return found


def evaluate_in_own_task(
    exp: Experiment,
    task: m.Task,
    down: Payload,
    local: Tensors | None,
    record: Record,
    host: ClientHost,
    balanced: Callable[[], Pair] | None,
) -> dict[str, Counts]:
    """Evaluates a client's models where all clients are asked: at the run's end, or each round with
    `evaluate.clients: all`. A client that never took part is evaluated by the newest shared model,
    beside the initial values of what is not shared. local: its last local model, where it is kept.
    balanced() returns a test set with as many samples of each class; None if there is none.
    """
    method = exp.algorithm
    section = exp.config.evaluate
    state = method.init_client(host.initial) if record.algorithm is None else record.algorithm
    newest = weights_of(down)
    if section.shared == "latest":
        state = method.with_latest(state, down)
    if newest is not None and (exp.config.model.buffers == "local" or exp.federation is None):
        newest = _calibrate(exp, newest, record, host)
    whole = local if local is not None else _merge_shared(host.initial, newest, host)
    found: dict[str, Counts] = {}
    if method.has_global and newest is not None:
        found["global"] = host.evaluate(newest)
    elif section.shared == "latest":
        whole = _merge_shared(whole, newest, host)
    if not keeps_local(exp.config, method.personalised) and not method.personalised:
        return found
    personal = method.personal_model(state, whole, host)
    found["personal"] = host.evaluate(personal)
    if task.evaluates and balanced is not None:
        # Drift: the same personal model on a balanced test set of all.
        found["balanced"] = host.evaluate(personal, balanced())
    if task.evaluates and section.finetune:
        # A personal model other than the local one is tuned itself.
        if isinstance(personal, Tensors) and personal is not whole:
            personal = host.train(personal).x
        else:
            tuned = host.train(_merge_shared(whole, newest, host)).x
            personal = method.personal_model(state, tuned, host)
        found["finetuned"] = host.evaluate(personal)
        if balanced is not None:
            found["finetuned_balanced"] = host.evaluate(personal, balanced())
    return found


def reply(exp: Experiment, found: Mapping[str, Counts]) -> Payload:
    width = exp.setting.counts_width
    counts = np.zeros((len(EVALUATED_MODELS), 2, width), dtype=np.int64)
    losses = np.zeros(len(EVALUATED_MODELS))
    shapes = exp.setting.more
    more = np.zeros((len(EVALUATED_MODELS), metrics.size(shapes)), dtype=np.int64)
    for row, name in enumerate(EVALUATED_MODELS):
        of = found.get(name)
        if of is None or not of.n:
            continue
        if of.table.shape[1] != width:
            raise other_width(exp.setting.task, width, of.table.shape[1])
        counts[row] = of.table
        losses[row] = of.loss
        if shapes:
            more[row] = metrics.flat(of.more(), shapes)
    whole = torch.from_numpy(counts), torch.from_numpy(losses)
    if not shapes:
        return EvaluationReply(*whole)  # type: ignore[call-arg]
    places = more.reshape(-1).nonzero()[0]
    sparse = torch.from_numpy(np.stack([places, more.reshape(-1)[places]]))
    return DetailedEvaluationReply(*whole, sparse)  # type: ignore[call-arg]


def set_trained(method: Algorithm, up: Payload, host: ClientHost, wanted: bool) -> None:
    """Sets `host.trained` from what the method sends, where a training loop of its own did not set
    it. wanted: the client is evaluated by it. Raises WrongPart if it is wanted and not known.
    """
    if host.trained is not None:
        return
    sent = weights_of(up)
    if sent is not None and sent.layout == host.layout:
        host.trained = sent.to(host.device)
        return
    changed = list(tensors_of(up))
    if wanted and changed and type(method).personal_model is Algorithm.personal_model:
        raise WrongPart(
            f"client_update of {type(method).__name__} ({place(type(method).client_update)}) sends "
            f"{changed[0]}, "
            f"not the whole model, and did not train by host.train: nobody knows the client's "
            f"model, which has to be evaluated. Set host.trained = fednet.Tensors.of(module), or "
            f"evaluate.clients: none"
        )


def _calibrate(exp: Experiment, x: Tensors, record: Record, host: ClientHost) -> Tensors:
    """Returns the shared model with BatchNorm statistics to evaluate it by, where it comes without:
    the client's own, or, before it has any, those of its training samples (at least two).
    """
    has_own = exp.config.model.buffers == "local" and record.buffers is not None
    if not exp.uncalibrated or has_own or host.n < 2:
        return x
    return host.recalibrate(x).select(x.layout)


def _merge_shared(whole: Tensors, newest: Tensors | None, host: ClientHost) -> Tensors:
    """Returns a whole model with the newest shared part in its place; the buffers that do not cross
    are the client's own.
    """
    if newest is None:
        return whole
    rest = host.rest if whole is host.initial else whole
    return rest.to(host.device).merge(newest.to(host.device))
