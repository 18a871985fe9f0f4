"""What would fail in the first round is said when the run is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fednet
from fednet import models, registry
from fednet.cli.main import main
from fednet.config import from_mapping
from fednet.data.base import Data
from fednet.errors import ConfigError, DataError, FednetError
from fednet.experiment.build import build
from fednet.experiment.trial import of_each_class, remarks, unlike_losses
from fednet.tensors import Tensors
from fednet.training.tasks.classification import Classification
from tests.rooms import lines

MODELS: dict[str, Any] = {}


class Body(nn.Module):
    """A small model that is as it should be."""

    def __init__(self, *, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 6))
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Tokens(nn.Module):
    """A class at each position."""

    def __init__(self, *, input_shape, classes):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.head = nn.Linear(6, classes)

    def features(self, x):
        return self.embed(x)

    def forward(self, x):
        return self.head(self.features(x))


def model(name, *, base=Body, also=lambda model: None, wider=0, **methods):
    """The model trial-NAME: `base` with so many outputs more, with what `also(model)` puts into it,
    and with these methods in place of its own.
    """

    def __init__(self, *, input_shape, classes):
        base.__init__(self, input_shape=input_shape, classes=classes + wider)
        also(self)

    MODELS[name] = type(name, (base,), {"__init__": __init__, **methods})


def buffer(name, value):
    return lambda self: self.register_buffer(name, value)


def convolutional(self):
    self.body = nn.Conv2d(1, 3, 2)
    self.head = nn.Linear(27, self.head.out_features)


def growing(self, x):
    self.register_buffer("mean", x.mean(0))
    return Body.forward(self, x)


def renewed(self, x):
    self.head.bias = nn.Parameter(self.head.bias.detach().clone())
    return Body.forward(self, x)


def teacher(self, x):
    self.slow.data.mul_(0.9)
    return Body.forward(self, x) * self.slow


def fails(self, x):
    raise ValueError("no such input")


def noisy(self, x):
    return self.head(F.dropout(self.norm(self.body(x)), 0.5, self.training))


model("headless")
# As many a script has it: what a convolution gives is viewed, not reshaped.
model("viewed", also=convolutional, forward=lambda self, x: self.head(self.body(x).view(-1, 27)))
model("lazy", also=lambda self: self.body.__setitem__(1, nn.LazyLinear(6)))
model("tuple", forward=lambda self, x: (len(x), "none"))
model("cut", forward=lambda self, x: Body.forward(self, x).detach())
model("inplace", forward=lambda self, x: Body.forward(self, x.sub_(1)))
model("growing", forward=growing)
model("renewed", forward=renewed)
model(
    "teacher",
    also=lambda self: setattr(self, "slow", nn.Parameter(torch.ones(4), requires_grad=False)),
    forward=teacher,
)
model("sparse", also=buffer("eye", torch.eye(4).to_sparse()))
model("nowhere", also=buffer("mean", torch.ones(4, device="meta")))
model("narrow", wider=-1)
model("wide", wider=6, features=lambda self, x: self.body(x))
model("tagger", base=Tokens)
model("turned", base=Tokens, class_axis=1, forward=lambda self, x: self.head(self.embed(x)).mT)
model("sparsetokens", base=Tokens, also=lambda model: setattr(model.embed, "sparse", True))
model("mapped", base=Tokens, forward=lambda self, x: {"logits": Tokens.forward(self, x).tolist()})
model("fails", base=Tokens, forward=fails)
model("hollow", also=lambda self: (delattr(self, "body"), delattr(self, "head")))
model("half", also=buffer("half", torch.zeros(1)))
model("noisy", also=lambda self: setattr(self, "norm", nn.BatchNorm1d(6)), forward=noisy)


def trial_data(root, seed, *, kind: str = "plain"):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 1, 4, 4)).astype(np.float32)
    y = np.arange(40) % 4
    if kind == "nan":
        x[17, 0, 2, 3] = np.nan
    if kind == "inf-test":
        return Data(train=(x, y), test=(np.where(x > 2.0, np.inf, x), y), classes=4)
    if kind.startswith("tags"):
        # A class at each of so many positions: as many as classes, or more.
        tags = (np.arange(40)[:, None] + np.arange(int(kind[4:]))) % 4
        return Data(train=(tags * 3, tags), test=(tags * 3, tags), classes=4)
    if kind == "floats":
        return Data(train=(x, x[:, 0, 0, 0]), test=(x, x[:, 0, 0, 0]))
    return Data(train=(x, y), test=(x, y), classes=4)


@pytest.fixture(autouse=True)
def parts() -> None:
    for name, kind in MODELS.items():
        registry.model._parts[f"trial-{name}"] = kind
    registry.dataset._parts["trial-data"] = trial_data


def mapping(model: Any = "mlp", kind: str = "plain", **more: Any) -> dict[str, Any]:
    data = {"dataset": "trial-data", "kind": kind, "partition": "iid"}
    return {"clients": 2, "model": model, "data": data, **more}


# The second model is the first client's.
UNLIKE = [
    {"name": "mlp", "hidden": [6], "clients": "1"},
    {"name": "trial-wide", "clients": "0"},
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            mapping("trial-headless", algorithm="moon"),
            "it is not what moon needs, which asks it for features",
        ),
        (mapping("trial-headless", algorithm="fedrod"), "it is not what fedrod needs"),
        (
            mapping("trial-noisy", algorithm="feddc"),
            "matches the gradients of one image at a time, for which this model fails",
        ),
        (mapping("trial-cut"), "no gradient comes to its parameters from its outputs"),
        (mapping("trial-inplace"), "it changes its inputs in place"),
        (mapping("trial-renewed"), "another tensor in the place of its parameter 'head.bias'"),
        (mapping("trial-growing"), "its state dict has 'mean' once it was called, and not before"),
        (mapping("trial-teacher"), "changes its parameter 'slow', which takes no gradient"),
        (mapping("trial-sparse"), "eye of the model cannot be written to"),
        (mapping("trial-nowhere"), "mean of the model cannot be written to"),
        (mapping("trial-narrow"), "it gives 3 outputs for 4 classes"),
        (
            mapping(UNLIKE, algorithm="fedproto"),
            "model trial-wide: it gives 10 outputs for 4 classes",
        ),
        (mapping("trial-mapped", "tags4"), "trial-mapped: it returns a dict; expected the outputs"),
        (
            mapping("trial-fails", "tags4"),
            "trial-fails: it fails for 2 .*ValueError: no such input",
        ),
        (
            mapping("trial-sparsetokens", "tags6"),
            "gradient of its parameter 'embed.weight' is sparse.*with sparse=False",
        ),
        (mapping("trial-hollow"), "no parameter of the model requires"),
        (
            mapping("trial-viewed", train={"memory_format": "channels_last"}),
            "trial-viewed: it fails for 2 training samples .* view size is not compatible",
        ),
        (mapping("trial-lazy"), r"model trial-lazy: body\.1\.weight is of a lazy layer"),
        (mapping("trial-tuple"), "it returns a tuple; expected the outputs"),
        (mapping("trial-half"), r"cannot be built .*attribute .?'half.?' already exists"),
        (mapping(kind="floats"), "task classification: loss fails for .* torch.float32"),
        (mapping(kind="nan"), "sample 17 of the training data has inputs that are not finite"),
        (mapping(kind="inf-test"), "of the testing data has inputs that are not finite"),
        (mapping("mlp", task="regression"), "regression compares outputs of shape"),
    ],
)
def test_what_the_first_round_would_meet_is_said_at_the_start(given, said):
    with pytest.raises(FednetError, match=said) as wrong:
        build(from_mapping(given))
    assert isinstance(wrong.value, (ConfigError, DataError))
    assert wrong.value.exit_status == 2


@pytest.mark.parametrize("kind", ["tags4", "tags6"])
def test_a_method_about_classes_refuses_labels_at_positions(kind):
    """With as many positions as classes FedLC subtracted its margins along the wrong axis, without
    a word; else a tensor error ended round 1.
    """
    with pytest.raises(ConfigError, match=r"algorithm fedlc: .* has labels of shape"):
        build(from_mapping(mapping("trial-tagger", kind, algorithm="fedlc")))


def test_of_as_many_classes_as_positions_the_model_says_which_axis_is_which():
    axes = [
        build(from_mapping(mapping(f"trial-{name}", "tags4"))).setting.task.class_axis
        for name in ("tagger", "turned")
    ]
    assert axes == [-1, 1]


def test_without_data_counts_are_those_of_the_declared_classes_and_others_are_refused():
    """As at a server whose sites bring their own data."""
    site = {"dataset": "site", "shape": [4]}

    def more(metric, classes, **task):
        given = mapping(evaluate={"metrics": [metric]}, **task)
        return build(from_mapping({**given, "data": {**site, **classes}})).setting.more

    assert more("f1_macro", {"classes": 3}) == {"confusion": (3, 3)}
    with pytest.raises(ConfigError, match="no data here to try the task regression on"):
        more("perplexity", {}, task="regression")
    with pytest.raises(ConfigError, match=r"confusion \(50000, 50000\) are more than"):
        more("f1_macro", {"classes": 50_000})


def test_without_data_an_augmentation_is_held_against_the_declared_shape():
    """As at a server whose sites bring their own data: each client's first task failed."""
    site = {"dataset": "site", "shape": [4], "classes": 3, "augment": "flip"}
    with pytest.raises(ConfigError, match=r"data\.augment: flip is for images"):
        build(from_mapping({**mapping(), "data": site}))


def test_floats_are_fine_as_targets_of_regression():
    assert build(from_mapping(mapping(kind="floats", task="regression"))).data.classes is None


@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_the_trial_draws_from_no_other_stream_and_leaves_the_initial_model(algorithm):
    config = from_mapping(mapping("trial-noisy", algorithm=algorithm))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    exp = build(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    fresh = models.build({"name": "trial-noisy"}, (1, 4, 4), 4, config.seed)
    assert exp.setting.initial.sha256() == Tensors.of(fresh).sha256()
    assert Tensors.of(exp.setting.module()).sha256() == Tensors.of(fresh).sha256()


@pytest.mark.parametrize("name", ["resnet18_bn_proj", "mlp"])
def test_a_model_is_copied_as_it_was_initialised_and_nobody_draws_it_again(name, monkeypatch):
    data = {"dataset": "synthetic", "samples": 20, "shape": [3, 32, 32], "partition": "iid"}
    exp = build(from_mapping({"clients": 2, "model": name, "data": data}))
    setting = exp.setting
    digest = setting.initial.sha256()
    monkeypatch.setattr(models, "build", None)
    own = setting.module()
    borrowed = setting.borrowed()
    assert Tensors.of(own).sha256() == Tensors.of(borrowed).sha256() == digest
    places = {p.data_ptr() for p in own.parameters()}
    assert places.isdisjoint(p.data_ptr() for p in borrowed.parameters())
    for parameter_name, parameter in borrowed.named_parameters():
        assert parameter.data_ptr() == setting.initial[parameter_name].data_ptr()
    with torch.no_grad():
        for tensor in (*own.parameters(), *own.buffers(), *borrowed.buffers()):
            tensor.zero_()
    scratch, other = exp.scratch(), exp.scratch()
    scratch.load(setting.initial * 2.0)
    loss = other.module(torch.ones(2, 3, 32, 32)).sum()
    with torch.no_grad():
        for parameter in scratch.module.parameters():
            parameter.zero_()  # in another thread, say
    loss.backward()  # refused where torch takes them for one parameter
    assert setting.initial.sha256() == Tensors.of(setting.module()).sha256() == digest


def test_a_users_own_model_is_built_again_since_what_it_holds_may_refer_to_it():
    exp = build(from_mapping(mapping("trial-noisy")))
    assert exp.setting.built is None
    one, other = exp.setting.module(), exp.setting.borrowed()
    places = {p.data_ptr() for p in one.parameters()}
    assert places.isdisjoint(p.data_ptr() for p in other.parameters())


SMALL = [
    "--set",
    "data={dataset: synthetic, samples: 60, shape: [1, 8, 8], classes: 3, partition: iid}",
    "--set",
    "model=mlp",
]


def test_run_check_stops_before_the_run(tmp_path, capsys):
    assert main(["run", *SMALL, "--check", "--out", str(tmp_path)]) == 0
    assert "it can start; one batch went forward and backward" in capsys.readouterr().out
    assert main(["run", *SMALL, "--check", "--out", str(tmp_path), "--set", "task=regression"]) == 2
    assert "regression compares outputs" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/rounds.jsonl"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("link.trace=nowhere", "link.trace: unknown trace 'nowhere'"),
        ("availability.trace=nowhere", "availability.trace: unknown trace 'nowhere'"),
        ("devices.trace=nowhere", "devices.trace: unknown trace 'nowhere'"),
        ("faults.replay=nowhere", "faults.replay: nowhere/rounds.jsonl: No such file"),
    ],
)
def test_run_check_looks_at_what_the_run_stands_on(capsys, setting, says):
    assert main(["run", *SMALL, "--check", "--quiet", "--set", setting]) == 2
    assert says in capsys.readouterr().err


# -- a task of one's own ---------------------------------------------------------------------------
class Binary:
    """One output a sample, evaluated by class: of the form (2, C) that a task is to give."""

    def loss(self, outputs, y):
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), y)

    def losses(self, outputs, y):
        given = outputs.squeeze(-1)
        return F.binary_cross_entropy_with_logits(given, y, reduction="none")

    def counts(self, outputs, y):
        found = (outputs.squeeze(-1) > 0).long()
        true = y.long()
        right = torch.bincount(true[found == true], minlength=2)
        return torch.stack([right, torch.bincount(true, minlength=2)])


class Whole(Binary):
    def losses(self, outputs, y):
        return self.loss(outputs, y)


class Loose(Binary):
    """As many columns as the batch's labels ask for."""

    def counts(self, outputs, y):
        found = (outputs.squeeze(-1) > 0).long()
        true = y.long()
        total = torch.bincount(true)
        return torch.stack([torch.bincount(true[found == true], minlength=len(total)), total])


class Averaged(Binary):
    def counts(self, outputs, y):
        return torch.ones(2, 1, dtype=torch.int64)


class Doubled(Binary):
    def counts(self, outputs, y):
        return 2 * super().counts(outputs, y)


class Masked(Binary):
    """-1 is no label."""

    def loss(self, outputs, y):
        return super().loss(outputs[y >= 0], y[y >= 0])

    def losses(self, outputs, y):
        return torch.where(y >= 0, super().losses(outputs, y), 0.0)

    def counts(self, outputs, y):
        return super().counts(outputs[y >= 0], y[y >= 0])


def halves(root, *, unlabelled: int = 0):
    """Labels 0 and 1 as floats; the first samples have none."""
    drawn = torch.Generator().manual_seed(0)
    y = (torch.arange(40) % 4 == 0).float()
    x = torch.randn(40, 4, generator=drawn) + y[:, None]
    masked = torch.where(torch.arange(40) < unlabelled, -1.0, y)
    return Data(train=(x, masked), test=(x, y))


@pytest.fixture
def own_task(monkeypatch):
    """A configuration with a task of one's own, on samples of one value each."""
    monkeypatch.setitem(registry.dataset._parts, "halves", halves)

    def made(task, **options):
        monkeypatch.setitem(registry.task._parts, "own", task)
        data = {"dataset": "halves", "partition": "iid", **options}
        return {**mapping(), "data": data, "task": "own", "rounds": 1, "report": False}

    return made


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Whole, r"losses \(test_trial\.py, line \d+\) gave float32 of shape \(\), expected \(2,\)"),
        (Loose, r"counts \(test_trial\.py, line \d+\) of two samples together is not the sum"),
        (Averaged, r"of two samples together is not the sum of those of each"),
        (Doubled, r"gave a total of 4 for 2 labels or values"),
    ],
)
def test_what_a_task_gives_is_checked_at_the_start(own_task, task, says):
    with pytest.raises(ConfigError, match=says):
        build(from_mapping(own_task(task)))


def test_a_task_may_count_by_other_classes_than_the_data_have(own_task, tmp_path):
    """Two, of values: the server and its clients count in (2, 2)."""
    found = fednet.run(own_task(Binary), in_process=True, out=tmp_path)
    last = found.rounds[-1]
    assert last.total_by_class == [30, 10]
    rows = lines(found.dir / "clients.jsonl")
    assert all(0 <= row["accuracy"] <= 1 for row in rows if "accuracy" in row)
    assert found.rounds[-1].dropped == {}


def test_samples_without_a_label_are_not_what_a_model_is_tried_on(own_task):
    """The first two have none, whose loss is the mean over nothing."""
    assert build(from_mapping(own_task(Masked, unlabelled=5))).setting.counts_width == 2


def test_counts_of_another_width_in_a_later_batch_end_the_run(own_task, monkeypatch, tmp_path):
    """Added to the others they were broadcast: 50 of 100 samples were said to be of class 0 and 100
    of class 1.
    """

    def late(root):
        x = torch.randn(40, 4)
        y = torch.cat([torch.zeros(39), torch.ones(1)])
        return Data(train=(x[:39], y[:39]), test=(x, y))

    monkeypatch.setitem(registry.dataset._parts, "late", late)
    given = own_task(Loose) | {"data": {"dataset": "late", "partition": "iid"}}
    given |= {"evaluate": {"clients": "none", "batch_size": 39}}
    with pytest.raises(ConfigError, match=r"gave 1 classes for some samples and 2 for others"):
        fednet.run(given, in_process=True, out=tmp_path)


class Weighted(Classification):
    """Its loss is a mean over the weights of the classes, its losses none over the samples."""

    weights = torch.tensor([1.0, 10.0])

    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y, self.weights)

    def losses(self, outputs, y):
        return F.cross_entropy(outputs, y, self.weights, reduction="none")


def test_a_loss_that_is_no_mean_of_the_losses_is_remarked_on():
    out = torch.zeros(2, 2)
    y = torch.tensor([0, 1])
    (remark,) = unlike_losses("weighted", Weighted(), out, y)
    # log 2 against (1 + 10) / 2 times as much
    assert "loss gives 0.6931 for a batch, and losses a mean of 3.812" in remark
    assert list(unlike_losses("classification", Classification(), out, y)) == []
    several = torch.randn(2, 3, 2)
    labels = torch.tensor([[0, -100, -100], [1, 1, 0]])
    assert list(unlike_losses("classification", Classification(), several, labels)) == []


def test_a_weight_that_one_class_in_the_middle_has_is_remarked_on_too():
    class Middle(Weighted):
        weights = torch.tensor([1.0, 10.0, 1.0])

    data = Data(train=(torch.randn(5, 4), torch.tensor([2, 0, 0, 1, 2])), classes=3)
    setting = SimpleNamespace(
        config=from_mapping({}), task=Middle(), module=lambda: nn.Linear(4, 3)
    )
    (remark,) = remarks(setting, data)
    assert "losses a mean of" in remark
    assert of_each_class(data)[1].tolist() == [0, 1, 2]
