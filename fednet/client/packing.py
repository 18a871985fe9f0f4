"""Brings clients of one process together, so that they are trained as one (`train.pack`)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednet.training.loop import Descent
    from fednet.training.packed import Plans
    from fednet.training.tasks import Task
    from fednet.wire.payload import Run


@dataclass(eq=False)
class Packing:
    """Forms packs of clients that are trained as one. Any thread may call it.

    Each task runs in a thread of its own up to its training run. There it waits until n runs of one
    kind wait, or until all running tasks wait and no other can come: none is due, or no thread is
    free for it. One of the threads then trains the pack (`training.packed`), and each goes on with
    its own result. No clock is used, and who is packed with whom changes no bit. A pack always
    ends, and a task that is cancelled or fails leaves, so that nobody waits for ever.

    Outside of packs one thread works at a time: each call of torch gives up Python's lock for a
    moment, and threads that all want it back make each other wait.

    n: lanes. task: of the run. limit(device): tasks that may run on a device at once. A device is
    given by its number.
    """

    n: int
    task: Task
    limit: Callable[[int], int]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _due: int = 0
    _running: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, list[Descent]] = field(default_factory=dict)
    _checked: bool = False
    _plans: dict[int, Plans] = field(default_factory=dict)

    def expect(self) -> None:
        """Counts a task that has come to this process; `at_work` follows."""
        with self._changed:
            self._due += 1

    @contextmanager
    def at_work(self, device: int) -> Iterator[None]:
        """Holds while a thread does a task that was due."""
        with self._changed:
            self._due -= 1
            self._running[device] += 1
        try:
            with self._turn:
                yield
        finally:
            with self._changed:
                self._running[device] -= 1
                self._changed.notify_all()

    def descend(self, device: int, lane: Descent) -> Run:
        """Trains the lane in a pack, and returns when it is done. Raises what its own `progress`
        raised, or what ended the pack. To be called within `at_work`.
        """
        import torch

        at = lane.scratch.device
        if at.type == "cuda":
            lane.loaded = torch.cuda.current_stream(at).record_event()
        pack: list[Descent] = []
        self._turn.release()
        try:
            with self._changed:
                waiting = self._waiting.setdefault(device, [])
                waiting.append(lane)
                while not lane.done:
                    pack = self._ready(device)
                    if lane in pack:
                        waiting[:] = [other for other in waiting if other not in pack]
                        break
                    if pack:
                        self._changed.notify_all()
                    self._changed.wait()
            if not lane.done:
                self._train(pack, lane, device)
        finally:
            self._turn.acquire()
        if lane.error is not None:
            raise lane.error
        assert lane.run is not None
        return lane.run

    def _ready(self, device: int) -> list[Descent]:
        """Returns the pack that may begin now; empty if all have to wait for others."""
        waiting = self._waiting[device]
        running = self._running[device]
        nobody_comes = self._due == 0 or running >= self.limit(device)
        all_wait = running <= len(waiting) and nobody_comes
        if len(waiting) < self.n and not all_wait:
            return []
        kinds: dict[tuple[object, ...], list[Descent]] = {}
        for lane in waiting:
            kinds.setdefault(lane.kind, []).append(lane)
        for lanes in kinds.values():
            if len(lanes) >= self.n:
                return lanes[: self.n]
        if kinds and all_wait:
            return next(iter(kinds.values()))
        return []

    def _train(self, lanes: list[Descent], own: Descent, device: int) -> None:
        from fednet.training import packed

        try:
            if not self._checked:
                packed.check_lane(self.task, own)
                self._checked = True
            packed.descend(lanes, self.n, self.task, self._plans.setdefault(device, {}))
        except BaseException as error:
            # Each thread raises one of its own, which does not refer to the tensors of all.
            for lane in lanes:
                if lane is not own and lane.error is None:
                    try:
                        lane.error = type(error)(*error.args)
                    except TypeError:
                        lane.error = RuntimeError(str(error))
            raise
        finally:
            with self._changed:
                for lane in lanes:
                    lane.done = True
                self._changed.notify_all()
