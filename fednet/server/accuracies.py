"""Accuracies as the records have them: of the shared model on the server's test set, and of clients
on their own.
"""

from __future__ import annotations

from typing import Any

from fednet.algorithms.base import Tensors
from fednet.config import Config
from fednet.training.evaluation import Counts, evaluate
from fednet.training.hosts import ServerHost
from fednet.wire.payload import Run


def due(config: Config, round: int) -> bool:
    """Whether a round is judged."""
    every = config.evaluate.every
    return every > 0 and (round % every == 0 or round == config.rounds)


def global_scores(
    host: ServerHost, model: Tensors, test: Any, validation: Any, batch_size: int
) -> dict[str, Any]:
    """The fields of a line of rounds.jsonl. validation: None where nothing is held out for it."""
    module = host.model(model)
    counts = evaluate(module, test, host.task, batch_size)
    found = {
        "test_loss": counts.mean_loss,
        "test_accuracy": counts.accuracy,
        "correct_by_class": counts.table[0],
        "total_by_class": counts.table[1],
    }
    if validation is not None:
        found["validation_accuracy"] = evaluate(module, validation, host.task, batch_size).accuracy
    return found


def pooled(judged: dict[int, dict[str, Counts]]) -> dict[str, float]:
    """Accuracy over all test samples of the clients judged (not a mean of accuracies), by what was
    judged.
    """
    sums: dict[str, Counts] = {}
    for _, verdict in sorted(judged.items()):
        for name, counts in verdict.items():
            sums[name] = sums[name].merge(counts) if name in sums else counts
    return {name: counts.accuracy for name, counts in sums.items()}


def client_scores(verdict: dict[str, Counts]) -> dict[str, Any]:
    """The fields of a line of clients.jsonl."""
    first = next(iter(verdict.values()), None)
    scores: dict[str, Any] = {
        "test_samples": verdict["personal"].n
        if "personal" in verdict
        else (first.n if first else 0)
    }
    for name in ("global", "personal", "balanced", "finetuned", "finetuned_balanced"):
        scores[f"accuracy_{name}"] = verdict[name].accuracy if name in verdict else None
        if name in verdict:
            scores[f"correct_{name}"] = int(verdict[name].table[0].sum())
            scores[f"tested_{name}"] = verdict[name].n
    return scores


def client_line(
    round: int,
    client: int,
    verdict: dict[str, Counts],
    run: Run | None,
    seconds: float | None,
    worker: dict[str, Any],
) -> dict[str, Any]:
    """A line of clients.jsonl: what a client's models are worth, and, where it trained in this
    round, what that took.
    """
    return {
        "round": round,
        "client": client,
        **client_scores(verdict),
        "samples": run.n if run else None,
        "train_loss": run.loss if run else None,
        "steps": run.steps if run else None,
        "seconds": seconds,
        "host": worker.get("host"),
        "device": worker.get("device"),
    }
