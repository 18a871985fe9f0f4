"""The equality table between methods: which settings of one method are another one, and how
exactly. On an MLP over 200 random images, four clients, three rounds; with momentum and weight
decay where the method allows them, under partial participation too.
"""

from __future__ import annotations

import pytest

from tests.algorithms.harness import Federation, close, images, same

TRAIN = {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-4}
PARTIAL = [[0, 2], [1, 2, 3], [0, 3]]
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
        ("fedrds", {"sigma0": 0.0, "alpha": 0.0}),
        ("feddc", {"ft_epochs": 0, **CHEAP}),
        ("feddcplus-every", {"ft_epochs": 0, **CHEAP}),
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
@pytest.mark.usefixtures("readings")
def test_is_fedavg_to_the_bit(name, options, cohorts):
    f = fed()
    assert all_same(f.run(name, cohorts=cohorts, **options), f.run("fedavg", cohorts=cohorts))


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("fedcm", {"alpha": 1.0}, 1e-6),
        ("fedga", {"beta": 0.0}, 1e-6),
        ("fedga", {"beta": 0.0, "mode": "stale"}, 1e-6),
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


UNIFORM = {"weighting": "uniform"}
ALIKE = {"data": images(40), "parts": [range(40)] * 4, "train": {"batch_size": 40, "epochs": 3}}
FIRST = {"rounds": 1}
LACKING = {"parts": [[i for i, y in enumerate(images()[1]) if y != k] for k in range(4)]}
FIXED = {"sigma0": 0.3}


@pytest.mark.parametrize(
    ("one", "other", "federation", "cohorts", "tolerance"),
    [
        (("fedvarp", {}), ("fedavg", UNIFORM), FIRST, [[0, 2]], 1e-6),
        (("scaffold", {}), ("fedavg", UNIFORM), FIRST, [[0, 2]], 1e-6),
        (("fedexp", {}), ("fedavg", UNIFORM), ALIKE, None, 1e-6),
        (("fedsgd", {}), ("fedavg", {}), {"train": {"batch_size": 1000}}, None, 1e-5),
        (("fednova", {}), ("fedavg", {}), {"train": {"batch_size": 1000, "epochs": 2}}, None, 1e-5),
        (("fedrod", {"gamma": 0}), ("fedavg", {}), LACKING, None, 1e-6),
        # Updates are divided by the rate of their round.
        (
            ("feddpc", {"projection": False, "scaling": False}),
            ("fedavg", UNIFORM),
            {"train": {"schedule": "step(1, 0.5)"}},
            None,
            1e-5,
        ),
        (("fedrds", FIXED), ("fedprox", {"mu": 0.3}), {"public": 0}, None, None),
        (("fedrds", FIXED), ("fedprox", {"mu": 0.3}), {"public": 0}, PARTIAL, None),
    ],
)
def test_one_method_is_another(one, other, federation, cohorts, tolerance):
    """tolerance: None: to the bit."""
    f = fed(**federation)
    a, b = (f.run(name, cohorts=cohorts, **options) for name, options in (one, other))
    assert all_same(a, b) if tolerance is None else all_close(a, b, tolerance)


def test_one_client_alone_is_fedavg_to_the_bit():
    f = fed(clients=1)
    alone = f.run("local")
    averaged = f.run("fedavg")
    assert same(alone.clients[0].x, averaged.x)


@pytest.mark.parametrize("cohorts", [None, [[0, 2], [0, 2], [0]]])
def test_lgfedavg_sharing_nothing_is_local_only_to_the_bit(cohorts):
    f = fed()
    shared = f.run("lgfedavg", cohorts=cohorts, global_layers=0)
    alone = f.run("local", cohorts=cohorts)
    assert all(same(shared.locals[client], alone.locals[client]) for client in (0, 2))
