"""The slots of a client process: how many tasks run on a device at once, and the threads that run
them.

The first task on a device runs alone. Its peak shows how much memory a task needs, and from then on
as many run at once as fit. With `train.pack` as many are begun as are trained together, in one
thread (`packs`).
Whenever a task runs out of memory, one less runs at once. A task without a slot waits. One that ran
out of memory is done again from its start, with the same bits; it fails only if it ran out of
memory alone, again and again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fednet.capacity import is_out_of_memory
from fednet.errors import FednetError
from fednet.experiment import determinism

if TYPE_CHECKING:
    from fednet.client.packs import Packs

SPARE = 0.9  # of the memory is used: another client may need more than the first one
MAX_TASKS = (
    16  # tasks on a device at once: more threads of a Python process only wait for each other
)
MEASURED = ("cuda",)  # kinds of devices whose memory is measured
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Until a task that ran out of memory alone is tried again: another process may have the memory."""

T = TypeVar("T")
DeviceCall = Callable[[int], None]  # gets the number of the device on which it is made


class NoRoom(FednetError):
    """A task ran out of its device's memory. again_s: seconds until it is done again; None if it is
    not.
    """

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

    @property
    def wanted(self) -> int:
        """How many threads do its tasks."""
        return self.limit if self.packs is None else 1


class SlotPool:
    """Makes queued calls, in a thread for each slot of each device. Any thread may use it. Without
    packs a processor trains one client at a time, with all cores of its process.
    """

    def __init__(
        self,
        devices: Sequence[str],
        most: int,  # clients that this process hosts
        *,
        gpu_share: float = 1.0,  # of a GPU's memory, where other processes are known to use it too
        # the calls are made while the caller is in `work_inline`, by itself or, if there is more
        # than one slot, by threads: they would only take Python's lock from it.
        inline: bool = False,
        # called when the number of tasks that may run at once changes
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._devices = [_Device(name) for name in devices]
        self._most = max(1, min(most, MAX_TASKS))
        self._gpu_share = gpu_share
        self._inline = inline
        self._changed = changed
        self._calls: queue.SimpleQueue[DeviceCall | None] = queue.SimpleQueue()
        self._unfinished = 0  # calls
        self._may_work = threading.Event()
        if not inline:
            self._may_work.set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)  # notified when all calls are done
        self._start_threads()

    @property
    def total(self) -> int:
        """Returns how many tasks may run at once, as far as is known."""
        with self._lock:
            return sum(device.limit for device in self._devices)

    def limit(self, device: int) -> int:
        with self._lock:
            return self._devices[device].limit

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
        with self._lock:
            self._unfinished += len(calls)
        for call in calls:
            self._calls.put(call)

    def work_inline(self) -> bool:
        """Makes the next call; if there are threads, waits until they have made all. Returns
        whether there was any.
        """
        if not self._unfinished:
            return False
        if not self._threads:
            self._do(self._calls.get(), 0)
            return True
        self._may_work.set()
        with self._lock:
            self._finished.wait_for(lambda: not self._unfinished)
        self._may_work.clear()
        return True

    def close(self) -> None:
        self._may_work.set()
        for _ in self._threads:
            self._calls.put(None)
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
        while (call := self._calls.get()) is not None:
            self._may_work.wait()
            determinism.set_thread()
            self._do(call, number)
            del call  # and the payload it came with
            with self._lock:
                if device.threads > device.wanted:
                    device.threads -= 1
                    return

    def _do(self, call: DeviceCall | None, number: int) -> None:
        packs = self._devices[number].packs
        if call is None:
            return
        if packs is None:
            self._make(call, number)
        else:
            packs.work(partial(self._make, call, number), partial(self._next_call, number))

    def _make(self, call: DeviceCall, number: int) -> None:
        try:
            call(number)
        finally:
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    self._finished.notify_all()

    def _next_call(self, number: int, running: int) -> Callable[[], None] | None:
        """Returns a call that may be made beside so many; None if there is none, or no slot."""
        if running >= self.limit(number):
            return None
        try:
            call = self._calls.get_nowait()
        except queue.Empty:
            return None
        if call is None:  # the end, for the thread that does the packs
            self._calls.put(None)
            return None
        return partial(self._make, call, number)

    # -- tasks -------------------------------------------------------------------------------------
    def run(self, number: int, work: Callable[[], T], forget: Callable[[], None]) -> T:
        """Returns what `work()` returns. If the device runs out of memory, calls `forget()` and
        raises NoRoom.
        """
        import torch

        device = self._devices[number]
        gpu = device.name.startswith(MEASURED)
        with self._lock:
            device.running += 1
            limit = device.limit
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
