"""Which tensors `train.only` names, what becomes of buffers, and what of it crosses in a run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fednet import models
from fednet.errors import ConfigError
from fednet.models.trained import named_by
from fednet.tensors import Layout, Tensors
from fednet.training.evaluation import recalibrate
from fednet.training.scratch import Scratch
from tests.contract.test_ledger import IMAGES, method
from tests.rooms import lines, run, summary

# Two layers and a head; of each the parameters: 64 * 8 + 8, 8 * 8 + 8, 8 * 3 + 3.
MLP = {"name": "mlp", "hidden": [8, 8]}
ONLY = ["body.fc2.*", "head.*"]
PART = 4 * (8 * 8 + 8 + 8 * 3 + 3)


class Net(nn.Module):
    """Two BatchNorms, one of them without parameters, and a buffer of a module without any."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.head(self.drop(self.plain(self.norm(x)))) * self.scale


NORM = ["norm.weight", "norm.bias"]
STATISTICS = [f"norm.{leaf}" for leaf in ("running_mean", "running_var", "num_batches_tracked")]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["head.*"], ["head.weight", "head.bias"]),
        # The statistics of a module go with its parameters, whichever of these is named.
        (["norm.weight"], ["norm.weight", *STATISTICS]),
        (["*.bias", "scale"], ["scale", "norm.bias", *STATISTICS, "head.bias"]),
        (["head.bias", "plain.running_m*"], ["plain.running_mean", "head.bias"]),
    ],
)
def test_patterns_name_parameters_and_buffers_follow_their_module(only, names):
    found = named_by(Layout.of(Net()), tuple(only)).names
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (["heed.*"], r"'heed\.\*' matches no tensor of the model; it has .* mean 'head\.\*'"),
        (["head.*", "none"], r"'none' matches no tensor"),
        (["norm.running_*"], "names only buffers, which go with the parameters"),
        (["plain.*"], "names buffers alone; nothing learns"),
    ],
)
def test_a_pattern_that_trains_nothing_is_refused(only, says):
    with pytest.raises(ConfigError, match=says):
        named_by(Layout.of(Net()), tuple(only))


def test_what_is_not_trained_stands_still_in_training():
    """Its dropout is off, its statistics are used and stay."""
    module = Net()
    layout = named_by(Layout.of(module), ("head.*",))
    scratch = Scratch(lambda: module, layout)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    scratch.train_mode(alone=False)
    modes = {name: part.training for name, part in module.named_modules()}
    assert modes == {"": True, "norm": False, "plain": False, "drop": True, "head": True}
    assert not scratch.batch_norm
    module(5 + torch.randn(8, 4)).sum().backward()
    assert {n: torch.equal(t, before[n]) for n, t in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert [n for n, p in module.named_parameters() if p.grad is not None] == list(layout.names)
    recalibrate(scratch, Tensors.of(module, layout), 5 + torch.randn(8, 4), 4)
    assert torch.equal(module.norm.running_mean, before["norm.running_mean"])


# -- runs ------------------------------------------------------------------------------------------
# Plain; control variates; a part at the clients; two exchanges. Each method: test_adapters.
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "fedga"])
def test_a_method_sees_and_sends_what_is_trained_alone(tmp_path, name):
    directory = run(
        tmp_path, algorithm=method(name), data=IMAGES, model=MLP, train={"only": ONLY}, seed=3
    )
    useful = summary(directory)["useful"]
    assert summary(directory)["predicted"] == useful
    if name == "fedavg":
        sent = {"state": 2 * 3 * PART}
        assert useful == {"down": sent, "up": {**sent, "statistics": 2 * 3 * 24}}
    for record in lines(directory / "rounds.jsonl"):
        assert not any(n.startswith("body.fc1") for n in record["tensor_sha256"])
    held = load_file(directory / "model.safetensors")
    initial = models.build(MLP, (1, 8, 8), 3, 3).state_dict()
    assert held.keys() == initial.keys()
    same = {n for n, t in held.items() if torch.equal(t, initial[n])}
    assert same == {
        n for n in held if n.startswith(("body.fc1", "head") if name == "fedper" else "body.fc1")
    }


@pytest.mark.parametrize(
    ("name", "only", "target", "says"),
    [
        ("feddc", ONLY, [], "train.only: a condensed image's gradients"),
        ("fedper", ["head.*"], [], "train.only: with it fedper has nothing to send"),
        ("fedrod", ["body.*"], [], "let it name head.weight and head.bias too"),
        ("fedper", [], ["head"], "model.adapters: with it fedper has nothing to send"),
        ("fedrod", [], ["body.*"], "let it name head.weight and head.bias too"),
        ("fedrod", [], ["head"], r"model\.adapters\.target: fedrod trains a personal head P"),
    ],
)
def test_what_leaves_a_method_without_its_part_is_refused(tmp_path, name, only, target, says):
    model = {**MLP, "adapters": {"rank": 2, "target": target}} if target else MLP
    train = {"only": only} if only else {}
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, algorithm=method(name), data=IMAGES, model=model, train=train)


def test_statistics_of_a_frozen_batch_norm_do_not_cross(tmp_path):
    """The head has 64 * 3 + 3 parameters; nothing else crosses."""
    data = {**IMAGES, "shape": [3, 32, 32], "samples": 12, "public": {"samples": 0}}
    changes = {"model": {"name": "vgg11", "norm": "batch", "width": 8}, "data": data, "rounds": 1}
    directory = run(tmp_path, train={"only": ["head.*"]}, clients=2, **changes)
    useful = summary(directory)["useful"]
    assert useful["up"] == {"state": 2 * 4 * (64 * 3 + 3), "statistics": 2 * 24}
    held = load_file(directory / "model.safetensors")
    means = [t for name, t in held.items() if name.endswith("running_mean")]
    assert means
    assert not any(m.any() for m in means)


class Kept(torch.nn.Linear):
    def get_extra_state(self):
        return {"scale": 2}

    def set_extra_state(self, state):
        pass


def seen_many_times() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(1).expand(3))
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Kept(2, 2), "_extra_state of the model cannot be written to"),
        (seen_many_times(), "scale of the model cannot be written to"),
        (torch.nn.Linear(2, 2).requires_grad_(False), "no parameter of the model requires"),
    ],
)
def test_a_model_that_nothing_can_be_written_to_or_learned_by_is_refused(module, words):
    with pytest.raises(ConfigError, match=words):
        Layout.of(module)
