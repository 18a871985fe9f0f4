"""`fednet run --on ray` on a real local Ray: skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fednet.capacity import die_with_parent
from tests.processes import Processes, small, until

pytest.importorskip("ray")
LOCAL = (
    "import ray; ray.init(address='local', num_cpus=2, include_dashboard=False, "
    "log_to_driver=False); "
    "import sys; from fednet.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def test_workers_are_placed_by_ray_and_one_that_dies_is_started_anew(tmp_path):
    with Processes(tmp_path) as all:
        words = [
            *small("name=ray", "rounds=3", "security.curve=true"),
            "--out",
            str(tmp_path),
            "--device",
            "cpu",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ray = subprocess.Popen(
            [sys.executable, "-c", LOCAL, "run", *words, "--workers", "2", "--on", "ray"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        all.all.append(ray)
        os.kill(until(_working, "a worker is at work"), signal.SIGKILL)
        said, _ = ray.communicate(timeout=240)
        assert ray.returncode == 0, said
        plain = all.start(
            "main",
            "run",
            *small("name=plain", "rounds=3"),
            "--out",
            tmp_path,
            "--device",
            "cpu",
            "--in-process",
        )
        assert plain.wait(120) == 0, plain.said()
    one, other = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plain", "ray")
    )
    assert one["model_sha256"] == other["model_sha256"]
    assert "died; another replaces it" in (tmp_path / "ray" / "log" / "server.log").read_text()


def _working() -> int | None:
    """The pid of an actor, once it hosts clients."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::ClientActor.work"):
                return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    return None
