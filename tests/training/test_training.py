"""Local training, on a model of one weight whose steps fit in the head.

x = (1, 2), y = (3, 3), loss = mean (w x - y)^2, so that its gradient is 5 w - 9: -4 at w = 1, -2 at
w = 1.4.
"""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fednet.algorithms.base import Samples
from fednet.config import Config, EvaluateSection, TrainSection
from fednet.config.schema import ClientTrainSection
from fednet.errors import ConfigError
from fednet.tensors import Layout, Tensors
from fednet.training import graphs
from fednet.training.hosts import ClientHost
from fednet.training.loop import descend
from fednet.training.optimizers import Corrected, optimizer
from fednet.training.samples import batches
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting, Splits
from tests.algorithms.harness import Federation, same, vector


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.w


class Squares:
    """Regression, with float targets."""

    def loss(self, outputs, y):
        return ((outputs[:, 0] - y) ** 2).mean()

    def losses(self, outputs, y):
        return (outputs[:, 0] - y) ** 2

    def counts(self, outputs, y):
        return torch.zeros(2, 1, dtype=torch.int64)


def weight(value=1.0):
    return vector(value)


def host(module=None, x=None, y=None, augment=None, rounds=10, round=1, client=0, seed=0, **train):
    if module is None:
        module = Slope()
    layout = Layout.of(module)
    config = Config(
        seed=seed,
        rounds=rounds,
        train=TrainSection(**{"lr": 0.1, "epochs": 1, "batch_size": 2, **train}),
        evaluate=EvaluateSection(),
    )
    setting = Setting(
        layout=layout,
        shared=layout,
        head=(),
        initial=Tensors.of(module, layout),
        config=config,
        task=Squares(),
        classes=1,
        factory=lambda seed: copy.deepcopy(module),
        augment=augment,
    )
    x = torch.tensor([[1.0], [2.0]]) if x is None else x
    y = torch.tensor([3.0, 3.0]) if y is None else y
    scratch = Scratch(lambda: copy.deepcopy(module), layout)
    return ClientHost(setting, scratch, client, round, splits=Splits((x, y), (x, y)))


def w(trained):
    return float(trained.x.vector[0])


@pytest.mark.parametrize(
    ("train", "hooks", "expected"),
    [
        ({}, {}, 1.4),  # 1 + 0.1 * 4
        ({"epochs": 2}, {}, 1.6),  # 1.4 + 0.1 * 2
        ({"epochs": 2, "momentum": 0.9}, {}, 1.96),  # v = 0.9 * 4 + 2 = 5.6
        ({"weight_decay": 0.5}, {}, 1.35),  # 4 - 0.5
        ({"optimizer": "adam"}, {}, 1.1),
        ({"optimizer": "adamw"}, {}, 1.1),
        ({"epochs": 2}, {"proximal": 1.0}, 1.56),  # second step: 2 - (1.4 - 1)
        ({}, {"proximal": 1.0, "toward": 3.0}, 1.6),  # 4 + (3 - 1)
        # v = 0.9 * 4 + 2 - (1.4 - 1) = 5.2
        ({"epochs": 2, "momentum": 0.9}, {"proximal": 1.0}, 1.92),
        # -4 + 10 * 1 > 0: Adam's first step is lr, whatever the size.
        ({"optimizer": "adam"}, {"proximal": 10.0, "toward": 0.0}, 0.9),
        ({}, {"scale_grad": 0.5}, 1.2),
        ({}, {"scale_grad": 0.5, "add_to_grad": 1.0}, 1.1),  # 2 - 1
        ({}, {"add_to_grad": 1.0}, 1.3),
        ({"clip_norm": 1.0}, {}, 1.1),
        # The raw gradient is clipped, the correction is not.
        ({"clip_norm": 1.0}, {"add_to_grad": -3.0}, 1.4),
        ({"clip_norm": 1.0}, {"scale_grad": 2.0}, 1.2),
        # 1.65, where the gradient is -0.75: 1.725 + 0.25
        ({"epochs": 2}, {"add_to_step": 0.25}, 1.975),
    ],
)
def test_a_step_is_what_the_formula_says(train, hooks, expected):
    hooks = {
        k: weight(v) if k in ("toward", "add_to_grad", "add_to_step") else v
        for k, v in hooks.items()
    }
    assert w(host(**train).train(weight(), **hooks)) == pytest.approx(expected, abs=1e-5)


def test_the_run_counts_steps_samples_and_the_mean_loss():
    run = host(epochs=3).train(weight()).run
    # w = 1, 1.4, 1.6: losses (4 + 1) / 2 = 2.5, (2.56 + 0.04) / 2 = 1.3, (1.96 + 0.04) / 2 = 1
    assert (run.n, run.steps) == (2, 3)
    assert run.loss == pytest.approx(1.6, abs=1e-6)


def test_steps_replace_epochs_and_may_end_within_one():
    x = torch.ones(5, 1)
    y = torch.ones(5)
    assert host(x=x, y=y, steps=4, epochs=9).train(weight()).run.steps == 4
    assert host(x=x, y=y, epochs=2).train(weight()).run.steps == 6  # the last short batch is kept
    # A method's own epochs come first.
    assert host(x=x, y=y, steps=4).train(weight(), epochs=1).run.steps == 3


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("tf32", 1e-6), ("bf16", 0.02), ("fp16", 0.002)]
)
def test_lower_precision_stays_near(precision, tolerance):
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    h = host(module, precision=precision, epochs=2)
    start = Tensors.zeros(h.layout)
    start.vector.fill_(1.0)
    assert w(h.train(start)) == pytest.approx(1.6, abs=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])  # whose loss is scaled
def test_the_gradient_is_exact_however_the_set_is_cut(precision):
    for size in (1, 2, 7):
        found = host(batch_size=size, precision=precision).gradient(weight())
        assert w(found) == pytest.approx(-4.0)
        assert found.run.loss == pytest.approx(2.5)


def test_what_is_trained_beside_the_model_is_returned_and_leaves_the_model_alone():
    extra = vector(0.0)

    def loss(model, x, y, beside):
        return Squares().loss(model(x), y) + ((beside["w"] - 2.0) ** 2).sum()

    for clip in (None, 0.1):
        alone = host(clip_norm=clip).train(weight())
        both = host(clip_norm=clip).train(weight(), loss=loss, extra=extra)
        assert same(alone.x, both.x)
    # 0.1 * 2 * 2
    assert float(host().train(weight(), loss=loss, extra=extra).extra.vector[0]) == pytest.approx(
        0.4
    )
    assert float(extra.vector[0]) == 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.base(x))


def net_host(n=5, **changes):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=draw)
    y = torch.randn(n, generator=draw)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        net = Net()
    return host(net, **{"x": x, "y": y, **changes})


def test_frozen_parameters_keep_their_bits_under_momentum_and_weight_decay():
    h = net_host(momentum=0.9, weight_decay=0.1, epochs=3)
    trained = h.train(h.initial, only=["head.weight", "head.bias"]).x
    for name, value in trained.items():
        # BatchNorm's buffers too
        assert torch.equal(value, h.initial[name]) == (not name.startswith("head")), name
    again = h.train(h.initial)  # and afterwards all train again
    assert not torch.equal(again.x["base.0.weight"], h.initial["base.0.weight"])
    with pytest.raises(ConfigError, match="nose"):
        h.train(h.initial, only=["nose"])


class Averaging(nn.Module):
    """Replaces its buffer by a new tensor, for negative samples by one of another shape."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean = (self.mean + x.mean(0).detach())[: 1 if x[0, 0] > 0 else 0]
        return x * self.w


def test_a_replaced_buffer_is_sent_and_the_next_task_has_its_own():
    h = host(Averaging(), epochs=1)
    first = h.train(h.initial).x
    assert float(first["mean"]) == 1.5
    assert same(h.train(h.initial).x, first)


def test_a_buffer_that_changes_its_shape_is_an_error():
    h = host(Averaging(), x=torch.full((2, 1), -1.0), epochs=1)
    with pytest.raises(ConfigError, match=r"buffer 'mean' of shape \(1,\) became \(0,\)"):
        h.train(h.initial)


@pytest.mark.parametrize(
    ("n", "cut", "norm"),
    [  # batches of 4: how many samples each has, without BatchNorm and with it
        (11, [4, 4, 3], [4, 4, 3]),
        (10, [4, 4, 2], [4, 4]),
        (9, [4, 4, 1], [4, 4]),
        (8, [4, 4], [4, 4]),
        (2, [2], [2]),
    ],
)
def test_a_small_last_batch_is_left_out_with_batch_norm(n, cut, norm):
    for batch_norm, expected in ((False, cut), (True, norm)):
        found = batches(n, 4, batch_norm)
        assert [end - start for start, end in found] == expected
        assert [start for start, _ in found] == [4 * i for i in range(len(found))]


def test_the_only_sample_is_trained_on_with_batch_norm_in_eval_mode():
    h = net_host(n=1)
    trained = h.train(h.initial)
    assert trained.run.steps == 1
    assert torch.equal(trained.x.buffers, h.initial.buffers)
    assert not torch.equal(trained.x.vector, h.initial.vector)


class Normed(nn.Module):
    """BatchNorm over images, then over vectors of one value a channel."""

    def __init__(self):
        super().__init__()
        self.images = nn.BatchNorm2d(2)
        self.vectors = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.vectors(self.images(x).mean((2, 3))))


def test_batches_of_one_image_measure_its_statistics_as_torch_does():
    draw = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(2, 2, 4, 4, generator=draw)
    y = torch.tensor([0.0, 1.0])
    h = host(Normed(), x=x, y=y, batch_size=1, epochs=1)
    trained = h.train(h.initial).x
    assert int(trained["images.num_batches_tracked"]) == 2
    assert int(trained["vectors.num_batches_tracked"]) == 0
    norm = nn.BatchNorm2d(2, affine=False)
    for image in x:  # in any order the mean moves to 3
        norm(image[None])
    assert trained["images.running_mean"] == pytest.approx(norm.running_mean, abs=0.05)
    h.scratch.load(h.initial).eval()(x[:1])
    assert int(h.scratch.values()["images.num_batches_tracked"]) == 0


def test_a_parameter_the_loss_does_not_reach_moves_by_its_correction_alone():
    h = net_host()
    pull = Tensors.zeros(h.layout)
    pull["unused.weight"].fill_(1.0)
    moved = h.train(h.initial, add_to_grad=pull).x["unused.weight"] - h.initial["unused.weight"]
    assert float(moved) == pytest.approx(-0.1 * 2, abs=1e-6)  # two batches
    assert torch.equal(h.train(h.initial).x["unused.weight"], h.initial["unused.weight"])


def test_the_same_client_and_round_give_the_same_bits_whatever_the_scratch_held():
    one = net_host()
    two = net_host()
    two.train(two.initial + two.initial, stream="other")
    assert same(one.train(one.initial).x, two.train(two.initial).x)


@pytest.mark.parametrize("change", [{"client": 1}, {"round": 2}, {"seed": 1}])
def test_another_client_round_or_seed_gives_another_order_and_dropout(change):
    one = net_host()
    other = net_host(**change)
    assert not same(one.train(one.initial).x, other.train(other.initial).x)


def test_augmentation_draws_from_a_stream_of_its_own():
    seen = []

    def shift(x, generator):
        seen.append(torch.rand(1, generator=generator))
        return x

    x = torch.ones(4, 1)
    y = torch.ones(4)
    plain = host(x=x, y=y)
    augmented = host(x=x, y=y, augment=shift)
    assert same(plain.train(weight()).x, augmented.train(weight()).x)
    augmented.train(weight())
    assert seen[0] == seen[1]


def test_inputs_may_be_a_dict_of_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x["left"] + x["right"]) * self.w

    x = {"left": torch.tensor([[1.0], [0.0]]), "right": torch.tensor([[0.0], [2.0]])}
    h = host(Two(), x=x)
    assert w(h.train(weight())) == pytest.approx(1.4)
    more = Samples(x, torch.tensor([3.0, 3.0]))
    assert h.train(weight(), more=more).run.n == 4


def test_progress_names_each_step_and_may_break_off():
    calls = []
    h = host(epochs=3)
    h.progress = lambda step, steps: calls.append((step, steps))
    h.train(weight())
    assert calls == [(1, 3), (2, 3), (3, 3)]

    def stop(step, steps):
        raise KeyboardInterrupt

    h.progress = stop
    with pytest.raises(KeyboardInterrupt):
        h.train(weight())
    h.progress = None
    assert w(h.train(weight())) == pytest.approx(1.7, abs=1e-6)  # 1, 1.4, 1.6, 1.7


def test_a_part_of_the_model_is_trained_with_the_rest_of_the_sites_own():
    f = Federation()
    run = f.run("fedavg")
    part = f.layout.without(["head.bias"])
    h = run.site(0)
    whole = h.train(f.initial).x
    some = h.train(f.initial.select(part)).x
    assert some.layout == part
    assert same(some, whole.select(part))
    assert h.trained.layout == f.layout


def test_frozen_models_are_distinct_and_survive_training():
    h = net_host()
    one = h.frozen(h.initial)
    two = h.frozen(h.initial + h.initial)
    h.train(h.initial)
    assert one is not two
    assert torch.equal(one.head.weight, h.initial["head.weight"])
    assert torch.equal(two.head.weight, 2 * h.initial["head.weight"])
    assert not any(p.requires_grad for p in one.parameters())
    h.close()
    after = ClientHost(h.setting, h.scratch, 1, 1, splits=Splits(h.data, h.data))
    # The next task has the same memory.
    assert {after.frozen(h.initial), after.frozen(h.initial)} == {one, two}


def test_captured_steps_are_replayed_for_the_tasks_own_loss_alone(monkeypatch):
    captured = []

    def replay(self, x, y):
        """Takes the step that a GPU would replay."""
        captured.append(self.step)
        assert len(y) == 2
        self.step(x, y)

    def half(model, x, y):
        return Squares().loss(model(x), y) / 2

    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs.Captured, "__call__", replay)
    h = host(graphs=True)
    h.scratch.may_draw = False  # as a model of torch's own
    # The first training of a kind is not captured, the second is, the third replays it.
    assert [w(h.train(weight(), loss=half)) for _ in range(3)] == pytest.approx([1.2] * 3)
    assert captured == []
    made = [h.train(weight()) for _ in range(3)]
    assert [w(trained) for trained in made] == pytest.approx([1.4] * 3)
    assert [trained.run.loss for trained in made] == pytest.approx([2.5] * 3)  # (2^2 + 1^2) / 2
    assert len(captured) == 2
    assert captured[0] is captured[1]
    assert w(h.train(weight(), loss=half)) == pytest.approx(1.2)
    # Nor are steps that depend on earlier ones, or that draw.
    for train, hooks in (
        ({"momentum": 0.9}, {}),
        ({"optimizer": "adam"}, {}),
        ({"local_schedule": "cosine"}, {}),
        ({}, {"proximal": 1.0}),
        ({}, {"add_to_step": weight()}),
        (None, {}),
    ):
        other = host(graphs=True, **(train or {}))
        other.scratch.may_draw = train is None
        for _ in range(3):
            other.train(weight(), **hooks)
    assert len(captured) == 2
    # Nor are those of another task, such as one with a client's own class weights.
    other = host(graphs=True)
    other.scratch.may_draw = False
    other.task = Squares()
    for _ in range(3):
        other.train(weight())
    assert len(captured) == 2
    # Nor is the rest of an epoch.
    odd = host(x=torch.ones(3, 1), y=torch.ones(3), graphs=True)
    odd.scratch.may_draw = False
    for _ in range(2):
        odd.train(weight())
    assert len(captured) == 3
    # A step that trains another part of the model is another step.
    line = host(nn.Linear(1, 1), graphs=True)
    for name in ("weight", "bias"):
        for _ in range(3):
            found = line.train(line.initial, only=[name]).x
            assert [n for n, t in found.items() if not torch.equal(t, line.initial[n])] == [name]
    assert len(captured) == 7


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_method_draws_with_numpy_is_the_same_kind_of_training(monkeypatch, packed):
    """As by a method that draws each client's number of steps: `host.rng("steps").integers(3)`."""
    kinds = []

    def pack(lane):
        kinds.append(lane.kind)
        lane.scratch = h.scratch
        lane.after = lane.start
        return descend(lane, Squares())[0]

    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs.Captured, "__call__", lambda self, x, y: self.step(x, y))
    h = host(graphs=not packed, per_client={"3": ClientTrainSection(epochs=2)})
    h.scratch.may_draw = False
    h.pack = pack if packed else None
    steps = np.int64(3)
    momentum = np.float64(0.0)
    own = msgspec.structs.replace(h.train_config, momentum=momentum, per_client={})
    for config, given in ((h.train_config, 3), (own, steps), (own, 3)):
        h.train_config = config
        assert h.train(weight(), steps=given).run.steps == 3
    assert len(set(kinds)) == packed
    assert len(h.scratch.replays) == (not packed)


def test_a_parameter_that_the_loss_reaches_later_begins_without_momentum():
    first = torch.zeros(1, requires_grad=True)
    later = torch.zeros(1, requires_grad=True)
    made = optimizer("sgd", [first, later], lr=0.1, momentum=0.9)
    first.grad = torch.ones(1)
    made.step()
    later.grad = torch.ones(1)
    made.step()
    assert first.tolist() == pytest.approx([-0.1 - 0.19])
    assert later.tolist() == pytest.approx([-0.1])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_in_another_order_in_memory_is_corrected_element_by_element(momentum):
    p = torch.zeros(2, 3).t().requires_grad_()  # (3, 2), whose columns lie one after the other
    p.grad = torch.arange(6.0).view(3, 2)
    expected = -(p.grad + torch.tensor([[10.0, 40.0], [20.0, 50.0], [30.0, 60.0]]))
    added = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    made = optimizer("sgd", [p], lr=1.0, momentum=momentum)
    Corrected(made, 1.0, [added], 0.0, None, True, None).step()
    assert torch.equal(p, expected)


def test_an_empty_site_takes_no_step():
    h = host(x=torch.zeros(0, 1), y=torch.zeros(0))
    for pack in (None, pytest.fail):  # nor does a pack wait for it
        h.pack = pack
        trained = h.train(weight())
        assert (trained.run.n, trained.run.steps, trained.run.loss) == (0, 0, 0.0)
        assert w(trained) == 1.0


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_sgd_is_torchs_own_bit_for_bit(momentum, weight_decay):
    start = torch.linspace(-1, 1, 7)
    ours, theirs = (
        [
            start.clone().requires_grad_(),
            start[:3].clone().requires_grad_(),
            torch.ones(2, requires_grad=True),
        ]
        for _ in range(2)
    )
    steps = [
        optimizer("sgd", ours, lr=0.1, momentum=momentum, weight_decay=weight_decay),
        torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True),
    ]
    for k in range(4):
        for parameters, step in zip((ours, theirs), steps):
            for p in parameters[:2]:  # the third never gets a gradient
                p.grad = torch.sin(p.detach() * (k + 1))
            step.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
