"""The optimizer's state kept between rounds, and a learning rate that changes within a round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fednet import config
from fednet.client.preparing import explanation
from fednet.errors import ConfigError
from fednet.experiment.build import build
from tests.rooms import hashes, lines, processes, run, small

PROX = {"name": "fedprox", "mu": 1e-9}  # steps with a correction that is too small to see


def model(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def alike(a: Path, b: Path) -> bool:
    found = model(a)
    wanted = model(b)
    return all(torch.allclose(found[k], wanted[k], atol=1e-5) for k in wanted)


def alone(out: Path, rounds: int, algorithm: object = "fedavg", more=None, **train) -> Path:
    """One client and batches of all its samples: rounds are nothing but steps."""
    shape = {"clients": 1, "rounds": rounds, "algorithm": algorithm, **(more or {})}
    return run(out, **shape, train={"batch_size": 60, "lr": 0.02, **train})


# Kernels lie with their channels innermost, and so does their momentum, but for what is kept.
IMAGES = {"model": {"name": "lenet5"}, "data": {"shape": [3, 16, 16]}}
LAST = {"momentum": 0.9, "memory_format": "channels_last"}


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "more"),
    [
        ("fedavg", {"momentum": 0.9}, {}),
        (PROX, {"momentum": 0.9}, {}),
        (PROX, {"optimizer": "adamw"}, {}),
        ("fedavg", LAST, IMAGES),
        (PROX, LAST, IMAGES),
    ],
)
def test_two_rounds_with_a_kept_optimizer_are_one_round_of_as_many_steps(
    tmp_path, algorithm, optimizer, more
):
    whole = alone(tmp_path / "whole", 1, algorithm, more, steps=6, **optimizer)
    kept = alone(tmp_path / "kept", 2, algorithm, more, steps=3, keep_optimizer=True, **optimizer)
    empty = alone(tmp_path / "empty", 2, algorithm, more, steps=3, **optimizer)
    assert alike(kept, whole)
    assert not alike(empty, whole)


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [("fedavg", {}), (PROX, {"momentum": 0.9}), ("fedavg", {"optimizer": "adam"})],
)
def test_a_schedule_over_local_steps_has_the_rates_of_one_over_rounds(
    tmp_path, algorithm, optimizer
):
    """Rates 0.02, 0.02, 0.002 and 0.002, in one round and in two."""
    kept = {"keep_optimizer": bool(optimizer), **optimizer}
    within = alone(tmp_path / "a", 1, algorithm, steps=4, local_schedule="step(2, 0.1)", **kept)
    between = alone(tmp_path / "b", 2, algorithm, steps=2, schedule="step(1, 0.1)", **kept)
    constant = alone(tmp_path / "c", 1, algorithm, steps=4, **kept)
    assert alike(within, between)
    assert not alike(within, constant)


ADAM = {
    "algorithm": {"name": "apfl"},  # has tensors beside the model
    "train": {"optimizer": "adam", "keep_optimizer": True, "local_schedule": "cosine"},
}


@pytest.mark.long
def test_a_kept_optimizer_gives_the_same_bits_in_any_placement(tmp_path):
    one = run(tmp_path / "one", **ADAM)
    assert hashes(one) == hashes(processes(tmp_path / "two", **ADAM))


def test_a_kept_optimizer_goes_on_where_a_run_is_resumed(tmp_path):
    one = run(tmp_path / "one", **ADAM)
    run(tmp_path / "two", rounds=1, **ADAM)
    assert hashes(run(tmp_path / "two", resume=True, **ADAM)) == hashes(one)


def test_a_kept_optimizer_is_not_sent_and_a_site_is_told_of_it(tmp_path):
    train = {"momentum": 0.9}
    sent = []
    for keep in (False, True):
        train["keep_optimizer"] = keep
        rows = lines(run(tmp_path / str(keep), train=train) / "wire.jsonl")
        kinds = ((row["direction"], *kind) for row in rows for kind in row["kinds"].items())
        sent.append([kind for kind in kinds if kind[1] != "header"])
        said = explanation(build(small(train=train)), [1])
        what = "the optimizer's state" if keep else "nothing"
        assert f"kept at this site between rounds: {what}" in said
    assert sent[0] == sent[1] != []


@pytest.mark.parametrize(
    ("algorithm", "train", "said"),
    [
        ("scaffold", {"momentum": 0.9, "keep_optimizer": True}, "scaffold does not allow it: c_i"),
        ("fednova", {"local_schedule": "cosine"}, "fednova does not allow it: ||a_i||_1"),
        ("fedavg", {"keep_optimizer": True}, "sgd without momentum has no state to keep"),
        ("fedavg", {"local_schedule": "step(2, 10)"}, "a factor of at most 1"),
        ("fedavg", {"local_schedule": "cosine", "pack": 2}, "leave train.pack out"),
    ],
)
def test_what_a_methods_equations_do_not_allow_is_refused(algorithm, train, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.from_mapping({"algorithm": algorithm, "train": train})
