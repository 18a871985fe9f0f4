"""FedDyn: by hand, and recomputed in float64 over rounds of partial participation."""

from __future__ import annotations

import torch

from tests.algorithms.reference import Reference, agrees, whole_batches


def test_recomputed_in_float64():
    alpha, epochs, cohorts = 0.1, 3, [[0, 1], [1, 2, 3], [0, 3]]
    f = whole_batches(train={"epochs": epochs})
    run = f.run("feddyn", cohorts=cohorts, alpha=alpha)
    reference = Reference(f)
    theta, h = reference.start, torch.zeros_like(reference.start)
    g = {k: torch.zeros_like(h) for k in range(4)}
    for cohort in cohorts:
        local = {}
        for k in cohort:

            def change(gradient, w, k=k, theta=theta):
                return gradient - g[k] + alpha * (w - theta)

            local[k] = reference.descend(theta, k, epochs, change=change)
        for k in cohort:
            g[k] = g[k] - alpha * (local[k] - theta)
        h = h - alpha / 4 * sum(local[k] - theta for k in cohort)
        theta = sum(local.values()) / len(cohort) - h / alpha
    assert agrees(run.x, theta)
    for k in range(4):
        assert agrees(run.clients[k].g, g[k], 1e-4)
