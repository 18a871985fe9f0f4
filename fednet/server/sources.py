"""Where a schedule's events come from: whose task is over, and when.

RealTime        as outcomes come, on this machine's clock
SimulatedTime   in the order of the virtual clock, whatever order outcomes come in
(RecordedEvents, in asynchronous.py: as another run has them on record)
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fednet.server.clock import reply_bytes
from fednet.server.faulty_protocol import FaultySpec
from fednet.server.inbox import ReceivedReply
from fednet.server.schedule import Schedule

if TYPE_CHECKING:
    from fednet.server.clients import Clients
    from fednet.wire.messages import Purpose

POLL_S = 0.2  # how often a request to stop is looked for


@dataclass(slots=True)
class AskedClient:
    """What one client is asked, and what became of it."""

    spec: FaultySpec
    at: float = 0.0
    """The second of the run at which it was asked."""
    bytes: int = 0
    """Of the task, on the virtual clock."""
    leaves_s: float = math.inf
    """Seconds after which the client is gone."""
    enrolled: bool = False
    staleness: int | None = None
    """Updates since the model that it starts from, in a run without rounds."""
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    """What compressors remember of messages with it once its reply counts."""
    reply: ReceivedReply | None = None
    reason: str = ""
    """Why its reply does not count; "" as long as it does."""
    times: dict[str, float] = field(default_factory=dict)
    """How long it took on the virtual clock, by what the time was spent on."""

    @property
    def over(self) -> bool:
        return self.reply is not None or bool(self.reason)


class ScheduleEvent(NamedTuple):
    """The end of a task, or a second that the schedule waits for."""

    at: float
    """In seconds."""
    client: int | None
    """Whose task is over; None: no task is, at the second that the schedule waits for."""
    reason: str = ""
    """Why no reply came of the task, "" where one did."""


class Source(Protocol):
    def expect(self, clients: Iterable[int]) -> None:
        """The tasks of these clients are under way, or were over before they went out."""

    def next(self, wakeup: float) -> ScheduleEvent:
        """Waits for the next event, at most until the second `wakeup`."""


def collect(schedule: Schedule, source: Source, take: Callable[[ScheduleEvent], None]) -> None:
    """Takes one event after the other, until the schedule closes."""
    while not schedule.closed:
        take(source.next(schedule.next_wakeup()))


class RealTime:
    """Events as outcomes come. tasks: by client; some may be over. began: second 0, on the
    monotonic clock. exchange: (index, purpose) of the outcomes that belong to these tasks.
    again(client): whether a client whose task has just ended is asked again, and has no event yet.
    """

    def __init__(
        self,
        clients: Clients,
        tasks: Mapping[int, AskedClient],
        began: float,
        exchange: tuple[int, Purpose] = (0, "train"),
        again: Callable[[int], bool] = lambda client: False,
    ) -> None:
        self.clients = clients
        self.tasks = tasks
        self.began = began
        self.exchange = exchange
        self.again = again
        self._over: deque[int] = deque()  # clients whose tasks need not be waited for

    def expect(self, clients: Iterable[int]) -> None:
        self._over += [client for client in clients if self.tasks[client].over]

    def now(self) -> float:
        return time.monotonic() - self.began

    def next_known(self) -> int | None:
        """Removes and returns the next client whose task was over before it went out; None: there
        is no more.
        """
        return self._over.popleft() if self._over else None

    def next(self, wakeup: float) -> ScheduleEvent:
        while True:
            self.clients.watch.check()
            client = self.next_ended(wakeup - self.now())
            now = self.now()
            if client is not None:
                return ScheduleEvent(now, client, self.tasks[client].reason)
            if now >= wakeup:
                return ScheduleEvent(now, None)

    def next_ended(self, timeout_s: float) -> int | None:
        """The next client whose task is over; None after a while."""
        if self._over:
            return self._over.popleft()
        outcome = self.clients.wait(min(POLL_S, max(0.0, timeout_s)))
        if outcome is None:
            return None
        key = outcome.key
        task = self.tasks.get(key.client)
        theirs = task is not None and (task.spec.round, *self.exchange) == (
            key.round,
            key.phase,
            key.purpose,
        )
        if task is None or not theirs or task.over:
            self.clients.discard(outcome)  # of a task that has ended already
            return None
        if isinstance(outcome, ReceivedReply):
            task.reply = outcome
            return key.client
        task.reason = outcome.reason
        return None if self.again(key.client) else key.client


class SimulatedTime:
    """In the order of the virtual clock. An event is next as soon as nothing that is not known yet
    can come before it; of several at one second a task without a reply is first, then the smaller
    id.

    end(client, up): when the client's task ends, and why it has no reply then. up: bytes of its
    reply; None: before that is known.
    """

    def __init__(self, real: RealTime, end: Callable[[int, int | None], tuple[float, str]]) -> None:
        self.real = real
        self._end = end
        self.order = Order()

    def expect(self, clients: Iterable[int]) -> None:
        for client in clients:
            self.order.expect(client, self._end(client, None)[0])
        self.real.expect(clients)

    def next(self, wakeup: float) -> ScheduleEvent:
        while True:
            self.real.clients.watch.check()
            event = self.order.next(wakeup)
            if event is not None:
                return event
            client = self.real.next_ended(POLL_S)
            if client is not None:
                reply = self.real.tasks[client].reply
                up = 0 if reply is None else reply_bytes(reply)
                self.order.set_end(client, *self._end(client, up))


class Order:
    """Which event is next on the virtual clock. `expect` names a second before which a client's
    task cannot end, and `set_end` later the one at which it does. The time that `next` takes hardly
    depends on how many tasks there are.
    """

    def __init__(self) -> None:
        # By client whose end is not known, the second before which it does not end.
        self._open: dict[int, float] = {}
        # A heap of these seconds, and of some whose clients' ends are known by now.
        self._least: list[tuple[float, int]] = []
        self._ends: list[tuple[float, bool, int, str]] = []  # a heap: second, replied, client, why

    def expect(self, client: int, least: float) -> None:
        self._open[client] = least
        heapq.heappush(self._least, (least, client))

    def set_end(self, client: int, at: float, reason: str = "") -> None:
        """reason: why no reply comes of its task; "" where one does."""
        end = max(at, self._open.pop(client))
        heapq.heappush(self._ends, (end, not reason, client, reason))

    def next(self, wakeup: float) -> ScheduleEvent | None:
        """The next event; None while that is not known."""
        while self._least and self._open.get(self._least[0][1]) != self._least[0][0]:
            heapq.heappop(self._least)
        least = self._least[0][0] if self._least else math.inf
        end = self._ends[0][0] if self._ends else math.inf
        if min(least, end) > wakeup:
            return ScheduleEvent(wakeup, None)
        if not self._ends or least <= end:
            return None
        at, _, client, reason = heapq.heappop(self._ends)
        return ScheduleEvent(at, client, reason)
