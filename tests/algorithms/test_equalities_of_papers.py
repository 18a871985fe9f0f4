"""Rows of the equality table that concern the papers' methods and the personalised ones, on LeNet-5
or an MLP over 200 random images, four clients, three rounds. With momentum and weight decay, under
partial participation too.
"""

from __future__ import annotations

import pytest

from tests.algorithms.harness import Federation, close, images, same

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
        ("moon", {"mu": 0.0}),
        ("fedrds", {**NO_PULL, "alpha": 0.0}),
        ("feddc", {"ft_epochs": 0, **CHEAP}),
        ("feddcplus", {"ft_epochs": 0, **CHEAP}),
        ("fedper", {"personal_layers": 0}),
        ("lgfedavg", {"global_layers": "all"}),
    ],
)
def test_is_fedavg_to_the_bit(name, options, cohorts):
    f = fed()
    assert all_same(f.run(name, cohorts=cohorts, **options), f.run("fedavg", cohorts=cohorts))


@pytest.mark.parametrize("name", ["fedrds", "feddc"])
def test_is_fedavg_to_the_bit_on_lenet(name):
    f = fed(model={"name": "lenet5"}, data=images(200, shape=(1, 20, 20)), rounds=2)
    options = {"fedrds": {**NO_PULL, "alpha": 0.0}, "feddc": {"ft_epochs": 0, **CHEAP}}[name]
    assert all_same(f.run(name, **options), f.run("fedavg"))


@pytest.mark.parametrize("cohorts", [None, PARTIAL])
def test_fedrds_without_sharing_at_a_fixed_sigma_is_fedprox_to_the_bit(cohorts):
    f = fed(public=0)
    ours = f.run("fedrds", cohorts=cohorts, sigma_mode="fixed", sigma0=0.3)
    assert all_same(ours, f.run("fedprox", cohorts=cohorts, mu=0.3))


@pytest.mark.parametrize("strength", [1.0, 10.0, "adaptive"])
def test_fedpdc_literal_is_itself_for_any_lambda_to_the_bit(strength):
    f = fed()
    assert all_same(f.run("fedpdc", **{"lambda": strength}), f.run("fedpdc", **{"lambda": 0.0}))


def test_fedpdc_prox_in_a_round_where_all_have_p0_is_fedprox_with_lambda_times_1_less_p0():
    f = fed()
    run, other = f.run("fedpdc", penalty="prox", **{"lambda": 2.0}), f.run("fedprox", mu=0.5)
    for r in (run, other):
        r.servers.append(r.servers[-1].replace(x=f.initial))
    run.servers[-1] = run.servers[-1].replace(p=dict.fromkeys(range(4), 0.75))
    run.round(range(4))
    other.round(range(4))
    assert all(close(run.ups[i].x, other.ups[i].x) for i in range(4))


@pytest.mark.parametrize("cohorts", [None, [[0, 2], [0, 2], [0]]])
def test_lgfedavg_sharing_nothing_is_local_only_to_the_bit(cohorts):
    f = fed()
    shared, alone = (
        f.run("lgfedavg", cohorts=cohorts, global_layers=0),
        f.run("local", cohorts=cohorts),
    )
    for client in (0, 2):
        assert same(shared.locals[client], alone.locals[client])


def test_fedrod_with_equal_class_counts_is_fedavg():
    x, y = images(200)
    order = y.argsort(stable=True)
    x, y = x[order], y[order]
    starts = [int((y < c).sum()) for c in range(5)]
    # 7 of each class for each client
    parts = [[s + 7 * i + k for s in starts for k in range(7)] for i in range(4)]
    f = fed(data=(x, y), parts=parts)
    assert all_close(f.run("fedrod"), f.run("fedavg"), 1e-6)


METHODS = {
    "moon": {},
    "lgfedavg": {},
    "fedper": {},
    "fedrep": {},
    "fedrod": {},
    "fedabc": {},
    "fedrds": {},
    "fedpdc": {"remember": "latest"},
    "feddc": CHEAP,
    "feddcplus": CHEAP,
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_whose_states_go_through_files_is_the_same_to_the_bit(name):
    f = fed()
    runs = [f.run(name, cohorts=PARTIAL, saved=saved, **METHODS[name]) for saved in (False, True)]
    assert all_same(*runs)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_client_is_judged_by_can_be_evaluated(name):
    f = fed()
    run = f.run(name, **METHODS[name])
    host = run.site(1)
    counts = host.evaluate(run.algorithm.personal_model(run.clients[1], run.locals[1], host))
    assert counts.table[1].sum() == len(f.samples(1)[1])
    assert counts.accuracy > 0.3
