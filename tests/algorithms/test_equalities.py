"""The equality table between methods: which settings of one method are another one, and how
exactly.
"""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.harness import Federation, close, images, same

LENET = {"name": "lenet5"}


def fed(**changes):
    return Federation(**{"train": {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-4}, **changes})


def all_same(one, two):
    return all(same(a.x, b.x) for a, b in zip(one.servers, two.servers))


def all_close(one, two, tolerance=1e-6):
    return all(close(a.x, b.x, tolerance) for a, b in zip(one.servers, two.servers))


@pytest.mark.parametrize("name", ["fedprox", "moon"])
def test_mu_zero_is_fedavg_to_the_bit(name):
    f = fed(model={"name": "pdc_cnn"}, data=images(120, shape=(1, 20, 20)))
    assert all_same(f.run(name, mu=0.0), f.run("fedavg"))


def test_fedprox_with_mu_differs_from_fedavg():
    f = fed()
    assert not close(f.run("fedprox", mu=1.0).x, f.run("fedavg").x, 1e-3)


PLAIN = {"epochs": 2}  # without momentum, which FedCM refuses


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("fedcm", {"alpha": 1.0}, 1e-6),
        ("fedga", {"beta": 0.0}, 1e-6),
        ("fedga", {"beta": 0.0, "mode": "stale"}, 1e-6),
        ("fedvarp", {}, 1e-6),
        ("feddpc", {"projection": False, "scaling": False}, 1e-5),
        ("fedexp", {"eps": 1e9}, 1e-6),
    ],
)
def test_is_uniform_fedavg_under_full_participation(name, options, tolerance):
    f = Federation(train=PLAIN)
    assert all_close(f.run(name, **options), f.run("fedavg", weighting="uniform"), tolerance)


@pytest.mark.parametrize("name", ["fedvarp", "scaffold"])
@pytest.mark.parametrize("options", [{}])
def test_first_round_is_uniform_fedavg(name, options):
    f = fed()
    f.rounds, cohorts = 1, [[0, 2]]
    assert close(
        f.run(name, cohorts=cohorts, **options).x,
        f.run("fedavg", cohorts=cohorts, weighting="uniform").x,
    )


def test_fedexp_on_identical_data_with_full_batches_is_uniform_fedavg():
    x, y = images(40)
    f = Federation(data=(x, y), parts=[range(40)] * 4, train={"batch_size": 40, "epochs": 3})
    assert all_close(f.run("fedexp"), f.run("fedavg", weighting="uniform"))


def test_fedsgd_is_fedavg_with_one_full_batch():
    f = Federation(train={"batch_size": 200})
    assert all_close(f.run("fedsgd"), f.run("fedavg"))


def test_one_client_alone_is_fedavg_to_the_bit():
    f = fed(clients=1)
    alone, averaged = f.run("local"), f.run("fedavg")
    assert same(alone.clients[0].x, averaged.x)


def test_lenet_trains_alike_through_both_forms():
    f = fed(model=LENET, data=images(100, shape=(1, 28, 28)), rounds=2)
    assert all_close(f.run("fedvarp"), f.run("fedavg", weighting="uniform"))


def test_random_images_differ_by_seed():
    assert not torch.equal(images(10, seed=1)[0], images(10, seed=2)[0])
