"""Training that waits for nobody: who is given a task when, and which replies make an update.

    async       so many clients train at once; every `buffer` replies, as they come, are an update
    semi-sync   an update every `every` seconds, of what is there; then tasks are given out anew

Events and the time go in, instructions come out; nothing here sends or waits. Round t is the time
in which update t is made: a task given out in it starts from the model after update t - 1, and its
reply may count in a later one. A client is given one task a round at most, and none while its reply
waits to be counted: so a round and a client name a task.

On the virtual clock, `Order` says which event is next, whatever order replies arrive in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Give:
    """A task for a client. at: seconds since the run began, on the run's clock."""

    client: int
    round: int
    at: float


@dataclass(frozen=True, slots=True)
class Update:
    """The replies that are there make an update: `came` has the round of each one's task. The
    caller answers with `next_round`.
    """

    round: int
    came: Mapping[int, int]
    at: float

    def staleness(self, client: int) -> int:
        """Updates made since the model that the client's reply started from."""
        return self.round - self.came[client]


@dataclass(slots=True)
class Schedule:
    """training: by client, the round of its task. came: of each reply that waits, in the order in
    which they came. asked: who was given a task in this round.

    at_once: clients that train at a time. buffer: replies that make an update; None: what is there
    every `every` seconds does. order(round): the clients that can be asked in a round, the first
    first. comes(client, at): the second from which on it is there.
    """

    at_once: int
    buffer: int | None
    every: float | None
    order: Callable[[int], Sequence[int]]
    comes: Callable[[int, float], float] = lambda client, at: at
    round: int = 1
    at: float = 0.0
    training: dict[int, int] = field(default_factory=dict)
    came: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def begin(self) -> list[Give | Update]:
        """A round begins: tasks go to those who are free."""
        return self._fill()

    def replied(self, client: int, at: float) -> list[Give | Update]:
        self.at = at
        self.came[client] = self.training.pop(client)
        if self.buffer is not None and len(self.came) >= self.buffer:
            return [self._update()]
        return self._fill() if self.buffer is not None else self._stuck()

    def lost(self, client: int, at: float) -> list[Give | Update]:
        """No reply will come of the client's task."""
        self.at = at
        del self.training[client]
        return self._fill() if self.buffer is not None else self._stuck()

    def tick(self, at: float) -> list[Give | Update]:
        """The time that `wakes` named has come."""
        self.at = at
        if self.buffer is None and self.came:
            return [self._update()]
        return self._fill()

    def close(self, at: float) -> list[Give | Update]:
        """Makes the update of the replies that are there, where a recorded run did. at: the second
        of the run.
        """
        self.at = at
        return [self._update()]

    def next_round(self) -> None:
        """The update is made; `begin` comes next."""
        self.round += 1
        self.came, self.asked = {}, set()

    def wakes(self) -> float:
        """When something is to be done although no task ends; infinite: never."""
        if self.every is not None:
            return (math.floor(self.at / self.every) + 1) * self.every
        if len(self.training) >= self.at_once:
            return math.inf
        return min((self.comes(c, self.at) for c in self._free()), default=math.inf)

    # -- what follows ------------------------------------------------------------------------------
    def _free(self) -> list[int]:
        """Who might be given a task in this round, if it were there."""
        busy = {*self.training, *self.came, *self.asked}
        return [c for c in self.order(self.round) if c not in busy]

    def _fill(self) -> list[Give | Update]:
        gives: list[Give | Update] = []
        for client in self._free():
            if len(self.training) >= self.at_once:
                break
            if self.comes(client, self.at) <= self.at:
                self.training[client] = self.round
                self.asked.add(client)
                gives.append(Give(client, self.round, self.at))
        return gives or self._stuck()

    def _stuck(self) -> list[Give | Update]:
        """Nobody trains and nobody can be asked any more: what is there, if anything, has to do."""
        if self.training or (self.every is None and self.wakes() < math.inf):
            return []
        if self.every is not None and self.came:
            return []  # the period's end will come
        return [self._update()]

    def _update(self) -> Update:
        return Update(self.round, dict(self.came), self.at)


@dataclass(slots=True)
class Order:
    """On the virtual clock: which event is next. Of each task under way `least` is a second before
    which it cannot end, and `ends` the one at which it does, with why it has no reply, once that is
    known. An event is next as soon as nothing that is not known yet can come before it; of two at
    one second the smaller id is first.
    """

    least: dict[int, float] = field(default_factory=dict)
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)

    def given(self, client: int, least: float) -> None:
        self.least[client] = least

    def known(self, client: int, at: float, reason: str = "") -> None:
        """reason: why no reply comes of its task; "" where one does."""
        self.ends[client] = max(at, self.least[client]), reason

    def next(self, wakes: float) -> tuple[float, int | None, str] | None:
        """(second, client, reason); client None: at `wakes`, and no task ends before. None while
        that is not known.
        """
        first = min(((at, c) for c, (at, _) in self.ends.items()), default=(math.inf, -1))
        open = min(
            ((at, c) for c, at in self.least.items() if c not in self.ends),
            default=(math.inf, -1),
        )
        if min(first, open)[0] > wakes:
            return wakes, None, ""
        if not self.ends or open < first:
            return None
        at, client = first
        del self.least[client]
        return at, client, self.ends.pop(client)[1]
