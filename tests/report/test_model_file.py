"""`run.model()` gives the model that the run ended with, or says that the file is another."""

from __future__ import annotations

import importlib
import random
import shutil
from pathlib import Path

import pytest
import torch

import fednet
from fednet import loading, registry
from fednet.algorithms.state import read_named
from fednet.errors import StateError
from fednet.server.exports import save_model
from tests.rooms import SMALL, run


def test_a_flipped_bit_or_another_runs_file_is_an_error(tmp_path: Path) -> None:
    directory = run(tmp_path)
    other = run(tmp_path, name="other", seed=1)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    sound = fednet.open_run(directory).model().state_dict()
    draw = random.Random(0)
    for at in (*range(8), *(draw.randrange(8, len(whole)) for _ in range(300))):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=r"model\.safetensors: not "):
            fednet.open_run(directory).model()
    for n in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(StateError):
            fednet.open_run(directory).model()
    shutil.copy(other / "model.safetensors", path)
    with pytest.raises(StateError, match="not the model that this run ended with"):
        fednet.open_run(directory).model()
    path.write_bytes(whole)
    again = fednet.open_run(directory).model().state_dict()
    assert all(torch.equal(again[name], value) for name, value in sound.items())


def test_a_digest_covers_every_kind_of_tensor_and_what_is_said_beside(tmp_path: Path) -> None:
    named = {
        "mask": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float16),
        "brain": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    checks = set()
    for about in (None, {"trained": "a"}):
        checks.add(save_model(tmp_path / "m", named, about))
        tensors, check = read_named(tmp_path / "m")
        assert check in checks
        assert all(torch.equal(tensors[n], v) for n, v in named.items())
    assert len(checks) == 2


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    """The package writes metadata in another order each time."""
    about = {str(k): "" for k in range(8)}
    for name in ("a", "b"):
        save_model(tmp_path / name, {"w": torch.ones(3)}, about)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


OWN = """
import torch
import fednet

SCALE = {scale}


@fednet.model("own-net")
class OwnNet(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.last = torch.nn.Linear(12, classes)

    def forward(self, x):
        return SCALE * self.last(x)
"""


def test_models_of_runs_of_an_edited_file_are_each_those_of_the_runs_own_code(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.py"
    made = []
    for scale in (1, 2):
        file.write_text(OWN.format(scale=scale))
        config = {**SMALL, "name": f"r{scale}", "model": "own-net", "report": False}
        made.append(fednet.run(config, in_process=True, out=tmp_path, load=[file]))
    file.write_text(OWN.format(scale=3))
    loading.load_parts([file])
    x = torch.ones(1, 12)
    for _ in range(2):
        one, two = (fednet.open_run(run.dir).model() for run in made)
        assert torch.equal(one(x), one.last(x))
        assert torch.equal(two(x), 2 * two.last(x))
    assert type(one) is type(fednet.open_run(made[0].dir).model())  # so that it can be pickled
    assert registry.model.get("own-net").__module__ == loading.load_parts([file])[0].module


def test_a_program_that_imports_its_parts_can_run_them_resume_and_open_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ownparts.py"
    file.write_text(OWN.format(scale=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("ownparts")
    config = {**SMALL, "model": "own-net", "report": False, "rounds": 1}
    run = fednet.run(config, in_process=True, out=tmp_path, load=[file])
    run.model()
    loading._loaded.clear()  # as in another process that imports them
    fednet.run({**config, "rounds": 2}, in_process=True, out=tmp_path, load=[file], resume=True)
    fednet.open_run(run.dir).model()
    file.write_text(OWN.format(scale=2))
    fednet.open_run(run.dir).model()
