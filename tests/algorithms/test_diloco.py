"""DiLoCo recomputed in float64: AdamW as its paper has it, Nesterov's momentum as torch's SGD."""

from __future__ import annotations

import numpy as np
import torch

from tests.algorithms.harness import Federation

TRAIN = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "steps": 5}
F = Federation(train=TRAIN)


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
