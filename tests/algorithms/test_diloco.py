"""DiLoCo recomputed in float64: AdamW as its paper has it, Nesterov's momentum as torch's SGD."""

from __future__ import annotations

import numpy as np
import torch

from fednet.algorithms.base import Run
from tests.algorithms.harness import Desk, Federation, serve, vector

TRAIN = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "steps": 5}
F = Federation(train=TRAIN)


def test_the_outer_step_is_nesterovs_by_hand():
    """theta 10, replicas 8 and 4: Delta 4. b = 4, theta = 10 - 0.5 (4 + 0.5 * 4) = 7. Replicas 6
    and 6: Delta 1. b = 0.5 * 4 + 1 = 3, theta = 7 - 0.5 (1 + 0.5 * 3) = 5.75.
    """
    algorithm = F.make("diloco", outer_lr=0.5, outer_momentum=0.5)
    server = algorithm.init_server(vector(10.0))
    for replicas, theta, b in (((8.0, 4.0), 7.0, 4.0), ((6.0, 6.0), 5.75, 3.0)):
        ups = {
            i: algorithm.Up(x=vector(v), run=Run(1 + 8 * i, 1, 0.0)) for i, v in enumerate(replicas)
        }
        server = serve(algorithm, server, ups, Desk(2))
        assert float(server.x.vector[0]) == theta
        assert float(server.b.vector[0]) == b


def test_workers_weigh_by_their_samples_where_that_is_asked_for():
    algorithm = F.make("diloco", outer_lr=1.0, outer_momentum=0.0, weighting="samples")
    ups = {i: algorithm.Up(x=vector(v), run=Run(n, 1, 0.0)) for i, v, n in ((0, 1, 3), (1, 5, 1))}
    after = serve(algorithm, algorithm.init_server(vector(0.0)), ups, Desk(2))
    assert float(after.x.vector[0]) == 2.0


def test_the_outer_step_is_torchs():
    run = F.run("diloco")
    x = torch.nn.Parameter(run.servers[0].x.vector.double())
    outer = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    for t in range(1, 4):
        replicas = [
            run.site(i, round=t).train(run.servers[t - 1].x).x.vector.double() for i in range(4)
        ]
        x.grad = run.servers[t - 1].x.vector.double() - sum(replicas) / 4
        outer.step()
        assert np.allclose(x.detach().numpy(), run.servers[t].x.vector.numpy(), atol=2e-6)
