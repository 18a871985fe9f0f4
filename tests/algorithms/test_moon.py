"""MOON."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms.moon import Moon, contrast, features
from fednet.registry import task
from tests.algorithms.small import Federation, Net, Projected, batch, build, distance, same


def test_contrast_is_a_softmax_over_the_two_similarities():
    z = torch.tensor([[1.0, 0.0]])
    # s = 1 and 0; tau 0.5: e^2 / (e^2 + e^0)
    near, far = (
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[0.0, 1.0]]),
    )
    assert contrast(z, near, far, 0.5).item() == pytest.approx(
        -math.log(math.exp(2) / (math.exp(2) + 1)), rel=1e-6
    )


def test_contrast_is_log_2_without_a_gradient_where_both_models_are_the_same():
    z = torch.randn(5, 7, generator=seeds.torch_rng(0, "z")).requires_grad_()
    other = torch.randn(5, 7, generator=seeds.torch_rng(1, "z"))
    value = contrast(z, other, other, 0.5)
    value.backward()
    assert value.item() == pytest.approx(math.log(2), rel=1e-6)
    assert z.grad.abs().max() < 1e-7


@pytest.mark.parametrize(
    ("kind", "feature", "width"),
    [
        (Net, "projection", lambda m, x: m.features(x)),  # no projection: the penultimate layer
        (Net, "penultimate", lambda m, x: m.features(x)),
        (Projected, "projection", lambda m, x: m.projection(x)),
        (Projected, "penultimate", lambda m, x: m.encode(x)),
    ],
)
def test_the_feature_is_the_projection_where_there_is_one(kind, feature, width):
    model, (x, _) = build(0, kind), batch()
    z, outputs = features(model, x, feature)
    assert torch.equal(z, width(model, x))
    assert torch.equal(outputs, model(x))
    assert torch.equal(features(model, x, feature, outputs=False)[0], z)


def test_a_batch_of_one_sample_works():
    x, _ = batch(n=1)
    assert features(build(0, Net), x, "projection")[0].shape == (1, 8)


def test_a_client_first_seen_late_has_no_contrast_either():
    a = Federation("moon", mu=5).rounds(2, (0, 1))
    start = a.server.x
    a.rounds(1, (2,))
    assert same(a.ups[2].x, a.host(2).train(start).x)


def test_a_client_keeps_the_model_it_trained_last():
    f = Federation("moon").rounds(1, (0, 1))
    v = f.clients[0].v
    assert same(v, f.ups[0].x)
    f.rounds(1, (1,))
    assert f.clients[0].v is v
    assert not same(f.clients[1].v, v)


def test_the_loss_is_cross_entropy_and_mu_times_contrast_against_frozen_models():
    (x, y), model, glob, prev = batch(), build(0, Net), build(1, Net), build(2, Net)
    got = Moon(Moon.Config(mu=3.0, tau=0.7)).loss(task.get("classification")(), glob, prev)(
        model, x, y
    )
    z, g, v = (m.features(x) for m in (model, glob, prev))
    s_g, s_v = F.cosine_similarity(z, g), F.cosine_similarity(z, v)
    l_con = -torch.log(torch.exp(s_g / 0.7) / (torch.exp(s_g / 0.7) + torch.exp(s_v / 0.7))).mean()
    assert got.item() == pytest.approx((F.cross_entropy(model(x), y) + 3 * l_con).item(), rel=1e-5)
    got.backward()
    assert all(p.grad is None for m in (glob, prev) for p in m.parameters())


def test_feature_and_tau_change_what_is_learned():
    runs = [
        Federation("moon", kind=Projected, **{"mu": 5, **o}).rounds(2).server.x
        for o in ({}, {"feature": "penultimate"}, {"tau": 2.0}, {"mu": 1.0})
    ]
    assert all(distance(a, runs[0]) > 1e-6 for a in runs[1:])


@pytest.mark.parametrize("feature", ["projection", "penultimate"])
def test_each_batch_counts_once_in_the_statistics_of_batch_norm(feature):
    f = Federation("moon", kind=Projected, batch_norm=True, feature=feature)
    f.rounds(1, (0,))
    before = int(f.downs[0].x.counters[0])
    f.rounds(1, (0,))  # the second participation has a contrast
    assert int(f.ups[0].x.counters[0]) - int(f.downs[0].x.counters[0]) == f.ups[0].run.steps
    assert before == 0
