"""What a run leaves to look at."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from fednet.experiment import build
from fednet.experiment.store import ClientStore, Record
from fednet.server import exports
from tests.rooms import run, small


def test_class_means_are_of_the_real_images_and_nan_for_an_absent_class(tmp_path):
    (tmp_path / "condensed").mkdir()
    x = torch.tensor([[[[0.0]]], [[[2.0]]], [[[5.0]]]])
    data = SimpleNamespace(
        train=(x, torch.tensor([0, 0, 2])), classes=3, names=None, inputs=lambda v: v
    )
    exports.keep_class_means(
        tmp_path, SimpleNamespace(federation=SimpleNamespace(data=data), input_shape=(1, 1, 1))
    )
    means = load_file(tmp_path / "condensed" / "means.safetensors")["means"]
    assert means[0].item() == 1.0
    assert means[1].isnan().all()
    assert means[2].item() == 5.0


def test_condensed_samples_that_are_no_images_are_not_written_as_such(tmp_path):
    directory = run(tmp_path, algorithm={"name": "feddc", "iterations": 1, "ft_epochs": 1})
    assert not (directory / "condensed").exists()


def test_a_personal_model_is_the_version_that_was_used_last(tmp_path):
    experiment = build.build(small(), None)
    initial = experiment.setting.initial
    store = ClientStore(tmp_path / "state" / "run", experiment.algorithm.Client)
    for version, factor in (("1-0-0", 2.0), ("2-0-0", 3.0)):
        store.save(2, version, Record(), initial * factor)
    exports.keep_personal(tmp_path, "run", {2: "1-0-0", 1: "1-0-0"}, experiment, None)
    assert [p.name for p in (tmp_path / "personal").iterdir()] == ["client-2.safetensors"]
    found = load_file(tmp_path / "personal" / "client-2.safetensors")
    assert torch.equal(found["head.weight"], 2 * initial["head.weight"])
