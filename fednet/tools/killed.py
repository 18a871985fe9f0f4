"""Small federations for `fednet check`: run in this process to their end, or killed during a round
in a process of their own and resumed here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import loading
from fednet.errors import CannotGoOn
from fednet.plain import JsonDict, JsonMapping

if TYPE_CHECKING:
    from fednet.records import Round

KILLED = 3  # the round after which a run is killed, which is in no checkpoint
# Four clients, two per round, and a model with BatchNorm: not all take part, and buffers are sent.
SMALL: JsonDict = {
    "name": "check",
    "rounds": 5,
    "clients": 4,
    "participation": 0.5,
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.05},
    "model": {"name": "mlp", "hidden": [16], "norm": "batch"},
    "checkpoint": {"every": 2},
    "data": {
        "dataset": "synthetic",
        "samples": 120,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "iid"},
    },
}
# Two clients train at a time at different speeds; each reply is an update, every other one stale.
ASYNCHRONOUS: JsonDict = {
    "schedule": {"mode": "async", "buffer": 1},
    "link": {"clock": "virtual", "step_ms": "lognormal(50, 0.7)"},
}
CHILD = "import sys; from fednet.tools import killed; killed.die(*sys.argv[1:])"


def trained(changes: JsonMapping) -> list[JsonDict]:
    """The rounds of a small federation."""
    with tempfile.TemporaryDirectory(prefix="fednet-check-") as folder:
        return _run(changes, Path(folder))


def resumed(changes: JsonMapping, files: Sequence[Path]) -> list[JsonDict]:
    """The rounds of a run whose process is killed when round `KILLED` is recorded and not yet in a
    checkpoint, so that all it kept in memory is lost. files: to be loaded there.
    """
    with tempfile.TemporaryDirectory(prefix="fednet-check-") as folder:
        words = [json.dumps(dict(changes)), folder, *map(str, files)]
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False
        )
        if child.returncode != -signal.SIGKILL:
            last = "".join(child.stderr.strip().splitlines()[-1:])
            raise CannotGoOn(
                f"the run that was to be killed in round {KILLED} ended with status "
                f"{child.returncode}: {last}"
            )
        return _run(changes, Path(folder), resume=True)


def die(changes: str, folder: str, *files: str) -> None:
    """Runs in a process of its own, and kills it during the run."""

    def kill(record: Round) -> None:
        if record.round == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    loading.load_parts(files)
    _run(json.loads(changes), Path(folder), kill)


def _run(
    changes: JsonMapping,
    out: Path,
    callback: Callable[[Round], None] | None = None,
    resume: bool = False,
) -> list[JsonDict]:
    from fednet.config import from_mapping
    from fednet.files import read_lines
    from fednet.launch import start
    from fednet.server.watch import Hosting

    config = from_mapping({**SMALL, **changes}, where="fednet check")
    how = Hosting(start.Silent(), ["fednet", "check"], "cpu", callback=callback)
    with start.open_directory(config, out, resume) as (own, directory, _):
        start.run_in_process(own, directory, how)
        return list(read_lines(directory / "rounds.jsonl"))
