"""Real `fednet-server`, `fednet-client` and `fednet run` processes for tests, small enough to take
seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "name=run",
    "clients=2",
    "participation=1.0",
    "rounds=2",
    "model={name: mlp, hidden: [8]}",
    "data={dataset: synthetic, samples: 200, shape: [1, 4, 4], classes: 4, partition: {scheme: "
    "iid}}",
)
WAIT_S = 180.0  # nothing is expected to take so long: it bounds a test that would hang


def small(*sets: str) -> list[str]:
    """The words that set up a federation of two clients over made-up data."""
    return [w for s in (*SMALL, *sets) for w in ("--set", s)]


class Processes:
    """A context in which commands run; what still runs at its end is killed, with all it
    started.
    """

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.all = tmp, list[subprocess.Popen[str]]()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(
        self, module: str, *words: object, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """Starts `python -m fednet.cli.MODULE` in a session of its own, its output in a file."""
        out = self.tmp / f"process-{len(self.all)}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNET_")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with out.open("w") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", f"fednet.cli.{module}", *map(str, words)],
                cwd=self.tmp,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        process.said = out.read_text  # type: ignore[attr-defined]
        self.all.append(process)
        return process

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Waits for it. Returns (exit status, what it said)."""
        try:
            return process.wait(WAIT_S), process.said()
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {WAIT_S:g} s; it said:\n{process.said()}"
            ) from None

    def run(self, module: str, *words: object) -> tuple[int, str]:
        return self.ended(self.start(module, *words))

    def server(
        self, *words: object, sets: tuple[str, ...] = (), **more: Any
    ) -> subprocess.Popen[str]:
        return self.start(
            "server",
            *small(*sets),
            "--out",
            self.tmp,
            "--device",
            "cpu",
            "--bind",
            "tcp://127.0.0.1:0",
            *words,
            **more,
        )

    def client(self, ids: object, *words: object, **more: Any) -> subprocess.Popen[str]:
        return self.start(
            "client",
            "--id",
            ids,
            "--run",
            self.tmp / "run",
            "--device",
            "cpu",
            "--state",
            self.tmp / f"state-{len(self.all)}",
            *words,
            **more,
        )


def until(true: Callable[[], Any], what: str, *watched: subprocess.Popen[str]) -> Any:
    """What `true` returns, once that is something. Fails when one of `watched` ends before, or
    after `WAIT_S`.
    """
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        for process in watched:
            if process.poll() is not None:
                raise AssertionError(
                    f"{what}: a process ended with {process.returncode}:\n{process.said()}"
                )
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.02)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines that may still be written to."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
