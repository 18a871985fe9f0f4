"""What fednet is measured against, at a small size."""

from __future__ import annotations

import pytest

from tests.bench import bare
from tests.bench import round as workloads
from tests.bench.workloads import WORKLOADS


@pytest.mark.parametrize("payloads", [1, 3])
def test_every_byte_of_a_round_crosses(payloads):
    job = {"processes": 2, "payloads": payloads, "nbytes": 100_000, "rounds": 2}
    seconds = bare.over_tcp(job)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_the_sum_is_of_training_bytes_and_mean(monkeypatch, tmp_path):
    ours = dict.fromkeys(
        (*("seconds", "server_cpu_s", "pss_mb", "first_task_s", "first_model_s"), "utilisation"),
        1.0,
    )
    monkeypatch.setattr(workloads, "_floor", lambda work, processes: 0.5)
    found = {"tcp_s": 0.2, "mean_s": 0.1}
    monkeypatch.setattr(workloads, "_bare", lambda work, processes: found)
    monkeypatch.setattr(
        workloads, "fednet", lambda *args: {**ours, "seconds": 1.6, "by_phase": {"waiting": 1.0}}
    )
    monkeypatch.setattr(workloads, "_import", lambda: 0.25)
    record = workloads.bench(WORKLOADS["W2"], 2, tmp_path, 2)
    assert record["ratio_to_sum"]["median"] == pytest.approx(2.0)
    assert record["exchange_s"]["median"] == 0.2
    assert record["start_s"]["median"] == 0.75
    assert "2.00" in "\n".join(workloads.lines(record))
