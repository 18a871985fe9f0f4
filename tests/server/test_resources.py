"""What a run takes on the server's machine, in the lines of its rounds."""

from __future__ import annotations

import os
import time

import pytest

import fednet
from fednet.report import figures
from fednet.server import resources
from fednet.server.resources import Resources
from tests.rooms import lines, processes, run


def test_a_round_has_the_processor_time_of_its_server_and_the_memory(tmp_path):
    began = time.process_time()

    def work(record):
        """After the second of four rounds, 0.3 s of processor time more."""
        end = time.process_time() + (0.3 if record.round == 2 else 0.0)
        while time.process_time() < end:
            pass

    directory = run(tmp_path, rounds=4, callback=work)
    spent = time.process_time() - began
    rows = [r["resources"] for r in lines(directory / "rounds.jsonl")]
    assert all({*r} == {"server"} for r in rows)  # one process, with the clients in it
    busy = [r["server"]["busy_s"] for r in rows]
    assert busy[2] > 0.25
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert 0.25 < sum(busy) < spent + 4 * tick
    memory = [r["server"]["memory_mb"] for r in rows]
    assert memory == sorted(memory)
    assert 50 < memory[0] < 20_000
    (figure,) = figures.resources(fednet.open_run(directory))
    shown = {s["l"]: s["m"] for s in figure.hover["s"]}
    assert shown["server busy, s"][2] == pytest.approx(busy[2], rel=1e-4)
    assert shown["server memory, MB"][2] == pytest.approx(memory[2], rel=1e-4)


def test_client_processes_are_counted_beside_the_server(tmp_path):
    directory = processes(tmp_path, workers=2)
    for row in lines(directory / "rounds.jsonl"):
        assert {*row["resources"]} == {"server", "clients"}
        # Each of the three processes has torch.
        assert row["resources"]["server"]["memory_mb"] > 50
        assert row["resources"]["clients"]["memory_mb"] > 2 * 50


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program in the place of nvidia-smi: it reports two GPUs, one that has no utilization."""
    path = tmp_path / "nvidia-smi"
    path.write_text(
        f"#!/bin/sh\necho $* > {tmp_path}/words\n"
        "echo 0, 50, 1000\necho 1, [N/A], 10\necho 0, 100, 2000\nexec sleep 600\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return path


def test_a_gpu_is_as_busy_as_the_mean_of_its_reports(program, monkeypatch):
    began = time.monotonic()
    measured = Resources(gpus=True)
    while len(measured._reports.get("GPU 0", ())) < 2:
        assert time.monotonic() < began + 60
        time.sleep(0.01)
    measured._began = 100.0
    monkeypatch.setattr(resources.time, "monotonic", lambda: 104.0)
    found = measured.since([])
    # 4 seconds of which 75 % were busy; MiB as MB
    assert found["GPU 0"] == {"busy_s": 3.0, "memory_mb": 1500 * 1.048576}
    assert "GPU 1" not in found
    # No report in the 2 seconds after: as in the last one.
    monkeypatch.setattr(resources.time, "monotonic", lambda: 106.0)
    assert measured.since([])["GPU 0"] == {"busy_s": 2.0, "memory_mb": 2000 * 1.048576}
    assert "-i 0,1" in (program.parent / "words").read_text()
    process = measured._process
    measured.close()
    assert process.returncode is not None
