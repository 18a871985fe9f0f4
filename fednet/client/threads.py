"""The threads that serve the slots of a client process's devices."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fednet.client.slots import Slots, out_of_memory
from fednet.errors import FednetError
from fednet.experiment import determinism

T = TypeVar("T")
Job = Callable[[int], None]  # is told the number of the device that it is done at


class NoRoom(FednetError):
    """A task ran out of its device's memory. again_s: seconds after which to do it again, None: not
    any more.
    """

    def __init__(self, card: str, again_s: float | None) -> None:
        super().__init__(
            f"there is not enough memory on {card}"
            + (" for this client alone" if again_s is None else "")
        )
        self.again_s = again_s


class Threads:
    """Jobs, in the order in which they come, and a thread for each slot. inline: there are no
    threads of the slots' own, and jobs wait for `work_inline`. changed: called where another number
    of tasks may be at work at once than before.
    """

    def __init__(self, slots: Slots, inline: bool, changed: Callable[[], None]) -> None:
        self.slots, self._inline, self._changed = slots, inline, changed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pool: ThreadPoolExecutor | None = None
        self.open()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    @property
    def waiting(self) -> bool:
        """Whether there is a job that nobody has taken."""
        return not self._jobs.empty()

    def open(self) -> None:
        """A thread for each slot that has none."""
        for card in range(0 if self._inline else len(self.slots.cards)):
            while self.slots.open(card):
                thread = threading.Thread(
                    target=self._work,
                    args=(card,),
                    name=f"fednet-train-{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        # The interpreter must not end under a thread that is within torch.
        for thread in self._threads:
            thread.join(10.0)
        if self._pool is not None:
            self._pool.shutdown()

    def work_inline(self) -> None:
        """Does the next job; of clients that are packed all that wait, as many at once as may be at
        work, each in a thread.
        """
        if self.slots.total == 1:
            if (job := self._jobs.get()) is not None:
                self._do(job, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.slots.total, "fednet-train")
        for done in [
            self._pool.submit(self._serve) for _ in range(self._jobs.qsize()) if self.slots.open(0)
        ]:
            done.result()

    def _serve(self) -> None:
        """Jobs until none is left. A job that is put back for want of memory is taken here too: who
        waits in a pack waits for it.
        """
        while (job := self._next()) is not None:
            self._do(job, 0)
            if self.slots.leave(0):
                return
        self.slots.closed(0)

    def _next(self) -> Job | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _work(self, card: int) -> None:
        determinism.settle()
        while (job := self._jobs.get()) is not None:
            self._do(job, card)
            del job  # and the payload it came with
            if self.slots.leave(card):
                return

    def _do(self, job: Job, card: int) -> None:
        """A process that a model forks within it, and that comes back from there, ends: it has none
        of the other threads, and what it would do is this one's to do.
        """
        here = os.getpid()
        job(card)
        if os.getpid() != here:
            os._exit(1)

    def at(self, card: int, work: Callable[[], T], forget: Callable[[], None]) -> T:
        """What `work` returns, done at a card. forget: called where the card's memory was not
        enough, before NoRoom is raised.
        """
        limit = self.slots.begin(card)
        try:
            done = work()
        except BaseException as broken:
            if not out_of_memory(broken):
                self.slots.given_up(card)
                raise
        else:
            if self.slots.end(card):
                self.open()
                self._changed()
            return done
        forget()  # not within `except`: the exception holds on to what the task had taken
        again_s = self.slots.ran_short(card, limit)
        self._changed()
        raise NoRoom(self.slots.cards[card].name, again_s)
