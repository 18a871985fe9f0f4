"""On a CUDA device: every method and model computes there what it does on a processor, to float32's
rounding, and twice the same bits; clients that share a card have the bits of one after another,
packed ones in any company; and a task that finds the card full is done once there is room.

Run by name, where there is such a device, one at a time: `python -m pytest -m gpu`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fednet
from fednet import registry
from fednet.config import from_mapping
from fednet.experiment.build import build
from fednet.tensors import Layout, Sum, Tensors
from tests.data.test_texts import archive
from tests.processes import ROOT, lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

CARD = "cuda:0"
PICTURES: dict[str, Any] = {
    "name": "run",
    "rounds": 2,
    "clients": 4,
    "participation": None,
    "clients_per_round": 3,
    "model": {"name": "lenet5"},
    "data": {
        "dataset": "synthetic",
        "samples": 480,
        "shape": [3, 32, 32],
        "classes": 4,
        "partition": {"scheme": "dirichlet", "alpha": 1.0},
    },
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.01},
    "report": False,
}
# What a method asks for beside.
OWN: dict[str, dict[str, Any]] = {
    "feddc": {"iterations": 3, "real_batch": 16},
    "feddcplus": {"iterations": 3, "real_batch": 16},
}
# One step a client, of all its samples, where roundings grow from step to step. With roundings of
# 6e-8 at random in each layer, on a processor, training ends so far away: FedDecorr, which divides
# by the deviations of features over a batch, 0.85 in two rounds of batches of 16, 0.001 of 64,
# 5e-6 with one step; ResNet-18 with BatchNorm 0.04 in three steps of 16, 0.001 in one of 53.
ONE_STEP = ("feddecorr", "resnet18_bn_proj")
# Of the way that training went. On a processor, float32 sums in another order (`channels_last`)
# lead as far as 0.02 of it away (resnet18_gn); InstanceNorm over the 2 x 2 pixels that vgg11 ends
# with multiplies roundings to 0.3, so that it stands here without norms.
NEAR = 0.05


def settings(**changes: Any) -> dict[str, Any]:
    merged = dict(PICTURES)
    for key, value in changes.items():
        base = merged.get(key)
        merged[key] = {**base, **value} if isinstance(value, dict) and base else value
    return merged


def of_method(name: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"algorithm": {"name": name, **OWN.get(name, {})}}
    if registry.algorithm.get(name).needs_public:
        changes["data"] = {"public": {"samples": 60}}
    if name in ONE_STEP:
        changes["train"] = {"batch_size": 480}
    return settings(**changes)


def run(config: dict[str, Any], out: Path, device: str) -> Any:
    return fednet.run(config, in_process=True, out=out, device=device)


def bits(made: Any) -> list[tuple[Any, ...]]:
    return [
        (r.model_sha256, r.clients_sha256, r.train_loss, r.test_loss, r.test_accuracy)
        for r in made.rounds
    ]


def bytes_of(made: Any) -> dict[str, Any]:
    return made.summary["bytes"]["useful"]


def way(made: Any, config: dict[str, Any]) -> torch.Tensor:
    """From the initial model to the last, but for what norms remember."""
    module = build(from_mapping(config)).setting.module()
    begin = module.state_dict()
    end = load_file(made.dir / "model.safetensors")
    names = sorted({name for name, _ in module.named_parameters()} & set(end))
    return torch.cat([(end[k].double() - begin[k].double()).reshape(-1) for k in names])


def check(config: dict[str, Any], out: Path) -> None:
    one, again = (run(config, out / side, CARD) for side in ("one", "again"))
    assert bits(one) == bits(again)
    cpu = run(config, out / "cpu", "cpu")
    assert bytes_of(one) == bytes_of(cpu)
    if (cpu.dir / "model.safetensors").exists():
        a = way(one, config)
        b = way(cpu, config)
        assert float(b.norm()) > 0
        assert torch.isfinite(a).all()
        assert float((a - b).norm() / b.norm()) < NEAR
    for x, y in zip(one.rounds, cpu.rounds):
        assert x.train_loss == pytest.approx(y.train_loss, rel=5e-3, abs=1e-4)


@pytest.mark.parametrize("name", registry.algorithm.names())
def test_a_method_computes_there_what_it_does_on_a_processor(name, tmp_path):
    check(of_method(name), tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "convnet3", "width": 32},
        {"name": "vgg11", "width": 8, "norm": "none"},
        {"name": "resnet18_gn"},
        {"name": "resnet18_bn_proj"},
        {"name": "pdc_cnn"},
        {"name": "lenet5", "adapters": {"rank": 2}},
    ],
    ids=lambda m: m["name"] + ("+adapters" if "adapters" in m else ""),
)
def test_a_model_computes_there_what_it_does_on_a_processor(model, tmp_path):
    batch_size = 480 if model["name"] in ONE_STEP else 16
    check(settings(model=model, train={"batch_size": batch_size}, rounds=1), tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "gru", "hidden": 32, "layers": 2},
        {"name": "transformer", "width": 32, "heads": 2, "blocks": 2},
    ],
    ids=lambda m: m["name"],
)
def test_a_network_over_characters_computes_there_what_it_does_on_a_processor(model, tmp_path):
    speech = "When shall we meet again?\nIn thunder, lightning, or in rain?\n" * 8
    roles = "".join(f"{role}.\n{speech[i:]}\n" for i, role in enumerate(("FIRST WITCH", "HAM")))
    archive(tmp_path, a_gut=f"A PLAY\n\nACT I.\n\nScene I. A room.\n\n{roles}")
    data = {"dataset": "shakespeare", "window": 16, "root": str(tmp_path)}
    config = settings(model=model, clients=2, clients_per_round=2)
    check({**config, "data": {**data, "partition": {"scheme": "natural"}}}, tmp_path / "runs")


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"precision": "tf32"}},
        {"train": {"precision": "bf16"}},
        {"train": {"precision": "fp16"}},
        {"train": {"memory_format": "channels_last"}},
        {"train": {"optimizer": "adam", "lr": 0.001}},
        {"train": {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 1.0}},
        {"data": {"augment": "crop_flip"}},
        {"model": {"name": "vgg11", "width": 8, "buffers": "local"}},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for part in c.values() for k, v in part.items()),
)
def test_a_way_to_train_gives_the_same_bits_twice(changes, tmp_path):
    one, again = (run(settings(**changes), tmp_path / side, CARD) for side in ("one", "again"))
    assert bits(one) == bits(again)
    assert all(r.train_loss > 0 for r in one.rounds)


# -- processes -------------------------------------------------------------------------------------
def command(config: dict[str, Any], out: Path, *words: str) -> Path:
    """`fednet run` on the card. Returns the run's directory."""
    out.mkdir(parents=True)
    file = out / "config.yaml"
    file.write_text(json.dumps(config))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNET_")}
    line = [sys.executable, "-m", "fednet", "run", str(file), "--out", str(out), "--device", CARD]
    done = subprocess.run(
        [*line, *words],
        env={**environment, "PYTHONPATH": f"{ROOT}:{environment.get('PYTHONPATH', '')}"},
        cwd=out,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / str(config["name"])


def record(path: Path) -> list[tuple[Any, ...]]:
    keys = ("round", "model_sha256", "clients_sha256", "train_loss", "test_loss", "test_accuracy")
    return [tuple(r.get(k) for k in keys) for r in lines(path / "rounds.jsonl")]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedabc", "feddc"])
def test_clients_that_share_the_card_give_the_bits_of_one_after_another(method, tmp_path):
    config = {**of_method(method), "clients": 6, "clients_per_round": 6, "rounds": 3}
    alone = command(config, tmp_path / "alone", "--in-process")
    for workers in ("1", "3"):
        shared = command(config, tmp_path / workers, "--workers", workers)
        assert record(shared) == record(alone)


def test_packed_clients_give_the_same_bits_in_any_company_and_nearly_those_of_each_alone(tmp_path):
    config = settings(train={"pack": 4}, clients_per_round=4)
    here = command(config, tmp_path / "here", "--in-process")
    for workers in ("1", "2"):
        assert record(command(config, tmp_path / workers, "--workers", workers)) == record(here)
    apart = command(settings(clients_per_round=4), tmp_path / "apart", "--in-process")
    for packed, alone in zip(record(here), record(apart)):
        assert packed[3] == pytest.approx(alone[3], rel=1e-3)


W6: dict[str, Any] = {
    "model": {"name": "pfl_cnn"},
    "train": {"pack": 4, "batch_size": 10, "lr": 0.05},
    "clients_per_round": 4,
    "rounds": 3,
}


def test_a_packed_model_with_dropout_gives_the_same_bits_in_any_company(tmp_path):
    here = run(settings(**W6), tmp_path / "here", CARD)
    shared = command(settings(**W6), tmp_path / "shared", "--workers", "2")
    assert [row[1] for row in record(shared)] == [row[0] for row in bits(here)]


def test_sums_on_the_card_have_the_bits_of_sums_on_a_processor():
    layout = Layout.of(torch.nn.Linear(1000, 300))
    draws = torch.Generator().manual_seed(0)
    values = [torch.randn(layout.sizes[0], generator=draws) for _ in range(7)]
    found = []
    for device in ("cpu", CARD):
        total = Sum.empty()
        for k, value in enumerate(values):
            x = Tensors.zeros(layout).with_vector(value).to(device)
            total = total.add(x, weight=50.0 + k / 3)
        found.append((total.mean().sha256(), total.step(x, 0.7).sha256()))
    assert found[0] == found[1]


def test_packs_of_the_card_are_near_to_those_of_a_processor(tmp_path):
    one = run(settings(**{**W6, "rounds": 1}), tmp_path / "card", CARD)
    cpu = run(settings(**{**W6, "rounds": 1}), tmp_path / "cpu", "cpu")
    a = way(one, settings(**W6))
    b = way(cpu, settings(**W6))
    assert float((a - b).norm() / b.norm()) < NEAR


@pytest.mark.parametrize(
    "train", [{}, {"precision": "tf32"}, {"precision": "bf16", "memory_format": "channels_last"}]
)
def test_graphs_give_the_bits_of_the_steps_that_they_replay(train, tmp_path):
    model = {"name": "convnet3", "width": 32}
    plain = settings(model=model, train=train, rounds=4)
    graphs = settings(model=model, train={**train, "graphs": True}, rounds=4)
    expected = bits(run(plain, tmp_path / "plain", CARD))
    assert bits(run(graphs, tmp_path / "graphs", CARD)) == expected
    shared = command(graphs, tmp_path / "shared", "--workers", "1")
    assert [row[1] for row in record(shared)] == [row[0] for row in expected]


# -- memory ----------------------------------------------------------------------------------------
HOG = """
import sys, time, torch
left, seconds = float(sys.argv[1]), float(sys.argv[2])
torch.zeros(1, device="cuda:0")
free, _ = torch.cuda.mem_get_info(0)
held = torch.empty(max(1, int(free - left)), dtype=torch.uint8, device="cuda:0")
print("full", flush=True)
time.sleep(seconds)
"""


@contextlib.contextmanager
def full(left: int, seconds: float) -> Iterator[None]:
    """The card has `left` bytes free, for so long."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(left), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "full\n"
        try:
            yield
        finally:
            hog.kill()


@pytest.mark.xdist_group("whole card")
def test_a_task_that_finds_the_card_full_is_done_once_there_is_room(tmp_path):
    config = settings(
        model={"name": "convnet3", "width": 128},
        train={"batch_size": 2048},
        data={"samples": 8192},
        clients_per_round=4,
        rounds=1,
        evaluate={"every": 0},
    )
    free = command(config, tmp_path / "free", "--workers", "1")
    with full(2 << 30, 14.0):
        begun = time.monotonic()
        waited = command(config, tmp_path / "waited", "--workers", "1")
        assert time.monotonic() - begun > 5.0
    assert record(waited) == record(free)
    said = [(waited / "events.jsonl"), *(waited / "log").glob("*.log")]
    assert any("memory" in path.read_text() for path in said)
