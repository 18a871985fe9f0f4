"""DiLoCo recomputed in float64: AdamW as its paper has it, Nesterov's momentum as torch's SGD."""

from __future__ import annotations

import numpy as np
import torch

from fednet import seeds
from fednet.algorithms.base import Run
from fednet.training.loop import batches
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


def forward(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The harness's mlp, in float64."""
    x = x.flatten(1).double()
    x = torch.relu(x @ w["body.fc1.weight"].T + w["body.fc1.bias"])
    return x @ w["head.weight"].T + w["head.bias"]


def test_whole_rounds_from_the_paper_in_float64():
    """Algorithm 1 with AdamW written out (Loshchilov and Hutter 2019, Algorithm 2)."""
    run = F.run("diloco")
    for t in range(1, 3):
        before, after = run.servers[t - 1], run.servers[t]
        theta = {n: v.double() for n, v in before.x.items()}
        replicas = [inner(F, i, t, theta) for i in range(4)]
        for n, start in theta.items():
            delta = start - sum(w[n] for w in replicas) / 4
            b = 0.9 * before.b[n].double() + delta
            moved = -0.7 * (delta + 0.9 * b)
            # AdamW's first steps are as long for a gradient that is all rounding as for any other.
            error = (after.x[n].double() - start - moved).norm() / moved.norm()
            assert error < 1e-3, (t, n)
            assert torch.allclose(after.b[n].double(), b, atol=2e-4)


def inner(f: Federation, client: int, t: int, start: dict[str, torch.Tensor]):
    """H steps of AdamW from `start`, with lr 0.01, decay 0.1, beta 0.9 and 0.999, eps 1e-8."""
    x, y = f.samples(client)
    w = {n: v.clone() for n, v in start.items()}
    m, v = ({n: torch.zeros_like(p) for n, p in w.items()} for _ in range(2))
    order, step = seeds.rng(f.seed, "order", t, client), 0
    while step < TRAIN["steps"]:
        index = torch.from_numpy(order.permutation(len(y)))
        for a, e in batches(len(y), 16):
            if step == TRAIN["steps"]:
                break
            step += 1
            leaves = {n: p.clone().requires_grad_(True) for n, p in w.items()}
            logits = forward(leaves, x[index[a:e]])
            torch.nn.functional.cross_entropy(logits, y[index[a:e]]).backward()
            for n, leaf in leaves.items():
                m[n] = 0.9 * m[n] + 0.1 * leaf.grad
                v[n] = 0.999 * v[n] + 0.001 * leaf.grad**2
                hat = (m[n] / (1 - 0.9**step)) / ((v[n] / (1 - 0.999**step)).sqrt() + 1e-8)
                w[n] = w[n] * (1 - 0.01 * 0.1) - 0.01 * hat
    return w
