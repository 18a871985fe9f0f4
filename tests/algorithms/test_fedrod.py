"""FedRoD in linear mode."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms.fedrod import both_losses
from tests.algorithms.harness import Federation, begun, same


def p_head(seed=0):
    g = seeds.torch_rng(seed, "p")
    w = torch.randn(5, 8, generator=g)
    b = torch.randn(5, generator=g)
    return {"w": w.requires_grad_(), "b": b.requires_grad_()}


def test_each_loss_trains_its_own_part():
    f = Federation(model={"name": "mlp", "hidden": [8]})
    p = p_head()
    model = f.build(0)
    x, y = f.samples(0)
    prior = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).log()
    value = both_losses(prior, "w", "b")(model, x, y, p)
    value.backward()
    got = {name: t.grad.clone() for name, t in model.named_parameters()}
    model.zero_grad()
    z = model(x)
    shared = F.cross_entropy(z + prior, y)
    shared.backward()
    assert value.item() == shared.item()  # what a client reports
    for name, t in model.named_parameters():
        assert torch.equal(got[name], t.grad)
    w, b = (t.detach().clone().requires_grad_() for t in (p["w"], p["b"]))
    F.cross_entropy(z.detach() + model.features(x).detach() @ w.T + b, y).backward()
    assert torch.allclose(p["w"].grad, w.grad, atol=1e-7)
    assert torch.allclose(p["b"].grad, b.grad, atol=1e-7)


def test_the_personal_prediction_is_the_sum_of_both_heads_without_the_prior():
    f = begun("fedrod").rounds(2)
    x, _ = f.host(1).data
    outputs = f.personal(1)(x)
    model = f.federation.build(0)
    p = f.clients[1].p
    f.locals[1].into(model)
    h = model.features(x)
    assert torch.allclose(
        outputs, model.head(h) + h @ p["head.weight"].T + p["head.bias"], atol=1e-6
    )
    counts = f.host(1).evaluate(f.personal(1), f.host(1).data)
    assert counts.n == 34


def test_the_personal_head_goes_on_from_round_to_round_and_never_crosses():
    f = begun("fedrod").rounds(1)
    first = f.clients[0].p
    f.rounds(1)
    assert not same(f.clients[0].p, first)
    for i in range(4):
        assert f.ups[i].x.layout == f.downs[i].x.layout == f.setting.layout
        assert f.ups[i].kinds() == {"state", "statistics"}
