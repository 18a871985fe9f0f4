"""What a run leaves to look at."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from fednet.algorithms.feddc import FedDC
from fednet.algorithms.state import write_state
from fednet.experiment.store import Local
from fednet.server import exports
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire.payload import Run, Samples

LAYOUT = Layout((Slot("w", (2,), "parameter"),))


def reply(value: float) -> FedDC.Up:
    x = Tensors.pack(LAYOUT, {"w": torch.zeros(2)})
    fields = {
        name: Run(1, 1, 0.0) if field.form == "run" else x
        for name, field in FedDC.Up.fields.items()
    }
    name = next(n for n, f in FedDC.Up.fields.items() if f.kind == "condensed")
    return FedDC.Up(
        **{**fields, name: Samples(torch.full((2, 3, 4, 4), value), torch.tensor([1, 5]))}
    )


def test_the_newest_condensed_images_of_each_client_are_kept(tmp_path):
    exports.keep_condensed(tmp_path, 3, reply(1.0))
    exports.keep_condensed(tmp_path, 3, reply(2.0))
    assert [p.name for p in (tmp_path / "condensed").iterdir()] == ["client-3.safetensors"]
    found = load_file(tmp_path / "condensed" / "client-3.safetensors")
    assert found["x"].unique().tolist() == [2.0]
    assert found["y"].tolist() == [1, 5]


def test_class_means_are_of_the_real_images_and_nan_for_an_absent_class(tmp_path):
    (tmp_path / "condensed").mkdir()
    x = torch.tensor([[[[0.0]]], [[[2.0]]], [[[5.0]]]])
    data = SimpleNamespace(
        train=(x, torch.tensor([0, 0, 2])), classes=3, names=None, inputs=lambda v: v
    )
    exports.keep_class_means(
        tmp_path, SimpleNamespace(federation=object(), data=data, input_shape=(1, 1, 1))
    )
    means = load_file(tmp_path / "condensed" / "means.safetensors")["means"]
    assert means[0].item() == 1.0
    assert means[1].isnan().all()
    assert means[2].item() == 5.0


def test_a_personal_model_is_the_version_that_was_used_last(tmp_path):
    folder = tmp_path / "state" / "run" / "client-4"
    folder.mkdir(parents=True)
    for version, value in (("1-0-0", 1.0), ("2-0-0", 2.0)):
        write_state(
            folder / f"{version}.local.safetensors",
            Local(Tensors.pack(LAYOUT, {"w": torch.full((2,), value)})),
        )
    exports.keep_personal(tmp_path, "run", {4: "1-0-0", 5: "1-0-0"})
    assert [p.name for p in (tmp_path / "personal").iterdir()] == ["client-4.safetensors"]
    assert load_file(tmp_path / "personal" / "client-4.safetensors")["w"].tolist() == [1.0, 1.0]
