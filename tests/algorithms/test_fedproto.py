"""FedProto: prototypes by hand, a round in float64, and what is judged."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from fednet.algorithms.fedproto import prototypes, within
from tests.algorithms.harness import same
from tests.algorithms.reference import Reference, agrees, whole_batches


class Identity(torch.nn.Module):
    def features(self, x):
        return x


def test_a_prototype_is_the_mean_of_its_classs_features():
    x = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]])
    c, n = prototypes(Identity(), x, torch.tensor([1, 1, 2]), 4)
    assert c.tolist() == [[0.0, 0.0], [2.0, 1.0], [5.0, 5.0], [0.0, 0.0]]
    assert n.tolist() == [0, 2, 1, 0]


def parts(module, x):
    """(features, logits) of the reference's module."""
    f = module.features(x)
    return f, module.head(f)


def test_two_rounds_recomputed_in_float64():
    f = whole_batches(rounds=2)
    run = f.run("fedproto", lambda_=2.0)
    reference = Reference(f)
    first = [reference.descend(reference.start, k, 1) for k in range(4)]
    sums, counts = 0, 0
    for k, w in enumerate(first):
        x, y = reference.samples(k)
        with torch.no_grad():
            features, _ = parts(reference.load(w), x)
        hot = F.one_hot(y, f.classes).double()
        sums, counts = sums + hot.T @ features, counts + hot.sum(0)
    c = sums / counts.unsqueeze(1)
    torch.testing.assert_close(run.servers[1].c, c, rtol=1e-5, atol=1e-6)

    def loss(module, x, y):
        features, z = parts(module, x)
        return F.cross_entropy(z, y) + 2.0 * ((features - c[y]) ** 2).mean()

    for k in range(4):
        assert agrees(run.clients[k].w, reference.descend(first[k], k, 1, loss=loss))


def test_counts_beyond_what_a_clients_samples_count_for_are_less_in_proportion():
    said = torch.tensor([30, 0, 10])
    assert within(said, 40).tolist() == [30, 0, 10]
    assert within(said, 20).tolist() == [15, 0, 5]  # half of them, by round.max_share
    assert within(torch.tensor([2**62, 2**62, 0]), 100).tolist() == [50, 50, 0]


def test_a_client_that_claims_a_million_samples_of_a_class_counts_as_the_one_it_is():
    f = whole_batches(rounds=1)
    run = f.run("fedproto")
    fold = run.algorithm.start(run.servers[0], 0)
    for up in run.ups.values():
        lying = dataclasses.replace(up, n=up.n * 1_000_000)
        fold = run.algorithm.fold(fold, run.servers[0], 0, lying, None)
    made = run.algorithm.finish(fold, run.servers[0], None, None)
    torch.testing.assert_close(made.c, run.servers[1].c)


def test_the_authors_mean_counts_every_owner_the_same():
    f = whole_batches(rounds=1)
    run = f.run("fedproto", weighting="uniform")
    ups = list(run.ups.values())
    owners = sum((up.n > 0).long() for up in ups)
    mean = sum(up.c.double() * (up.n > 0).unsqueeze(1) for up in ups) / owners.unsqueeze(1)
    torch.testing.assert_close(run.servers[1].c, mean)


def test_a_class_that_nobody_of_a_round_has_keeps_its_prototype():
    f = whole_batches(rounds=2)
    run = f.run("fedproto", cohorts=[[0, 1, 2, 3], [0]])
    lacking = run.ups[0].n == 0
    kept = torch.equal(run.servers[2].c[lacking], run.servers[1].c[lacking])
    assert kept
    assert bool((run.servers[2].known == 1).all())


def test_without_prototypes_weight_it_is_training_alone():
    f = whole_batches()
    proto, alone = f.run("fedproto", lambda_=0.0), f.run("local", init="shared")
    for k in range(4):
        assert same(proto.clients[k].w, alone.clients[k].x)


@pytest.mark.parametrize("predict", ["prototypes", "head"])
def test_a_client_is_judged_by_the_nearest_prototype_or_by_its_head(predict):
    f = whole_batches(rounds=2)
    run = f.run("fedproto", predict=predict)
    host, state = run.site(1), run.clients[1]
    judged = host.evaluate(run.algorithm.personal(state, state.w, host))
    x, y = f.samples(1)
    model = host.frozen(state.w)
    with torch.no_grad():
        if predict == "head":
            guess = model(x).argmax(1)
        else:
            guess = torch.cdist(model.features(x), state.c).argmin(1)
    assert judged.accuracy == pytest.approx(float((guess == y).float().mean()))
