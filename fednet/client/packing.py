"""Where the clients that one process hosts come together to be trained as one (`train.pack`).

A task runs in its own thread up to its descent; there it waits until N descents have come, or all
that can come. One of the threads then does the pack (see `training.packed`), and each goes on by
itself with what came of its own.

    due ── a thread takes it ──> at work ── its descent ──> waiting
    waiting ──> in a pack ──> at work ── its reply ──> gone

Nothing goes by time. A pack begins when N of one kind wait, or when every task at work waits and no
other can come: none is due, or no thread is free to take it. A pack that runs always ends, so that
nobody waits for ever; a task that is cancelled or fails leaves, and the others no longer wait for
it. Who met whom changes no bit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fednet.training import packable, packed
from fednet.training.lanes import Lane
from fednet.training.loop import Course

if TYPE_CHECKING:
    from fednet.training.tasks import Task


@dataclass(eq=False)
class _Ticket:
    """A descent that waits. done: its thread may go on."""

    lane: Lane
    kind: tuple[object, ...]
    done: bool = False


@dataclass(eq=False)
class Packing:
    """The packs of one process. n: lanes; task: the run's; limit(card): tasks that may be at work
    at a card at once; threads: of torch. Each call may come from any thread. A card is a device's
    number.
    """

    n: int
    task: Task
    limit: Callable[[int], int]
    threads: int = 1

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._due = 0
        self._at_work: Counter[int] = Counter()
        self._waiting: dict[int, list[_Ticket]] = {}
        self._checked = False

    def expect(self) -> None:
        """A task has come to this process; `at_work` follows."""
        with self._changed:
            self._due += 1

    @contextmanager
    def at_work(self, card: int) -> Iterator[None]:
        """A thread has taken a task that was due, and has it until it leaves this context."""
        with self._changed:
            self._due -= 1
            self._at_work[card] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._at_work[card] -= 1
                self._changed.notify_all()

    def at(self, card: int) -> Place:
        return Place(self, card)

    def descend(self, card: int, lane: Lane) -> Course:
        """Trains the lane in a pack, and returns when it is done. Raises what its own `progress`
        raised, or what ended the pack.
        """
        device = lane.scratch.device
        # Another thread, in another stream, goes on with what this one has prepared.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        own, pack = _Ticket(lane, lane.kind), list[_Ticket]()
        with self._changed:
            waiting = self._waiting.setdefault(card, [])
            waiting.append(own)
            self._changed.notify_all()
            while not own.done:
                pack = self._ready(card)
                if own in pack:
                    waiting[:] = [t for t in waiting if t not in pack]
                    break
                self._changed.wait()
        if not own.done:
            self._do(pack, own)
        if lane.error is not None:
            raise lane.error
        assert lane.course is not None
        return lane.course

    def _ready(self, card: int) -> list[_Ticket]:
        """Who may begin now; empty if they are to wait for others."""
        waiting = self._waiting[card]
        kinds: dict[tuple[object, ...], list[_Ticket]] = {}
        for ticket in waiting:
            kinds.setdefault(ticket.kind, []).append(ticket)
        for some in kinds.values():
            if len(some) >= self.n:
                return some[: self.n]
        at_work = self._at_work[card]
        all_here = at_work <= len(waiting) and (self._due == 0 or at_work >= self.limit(card))
        return next(iter(kinds.values())) if kinds and all_here else []

    def _do(self, pack: list[_Ticket], own: _Ticket) -> None:
        lanes = [ticket.lane for ticket in pack]
        try:
            # A thread's own setting, on which bits depend.
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            if not self._checked:
                packable.check_lane(self.task, lanes[0])
                self._checked = True
            packed.descend(lanes, self.n, self.task)
        except BaseException as broken:
            for lane in lanes:
                if lane is not own.lane:
                    lane.error = lane.error or _again(broken)
            raise
        finally:
            with self._changed:
                for ticket in pack:
                    ticket.done = True
                self._changed.notify_all()


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A card's side of a `Packing`: what a `SiteHost` is given."""

    packing: Packing
    card: int

    def descend(self, lane: Lane) -> Course:
        return self.packing.descend(self.card, lane)


def _again(broken: BaseException) -> BaseException:
    """The same for another thread: one exception raised in several would hold on to all their
    tensors, until the last has done with it.
    """
    try:
        return type(broken)(*broken.args)
    except TypeError:
        return RuntimeError(str(broken))
