"""FedBN and FedBABU: what crosses, what stays, and what is trained."""

from __future__ import annotations

import torch

from tests.algorithms.harness import Federation, images


def pictured(**changes):
    x, y = images(24, shape=(3, 32, 32))
    parts = [range(12), range(12, 24)]
    model = {"name": "vgg11", "norm": "batch", "width": 8}
    return Federation(clients=2, model=model, data=(x, y), parts=parts, **changes)


def test_fedbn_keeps_all_of_batch_normalisation_at_the_client():
    run = pictured(rounds=1).run("fedbn")
    norms = [n for n, m in run.federation.build(0).named_modules() if "BatchNorm" in str(type(m))]
    crossed = set(run.servers[-1].x.layout.names)
    assert norms
    assert not any(name.startswith(tuple(f"{n}." for n in norms)) for name in crossed)
    own = run.clients[0].bn
    leaves = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert set(own.layout.names) == {f"{n}.{leaf}" for n in norms for leaf in leaves}
    assert not torch.equal(own.vector, run.clients[1].bn.vector)


def test_fedbn_judges_a_client_with_its_own_normalisation():
    run = pictured(rounds=2).run("fedbn")
    judged = run.algorithm.personal_model(run.clients[1], run.locals[1], run.site(1))
    for name, value in run.clients[1].bn.items():
        assert torch.equal(judged[name], value), name
