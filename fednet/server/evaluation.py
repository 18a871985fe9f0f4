"""Evaluates a round's model, on the server's test set and by the clients, and computes its hashes,
for the records.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fednet import world
from fednet.algorithms.base import Algorithm, Payload, Tensors
from fednet.algorithms.state import PerClient, State, content_sha256
from fednet.experiment.build import Experiment
from fednet.experiment.rundir import RunDirectory
from fednet.files import read_lines
from fednet.plain import JsonDict
from fednet.records import Client, Round
from fednet.records.manifest import RunProgress
from fednet.robust.stack import equal_weights
from fednet.server import exports
from fednet.server.client_evaluation import evaluated_clients, evaluation_due
from fednet.server.guards import lower_counts, share_of_one
from fednet.server.open_round import OpenRound, RunState
from fednet.tensors import combine
from fednet.training import metrics
from fednet.training.evaluation import Counts
from fednet.training.evaluation import evaluate as evaluate_model
from fednet.training.hosts import ServerHost
from fednet.training.setting import Pair
from fednet.training.tasks import has_accuracy

DOUBTFUL = 0.01
# (round, what goes down, the state before, whether it is the run's last): what the clients found
Ask = Callable[[int, Payload, RunState, bool], dict[int, dict[str, Counts]]]
Evaluated = Mapping[int, Mapping[str, Counts]]  # by client and model


class Evaluator:
    """Evaluates a run's models, and has its clients evaluate them."""

    def __init__(
        self,
        experiment: Experiment,
        host: ServerHost,
        files: RunDirectory,
        warn: Callable[[str], None],
        ask: Ask,
    ) -> None:
        """warn: gets a sentence for each metric that may be off."""
        self.experiment = experiment
        self.host = host
        self.files = files
        self.config = experiment.config
        self.method = experiment.algorithm
        self._warn = warn
        self._ask = ask
        self._doubted: set[str] = set()  # metrics that were warned of
        # What a client's own model is: `personal`, or `local` where the method keeps none.
        self.own_model = "personal" if self.method.personalised else "local"
        # The server's inputs and labels, where it has them and evaluates.
        self.test: Pair | None = None
        self.validation: Pair | None = None  # the same, held out of the training samples
        federation = experiment.federation
        device = host.device
        if federation is not None and self.config.evaluate.every:
            data = federation.data
            held = federation.only(federation.validation)
            if data.n_test:
                self.test = data.inputs(data.test[0], device), data.test[1].to(device)
            if held is not None:
                self.validation = held.inputs(held.train[0], device), held.train[1].to(device)
        # Whose inputs BatchNorm's statistics are measured over, `public` or `test`; None where
        # there is no need to, or where the sites have all samples.
        self.measured_over: str | None = None
        if experiment.uncalibrated and host.public is not None:
            self.measured_over = "public"
        elif experiment.uncalibrated and self.test is not None:
            self.measured_over = "test"

    def newest(self, server: State) -> Tensors | None:
        """The shared model, or shared part, as it is evaluated and written out: its BatchNorm
        statistics are measured over the public or the test inputs, where the clients' do not come
        up.
        """
        x = self.method.shared_part(server)
        if x is None or self.measured_over is None:
            return x
        inputs = self.test if self.measured_over == "test" else self.host.public_inputs
        assert inputs is not None
        return self.host.recalibrate(x, inputs[0])

    # -- a round -----------------------------------------------------------------------------------
    def evaluate(self, round: OpenRound) -> Tensors | None:
        """Adds the round's training loss and, in a round with an evaluation, the scores of its
        model. Returns the model: in such a round as it was evaluated (see `newest`).
        """
        config = self.config
        method = self.method
        record = round.record
        after = round.after
        weights = dict.fromkeys(round.runs, 1.0)
        if not equal_weights(config):
            weights = method.weights(after.server, round.runs)
        total = sum([weights[client] for client in round.runs])
        if total:
            losses = [weights[client] * run.loss for client, run in sorted(round.runs.items())]
            record.train_loss = sum(losses) / total
        if not evaluation_due(config, round.number):
            return method.shared_part(after.server)
        model = self.newest(after.server)
        self.score(record, model)
        if config.evaluate.clients == "all":
            round.evaluated = self.ask_all(round.number, model, after, final=False)
        left_out = {c: round.evaluated[c] for c in world.held_out(config) & round.evaluated.keys()}
        may_train = {c: found for c, found in round.evaluated.items() if c not in left_out}
        names = set[str]()  # of the models that were evaluated
        if may_train:
            found = pool_by_model(may_train, self.largest_share(may_train))
            names |= found.keys()
            if has_accuracy(self.host.task):
                record.client_accuracy = {name: accuracy for name, (accuracy, _) in found.items()}
            measured = {name: self.metrics_of(counts) for name, (_, counts) in found.items()}
            record.client_metrics = measured if any(measured.values()) else None
        if left_out:
            found = pool_by_model(left_out, self.largest_share(left_out))
            names |= found.keys()
            if has_accuracy(self.host.task):
                record.held_out = {name: accuracy for name, (accuracy, _) in found.items()}
        if "personal" in names:
            record.own_model = self.own_model
        return model

    def metrics_of(self, counts: Counts) -> dict[str, float]:
        """The metrics of `evaluate.metrics`; and the loss, where the task has no accuracy."""
        self.doubt(counts)
        found = counts.metrics(self.config.evaluate.metrics)
        if not has_accuracy(self.host.task):
            found = {"loss": counts.mean_loss, **found}
        return found

    def score(self, record: Round, model: Tensors | None) -> None:
        """Adds the global model's scores on the server's test set."""
        section = self.config.evaluate
        host = self.host
        if not self.method.has_global or not section.global_ or model is None:
            return
        if self.test is not None:
            module = host.model(model)
            size = section.batch_size
            counts = evaluate_model(module, self.test, host.task, size, tuple(host.setting.more))
            record.test_loss = counts.mean_loss
            if has_accuracy(host.task):
                record.set(
                    test_accuracy=counts.accuracy,
                    correct_by_class=counts.table[0].tolist(),
                    total_by_class=counts.table[1].tolist(),
                )
            if section.metrics:
                record.metrics = counts.metrics(section.metrics)
                self.doubt(counts)
            if self.validation is not None and has_accuracy(host.task):
                held = evaluate_model(module, self.validation, host.task, size)
                record.validation_accuracy = held.accuracy
        record.batch_norm_measured_over = self.measured_over

    def doubt(self, counts: Counts) -> None:
        """Warns, once in a run, of a metric that may be off by more than `DOUBTFUL`."""
        if not counts.n:
            return
        for name, error in metrics.errors(self.config.evaluate.metrics, counts.more()).items():
            if error > DOUBTFUL and name not in self._doubted:
                self._doubted.add(name)
                self._warn(
                    f"{name} may be off by {error:.2g}: many samples have almost the same score, "
                    f"and are counted as equal"
                )

    def evaluate_last(self, round: OpenRound, progress: RunProgress) -> None:
        """Where the run ends with this round, which was not evaluated: its global model is, as the
        one that the run leaves.
        """
        if not self.config.evaluate.every or evaluation_due(self.config, round.number):
            return
        model = self.newest(round.after.server)
        self.score(round.record, model)
        round.record.set(**self.hashes(round.after, model))
        self.note_best(progress, round.record, model)

    def hashes(self, after: RunState, model: Tensors | None) -> JsonDict:
        """The record's hashes of what a round left, and of the model as it was evaluated."""
        whole, by_name = model_hashes(self.method, after.server)
        found = {
            "model_sha256": whole,
            "tensor_sha256": by_name if self.config.record.tensors else None,
            "clients_sha256": combine(s for _, s in sorted(after.states.items()) if s),
        }
        if model is not None and model is not self.method.shared_model(after.server):
            found["evaluated_sha256"] = model.sha256()
        return found

    def note_best(self, progress: RunProgress, record: Round, model: Tensors | None) -> None:
        """Notes the round as the best so far, where it is."""
        name = self.config.stop.metric
        best = progress.best
        if name == "accuracy" and self.config.stop.accuracy is None:
            name = "accuracy" if has_accuracy(self.host.task) else "test_loss"
        # The clients' own models where there is no global model or test set.
        if name in ("test_loss", "validation_accuracy"):
            value = record.get(name)
            model_of = "global"
        elif record.test_accuracy is not None:
            value = record.test_accuracy
            model_of = "global"
            if name != "accuracy":
                value = (record.metrics or {}).get(name)
        else:
            value = (record.client_accuracy or {}).get("personal")
            model_of = self.own_model
            if name != "accuracy":
                value = (record.client_metrics or {}).get("personal", {}).get(name)
        # No later value would be better than a NaN.
        if value is None or not math.isfinite(value):
            return
        lower = metrics.lower_is_better(name)
        if best is None or (value < best if lower else value > best):
            progress.best = value
            progress.best_round = record.round
            progress.best_of = model_of
            if self.config.checkpoint.best and model is not None:
                named = self.experiment.state_dict(model)
                exports.save_model(self.files.path / "best.safetensors", named)

    # -- the last evaluation -----------------------------------------------------------------------
    def evaluate_run(self, progress: RunProgress, carried: RunState) -> list[JsonDict]:
        """The clients are asked once, at the end. Returns their lines."""
        config = self.config
        section = self.config.evaluate
        # What an earlier end of the run found was of another model.
        progress.client_metrics = {}
        progress.confusion = {}
        if not section.every:
            return []
        model = self.newest(carried.server)
        evaluated = dict[int, Any]()
        lines = list[JsonDict]()
        left_out = world.held_out(config)
        if section.clients != "none":
            self.files.flush()
            rows = read_lines(self.files.path / "rounds.jsonl")
            took_part = {c for row in rows for c in row["completed"]}
            evaluated = self.ask_all(progress.round, model, carried, final=True)
            for client, counts_by_model in sorted(evaluated.items()):
                row = self.client_row(progress.round, client, counts_by_model)
                row.final = True
                row.took_part = client in took_part
                row.held_out = client in left_out or None
                lines.append(row.line())
        may_train = {c: found for c, found in evaluated.items() if c not in left_out}
        found = pool_by_model(may_train, self.largest_share(may_train))
        if section.metrics:
            by_model = {
                name: counts.metrics(section.metrics) for name, (_, counts) in found.items()
            }
            progress.client_metrics = by_model

        # `Summary.confusion`: of the global model on the server's test set; without one, of the
        # global model, or else the clients' own models, on the clients' tests.
        host = self.host
        method = self.method
        own = "global" if method.has_global else "personal"
        if "confusion" not in host.setting.more:
            return lines
        if method.has_global and section.global_ and model is not None and self.test is not None:
            module = host.model(model)
            size = section.batch_size
            counts = evaluate_model(module, self.test, host.task, size, ("confusion",))
            progress.confusion = {"model": "global", "tested_on": "server"}
        elif own in found:
            counts = found[own][1]
            shown = "global" if method.has_global else self.own_model
            progress.confusion = {"model": shown, "tested_on": "clients"}
        else:
            return lines
        progress.confusion["counts"] = counts.more()["confusion"].tolist()
        return lines

    def ask_all(
        self, round: int, model: Tensors | None, carried: RunState, final: bool
    ) -> dict[int, dict[str, Counts]]:
        """The accuracies of all clients asked, by client. model: the shared model or part."""
        question = self.experiment.evaluation
        method = self.method
        values: dict[str, object] = {
            name: getattr(carried.server, name)
            for name in method.shared_state
            if name in question.fields
        }
        if question.weights_field is not None:
            if model is None:  # a method that has a global model, and gave none
                self.files.event(
                    "not_evaluated", round, clients=evaluated_clients(self.config, round)
                )
                return {}
            values[question.weights_field] = model
        evaluated = self._ask(round, question(**values), carried, final)
        if not method.personalised:  # who never trained has no model but the global one
            for client in world.held_out(self.config) & evaluated.keys():
                for name in ("personal", "balanced"):
                    evaluated[client].pop(name, None)
        return evaluated

    def largest_share(self, evaluated: Evaluated) -> float | None:
        """The largest part of the clients' accuracy that one may have: the sizes of test sets are
        the sites' own word where they bring their data.
        """
        known = self.experiment.federation is not None
        return None if known else share_of_one(self.experiment, len(evaluated))

    # -- clients.jsonl -----------------------------------------------------------------------------
    def client_lines(self, round: OpenRound) -> list[JsonDict]:
        """The round's lines of clients.jsonl: of each client that evaluated or reported something,
        the scores of its models and, if it trained in this round, its training.
        """
        left_out = world.held_out(self.config)
        replies = round.main.done
        lines = []
        for client in sorted({*round.reports, *round.evaluated}):
            counts_by_model = round.evaluated.get(client, {})
            row = self.client_row(round.number, client, counts_by_model)
            row.held_out = client in left_out or None
            row.reported = dict(round.reports.get(client, {})) or None
            run = round.runs.get(client)
            reply = replies.get(client)
            if run is not None:
                row.set(samples=run.n, train_loss=run.loss, steps=run.steps)
            if reply is not None:
                worker = reply.record.worker
                row.seconds = reply.message.seconds
                row.set(host=worker.get("host"), device=worker.get("device"))
            lines.append(row.line())
        return lines

    def client_row(self, round: int, client: int, counts_by_model: Mapping[str, Counts]) -> Client:
        """A line of clients.jsonl with the scores of a client's models."""
        row = Client(round=round, client=client)
        for model, counts in counts_by_model.items():
            if not has_accuracy(self.host.task):
                continue
            scores = {
                f"accuracy_{model}": counts.accuracy,
                f"correct_{model}": int(counts.table[0].sum()),
                f"tested_{model}": counts.n,
            }
            row.set(**scores)
        if counts_by_model:
            first = next(iter(counts_by_model.values()))
            row.test_samples = counts_by_model.get("personal", first).n
            found = {model: self.metrics_of(c) for model, c in counts_by_model.items()}
            if any(found.values()):
                row.metrics = found
        return row


# -- counts of many clients ------------------------------------------------------------------------
def pool_by_model(evaluated: Evaluated, share: float | None) -> dict[str, tuple[float, Counts]]:
    """By model that was evaluated: the accuracy over all test samples of the clients (not a mean of
    accuracies), and the sums of their losses and further counts. share: see `largest_share`; a
    client that would have more counts for fewer samples.
    """
    by_name: dict[str, dict[int, Counts]] = {}
    for client, counts_by_model in sorted(evaluated.items()):
        for name, counts in counts_by_model.items():
            by_name.setdefault(name, {})[client] = counts
    found = {}
    for name, clients in by_name.items():
        weights = {c: counts.n for c, counts in clients.items()}
        if share is not None:
            weights |= lower_counts(weights, share)
        right = 0.0
        loss = 0.0
        n = 0
        sums = dict[str, Any]()
        for client, counts in clients.items():
            part = weights[client] / counts.n
            right += int(counts.table[0].sum()) * weights[client] / counts.n
            loss += counts.loss * part
            n += counts.n
            for what, more in counts.more().items():
                mine = more if part == 1 else more * part
                sums[what] = sums[what] + mine if what in sums else mine
        whole = Counts(np.zeros((2, 0), dtype=np.int64), loss, n, functools.partial(dict, sums))
        found[name] = right / sum(weights.values()), whole
    return found


def model_hashes(method: Algorithm, server: State) -> tuple[str, dict[str, str]]:
    """(`model_sha256`, hashes by tensor) of the shared model. Of a method that keeps none, the hash
    is that of the whole state, its rows by what they hold, and there are no tensors to name.
    """
    shared = method.shared_model(server)
    if shared is not None:
        by_name = shared.tensor_sha256
        return combine(by_name.values()), by_name
    rows: JsonDict = {
        name: PerClient(value.layout, dict(value))
        for name, value in vars(server).items()
        if isinstance(value, PerClient)
    }
    return content_sha256(server.replace(**rows)), {}
