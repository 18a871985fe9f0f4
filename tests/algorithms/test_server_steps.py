"""The server's half of each method by hand, on models of one number or two."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fednet.algorithms.fednova import gradient_weight
from tests.algorithms.harness import Desk, Federation, reply, serve, vector

UNIFORM = {"weighting": "uniform"}
SAMPLES = {"weighting": "samples"}
MOMENTS = {"server_lr": 1.0, "beta_1": 0.5, "beta_2": 0.5, "tau": 1.0}
# What the adaptive methods have after the first round.
GRAD = 2 / (5**0.5 + 1)
ADAM = 1 / (2.5**0.5 + 1)
YOGI = 1 / (3**0.5 + 1)


def r(client=0, **fields):
    """A client and its reply."""
    return client, fields


def case(name, *rounds, x=0.0, host=None, **options):
    """rounds: of each, its replies and the server's state after them. x: the first model."""
    return pytest.param(name, options, host or {}, x, rounds, id=name)


STEPS = [
    case("fedavg", ([r(x=1.0), r(1, x=5.0, n=3)], {"x": 3.0}), **UNIFORM),
    # 1 - 0.5 * (1 + 3 * 5) / 4
    case("fedsgd", ([r(g=1.0), r(1, g=5.0, n=3)], {"x": -1.0}), x=1.0, host={"lr": 0.5}),
    # v = 1, then 0.5 * 1 + 2
    case(
        "fedavgm",
        ([r(x=1.0)], {"x": 0.1, "v": 1.0}),
        ([r(x=2.1)], {"x": 0.35, "v": 2.5}),
        beta=0.5,
        server_lr=0.1,
    ),
    # tau 1, so v_0 = 1: v = 1 + 4, then + 16
    case(
        "fedadagrad",
        ([r(x=2.0)], {"x": GRAD, "v": 5.0}),
        ([r(x=GRAD + 4)], {"x": GRAD + 4 / (21**0.5 + 1), "v": 21.0}),
        server_lr=1.0,
        tau=1.0,
    ),
    # m = 0.5 * 2, v = 0.5 + 0.5 * 4; then m = 0.5 + 0.5 * 4, v = 1.25 + 0.5 * 16
    case(
        "fedadam",
        ([r(x=2.0)], {"x": ADAM, "m": 1.0, "v": 2.5}),
        ([r(x=ADAM + 4)], {"x": ADAM + 2.5 / (9.25**0.5 + 1), "m": 2.5, "v": 9.25}),
        **MOMENTS,
    ),
    # v = 1 + 0.5 * 4: Delta^2 is above v; then m = 0.75, v = 3 - 0.5 * 0.25: it is below
    case(
        "fedyogi",
        ([r(x=2.0)], {"x": YOGI, "m": 1.0, "v": 3.0}),
        ([r(x=YOGI + 0.5)], {"x": YOGI + 0.75 / (2.875**0.5 + 1), "m": 0.75, "v": 2.875}),
        **MOMENTS,
    ),
    case(
        "diloco",
        ([r(x=1.0, n=3), r(1, x=5.0)], {"x": 2.0}),
        outer_lr=1.0,
        outer_momentum=0.0,
        **SAMPLES,
    ),
    # d = 2 and 2, p = 1/4 and 3/4, tau_eff = 1/4 * 1 + 3/4 * 4
    case("fednova", ([r(d=2.0), r(1, d=8.0, n=3, steps=4)], {"x": 10 - 3.25 * 2}), x=10.0),
    # ||a|| = 1, and 1 + 1 + 0.5
    case(
        "fednova",
        ([r(d=1.0), r(1, d=5.0, steps=3)], {"x": 10 - (1 + 2.5) / 2 * (1 / 1 + 5 / 2.5) / 2}),
        x=10.0,
        host={"lr": 0.5, "momentum": 0.5},
        mu=1.0,
    ),
    # 1 + (1 + 9) / 4; 12 / 4, of all clients, not of the participants
    case(
        "scaffold",
        ([r(dy=1.0, dc=4.0), r(3, dy=3.0, dc=8.0, n=3)], {"x": 3.5, "c": 3.0}),
        x=1.0,
        host={"clients": 4},
        **SAMPLES,
    ),
    # 10 - 0.5 * 5; each update by its own steps, (2 / (0.5 * 2) + 8 / (0.5 * 4)) / 2
    case(
        "fedcm",
        ([r(d=2.0, steps=2), r(1, d=8.0, n=9, steps=4)], {"x": 7.5, "delta": 3.0}),
        x=10.0,
        host={"lr": 0.5},
        server_lr=0.5,
    ),
    # The mean of 1 and 3 without a memory; then with the old memory, which is replaced after.
    case(
        "fedvarp",
        ([r(d=1.0), r(1, d=3.0)], {"x": -0.5 * 2, "ybar": 1.0}),
        ([r(1, d=7.0), r(3, d=5.0)], {"x": -1 - 0.5 * ((7 - 3 + 5) / 2 + 1), "ybar": 3.25}),
        ([r(d=1.0), r(1, d=7.0), r(3, d=5.0)], {"x": -3.75 - 0.5 * 3.25, "ybar": 3.25}),
        host={"clients": 4},
        server_lr=0.5,
    ),
    # Each in its turn.
    case(
        "fedasync",
        ([r(x=2.0), r(1, x=6.0)], {"x": 0.4 * (0.4 * 1 + 0.6 * 2) + 0.6 * 6}),
        x=1.0,
        alpha=0.6,
    ),
    case("pfedme", ([r(x=2.0), r(1, x=6.0, n=3)], {"x": 9.0}), x=1.0, beta=2.0, **SAMPLES),
]


@pytest.mark.parametrize(("name", "options", "host", "x", "rounds"), STEPS)
def test_the_servers_step_by_hand(name, options, host, x, rounds):
    algorithm = Federation().make(name, **options)
    server = algorithm.init_server(vector(x))
    for replies, after in rounds:
        ups = {client: reply(algorithm, **fields) for client, fields in replies}
        server = serve(algorithm, server, ups, Desk(**{"clients": len(ups), **host}))
        found = {field: float(getattr(server, field).vector[0]) for field in after}
        assert found == pytest.approx(after, rel=1e-5)


# -- FedNova ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.1, 0.5, 1.0, 1.9])  # eta mu
def test_fednovas_norm_counts_the_magnitude_of_each_gradients_weight(momentum, pull):
    """So no client is blown up where some weights are negative."""
    for steps in range(1, 40):
        # a_i by the definition: the displacement is linear in the gradients, one a step.
        weights = []
        for step in range(steps):
            moved = velocity = 0.0
            for now in range(steps):
                velocity = momentum * velocity + (now == step) - pull * moved
                moved += velocity
            weights.append(moved)
        norm = gradient_weight(steps, 0.5, momentum, pull / 0.5)
        assert norm == pytest.approx(sum(abs(a) for a in weights))
        assert norm >= 1.0
    assert gradient_weight(0, 0.5, momentum, pull / 0.5) == 0.0


def test_a_client_that_says_it_took_very_many_steps_does_not_hold_the_server():
    # With momentum 0.9 each gradient but the last few moves the model by 10.
    assert gradient_weight(10**15, 0.5, 0.9, 0.0) == pytest.approx(1e16)


# -- FedExP ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("updates", "n", "options", "lr_decay", "eta_g"),
    [
        # m orthogonal updates: half as far as there are
        (np.eye(10).tolist(), (1,) * 10, {"eps": 0.0}, 1.0, 5.0),
        ([[0.0, 0.0]] * 2, (1, 1), {"eps": 0.0}, 1.0, 1.0),
        # sum of squares / m = 1, ||D||^2 = 1/4; eps follows the square of the rate's decay
        (np.eye(4).tolist(), (1,) * 4, {"eps": 0.05}, 1.0, 1 / (2 * 0.30)),
        (np.eye(4).tolist(), (1,) * 4, {"eps": 0.2}, 0.5, 1 / (2 * 0.30)),
        # sum a ||.||^2 = 1; D = (3/4, 1/4), ||D||^2 = 10/16
        (np.eye(2).tolist(), (3, 1), {"eps": 0.0} | SAMPLES, 1.0, 1.0),
        # a ||.||^2: 3/4 + 4.01/4 = 1.7525; D = (0.25, 0.025), ||D||^2 = 0.063125
        ([[1.0, 0.0], [-2.0, 0.1]], (3, 1), {"eps": 0.0} | SAMPLES, 1.0, 1.7525 / 0.12625),
    ],
)
def test_fedexps_step_by_hand(updates, n, options, lr_decay, eta_g):
    algorithm = Federation().make("fedexp", **options)
    host = Desk(len(updates), lr_decay=lr_decay)
    ups = {i: reply(algorithm, n=n[i], d=d) for i, d in enumerate(updates)}
    state = serve(algorithm, algorithm.init_server(vector(*np.zeros(len(updates[0])))), ups, host)
    assert host.reported["eta_g"] == pytest.approx(eta_g, rel=1e-5)
    mean = np.average(updates, axis=0, weights=n if "weighting" in options else None)
    assert state.x.vector.tolist() == pytest.approx((-eta_g * mean).tolist(), rel=1e-5)


# -- FedDPC ----------------------------------------------------------------------------------------
def dpc(updates, g, x=(0.0, 0.0), host=None, **options):
    """The server's state after these D_j, with G = g."""
    algorithm = Federation().make("feddpc", **options)
    server = algorithm.init_server(vector(*x)).replace(delta=vector(*g))
    ups = {i: reply(algorithm, d=d) for i, d in enumerate(updates)}
    return serve(algorithm, server, ups, host or Desk(len(updates)))


@pytest.mark.parametrize(
    ("updates", "g", "options", "delta"),
    [
        # D = (3, 4), G = (2, 0): proj = (3, 0), r = (0, 4), ratio 5/4, u = (1 + 1.25) (0, 4)
        ([(3, 4)], (2, 0), {}, [0, 9]),
        ([(3, 4)], (0.5, 0), {}, [0, 9]),  # the length of G has no effect
        ([(-3, 4)], (2, 0), {}, [0, 9]),  # nor has the sign of the projection
        ([(3, 4)], (2, 0), {"lambda": 0.0}, [0, 5]),  # ||u|| = ||D||
        ([(3, 4)], (2, 0), {"lambda": -2.0}, [0, -3]),
        ([(1, 2), (3, 4)], (0, 0), {}, [4, 6]),  # G = 0: (1 + lambda) times the mean
        ([(3, 4)], (2, 0), {"projection": False}, [6, 8]),  # ratio 1
        ([(3, 4)], (2, 0), {"scaling": False}, [0, 4]),
        ([(3, 4)], (2, 0), {"projection": False, "scaling": False}, [3, 4]),
        ([(0, 0)], (2, 0), {}, [0, 0]),
    ],
)
def test_feddpcs_global_update_by_hand(updates, g, options, delta):
    state = dpc(updates, g, x=(1.0, 1.0), **options)
    assert state.delta.vector.tolist() == pytest.approx(delta)
    assert state.x.vector.tolist() == pytest.approx([1 - delta[0], 1 - delta[1]])


def test_feddpc_counts_an_update_along_the_last_one_as_zero_and_warns():
    host = Desk(2)
    state = dpc([(3.0, 0.0), (0.0, 1.0)], (2.0, 0.0), host=host)
    assert state.delta.vector.tolist() == [0.0, 1.0]
    assert len(host.warnings) == 1
    assert "client 0" in host.warnings[0]


@pytest.mark.parametrize(("options", "x"), [({}, -0.5), ({"server_lr": 2.0}, -4.0)])
def test_feddpcs_server_has_the_local_rate_unless_it_is_set(options, x):
    assert (
        dpc([(1.0, 1.0)], (0.0, 0.0), host=Desk(1, lr=0.25), **options).x.vector.tolist() == [x] * 2
    )


def test_feddpcs_successive_updates_are_orthogonal():
    run = Federation(train={"epochs": 2}).run("feddpc", cohorts=[[0, 1], [1, 2], [2, 3]])
    for before, now in itertools.pairwise(server.delta for server in run.servers[1:]):
        assert abs(now.dot(before)) <= 1e-6 * now.norm() * before.norm()
