"""FedProto: prototypes by hand, a round in float64, and what is judged."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from fednet.algorithms.fedproto import FedProto
from fednet.errors import ConfigError
from tests.algorithms.harness import Federation, images, same
from tests.algorithms.reference import Reference, agrees, whole_batches


def parts(module, x):
    """(features, logits) of the reference's module."""
    f = module.features(x)
    return f, module.head(f)


def test_two_rounds_recomputed_in_float64():
    f = whole_batches(rounds=2)
    run = f.run("fedproto", **{"lambda": 2.0})
    reference = Reference(f)
    first = [reference.descend(reference.start, k, 1) for k in range(4)]
    sums = 0
    counts = 0
    for k, w in enumerate(first):
        x, y = reference.samples(k)
        with torch.no_grad():
            features, _ = parts(reference.load(w), x)
        hot = F.one_hot(y, f.classes).double()
        sums = sums + hot.T @ features
        counts = counts + hot.sum(0)
    c = sums / counts.unsqueeze(1)
    torch.testing.assert_close(run.servers[1].c.double(), c, rtol=1e-5, atol=1e-6)

    def loss(module, x, y):
        features, z = parts(module, x)
        return F.cross_entropy(z, y) + 2.0 * ((features - c[y]) ** 2).mean()

    for k in range(4):
        assert agrees(run.clients[k].w, reference.descend(first[k], k, 1, loss=loss))


def test_a_client_that_claims_a_million_samples_of_a_class_counts_as_the_one_it_is():
    f = whole_batches(rounds=1)
    run = f.run("fedproto")
    fold = run.algorithm.init_accumulator(run.servers[0], 0)
    for client, up in run.ups.items():
        said = dataclasses.replace(up, n=up.n * (1_000_000 if client == 0 else 1))
        fold = run.algorithm.accumulate(fold, run.servers[0], client, said, None)
    made = run.algorithm.server_update(fold, run.servers[0], None, None)
    torch.testing.assert_close(made.c, run.servers[1].c)


def test_the_authors_mean_counts_every_owner_the_same():
    f = whole_batches(rounds=1)
    run = f.run("fedproto", weighting="uniform")
    ups = list(run.ups.values())
    owners = sum((up.n > 0).long() for up in ups)
    mean = sum(up.c.double() * (up.n > 0).unsqueeze(1) for up in ups) / owners.unsqueeze(1)
    torch.testing.assert_close(run.servers[1].c, mean.float())


def few_classes(rounds: int) -> Federation:
    """Client k has samples of classes k and k + 1 alone, of five."""
    _, y = images(classes=5)
    parts = [torch.nonzero((y == k) | (y == k + 1)).flatten().numpy() for k in range(4)]
    return Federation(parts=parts, rounds=rounds)


def test_a_class_that_nobody_of_a_round_has_keeps_its_prototype():
    run = few_classes(rounds=2).run("fedproto", cohorts=[[0, 1, 2, 3], [0]])
    first, second = run.servers[1:]
    assert first.known.tolist() == second.known.tolist() == [1, 1, 1, 1, 1]
    assert torch.equal(second.c[2:], first.c[2:])
    assert bool((second.c[2:].norm(dim=1) > 0).all())
    assert not torch.equal(second.c[:2], first.c[:2])


def test_a_class_that_nobody_had_yet_is_unknown_and_predicted_by_nobody():
    run = few_classes(rounds=2).run("fedproto", cohorts=[[0], [0]])
    assert run.servers[1].known.tolist() == [1, 1, 0, 0, 0]
    outputs = run.algorithm.personal_model(run.clients[0], run.clients[0].w, run.site(0))
    x, _ = run.federation.samples(3)
    assert set(outputs(x).argmax(1).tolist()) <= {0, 1}


@pytest.mark.parametrize("predict", ["prototypes", "own_prototypes"])
def test_a_client_that_got_no_prototypes_yet_predicts_by_its_head(predict):
    run = few_classes(rounds=1).run("fedproto", predict=predict)
    for k, state in run.clients.items():
        assert state.known.tolist() == [0, 0, 0, 0, 0]
        assert run.algorithm.personal_model(state, state.w, run.site(k)) is state.w


@pytest.mark.parametrize("predict", ["prototypes", "own_prototypes", "head"])
def test_a_client_predicts_by_the_nearest_prototype_or_by_its_head(predict):
    """own_prototypes: of the classes that it has samples of."""
    run = few_classes(rounds=2).run("fedproto", predict=predict)
    x = run.federation.x
    for k, state in run.clients.items():
        evaluated = run.personal(k)
        if predict == "head":
            assert same(evaluated, state.w)
            continue
        candidates = [k, k + 1] if predict == "own_prototypes" else [*range(5)]
        apart = torch.cdist(run.host(k).frozen(state.w).features(x), state.c[candidates])
        assert torch.equal(evaluated(x).argmax(1), candidates[0] + apart.argmin(1))


def test_state_that_is_shared_must_be_declared_on_both_sides_and_on_the_way():
    with pytest.raises(ConfigError, match=r"Wrong\.shared_state names n, which"):

        class Wrong(FedProto):
            shared_state = ("n",)
