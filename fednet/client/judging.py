"""What a client's models are worth: found within its task, or when all clients are asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fednet.algorithms.base import Algorithm, Payload, Tensors
from fednet.experiment.build import Experiment
from fednet.experiment.judging import JUDGED, Judgement
from fednet.experiment.store import ClientStore, Record
from fednet.loading import WrongPart, place
from fednet.training.evaluation import Counts, other_width
from fednet.training.hosts import SiteHost
from fednet.training.setting import Pair
from fednet.wire import messages as m
from fednet.wire.payload import weights_of


class ClientJudge:
    """keeps_local: whether clients keep their last local models. balanced: gives a test set of all
    classes alike, None where there is none; settled: called once it is there. may_lack: a local
    model that is gone is done without.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: ClientStore,
        keeps_local: bool,
        balanced: Callable[[], Pair] | None,
        settled: Callable[[], None],
        may_lack: bool,
    ) -> None:
        self._may_lack = may_lack
        self._experiment, self._store, self._keeps_local = experiment, store, keeps_local
        self._balanced, self._settled, self._lock = balanced, settled, threading.Lock()

    def within(
        self, state: object, x: Tensors | None, record: Record, host: SiteHost
    ) -> dict[str, Counts | None]:
        """What the model that came down and the client's own are worth, within its task."""
        method = self._experiment.algorithm
        own = method.personal(state, host.initial if host.trained is None else host.trained, host)
        return {
            "global": None
            if x is None or not method.has_global
            else host.evaluate(self._calibrated(x, record, host)),
            # Where nobody knows what came of the training, the initial model stands in for nothing.
            "personal": None if own is host.initial else host.evaluate(own),
        }

    def all(
        self,
        task: m.Task,
        body: memoryview,
        record: Record,
        start: str,
        host: SiteHost,
        progress: Callable[[str, int, int], None],
    ) -> dict[str, Counts | None]:
        """The evaluation of all clients at the run's end (or each round with `evaluate.clients:
        all`). A client that never took part is judged by the newest shared model, beside the
        initial values of what is not shared.
        """
        exp, method = self._experiment, self._experiment.algorithm
        section = exp.config.evaluate
        down = exp.exact.decode(exp.evaluation, task.form, body, fill=filled(exp, record))
        progress("evaluating", 0, 0)
        state = method.init_client(host.initial) if record.algorithm is None else record.algorithm
        local = self._store.local(task.key.client, start, self._may_lack)
        newest = weights_of(down)
        if section.shared == "latest":
            state = method.with_latest(state, down)
        if newest is not None and (exp.config.model.buffers == "local" or exp.federation is None):
            newest = self._calibrated(newest, record, host)
        whole = local if local is not None else _over(host.initial, newest, host)
        judged: dict[str, Counts | None] = {}
        if method.has_global and newest is not None:
            judged["global"] = host.evaluate(newest)
        elif section.shared == "latest":
            whole = _over(whole, newest, host)
        if not self._keeps_local and not method.personalised:
            return judged
        personal = method.personal(state, whole, host)
        judged["personal"] = host.evaluate(personal)
        if task.judge and self._balanced is not None:
            # Drift: the same personal model on a balanced test set of all.
            judged["balanced"] = host.evaluate(personal, self._balanced_set())
        if task.judge and section.finetune:
            # A personal model beside the local one goes on from itself.
            if isinstance(personal, Tensors) and personal is not whole:
                personal = host.train(personal).x
            else:
                tuned = host.train(_over(whole, newest, host)).x
                personal = method.personal(state, tuned, host)
            judged["finetuned"] = host.evaluate(personal)
            if self._balanced is not None:
                judged["finetuned_balanced"] = host.evaluate(personal, self._balanced_set())
        return judged

    def _calibrated(self, x: Tensors, record: Record, host: SiteHost) -> Tensors:
        """The shared model with BatchNorm statistics to be judged by, where it comes without: the
        client's own, or, before it has any, those of its training samples (at least two).
        """
        exp = self._experiment
        has_own = exp.config.model.buffers == "local" and record.buffers is not None
        if not exp.uncalibrated or has_own or host.n < 2:
            return x
        return host.recalibrated(x).select(x.layout)

    def _balanced_set(self) -> Pair:
        assert self._balanced is not None
        with self._lock:
            if not hasattr(self, "_balanced_cache"):
                self._balanced_cache = self._balanced()
                self._settled()
            return self._balanced_cache

    def payload(self, judged: Mapping[str, Counts | None]) -> Payload:
        """These counts as they travel."""
        width = self._experiment.setting.counts_width
        counts, losses = np.zeros((len(JUDGED), 2, width), dtype=np.int64), np.zeros(len(JUDGED))
        for row, name in enumerate(JUDGED):
            found = judged.get(name)
            if found is None or not found.n:
                continue
            if found.table.shape[1] != width:
                raise other_width(self._experiment.setting.task, width, found.table.shape[1])
            counts[row] = found.table
            losses[row] = found.loss
        return Judgement(counts=torch.from_numpy(counts), losses=torch.from_numpy(losses))  # type: ignore[call-arg]


def came_to(method: Algorithm, up: Payload, host: SiteHost, wanted: bool) -> None:
    """Where the training came to, which a loop of the method's own says by what it sends. wanted:
    the client is judged by it. Raises WrongPart where nobody knows it.
    """
    if host.trained is not None:
        return
    sent = weights_of(up)
    if sent is not None and sent.layout == host.layout:
        host.trained = sent.to(host.device)
        return
    changed = [name for name in up.fields if isinstance(getattr(up, name), Tensors)]
    if wanted and changed and type(method).personal is Algorithm.personal:
        raise WrongPart(
            f"local of {type(method).__name__} ({place(type(method).local)}) sends {changed[0]}, "
            f"not the whole model, and did not train by host.train: nobody knows the client's "
            f"model, by which it is judged. Set host.trained = fednet.Tensors.of(module), or "
            f"evaluate.keep_local: never"
        )


def filled(experiment: Experiment, record: Record) -> Tensors:
    """Buffers for what comes without: the client's own, or the initial ones."""
    initial = experiment.setting.initial.select(experiment.shared)
    own = record.own(experiment.setting.initial)
    return initial if own is None else own.select(experiment.shared)


def _over(whole: Tensors, newest: Tensors | None, host: SiteHost) -> Tensors:
    """A whole model with the newest shared part in its place; the buffers that do not cross are the
    client's own.
    """
    if newest is None:
        return whole
    rest = host.rest if whole is host.initial else whole
    return rest.to(host.device).merge(newest.to(host.device))
