"""Server optimizers: two rounds by hand for each, and their limits."""

from __future__ import annotations

import pytest

from fednet.algorithms.base import Run
from tests.algorithms.harness import Desk, Federation, serve, vector

F = Federation()


def rounds(name, means, **options):
    """The server's x after each round whose clients' mean is x + the next of `means`."""
    algorithm = F.make(name, **options)
    server, found = algorithm.init_server(vector(0.0)), []
    for change in means:
        x = float(server.x.vector[0])
        ups = {0: algorithm.Up(x=vector(x + change), run=Run(5, 1, 0.0))}
        server = serve(algorithm, server, ups, Desk(1))
        found.append(float(server.x.vector[0]))
    return found


def test_fedavgm_by_hand():
    # v = 1, then 0.5 * 1 + 2 = 2.5
    assert rounds("fedavgm", [1.0, 2.0], beta=0.5, server_lr=0.1) == pytest.approx([0.1, 0.35])


def test_fedadagrad_by_hand():
    # v = 1 + 4 + 16: tau 1, so v_0 = 1
    found = rounds("fedadagrad", [2.0, 4.0], server_lr=1.0, tau=1.0)
    assert found[0] == pytest.approx(2 / (5**0.5 + 1))
    assert found[1] - found[0] == pytest.approx(4 / (21**0.5 + 1), rel=1e-5)


def test_fedadam_by_hand():
    found = rounds("fedadam", [2.0, 4.0], server_lr=1.0, beta_1=0.5, beta_2=0.5, tau=1.0)
    assert found[0] == pytest.approx(1 / (2.5**0.5 + 1))  # m = 1, v = 0.5 + 2
    # m = 0.5 + 2, v = 1.25 + 8
    assert found[1] - found[0] == pytest.approx(2.5 / (9.25**0.5 + 1), rel=1e-5)


def test_fedyogi_by_hand():
    found = rounds("fedyogi", [2.0, 0.5], server_lr=1.0, beta_1=0.5, beta_2=0.5, tau=1.0)
    assert found[0] == pytest.approx(1 / (3**0.5 + 1))  # v = 1 + 0.5 * 4: Delta^2 is above v
    # m = 0.75, v = 3 - 0.5 * 0.25: Delta^2 is below v
    assert found[1] - found[0] == pytest.approx(0.75 / (2.875**0.5 + 1), rel=1e-5)
