"""Which clients are asked when, and when their replies are aggregated. Events and the time go in,
clients to be asked come out; nothing here sends or waits.

    Cohort           an exchange of a round: all at once; closes with the first k replies, or with
                     the last
    Buffer           asynchronous: a free client is asked as soon as another is over; closes with n
                     replies
    Period           semi-synchronous: the same every s seconds, of the replies so far
    RecordedUpdates  the asynchronous updates of another run, as it has them on record
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Schedule(Protocol):
    """What all schedules have in common: when they close."""

    at: float
    """The second of the last event, on the run's clock; of an exchange, from its beginning."""

    @property
    def closed(self) -> bool:
        """Whether the result can be made."""

    def next_wakeup(self) -> float:
        """The second at which something is to be done although no task is over; infinite: never."""


@dataclass(slots=True)
class Cohort:
    """One exchange of a round. It closes when `first` of its clients have replied, or else when the
    tasks of all are over: a reply after that is too late. When a task is over, also by its
    deadline, decides `fednet.protocol.tasks.end_of`.
    """

    clients: Sequence[int]
    """In ascending order."""
    first: int | None = None
    at: float = 0.0
    training: set[int] = field(init=False)
    closed: bool = field(init=False)
    replied: list[int] = field(default_factory=list)
    """Who was in time, in the order of the replies."""
    dropped: dict[int, str] = field(default_factory=dict)
    """By client, why it was not in time."""

    def __post_init__(self) -> None:
        self.training = set(self.clients)
        self.closed = not self.training

    def take_event(self, at: float, client: int, reason: str = "") -> None:
        """A client's task is over, not before the last one. reason: why no reply came of it."""
        if client not in self.training:  # it closed before
            return
        self.at = at
        self.training.remove(client)
        if reason:
            self.dropped[client] = reason
        else:
            self.replied.append(client)
            if len(self.replied) == self.first:
                late = f"not among the first {self.first}"
                self.dropped |= dict.fromkeys(sorted(self.training), late)
                self.training.clear()
        self.closed = not self.training

    def next_wakeup(self) -> float:
        return math.inf


@dataclass(slots=True)
class Buffer:
    """Updates of so many replies each, as they come. Round t is the time in which update t is made:
    a task given out in it starts from the model after update t - 1, and its reply may count in a
    later one. A client is given one task a round at most, and none while its reply waits to be
    counted: so a round and a client name a task.
    """

    size: int
    """Replies that make an update."""
    at_once: int
    """Clients that train at a time."""
    order: Callable[[int], Sequence[int]]
    """The clients that can be asked in a round, the first first."""
    comes: Callable[[int, float], float] = lambda client, at: at
    """The second from which on a client is there, after another."""
    round: int = 1
    at: float = 0.0
    closed: bool = False
    training: dict[int, int] = field(default_factory=dict)
    """By client, the round of its task, of those under way."""
    came: dict[int, int] = field(default_factory=dict)
    """By client, the round of its task, of the replies that wait, in the order in which they came.
    """
    asked: set[int] = field(default_factory=set)
    """Who was given a task in this round."""

    def take_event(self, at: float, client: int | None = None, reason: str = "") -> list[int]:
        """Takes an event, which is not before the last one, and returns who is asked then. client:
        whose task is over; None: a round begins, or the second that `next_wakeup` named has come.
        reason: why no reply came of the task.
        """
        self.at = at
        if client is not None:
            round = self.training.pop(client)
            if not reason:
                self.came[client] = round
        self.closed = self._enough(client)
        if self.closed:
            return []
        given = self._give(at) if self._gives(client) else []
        self.closed = not self.training and self._stuck()
        return given

    def next_round(self) -> None:
        """The update is made; an event without a client comes next."""
        self.round += 1
        self.came = {}
        self.asked = set()
        self.closed = False

    def next_wakeup(self) -> float:
        if len(self.training) >= self.at_once:
            return math.inf
        return min((self.comes(c, self.at) for c in self._free()), default=math.inf)

    def _enough(self, client: int | None) -> bool:
        return len(self.came) >= self.size

    def _gives(self, client: int | None) -> bool:
        """Whether tasks go out at this event."""
        return True

    def _stuck(self) -> bool:
        """Nobody trains, and nobody can be asked now. Returns whether the result is made of the
        replies that wait, however few: nobody can be asked later either.
        """
        return self.next_wakeup() == math.inf

    def _give(self, at: float) -> list[int]:
        given: list[int] = []
        for free in self._free():
            if len(self.training) >= self.at_once:
                break
            if self.comes(free, at) <= at:
                self.training[free] = self.round
                self.asked.add(free)
                given.append(free)
        return given

    def _free(self) -> list[int]:
        """Who might be given a task in this round, if it were there."""
        busy = {*self.training, *self.came, *self.asked}
        return [c for c in self.order(self.round) if c not in busy]


@dataclass(slots=True)
class Period(Buffer):
    """An update every `every` seconds, of the replies so far, whatever their number; tasks go out
    when a period begins.
    """

    every: float = 0.0

    def next_wakeup(self) -> float:
        period = math.floor(self.at / self.every) + 1
        # A quotient may be rounded down to the number of the period that has just ended.
        while period * self.every <= self.at:
            period += 1
        return period * self.every

    def _enough(self, client: int | None) -> bool:
        return client is None and bool(self.came)

    def _gives(self, client: int | None) -> bool:
        return client is None

    def _stuck(self) -> bool:
        return not self.came  # else the end of the period comes


@dataclass(slots=True)
class RecordedUpdates(Buffer):
    """The updates of another run: in each round all who were given a task in it are, as soon as
    they are free. An event without a client says that all which its record has are there.
    """

    begun: bool = False

    def next_round(self) -> None:
        Buffer.next_round(self)
        self.begun = False

    def _enough(self, client: int | None) -> bool:
        if client is not None:
            return False
        begins = not self.begun
        self.begun = True
        return not begins
