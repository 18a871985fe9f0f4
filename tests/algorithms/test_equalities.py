"""The equality table between methods: which settings of one method are another one, and how
exactly. On an MLP over 200 random images, four clients, three rounds; with momentum and weight
decay where the method allows them, under partial participation too.
"""

from __future__ import annotations

import pytest

from tests.algorithms.harness import Federation, close, images, same
from tests.algorithms.reference import whole_batches

TRAIN = {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-4}
PARTIAL = [[0, 2], [1, 2, 3], [0, 3]]
NO_PULL = {"sigma_mode": "fixed", "sigma0": 0.0}
CHEAP = {"iterations": 2, "real_batch": 8}


def fed(**changes):
    return Federation(**{"train": TRAIN, **changes})


def all_same(one, two):
    return all(same(a.x, b.x) for a, b in zip(one.servers, two.servers))


def all_close(one, two, tolerance=1e-6):
    return all(close(a.x, b.x, tolerance) for a, b in zip(one.servers, two.servers))


@pytest.mark.parametrize("cohorts", [None, PARTIAL])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"mu": 0.0}),
        ("moon", {"mu": 0.0}),
        ("fedrds", {**NO_PULL, "alpha": 0.0}),
        ("feddc", {"ft_epochs": 0, **CHEAP}),
        ("feddcplus", {"ft_epochs": 0, "condense": "every", **CHEAP}),
        ("fedper", {"personal_layers": 0}),
        ("lgfedavg", {"global_layers": "all"}),
        ("fedbn", {}),  # of a model without batch normalisation
        ("fedlc", {"tau": 0.0}),
        ("fedsam", {"rho": 0.0}),
        ("ditto", {}),
        ("apfl", {}),
        ("feddf", {"distill_epochs": 0}),
    ],
)
def test_is_fedavg_to_the_bit(name, options, cohorts):
    f = fed()
    assert all_same(f.run(name, cohorts=cohorts, **options), f.run("fedavg", cohorts=cohorts))


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("fedcm", {"alpha": 1.0}, 1e-6),
        ("fedga", {"beta": 0.0}, 1e-6),
        ("fedvarp", {}, 1e-6),
        ("feddpc", {"projection": False, "scaling": False}, 1e-5),
        ("fedexp", {"eps": 1e9}, 1e-6),
        ("fedbuff", {}, 1e-6),
        ("diloco", {"outer_lr": 1.0, "outer_momentum": 0.0}, 1e-5),
        ("qfedavg", {"q": 0.0}, 1e-5),
    ],
)
def test_is_uniform_fedavg_under_full_participation(name, options, tolerance):
    f = Federation(train={"epochs": 2})  # without momentum, which FedCM refuses
    assert all_close(f.run(name, **options), f.run("fedavg", weighting="uniform"), tolerance)


def test_feddpc_divides_updates_by_the_rate_of_the_round():
    f = Federation(train={"schedule": "step(1, 0.5)"})
    run = f.run("feddpc", projection=False, scaling=False)
    assert all_close(run, f.run("fedavg", weighting="uniform"), 1e-5)


@pytest.mark.parametrize("name", ["fedvarp", "scaffold"])
def test_first_round_is_uniform_fedavg(name):
    f = fed(rounds=1)
    one, two = (
        f.run(name, cohorts=[[0, 2]]),
        f.run("fedavg", cohorts=[[0, 2]], weighting="uniform"),
    )
    assert close(one.x, two.x)


def test_ca2fl_where_nothing_is_stale_is_fedvarp():
    one, two = (fed().run(name, cohorts=PARTIAL) for name in ("ca2fl", "fedvarp"))
    assert close(one.x, two.x, 1e-6)


def test_fedexp_on_identical_data_with_full_batches_is_uniform_fedavg():
    data = {"data": images(40), "parts": [range(40)] * 4}
    f = Federation(**data, train={"batch_size": 40, "epochs": 3})
    assert all_close(f.run("fedexp"), f.run("fedavg", weighting="uniform"))


@pytest.mark.parametrize(("name", "epochs"), [("fedsgd", 1), ("fednova", 2)])
def test_is_fedavg_where_all_do_the_same_whole_batches(name, epochs):
    f = whole_batches(train={"epochs": epochs})
    assert all_close(f.run(name), f.run("fedavg"), 1e-5)


def test_one_client_alone_is_fedavg_to_the_bit():
    f = fed(clients=1)
    alone, averaged = f.run("local"), f.run("fedavg")
    assert same(alone.clients[0].x, averaged.x)


@pytest.mark.parametrize("cohorts", [None, PARTIAL])
def test_fedrds_without_sharing_at_a_fixed_sigma_is_fedprox_to_the_bit(cohorts):
    f = fed(public=0)
    ours = f.run("fedrds", cohorts=cohorts, sigma_mode="fixed", sigma0=0.3)
    assert all_same(ours, f.run("fedprox", cohorts=cohorts, mu=0.3))


@pytest.mark.parametrize("cohorts", [None, [[0, 2], [0, 2], [0]]])
def test_lgfedavg_sharing_nothing_is_local_only_to_the_bit(cohorts):
    f = fed()
    shared = f.run("lgfedavg", cohorts=cohorts, global_layers=0)
    alone = f.run("local", cohorts=cohorts)
    assert all(same(shared.locals[client], alone.locals[client]) for client in (0, 2))


def test_fedrod_with_equal_class_counts_is_fedavg():
    x, y = images(200)
    order = y.argsort(stable=True)
    x, y = x[order], y[order]
    starts = [int((y < c).sum()) for c in range(5)]
    # 7 of each class for each client
    parts = [[s + 7 * i + k for s in starts for k in range(7)] for i in range(4)]
    f = fed(data=(x, y), parts=parts)
    assert all_close(f.run("fedrod"), f.run("fedavg"), 1e-6)
    assert not all_close(fed().run("fedrod"), fed().run("fedavg"), 1e-4)
