"""Clients with settings of their own in local training."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

from fednet import config, registry
from fednet.algorithms.fedavg import FedAvg
from fednet.errors import ConfigError
from fednet.training.tasks.classification import Classification
from tests.rooms import hashes, lines, processes, run

OWN = {
    "0": {"lr": 0.01, "epochs": 2},
    "2/3": {"steps": 3, "batch_size": 5},
    "1-2": {"class_weights": [1.0, 2.0, 0.5]},
}


def models(directory: Path) -> list[bytes]:
    return [(directory / f"personal/client-{k}.safetensors").read_bytes() for k in range(3)]


@pytest.mark.parametrize("pack", [1, 4])
def test_a_client_trains_as_if_all_had_its_settings(tmp_path, pack):
    """Without communication a client's model depends on its own settings only."""
    alone = {"algorithm": {"name": "local"}, "evaluate": {"clients": "auto"}}
    own = dict(zip("012", OWN.values()))
    if pack > 1:  # packed clients have one loss
        own["2"] = {"lr": 0.1}
    train = {"pack": pack, "per_client": own}
    mixed = models(run(tmp_path, name="mixed", train=train, **alone))
    for k, settings in enumerate(own.values()):
        train = {"pack": pack, **settings}
        alike = models(run(tmp_path, name=f"alike{k}", train=train, **alone))
        assert mixed[k] == alike[k]
        assert mixed[k - 1] != alike[k - 1]


def test_class_weights_are_those_of_the_loss():
    """Two samples of equal outputs: each costs ln 2. Losses a and b with weights 1 and 3."""
    outputs = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    y = torch.tensor([0, 1])
    a, b = Classification().losses(outputs, y).tolist()
    found = Classification()
    found.class_weights = torch.tensor([1.0, 3.0])
    assert float(found.loss(outputs, y)) == pytest.approx((a + 3 * b) / 4)
    assert found.losses(outputs, y).tolist() == [a, b]


def test_simulated_time_and_the_record_know_each_clients_steps(tmp_path):
    """Of 20 samples: 3 batches of 8 in two epochs are 6 steps; 7 steps are given."""
    own = {"0": {"epochs": 2}, "1": {"steps": 7}}
    link = {"clock": "virtual", "step_ms": 10.0}
    clients = {"clients": "auto"}
    directory = run(tmp_path, rounds=1, train={"per_client": own}, link=link, evaluate=clients)
    steps = {r["client"]: r["steps"] for r in lines(directory / "clients.jsonl") if r["steps"]}
    assert steps == {0: 6, 1: 7, 2: 3}
    (record,) = lines(directory / "rounds.jsonl")
    assert record["seconds_virtual"] == pytest.approx(0.07)
    written = config.load(directory / "config.yaml")
    assert [written.train_of(k).epochs for k in range(3)] == [2, 1, 1]


@pytest.mark.long
def test_own_settings_give_the_same_bits_in_any_placement(tmp_path):
    own = {"train": {"per_client": OWN}}
    assert hashes(run(tmp_path / "one", **own)) == hashes(processes(tmp_path / "two", **own))


@pytest.mark.parametrize(
    ("algorithm", "own", "said"),
    [
        ("qfedavg", {"lr": 0.1}, "lr: qfedavg needs the same for all clients: the server divides"),
        ("fedsgd", {"batch_size": 2}, "batch_size: fedsgd needs the same for all clients"),
        ("fedlc", {"class_weights": [1, 2]}, "class_weights: fedlc has a loss of its own"),
        ("fedrep", {"steps": 4}, "algorithm.head_epochs: fedrep divides train.steps"),
        ("fedavg", {"momentum": 0.9}, "unknown key train.per_client.1/2.momentum"),
    ],
)
def test_what_a_methods_equations_have_alike_for_all_clients_is_refused(algorithm, own, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.from_mapping({"algorithm": algorithm, "train": {"per_client": {"1/2": own}}})


def test_a_run_trains_with_its_class_weights(tmp_path):
    weights = {"train": {"class_weights": [1.0, 2.0, 0.5]}}
    assert hashes(run(tmp_path / "a", **weights)) != hashes(run(tmp_path / "b"))


def test_class_weights_are_as_many_as_classes(tmp_path):
    with pytest.raises(ConfigError, match="one weight for each of the 3 classes, got 2"):
        run(tmp_path, train={"per_client": {"0": {"class_weights": [1, 2]}}})


def test_a_method_may_set_the_rate_and_the_settings_of_its_training(tmp_path, monkeypatch):
    """The same bits as a run whose configuration has them."""

    class Own(FedAvg):
        def client_update(self, phase, client, down, host):
            host.lr = host.lr / 5
            more = {"batch_size": 5, "momentum": 0.5, "epochs": 2}
            host.train_config = msgspec.structs.replace(host.train_config, **more)
            done = host.train(down.x)
            return client, self.Up(x=done.x, run=done.run)

    monkeypatch.setitem(registry.algorithm._parts, "own", Own)
    set_by_method = run(tmp_path, name="method", algorithm={"name": "own"})
    train = {"lr": 0.05 / 5, "batch_size": 5, "momentum": 0.5, "epochs": 2}
    assert hashes(set_by_method) == hashes(run(tmp_path, name="configured", train=train))
    assert hashes(set_by_method) != hashes(run(tmp_path, name="plain"))
