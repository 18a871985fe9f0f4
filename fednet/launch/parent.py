"""A command that does one run, and ends with the process that started it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from fednet.capacity import die_with_parent

STOP_S = 30.0  # a run that is asked to stop saves what it has within 10 s


class RunProcess:
    """A command that does one run, in a process of its own, which ends with this one."""

    def __init__(
        self, words: Sequence[str], out: IO[bytes], env: Mapping[str, str] | None = None
    ) -> None:
        self._deadline: float | None = None
        self._process = subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def status(self, stop: bool) -> int | None:
        """Returns its exit status once it has ended. stop: it is asked to end, later killed."""
        if stop and self._deadline is None:
            self._process.terminate()
            self._deadline = time.monotonic() + STOP_S
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._process.kill()
        return self._process.poll()

    def close(self) -> None:
        """Kills it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
