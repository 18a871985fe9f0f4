from __future__ import annotations

import pytest

from fednet.algorithms.base import Run
from fednet.tensors import Tensors
from tests.algorithms.harness import Desk, Federation, serve, vector

F = Federation(train={"epochs": 2})


def after(updates, g, *, x=(0.0, 0.0), host=None, **options):
    """The server's state after these D_j, with G = g."""
    algorithm = F.make("feddpc", **options)
    server = algorithm.init_server(vector(*x)).replace(delta=vector(*g))
    ups = {i: algorithm.Up(d=vector(*d), run=Run(1, 1, 0.0)) for i, d in enumerate(updates)}
    return serve(algorithm, server, ups, host or Desk(len(updates)))


def numbers(t: Tensors):
    return pytest.approx(t.vector.tolist(), rel=1e-6)


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
    ],
)
def test_the_global_update_by_hand(updates, g, options, delta):
    state = after(updates, g, x=(1.0, 1.0), **options)
    assert numbers(state.delta) == delta
    assert numbers(state.x) == [1 - delta[0], 1 - delta[1]]


def test_an_update_along_the_last_one_counts_as_zero_and_is_said():
    host = Desk(2)
    state = after([(3.0, 0.0), (0.0, 1.0)], (2.0, 0.0), host=host)
    assert numbers(state.delta) == [0.0, 1.0]
    assert "client 0" in host.warnings[0]
    assert len(host.warnings) == 1
    assert numbers(after([(0.0, 0.0)], (2.0, 0.0)).delta) == [0.0, 0.0]


def test_the_servers_rate_is_the_local_one_unless_set():
    assert numbers(after([(1.0, 1.0)], (0.0, 0.0), host=Desk(1, lr=0.25)).x) == [-0.5, -0.5]
    assert numbers(after([(1.0, 1.0)], (0.0, 0.0), host=Desk(1, lr=0.25), server_lr=2.0).x) == [
        -4.0,
        -4.0,
    ]


def test_successive_updates_are_orthogonal():
    run = F.run("feddpc", cohorts=[[0, 1], [1, 2], [2, 3]])
    for t in (2, 3):
        now, before = run.servers[t].delta, run.servers[t - 1].delta
        assert abs(now.dot(before)) <= 1e-6 * now.norm() * before.norm()


def test_updates_are_divided_by_the_rate_of_the_round():
    f = Federation(train={"schedule": "step(1, 0.5)"})
    run = f.run("feddpc", projection=False, scaling=False)
    plain = f.run("fedavg", weighting="uniform")
    assert (run.x - plain.x).norm() <= 1e-5 * plain.x.norm()
