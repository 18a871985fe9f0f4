"""What becomes of tasks that a process cannot do, does twice, or keeps something of: by runs."""

from __future__ import annotations

import logging

import pytest
import torch

from fednet import registry
from fednet.algorithms.fedavg import FedAvg
from fednet.experiment import placement
from tests.rooms import hashes, lines, run


def planned(kind: str, **more: int) -> dict:
    return {"schedule": [{"round": 1, "client": 1, "kind": kind, **more}]}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return hashes(run(tmp_path_factory.mktemp("calm")))


def test_a_planned_crash_in_one_process_is_of_that_client_alone(tmp_path, monkeypatch):
    """In the midst of its training, which has no end."""
    trained = []

    class Traced(FedAvg):
        def client_update(self, phase, client, down, host):
            found = super().client_update(phase, client, down, host)
            trained.append((host.round, host.client_id))
            return found

    monkeypatch.setitem(registry.algorithm._parts, "traced", Traced)
    faults = planned("crash", rounds=1)
    directory = run(tmp_path, rounds=3, algorithm={"name": "traced"}, faults=faults)
    assert trained == [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]
    rows = lines(directory / "rounds.jsonl")
    assert [row["completed"] for row in rows] == [[0, 2], [0, 2], [0, 1, 2]]
    assert [row["dropped"] for row in rows] == [{"1": "lost: crash"}, {"1": "away: crash"}, {}]


def test_a_reply_that_is_sent_twice_counts_once_and_is_paid_for_twice(tmp_path, calm):
    directory = run(tmp_path, faults=planned("duplicate"))
    assert hashes(directory) == calm
    rows = [
        (row["type"], row["useful"])
        for row in lines(directory / "wire.jsonl")
        if row["direction"] == "up" and (row["client"], row["round"]) == (1, 1)
    ]
    assert rows.count(("reply", True)) == 1
    assert rows.count(("reply", False)) == 1


class Short(FedAvg):
    """Client 1 finds no memory in round 1, `times` times."""

    times = 0

    def client_update(self, phase, client, down, host):
        if (host.client_id, host.round) == (1, 1) and type(self).times > 0:
            type(self).times -= 1
            raise torch.OutOfMemoryError("no memory")
        return super().client_update(phase, client, down, host)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(registry.algorithm._parts, "short", Short)
    monkeypatch.setattr("fednet.client.slots.PAUSES_S", (0.0, 0.0))

    def made(times: int) -> dict:
        monkeypatch.setattr(Short, "times", times)
        return {"name": "short"}

    return made


def test_a_task_that_ran_out_of_memory_is_done_again(tmp_path, calm, short, caplog):
    with caplog.at_level(logging.WARNING, "fednet"):
        directory = run(tmp_path, algorithm=short(2))
    assert hashes(directory) == calm
    said = [r.getMessage() for r in caplog.records if "it is done again" in r.getMessage()]
    assert len(said) == 2
    assert "client 1 in round 1: there is not enough memory on cpu" in said[0]


def test_a_task_that_never_has_memory_enough_is_given_up_and_the_others_count(
    tmp_path, short, monkeypatch
):
    # One client at a time: with another one at hand, its success would be between two failures.
    monkeypatch.setattr(placement, "cores", lambda: 1)
    directory = run(tmp_path, algorithm=short(1000))
    first, second = lines(directory / "rounds.jsonl")
    assert first["completed"] == [0, 2]
    assert "not enough memory on cpu for this client alone" in first["dropped"]["1"]
    assert second["completed"] == [0, 1, 2]
    # Another process might have the memory: the task is given out three times. The first time it is
    # tried again after both pauses, then no more.
    assert 1000 - Short.times == 3 + 1 + 1


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize(
    ("evaluate", "kept"),
    [
        ({"clients": "auto"}, True),
        ({"clients": "none"}, False),
    ],
)
def test_a_client_keeps_its_local_model_only_where_it_is_asked_to(tmp_path, name, evaluate, kept):
    directory = run(tmp_path, algorithm={"name": name}, evaluate=evaluate)
    held = [path.name for path in (directory / "state").rglob("*.safetensors")]
    assert any(name.endswith(".local.safetensors") for name in held) is kept
    assert bool(held) is (kept or name == "scaffold")
