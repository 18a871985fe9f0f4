"""Configurations, checkpoints, client states and data that someone else wrote: an error, and
nothing of them is run.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fednet import config
from fednet.algorithms.base import Empty
from fednet.algorithms.fedavg import FedAvg
from fednet.algorithms.state import check_of, read_state
from fednet.cli.common import run_guarded
from fednet.data.datasets.arrays import arrays
from fednet.errors import ConfigError, DataError, StateError
from fednet.experiment.store import read_client
from fednet.files import write_record
from fednet.server.checkpoint import Checkpoints
from fednet.server.rows import RowStore
from fednet.tensors import Layout

PACKAGE = Path(__file__).resolve().parents[2] / "fednet"
VECTORS = {part: {"$tensor": "a"} for part in ("vector", "buffers", "counters")}


def record(x: object) -> str:
    return json.dumps({"$record": {"x": x}})


TREES = {
    "a field too many": json.dumps({"$record": {"x": 1, "y": 2}}),
    "no field": json.dumps({"$record": {}}),
    "a class's own name": json.dumps({"$record": {"__class__": "os.system"}}),
    "no record": "5",
    "a list": "[]",
    "null": "null",
    "a record of a number": json.dumps({"$record": 5}),
    "a layout beyond its tensor": record({"$tensors": [["w", [10**12], "parameter"]], **VECTORS}),
    "a role of its own": record({"$tensors": [["w", [4], "code"]], **VECTORS}),
    "a tensor that is not there": record({"$tensor": "b"}),
    "an unhashable key": record({"$dict": [[[1], 2]]}),
    "a million deep": "[" * 10**6,
    "not JSON": "{",
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_state_file_that_is_not_what_was_declared_is_an_error(tmp_path, tree):
    file = tmp_path / "s.safetensors"
    named = {"a": torch.zeros(4)}
    save_file(named, file, metadata={"tree": tree, "check": check_of(tree, named)})
    with pytest.raises(StateError):
        read_state(file, FedAvg.Server)
    if tree != TREES["no field"]:  # of a client's record, all fields have defaults
        with pytest.raises(StateError):
            read_client(file, Empty)


def test_a_pickle_in_the_place_of_a_state_is_an_error(tmp_path):
    file = tmp_path / "s.safetensors"
    torch.save({"x": torch.zeros(2)}, file)
    with pytest.raises(StateError):
        read_state(file, FedAvg.Server)


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/state-00.safetensors", "state-00.safetensors/../x"]
)
def test_a_checkpoint_names_no_file_outside_its_folder(tmp_path, name):
    write_record(tmp_path / "manifest.json", {"files": {"server": name}, "progress": {"run": "r"}})
    with pytest.raises(StateError, match="not a whole checkpoint"):
        Checkpoints(tmp_path).load(FedAvg.Server)


def test_a_row_names_no_file_outside_its_folder(tmp_path):
    with pytest.raises(StateError, match="is not the name of a row"):
        RowStore(tmp_path).read("../../elsewhere", Layout(()))


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system ['touch ran']",
        "name: !!python/name:os.system",
        "seed: !!int 5 5",
        "data: !!python/object/new:subprocess.Popen [[touch, ran]]",
    ],
)
def test_a_tag_in_a_configuration_is_an_error_and_runs_nothing(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    for read in (
        lambda: config.load(tmp_path / "c.yaml"),
        lambda: config.from_text(text, "the wire"),
    ):
        with pytest.raises(ConfigError):
            read()
    assert not (tmp_path / "ran").exists()


def test_a_configuration_nested_without_end_is_an_error():
    with pytest.raises(ConfigError, match=r"too deep|maximum nesting depth"):
        config.from_text("data: " + "[" * 20_000, "the wire")


def test_a_configuration_from_the_wire_imports_nothing(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    made = config.from_text(f"load: [{own}]", "the wire"), config.from_mapping({"load": [str(own)]})
    assert [one.load for one in made] == [(str(own),)] * 2
    assert not (tmp_path / "ran").exists()


def test_objects_in_an_npz_are_not_unpickled(tmp_path):
    class Runs:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "x.npz", x_train=np.array([Runs()], dtype=object), y_train=np.zeros(1))
    with pytest.raises(DataError, match="plain arrays"):
        arrays(tmp_path, path="x.npz")
    assert not (tmp_path / "ran").exists()


RUNS_WHAT_IT_READS = re.compile(
    r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
    r"|(?<![\w.`])(eval|exec|compile)\("
    r"|\b(torch\.load|yaml\.load|yaml\.unsafe_load|yaml\.full_load|np\.fromfile)\("
    r"|\ballow_pickle=(?!False)"
)


def test_nothing_in_the_package_can_run_what_it_reads():
    texts = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [n for n, text in texts.items() if RUNS_WHAT_IT_READS.search(text)] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_the_machine_refuses_is_said_as_that(capsys, code):
    def refused() -> int:
        raise OSError(code, os.strerror(code), "runs/first/report.html")

    assert run_guarded("fednet report", refused) == 3
    said = f"fednet report: {os.strerror(code)}: runs/first/report.html.\n"
    assert capsys.readouterr().err == said
