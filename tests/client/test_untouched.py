"""What tasks share is compared once, when the last of them has ended."""

from __future__ import annotations

import pytest

from fednet.client import untouched
from fednet.client.untouched import Untouched
from fednet.errors import ConfigError, SharedChanged
from fednet.tensors import Layout, Slot, Tensors


def tensors() -> Tensors:
    return Tensors.zeros(Layout((Slot("w", (5,), "parameter"), Slot("m", (2,), "buffer"))))


@pytest.fixture
def watched(monkeypatch):
    """What tasks have is watched, and how many digests of tensors were taken."""
    taken: list[object] = []
    fingerprints = untouched.fingerprints
    monkeypatch.setattr(untouched, "fingerprints", lambda x: taken.append(x) or fingerprints(x))
    return Untouched("own"), taken


def test_tensors_that_all_tasks_have_are_read_twice_however_many_there_are(watched):
    them, taken = watched
    x = tensors()
    own = tensors()
    for _ in range(7):
        them.lend([x])
    them.lend([x, own])
    them.take_back([x, own])
    for _ in range(7):
        them.take_back([x])
    assert [sum(one is of for one in taken) for of in (x, own)] == [2, 2]


@pytest.mark.parametrize("part", ["vector", "buffers"])
def test_a_change_is_found_out_when_the_last_task_that_could_see_it_ends(watched, part):
    them, _ = watched
    x = tensors()
    other = tensors()
    them.lend([x])
    them.lend([x, other])
    getattr(x, part).numpy()[:] = 1
    them.take_back([x, other])
    with pytest.raises(SharedChanged, match="own changes tensors that it was sent"):
        them.take_back([x])
    them.lend([x])  # it is as it is now
    them.take_back([x])


def test_a_task_that_was_alone_with_what_it_changed_fails_alone(watched):
    them, _ = watched
    x = tensors()
    them.lend([x])
    x.vector.data.add_(1)
    with pytest.raises(ConfigError, match="in place") as failure:
        them.take_back([x])
    assert not isinstance(failure.value, SharedChanged)
