"""The server's half of each method by hand, on models of one number."""

from __future__ import annotations

import pytest

from tests.algorithms.harness import Desk, Federation, reply, serve, vector

UNIFORM, SAMPLES = {"weighting": "uniform"}, {"weighting": "samples"}
MOMENTS = {"server_lr": 1.0, "beta_1": 0.5, "beta_2": 0.5, "tau": 1.0}
# What the adaptive methods have after the first round.
GRAD, ADAM, YOGI = 2 / (5**0.5 + 1), 1 / (2.5**0.5 + 1), 1 / (3**0.5 + 1)


def r(client=0, **fields):
    """A client and its reply."""
    return client, fields


def case(name, options, host, x, *rounds):
    """x: the first model. rounds: replies and the server's state after them, in turn."""
    return pytest.param(name, options, host, x, rounds, id=name)


STEPS = [
    case("fedavg", {}, {}, 0.0, [r(x=1.0), r(1, x=5.0, n=3)], {"x": 4.0}),
    case("fedavg", UNIFORM, {}, 0.0, [r(x=1.0), r(1, x=5.0, n=3)], {"x": 3.0}),
    # 1 - 0.5 * (1 + 3 * 5) / 4
    case("fedsgd", {}, {"lr": 0.5}, 1.0, [r(g=1.0), r(1, g=5.0, n=3)], {"x": -1.0}),
    # v = 1, then 0.5 * 1 + 2
    case(
        *("fedavgm", {"beta": 0.5, "server_lr": 0.1}, {}, 0.0),
        *([r(x=1.0)], {"x": 0.1, "v": 1.0}),
        *([r(x=2.1)], {"x": 0.35, "v": 2.5}),
    ),
    # tau 1, so v_0 = 1: v = 1 + 4, then + 16
    case(
        *("fedadagrad", {"server_lr": 1.0, "tau": 1.0}, {}, 0.0),
        *([r(x=2.0)], {"x": GRAD, "v": 5.0}),
        *([r(x=GRAD + 4)], {"x": GRAD + 4 / (21**0.5 + 1), "v": 21.0}),
    ),
    # m = 0.5 * 2, v = 0.5 + 0.5 * 4; then m = 0.5 + 0.5 * 4, v = 1.25 + 0.5 * 16
    case(
        *("fedadam", MOMENTS, {}, 0.0),
        *([r(x=2.0)], {"x": ADAM, "m": 1.0, "v": 2.5}),
        *([r(x=ADAM + 4)], {"x": ADAM + 2.5 / (9.25**0.5 + 1), "m": 2.5, "v": 9.25}),
    ),
    # v = 1 + 0.5 * 4: Delta^2 is above v; then m = 0.75, v = 3 - 0.5 * 0.25: it is below
    case(
        *("fedyogi", MOMENTS, {}, 0.0),
        *([r(x=2.0)], {"x": YOGI, "m": 1.0, "v": 3.0}),
        *([r(x=YOGI + 0.5)], {"x": YOGI + 0.75 / (2.875**0.5 + 1), "m": 0.75, "v": 2.875}),
    ),
    # Delta 4: b = 4, 10 - 0.5 (4 + 0.5 * 4). Delta 1: b = 0.5 * 4 + 1, 7 - 0.5 (1 + 0.5 * 3)
    case(
        *("diloco", {"outer_lr": 0.5, "outer_momentum": 0.5}, {}, 10.0),
        *([r(x=8.0), r(1, x=4.0, n=9)], {"x": 7.0, "b": 4.0}),
        *([r(x=6.0), r(1, x=6.0, n=9)], {"x": 5.75, "b": 3.0}),
    ),
    case(
        *("diloco", {"outer_lr": 1.0, "outer_momentum": 0.0} | SAMPLES, {}, 0.0),
        *([r(x=1.0, n=3), r(1, x=5.0)], {"x": 2.0}),
    ),
    # h = 0 - 0.5/4 * ((2 - 1) + (4 - 1)); theta = 3 + 0.5 / 0.5
    case(
        *("feddyn", {"alpha": 0.5}, {"clients": 4}, 1.0),
        *([r(x=2.0), r(1, x=4.0)], {"x": 4.0, "h": -0.5}),
    ),
    # d = 2 and 2, p = 1/4 and 3/4, tau_eff = 1/4 * 1 + 3/4 * 4
    case("fednova", {}, {}, 10.0, [r(d=2.0), r(1, d=8.0, n=3, steps=4)], {"x": 10 - 3.25 * 2}),
    # ||a|| = 1, and 1 + 1 + 0.5
    case(
        *("fednova", {"mu": 1.0}, {"lr": 0.5, "momentum": 0.5}, 10.0),
        *([r(d=1.0), r(1, d=5.0, steps=3)], {"x": 10 - (1 + 2.5) / 2 * (1 / 1 + 5 / 2.5) / 2}),
    ),
    # L = 2: sum F^q L d = 2 + 36; h = (2 * 1 * 4 + 2) + (2 * 3 * 16 + 18)
    case(
        *("qfedavg", {"q": 2.0}, {"lr": 0.5}, 10.0),
        *([r(d=1.0, loss=1.0, n=9), r(1, d=2.0, loss=3.0)], {"x": 10 - 38 / 124}),
    ),
    # 1 + 2 * 2; 12 / 4, of all clients, not of the participants
    case(
        *("scaffold", {"server_lr": 2.0}, {"clients": 4}, 1.0),
        *([r(dy=1.0, dc=4.0), r(3, dy=3.0, dc=8.0, n=3)], {"x": 5.0, "c": 3.0}),
    ),
    # 1 + (1 + 9) / 4
    case(
        *("scaffold", SAMPLES, {"clients": 4}, 1.0),
        *([r(dy=1.0, dc=4.0), r(3, dy=3.0, dc=8.0, n=3)], {"x": 3.5, "c": 3.0}),
    ),
    # 10 - 0.5 * 5; each update by its own steps, (2 / (0.5 * 2) + 8 / (0.5 * 4)) / 2
    case(
        *("fedcm", {"server_lr": 0.5}, {"lr": 0.5}, 10.0),
        *([r(d=2.0, steps=2), r(1, d=8.0, n=9, steps=4)], {"x": 7.5, "delta": 3.0}),
    ),
    # The mean of 1 and 3 without a memory; then with the old memory, which is replaced after.
    case(
        *("fedvarp", {"server_lr": 0.5}, {"clients": 4}, 0.0),
        *([r(d=1.0), r(1, d=3.0)], {"x": -0.5 * 2, "ybar": 1.0}),
        *([r(1, d=7.0), r(3, d=5.0)], {"x": -1 - 0.5 * ((7 - 3 + 5) / 2 + 1), "ybar": 3.25}),
        *([r(d=1.0), r(1, d=7.0), r(3, d=5.0)], {"x": -3.75 - 0.5 * 3.25, "ybar": 3.25}),
    ),
    # Each in its turn.
    case(
        *("fedasync", {"alpha": 0.6}, {}, 1.0),
        *([r(x=2.0), r(1, x=6.0)], {"x": 0.4 * (0.4 * 1 + 0.6 * 2) + 0.6 * 6}),
    ),
    case("pfedme", {"beta": 0.5}, {}, 1.0, [r(x=2.0), r(1, x=6.0, n=3)], {"x": 2.5}),
    case("pfedme", {"beta": 2.0} | SAMPLES, {}, 1.0, [r(x=2.0), r(1, x=6.0, n=3)], {"x": 9.0}),
]


@pytest.mark.parametrize(("name", "options", "host", "x", "rounds"), STEPS)
def test_the_servers_step_by_hand(name, options, host, x, rounds):
    algorithm = Federation().make(name, **options)
    server = algorithm.init_server(vector(x))
    for replies, after in zip(rounds[::2], rounds[1::2]):
        ups = {client: reply(algorithm, **fields) for client, fields in replies}
        server = serve(algorithm, server, ups, Desk(**{"clients": len(ups), **host}))
        found = {field: float(getattr(server, field).vector[0]) for field in after}
        assert found == pytest.approx(after, rel=1e-5)
