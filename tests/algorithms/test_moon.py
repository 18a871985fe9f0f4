"""MOON."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fednet.algorithms.moon import Moon
from fednet.registry import task
from tests.algorithms.harness import Federation, begun, same


def test_a_client_first_seen_late_has_no_contrast_either():
    a = begun("moon", mu=5).rounds(2, (0, 1))
    start = a.server.x
    a.rounds(1, (2,))
    assert same(a.ups[2].x, a.host(2).train(start).x)


def test_a_client_keeps_the_model_it_trained_last():
    f = begun("moon").rounds(1, (0, 1))
    v = f.clients[0].v
    assert same(v, f.ups[0].x)
    f.rounds(1, (1,))
    assert f.clients[0].v is v
    assert not same(f.clients[1].v, v)


def test_the_loss_is_cross_entropy_and_mu_times_contrast_against_frozen_models():
    f = Federation()
    x, y = f.samples(0)
    model, glob, prev = (f.build(seed) for seed in range(3))
    got = Moon(Moon.Config(mu=3.0, tau=0.7)).loss(task.get("classification")(), glob, prev)(
        model, x, y
    )
    z, g, v = (m.features(x) for m in (model, glob, prev))
    s_g, s_v = F.cosine_similarity(z, g), F.cosine_similarity(z, v)
    l_con = -torch.log(torch.exp(s_g / 0.7) / (torch.exp(s_g / 0.7) + torch.exp(s_v / 0.7))).mean()
    assert got.item() == pytest.approx((F.cross_entropy(model(x), y) + 3 * l_con).item(), rel=1e-5)
    got.backward()
    assert all(p.grad is None for m in (glob, prev) for p in m.parameters())


def test_each_batch_counts_once_in_the_statistics_of_batch_norm():
    f = begun("moon", model={"name": "mlp", "norm": "batch"})
    f.rounds(1, (0,))
    before = int(f.downs[0].x.counters[0])
    f.rounds(1, (0,))  # the second participation has a contrast
    assert int(f.ups[0].x.counters[0]) - int(f.downs[0].x.counters[0]) == f.ups[0].run.steps
    assert before == 0
