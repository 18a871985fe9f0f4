"""Clients that lie about what they counted: how much their models got right, and how many samples
they have. A lie is refused with its reason, and changes nothing for the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fednet
from fednet.client import evaluation
from fednet.report.read import Run
from fednet.server.evaluation import pool_by_model
from fednet.training.evaluation import Counts
from fednet.training.samples import batch_count, batches
from tests.processes import lines, settings

LIAR = 2
# What the liar says of its test set of three classes (correct, tested), and a part of the reason
# for which it is left out. The third lie wraps an int64 sum to a small number, the fourth the sum
# over the clients.
LIES = [
    ([[1000] * 3, [1000] * 3], "tested"),
    ([[0, 0, 0], [1 << 40, 0, 0]], "tested"),
    ([[1 << 62, 1 << 62, 1], [1 << 62, 1 << 62, 1]], "tested"),
    ([[(1 << 63) - 1] * 3, [(1 << 63) - 1] * 3], "tested"),
    ([[2, 0, 0], [1, 1, 1]], "correct"),
    ([[-1, 0, 0], [1, 1, 1]], "correct"),
]


def honest_others(run: Run) -> list[float]:
    """Return by round the pooled accuracy of the clients that do not lie."""
    found = []
    for record in run.rounds:
        rows = [c for c in run.clients if c.round == record.round and not c.get("final")]
        rows = [c for c in rows if c.client != LIAR]
        right = sum(row["correct_personal"] for row in rows)
        found.append(right / sum(row["tested_personal"] for row in rows))
    return found


@pytest.mark.parametrize(("said", "why"), LIES)
def test_counts_beyond_a_clients_test_set_are_refused_and_end_no_run(
    tmp_path, monkeypatch, said, why
):
    honest = evaluation.evaluate_in_training_task

    def within(exp: Any, state: Any, x: Any, record: Any, host: Any) -> Any:
        judged = honest(exp, state, x, record, host)
        if host.client_id == LIAR:
            judged["personal"] = Counts(np.array(said, dtype=np.int64), 0.0, 1)
        return judged

    monkeypatch.setattr(evaluation, "evaluate_in_training_task", within)
    mapping = settings(algorithm="fedper", rounds=2, data={"classes": 3}, stop={"accuracy": 0.999})
    run = fednet.run(mapping, out=tmp_path, in_process=True)
    assert [r.round for r in run.rounds] == [1, 2]
    assert [r.client_accuracy["personal"] for r in run.rounds] == honest_others(run)
    refused = [e for e in lines(run.dir / "events.jsonl") if e["type"] == "refused"]
    assert [e["client"] for e in refused] == [LIAR, LIAR]
    assert all(why in e["reason"] for e in refused)


def test_a_site_whose_test_set_is_said_to_be_huge_has_half_of_the_accuracy_at_most():
    def counts(right: int, total: int) -> dict[str, Counts]:
        return {"personal": Counts(np.array([[right], [total]]), 0.0, total)}

    honest = {0: counts(30, 100), 1: counts(50, 100)}
    assert pool_by_model(honest, 0.5)["personal"][0] == 0.4
    lied = honest | {LIAR: counts(1 << 31, 1 << 31)}
    assert pool_by_model(lied, 0.5)["personal"][0] == (30 + 50 + 200) / 400


@pytest.mark.parametrize("batch_norm", [False, True])
def test_batches_are_counted_as_they_are_cut(batch_norm):
    assert batch_count(1 << 40, 16, batch_norm) == 1 << 36  # none is listed
    for n in range(14):
        cuts = batches(n, 4, batch_norm)
        assert batch_count(n, 4, batch_norm) == len(cuts)
        assert [start for start, _ in cuts[1:]] == [end for _, end in cuts[:-1]]
        whole = n - n % 4
        assert not cuts or cuts[-1][1] in (n, whole)
