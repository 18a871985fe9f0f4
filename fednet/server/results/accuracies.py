"""Accuracies as the records have them: of the shared model on the server's test set, and of clients
on their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from fednet.algorithms.base import Tensors
from fednet.config import Config
from fednet.plain import JsonDict
from fednet.records import Client
from fednet.server.shares import lowered
from fednet.server.spool import Spooled
from fednet.training.evaluation import Counts, evaluate
from fednet.training.hosts import ServerHost
from fednet.wire.payload import Run

if TYPE_CHECKING:
    from fednet.training.setting import Pair


def due(config: Config, round: int) -> bool:
    """Whether a round is judged."""
    every = config.evaluate.every
    return every > 0 and (round % every == 0 or round == config.rounds)


def global_scores(
    host: ServerHost, model: Tensors, test: Pair, validation: Pair | None, batch_size: int
) -> JsonDict:
    """The fields of a line of rounds.jsonl. validation: None where nothing is held out for it."""
    module = host.model(model)
    counts = evaluate(module, test, host.task, batch_size)
    found = {
        "test_loss": counts.mean_loss,
        "test_accuracy": counts.accuracy,
        "correct_by_class": counts.table[0].tolist(),
        "total_by_class": counts.table[1].tolist(),
    }
    if validation is not None:
        found["validation_accuracy"] = evaluate(module, validation, host.task, batch_size).accuracy
    return found


def pooled(
    judged: Mapping[int, Mapping[str, Counts]], share: float | None = None
) -> dict[str, float]:
    """Accuracy over all test samples of the evaluated clients (not a mean of accuracies), by the
    model that was evaluated. share: the largest part that one client may have in it, where the
    sizes of test sets are the sites' own word.
    """
    by_name: dict[str, dict[int, Counts]] = {}
    for client, verdict in sorted(judged.items()):
        for name, counts in verdict.items():
            by_name.setdefault(name, {})[client] = counts
    found = {}
    for name, clients in by_name.items():
        sizes = {c: counts.n for c, counts in clients.items()}
        weights = sizes if share is None else sizes | lowered(sizes, share)
        right = {c: Fraction(int(counts.table[0].sum()), counts.n) for c, counts in clients.items()}
        total = sum(weights[c] * right[c] for c in clients)
        found[name] = float(total / sum(weights.values()))
    return found


def losses(runs: Mapping[int, Run], weights: Mapping[int, float]) -> dict[str, float]:
    """A round's mean training loss over its clients: weighted by samples, plainly, and, as
    `train_loss`, by these weights, as their models are weighed.
    """

    def mean(weights: Mapping[int, float]) -> float | None:
        total = sum(weights[i] for i in runs)
        summed = sum(weights[i] * run.loss for i, run in sorted(runs.items()))
        return summed / total if total else None

    found = {
        "train_loss": mean(weights),
        "train_loss_by_samples": mean({i: run.n for i, run in runs.items()}),
        "train_loss_by_clients": mean(dict.fromkeys(runs, 1.0)),
    }
    return {name: value for name, value in found.items() if value is not None}


def client_row(
    round: int,
    client: int,
    verdict: dict[str, Counts],
    run: Run | None = None,
    *,
    final: bool = False,
    took_part: bool | None = None,
    reply: Spooled | None = None,
    reported: Mapping[str, float] | None = None,
) -> Client:
    """A line of clients.jsonl: what a client's models are worth, and, where it trained in this
    round, what that took.
    """
    worker = reply.worker if reply is not None and reply.worker else {}
    judged = verdict.get("personal") or next(iter(verdict.values()), None)
    row = Client(
        round=round,
        client=client,
        final=final or None,
        took_part=took_part,
        test_samples=judged.n if judged is not None else None,
        reported=dict(reported) if reported else None,
        seconds=reply.seconds if reply is not None else None,
        host=worker.get("host"),
        device=worker.get("device"),
    )
    if run is not None:
        row.set(samples=run.n, train_loss=run.loss, steps=run.steps)
    for name, counts in verdict.items():
        row.set(
            **{
                f"accuracy_{name}": counts.accuracy,
                f"correct_{name}": int(counts.table[0].sum()),
                f"tested_{name}": counts.n,
            }
        )
    return row
