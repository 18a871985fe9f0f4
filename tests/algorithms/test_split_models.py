"""LG-FedAvg, FedPer and FedRep."""

from __future__ import annotations

import pytest
import torch

from fednet.algorithms import fedrep
from fednet.algorithms.base import LocalRun
from fednet.config import from_mapping
from tests.algorithms.harness import begun, same
from tests.algorithms.reference import LR, Reference, agrees, whole_batches

HEAD = {"head.weight", "head.bias"}
LINEAR = {"body.fc2.weight", "body.fc2.bias", *HEAD}
ALL = {"body.fc1.weight", "body.fc1.bias", *LINEAR}


def names(x):
    return set(x.layout.names)


@pytest.mark.parametrize(
    ("method", "options", "crosses"),
    [
        ("lgfedavg", {}, LINEAR),
        ("lgfedavg", {"global_layers": 1}, HEAD),
        ("lgfedavg", {"global_layers": 0}, set()),
        ("lgfedavg", {"global_layers": "all"}, ALL),
        ("fedper", {}, ALL - HEAD),
        ("fedper", {"personal_layers": 2}, ALL - LINEAR),
        ("fedper", {"personal_layers": 4}, set()),  # there are three
        ("fedper", {"personal_layers": 0}, ALL),
        ("fedrep", {}, ALL - HEAD),
        ("fedbn", {"model": {"name": "mlp", "hidden": [16, 8], "norm": "batch"}}, ALL),
    ],
)
def test_only_the_declared_layers_cross_both_ways_and_the_rest_is_the_clients(
    method, options, crosses
):
    f = begun(method, **options).rounds(2)
    every = names(f.setting.initial)
    own = {"lgfedavg": "own", "fedbn": "bn"}.get(method, "head")
    for i in range(4):
        assert names(f.downs[i].x) == names(f.ups[i].x) == crosses
        assert names(getattr(f.clients[i], own)) == every - crosses
        assert f.ups[i].kinds() == {"state", "statistics"}
        whole = f.personal(i)  # the whole local model as it was trained
        assert names(whole) == every
        assert same(whole.select(f.setting.shared), f.ups[i].x)
        assert same(whole.select(getattr(f.clients[i], own).layout), getattr(f.clients[i], own))
    start = f.setting.initial.merge(getattr(f.clients[2], own)).merge(f.server.x)
    f.rounds(1)
    if method != "fedrep":  # which trains twice
        assert same(f.locals[2], f.host(2).train(start).x)


# -- FedRep ----------------------------------------------------------------------------------------
def test_fedrep_without_head_epochs_leaves_the_head_alone_to_the_bit():
    f = begun("fedrep", head_epochs=0, train={"momentum": 0.9, "weight_decay": 0.1}).rounds(2)
    assert same(f.clients[0].head, f.setting.initial.select(f.clients[0].head.layout))
    assert not same(f.ups[0].x, f.downs[0].x)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_fedrep_without_body_epochs_returns_the_base_to_the_bit(norm):
    train = {"momentum": 0.9, "weight_decay": 0.1}
    f = begun("fedrep", body_epochs=0, model={"name": "mlp", "norm": norm}, train=train)
    x0 = f.server.x
    f.rounds(2)
    assert same(f.ups[1].x, x0)  # BatchNorm's statistics too: the frozen base is in eval mode
    assert same(f.server.x, x0)
    assert not same(f.clients[1].head, f.setting.initial.select(f.clients[1].head.layout))


@pytest.mark.parametrize(
    ("train", "options"),
    [
        ({"epochs": 3}, {}),  # all but one are the head's
        ({"epochs": 9}, {"head_epochs": 2}),
        ({"steps": 3}, {"head_epochs": 4, "body_epochs": 2}),
    ],
)
def test_fedrep_of_two_steps_of_the_head_and_one_of_the_body_recomputed_in_float64(train, options):
    f = whole_batches(train=train, rounds=1)
    run = f.run("fedrep", **options)
    reference = Reference(f)
    head = (torch.arange(len(reference.start)) >= len(run.x.vector)).double()  # it comes last
    bases = []
    sizes = [len(part) for part in f.parts]
    for k in range(4):
        w = reference.start
        losses = []
        for free in (head, head, 1 - head):
            losses.append(reference.loss(w, k))
            w = w - LR * free * reference.gradient(w, k)
        assert agrees(run.locals[k], w)
        assert run.ups[k].run == LocalRun(sizes[k], 3, pytest.approx(sum(losses) / 3, rel=1e-5))
        bases.append(w[: len(run.x.vector)])
    assert agrees(run.x, sum(n * w for n, w in zip(sizes, bases)) / sum(sizes))


def test_fedrep_counts_steps_where_the_epochs_of_its_head_are_given():
    from_mapping({"algorithm": {"name": "fedrep", "head_epochs": 1}, "train": {"steps": 7}})


@pytest.mark.parametrize(
    ("steps", "h", "b", "parts"),
    [
        (10, 4, 1, (8, 2)),
        (7, 1, 1, (4, 3)),
        (2, 9, 1, (1, 1)),
        (2, 1, 9, (1, 1)),
        (1, 4, 1, (1, 0)),
        (5, 0, 1, (0, 5)),
        (5, 1, 0, (5, 0)),
        (5, 0, 0, (0, 0)),
    ],
)
def test_fedrep_divides_the_steps_as_the_epochs(steps, h, b, parts):
    assert fedrep.divide_steps(steps, h, b) == parts
