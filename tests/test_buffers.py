from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from fednet import buffers
from fednet.buffers import FROM_BYTES, KEPT, lend

N = FROM_BYTES // 4


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(buffers, "_idle", {})


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "hold",
    [
        lambda a: a,
        lambda a: a[5:6],
        lambda a: a.data,
        lambda a: a.view(np.uint8).data.cast("B")[1:],
        torch.from_numpy,
        lambda a: torch.from_numpy(a)[:2],
        lambda a: torch.frombuffer(a.data, dtype=torch.uint8),
    ],
)
def test_an_array_is_lent_again_only_when_nobody_holds_any_of_it(hold):
    array = lend(N, np.float32)
    first = address(array)
    held = hold(array)
    del array
    gc.collect()
    assert address(lend(N, np.float32)) != first
    del held
    gc.collect()
    both = lend(N, np.float32), lend(N, np.float32)
    assert first in {address(a) for a in both}


def test_its_memory_serves_any_type_of_the_same_size_and_can_be_written():
    first = address(lend(N, np.float32))
    again = lend(N // 2, np.float64)
    again[:] = 1.0
    assert (address(again), float(again.sum())) == (first, N // 2)


def test_small_arrays_are_not_kept():
    lend(N - 1, np.float32)
    assert buffers._idle == {}


def test_only_a_few_idle_arrays_are_kept():
    held = [lend(N + k) for k in range(4 * N, 4 * N + KEPT + 5)]
    assert buffers._idle == {}
    del held
    assert len(buffers._idle) == KEPT


def test_idle_arrays_are_no_more_than_so_many_bytes_the_latest_ones(monkeypatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", 3 * FROM_BYTES)
    first = lend(FROM_BYTES)
    second = lend(2 * FROM_BYTES)
    third = lend(FROM_BYTES + 1)
    large = lend(3 * FROM_BYTES + 1)
    del first
    del second
    assert [a.nbytes for a in buffers._idle.values()] == [FROM_BYTES, 2 * FROM_BYTES]
    del large  # goes, and drives out no other
    assert [a.nbytes for a in buffers._idle.values()] == [FROM_BYTES, 2 * FROM_BYTES]
    del third
    assert [a.nbytes for a in buffers._idle.values()] == [FROM_BYTES + 1]


class Loop:
    """What only a search for cycles finds."""

    def __init__(self):
        self.me = self


def test_cycles_are_looked_for_at_a_rounds_end_once_it_is_time_to(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(buffers.time, "monotonic", lambda: now[0])
    before = gc.get_threshold()
    with buffers.seldom_collected(alone=True):
        assert gc.get_threshold() == buffers.COLLECTED
        found = weakref.ref(Loop())
        for now[0], there in ((buffers.COLLECTED_S - 1, True), (buffers.COLLECTED_S, False)):
            buffers.collect_in_time()
            assert (found() is not None) == there
    assert gc.get_threshold() == before
    found = weakref.ref(Loop())
    now[0] *= 9
    buffers.collect_in_time()  # in a process of others it is theirs to say
    assert found() is not None


def test_nothing_is_kept_from_the_collection_at_the_end_of_a_process():
    """Else a library that looks for what is left then complains below the error of a command."""
    script = (
        "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from fednet.buffers import without_collection\nwith without_collection():\n    pass\n"
        "assert gc.get_freeze_count()\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout == "0\n"


def test_arrays_that_nobody_holds_can_be_given_back_to_the_system():
    held = lend(N, np.float32)
    _ = lend(N, np.float32)
    del _
    (idle,) = map(weakref.ref, buffers._idle.values())
    buffers.give_back_idle()
    assert idle() is None
    held[:] = 1.0
    assert float(held.sum()) == N
