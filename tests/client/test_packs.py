"""Who is trained with whom, and that nobody waits for ever. No training: a pack is what the test
says it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fednet.client.packs import Packs
from fednet.errors import ConfigError
from fednet.training import packed


class Lane:
    """What packs see of a lane."""

    def __init__(self, name: int, kind: str = "a", fails: BaseException | None = None) -> None:
        self.name = name
        self.kind = (kind,)
        self.fails = fails
        self.scratch = SimpleNamespace(device=torch.device("cpu"))
        self.run: Any = None
        self.error: BaseException | None = None


class Scene:
    """Tasks that are queued; `trained` are the names of those that were trained together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, limit: int = 99) -> None:
        self.trained: list[list[int]] = []
        self.broken: BaseException | None = None
        self.limit = limit
        self.packs = Packs(n, None)
        self.queue: deque[Callable[[], None]] = deque()
        self.ends: dict[int, Any] = {}
        self.running = self.most = 0
        monkeypatch.setattr(packed, "check_lane", lambda task, lane: None)
        monkeypatch.setattr(packed, "descend", self._descend)

    def _descend(self, lanes: list[Lane], n: int, task: Any, plans: Any) -> None:
        assert torch.is_grad_enabled()
        self.trained.append(sorted(lane.name for lane in lanes))
        assert len(lanes) <= n
        if self.broken is not None:
            raise self.broken
        for lane in lanes:
            lane.error = lane.fails
            lane.run = None if lane.fails is not None else f"run {lane.name}"

    def task(self, name: int, *lanes: Lane, first: Callable[[], Any] = lambda: None) -> None:
        """Queues a task: it does `first`, then each descent."""

        def work() -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                first()
                self.ends[name] = [self.packs.descend(lane) for lane in lanes]  # type: ignore[arg-type]
            except BaseException as broken:
                self.ends[name] = broken
            self.running -= 1

        self.queue.append(work)

    def run(self) -> list[list[int]]:
        """Does all that is queued, and what is queued meanwhile."""

        def next_call(running: int) -> Callable[[], None] | None:
            assert running == self.running
            return self.queue.popleft() if self.queue and running < self.limit else None

        while self.queue:
            self.packs.work(self.queue.popleft(), next_call)
        return self.trained


@pytest.fixture
def scene(monkeypatch):
    return lambda *args, **more: Scene(monkeypatch, *args, **more)


@pytest.mark.parametrize(
    ("n", "limit", "kinds", "packs"),
    [
        (3, 99, "aaa", [[0, 1, 2]]),  # as many as fit
        (2, 99, "aaaa", [[0, 1], [2, 3]]),
        (8, 99, "aa", [[0, 1]]),  # fewer, as no other can come
        (8, 2, "aaa", [[0, 1], [2]]),  # nobody waits for a task that has no slot
        (3, 99, "aba", [[0, 2], [1]]),  # unlike ones are apart
        (2, 99, "abab", [[0, 2], [1, 3]]),
    ],
)
def test_as_many_of_a_kind_as_fit_go_together_and_all_that_can_come_are_waited_for(
    scene, n, limit, kinds, packs
):
    s = scene(n, limit=limit)
    for k, kind in enumerate(kinds):
        s.task(k, Lane(k, kind))
    assert s.run() == packs, s.ends
    assert s.ends == {k: [f"run {k}"] for k in range(len(kinds))}
    assert s.most <= limit


@pytest.mark.parametrize("end", [None, ValueError("broken")])
def test_a_task_that_leaves_or_fails_before_its_descent_is_not_waited_for(scene, end):
    s = scene(8)

    def leaves():
        if end is not None:
            raise end

    s.task(0, Lane(0))
    s.task(1, first=leaves)
    s.task(2, Lane(2))
    assert s.run() == [[0, 2]]
    assert s.ends[1] == ([] if end is None else end)


def test_a_task_that_comes_while_others_train_meets_those_that_train_again(scene):
    s = scene(3)
    s.task(0, Lane(0), Lane(10))
    s.task(1, Lane(1))
    late = iter([None])

    def descend(lanes, *rest, descend=s._descend):
        for _ in late:
            s.task(2, Lane(2))
        descend(lanes, *rest)

    packed.descend = descend  # the fixture puts it back
    assert s.run() == [[0, 1], [2, 10]]
    assert s.ends == {0: ["run 0", "run 10"], 1: ["run 1"], 2: ["run 2"]}


def test_what_ends_one_lane_leaves_the_others_and_what_ends_a_pack_is_raised_in_each(scene):
    s = scene(3)
    cancelled = KeyError("not wanted")
    for k in range(3):
        s.task(k, Lane(k, fails=cancelled if k == 1 else None))
    s.run()
    assert s.ends == {0: ["run 0"], 1: cancelled, 2: ["run 2"]}
    s.broken = torch.OutOfMemoryError("CUDA out of memory.")
    for k in range(3):
        s.task(k, Lane(k))
    s.run()
    assert {(type(end), str(end)) for end in s.ends.values()} == {
        (torch.OutOfMemoryError, "CUDA out of memory.")
    }
    assert len({id(end) for end in s.ends.values()} | {id(s.broken)}) == 4  # it refers to tensors
    s.broken = ZeroDivisionError("of a user's own model")
    s.task(0, Lane(0))
    s.run()
    assert s.ends[0] is s.broken  # with its traceback


def test_gradients_are_computed_in_a_pack_whatever_its_tasks_have_switched_off(scene):
    s = scene(3)
    found = {}

    def task(k: int, on: bool) -> None:
        with torch.set_grad_enabled(on):
            s.packs.descend(Lane(k))
            found[k] = torch.is_grad_enabled()

    for k, on in enumerate((False, True, False)):
        s.queue.append(lambda k=k, on=on: task(k, on))
    s.packs.work(s.queue.popleft(), lambda running: s.queue.popleft() if s.queue else None)
    assert s.trained == [[0, 1, 2]]
    assert found == {0: False, 1: True, 2: False}
    assert torch.is_grad_enabled()


def test_a_model_is_checked_until_a_pack_of_it_was_accepted(scene, monkeypatch):
    s = scene(1)
    checked = []
    refusal = ConfigError("the model cannot be packed")

    def check(task, lane):
        checked.append(lane.name)
        if lane.name < 2:
            raise refusal

    monkeypatch.setattr(packed, "check_lane", check)
    for k in range(4):
        s.task(k, Lane(k))
    s.run()
    assert s.ends == {0: refusal, 1: refusal, 2: ["run 2"], 3: ["run 3"]}
    assert (checked, s.trained) == ([0, 1, 2], [[2], [3]])


def test_many_tasks_with_few_slots_all_end(scene):
    s = scene(4, limit=4)
    for name in range(40):
        lanes = [Lane(name, "ab"[name % 5 == 0])] if name % 7 else []
        s.task(name, *lanes)
    assert sorted(name for pack in s.run() for name in pack) == [k for k in range(40) if k % 7]
    assert s.most == 4
    assert len(s.ends) == 40
