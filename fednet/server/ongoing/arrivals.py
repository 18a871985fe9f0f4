"""Which event is next where training waits for nobody: on the real clock, on the virtual one, or as
another run has it on record.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from fednet.errors import CannotGoOn
from fednet.experiment.clock import VirtualClock, reply_bytes
from fednet.experiment.faults import Faults, Replay
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT
from fednet.server.io import ServerIO
from fednet.server.ongoing.schedule import Give, Order, Schedule, Update
from fednet.server.ongoing.underway import PendingTask, PendingTasks
from fednet.server.phases import POLL_S

Event = tuple[float, int | None, str]
"""(second, client, why no reply comes of its task); client None: no task ends then."""


class Arrivals:
    """Events as they happen. check_stop(): called meanwhile; raises where the run is to stop."""

    def __init__(
        self, io: ServerIO, tasks: PendingTasks, schedule: Schedule, check_stop: Callable[[], None]
    ) -> None:
        self.io, self.tasks, self.schedule = io, tasks, schedule
        self.check_stop = check_stop
        self._over: deque[tuple[int, str]] = deque()  # tasks that need not be waited for
        self._began = time.monotonic() - schedule.at

    def given(self, client: int) -> None:
        task = self.tasks[client]
        if not task.wanted:
            task.over = True
            self._over.append((client, task.out))

    def due(self, at: float) -> Sequence[Give | Update]:
        """What follows where `next` named no client."""
        return self.schedule.tick(at)

    def next(self) -> Event:
        while True:
            wakes = self.schedule.wakes()
            ended = self._ended(min(POLL_S, max(0.0, wakes - self._now())))
            if ended is not None:
                return self._now(), *ended
            if self._now() >= wakes:
                return self._now(), None, ""
            self.check_stop()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _ended(self, timeout_s: float) -> tuple[int, str] | None:
        """The next client whose task has ended, and why without a reply; None after a while."""
        if self._over:
            return self._over.popleft()
        outcome = self.io.wait(timeout_s)
        if outcome is None:
            return None
        round, _, purpose = outcome.phase
        task = self.tasks.get(outcome.client)
        if purpose != "train" or task is None or task.round != round or not task.wanted:
            return None  # of a task that has ended already
        task.over = True
        if not outcome.reason:
            task.reply, task.verdict = outcome.reply, outcome.evaluation
        return outcome.client, outcome.reason


class VirtualArrivals(Arrivals):
    """Events in the order of the virtual clock. A client that is lost is awaited for as long as one
    may be.
    """

    def __init__(
        self,
        io: ServerIO,
        tasks: PendingTasks,
        schedule: Schedule,
        check_stop: Callable[[], None],
        clock: VirtualClock,
        faults: Faults,
    ) -> None:
        super().__init__(io, tasks, schedule, check_stop)
        self._clock, self._faults, self._order = clock, faults, Order()

    def given(self, client: int) -> None:
        super().given(client)
        task = self.tasks[client]
        self._order.given(client, self._end(client, task, 0, task.out or task.job.lost)[0])

    def next(self) -> Event:
        while True:
            event = self._order.next(self.schedule.wakes())
            if event is not None:
                return event
            ended = self._ended(POLL_S)
            if ended is not None:
                client, reason = ended
                task = self.tasks[client]
                up = 0 if task.reply is None else reply_bytes(task.reply)
                self._order.known(client, *self._end(client, task, up, reason))
            self.check_stop()

    def _end(self, client: int, task: PendingTask, up: int, lost: str) -> tuple[float, str]:
        """(when a task ends whose reply has so many bytes, why it does not count)."""
        if lost and lost != LEFT:
            return task.at + self._clock.patience, lost
        took = self._clock.seconds(
            client,
            task.round,
            task.job.cost,
            task.bytes,
            up,
            *self._faults.time(task.round, 0, client),
            at=task.at,
        )
        deadline = self._clock.config.round.deadline
        latest = math.inf if deadline is None else task.at + deadline
        end = math.inf if lost else task.at + sum(took.values())
        if min(end, task.leaves) > latest:
            return latest, "deadline"
        return (task.leaves, LEFT) if end > task.leaves else (end, "")


class Replayed(Arrivals):
    """Events in the order that another run has on record: of each update the replies as they came,
    and who was given a task in the time before it. By these the run repeats to the bit, whatever
    the clock says now. A task whose reply was never counted is not handed out.
    """

    def __init__(
        self,
        io: ServerIO,
        tasks: PendingTasks,
        schedule: Schedule,
        check_stop: Callable[[], None],
        replay: Replay,
    ) -> None:
        super().__init__(io, tasks, schedule, check_stop)
        self._rows = replay.rounds
        self._counted = {
            (client, row["round"] - stale)
            for row in self._rows.values()
            for client, stale in zip(row["completed"], row["staleness"])
        }
        self._here: dict[int, str] = {}

    def selected(self, round: int) -> list[int]:
        return list(self._rows[round]["selected"]) if round in self._rows else []

    def given(self, client: int) -> None:
        task = self.tasks[client]
        if (client, task.round) in self._counted:
            return super().given(client)
        # The record says when it ended: `next` returns that.
        task.wanted, task.over, task.out = False, True, "not counted"

    def due(self, at: float) -> Sequence[Give | Update]:
        return self.schedule.close(at)

    def next(self) -> Event:
        row: JsonDict = self._rows[self.schedule.round]
        for client in self.schedule.training:
            reason = row["dropped"].get(str(client))
            if reason is not None and self.tasks[client].out:
                return self._now(), client, reason
        left = [c for c in row["completed"] if c not in self.schedule.came]
        if not left:
            return self._now(), None, ""
        while left[0] not in self._here:
            ended = self._ended(POLL_S)
            if ended is not None:
                self._here[ended[0]] = ended[1]
            self.check_stop()
        reason = self._here.pop(left[0])
        if reason:
            raise CannotGoOn(
                f"faults.replay: client {left[0]} completed its task of round "
                f"{self.tasks[left[0]].round}, and here did not: {reason}"
            )
        return self._now(), left[0], ""
