"""The whole run in one process and one thread."""

from __future__ import annotations

import pytest

import fednet


@pytest.mark.long
def test_a_task_longer_than_the_heartbeats_patience_loses_nobody(tmp_path):
    # Any task is longer.
    section = {
        "name": "patient",
        "rounds": 3,
        "clients": 2,
        "clients_per_round": 2,
        "participation": None,
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"dataset": "synthetic", "samples": 200, "shape": [1, 8, 8], "classes": 4},
        "train": {"steps": 3},
        "round": {"lost": {"closed": 0.001, "silent": 0.001}},
    }
    run = fednet.run(section, in_process=True, out=tmp_path)
    assert [r.completed for r in run.rounds] == [[0, 1]] * 3
    assert not [e for e in run.lines("events") if e["type"] in ("away", "dropped")]
