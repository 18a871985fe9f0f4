"""Who may be at work on a device at once: events in, numbers out. The device is made up; its bytes
are small numbers.
"""

from __future__ import annotations

import threading

import pytest
import torch

from fednet.client import slots
from fednet.client.slots import MOST, PAUSES_S, Slots


class Fake:
    """A device of `size`, of which one task takes `each`."""

    def __init__(self, size: int = 100, each: int = 20) -> None:
        self.name, self.size, self.each, self.released = "fake", size, each, 0

    def need(self) -> int:
        return self.each

    def room(self) -> int:
        return self.size

    def release(self) -> None:
        self.released += 1


def opened(s: Slots, device: int = 0) -> int:
    """How many threads may come now."""
    n = 0
    while s.add_thread(device):
        n += 1
    return n


def measured(size: int, each: int, most: int = 100) -> Slots:
    s = Slots([Fake(size, each)], most)
    assert opened(s) == 1
    s.begin(0)
    s.succeed(0)
    opened(s)
    return s


def test_the_first_task_is_alone_and_then_as_many_as_fit():
    s = Slots([Fake(100, 20)], 100)
    assert (s.total, opened(s)) == (1, 1)
    s.begin(0)
    assert not s.add_thread(0)  # nobody beside the one that is measured
    assert s.succeed(0)
    assert (s.total, opened(s)) == (4, 3)  # 90 of 100 by 20


@pytest.mark.parametrize(
    ("size", "each", "most", "fit"),
    [
        (100, 20, 2, 2),  # no more than there are clients
        (100, 95, 9, 1),  # one that hardly fits is alone
        (100, 300, 9, 1),
        (10**9, 1, 10**6, MOST),
        (100, 0, 9, 1),  # a device that tells nothing
    ],
)
def test_how_many_fit(size, each, most, fit):
    assert measured(size, each, most).total == fit


def test_it_is_measured_once():
    s = measured(100, 20)
    s.devices[0].each = 1
    s.begin(0)
    assert not s.succeed(0)
    assert s.total == 4


def test_each_device_is_measured_by_its_own_first_task():
    s = Slots([Fake(100, 20), Fake(100, 45)], 100)
    assert [opened(s, 0), opened(s, 1), s.total] == [1, 1, 2]
    s.begin(1)
    s.succeed(1)
    assert [opened(s, 0), opened(s, 1), s.total] == [0, 1, 3]


def test_a_task_that_ran_out_of_memory_is_done_again_with_one_less_beside_it():
    s = measured(100, 20)
    limits = [s.begin(0) for _ in range(4)]
    assert s.out_of_memory(0, limits[0]) == 0.0
    assert s.total == 3
    assert s.devices[0].released == 1
    assert s.drop_thread(0)  # the thread goes
    assert not s.drop_thread(0)


def test_of_several_that_ran_out_together_only_the_first_lowers_the_number():
    s = measured(100, 20)
    limits = [s.begin(0) for _ in range(4)]
    assert [s.out_of_memory(0, limit) for limit in limits[:3]] == [0.0, 0.0, 0.0]
    assert s.total == 3
    assert [s.drop_thread(0), s.drop_thread(0)] == [True, False]


def test_it_is_lowered_down_to_one_and_never_to_none():
    s = measured(100, 20)
    for left in (3, 2, 1):
        assert s.out_of_memory(0, s.begin(0)) == 0.0
        assert s.total == left
    assert s.out_of_memory(0, s.begin(0)) == PAUSES_S[0]
    assert s.total == 1


def test_who_does_not_fit_alone_waits_longer_each_time_and_then_fails():
    s = Slots([Fake()], 100)
    opened(s)
    assert [s.out_of_memory(0, s.begin(0)) for _ in range(len(PAUSES_S) + 1)] == [*PAUSES_S, None]
    s.begin(0)
    assert s.succeed(0)  # one that fits is measured as ever
    assert s.total == 4


def test_a_task_that_went_well_ends_the_counting_of_failures():
    s = measured(100, 95)
    assert s.out_of_memory(0, s.begin(0)) == PAUSES_S[0]
    s.begin(0)
    s.succeed(0)
    assert s.out_of_memory(0, s.begin(0)) == PAUSES_S[0]


def test_a_task_that_was_cancelled_measures_nothing():
    s = Slots([Fake()], 100)
    opened(s)
    s.begin(0)
    s.fail(0)
    assert s.total == 1


def test_a_processor_has_one_seat():
    s = Slots([slots.CpuMemory()], 10)
    assert opened(s) == 1
    s.begin(0)
    assert not s.succeed(0)
    assert s.total == 1


def test_threads_that_come_and_go_at_once_never_exceed_the_limit():
    s = Slots([Fake(100, 20)], 100)
    at_once, most, lock = 0, 0, threading.Lock()
    threads: list[threading.Thread] = []

    def work(n: int) -> None:
        nonlocal at_once, most
        while n:
            limit = s.begin(0)
            with lock:
                at_once += 1
                most = max(most, at_once)
            torch.ones(100).sum()
            with lock:
                at_once -= 1
            n -= 1
            if n % 7 == 3:
                s.out_of_memory(0, limit)
            elif s.succeed(0):
                come(50)
            if s.drop_thread(0):
                return

    def come(n: int) -> None:
        while s.add_thread(0):
            thread = threading.Thread(target=work, args=(n,))
            with lock:
                threads.append(thread)
            thread.start()

    come(5)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert 1 <= most <= 4


@pytest.mark.parametrize(
    ("broken", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(broken, short):
    assert slots.is_out_of_memory(broken) is short


def test_a_gpu_is_asked_for_its_memory_and_takes_its_share(monkeypatch):
    asked = []

    class Cuda:
        max_memory_reserved = staticmethod(lambda name: asked.append(name) or 30)
        mem_get_info = staticmethod(lambda name: (60, 100))
        memory_reserved = staticmethod(lambda name: 20)
        empty_cache = staticmethod(lambda: asked.append("released"))

    whole, third = slots.GpuMemory("cuda:1"), slots.GpuMemory("cuda:1", 1 / 3)
    whole._cuda = third._cuda = Cuda
    assert (whole.need(), whole.room(), third.room()) == (30, 80, 33)
    whole.release()
    assert asked == ["cuda:1", "released"]


def test_clients_that_are_packed_are_together_from_the_first_task_on_and_nothing_is_measured():
    s = Slots([Fake(100, 45), Fake(100, 45)], 100)
    assert (opened(s, 0), opened(s, 1)) == (1, 1)
    s.pack(20)
    assert (s.limit(1), s.total, opened(s, 0)) == (20, 40, 19)
    limit = s.begin(0)
    assert not s.succeed(0)
    assert s.out_of_memory(0, limit) == 0.0
    assert (s.limit(0), s.limit(1)) == (19, 20)
    s.pack(1)  # another run, in which they are not
    s.begin(1)
    assert s.succeed(1)
    assert (s.limit(0), s.limit(1)) == (1, 2)


def test_a_thread_that_found_nothing_to_do_leaves_its_seat_to_another():
    s = Slots([Fake(100, 45)], 100)
    s.pack(2)
    assert opened(s, 0) == 2
    s.end_thread(0)
    assert opened(s, 0) == 1


def test_what_was_measured_stays_where_nobody_is_packed():
    s = measured(100, 20)
    s.pack(1)
    assert s.total == 4
