"""Models that take their inputs by name or return more than one tensor, and samples with targets
that have no label: whole runs, and the examples of docs/howto/own-part.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fednet
from fednet.cli.main import main
from fednet.models.calls import add_call_hooks, outputs
from fednet.training.tasks.classification import Classification
from tests.processes import Federation, crashes
from tests.rooms import lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "own-part.md"

# The same model and data, called and answered in several ways. Sentences differ in length.
OWN = """
import fednet
import torch
from torch import nn
from torch.nn import functional as F
from fednet.training.tasks.classification import Classification


def pad(samples):
    width = max(len(words) for words, _ in samples)
    words = torch.tensor([w + [0] * (width - len(w)) for w, _ in samples])
    lengths = torch.tensor([len(w) for w, _ in samples])
    y = torch.tensor([label for _, label in samples])
    return {"words": words, "lengths": lengths, "given": y}, y


@fednet.dataset("calls")
def calls(root):
    samples = [([1 + (i + k) % 7 for k in range(2 + i % 4)], i % 3) for i in range(96)]
    return fednet.Data(train=samples[:72], test=samples[72:], classes=3, collate=pad)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, classes)

    def logits(self, words, lengths):
        inside = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
        return self.head((self.embed(words) * inside[..., None]).sum(1) / lengths[:, None])


@fednet.model("plain")
class Plain(Net):
    def forward(self, x):
        return self.logits(x["words"], x["lengths"])


@fednet.model("named")
class Named(Net):
    def forward(self, words, lengths, given=None):
        return self.logits(words, lengths)


@fednet.model("answer")
class Answer(Net):
    def forward(self, words, lengths, given=None):
        logits = self.logits(words, lengths)
        return {"hidden": words, "loss": F.cross_entropy(logits, given), "logits": logits}


@fednet.task("modelloss")
class ModelLoss(Classification):
    def loss(self, outputs, y):
        return outputs.loss
"""


def example(name: str) -> str:
    """A file that the page writes."""
    found = re.search(rf"^cat > {name} <<'END'\n(.*?)^END$", PAGE.read_text(), re.S | re.M)
    assert found is not None
    return found[1]


def settings(model: str, dataset: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "r",
        "rounds": 3,
        "clients": 4,
        "report": False,
        "model": {"name": model},
        "data": {"dataset": dataset, "partition": {"scheme": "iid"}},
        "train": {"lr": 0.01, "optimizer": "adam", "batch_size": 8},
        **more,
    }


def rounds(out: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    return lines(fednet.run(changes, in_process=True, out=out).dir / "rounds.jsonl")


def hashes(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(r["model_sha256"], r["train_loss"], r["test_loss"]) for r in found]


def load(text: str) -> None:
    """Register the parts of a file's text, for one test."""
    exec(text, {"__name__": "own"})


def test_however_a_model_is_called_and_answers_the_bits_are_those_of_the_plain_one(tmp_path):
    load(OWN)
    plain = hashes(rounds(tmp_path / "plain", settings("plain", "calls")))
    assert len({sha for sha, _, _ in plain}) == 3
    for name, task in (
        ("named", "classification"),
        ("answer", "classification"),
        ("answer", "modelloss"),
    ):
        assert hashes(rounds(tmp_path / name / task, settings(name, "calls", task=task))) == plain


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (torch.ones(2, 3), 1.0),
        ((torch.ones(2, 3), torch.zeros(2, 3)), 1.0),
        ((torch.zeros(()), torch.ones(2, 3)), 1.0),
        ({"aux": torch.zeros(2), "logits": torch.ones(2, 3)}, 1.0),
        ({"loss": torch.zeros(()), "out": torch.ones(2, 3), "aux": torch.zeros(2, 3)}, 1.0),
    ],
)
def test_the_tensor_that_a_run_computes_with(returned, expected):
    found = outputs(returned)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 3)
    assert float(found.mean()) == expected


def test_a_model_that_cannot_be_called_by_name_is_said_to_get_one_dict(tmp_path, capsys):
    file = tmp_path / "misnamed.py"
    file.write_text(OWN.replace('"lengths": lengths', '"sizes": lengths'))
    mapping = {"name": "x", **settings("named", "calls"), "load": [str(file)]}
    config = tmp_path / "x.yaml"
    config.write_text(json.dumps(mapping))
    assert main(["run", "--check", str(config), "--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Its forward has no parameter sizes, so it gets one dict of all inputs" in said


@pytest.mark.parametrize("server", ["alone", pytest.param("killed", marks=pytest.mark.long)])
def test_void_pixels_are_in_no_count_and_a_killed_server_goes_on_with_the_same_bits(
    tmp_path, server
):
    load(example("squares.py"))
    alone = rounds(tmp_path / "alone", settings("unet", "squares"))
    assert [sum(r["total_by_class"]) for r in alone] == [40 * 16 * 15] * 3
    assert alone[-1]["total_by_class"][1] > 40 * 15  # squares of 25 pixels, some partly void
    assert alone[-1]["test_accuracy"] > 0.9
    if server == "alone":
        return
    (tmp_path / "own.py").write_text(example("squares.py"))
    with Federation(tmp_path, faults=crashes((2, "evaluating"))) as fed:
        fed.mapping = settings("unet", "squares", name="run", faults=fed.mapping["faults"])
        fed.supervisor(2, "--load", tmp_path / "own.py")
        assert fed.status() == 0, fed.output()
        assert hashes(fed.rounds()) == hashes(alone)


@pytest.mark.parametrize(("model", "dataset"), [("bert", "texts"), ("gpt2", "nextword")])
def test_models_of_transformers_train_unwrapped(tmp_path, model, dataset):
    pytest.importorskip("transformers")
    load(example("words.py"))
    found = rounds(tmp_path, settings(model, dataset))
    assert found[-1]["train_loss"] < 0.9 * found[0]["train_loss"]


def test_the_loss_of_gpt2_is_the_one_that_it_computes_itself():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = add_call_hooks(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)))
    ids = torch.arange(12).view(2, 6) % 11
    labels = ids.masked_fill(ids == 8, -100)
    moved = torch.cat([labels[:, 1:], labels.new_full((2, 1), -100)], 1)
    own = model.eval()(input_ids=ids, labels=labels)  # called as in PyTorch, it answers so
    mine = Classification().loss(model({"input_ids": ids}), moved)
    assert mine.item() == pytest.approx(own.loss.item(), rel=1e-6)
