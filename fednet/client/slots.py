"""The slots of a client process: how many tasks run on a device at once, and the threads that run
them.

The first task on a GPU runs alone. Its peak shows how much memory a task needs, and from then on as
many run at once as fit. With `train.pack` as many are begun as are trained together, in one thread
(`packs`). A client process trains one client at a time on a processor. Where the server is in the
process too, the first tasks run in its thread, and show how long a step of training takes; unless
steps are short, the next tasks run in several threads.
Whenever a task runs out of memory, one less runs at once. A task without a slot waits. One that ran
out of memory is done again from its start, with the same bits; it fails only if it ran out of
memory alone, again and again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fednet.capacity import is_out_of_memory
from fednet.errors import FednetError
from fednet.experiment import determinism

if TYPE_CHECKING:
    from fednet.client.packs import Packs

SPARE = 0.9  # of the memory is used: another client may need more than the first one
# Tasks on a device at once: more threads of a Python process only wait for each other.
MAX_TASKS = 16
MEASURED = ("cuda",)  # kinds of devices whose memory is measured
TIMED = 3  # trainings that are timed before there are threads on a processor
# A step of training has to take so long. Threads hand Python's lock to one another at each
# operation of torch: with steps of 0.5 to 1.5 ms, two took 15 to 35 % longer than one, and with
# steps of 5 ms a third less. (Under `seeds.scope`, as with dropout, one thread trains at a time.)
STEP_S = 0.002
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Until a task that ran out of memory alone is tried again: another process may have the memory."""

T = TypeVar("T")
DeviceCall = Callable[[int], None]  # gets the number of the device on which it is made


class NoRoom(FednetError):
    """A task ran out of its device's memory. again_s: until it is done again; None if it is not."""

    def __init__(self, device: str, again_s: float | None) -> None:
        alone = " for this client alone" if again_s is None else ""
        super().__init__(f"there is not enough memory on {device}{alone}")
        self.again_s = again_s


# -- slots -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Device:
    """Counts the tasks of a device."""

    name: str
    """As torch names it."""
    limit: int = 1
    """Tasks that may run at once."""
    threads: int = 0
    running: int = 0
    measured: bool = False
    """Whether the limit is known."""
    packs: Packs | None = None
    """Where clients are trained together."""
    failures: int = 0
    """How often in a row a task ran out of memory while it was alone."""
    alone: bool = False
    """Whether one thread does its tasks, whatever the limit."""

    @property
    def wanted(self) -> int:
        """How many threads do its tasks."""
        if self.alone or self.packs is not None:
            return 1
        return self.limit


@dataclass(eq=False, slots=True)
class _Turn:
    """A call that a thread makes, and what it leaves for the caller of `work_inline`."""

    call: DeviceCall
    left: list[Callable[[], None]] = field(default_factory=list)
    error: BaseException | None = None
    made: threading.Event = field(default_factory=threading.Event)


class SlotPool:
    """Makes queued calls, in a thread for each slot of each device. Any thread may use it. Without
    packs a processor trains one client at a time, with all cores of its process.
    """

    def __init__(
        self,
        devices: Sequence[str],
        most: int,  # tasks that may ever run at once on a device
        *,
        gpu_share: float = 1.0,  # of a GPU's memory, where other processes are known to use it too
        # the calls are made while the caller is in `work_inline`, by itself or by threads
        inline: bool = False,
        # called when the number of tasks that may run at once changes
        changed: Callable[[], None] = lambda: None,
        # called when a call was made, or once for those of clients that were trained together
        made: Callable[[], None] = lambda: None,
        # called before a pack is trained that is not full: further calls may be put meanwhile
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._devices = [_Device(name) for name in devices]
        self._most = max(1, min(most, MAX_TASKS))
        if inline:
            for device in self._devices:
                device.limit = self._most
                device.alone = True
        self._gpu_share = gpu_share
        self._inline = inline
        self._changed = changed
        self._made = made
        self._look = look
        self._calls = queue.SimpleQueue[DeviceCall | None]()
        # What the threads make: the calls, but inline only while the caller waits for them. At None
        # a thread ends.
        self._due = queue.SimpleQueue[DeviceCall | None]() if inline else self._calls
        self._own = threading.local()  # a thread's turn
        self._steps_s: list[float] = []  # of the trainings that are timed
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._start_threads()

    @property
    def total(self) -> int:
        """Returns how many tasks may run at once, as far as is known."""
        with self._lock:
            return sum(device.limit for device in self._devices)

    def pack(self, packs: Sequence[Packs], n: int) -> None:
        """Makes n tasks be at work on each device from now on, since they are trained together:
        nothing is measured. packs: of each device; none: they are no longer packed.
        """
        with self._lock:
            for number, device in enumerate(self._devices):
                if packs or device.packs is not None:
                    device.limit = n
                    device.measured = bool(packs)
                    device.packs = packs[number] if packs else None
        self._start_threads()

    # -- calls -------------------------------------------------------------------------------------
    def put(self, calls: Sequence[DeviceCall]) -> None:
        for call in calls:
            self._calls.put(call)

    def work_inline(self) -> bool:
        """Makes the next call; if there are threads, has them make all calls, and then does what
        these have left, in the order of the calls. (To go on before would take Python's lock from
        theirs: a fifth more processor time.) Returns whether there was any. Raises what a call
        raised.
        """
        turns: list[_Turn] = []
        while not self._calls.empty():
            call = self._calls.get()
            assert call is not None  # inline, that is in `_due` alone
            if not self._threads:
                self._do(call, 0)
                return True
            turns.append(_Turn(call))
            self._due.put(partial(self._take_turn, turns[-1]))
        for turn in turns:
            turn.made.wait()
        for turn in turns:
            for done in turn.left:
                done()
            if turn.error is not None:
                raise turn.error
        return bool(turns)

    def hand_over(self, done: Callable[[], None]) -> None:
        """Does what a call leaves for the thread that put it: at once, or in its turn, where
        `work_inline` has several calls made.
        """
        turn: _Turn | None = getattr(self._own, "turn", None)
        if turn is None:
            done()
        else:
            turn.left.append(done)

    def _take_turn(self, turn: _Turn, number: int) -> None:
        self._own.turn = turn
        try:
            turn.call(number)
        except BaseException as broken:  # raised again in `work_inline`
            turn.error = broken
        turn.made.set()

    def close(self) -> None:
        for _ in self._threads:
            self._due.put(None)
        # The interpreter must not end while a thread runs code of torch.
        for thread in self._threads:
            thread.join(10.0)

    def _start_threads(self) -> None:
        with self._lock:
            if self._inline and sum(device.wanted for device in self._devices) == 1:
                return
            for number, device in enumerate(self._devices):
                while device.threads < device.wanted:
                    device.threads += 1
                    name = f"fednet-train-{len(self._threads)}"
                    thread = threading.Thread(
                        target=self._serve, args=(number,), name=name, daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def _serve(self, number: int) -> None:
        """Makes calls, until there are more threads than slots."""
        device = self._devices[number]
        while (call := self._due.get()) is not None:
            determinism.set_thread()
            self._do(call, number)
            del call  # and the payload it came with
            with self._lock:
                if device.threads > device.wanted:
                    device.threads -= 1
                    return

    def _do(self, call: DeviceCall, number: int) -> None:
        packs = self._devices[number].packs
        if packs is None:
            call(number)
            self._made()
        else:
            packs.work(partial(call, number), partial(self._next_call, number), self._made)

    def _next_call(self, number: int, running: int) -> Callable[[], None] | None:
        """Returns a call that may be made beside so many; None if there is none, or no slot."""
        with self._lock:
            if running >= self._devices[number].limit:
                return None
        if self._calls.empty():
            self._look()
        try:
            call = self._calls.get_nowait()
        except queue.Empty:
            return None
        if call is None:  # the thread that does the packs ends when it takes that itself
            self._calls.put(None)
            return None
        return partial(call, number)

    # -- tasks -------------------------------------------------------------------------------------
    def add_timing(self, number: int, step_s: float) -> bool:
        """Is told how long each step of a training took, in the mean. Returns whether from now on
        threads make the calls that the calling thread has made until now.
        """
        device = self._devices[number]
        if not device.alone or len(self._steps_s) == TIMED:
            return False
        self._steps_s.append(step_s)
        if len(self._steps_s) < TIMED or min(self._steps_s) < STEP_S or device.limit == 1:
            return False
        device.alone = False
        self._start_threads()
        return True

    def run(self, number: int, work: Callable[[], T], forget: Callable[[], None]) -> T:
        """Returns what `work()` returns. If memory runs out, calls `forget()` and raises NoRoom."""
        import torch

        device = self._devices[number]
        gpu = device.name.startswith(MEASURED)
        with self._lock:
            device.running += 1
            limit = 1 if device.alone else device.limit
        try:
            result = work()
        except BaseException as error:
            if not is_out_of_memory(error):
                with self._lock:
                    device.running -= 1
                raise
        else:
            with self._lock:
                device.running -= 1
                device.failures = 0
                first = not device.measured
                device.measured = True
                # The memory that this process has reserved at most, with the gaps between
                # allocations. After its first task this is what one client needs.
                if first and gpu and (need := torch.cuda.max_memory_reserved(device.name)) > 0:
                    free, total = torch.cuda.mem_get_info(device.name)
                    own = torch.cuda.memory_reserved(device.name)
                    room = int(min(free + own, total * self._gpu_share))
                    device.limit = max(1, min(self._most, int(room * SPARE) // need))
                grown = first and device.limit > 1
            if grown:
                self._start_threads()
                self._changed()
            return result
        forget()  # not within `except`: the exception refers to the task's tensors
        with self._lock:
            device.running -= 1
            # If several tasks run out of memory together, only the first lowers the limit.
            if limit > 1 and limit == device.limit:
                device.limit -= 1
            if gpu:
                torch.cuda.empty_cache()
            again_s: float | None = 0.0
            if not device.running and limit == 1:  # else there is less beside it the next time
                device.failures += 1
                again_s = None
                if device.failures <= len(PAUSES_S):
                    again_s = PAUSES_S[device.failures - 1]
        self._changed()
        raise NoRoom(device.name, again_s)
