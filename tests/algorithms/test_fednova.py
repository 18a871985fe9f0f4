"""FedNova: by hand, and recomputed in float64."""

from __future__ import annotations

import pytest

from fednet.algorithms.fednova import gradient_weight
from tests.algorithms.harness import Federation

F = Federation()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.1, 0.5, 1.0, 1.9])  # eta mu
def test_no_client_is_blown_up_where_weights_of_gradients_are_negative(momentum, pull):
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
