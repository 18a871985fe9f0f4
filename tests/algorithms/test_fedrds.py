"""FedRDS."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from fednet import registry
from fednet.algorithms.base import Samples
from fednet.algorithms.fedrds import FedRDS
from tests.algorithms.harness import begun, same
from tests.algorithms.reference import LR, Reference, agrees


@pytest.mark.usefixtures("readings")
def test_sigma_comes_from_the_model_after_the_last_participation():
    f = begun("fedrds-eq4").rounds(1, (0, 1))
    assert f.hosts[0].reported["sigma"] == pytest.approx(math.e)
    v = f.clients[0].v
    assert same(v, f.ups[0].x)
    f.rounds(1, (1,))
    assert f.clients[0].v is v
    f.rounds(1, (0,))
    cosine = torch.cosine_similarity(v.vector.double(), f.downs[0].x.vector.double(), dim=0)
    assert f.hosts[0].reported["sigma"] == pytest.approx(math.exp(cosine))
    assert f.hosts[0].reported["sigma"] < math.e


@pytest.mark.usefixtures("readings")
@pytest.mark.parametrize(("name", "factor"), [("fedrds-eq4", 1.0), ("fedrds-scaled", 0.5)])
def test_sigma_follows_the_angle(name, factor):
    w = begun("fedavg").server.x
    kind = registry.algorithm.get(name)
    method = kind(kind.Config(sigma0=0.5))
    assert method.sigma(kind.Client(), w) == pytest.approx(factor * math.e)
    assert method.sigma(kind.Client(v=-w), w) == pytest.approx(factor / math.e, rel=1e-6)


def test_sigma_is_a_constant_that_no_state_of_a_client_changes():
    f = begun("fedrds", sigma0=0.3).rounds(2)
    assert {host.reported["sigma"] for host in f.hosts.values()} == {0.3}


def test_the_pull_is_that_of_sigma():
    f = begun("fedrds").rounds(2)
    i = 2
    more = Samples(f.clients[i].x, f.clients[i].y)
    again = f.host(i).train(f.downs[i].x, proximal=f.hosts[i].reported["sigma"], more=more)
    assert same(f.ups[i].x, again.x)


# -- shared samples --------------------------------------------------------------------------------
def test_each_client_gets_its_part_of_the_public_set_once_and_trains_on_it():
    f = begun("fedrds", alpha=0.3).rounds(2)
    for i, n in enumerate((50, 34, 24, 42)):
        samples = f.enrolments[i].samples
        assert len(samples) == 12  # floor(0.3 * 40)
        assert samples.x.shape == (12, 1, 16, 16)
        assert f.ups[i].run.n == n + 12
        assert f.clients[i].y is samples.y
    assert {type(e).kinds().pop() for e in f.enrolments.values()} == {"shared"}
    assert FedRDS.Up.kinds() == {"state", "statistics"}


@pytest.mark.usefixtures("readings")
def test_a_draw_is_a_client_s_own_or_the_same_for_all_whenever_a_client_joins():
    def rows(late, name="fedrds"):
        f = begun(name)
        f = f.rounds(1, (0, 1)).rounds(1, (2, 3)) if late else f.rounds(1)
        return [f.enrolments[i].samples.x for i in range(4)]

    assert all(map(torch.equal, rows(True), rows(False)))
    assert not torch.equal(*rows(False)[:2])
    first = rows(False, "fedrds-one-draw")[0]
    assert all(torch.equal(own, first) for own in rows(True, "fedrds-one-draw"))


def test_shared_samples_are_pairs_of_the_public_set_none_twice():
    f = begun("fedrds")
    x, y = f.federation.public_data.train
    known = {(image.numpy().tobytes(), int(label)) for image, label in zip(x, y)}
    samples = f.rounds(1).enrolments[0].samples
    shared = {(a.numpy().tobytes(), int(b)) for a, b in zip(samples.x, samples.y)}
    assert shared <= known
    assert len(shared) == len(samples) == 20


def test_data_sharing_alone_is_fedavg_on_private_and_shared_samples():
    f = begun("fedrds", sigma0=0, normalise=lambda x, _: x / 2).rounds(1)
    x, y = f.host(3).data
    more = f.enrolments[3].samples
    host = f.host(3)
    host.data = (torch.cat([x, more.x / 2]), torch.cat([y, more.y]))
    assert same(f.ups[3].x, host.train(f.downs[3].x).x)


def test_pretraining_starts_from_a_model_that_the_server_trained_on_all_public_samples():
    """Two epochs of 40 samples in batches of 64 are two steps on all of them."""
    f = begun("fedrds", pretrain_epochs=2)
    x, y = f.federation.public_data.train
    reference = Reference(f.federation)
    w = reference.start
    for _ in range(2):
        loss = F.cross_entropy(reference.load(w)(x.double()), y)
        slopes = torch.autograd.grad(loss, list(reference.module.parameters()))
        w = w - LR * parameters_to_vector(slopes)
    assert agrees(f.server.x, w)
    assert same(begun("fedrds").server.x, f.setting.initial)
