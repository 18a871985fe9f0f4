"""`~` is the home directory in every path that a user gives, and what has no path needs none."""

from __future__ import annotations

import json
import pwd
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import fednet
from fednet import config as configuration
from fednet import models, places, world
from fednet.cli.main import main
from fednet.data import loading
from fednet.errors import ConfigError
from fednet.server.faults import Replay
from tests.rooms import SMALL, run

PARTS = """
import fednet
import torch

@fednet.model("homely")
def homely(input_shape, classes):
    return torch.nn.Linear(input_shape[0], classes)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, beside the working directory."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_a_run_is_made_and_opened_below_the_home_directory(home: Path, monkeypatch) -> None:
    (home / "parts.py").write_text(PARTS)
    (home / "base.yaml").write_text("rounds: 1\n")
    text = {**SMALL, "extends": "~/base.yaml", "load": ["~/parts.py"], "model": "homely"}
    text |= {"report": False}
    del text["rounds"]
    (home / "my.yaml").write_text(json.dumps(text))
    made = fednet.run("~/my.yaml", in_process=True, out="~/runs", load=["~/parts.py"])
    assert made.dir == home / "runs" / "r"
    assert fednet.open_run("~/runs/r").summary.rounds == 1
    monkeypatch.setenv("FEDNET_OUT", "~/others")
    assert places.runs() == home / "others"
    assert main(["run", "~/my.yaml", "--in-process", "--quiet"]) == 0
    assert (home / "others" / "r" / "summary.json").exists()
    assert main(["verify", "~/runs/r", "~/others/r"]) == 0
    assert list(Path().iterdir()) == []


def test_files_that_a_configuration_names_are_found_below_the_home_directory(home: Path) -> None:
    x = np.zeros((6, 12), np.float32)
    y = np.arange(6) % 3
    np.savez(home / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (home / "parts.json").write_text("[[0, 1], [2, 3], [4, 5]]")
    (home / "trace.csv").write_text("no trace\n")
    model = models.build({"name": "mlp", "hidden": [8]}, (12,), 3, 5)
    save_file(model.state_dict(), home / "w.safetensors")
    partition = {"scheme": "file", "path": "~/parts.json"}
    config = {
        **SMALL,
        "data": {"dataset": "arrays", "path": "~/mine.npz", "partition": partition},
        "model": {"name": "mlp", "hidden": [8], "weights": "~/w.safetensors"},
        "report": False,
    }
    made = fednet.run(config, in_process=True, out=home)
    assert made.partition["samples"] == [2, 2, 2]
    recorded = run(home, name="recorded")
    again = configuration.from_mapping({**SMALL, "faults": {"replay": f"~/{recorded.name}"}})
    assert Replay.of(again, 1) is not None
    for section in ("availability", "devices"):
        traced = configuration.from_mapping({**SMALL, section: {"trace": "~/trace.csv"}})
        with pytest.raises(ConfigError) as wrong:
            world.of(traced)
        assert "No such file" not in str(wrong.value)


def test_without_a_home_directory_data_that_read_no_file_are_loaded(monkeypatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "FEDNET_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    data = configuration.from_mapping({"data": {"dataset": "digits"}}).data
    assert loading.load(data).n_train > 0
    data = configuration.from_mapping({"data": {"dataset": "mnist"}}).data
    with pytest.raises(ConfigError, match="there is no home directory"):
        loading.load(data)
