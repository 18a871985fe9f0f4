"""A language model whose output layer shares its weight with the embedding, as GPT-2 and most
others: one tensor with two names, `embed.weight` and `out.weight`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fednet
from fednet import Data, models, registry
from fednet.errors import ConfigError
from fednet.models import adapters
from fednet.models.trained import named_by
from fednet.tensors import Layout, Tensors
from tests.rooms import lines

VOCABULARY = 16
LENGTH = 6
BODY = {f"body.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")}


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, VOCABULARY, bias=False)
        if tie:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.body(self.embed(x))[0])


class Headed(nn.Module):
    """One class a text; the layer that gives the features' classes is tied to another one."""

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.other = nn.Linear(8, classes, bias=False)
        self.head = nn.Linear(8, classes)
        self.head.weight = self.other.weight

    def features(self, x):
        return self.embed(x).mean(1)

    def forward(self, x):
        return self.head(self.features(x))


def texts(n: int, seed: int):
    drawn = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCABULARY, (n, 1), generator=drawn)
    ids = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def steps(root):
    return Data(train=texts(60, 0), test=texts(30, 1), classes=VOCABULARY)


def firsts(root):
    """The first of the next tokens is the label."""
    train = texts(60, 0)
    test = texts(30, 1)
    return Data(train=(train[0], train[1][:, 0] % 4), test=(test[0], test[1][:, 0] % 4), classes=4)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    for name, kind in (("tied", Tied), ("headed", Headed)):
        monkeypatch.setitem(registry.model._parts, name, kind)
    for name, made in (("steps", steps), ("firsts", firsts)):
        monkeypatch.setitem(registry.dataset._parts, name, made)


def mapping(algorithm, model="tied", dataset="steps"):
    return {
        "name": "tied",
        "clients": 3,
        "rounds": 2,
        "participation": 1.0,
        "algorithm": algorithm,
        "model": model,
        "data": {"dataset": dataset, "partition": "iid"},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "report": False,
    }


@pytest.mark.parametrize(
    ("method", "crosses"),
    [
        ("fedavg", {"embed.weight", *BODY}),
        ("fedper", BODY),
        ("fedrep", BODY),
        ("fedbabu", BODY),
        ("lgfedavg", {"embed.weight"}),
    ],
)
def test_a_tied_weight_is_part_of_the_head(tmp_path, method, crosses):
    """Known by its first name alone, it was trained and sent as the body: FedPer was FedAvg, and
    LG-FedAvg sent nothing.
    """
    found = fednet.run(mapping(method), in_process=True, out=tmp_path)
    assert set(lines(found.dir / "rounds.jsonl")[-1]["tensor_sha256"]) == crosses
    state = Tied().state_dict()
    floats = sum(state[name].numel() for name in crosses)
    # Of three clients in two rounds.
    assert found.summary.useful["up"]["state"] == 4 * floats * 3 * 2


def test_fedbabu_leaves_a_tied_head_as_it_was(tmp_path):
    found = fednet.run(mapping("fedbabu"), in_process=True, out=tmp_path).model()
    begun = models.build({"name": "tied"}, (LENGTH,), VOCABULARY, 0)
    assert torch.equal(found.out.weight, begun.embed.weight)
    assert not torch.equal(found.body.weight_hh_l0, begun.body.weight_hh_l0)


def test_fedrod_has_a_personal_head_shaped_as_a_tied_one(tmp_path):
    changes = mapping("fedrod", "headed", "firsts")
    found = fednet.run(changes, in_process=True, out=tmp_path)
    assert all(row.test_loss is not None for row in found.rounds)
    kept = load_file(next((found.dir / "personal").glob("*.safetensors")))
    assert kept["p_other.weight"].shape == (4, 8)
    assert kept["p_head.bias"].shape == (4,)


@pytest.mark.parametrize("pattern", ["embed.*", "out.*"])
def test_a_pattern_names_a_tied_tensor_by_any_of_its_names(pattern):
    assert named_by(Layout.of(Tied()), (pattern,)).names == ("embed.weight",)


def test_a_layout_knows_a_tied_tensor_by_each_of_its_names():
    layout = Layout.of(Tied())
    assert set(layout.without(["out.weight"]).names) == BODY
    assert layout.select(["out.weight"]).names == ("embed.weight",)
    assert Tensors.of(Tied(), layout)["out.weight"].shape == (VOCABULARY, 8)
    assert layout.digest == Layout(tuple(replace(s, aliases=()) for s in layout.slots)).digest


def test_two_parameters_over_the_same_memory_are_refused():
    """In torch they are trained as one; here each would have memory of its own."""
    model = Tied(tie=False)
    model.out.weight.data = model.embed.weight.data
    with pytest.raises(ConfigError, match=r"parameters embed\.weight and out\.weight are two over"):
        Layout.of(model)


def test_a_tied_layer_carries_no_adapter():
    for tie, carriers in ((True, ["plain"]), (False, ["language.out", "plain"])):
        net = nn.ModuleDict({"language": Tied(tie), "plain": nn.Linear(2, 2)})
        assert adapters.carriers(net) == carriers


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("left_out", [["embed.weight"], ["out.weight"]])
def test_a_file_may_leave_out_names_of_a_tied_tensor(tmp_path, left_out):
    """As Hugging Face's own files do."""
    state = {k: v.clone() for k, v in Tied().state_dict().items() if k not in left_out}
    save_file(state, tmp_path / "w.safetensors")
    loaded = models.load(Tied(), tmp_path / "w.safetensors")
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in state.items())


def test_a_file_whose_values_differ_under_two_names_of_one_tensor_is_refused(tmp_path):
    save_file(Tied(tie=False).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"other values for .*embed\.weight.* than for .*out\.we"):
        models.load(Tied(), tmp_path / "w.safetensors")
