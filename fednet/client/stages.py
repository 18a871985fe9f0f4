"""The stages of a task: for the heartbeats, which say what a client is at, and for the reply, which
says how long each took.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from fednet.errors import FednetError
from fednet.protocol.client import DoTask
from fednet.wire.messages import Key


class TaskCancelled(FednetError):
    """The server does not want a task any more."""


class Stages:
    """What a task is at. Its calls raise TaskCancelled if the task is not in `wanted` any more."""

    seconds: defaultdict[str, float]
    """By stage: how long the task was at it, until the last one was entered."""
    step_s: float
    """How long each step of its training took, in the mean; inf before the first."""
    halfway: Callable[[], object] | None
    """Called after half of the steps of a training."""

    def __init__(
        self,
        given: DoTask,
        wanted: Mapping[Key, DoTask],
        # by client: stage, step, steps; see `ClientProtocol`
        doing: dict[int, tuple[str, int, int]],
    ) -> None:
        self._given = given
        self._key = given.task.key
        self._wanted = wanted
        self._doing = doing
        self._stage = "loading"
        self._since = time.perf_counter()
        doing[self._key.client] = (self._stage, 0, 0)
        self.seconds = defaultdict(float)
        self.step_s = math.inf
        self.halfway = None

    def enter(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        self._stage = stage
        self._since = now
        self._report(0, 0)

    def trained(self, done: int, of: int) -> None:
        """So many steps of a training are done."""
        self.step_s = min(self.step_s, (time.perf_counter() - self._since) / done)
        self._report(done, of)
        if self.halfway is not None and 2 * done >= of:
            self.halfway()

    def _report(self, done: int, of: int) -> None:
        key = self._key
        self._doing[key.client] = (self._stage, done, of)
        if self._wanted.get(key) is not self._given:
            raise TaskCancelled(f"task of client {key.client} in round {key.round}")
