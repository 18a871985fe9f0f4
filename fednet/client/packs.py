"""Trains clients of one process as one (`train.pack`).

The tasks of a device are done in one thread. Each runs in a greenlet, which hands its training to
the thread and waits there; methods are written as if each client were alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from greenlet import getcurrent, greenlet

from fednet.capacity import is_out_of_memory
from fednet.training import packed

if TYPE_CHECKING:
    from fednet.training.loop import Descent
    from fednet.training.packed import Plans
    from fednet.training.tasks import LearningTask
    from fednet.wire.payload import LocalRun

Call = Callable[[], None]
Pack = list[tuple["Descent", greenlet]]  # each lane with its task


@dataclass(eq=False)
class Packs:
    """Does the tasks of a device, and trains their clients together.

    A task runs up to its training. Then the next one is begun, until n trainings of one kind wait,
    or until no other can come: none is due, or there is no slot for it. These are trained as one,
    and each task goes on with its own result. No clock is used, and who is packed with whom changes
    no bit. A task that is cancelled or fails just ends: nobody waits for it.

    n: lanes. task: of the run.
    """

    n: int
    task: LearningTask
    _waiting: dict[tuple[object, ...], Pack] = field(default_factory=dict)  # by kind
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: bool = False
    _plans: Plans = field(default_factory=dict)

    def work(
        self,
        first: Call,
        next_call: Callable[[int], Call | None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes this call and those that next_call(running) returns, until it returns None and all
        have ended. Each is a task. running: tasks that wait to be trained. ended() is called when
        the tasks of a pack have gone on, and when a task has ended without training.
        """
        with self._lock:
            call: Call | None = first
            while call is not None or self._waiting:
                if call is not None:
                    task = greenlet(call)
                    self._go_on(task)
                    if task.dead:
                        ended()
                call = None
                pack = self._of_a_kind(self.n)
                if not pack:
                    call = next_call(sum(map(len, self._waiting.values())))
                    if call is None:
                        pack = self._of_a_kind(1)
                if pack:
                    self._train(pack)
                    ended()

    def descend(self, lane: Descent) -> LocalRun:
        """Trains the lane in a pack. Raises what its own `progress` raised, or what ended the pack.
        To be called within a task.
        """
        grad = torch.is_grad_enabled()  # of the thread, so of all tasks
        if not grad:
            torch.set_grad_enabled(True)
        parent = getcurrent().parent
        assert parent is not None
        parent.switch(lane)
        if not grad:
            torch.set_grad_enabled(False)
        if lane.error is not None:
            raise lane.error
        assert lane.run is not None
        return lane.run

    def _go_on(self, task: greenlet) -> None:
        """Runs a task up to its next training, or to its end."""
        lane = task.switch()
        if not task.dead:
            self._waiting.setdefault(lane.kind, []).append((lane, task))

    def _of_a_kind(self, least: int) -> Pack:
        """Takes out the first kind of which so many wait; returns [] if there is none."""
        for kind, pack in self._waiting.items():
            if len(pack) >= least:
                return self._waiting.pop(kind)
        return []

    def _train(self, pack: Pack) -> None:
        lanes = [lane for lane, _ in pack]
        try:
            if not self._checked:
                packed.check_lane(self.task, lanes[0])
                self._checked = True
            packed.descend(lanes, self.n, self.task, self._plans)
        except BaseException as broken:  # raised again in each task
            for lane in lanes:
                if lane.error is None:
                    lane.error = _another(broken)
        for _, task in pack:
            self._go_on(task)


def _another(error: BaseException) -> BaseException:
    """Returns the error for one of several tasks. Where memory is short it is one that does not
    refer to the tensors of all.
    """
    if not is_out_of_memory(error):
        return error
    return torch.OutOfMemoryError(str(error))
