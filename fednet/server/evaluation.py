"""Evaluates a round's model, on the server's test set and by the clients, and computes its hashes,
for the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fednet import records, world
from fednet.algorithms.base import Algorithm, Tensors
from fednet.algorithms.state import PerClient, State, content_sha256
from fednet.config import Config
from fednet.experiment.evaluations import evaluated_clients, evaluation_due
from fednet.files import read_lines
from fednet.plain import JsonDict
from fednet.records import Client
from fednet.records.manifest import RunProgress
from fednet.robust.stack import equal_weights
from fednet.server import exports
from fednet.server.aggregation import lowered, share_of_one
from fednet.server.exchange import Exchanges, RunState
from fednet.server.round import OpenRound, reached
from fednet.server.session import Session
from fednet.tensors import combine
from fednet.training import metrics
from fednet.training.evaluation import Counts, evaluate
from fednet.training.setting import Pair

Evaluated = Mapping[int, Mapping[str, Counts]]  # by client and model


class Evaluator:
    def __init__(self, session: Session, exchanges: Exchanges) -> None:
        self.experiment, self.config = session.experiment, session.config
        self.method, self.directory = session.experiment.algorithm, session.files
        self.host, self._exchanges = session.host, exchanges
        # The server's inputs and labels, where it has them and evaluates.
        self._test: Pair | None = None
        self._validation: Pair | None = None
        federation, device = self.experiment.federation, self.host.device
        if federation is not None and self.config.evaluate.every:
            data, held = federation.data, federation.validation_data()
            if data.n_test:
                self._test = data.inputs(data.test[0], device), data.test[1].to(device)
            if held is not None:
                self._validation = held.inputs(held.train[0], device), held.train[1].to(device)

    # -- the model ---------------------------------------------------------------------------------
    def newest(self, server: State, measured: bool = True) -> Tensors | None:
        """The shared model, or shared part, as it is evaluated and written out. measured: its
        BatchNorm statistics too, over the public or the test inputs, where the clients' do not come
        up.
        """
        x = self.method.shared_part(server)
        if x is None or not measured or self.calibrated_by is None:
            return x
        inputs = self.host.public_inputs if self.calibrated_by == "public" else self._test
        assert inputs is not None
        return self.host.recalibrated(x, inputs[0])

    @property
    def calibrated_by(self) -> str | None:
        """Whose inputs BatchNorm's statistics are measured over, `public` or `test`. None where
        there is no need to, or where the sites have all samples.
        """
        if not self.experiment.uncalibrated:
            return None
        if self.host.public is not None:
            return "public"
        return None if self._test is None else "test"

    @property
    def own_model(self) -> str:
        """What a client's own model is: `personal`, or `local` where the method keeps none."""
        return "personal" if self.method.personalised else "local"

    # -- a round -----------------------------------------------------------------------------------
    def evaluate(self, round: OpenRound, keep: dict[int, str]) -> Tensors | None:
        """Adds the round's losses, and its accuracies where they are due. Returns its model as it
        was evaluated. keep: of the clients' states, which they must not delete yet.
        """
        record, section = round.record, self.config.evaluate
        weights = dict.fromkeys(round.runs, 1.0)
        if not equal_weights(self.config):
            weights = self.method.weights(round.after.server, round.runs)
        total = sum([weights[client] for client in round.runs])
        if total:
            losses = [weights[client] * run.loss for client, run in sorted(round.runs.items())]
            record.train_loss = sum(losses) / total
        due = evaluation_due(self.config, round.number)
        model = self.newest(round.after.server, measured=due)
        if not due:
            return model
        self._score(record, model)
        if section.clients == "all":
            round.evaluated = self._ask_all(round.number, model, round.after, keep, final=False)
        may_train, left_out = self._by_group(round.evaluated)
        if may_train:
            record.client_accuracy = pooled(may_train, self._share(len(may_train)))
            record.client_metrics = self._pooled_metrics(may_train)
        if left_out:
            record.held_out = pooled(left_out, self._share(len(left_out)))
        if "personal" in {**(record.client_accuracy or {}), **(record.held_out or {})}:
            record.own_model = self.own_model
        return model

    def _by_group(self, evaluated: Evaluated) -> tuple[Evaluated, Evaluated]:
        """The counts of the clients that may train, and of those that are held out."""
        left_out = world.held_out(self.config)
        return (
            {client: counts for client, counts in evaluated.items() if client not in left_out},
            {client: counts for client, counts in evaluated.items() if client in left_out},
        )

    def _share(self, evaluated: int) -> float | None:
        """The largest part of the clients' accuracy that one may have: the sizes of test sets are
        the sites' own word where they bring their data.
        """
        known = self.experiment.federation is not None
        return None if known else share_of_one(self.experiment, evaluated)

    def _pooled_metrics(self, evaluated: Evaluated) -> dict[str, dict[str, float]] | None:
        """`evaluate.metrics` over all test samples of these clients, by model."""
        names = self.config.evaluate.metrics
        if not names:
            return None
        found = {}
        for model, counts, weights in weighed(evaluated, self._share(len(evaluated))):
            found[model] = summed(counts, weights).metrics(names)
        return found

    def stopped(self, round: OpenRound, progress: RunProgress) -> None:
        """Where the run ends with this round, which is not the last of its configuration, and was
        not evaluated: its global model is evaluated all the same, as the one that the run leaves.
        """
        if not self.config.evaluate.every or evaluation_due(self.config, round.number):
            return
        if reached(self.config, progress) is None:
            return
        model = self.newest(round.after.server)
        self._score(round.record, model)
        round.record.set(**self.hashes(round.after, model))
        self.best(progress, round.record, model)

    def _score(self, record: records.Round, model: Tensors | None) -> None:
        """Adds the global model's scores on the server's test set."""
        section, host = self.config.evaluate, self.host
        if not self.method.has_global or not section.global_ or model is None:
            return
        if self._test is not None:
            module, size = host.model(model), section.batch_size
            counts = evaluate(module, self._test, host.task, size, tuple(host.setting.more))
            record.set(
                test_loss=counts.mean_loss,
                test_accuracy=counts.accuracy,
                correct_by_class=counts.table[0].tolist(),
                total_by_class=counts.table[1].tolist(),
            )
            if section.metrics:
                record.metrics = counts.metrics(section.metrics)
            if self._validation is not None:
                held = evaluate(module, self._validation, host.task, size)
                record.validation_accuracy = held.accuracy
        record.batch_norm_measured_over = self.calibrated_by

    def hashes(self, carried: RunState, model: Tensors | None) -> JsonDict:
        """The record's hashes of what a round left, and of the model as it was evaluated."""
        whole, by_name = model_hashes(self.method, carried.server)
        found = {
            "model_sha256": whole,
            "tensor_sha256": by_name if self.config.record.tensors else None,
            "clients_sha256": combine(s for _, s in sorted(carried.states.items()) if s),
        }
        if model is not None and model is not self.method.shared_model(carried.server):
            found["evaluated_sha256"] = model.sha256()
        return found

    def best(self, progress: RunProgress, record: records.Round, model: Tensors | None) -> None:
        """Notes the round as the best so far, where it is."""
        name = self.config.stop.metric
        # The clients' own models where there is no global model or test set.
        if name in ("test_loss", "validation_accuracy"):
            value, model_of = record.get(name), "global"
        elif record.test_accuracy is not None:
            value, model_of = record.test_accuracy, "global"
            if name != "accuracy":
                value = (record.metrics or {}).get(name)
        else:
            value, model_of = (record.client_accuracy or {}).get("personal"), self.own_model
            if name != "accuracy":
                value = (record.client_metrics or {}).get("personal", {}).get(name)
        if value is None:
            return
        best = progress.best
        lower = metrics.lower_is_better(name)
        if best is None or (value < best if lower else value > best):
            progress.best, progress.best_round, progress.best_of = value, record.round, model_of
            if self.config.checkpoint.best and model is not None:
                named = self.experiment.state_dict(model)
                exports.save_model(self.directory.path / "best.safetensors", named)

    # -- the last evaluation -----------------------------------------------------------------------
    def last(
        self, progress: RunProgress, carried: RunState, keep: dict[int, str]
    ) -> list[JsonDict]:
        """The clients are asked once, at the end. Returns their lines."""
        round = progress.round
        section = self.config.evaluate
        if not section.every:
            return []
        if section.clients == "none":
            progress.confusion = self._confusion(carried, {})
            return []
        self.directory.flush()
        rows = read_lines(self.directory.path / "rounds.jsonl")
        took_part = {c for row in rows for c in row["completed"]}
        evaluated = self._ask_all(round, self.newest(carried.server), carried, keep, final=True)
        may_train = self._by_group(evaluated)[0]
        progress.client_metrics = self._pooled_metrics(may_train) or {}
        progress.confusion = self._confusion(carried, may_train)
        left_out, lines = world.held_out(self.config), []
        for client, counts_by_model in sorted(evaluated.items()):
            row = client_row(round, client, counts_by_model, section.metrics)
            row.final, row.took_part = True, client in took_part
            row.held_out = client in left_out or None
            lines.append(row.line())
        return lines

    def _confusion(self, carried: RunState, evaluated: Evaluated) -> JsonDict:
        """Returns `Summary.confusion`: of the global model on the server's test set; without one,
        of the global model, or else the clients' own models, on the tests of the clients
        `evaluated`. Empty if no metric counts a confusion matrix.
        """
        setting = self.host.setting
        if "confusion" not in setting.more:
            return {}
        method, section = self.method, self.config.evaluate
        model = self.newest(carried.server)
        if method.has_global and section.global_ and model is not None and self._test is not None:
            module = self.host.model(model)
            found = evaluate(module, self._test, self.host.task, section.batch_size, ("confusion",))
            counts = found.more()["confusion"].tolist()
            return {"model": "global", "tested_on": "server", "counts": counts}
        wanted = "global" if method.has_global else "personal"
        for name, by_client, weights in weighed(evaluated, self._share(len(evaluated))):
            if name == wanted:
                shown = "global" if method.has_global else self.own_model
                counts = summed(by_client, weights).more()["confusion"].tolist()
                return {"model": shown, "tested_on": "clients", "counts": counts}
        return {}

    def _ask_all(
        self,
        round: int,
        model: Tensors | None,
        carried: RunState,
        keep: Mapping[int, str],
        final: bool,
    ) -> dict[int, dict[str, Counts]]:
        """The accuracies of all clients asked, by client. model: the shared model or part."""
        question = self.experiment.evaluation
        values: dict[str, object] = {
            name: getattr(carried.server, name)
            for name in self.method.shared_state
            if name in question.fields
        }
        if question.roles.weights is not None:
            if model is None:  # a method that has a global model, and gave none
                self.directory.event("not_evaluated", round, clients=evaluated_clients(self.config))
                return {}
            values[question.roles.weights] = model
        down = question(**values)
        evaluated = self._exchanges.evaluate(round, down, carried, keep, final)
        if not self.method.personalised:  # who never trained has no model but the global one
            for client in world.held_out(self.config) & evaluated.keys():
                for name in ("personal", "balanced"):
                    evaluated[client].pop(name, None)
        return evaluated


def pooled(evaluated: Evaluated, share: float | None = None) -> dict[str, float]:
    """Accuracy over all test samples of the evaluated clients (not a mean of accuracies), by the
    model that was evaluated. share: the largest part that one client may have in it, where the
    sizes of test sets are the sites' own word.
    """
    found = {}
    for name, clients, weights in weighed(evaluated, share):
        right = sum(int(x.table[0].sum()) * weights[c] / x.n for c, x in clients.items())
        found[name] = right / sum(weights.values())
    return found


def weighed(
    evaluated: Evaluated, share: float | None
) -> Iterator[tuple[str, dict[int, Counts], dict[int, int]]]:
    """Yields each model that was evaluated: its name, and its counts and their weight by client, in
    ascending order. share: see `pooled`.
    """
    by_name: dict[str, dict[int, Counts]] = {}
    for client, counts_by_model in sorted(evaluated.items()):
        for name, counts in counts_by_model.items():
            by_name.setdefault(name, {})[client] = counts
    for name, clients in by_name.items():
        sizes = {c: counts.n for c, counts in clients.items()}
        yield name, clients, sizes if share is None else sizes | lowered(sizes, share)


def summed(clients: Mapping[int, Counts], weights: Mapping[int, int]) -> Counts:
    """The counts of all these clients together. A client whose weight is lower than its number of
    samples counts for fewer of them.
    """
    loss, n, sums = 0.0, 0, dict[str, Any]()
    for client, counts in clients.items():
        part = weights[client] / counts.n
        loss += counts.loss * part
        n += counts.n
        for name, more in counts.more().items():
            mine = more if part == 1 else more * part
            sums[name] = sums[name] + mine if name in sums else mine
    return Counts(np.zeros((2, 0), dtype=np.int64), loss, n, lambda: sums)


def client_lines(round: OpenRound, config: Config) -> list[JsonDict]:
    """The round's lines of clients.jsonl: of each client that evaluated or reported something, the
    scores of its models and, if it trained in this round, its training.
    """
    left_out, replies, lines = world.held_out(config), round.main.done, []
    for client in sorted({*round.reports, *round.evaluated}):
        counts_by_model = round.evaluated.get(client, {})
        row = client_row(round.number, client, counts_by_model, config.evaluate.metrics)
        row.held_out = client in left_out or None
        row.reported = dict(round.reports.get(client, {})) or None
        run, reply = round.runs.get(client), replies.get(client)
        if run is not None:
            row.set(samples=run.n, train_loss=run.loss, steps=run.steps)
        if reply is not None:
            worker = reply.record.worker
            row.seconds = reply.message.seconds
            row.set(host=worker.get("host"), device=worker.get("device"))
        lines.append(row.line())
    return lines


def client_row(
    round: int, client: int, counts_by_model: Mapping[str, Counts], names: Sequence[str]
) -> Client:
    """Returns a line of clients.jsonl with the scores of a client's models. names:
    `evaluate.metrics`.
    """
    row = Client(round=round, client=client)
    for model, counts in counts_by_model.items():
        scores = {
            f"accuracy_{model}": counts.accuracy,
            f"correct_{model}": int(counts.table[0].sum()),
            f"tested_{model}": counts.n,
        }
        row.set(**scores)
    if counts_by_model:
        first = next(iter(counts_by_model.values()))
        row.test_samples = counts_by_model.get("personal", first).n
        if names:
            row.metrics = {model: c.metrics(names) for model, c in counts_by_model.items()}
    return row


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
