"""FedRDS."""

from __future__ import annotations

import math

import pytest
import torch

from fednet.algorithms.base import Samples
from fednet.algorithms.fedrds import FedRDS, cosine, shared_rows
from tests.algorithms.small import Federation, distance, normalise, same

FIXED_0 = {"sigma_mode": "fixed", "sigma0": 0}


def sigma(cos, **options):
    """sigma for a previous model at that cosine to the global one."""
    f = Federation("fedavg", public=0)
    w = f.server.x
    across = w.with_vector(torch.zeros_like(w.vector))
    across.vector[0], across.vector[1] = w.vector[1], -w.vector[0]  # at right angles to w
    v = {1: w, 0: across, -1: -w, None: None}[cos]
    return FedRDS(FedRDS.Config(**options)).sigma(v, w)


@pytest.mark.parametrize(("cos", "factor"), [(None, math.e), (1, math.e), (0, 1), (-1, 1 / math.e)])
def test_sigma_follows_the_angle_between_previous_and_global_model(cos, factor):
    assert sigma(cos, sigma_mode="eq4") == pytest.approx(factor, rel=1e-6)
    assert sigma(cos) == 0.01  # the paper's tuned constant
    assert sigma(cos, sigma_mode="scaled") == pytest.approx(0.01 * factor, rel=1e-6)
    assert sigma(cos, sigma_mode="scaled", sigma0=0.5) == pytest.approx(0.5 * factor, rel=1e-6)
    assert sigma(cos, sigma_mode="eq4", sigma_sign=-1) == pytest.approx(1 / factor, rel=1e-6)
    assert sigma(cos, sigma_mode="fixed", sigma0=0.3) == 0.3


def test_sigma_does_not_change_when_the_previous_model_is_scaled_and_a_zero_model_has_cosine_0():
    f = Federation("fedavg", public=0).rounds(1)
    w, v = f.setting.initial, f.server.x
    assert cosine(v * 4.0, w) == pytest.approx(cosine(v, w), rel=1e-12)
    assert cosine(v.zeros_like(), w) == 0


def test_sigma_comes_from_the_model_after_the_last_participation():
    f = Federation("fedrds", sigma_mode="eq4").rounds(1, (0, 1))
    assert f.said[0]["sigma"] == pytest.approx(math.e)
    v = f.clients[0].v
    assert same(v, f.ups[0].x)
    f.rounds(1, (1,))
    assert f.clients[0].v is v
    f.rounds(1, (0,))
    assert f.said[0]["sigma"] == pytest.approx(math.exp(cosine(v, f.downs[0].x)))
    assert f.said[0]["sigma"] < math.e


def test_the_pull_is_that_of_sigma():
    f = Federation("fedrds").rounds(2)
    i = 2
    more = Samples(f.clients[i].x, f.clients[i].y)
    again = f.host(i).train(f.downs[i].x, proximal=f.said[i]["sigma"], more=more)
    assert same(f.ups[i].x, again.x)


# -- shared samples --------------------------------------------------------------------------------
def test_each_client_gets_its_part_of_the_public_set_once_and_trains_on_it():
    f = Federation("fedrds", alpha=0.3, public=43).rounds(2)
    for i, n in enumerate((50, 34, 24, 42)):
        samples = f.enrolments[i].samples
        assert len(samples) == 12  # floor(0.3 * 43)
        assert samples.x.dtype == torch.uint8
        assert samples.x.shape == (12, 1, 8, 8)
        assert f.ups[i].run.n == n + 12
        assert f.clients[i].y is samples.y
    assert {type(e).kinds().pop() for e in f.enrolments.values()} == {"shared"}
    assert FedRDS.Up.kinds() == {"state", "statistics"}


@pytest.mark.parametrize(
    ("n", "alpha", "size"), [(10, 0.5, 5), (7, 0.5, 3), (10, 0.0, 0), (10, 1.0, 10)]
)
def test_a_draw_is_the_floor_of_alpha_n_rows_without_repeats(n, alpha, size):
    rows = shared_rows(n, alpha, key=5, client=3).tolist()
    assert len(rows) == size
    assert rows == sorted(set(rows))
    assert set(rows) <= set(range(n))


def test_draws_differ_by_client_or_are_the_same_for_all_whenever_a_client_joins():
    def rows(f):
        return [f.enrolments[i].samples.x for i in range(4)]

    late = Federation("fedrds").rounds(1, (0, 1)).rounds(1, (2, 3))
    early = Federation("fedrds").rounds(1)
    assert all(torch.equal(a, b) for a, b in zip(rows(late), rows(early)))
    assert not torch.equal(rows(early)[0], rows(early)[1])
    alike = rows(Federation("fedrds", shared_draw="same").rounds(1, (0, 1)).rounds(1, (2, 3)))
    assert all(torch.equal(a, alike[0]) for a in alike)
    other = rows(Federation("fedrds", shared_draw="same", seed=4).rounds(1))
    assert not torch.equal(other[0], alike[0])


def test_shared_samples_are_pairs_of_the_public_set():
    f = Federation("fedrds").rounds(1)
    x, y = f.federation.public_data.train
    known = {(image.numpy().tobytes(), int(label)) for image, label in zip(x, y)}
    assert {(a.numpy().tobytes(), int(b)) for a, b in zip(f.clients[0].x, f.clients[0].y)} <= known


def test_data_sharing_alone_is_fedavg_on_private_and_shared_samples():
    f = Federation("fedrds", **FIXED_0).rounds(1)
    x, y = f.host(3).data
    more = f.enrolments[3].samples
    host = f.host(3)
    host.data = (torch.cat([x, normalise(more.x)]), torch.cat([y, more.y]))
    assert same(f.ups[3].x, host.train(f.downs[3].x).x)


def test_a_share_of_nothing_sends_nothing():
    f = Federation("fedrds", alpha=0.0).rounds(1)
    assert set(f.enrolments.values()) == {None}
    assert f.ups[0].run.n == 50


def test_without_a_public_set_it_says_that_only_regularisation_is_left():
    f = Federation("fedrds", public=0).rounds(1)
    assert "regularisation alone" in f.io.warnings[0]
    assert f.enrolments == dict.fromkeys(range(4))
    assert not f.rounds(1).io.warnings


def test_n_k_of_the_mean_counts_shared_samples():
    f = Federation("fedrds", alpha=0.5).rounds(1)
    weights = [50 + 20, 34 + 20, 24 + 20, 42 + 20]
    total = sum(w * f.ups[i].x.vector.double() for i, w in enumerate(weights))
    assert torch.allclose(f.server.x.vector.double(), total / sum(weights), rtol=1e-6)
    assert distance(Federation("fedrds", weighting="uniform").rounds(1).server.x, f.server.x) > 1e-6


def test_pretraining_starts_from_a_model_fitted_on_the_public_set():
    f = Federation("fedrds", pretrain_epochs=2)
    assert not same(f.server.x, f.setting.initial)
    x, y = f.federation.public_data.train
    fitted = f.io.fit(f.setting.initial, Samples(normalise(x), y), epochs=2, lr=0.1, batch_size=64)
    assert same(f.server.x, fitted)
    assert same(Federation("fedrds").server.x, f.setting.initial)
