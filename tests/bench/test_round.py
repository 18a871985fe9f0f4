"""What fednet is measured against, at a small size."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from tests.bench import bare
from tests.bench import round as workloads
from tests.bench.family import family
from tests.processes import ROOT, WAIT_S, until


@pytest.mark.parametrize("payloads", [1, 3])
def test_every_byte_of_a_round_crosses_by_each_way(payloads, tmp_path):
    job = {"processes": 2, "payloads": payloads, "nbytes": 100_000, "rounds": 2}
    for seconds in (
        bare.over_sockets(job, ("127.0.0.1", 0)),
        bare.over_sockets(job, f"{tmp_path}/s"),
        bare.shared(job),
    ):
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_the_sum_is_of_the_quickest_way(monkeypatch, tmp_path):
    ours = dict.fromkeys(
        (*("seconds", "server_cpu_s", "pss_mb", "first_task_s", "first_model_s"), "utilisation"),
        1.0,
    )
    monkeypatch.setattr(workloads, "_floor", lambda work, processes: 0.5)
    found = {"tcp_s": 0.4, "ipc_s": 0.3, "memory_s": 0.2, "mean_s": 0.1}
    monkeypatch.setattr(workloads, "_bare", lambda work, processes: found)
    monkeypatch.setattr(
        workloads, "fednet", lambda *args: {**ours, "seconds": 1.6, "by_phase": {"waiting": 1.0}}
    )
    monkeypatch.setattr(workloads, "_import", lambda: 0.25)
    (record,) = workloads.bench(["W2"], 2, tmp_path, 2)
    assert record["ratio_to_sum"]["median"] == pytest.approx(2.0)
    assert record["exchange_s"]["median"] == 0.2
    assert record["start_s"]["median"] == 0.75
    assert "2.00" in "\n".join(workloads.lines([record]))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_bench_started_ends_with_it(tmp_path):
    command = [sys.executable, "-m", "tests.bench", "round", "--workload", "Q", "--workers", "2"]
    bench = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    # the floor's process, and each of its workers
    started = until(lambda: (found := list(family(bench.pid)))[3:] and found, "the floor", bench)
    handles = [os.pidfd_open(pid) for pid in started[1:]]
    bench.terminate()
    assert bench.communicate(timeout=WAIT_S)[1].endswith("stopped: SIGTERM.\n")
    for handle in handles:
        assert select.select([handle], [], [], WAIT_S)[0] == [handle]
        os.close(handle)
