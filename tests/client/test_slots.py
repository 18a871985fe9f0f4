"""How many tasks may run on a device at once. The device is made up, with a few bytes; in a client
process with two of them each is the processor.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fednet.client import join, slots
from fednet.client.packs import Packs
from fednet.client.policy import Policy
from fednet.client.slots import MAX_TASKS, PAUSES_S, STEP_S, TIMED, NoRoom, SlotPool
from fednet.client.worker import Worker
from fednet.experiment import placement
from fednet.training import packed
from tests.chaos.mallory import LIMIT_S
from tests.chaos.test_hostile import CONFIG, in_thread, serve
from tests.processes import until


class Fake:
    """The memory of all devices that a test has: `size`, of which one task takes `each`."""

    def __init__(self, monkeypatch, size: int, each: int, device: str = "fake") -> None:
        self.size = size
        self.each = each
        self.released = 0
        monkeypatch.setattr(slots, "MEASURED", (device,))
        for name in ("max_memory_reserved", "memory_reserved", "mem_get_info", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def max_memory_reserved(self, device: str) -> int:
        return self.each

    def memory_reserved(self, device: str) -> int:
        return self.size // 2  # by this process

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return self.size - self.size // 2, 2 * self.size

    def empty_cache(self) -> None:
        self.released += 1


@pytest.fixture
def made(monkeypatch):
    """Makes slots and the memory of their devices. Their threads end with the test."""
    all: list[SlotPool] = []

    def make(size=100, each=20, devices=("fake",), most=100, **more) -> tuple[SlotPool, Fake]:
        all.append(SlotPool(devices, most, **more))
        return all[-1], Fake(monkeypatch, size, each)

    yield make
    for one in all:
        one.close()


def succeed(s: SlotPool, device: int = 0) -> None:
    assert s.run(device, lambda: "done", lambda: None) == "done"


def run_out(s: SlotPool, together: int = 1) -> list[float | None]:
    """So many tasks run at once, and all run out of memory. Returns when each is done again."""
    again: list[float | None] = []

    def work() -> None:
        if together > 1:
            again.extend(run_out(s, together - 1))
        raise torch.OutOfMemoryError

    with pytest.raises(NoRoom) as short:
        s.run(0, work, lambda: None)
    return [*again, short.value.again_s]


@pytest.mark.parametrize(
    ("size", "each", "more", "fit"),
    [
        (100, 20, {}, 4),  # 90 of 100 by 20
        (100, 20, {"most": 2}, 2),  # no more than there are clients
        (100, 20, {"gpu_share": 0.3}, 2),  # 54 of 200 by 20
        (100, 95, {}, 1),  # one that hardly fits is alone
        (100, 300, {}, 1),
        (10**9, 1, {"most": 10**6}, MAX_TASKS),
        (100, 0, {}, 1),  # a device that reports nothing
        (100, 20, {"devices": ("cpu",)}, 1),  # a processor
    ],
)
def test_the_first_task_is_alone_and_then_as_many_as_fit(made, size, each, more, fit):
    s, memory = made(size, each, **more)
    assert s.total == 1
    succeed(s)
    assert s.total == fit
    memory.each = 1
    succeed(s)
    assert s.total == fit  # it is measured once


def test_of_several_tasks_that_run_out_of_memory_only_the_first_lowers_the_limit(made):
    s, memory = made()
    succeed(s)
    assert run_out(s, together=3) == [0.0, 0.0, 0.0]
    assert (s.total, memory.released) == (3, 3)
    assert [run_out(s), s.total] == [[0.0], 2]
    assert [run_out(s), s.total] == [[0.0], 1]
    assert [run_out(s), s.total] == [[PAUSES_S[0]], 1]  # never to none
    succeed(s)
    assert run_out(s) == [PAUSES_S[0]]  # failures in a row are counted


def test_a_task_that_ran_out_beside_one_that_began_before_is_done_again_at_once(made):
    s, _ = made(each=45)
    succeed(s)
    assert s.total == 2

    def work() -> None:
        assert [run_out(s), s.total] == [[0.0], 1]
        assert run_out(s) == [0.0]  # it was not alone, though the limit was 1 when it began

    s.run(0, work, lambda: None)
    assert run_out(s) == [PAUSES_S[0]]


@pytest.mark.parametrize("inline", [False, True])
def test_all_calls_are_made_and_never_more_at_once_than_may_run(made, inline):
    s, _ = made(inline=inline)
    if inline:
        s.pack([Packs(4, None)], 4)
    lock = threading.Lock()
    over = threading.Event()
    at_once = 0
    most = 0
    done = []

    def call(device: int, number: int) -> None:
        nonlocal at_once, most
        tries = 0

        def work() -> None:
            nonlocal at_once, most, tries
            with lock:
                at_once += 1
                most = max(most, at_once)
            torch.ones(100).sum()
            with lock:
                at_once -= 1
            tries += 1
            if number in (7, 20) and tries == 1:
                raise torch.OutOfMemoryError

        try:
            s.run(device, work, lambda: None)
        except NoRoom:
            s.run(device, work, lambda: None)
        with lock:
            done.append(number)
            if len(done) == 50:
                over.set()

    s.put([lambda device, number=number: call(device, number) for number in range(50)])
    if inline:
        assert s.work_inline()
        assert not s.work_inline()
    assert over.wait(LIMIT_S)
    assert sorted(done) == list(range(50))
    assert 1 <= most <= 4


def in_turn(s: SlotPool, n: int) -> tuple[list[int], set[int]]:
    """n calls inline, of which each waits for the one after it, where there is another thread.
    Returns in which order they left something, and the threads that made them.
    """
    made = [threading.Event() for _ in range(n + 1)]
    order = []
    threads = set()

    def call(device: int, number: int) -> None:
        threads.add(threading.get_ident())
        if threading.current_thread() is not threading.main_thread() and number % 2 == 0:
            assert made[number + 1].wait(LIMIT_S)
        made[number].set()
        s.hand_over(lambda: order.append(number))

    s.put([lambda device, number=number: call(device, number) for number in range(n)])
    while s.work_inline():
        pass
    return order, threads


def test_beside_a_server_threads_make_long_calls_and_leave_their_results_in_order(made):
    s, _ = made(devices=("cpu",), most=2, inline=True)
    here = {threading.get_ident()}
    assert in_turn(s, 6) == (list(range(6)), here)
    assert [s.add_timing(0, 10.0) for _ in range(TIMED)] == [False] * (TIMED - 1) + [True]
    order, threads = in_turn(s, 6)
    assert order == list(range(6))
    assert len(threads) == 2
    assert not threads & here


@pytest.mark.parametrize(
    ("most", "steps_s"), [(2, [10.0] * (TIMED - 1) + [STEP_S / 2, 10.0]), (1, [10.0] * TIMED)]
)
def test_short_steps_of_training_stay_in_the_thread_of_the_server(made, most, steps_s):
    s, _ = made(devices=("cpu",), most=most, inline=True)
    assert not any(s.add_timing(0, step_s) for step_s in steps_s)
    assert in_turn(s, 4) == (list(range(4)), {threading.get_ident()})


def test_what_a_call_raises_in_a_thread_is_raised_where_the_server_waits(made):
    s, _ = made(devices=("cpu",), most=2, inline=True)
    for _ in range(TIMED):
        s.add_timing(0, 10.0)

    def broken(device: int) -> None:
        raise KeyboardInterrupt

    s.put([broken])
    with pytest.raises(KeyboardInterrupt):
        s.work_inline()


def test_packed_clients_meet_in_one_thread_and_the_end_comes_after_all(made, monkeypatch):
    trained = []
    ends = []
    threads = set()
    queued = threading.Event()

    def descend(lanes, *rest):
        trained.append(len(lanes))
        for lane in lanes:
            lane.run = "done"

    monkeypatch.setattr(packed, "descend", descend)
    monkeypatch.setattr(packed, "check_lane", lambda *rest: None)
    packs = Packs(3, None)
    s, _ = made(devices=("cpu",))
    s.pack([packs], 3)

    def call(device: int) -> None:
        assert queued.wait(LIMIT_S)
        lane = SimpleNamespace(kind="a", run=None, error=None)
        ends.append(packs.descend(lane))
        threads.add(threading.get_ident())

    s.put(7 * [call])
    queued.set()
    s.close()
    assert trained == [3, 3, 1]
    assert ends == ["done"] * 7
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_pack_that_is_not_full_looks_for_further_tasks_and_its_end_is_told_once(
    made, monkeypatch
):
    trained = []
    told = []
    over = threading.Event()
    coming = 2

    def descend(lanes, *rest):
        trained.append(len(lanes))
        for lane in lanes:
            lane.run = "done"

    def look() -> None:
        nonlocal coming
        if coming:
            coming -= 1
            s.put([call])

    def tell() -> None:
        told.append(len(ends))
        over.set()

    monkeypatch.setattr(packed, "descend", descend)
    monkeypatch.setattr(packed, "check_lane", lambda *rest: None)
    packs = Packs(4, None)
    s, _ = made(devices=("cpu",), look=look, made=tell)
    s.pack([packs], 4)
    ends = []

    def call(device: int) -> None:
        ends.append(packs.descend(SimpleNamespace(kind="a", run=None, error=None)))

    s.put([call])
    assert over.wait(LIMIT_S)
    s.close()
    assert trained == [3]
    assert told == [3]


@pytest.mark.parametrize(
    ("broken", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(broken, short):
    assert slots.is_out_of_memory(broken) is short


def test_clients_that_are_packed_run_together_from_the_first_task_on_and_nothing_is_measured(made):
    s, _ = made(each=45, devices=("fake", "fake"))
    s.pack([Packs(20, None), Packs(20, None)], 20)
    assert s.total == 2 * 20
    succeed(s)
    assert run_out(s) == [0.0]
    assert s.total == 19 + 20
    s.pack([], 1)  # another run, in which they are not
    succeed(s, 1)
    assert s.total == 1 + 2
    s.pack([], 1)
    assert s.total == 1 + 2  # what was measured stays


@pytest.mark.timeout(120)
def test_clients_that_do_not_fit_wait_and_the_bits_are_the_same(tmp_path, monkeypatch):
    alone = serve(tmp_path / "alone", None)
    monkeypatch.setattr(placement, "place", lambda device: ["cpu", "cpu"])
    # Room for four, says the first; there is none for two.
    Fake(monkeypatch, 100, 20, "cpu")
    work = Worker.work
    changed = threading.Condition()
    short = []
    at_work = Counter()
    done = Counter()

    def crowded(self, task, body, step, **more):
        with changed:
            at_work[self] += 1
            changed.notify_all()
            # Both have been measured: four tasks at once, so two at one device.
            if task.key.round >= 3 and not short:
                changed.wait_for(lambda: short or sum(at_work.values()) == CONFIG["clients"], 10.0)
            full = at_work[self] > 1
            if full:
                short.append(task.key)
                changed.notify_all()
        try:
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return work(self, task, body, step, **more)
        finally:
            with changed:
                at_work[self] -= 1
                done[self] += 1

    monkeypatch.setattr(Worker, "work", crowded)
    directory = tmp_path / "shared"
    server, served = in_thread(lambda: serve(directory, "tcp://127.0.0.1:*"))
    until(lambda: served or join.read_server(directory), "the server has an address")
    ended = join.main("0-3", Policy(), run=directory, device="auto", state=directory / "state")
    server.join(LIMIT_S)
    assert ended == 0
    assert served["result"]["model_sha256"] == alone["model_sha256"]
    assert len(done) == 2  # both devices were used
    assert short  # and more were tried at once than fit
