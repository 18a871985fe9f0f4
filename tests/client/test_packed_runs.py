"""Whole runs with `train.pack`: near to those without, and the same to the bit wherever they run
and whoever meets whom.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from fednet.client.worker import Worker
from fednet.errors import ConfigError
from fednet.experiment import determinism
from fednet.training import packed
from tests import rooms
from tests.books import each

pytestmark = pytest.mark.long

RUN = {
    "clients": 5,
    "rounds": 2,
    "participation": 0.8,
    "train": {"pack": 3, "epochs": 2, "momentum": 0.9},
    "data": {"partition": {"scheme": "dirichlet", "alpha": 1.0}, "samples": 150},
    "evaluate": {"clients": "auto"},
}


@pytest.fixture
def lanes(monkeypatch):
    """How many clients were in each pack."""
    found: list[int] = []
    descend = packed.descend

    def counted(some, n, task, plans):
        found.append(len(some))
        assert n == 3
        descend(some, n, task, plans)

    monkeypatch.setattr(packed, "descend", counted)
    return found


def test_a_run_is_packed_and_near_to_one_that_is_not(tmp_path, lanes):
    together = rooms.run(tmp_path / "together", **RUN)
    assert sum(lanes) == 2 * 4
    assert max(lanes) > 1
    alone = rooms.run(tmp_path / "alone", **rooms.merged(RUN, {"train": {"pack": 1}}))
    assert sum(lanes) == 2 * 4
    a, b = (
        [(r["train_loss"], r["test_loss"]) for r in rooms.lines(d / "rounds.jsonl")]
        for d in (together, alone)
    )
    assert a == [pytest.approx(r, rel=1e-4) for r in b]


def test_packs_are_full_where_there_are_tasks_enough_and_each_is_a_line_of_the_clients_record(
    tmp_path, lanes
):
    nine = {"clients": 9, "participation": 1.0, "evaluate": {"clients": "none"}}
    directory = rooms.run(tmp_path, **rooms.merged(RUN, nine))
    assert lanes == 2 * [3, 3, 3]
    (own,) = directory.glob("state/*/wire.jsonl")
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    assert [len(each([row])) for row in rows if row["type"] == "reply"] == lanes


def test_the_same_bits_in_one_process_and_in_several_whoever_meets_whom(tmp_path):
    fedrep = {"algorithm": {"name": "fedrep"}, "evaluate": {"clients": "all", "finetune": True}}
    changes = rooms.merged(RUN, fedrep)
    one = rooms.hashes(rooms.run(tmp_path / "one", **changes))
    assert rooms.hashes(rooms.processes(tmp_path / "two", workers=2, **changes)) == one
    assert len(set(one)) == 2


def test_the_same_bits_where_some_are_lost_in_the_middle_of_a_pack(tmp_path, lanes):
    # In the middle of their training.
    struck = [{"round": 1, "client": k, "kind": "crash", "rounds": 1} for k in (0, 1, 2)]
    first, second = (
        rooms.run(tmp_path / name, **RUN, faults={"schedule": struck})
        for name in ("first", "second")
    )
    assert rooms.hashes(first) == rooms.hashes(second)
    row = rooms.lines(first / "rounds.jsonl")[0]
    assert set(row["selected"]) - set(row["completed"]) == set(row["selected"]) & {0, 1, 2} != set()
    assert row["completed"]
    assert max(lanes) > 1


def test_the_threads_of_a_pack_compute_with_the_switches_of_the_run(tmp_path, monkeypatch):
    descend = packed.descend
    found = set[tuple[bool, bool, int]]()

    def watched(*args):
        cuda = torch.backends.cuda.matmul
        cudnn = torch.backends.cudnn
        found.add((cuda.allow_tf32, cudnn.allow_tf32, torch.get_num_threads()))
        descend(*args)

    monkeypatch.setattr(packed, "descend", watched)
    switches = {"train": {"precision": "tf32", "threads": 2}}
    try:
        rooms.run(tmp_path, **rooms.merged(RUN, switches))
    finally:
        determinism.set_switches()
    assert found == {(True, True, 2)}


# Fewer tasks in a round than may run at once, and more.
@pytest.mark.parametrize(("tasks_in_a_round", "short"), [(0.4, 2), (0.8, 1)])
def test_nobody_waits_in_a_pack_for_a_task_that_memory_was_short_for_before_it_came_there(
    tmp_path, monkeypatch, tasks_in_a_round, short
):
    run = rooms.merged(RUN, {"rounds": 1, "participation": tasks_in_a_round})
    expected = rooms.hashes(rooms.run(tmp_path / "room", **run))
    work = Worker.work
    turns = itertools.count()

    def crowded(self, *given, **named):
        if next(turns) < short:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work(self, *given, **named)

    monkeypatch.setattr(Worker, "work", crowded)
    assert rooms.hashes(rooms.run(tmp_path / "short", **run)) == expected


BATCH_NORM = {"model": {"name": "resnet18_bn_proj"}, "data": {"shape": [3, 32, 32]}}


@pytest.mark.parametrize(
    ("train", "more", "found"),
    [
        ({"pack": 4, "optimizer": "adam"}, {}, r"with train\.optimizer sgd, not adam"),
        ({"pack": 4, "precision": "bf16"}, {}, r"train\.precision fp32 or tf32, not bf16"),
        (
            {"pack": 4},
            {"data": {"augment": "flip", "shape": [1, 8, 8]}},
            r"data\.augment none, not flip",
        ),
        ({"pack": 65}, {}, r"train\.pack: expected a whole number >= 1 and <= 64, got 65"),
        ({"pack": 0}, {}, r"train\.pack: expected"),
        ({"pack": 2}, BATCH_NORM, r"train\.pack: the model has buffers or BatchNorm"),
    ],
)
def test_a_configuration_that_can_never_pack_is_refused_before_the_run(
    tmp_path, train, more, found
):
    with pytest.raises(ConfigError, match=found):
        rooms.run(tmp_path, train=train, **more)
    if train["pack"] == 4:
        rooms.small(train={**train, "pack": 1}, **more)
