"""Frozen tensors of any type: they keep it, and what is trained and sent beside them is float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fednet
from fednet import models
from fednet.errors import ConfigError, Stopped
from fednet.models import adapters
from fednet.models.sequences import Decoder
from fednet.tools import check
from tests.conftest import forgotten
from tests.rooms import hashes, lines, run, small, summary

TOKENS = 11
LENGTH = 6
WIDTH = 8
RANK = 2
# A and B of the query of the one block, and of the head.
PART = 4 * RANK * (WIDTH + WIDTH + WIDTH + TOKENS)
LORA = {"rank": RANK, "target": ["blocks.0.query", "head"]}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Whole(nn.Module):
    """A Linear of 8-bit weights with a scale each row, as language models are loaded."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        w = torch.randn(m, n)
        scale = w.abs().amax(1) / 127
        whole = (w / scale[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale.half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.scale.float()[:, None]).T


class Small(nn.Module):
    def __init__(self, n: int, classes: int) -> None:
        super().__init__()
        self.body = Whole(n, 8)
        self.norm = nn.LayerNorm(8).bfloat16().requires_grad_(False)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x).bfloat16()).float())


@pytest.fixture(autouse=True)
def parts():
    with forgotten():

        @fednet.model("half")
        def half(input_shape: tuple, classes: int, *, kind: str = "bfloat16"):
            made = Decoder(classes, input_shape[0], WIDTH, 2, 1)
            return made.to(getattr(torch, kind))

        @fednet.model("eighths")
        def eighths(input_shape: tuple, classes: int):
            return Small(input_shape[0], classes)

        @fednet.dataset("rows")
        def rows(*, samples: int = 48, shape: list = (), classes: int = 0):
            x = (torch.arange(samples)[:, None] + torch.arange(LENGTH + 1)) % TOKENS
            sides = [(part[:, :-1], part[:, 1:]) for part in (x[:-12], x[-12:])]
            return fednet.Data(train=sides[0], test=sides[1], classes=TOKENS)

        yield


def halves(dtype: torch.dtype, **more) -> dict:
    kind = str(dtype).removeprefix("torch.")
    return {
        "model": {"name": "half", "kind": kind, "adapters": LORA, **more},
        "data": {"dataset": "rows", "partition": {"scheme": "iid"}},
        "train": {"lr": 0.5},
        "clients": 3,
        "rounds": 4,
    }


def kept(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@HALVES
@pytest.mark.parametrize("base", ["sites", "server"])
def test_adapters_of_a_half_precision_model_are_trained_and_sent_in_float32(tmp_path, dtype, base):
    directory = run(tmp_path, **halves(dtype, base=base))
    useful = summary(directory)["useful"]
    assert useful["up"]["state"] == useful["down"]["state"] == 3 * 4 * PART
    assert summary(directory)["predicted"] == useful
    records = lines(directory / "rounds.jsonl")
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    initial = models.build({"name": "half", "kind": str(dtype)[6:]}, (LENGTH,), TOKENS, 0)
    adapted = {"blocks.0.query.weight", "head.weight"}
    for name, value in initial.state_dict().items():
        found = kept(directory)[name]
        assert found.dtype == dtype
        assert torch.equal(found, value) != (name in adapted), name
    for value in load_file(directory / "adapters" / "adapter_model.safetensors").values():
        assert value.dtype == torch.float32


def test_packed_clients_share_a_frozen_base_of_half_precision(tmp_path):
    changes = halves(torch.bfloat16)
    directory = run(tmp_path, **{**changes, "train": {"lr": 0.5, "pack": 3}})
    records = lines(directory / "rounds.jsonl")
    assert records[-1]["train_loss"] < records[0]["train_loss"]


@HALVES
def test_it_goes_on_with_the_same_bits(tmp_path, dtype):
    def stop(record):
        if record.round == 2:
            raise Stopped("enough")

    whole = run(tmp_path / "whole", **halves(dtype))
    with pytest.raises(Stopped):
        run(tmp_path / "cut", callback=stop, **halves(dtype))
    assert hashes(run(tmp_path / "cut", resume=True, **halves(dtype))) == hashes(whole)


@HALVES
def test_an_adapted_layer_of_half_precision_by_hand(dtype):
    """h = W x + (4 / 2) B A x, where x = 3, W = 2, A = (1, 1) and B = (0.5, 0.25): 6 + 2 * 2.25."""
    layer = nn.Sequential(nn.Linear(1, 1, bias=False).to(dtype))
    settings = small(model={"name": "mlp", "adapters": {"rank": 2, "alpha": 4.0}}).model.adapters
    part = adapters.adapt(layer, settings, 0)[0]
    assert part.lora_A.dtype == part.lora_B.dtype == torch.float32
    with torch.no_grad():
        part.weight.fill_(2.0)
        part.lora_A.fill_(1.0)
        part.lora_B.copy_(torch.tensor([[0.5, 0.25]]))
    found = layer(torch.tensor([[3.0]], dtype=dtype))
    assert found.dtype == dtype
    assert found.item() == 10.5
    found.sum().backward()
    assert part.lora_B.grad.dtype == torch.float32


def test_a_head_is_trained_over_frozen_whole_numbers(tmp_path):
    """int8 weights, fp16 scales and a bf16 norm that the builder froze, and a float32 head."""
    directory = run(tmp_path, model="eighths", data={"samples": 60}, rounds=3)
    initial = models.build({"name": "eighths"}, (12,), 3, 0).state_dict()
    for name, value in initial.items():
        found = kept(directory)[name]
        assert found.dtype == value.dtype
        assert torch.equal(found, value) != name.startswith("head.")
    head = 4 * (8 * 3 + 3)
    useful = summary(directory)["useful"]
    assert useful["down"] == {"state": 3 * 3 * head}
    assert summary(directory)["predicted"] == useful


def test_partial_training_freezes_tensors_of_half_precision_that_no_pattern_names(tmp_path):
    changes = halves(torch.bfloat16, adapters=None)
    with pytest.raises(ConfigError, match=r"'head.weight' .*bfloat16.*float32"):
        run(tmp_path, **{**changes, "train": {"only": ["head.*"]}})

    @fednet.model("mixed")
    def mixed(input_shape: tuple, classes: int):
        made = Decoder(classes, input_shape[0], WIDTH, 2, 1).bfloat16()
        made.norm.float()
        return made

    model = {"name": "mixed"}
    changes |= {"model": model, "train": {"only": ["norm.*"], "lr": 0.1}}
    directory = run(tmp_path, **changes)
    initial = models.build(model, (LENGTH,), TOKENS, 0).state_dict()
    for name, value in initial.items():
        assert torch.equal(kept(directory)[name], value) != name.startswith("norm."), name


def test_a_model_of_half_precision_that_is_trained_whole_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"bfloat16.*float32.*model\.adapters"):
        run(tmp_path, **halves(torch.bfloat16, adapters=None))


def test_losses_of_a_half_precision_model_are_computed_in_float32():
    module = models.build({"name": "half"}, (LENGTH,), TOKENS, 0)
    assert module(torch.zeros(2, LENGTH, dtype=torch.int64)).dtype == torch.float32


def test_a_file_of_half_precision_fills_a_model_of_it(tmp_path):
    first = models.build({"name": "half"}, (LENGTH,), TOKENS, 7).state_dict()
    save_file({name: t.clone() for name, t in first.items()}, tmp_path / "start.safetensors")
    directory = run(tmp_path, **halves(torch.bfloat16, weights=str(tmp_path / "start.safetensors")))
    assert torch.equal(kept(directory)["embedding.weight"], first["embedding.weight"])


def test_check_says_that_a_model_of_half_precision_is_trained_in_part_only(tmp_path):
    file = tmp_path / "halves.py"
    file.write_text(
        "import fednet, torch\n\n"
        "@fednet.model('bfs')\n"
        "class Bfs(torch.nn.Module):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(input_shape[0], classes).bfloat16()\n\n"
        "    def forward(self, x):\n"
        "        return self.head(x.flatten(1).bfloat16())\n"
    )
    assert any("model.adapters or train.only" in line for line in check.check(file))
