"""The three commands as a user starts them: real processes, each with a time limit, none left
behind.
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

LIMIT_S = 180.0  # a slow machine is no failure; a process that hangs is
COMMANDS = {
    "fednet": "fednet",
    "fednet-server": "fednet.cli.server",
    "fednet-client": "fednet.cli.client",
}


class Processes:
    """A context in which commands run; what still runs at its end is killed, with all it
    started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, command: str, *words: str | Path) -> subprocess.Popen[bytes]:
        """Starts a command in a session of its own, its output in a file."""
        log = self.folder / f"{command}-{len(self.running)}.txt"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNET_")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", COMMANDS[command], *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.running.append((process, log))
        return process

    def ended(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Waits for it. Returns (exit status, what it said)."""
        log = next(log for p, log in self.running if p is process)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {LIMIT_S:g} s; it said:\n{log.read_text()}"
            ) from None
        return status, log.read_text()

    def run(self, command: str, *words: str | Path) -> tuple[int, str]:
        return self.ended(self.start(command, *words))

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Waits until holds() is true; fails where a process has ended with an error first."""
        end = time.monotonic() + LIMIT_S
        while not (found := holds()):
            for process, log in self.running:
                assert process.poll() in (None, 0), log.read_text()
            assert time.monotonic() < end, f"waited {LIMIT_S:g} s for {what}"
            time.sleep(0.02)
        return found


def rounds(run: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a line that is being written is left out."""
    path = run / "rounds.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
