"""Clients trained as one: what each would have become by itself, and the same bits in any
company.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import sys

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fednet import models, registry, seeds
from fednet.algorithms.base import Samples
from fednet.config import TrainSection
from fednet.data.base import Data
from fednet.data.federation import Site
from fednet.errors import ConfigError
from fednet.tensors import Layout, Tensors, by_name, values
from fednet.training import packed
from fednet.training.loop import Descent, Hooks, descend
from fednet.training.scratch import Scratch
from tests.algorithms import harness
from tests.algorithms.harness import Federation, close, images

# Of unlike numbers of batches; the third has fewer than one.
SHAPE = (1, 16, 16)
CLASSES = 5
SIZES = (40, 33, 7, 64)
TASK = registry.task.get("classification")()
RECIPE = TrainSection(lr=0.05, epochs=2, batch_size=16)


def build(name: str = "lenet5") -> nn.Module:
    return models.build({"name": name}, SHAPE, CLASSES, 0)


def weights(layout: Layout, k: int, size: float = 0.1) -> Tensors:
    draw = torch.Generator().manual_seed(k)
    return Tensors.zeros(layout).with_vector(
        torch.randn(layout.parameters.nbytes // 4, generator=draw) * size
    )


def client(
    k: int,
    name: str = "lenet5",
    recipe: TrainSection = RECIPE,
    channels_last: bool = False,
    **hooks,
) -> Descent:
    """Client k's descent, with data, weights and hooks of its own."""
    module = build(name)
    layout = Layout.of(module)
    scratch = Scratch(lambda: module, layout, channels_last=channels_last)
    own = {
        key: weights(layout, 100 * i + k, 0.01) if value is ... else value
        for i, (key, value) in enumerate(hooks.items(), 1)
    }
    return Descent(
        scratch,
        images(SIZES[k], CLASSES, SHAPE, seed=k + 1),
        recipe,
        seeds.rng(0, "order", 1, k),
        Hooks(**own),
        start=weights(layout, k),
    )


def alone(lane: Descent):
    """Trains it by itself."""
    lane.scratch.load(lane.start)
    run = descend(lane, TASK)[0]
    lane.after = lane.scratch.values()
    return run


def bits(lane: Descent) -> str:
    assert lane.error is None
    return lane.after.sha256() + hashlib.sha256(repr(lane.run).encode()).hexdigest()


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "whole"])
@pytest.mark.parametrize(
    ("recipe", "hooks"),
    [
        ({}, {}),
        ({"momentum": 0.9, "weight_decay": 0.01}, {}),
        ({"clip_norm": 0.3, "momentum": 0.5}, {}),
        ({}, {"proximal": 0.5}),
        ({"momentum": 0.9}, {"proximal": 0.5, "toward": ...}),
        ({"weight_decay": 0.1}, {"scale_grad": 0.5, "add_to_grad": ..., "proximal": 0.1}),
        ({"momentum": 0.9}, {"add_to_step": ...}),
        ({}, {"only": ["head.weight", "head.bias"]}),
    ],
)
def test_a_pack_comes_to_what_each_comes_to_by_itself(recipe, hooks, apart, monkeypatch):
    if not apart:  # as on a GPU
        monkeypatch.setattr(packed, "APART", ())
    recipe = msgspec.structs.replace(RECIPE, **recipe)
    lanes, others = ([client(k, recipe=recipe, **hooks) for k in range(3)] for _ in range(2))
    packed.descend([lane for lane in lanes if lane.kind == lanes[0].kind], 4, TASK)
    # The one of fewer samples than a batch.
    packed.descend([lane for lane in lanes if lane.kind != lanes[0].kind], 4, TASK)
    for lane, other in zip(lanes, others):
        course = alone(other)
        assert lane.run.steps == course.steps
        assert lane.run.loss == pytest.approx(course.loss, rel=1e-5)
        moved = other.after - other.start
        assert close(lane.after - lane.start, moved, 2e-4)
        assert moved.norm() > 0
        assert lane.order.integers(1 << 30) == other.order.integers(1 << 30)  # as many draws


class Scaled(nn.Module):
    """One of its parameters is a number without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.head(x.flatten(1)) * self.scale


def test_a_parameter_that_is_one_number_is_clipped_with_the_others(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "build", lambda name: Scaled())
    recipe = msgspec.structs.replace(RECIPE, clip_norm=0.1)
    lane, other = (client(0, recipe=recipe) for _ in range(2))
    beside = client(1, recipe=recipe)
    packed.descend([lane, beside], 3, TASK)
    alone(other)
    assert close(lane.after - lane.start, other.after - other.start, 2e-4)


def test_kernels_whose_channels_lie_innermost_are_read_and_written_right():
    lanes = [client(k, channels_last=last) for k, last in ((0, True), (1, True), (0, False))]
    packed.descend(lanes, 3, TASK)
    assert bits(lanes[0]) == bits(lanes[2])


def test_models_that_are_one_tensor_for_all_lanes_are_loaded_as_copies_of_it_are():
    start = weights(Layout.of(build()), 0)
    found = []
    for starts in ([start] * 4, [start.clone() for _ in range(4)]):
        lanes = [client(k) for k in (0, 1, 3)]
        for lane, begins in zip(lanes, starts):
            lane.start = begins
        packed.descend(lanes, 4, TASK)
        found.append([bits(lane) for lane in lanes])
    assert found[0] == found[1]
    assert start.sha256() == weights(start.layout, 0).sha256()


@pytest.mark.parametrize("x", ["bytes", "floats", "two"])
@pytest.mark.parametrize("chunk", [1, packed.CHUNK_BYTES])
def test_samples_gathered_from_one_dataset_are_those_of_each_client(x, chunk, monkeypatch):
    monkeypatch.setattr(packed, "CHUNK_BYTES", chunk)  # of one step at a time, or all at once
    draw = torch.Generator().manual_seed(1)
    made = torch.randint(0, 256, (200, *SHAPE), dtype=torch.uint8, generator=draw)
    inputs = {"bytes": made, "floats": made / 77.0, "two": {"a": made, "b": made / 77.0}}[x]
    y = torch.randint(0, CLASSES, (200,), generator=draw)
    data = Data((inputs, y), classes=CLASSES, mean=(0.3,), std=(0.7,))
    parts = np.split(np.sort(seeds.rng(0, "parts").permutation(200)[:137]), [40, 73])
    cpu = torch.device("cpu")
    none = np.zeros(0, dtype=np.int64)
    sites = [Site(data, part, none, cpu) for part in parts]
    lanes = [client(k) for k in (0, 1, 3)]
    found = []
    for of in ("train", None):
        for lane, site in zip(lanes, sites):
            lane.data = site if of is None else getattr(site, of)
            lane.order = seeds.rng(0, "order", 1, lane.n)
            lane.__post_init__()
        found.append([copy.deepcopy(step) for step in packed.joint_batches(lanes, 4, [0] * 3)])
        assert len({lane.kind[2:] for lane in lanes}) == 1
    alone, together = found
    assert len(alone) == max(lane.steps for lane in lanes)
    for (x1, *rest1), (x2, *rest2) in zip(alone, together, strict=True):
        assert all(map(torch.equal, by_name(x1).values(), by_name(x2).values()))
        assert all(map(torch.equal, rest1, rest2))


def test_norms_of_a_pack_are_those_of_each_client_and_do_not_outlive_what_is_written(monkeypatch):
    monkeypatch.setattr(values, "WAITING", ("cpu",))
    lanes = [client(k) for k in (0, 1, 3)]
    packed.descend(lanes, 4, TASK)
    for lane in lanes:
        x = lane.after.vector.double()
        assert lane.after.clone().rough_norm == pytest.approx(float(x.norm()), rel=1e-5)
    lanes[1].after.vector[0] = torch.nan
    assert not lanes[1].after.is_finite()
    assert not lanes[1].after.clone().is_finite()
    assert lanes[0].after.is_finite()


def test_each_lane_trains_what_it_is_told_to_and_keeps_the_rest_of_its_own_start():
    only = ["head.weight", "head.bias"]
    lanes = [client(k, only=only) for k in (0, 1)]
    packed.descend(lanes, 3, TASK)
    for lane in lanes:
        changed = [n for n, x in lane.after.items() if not torch.equal(x, lane.start[n])]
        assert changed == only


@pytest.mark.parametrize(("name", "batch_size"), [("lenet5", 16), ("mlp", 10)])
def test_bits_depend_neither_on_company_nor_on_place(name, batch_size):
    recipe = msgspec.structs.replace(RECIPE, batch_size=batch_size, momentum=0.9)

    def train(*clients: int) -> dict[int, str]:
        lanes = {k: client(k, name, recipe, proximal=0.1) for k in clients}
        packed.descend(list(lanes.values()), 4, TASK)
        return {k: bits(lane) for k, lane in lanes.items()}

    full = train(0, 1, 3)
    assert train(3, 0, 1) == full
    assert train(1) == {1: full[1]}
    assert train(3, 1) == {1: full[1], 3: full[3]}
    assert len(set(full.values())) == 3


def test_nor_where_a_lanes_tensors_are_no_multiple_of_what_a_processor_takes_at_once(monkeypatch):
    """Biases of 3 lie in one tensor of 15: the last few elements of a vector are not computed as
    the first.
    """
    monkeypatch.setattr(
        sys.modules[__name__],
        "build",
        lambda name: models.build({"name": "mlp", "hidden": [8]}, SHAPE, 3, 0),
    )
    recipe = msgspec.structs.replace(
        RECIPE, batch_size=7, momentum=0.9, weight_decay=0.01, clip_norm=0.5
    )
    found: dict[int, set[str]] = {k: set() for k in (0, 1, 3)}
    hooks = {"proximal": 0.1, "add_to_grad": ..., "add_to_step": ...}
    monkeypatch.setattr(sys.modules[__name__], "CLASSES", 3)
    for order in itertools.permutations(found):
        for others in (0, 1, 2):
            lanes = [client(3, recipe=recipe, **hooks) for _ in range(others)] + [
                client(k, recipe=recipe, **hooks) for k in order
            ]
            packed.descend(lanes, 5, TASK)
            for k, lane in zip(order, lanes[others:]):
                found[k].add(bits(lane))
    assert [len(bits) for bits in found.values()] == [1, 1, 1]


def test_who_fails_at_a_step_spoils_nothing_for_the_others():
    told: list[tuple[int, int]] = []

    def cancelled(step: int, steps: int) -> None:
        told.append((step, steps))
        if step == 2:
            raise KeyError("not wanted any more")

    lanes, others = ([client(k) for k in (0, 1, 3)] for _ in range(2))
    lanes[0].progress = cancelled
    packed.descend(lanes, 4, TASK)
    packed.descend(others, 4, TASK)
    assert isinstance(lanes[0].error, KeyError)
    assert (lanes[0].run, lanes[0].after) == (None, None)
    assert told == [(1, 6), (2, 6)]
    assert [bits(lane) for lane in lanes[1:]] == [bits(lane) for lane in others[1:]]


def test_a_pack_whose_lanes_have_all_failed_takes_no_further_step():
    told = []

    def cancelled(step: int, steps: int) -> None:
        told.append(step)
        raise KeyError("not wanted any more")

    class Counted:
        steps = 0

        def losses(self, outputs, y):
            self.steps += 1
            return TASK.losses(outputs, y)

    lanes = [client(0), client(1)]
    task = Counted()
    for lane in lanes:
        lane.progress = cancelled
    packed.descend(lanes, 2, task)
    assert all(isinstance(lane.error, KeyError) for lane in lanes)
    assert (told, task.steps) == ([1, 1], 1)


def test_what_a_model_keeps_in_attributes_is_not_the_next_packs():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(256, CLASSES)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.head(x.flatten(1)) * self.calls

    def lane() -> Descent:
        scratch = Scratch(Growing, Layout.of(Growing()))
        data = images(SIZES[0], CLASSES, SHAPE, seed=1)
        order = seeds.rng(0, "order", 1, 0)
        return Descent(scratch, data, RECIPE, order, start=weights(scratch.layout, 0))

    one = lane()
    two = lane()
    plans: packed.Plans = {}
    packed.descend([one], 2, TASK, plans)
    packed.descend([two], 2, TASK, plans)
    assert len(plans) == 1
    assert bits(one) == bits(two)


def test_more_steps_than_are_gathered_at_once(monkeypatch):
    whole = client(0)
    parts = client(0)
    packed.descend([whole, client(1)], 2, TASK)
    # Of two lanes of 16 images: 4 steps.
    monkeypatch.setattr(packed, "CHUNK_BYTES", 4 * 2 * 16 * 256 * 4)
    packed.descend([parts, client(1)], 2, TASK)
    assert whole.steps > 4
    assert bits(whole) == bits(parts)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout1d(0.5)), "Dropout1d"),
        (nn.LSTM(2, 2, 2, dropout=0.1), "LSTM"),
        (nn.BatchNorm1d(2, track_running_stats=False), None),
        (nn.Sequential(nn.RReLU()), "RReLU"),
    ],
)
def test_a_model_that_draws_or_mixes_samples_cannot_be_packed(module, found):
    with pytest.raises(
        ConfigError,
        match=rf"train.pack: the model draws at random while it trains \({found}\)"
        if found
        else "BatchNorm",
    ):
        packed.check_model(module, stateful=False)
    packed.check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), stateful=False)


# -- dropout, convolutions, graphs -----------------------------------------------------------------
DROPPING = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1),
    nn.ReLU(),
    nn.Dropout(0.25),
    nn.Flatten(),
    nn.Dropout(0.5),
    nn.Linear(4 * 16 * 16, CLASSES),
)


def dropping(k: int, draws: int, **changes) -> Descent:
    scratch = Scratch(lambda: copy.deepcopy(DROPPING), Layout.of(DROPPING))
    lane = client(k)
    return Descent(
        scratch,
        lane.data,
        lane.recipe,
        lane.order,
        draws=draws,
        start=Tensors.of(DROPPING),
        **changes,
    )


def test_dropout_is_drawn_for_each_client_whoever_shares_its_pack():
    alone = dropping(0, 7)
    other = dropping(0, 8)
    packed.descend([alone], 4, TASK)
    packed.descend([other], 4, TASK)
    assert bits(alone) != bits(other)
    lanes = [dropping(3, 5), dropping(1, 6), dropping(0, 7)]
    packed.descend([lane for lane in lanes if lane.kind == lanes[2].kind], 4, TASK)
    assert bits(lanes[2]) == bits(alone)


def test_dropout_keeps_its_share_and_draws_each_step_and_lane_anew():
    layers = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.5))
    dropout = packed.Dropout(layers, 3, torch.device("cpu"))
    dropout.begin([1, 2, 1], torch.zeros(1, 1001), 8)
    first = dropout.next()
    second = dropout.next()
    for masks, p in zip(first, (0.25, 0.5)):
        assert masks.shape == (3, 8, 1001)
        assert masks.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
        for lane in masks:  # 8,008 draws: the share is within 5 standard deviations
            assert float((lane == 0).double().mean()) == pytest.approx(p, abs=0.03)
    kept = [mask != 0 for mask in (first[0][0], first[0][1], second[0][0], first[1][0])]
    for i, one in enumerate(kept):
        for other in kept[:i]:
            assert 0.3 < float((one == other).double().mean()) < 0.7
    assert torch.equal(first[0][0], first[0][2])
    dropout.begin([1, 2, 1], torch.zeros(1, 1001), 8)
    assert all(map(torch.equal, dropout.next(), first))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(3, 5, (2, 3), stride=(2, 1), padding=(1, 2)),
        nn.Conv2d(3, 5, 1, bias=False),
    ],
)
def test_a_convolution_as_a_product_is_the_convolution(conv):
    x = torch.randn(4, 3, 8, 9)
    assert packed.is_plain(conv)
    torch.testing.assert_close(packed.convolved(conv, x), conv(x))


def test_packs_with_products_are_near_to_those_with_convolutions(monkeypatch):
    lanes = [client(k) for k in (0, 1)]
    others = [client(k) for k in (0, 1)]
    packed.descend(lanes, 2, TASK)
    monkeypatch.setattr(packed, "AS_PRODUCTS", ("cpu",))
    packed.descend(others, 2, TASK)
    for lane, other in zip(lanes, others):
        assert close(lane.after, other.after, 1e-5)


# -- what cannot be packed -------------------------------------------------------------------------
def test_a_task_whose_loss_is_not_the_mean_of_its_losses_is_refused():
    class Summed(type(TASK)):
        def loss(self, outputs, y):
            return super().loss(outputs, y) * len(y)

    packed.check_lane(TASK, client(0))
    with pytest.raises(ConfigError, match="is not the mean of its losses"):
        packed.check_lane(Summed(), client(0))


class Odd(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.head = nn.Linear(256, CLASSES)
        self.change = change

    def forward(self, x):
        return self.change(self.head(x.flatten(1)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda out: out - out.mean(0), "depends on the others of its batch"),
        (
            lambda out: out * (1 if out.sum() > 0 else 2),
            r"cannot be computed for several clients at once \(.+\); leave train.pack out",
        ),
        (
            lambda out: nn.functional.dropout(out, 0.5),
            "cannot be computed for several clients at once",
        ),
    ],
)
def test_a_model_that_the_first_pack_finds_out_about_is_refused(change, found, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "build", lambda name: Odd(change))
    with pytest.raises(ConfigError, match=found):
        packed.check_lane(TASK, client(0))


# -- in the methods --------------------------------------------------------------------------------
class Alone:
    """Packs of one client, with idle lanes beside it."""

    def __init__(self) -> None:
        self.lanes = 0

    def __call__(self, lane: Descent):
        self.lanes += 1
        packed.descend([lane], 3, TASK)
        return lane.run


@pytest.mark.parametrize(
    ("method", "descents"), [("fedavg", 8), ("scaffold", 8), ("fedrep", 16), ("moon", 4)]
)
def test_a_method_learns_the_same_with_packs(method, descents, monkeypatch):
    options = {"model": {"name": "pdc_cnn"}} if method == "moon" else {}
    plain = Federation(rounds=2, train={"epochs": 1}, **options).run(method)
    pack = Alone()
    site = harness.ClientHost
    monkeypatch.setattr(harness, "ClientHost", lambda *args, **more: site(*args, pack=pack, **more))
    together = Federation(rounds=2, train={"epochs": 1}, **options).run(method)
    assert close(together.x, plain.x, 1e-4)
    # MOON's loss is its own from its second round on: no pack, the same result
    assert pack.lanes == descents


def test_samples_beside_the_local_ones_are_in_the_pack_too(monkeypatch):
    run = Federation(rounds=1).run("fedavg")
    more = Samples(*images(9, seed=7))
    plain = run.site(0).train(run.x, more=more)
    site = harness.ClientHost
    pack = Alone()
    monkeypatch.setattr(
        harness, "ClientHost", lambda *args, **kwargs: site(*args, pack=pack, **kwargs)
    )
    together = run.site(0).train(run.x, more=more)
    assert pack.lanes == 1
    assert together.run.n == plain.run.n == 33 + 9
    assert close(together.x, plain.x, 1e-5)
