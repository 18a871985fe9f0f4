"""Who is trained with whom: threads come and go, and nobody waits for ever. No training: a pack is
what the test says it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fednet.client.packing import Packing
from fednet.errors import ConfigError
from fednet.training import packed

LIMIT_S = 20.0  # nothing is expected to take so long: it bounds a test that would hang


class Lane:
    """What a packing sees of a lane."""

    def __init__(self, name: int, kind: str = "a", fails: BaseException | None = None) -> None:
        self.name, self.kind, self.fails = name, (kind,), fails
        self.scratch = SimpleNamespace(device=torch.device("cpu"))
        self.run: Any = None
        self.error: BaseException | None = None
        self.done = False


class Scene:
    """Tasks in threads; `packs` are the names of those that were trained together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, limit: int = 99) -> None:
        self.packs: list[list[int]] = []
        self.broken: BaseException | None = None
        self.held: threading.Event | None = None  # a pack that runs until this is set
        self.running = threading.Event()
        self.packing = Packing(n, None, lambda device: limit)
        self.threads: list[threading.Thread] = []
        self.ends: dict[int, Any] = {}
        monkeypatch.setattr(packed, "check_lane", lambda task, lane: None)
        monkeypatch.setattr(packed, "descend", self._descend)

    def _descend(self, lanes: list[Lane], n: int, task: Any, plans: Any) -> None:
        self.packs.append(sorted(lane.name for lane in lanes))
        assert len(lanes) <= n
        self.running.set()
        if self.held is not None:
            assert self.held.wait(LIMIT_S)
        if self.broken is not None:
            raise self.broken
        for lane in lanes:
            lane.error, lane.run = (
                lane.fails,
                None if lane.fails is not None else f"run {lane.name}",
            )

    def task(
        self, name: int, *lanes: Lane, device: int = 0, first: Callable[[], Any] = lambda: None
    ) -> None:
        """Starts a task that is due already: it does `first`, then each descent."""

        def work() -> None:
            with self.packing.at_work(device):
                try:
                    first()
                    self.ends[name] = [self.packing.descend(device, lane) for lane in lanes]  # type: ignore[arg-type]
                except BaseException as broken:
                    self.ends[name] = broken

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def due(self, n: int) -> None:
        for _ in range(n):
            self.packing.expect()

    def over(self) -> list[list[int]]:
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        return self.packs


@pytest.fixture
def scene(monkeypatch):
    return lambda *args, **more: Scene(monkeypatch, *args, **more)


@pytest.mark.parametrize(
    ("n", "limit", "kinds", "packs"),
    [
        (3, 99, "aaa", [[0, 1, 2]]),  # as many as fit
        (8, 99, "aa", [[0, 1]]),  # fewer, as no other can come
        (8, 99, "aaa", [[0, 1, 2]]),  # a task that is due is waited for
        (8, 2, "aa", [[0, 1]]),  # nobody waits for a task that no thread can take
        (3, 99, "aba", [[0, 2], [1]]),  # unlike ones are apart
        (3, 99, "ab", [[0], [1]]),  # the last to come finds that it is another's turn
    ],
)
def test_as_many_of_a_kind_as_fit_go_together_and_all_that_can_come_are_waited_for(
    scene, n, limit, kinds, packs
):
    s = scene(n, limit=limit)
    s.due(len(kinds) + (limit < 99))
    for k, kind in enumerate(kinds):
        s.task(k, Lane(k, kind))
    assert sorted(s.over()) == packs, s.ends
    assert s.ends == {k: [f"run {k}"] for k in range(len(kinds))}


@pytest.mark.parametrize("end", [None, ValueError("broken")])
def test_a_task_that_leaves_or_fails_before_its_descent_is_no_longer_waited_for(scene, end):
    s = scene(8)
    s.due(3)
    gone = threading.Event()

    def leaves():
        assert gone.wait(LIMIT_S)
        if end is not None:
            raise end

    s.task(0, Lane(0))
    s.task(1, Lane(1))
    s.task(2, first=leaves)
    assert not s.packs
    gone.set()
    assert s.over() == [[0, 1]]
    assert s.ends[2] == ([] if end is None else end)


def test_what_ends_one_lane_leaves_the_others_and_what_ends_a_pack_is_raised_in_each(scene):
    s = scene(3)
    s.due(3)
    cancelled = KeyError("not wanted")
    for k in range(3):
        s.task(k, Lane(k, fails=cancelled if k == 1 else None))
    s.over()
    assert s.ends == {0: ["run 0"], 1: cancelled, 2: ["run 2"]}
    s.broken = torch.OutOfMemoryError("CUDA out of memory.")
    s.due(3)
    for k in range(3):
        s.task(k, Lane(k))
    s.over()
    assert {(type(end), str(end)) for end in s.ends.values()} == {
        (torch.OutOfMemoryError, "CUDA out of memory.")
    }
    assert len({id(end) for end in s.ends.values()}) == 3  # one each: it refers to tensors


def test_a_model_is_checked_until_a_pack_of_it_was_accepted(scene, monkeypatch):
    s = scene(1)
    checked, refusal = [], ConfigError("the model cannot be packed")

    def check(task, lane):
        checked.append(lane.name)
        if lane.name < 2:
            raise refusal

    monkeypatch.setattr(packed, "check_lane", check)
    s.due(4)
    for k in range(4):
        s.task(k, Lane(k))
        s.over()
    assert s.ends == {0: refusal, 1: refusal, 2: ["run 2"], 3: ["run 3"]}
    assert (checked, s.packs) == ([0, 1, 2], [[2], [3]])


def test_many_tasks_in_few_threads_all_end(scene):
    s, tasks = scene(4, limit=4), list(range(40))
    s.due(40)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not tasks:
                    return
                name = tasks.pop()
            with s.packing.at_work(0):
                if name % 7:
                    s.packing.descend(0, Lane(name, "ab"[name % 5 == 0]))

    s.threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in s.threads:
        thread.start()
    assert sorted(name for pack in s.over() for name in pack) == [k for k in range(40) if k % 7]
