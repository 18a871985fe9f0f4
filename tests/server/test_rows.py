"""What a server keeps for every client: a file a row, which a checkpoint names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fednet.algorithms.fedavg import FedAvg
from fednet.algorithms.fedvarp import FedVARP
from fednet.errors import StateError
from fednet.records.manifest import RunProgress
from fednet.server.checkpoint import Checkpoints
from fednet.server.rows import RowStore
from fednet.tensors import Layout, Slot, Tensors
from tests.rooms import run

LAYOUT = Layout(
    (Slot("w", (3,), "parameter"), Slot("mean", (2,), "buffer"), Slot("n", (), "counter"))
)


def row(value: float) -> Tensors:
    return Tensors.pack(
        LAYOUT,
        {
            "w": torch.full((3,), value),
            "mean": torch.full((2,), -value),
            "n": torch.tensor(int(value)),
        },
    )


def same(a: Tensors, b: Tensors) -> bool:
    return a.tensor_sha256 == b.tensor_sha256


def test_a_damaged_or_torn_row_and_a_name_of_a_file_elsewhere_are_refused(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    name = rows.write(row(1.0))
    path = tmp_path / f"{name}.row"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(StateError, match="not the row that was written"):
        rows.read(name, LAYOUT)
    path.write_bytes(data[:-1])
    with pytest.raises(StateError, match="holds 27 bytes; a row has 28"):
        rows.read(name, LAYOUT)
    with pytest.raises(StateError, match="is missing"):
        rows.read(32 * "0", LAYOUT)
    with pytest.raises(StateError, match="not the name of a row"):
        rows.read("../1", LAYOUT)


def test_fedvarp_keeps_a_file_a_client_and_goes_on_from_them(tmp_path: Path) -> None:
    changes = {"algorithm": {"name": "fedvarp"}, "participation": 0.67}
    whole = run(tmp_path / "whole", rounds=4, **changes)
    run(tmp_path / "two", rounds=2, **changes)
    resumed = run(tmp_path / "two", rounds=4, resume=True, **changes)
    hashes = [
        [json.loads(line)["model_sha256"] for line in (d / "rounds.jsonl").read_text().splitlines()]
        for d in (whole, resumed)
    ]
    assert hashes[0] == hashes[1]
    checkpoints = Checkpoints(resumed / "checkpoint")
    server, _, _ = checkpoints.load(FedVARP.Server)
    assert len(server.y) == 3
    files = sorted((resumed / "checkpoint" / "rows").iterdir())
    assert {path.stem for path in files} == set(server.y.rows.values())
    files[0].unlink()
    with pytest.raises(StateError, match=rf"{files[0].name}: is missing"):
        checkpoints.load(FedVARP.Server)


def test_what_compressors_remember_is_written_where_it_changed(tmp_path: Path) -> None:
    def save(made: Checkpoints, all: dict[str, torch.Tensor]) -> set[str]:
        before = names()
        made.save(server, RunProgress(run="r"), all)
        return names() - before

    def names() -> set[str]:
        return {path.name for path in (tmp_path / "rows").glob("*.row")}

    server = FedAvg.Server(row(1.0))
    made = Checkpoints(tmp_path)
    common = torch.full((4,), 9.0)
    all = {"0/x": torch.zeros(9)}
    all |= {f"client {c}/up/0/w/h": torch.full((4,), float(c)) for c in range(5)}
    all |= {f"client {c}/down/0/x/h": common for c in range(5)}
    assert len(save(made, all)) == 6  # what all have in common once
    assert not save(made, dict(all))
    all["client 3/up/0/w/h"] = torch.full((4,), 7.0)
    assert len(save(made, all)) == 1

    later = Checkpoints(tmp_path)
    found = later.load(FedAvg.Server)[2]
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in all.items()
    }
    assert not save(later, found)
    del found["client 3/up/0/w/h"]  # forgotten
    assert not save(later, found)
    assert len(names()) == 5


def test_what_no_state_names_goes(tmp_path: Path) -> None:
    rows = RowStore(tmp_path)
    names = [rows.write(row(float(k))) for k in range(3)]
    rows.prune({names[1]})
    assert [p.stem for p in tmp_path.iterdir()] == [names[1]]
