"""The folder of a checkpoint: what is there at each moment, and what is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fednet.algorithms.fedavg import FedAvg
from fednet.errors import StateError
from fednet.files import line
from fednet.records.manifest import RunProgress, read_manifest
from fednet.server.checkpoint import Checkpoints
from fednet.tensors import Layout, Slot, Tensors

LAYOUT = Layout((Slot("w", (3,), "parameter"),))


def state(value: float) -> FedAvg.Server:
    none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    return FedAvg.Server(Tensors(LAYOUT, torch.full((3,), value), *none))


def started(run: Path, incarnation: int) -> None:
    """The event that a server writes once it has begun."""
    row = {"round": 0, "client": -1, "type": "started", "bytes": 0, "elapsed": 0.0}
    with (run / "events.jsonl").open("ab") as events:
        events.write(line({**row, "incarnation": incarnation}))


def test_a_count_of_servers_that_is_gone_gives_no_number_twice(tmp_path: Path) -> None:
    """The second server died before it said that it had started, and its count was lost."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    assert Checkpoints(folder).incarnation(tmp_path) == 1
    started(tmp_path, 1)
    assert Checkpoints(folder).incarnation(tmp_path) == 2
    (folder / "incarnation").unlink()
    assert Checkpoints(folder).incarnation(tmp_path) == 3


def test_no_file_of_the_last_checkpoint_goes_before_the_next_is_in_its_place(
    tmp_path: Path,
) -> None:
    made = Checkpoints(tmp_path)
    made.save(state(1.0), RunProgress(run="r"), {})
    points = []

    def at(point: str) -> None:
        points.append(point)
        for name in read_manifest(tmp_path)[1].values():
            assert (tmp_path / name).exists(), point
        if point == "checkpointing":  # a server that is killed here goes on from the last one
            later, _, _ = Checkpoints(tmp_path).load(FedAvg.Server)
            assert later.x.vector.tolist() == [1.0] * 3

    made.save(state(2.0), RunProgress(run="r"), {}, at=at)
    assert points == ["checkpointing", "recording"]
    assert len(list(tmp_path.glob("state-*"))) == 1
    assert Checkpoints(tmp_path).load(FedAvg.Server)[0].x.vector.tolist() == [2.0] * 3


def test_a_folder_that_another_process_has_now_is_not_written_to(tmp_path: Path) -> None:
    others = False

    def own() -> None:
        if others:
            raise StateError("another server has this run now")

    made = Checkpoints(tmp_path, own=own)
    made.save(state(1.0), RunProgress(run="r"), {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    others = True
    with pytest.raises(StateError, match="another server"):
        made.save(state(2.0), RunProgress(run="r"), {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_whole_state_under_the_name_of_another_one_is_refused(tmp_path: Path) -> None:
    made = Checkpoints(tmp_path)
    names = []
    for value in (1.0, 2.0):
        made.save(state(value), RunProgress(run="r"), {})
        (name,) = (path.name for path in tmp_path.glob("state-*"))
        names.append((name, (tmp_path / name).read_bytes()))
    (_, other), (name, _) = names
    (tmp_path / name).write_bytes(other)
    with pytest.raises(StateError, match=f"{name}: holds another state than the one it is named"):
        Checkpoints(tmp_path).load(FedAvg.Server)
