"""Adapters of low rank: by hand, merged, under peft's names, and what of them crosses in a run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fednet import models, registry
from fednet.errors import ConfigError
from fednet.experiment.build import build
from fednet.models import adapters
from fednet.report import open_run
from tests.contract.test_ledger import IMAGES, method
from tests.rooms import lines, run, small, summary

NAMES = registry.algorithm.names()
MLP = {"name": "mlp", "hidden": [8, 8]}
LORA = {"rank": 2, "alpha": 4.0, "target": ["body.*"]}
# A and B of 64 to 8 and of 8 to 8.
PART = 4 * (2 * (64 + 8) + 2 * (8 + 8))


def section(**changes):
    model = {**MLP, "adapters": {**LORA, **changes}}
    return small(model=model).model.adapters


class Net(nn.Module):
    """A convolution, a grouped one, attention, and a Linear layer that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2)
        self.apart = nn.Conv2d(4, 4, 1, groups=2)
        self.mix = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.apart(self.conv(x)).mean((2, 3)))


TARGET = ("conv", "head")


def net(seed: int = 0, **changes) -> Net:
    torch.manual_seed(3)
    return adapters.adapt(Net(), section(target=TARGET, **changes), seed)


def moved(module: nn.Module) -> nn.Module:
    """B as after some training."""
    with torch.no_grad():
        for _, part in adapters.lora_layers(module):
            part.lora_B.copy_(torch.randn(part.lora_B.shape))
    return module


# -- one layer -------------------------------------------------------------------------------------
def test_an_adapted_layer_by_hand():
    """W = [[1, 2], [3, 4]], A = [[1, 1]], B = [[2], [0]], alpha / r = 3: B A = [[2, 2], [0, 0]], so
    that the weight is [[7, 8], [3, 4]] and gives (1, 1) to (15, 7).
    """
    layer = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(torch.tensor([[1.0, 2], [3, 4]]))
    adapters.adapt(layer, section(rank=1, alpha=3.0, target=("0",)), 0)
    with torch.no_grad():
        layer[0].lora_A.copy_(torch.tensor([[1.0, 1]]))
        layer[0].lora_B.copy_(torch.tensor([[2.0], [0]]))
    assert layer(torch.tensor([1.0, 1])).tolist() == [15, 7]
    assert adapters.merged_state_dict(layer)["0.weight"].tolist() == [[7, 8], [3, 4]]
    assert list(adapters.merged_state_dict(layer)) == ["0.weight"]


def test_an_adapted_model_begins_as_the_model_and_keeps_its_names():
    torch.manual_seed(3)
    plain = Net()
    x = torch.randn(2, 3, 9, 9)
    lora = net()
    assert torch.equal(lora(x), plain(x))
    added = set(lora.state_dict()) - set(plain.state_dict())
    assert added == {f"{n}.{leaf}" for n in TARGET for leaf in ("lora_A", "lora_B")}
    assert models.head_names(lora)[:2] == ("head.weight", "head.bias")
    assert tuple(lora.conv.lora_A.shape) == (2, 3, 3, 3)
    assert tuple(lora.conv.lora_B.shape) == (4, 2)


def test_merged_weights_give_what_the_adapters_give():
    x = torch.randn(5, 3, 9, 9)
    lora = moved(net())
    plain = Net()
    plain.load_state_dict(adapters.merged_state_dict(lora), strict=True)
    assert torch.allclose(plain(x), lora(x), atol=1e-5)
    assert not torch.allclose(plain(x), net()(x), atol=1e-2)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("haed", r"'haed' names no layer .* Such are conv, head. Did you mean 'head'\?"),
        ("apart", "'apart' names no layer"),
        ("mix.*", r"'mix\.\*' names no layer"),
    ],
)
def test_a_target_that_can_carry_none_is_refused(target, says):
    with pytest.raises(ConfigError, match=says):
        adapters.adapt(Net(), section(target=("head", target)), 0)


# -- peft ------------------------------------------------------------------------------------------
def written(folder, tensors, **changes):
    folder.mkdir(exist_ok=True)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["conv", "head"]}
    (folder / "adapter_config.json").write_text(json.dumps({**about, **changes}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def by_hand() -> dict[str, torch.Tensor]:
    """As peft's documentation of its checkpoints has it."""
    return {
        "base_model.model.conv.lora_A.weight": torch.randn(2, 3, 3, 3),
        "base_model.model.conv.lora_B.weight": torch.randn(4, 2, 1, 1),
        "base_model.model.head.lora_A.weight": torch.randn(2, 4),
        "base_model.model.head.lora_B.weight": torch.randn(2, 2),
    }


def test_a_folder_of_pefts_form_is_read_and_written(tmp_path):
    given = by_hand()
    lora = net()
    adapters.read_peft(lora, written(tmp_path / "a", given))
    assert torch.equal(lora.head.lora_B, given["base_model.model.head.lora_B.weight"])
    assert torch.equal(lora.conv.lora_B, given["base_model.model.conv.lora_B.weight"][:, :, 0, 0])
    back = adapters.to_peft(lora)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[n], given[n]) for n in given)
    about = adapters.peft_config(lora, 2, 4.0)
    assert (about["peft_type"], about["r"], about["lora_alpha"]) == ("LORA", 2, 4.0)
    assert about["target_modules"] == ["conv", "head"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, c: t.pop("base_model.model.head.lora_A.weight"), "it lacks 'base_model.model.h"),
        (lambda t, c: t.update({"base_model.model.apart.lora_A.weight": torch.ones(2)}), "holds"),
        (lambda t, c: t.update({"base_model.model.head.lora_A.weight": torch.ones(3, 4)}), "shape"),
        (lambda t, c: c.update(use_rslora=True), "has alpha / rank 2.828"),
        (lambda t, c: c.update(r="many"), "is no folder with adapter_config.json and"),
        (lambda t, c: t["base_model.model.head.lora_A.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, change, says):
    tensors = by_hand()
    config = {}
    change(tensors, config)
    with pytest.raises(ConfigError, match=says):
        adapters.read_peft(net(), written(tmp_path / "a", tensors, **config))


def test_peft_reads_what_a_run_writes(tmp_path):
    peft = pytest.importorskip("peft")
    directory = run(tmp_path, model={**MLP, "adapters": LORA}, train={"only": ["head.*"]})
    plain = models.build(MLP, (12,), 3, 0)
    x = torch.randn(4, 12)
    before = plain(x)
    found = peft.PeftModel.from_pretrained(plain, str(directory / "adapters")).eval()
    ours = open_run(directory).model()(x)
    assert torch.allclose(found(x), ours, atol=1e-5)
    assert not torch.allclose(before, ours, atol=1e-3)
    saved = peft.get_peft_model_state_dict(found)
    mine = load_file(directory / "adapters" / "adapter_model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in mine.items()}


# -- runs ------------------------------------------------------------------------------------------
# One that sends weights, one that sends variates, one with a head of its own, one that is
# asynchronous; the others in the long suite.
QUICK = ("fedavg", "scaffold", "fedper", "fedbuff")


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.long)
        for n in sorted(set(NAMES) - {"feddc", "feddcplus", "fedrod"})
    ],
)
def test_each_method_sends_the_adapters_and_leaves_a_plain_model(tmp_path, name):
    """The head stays with the method, so that those that keep one at the clients have it."""
    directory = run(
        tmp_path,
        algorithm=method(name),
        data=IMAGES,
        model={**MLP, "adapters": LORA},
        train={"only": ["head.*"]},
        evaluate={"clients": "auto"},
    )
    assert summary(directory)["predicted"] == summary(directory)["useful"]
    most = PART + 4 * (8 * 3 + 3)
    for row in lines(directory / "wire.jsonl"):
        if row["useful"] and row["purpose"] == "train":
            kinds = {k: n for k, n in row["kinds"].items() if k in ("state", "delta", "control")}
            assert all(n <= 2 * most for n in kinds.values()), kinds
    files = [*directory.glob("model.safetensors"), *directory.glob("personal/*.safetensors")]
    assert files
    plain = models.build(MLP, (1, 8, 8), 3, 0)
    initial = plain.state_dict()
    for file in files:
        held = {n: t for n, t in load_file(file).items() if n in initial}  # others stand beside it
        plain.load_state_dict(held, strict=True)
        assert torch.equal(held["body.fc1.bias"], initial["body.fc1.bias"])


def test_what_crosses_is_the_adapters_to_the_byte_and_the_model_is_theirs(tmp_path):
    directory = run(tmp_path, data=IMAGES, model={**MLP, "adapters": LORA}, rounds=3)
    useful = summary(directory)["useful"]
    assert useful["down"] == {"state": 3 * 3 * PART}
    assert useful["up"] == {"state": 3 * 3 * PART, "statistics": 3 * 3 * 24}
    # The run's model is the base with what its adapters' folder holds.
    again = models.build(MLP, (1, 8, 8), 3, 0)
    adapters.adapt(again, section(), 5)
    adapters.read_peft(again, directory / "adapters")
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(open_run(directory).model()(x), again(x), atol=1e-5)


def test_a_run_goes_on_from_the_adapters_of_another(tmp_path):
    first = run(tmp_path / "a", model={**MLP, "adapters": LORA})
    changes = {**LORA, "weights": str(first / "adapters")}
    nothing = {"lr": 1e-30}
    again = run(tmp_path / "b", model={**MLP, "adapters": changes}, rounds=1, train=nothing)
    theirs, ours = (load_file(d / "adapters" / "adapter_model.safetensors") for d in (first, again))
    assert all(torch.allclose(theirs[n], ours[n], atol=1e-6) for n in theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"clip": 0.5, "noise": 1.0}},
        {"train": {"pack": 2}},
        pytest.param(
            {"algorithm": "diloco", "train": {"optimizer": "adamw"}}, marks=pytest.mark.long
        ),
    ],
    ids=["noise", "pack", "diloco"],
)
def test_what_is_done_to_models_is_done_to_adapters(tmp_path, changes):
    """Secure sums, compression and updates without rounds: test_base."""
    directory = run(tmp_path, model={**MLP, "adapters": LORA}, **changes)
    records = lines(directory / "rounds.jsonl")
    assert all(r["predicted"] == r["useful"] for r in records)
    assert set(records[-1]["tensor_sha256"]) == {
        f"body.fc{k}.lora_{leaf}" for k in (1, 2) for leaf in "AB"
    }
    assert records[0]["model_sha256"] != records[-1]["model_sha256"]
    held = load_file(directory / "model.safetensors")
    models.build(MLP, (12,), 3, 0).load_state_dict(held, strict=True)


# -- a transformer ---------------------------------------------------------------------------------
def test_the_transformers_attention_by_hand():
    """One block of one head, its feed-forward part silenced: softmax(q k / sqrt(d)) v over the
    earlier tokens, in float64.
    """
    net = models.build({"name": "transformer", "width": 4, "heads": 1, "blocks": 1}, (3,), 5, 0)
    block = net.blocks[0].double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    q = block.query(x)[0]
    k = block.key(x)[0]
    v = block.value(x)[0]
    rows = [torch.softmax(q[i] @ k[: i + 1].T / 2, 0) @ v[: i + 1] for i in range(3)]
    assert torch.allclose(block.attend(x)[0], block.out(torch.stack(rows)))


# -- layers whose written form would be another model ----------------------------------------------
class Spectral(nn.Module):
    """torch's older spectral_norm: `weight` is computed at each call."""

    def __init__(self, *, classes):
        super().__init__()
        self.body = nn.utils.spectral_norm(nn.Linear(12, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Reads(nn.Module):
    """Computes with a layer's weight beside calling the layer."""

    def __init__(self, *, classes):
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.body(x) + x @ self.body.weight)


class Twice(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self, *, classes):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = self.first
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.second(torch.relu(self.first(x))))


@pytest.fixture
def odd_models(monkeypatch):
    for kind in (Spectral, Reads, Twice):
        monkeypatch.setitem(registry.model._parts, kind.__name__.lower(), kind)


def odd(name, target, **more):
    model = {"name": name, "adapters": {"rank": 4, "alpha": 8.0, "target": [target]}}
    return {"model": model, "train": {"lr": 0.5}, **more}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("spectral", "'body' names no layer"),
        ("reads", "with the adapters merged into its weights, .* gives other outputs"),
    ],
)
def test_adapters_that_could_not_be_written_are_refused(odd_models, name, says):
    """They were trained, and the written model was another one."""
    with pytest.raises(ConfigError, match=says):
        build(small(**odd(name, "body")))


def test_a_layer_with_two_names_is_written_as_it_was_trained(odd_models, tmp_path):
    """Its adapter was left in the state dict under the second one."""
    directory = run(tmp_path, **odd("twice", "first"))
    written = load_file(directory / "model.safetensors")
    assert written.keys() == Twice(classes=3).state_dict().keys()
    assert torch.equal(written["first.weight"], written["second.weight"])
    scores = open_run(directory).model().eval()
    data = build(small(**odd("twice", "first"))).data
    right = (scores(data.test[0]).argmax(1) == data.test[1]).float().mean()
    assert float(right) == pytest.approx(lines(directory / "rounds.jsonl")[-1]["test_accuracy"])
