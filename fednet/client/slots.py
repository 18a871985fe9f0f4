"""How many clients train on a device at once, the threads that do it, and which clients are trained
together (`train.pack`).

    one slot ── its first task is done, alone: the peak is known ──> as many as fit
    as many as are packed, from the first on
    either ── a task ran out of memory ──> one less

A task without a slot waits. A task that ran out of memory is done again from its start, which gives
the same bits; it fails only if it ran out of memory alone, again and again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from fednet.errors import FednetError
from fednet.experiment import determinism

if TYPE_CHECKING:
    from fednet.training.lanes import Lane
    from fednet.training.loop import Course
    from fednet.training.tasks import Task

SPARE = 0.9  # of the room is filled: not every client's peak is the first one's
MOST = 16  # on a device at once: beyond, threads of one Python process only wait for each other
MESSAGES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Until a task that ran out of memory alone is tried again. Another process may have the memory,
and there is no event for its giving it back."""

T = TypeVar("T")
Job = Callable[[int], None]  # is given the number of the device that it is done on


# -- the memory of a device ------------------------------------------------------------------------
class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    name: str

    def need(self) -> int:
        """Returns what this process has taken at most so far: after its first task, what one client
        needs.
        """

    def room(self) -> int:
        """Returns what this process could have: what is free, and what it has already."""

    def release(self) -> None:
        """Gives back what is kept for later but not in use."""


class CpuMemory:
    """A processor: one client at a time, which has all the cores that its process has, unless
    clients are packed.
    """

    name = "cpu"

    def need(self) -> int:
        return 0

    def room(self) -> int:
        return 0

    def release(self) -> None:
        pass


class GpuMemory:
    """A CUDA device. share: of its memory, where other processes are known to use it too."""

    def __init__(self, name: str, share: float = 1.0) -> None:
        import torch

        self.name = name
        self._share = share
        self._cuda = torch.cuda

    def need(self) -> int:
        # What lies between allocations is included: nothing else can have it either.
        return int(self._cuda.max_memory_reserved(self.name))

    def room(self) -> int:
        free, total = self._cuda.mem_get_info(self.name)
        return int(min(free + self._cuda.memory_reserved(self.name), total * self._share))

    def release(self) -> None:
        self._cuda.empty_cache()


def memory_of(device: str, share: float = 1.0) -> DeviceMemory:
    return GpuMemory(device, share) if device.startswith("cuda") else CpuMemory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory was not enough. cuBLAS and cuDNN only say so in their message."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


class NoRoom(FednetError):
    """A task ran out of its device's memory. again_s: seconds until it is done again, None if it is
    not.
    """

    def __init__(self, device: str, again_s: float | None) -> None:
        alone = " for this client alone" if again_s is None else ""
        super().__init__(f"there is not enough memory on {device}{alone}")
        self.again_s = again_s


# -- slots -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Device:
    """The slots of a device. limit: tasks that may run at once; threads: those that serve it."""

    limit: int = 1
    threads: int = 0
    running: int = 0
    measured: bool = False
    packed: bool = False
    failures: int = 0  # how often in a row a task ran out of memory while it was alone


class Slots:
    """Counts the slots of all devices of a process. Any thread may call it. most: clients that this
    process hosts.
    """

    def __init__(self, devices: Sequence[DeviceMemory], most: int) -> None:
        self.devices = list(devices)
        self._most = max(1, min(most, MOST))
        self._counts = [_Device() for _ in devices]
        self._lock = threading.Lock()

    def pack(self, n: int) -> None:
        """From now on n tasks run on each device at once, because they are trained together:
        nothing is measured. With 1 they are no longer.
        """
        with self._lock:
            for device in self._counts:
                if n > 1 or device.packed:
                    device.limit = n
                    device.measured = n > 1
                    device.packed = n > 1

    def limit(self, device: int) -> int:
        """Returns how many tasks may run on the device at once."""
        with self._lock:
            return self._counts[device].limit

    @property
    def total(self) -> int:
        """How many tasks may run at once, as far as is known."""
        with self._lock:
            return sum(device.limit for device in self._counts)

    def add_thread(self, device: int) -> bool:
        """Counts one more thread of a device. Returns False if there are enough."""
        with self._lock:
            counts = self._counts[device]
            if counts.threads >= counts.limit:
                return False
            counts.threads += 1
            return True

    def drop_thread(self, device: int) -> bool:
        """Counts one thread less if fewer tasks fit than there are threads. Returns whether."""
        with self._lock:
            counts = self._counts[device]
            if counts.threads <= counts.limit:
                return False
            counts.threads -= 1
            return True

    def end_thread(self, device: int) -> None:
        """Counts one thread less: it found nothing to do."""
        with self._lock:
            self._counts[device].threads -= 1

    def begin(self, device: int) -> int:
        """Counts a task that begins. Returns the device's limit, for `out_of_memory`."""
        with self._lock:
            self._counts[device].running += 1
            return self._counts[device].limit

    def succeed(self, device: int) -> bool:
        """Counts a task that went well. Returns whether it was the one to measure, and more may run
        now.
        """
        with self._lock:
            counts = self._counts[device]
            counts.running -= 1
            counts.failures = 0
            if counts.measured:
                return False
            counts.measured = True
            memory = self.devices[device]
            need = memory.need()
            fit = int(memory.room() * SPARE) // need if need > 0 else 1
            counts.limit = max(1, min(self._most, fit))
            return counts.limit > 1

    def fail(self, device: int) -> None:
        """Counts a task that was cancelled or failed."""
        with self._lock:
            self._counts[device].running -= 1

    def out_of_memory(self, device: int, limit: int) -> float | None:
        """Counts a task that ran out of memory. Returns the seconds after which to do it again,
        None if it is not to be. limit: what `begin` returned: of several that ran out of memory
        together, only the first lowers the limit.
        """
        with self._lock:
            counts = self._counts[device]
            counts.running -= 1
            others = counts.running
            if limit > 1 and limit == counts.limit:
                counts.limit -= 1
            self.devices[device].release()
            if others or limit > 1:  # there will be fewer, or were more than there are by now
                return 0.0
            counts.failures += 1
            if counts.failures > len(PAUSES_S):
                return None
            return PAUSES_S[counts.failures - 1]


# -- threads ---------------------------------------------------------------------------------------
class Threads:
    """A queue of jobs, and a thread for each slot. inline: jobs wait for `work_inline`, and no
    thread starts before it. changed() is called when another number of tasks may run at once.
    """

    def __init__(self, slots: Slots, inline: bool, changed: Callable[[], None]) -> None:
        self.slots = slots
        self._inline = inline
        self._changed = changed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pool: ThreadPoolExecutor | None = None
        self.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    @property
    def waiting(self) -> bool:
        """Whether a job waits for a thread."""
        return not self._jobs.empty()

    def start(self) -> None:
        """Starts a thread for each slot that has none."""
        if self._inline:
            return
        for device in range(len(self.slots.devices)):
            while self.slots.add_thread(device):
                name = f"fednet-train-{len(self._threads)}"
                thread = threading.Thread(
                    target=self._serve, args=(device,), name=name, daemon=True
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

    def _serve(self, device: int) -> None:
        determinism.settle()
        while (job := self._jobs.get()) is not None:
            _do(job, device)
            del job  # and the payload it came with
            if self.slots.drop_thread(device):
                return

    def work_inline(self) -> None:
        """Does the next job; if clients are packed, all jobs that wait, each in a thread and as
        many at once as may run.
        """
        if self.slots.total == 1:
            if (job := self._jobs.get()) is not None:
                _do(job, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.slots.total, "fednet-train")
        started = []
        for _ in range(self._jobs.qsize()):
            if self.slots.add_thread(0):
                started.append(self._pool.submit(self._serve_inline))
        for done in started:
            done.result()

    def _serve_inline(self) -> None:
        """Does jobs until none is left. A job that is put back for want of memory is among them:
        who waits in a pack waits for it.
        """
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self.slots.end_thread(0)
                return
            if job is not None:
                _do(job, 0)
            del job
            if self.slots.drop_thread(0):
                return

    def run(self, device: int, work: Callable[[], T], forget: Callable[[], None]) -> T:
        """Returns what `work()` returns. If the device's memory is not enough, calls `forget()` and
        raises NoRoom.
        """
        limit = self.slots.begin(device)
        try:
            done = work()
        except BaseException as error:
            if not is_out_of_memory(error):
                self.slots.fail(device)
                raise
        else:
            if self.slots.succeed(device):
                self.start()
                self._changed()
            return done
        forget()  # not within `except`: the exception holds on to what the task had taken
        again_s = self.slots.out_of_memory(device, limit)
        self._changed()
        raise NoRoom(self.slots.devices[device].name, again_s)


def _do(job: Job, device: int) -> None:
    """Does a job. A process that a model forks within it, and that comes back from there, ends: it
    has none of the other threads, and this process goes on with what it would do.
    """
    here = os.getpid()
    job(device)
    if os.getpid() != here:
        os._exit(1)


# -- packs -----------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Ticket:
    """A training run that waits for a pack. done: its thread may go on."""

    lane: Lane
    kind: tuple[object, ...]
    done: bool = False


@dataclass(eq=False)
class Packing:
    """Brings the clients of one process together, to be trained as one. Any thread may call it.

    A task runs in its own thread up to its training run; there it waits until n of one kind wait,
    or until all tasks at work wait and no other can come: none is due, or no thread is free for it.
    One of the threads then trains the pack (see `training.packed`), and each goes on with its own
    result. Nothing depends on time, and who is packed with whom changes no bit. A pack that runs
    always ends, and a task that is cancelled or fails leaves, so nobody waits for ever.

    n: lanes; task: the run's; limit(device): tasks that may run on a device at once; threads: of
    torch. A device is given by its number.
    """

    n: int
    task: Task
    limit: Callable[[int], int]
    threads: int = 1
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _due: int = 0
    _at_work: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, list[_Ticket]] = field(default_factory=dict)
    _checked: bool = False

    def expect(self) -> None:
        """Counts a task that has come to this process; `at_work` follows."""
        with self._changed:
            self._due += 1

    @contextmanager
    def at_work(self, device: int) -> Iterator[None]:
        """Holds while a thread does a task that was due."""
        with self._changed:
            self._due -= 1
            self._at_work[device] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._at_work[device] -= 1
                self._changed.notify_all()

    def on(self, device: int) -> DevicePack:
        return DevicePack(self, device)

    def descend(self, device: int, lane: Lane) -> Course:
        """Trains the lane in a pack, and returns when it is done. Raises what its own `progress`
        raised, or what ended the pack.
        """
        import torch

        at = lane.scratch.device
        # Another thread, in another stream, goes on with what this one has prepared.
        if at.type == "cuda":
            torch.cuda.current_stream(at).synchronize()
        own = _Ticket(lane, lane.kind)
        pack: list[_Ticket] = []
        with self._changed:
            waiting = self._waiting.setdefault(device, [])
            waiting.append(own)
            self._changed.notify_all()
            while not own.done:
                pack = self._ready(device)
                if own in pack:
                    waiting[:] = [ticket for ticket in waiting if ticket not in pack]
                    break
                self._changed.wait()
        if not own.done:
            self._train(pack, own)
        if lane.error is not None:
            raise lane.error
        assert lane.course is not None
        return lane.course

    def _ready(self, device: int) -> list[_Ticket]:
        """Returns the pack that may begin now; empty if all are to wait for others."""
        waiting = self._waiting[device]
        kinds: dict[tuple[object, ...], list[_Ticket]] = {}
        for ticket in waiting:
            kinds.setdefault(ticket.kind, []).append(ticket)
        for tickets in kinds.values():
            if len(tickets) >= self.n:
                return tickets[: self.n]
        at_work = self._at_work[device]
        nobody_comes = self._due == 0 or at_work >= self.limit(device)
        if kinds and at_work <= len(waiting) and nobody_comes:
            return next(iter(kinds.values()))
        return []

    def _train(self, pack: list[_Ticket], own: _Ticket) -> None:
        import torch

        from fednet.training import packable, packed

        lanes = [ticket.lane for ticket in pack]
        try:
            # A thread's own setting, on which bits depend.
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            if not self._checked:
                packable.check_lane(self.task, lanes[0])
                self._checked = True
            packed.descend(lanes, self.n, self.task)
        except BaseException as error:
            for lane in lanes:
                if lane is not own.lane:
                    lane.error = lane.error or _copy(error)
            raise
        finally:
            with self._changed:
                for ticket in pack:
                    ticket.done = True
                self._changed.notify_all()


@dataclass(frozen=True, eq=False, slots=True)
class DevicePack:
    """The packing of one device, as a `SiteHost` is given it."""

    packing: Packing
    device: int

    def descend(self, lane: Lane) -> Course:
        return self.packing.descend(self.device, lane)


def _copy(error: BaseException) -> BaseException:
    """Returns the same for another thread: one exception raised in several would hold on to all
    their tensors, until the last has done with it.
    """
    try:
        return type(error)(*error.args)
    except TypeError:
        return RuntimeError(str(error))
