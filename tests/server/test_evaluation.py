"""What is judged, by which model, and what of it is written down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fednet
from fednet.client import evaluation
from fednet.errors import RemoteProtocolError
from fednet.experiment import build
from fednet.experiment.store import ClientStore, Record
from fednet.server import decoding, exports
from fednet.server.client_evaluation import evaluated_clients
from fednet.server.rounds import Rounds
from fednet.tensors import Tensors
from fednet.training.hosts import ClientHost
from fednet.wire.messages import Key
from fednet.wire.payload import LocalRun
from tests.rooms import lines, merged, run, small, summary

SOME = {"rounds": 3, "clients": 5, "participation": None, "clients_per_round": 2, "seed": 1}
JUDGED = {**SOME, "evaluate": {"clients": "auto"}, "train": {"lr": 0.5}}
SPLIT = {
    "fedper": {"body.fc1.weight", "body.fc1.bias"},
    "lgfedavg": {"head.weight", "head.bias"},
}


def algorithm(name):
    more = {"global_layers": 1} if name == "lgfedavg" else {}
    return {"algorithm": {"name": name, **more}}


@pytest.fixture(autouse=True)
def models():
    """Models for these tests alone."""

    @fednet.model("judged_norm")
    class Norm(nn.Sequential):
        def __init__(self, *, input_shape, classes):
            norm = nn.BatchNorm1d(16)
            super().__init__(nn.Linear(input_shape[0], 16), norm, nn.ReLU(), nn.Linear(16, classes))

    @fednet.model("judged_odd")
    class Odd(nn.Module):
        """Tied, frozen and weight-normed parameters; buffers that are masks, of infinities
        too, and halves.
        """

        def __init__(self, *, input_shape, classes):
            super().__init__()
            k = input_shape[0]
            self.one = nn.Linear(k, k)
            self.two = nn.Linear(k, k)
            self.two.weight = self.one.weight
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(k, k))
            self.still = nn.Linear(k, k)
            self.still.requires_grad_(False)
            self.head = nn.Linear(k, classes)
            self.register_buffer("mask", torch.rand(k) > 0.3)
            self.register_buffer("halves", torch.rand(k).half())
            self.register_buffer("causal", torch.full((k, k), -torch.inf).triu(1))

        def forward(self, x):
            x = torch.relu(self.two(torch.relu(self.one(x))) * self.mask * self.halves)
            return self.head(self.still(torch.relu(self.normed(x))))


def test_what_a_client_finds_within_its_task_comes_in_its_reply(tmp_path):
    directory = run(tmp_path, **merged(JUDGED, {"evaluate": {"every": 2}}))
    rows = [r for r in lines(directory / "wire.jsonl") if r["type"] == "reply"]
    assert {(r["round"], "accuracy" in r["kinds"]) for r in rows if r["purpose"] == "train"} == {
        (1, False),
        (2, True),
        (3, True),  # the last one
    }
    found = [line for line in lines(directory / "clients.jsonl") if not line.get("final")]
    assert {(line["round"], line["client"]) for line in found} == {
        (r["round"], r["client"]) for r in rows if r["round"] > 1 and r["purpose"] == "train"
    }


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "lies"])
def test_an_evaluation_that_an_earlier_server_received_counts_if_it_did_there(
    tmp_path, monkeypatch, lies
):
    honest = evaluation.evaluate_in_training_task
    conclude = Rounds.conclude

    def within(*of):
        found = honest(*of)
        if lies and of[-1].client_id == 1:
            found["personal"].table[:] = 1000  # of more samples than it has
        return found

    def dies(rounds, round):
        if round.number == 2:
            raise RuntimeError("as if the process had died")
        conclude(rounds, round)

    def said(directory):
        rows = [line for line in lines(directory / "clients.jsonl") if not line.get("final")]
        return [(r["round"], r["client"], r.get("correct_personal")) for r in rows]

    changes = {**JUDGED, "rounds": 2, "clients_per_round": 5}
    monkeypatch.setattr(evaluation, "evaluate_in_training_task", within)
    calm = run(tmp_path / "calm", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "conclude", dies)
        with pytest.raises(RuntimeError):
            run(tmp_path / "died", **changes)
    resumed = run(tmp_path / "died", resume=True, **changes)
    rows = [r for r in lines(resumed / "wire.jsonl") if r["purpose"] == "train"]
    assert {r["incarnation"] for r in rows} == {1}  # nobody was asked again
    assert said(resumed) == said(calm)
    assert {client for _, client, _ in said(calm)} == {0, 1, 2, 3, 4} - ({1} if lies else set())


def test_a_reply_has_the_declared_evaluation_behind_it_where_its_task_asks_for_one():
    exp = build.build(small(**JUDGED), None)
    check = decoding.form_check(exp)
    method = exp.algorithm
    up = method.exchanges[0].up(x=exp.setting.initial, run=LocalRun(1, 1, 2.0))
    own = exp.up.encode(up).form
    counts = exp.up.encode(evaluation.reply(exp, {})).form
    larger = [*counts[:-1], structs.replace(counts[-1], size=2 * counts[-1].size)]
    check(Key(1, 0, 0, 3), [*own, *counts], True)
    check(Key(1, 0, 0, 3), own, False)
    check(Key(1, 1, 0, 3, "evaluate"), counts, False)
    for form, asked in (
        ([*own, *counts], False),
        (own, True),
        ([*own, *larger], True),
        ([*own, *counts, counts[-1]], True),
    ):
        with pytest.raises(RemoteProtocolError):
            check(Key(1, 0, 0, 3), form, asked)


def test_an_evaluation_within_a_task_is_predicted_with_its_reply(tmp_path):
    directory = run(tmp_path, **merged(JUDGED, {"evaluate": {"every": 2}}))
    for line in lines(directory / "rounds.jsonl"):
        assert line["predicted"] == line["useful"]
        assert ("accuracy" in line["useful"]["up"]) == (line["round"] > 1)


def finals(directory):
    return [line for line in lines(directory / "clients.jsonl") if line.get("final")]


def correct(module, site):
    x, y = site.test
    with torch.no_grad():
        return int((module.eval()(x).argmax(1) == y).sum())


def module_of(experiment, path):
    module = experiment.setting.module()
    module.load_state_dict(load_file(path), strict=True)
    return module


@pytest.mark.parametrize("method", ["fedper", "lgfedavg"])
@pytest.mark.parametrize("shared", ["latest", "last_seen"])
def test_a_split_method_is_judged_with_the_shared_part_that_the_configuration_says(
    tmp_path, method, shared
):
    changes = merged(
        JUDGED, {**algorithm(method), "evaluate": {"shared": shared, "finetune": True}}
    )
    directory = run(tmp_path, **changes)
    experiment = build.build(small(**changes), None)
    newest = load_file(directory / "model.safetensors")
    took_part = {c for r in lines(directory / "rounds.jsonl") for c in r["completed"]}
    assert 2 < len(took_part) < 5
    same = []
    for line in finals(directory):
        path = directory / "personal" / f"client-{line['client']}.safetensors"
        assert path.exists() == line["took_part"] == (line["client"] in took_part)
        # Who never took part has the newest shared part beside the initial rest.
        path = path if path.exists() else directory / "model.safetensors"
        own = load_file(path)
        same.append(all(torch.equal(own[name], newest[name]) for name in SPLIT[method]))
        site = experiment.federation.site(line["client"])
        assert line["correct_personal"] == correct(module_of(experiment, path), site)
    assert all(same) == (shared == "latest")
    judged = summary(directory)["judged"]
    assert judged == {
        "clients": 5,
        "of": 5,
        "never_took_part": 5 - len(took_part),
        "shared": shared,
    }


def test_where_nobody_evaluates_no_test_set_is_in_memory(tmp_path):
    """The same model comes of it. Clients' own test sets are a part of it."""
    models = []
    for every, own, kept in ((0, "none", False), (1, "none", True), (0, "like_train", True)):
        changes = {"evaluate": {"every": every, "clients": "none"}, "data": {"client_test": own}}
        config = small(**changes)
        assert bool(build.build(config, None).data.n_test) == kept
        at_client = build.build(config, None, for_client=True).data  # where no client is evaluated
        assert bool(at_client.n_test) == (own != "none")
        models.append(load_file(run(tmp_path / f"{every}-{own}", **changes) / "model.safetensors"))
    for name, value in models[0].items():
        assert all(torch.equal(value, other[name]) for other in models)


def nearest(module, prototypes, site):
    """How many of the site's test samples lie nearest to their class's prototype."""
    x, y = site.test
    with torch.no_grad():
        return int((torch.cdist(module.eval().features(x), prototypes).argmin(1) == y).sum())


@pytest.mark.parametrize("shared", ["latest", "last_seen"])
def test_fedproto_is_evaluated_with_the_prototypes_that_the_configuration_says(tmp_path, shared):
    changes = {"algorithm": {"name": "fedproto"}, "evaluate": {"shared": shared}}
    changes = merged(JUDGED, changes)
    directory = run(tmp_path, **changes)
    experiment = build.build(small(**changes), None)
    initial = experiment.state_dict(experiment.setting.initial)
    last = lines(directory / "rounds.jsonl")[-1]["completed"][0]
    newest = load_file(directory / "personal" / f"client-{last}.safetensors")["prototypes"]
    same = []
    for line in finals(directory):
        path = directory / "personal" / f"client-{line['client']}.safetensors"
        assert path.exists() == line["took_part"]
        # Who never took part has the newest prototypes beside the initial model.
        named = load_file(path) if path.exists() else {**initial, "prototypes": newest}
        prototypes = named.pop("prototypes")
        known = named.pop("known", torch.ones(3))
        same.append(torch.equal(prototypes, newest))
        site = experiment.federation.site(line["client"])
        module = experiment.setting.module()
        module.load_state_dict(named, strict=True)
        # A client that got no prototypes is evaluated by its head.
        by_head = not known.any() or (shared == "last_seen" and not path.exists())
        expected = correct(module, site) if by_head else nearest(module, prototypes, site)
        assert line["correct_personal"] == expected
    assert all(same) == (shared == "latest")


def test_fine_tuning_starts_from_the_newest_shared_part(tmp_path):
    changes = merged(JUDGED, {**algorithm("fedper"), "evaluate": {"finetune": True}})
    one, other = (
        finals(run(tmp_path, **merged(changes, {"name": shared, "evaluate": {"shared": shared}})))
        for shared in ("latest", "last_seen")
    )
    assert [x["correct_finetuned"] for x in one] == [x["correct_finetuned"] for x in other]


UNEVEN = {"data": {"partition": {"scheme": "quantity", "alpha": 0.3}}}


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({}, "samples"),
        (algorithm("scaffold"), "clients"),
        ({"privacy": {"clip": 10}}, "clients"),
        ({"aggregation": {"rule": "median"}}, "clients"),
        (merged(algorithm("fedpdc"), {"data": {"public": {"samples": 16}}}), "accuracy_public"),
    ],
    ids=str,
)
def test_training_losses_are_weighed_as_the_models_are(tmp_path, changes, by):
    folder = run(tmp_path, **merged(merged(JUDGED, UNEVEN), changes))
    for record in lines(folder / "rounds.jsonl"):
        rows = [r for r in lines(folder / "clients.jsonl") if r["round"] == record["round"]]
        rows = [r for r in rows if r.get("train_loss") is not None]
        weights = [r["samples"] if by == "samples" else 1 for r in rows]
        if by == "accuracy_public":
            weights = [record["algorithm"][by][str(r["client"])] for r in rows]
        expected = sum(w * r["train_loss"] for w, r in zip(weights, rows)) / sum(weights)
        assert record["train_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_fine_tuning_goes_on_from_a_personal_model_that_is_a_methods_own(tmp_path, method):
    changes = merged(JUDGED, {**algorithm(method), "evaluate": {"finetune": True}})
    changes = merged(changes, {"train": {"lr": 0.04}, "rounds": 1})
    directory = run(tmp_path, **changes)
    experiment = build.build(small(**changes), None)
    tuned = []
    for line in finals(directory):
        path = directory / "personal" / f"client-{line['client']}.safetensors"
        path = path if path.exists() else directory / "model.safetensors"
        start = Tensors.of(module_of(experiment, path), experiment.setting.layout)
        site = experiment.federation.site(line["client"])
        host = ClientHost(
            experiment.setting,
            experiment.scratch(),
            line["client"],
            line["round"],
            splits=site,
        )
        expected = int(host.evaluate(host.train(start).x).table[0].sum())
        assert line["correct_finetuned"] == expected
        tuned.append(expected - line["correct_personal"])
    assert any(tuned)


def test_the_trained_shared_part_is_what_the_run_gives_as_its_model(tmp_path):
    changes = merged(JUDGED, algorithm("lgfedavg"))
    directory = run(tmp_path, **changes)
    initial = build.build(small(**changes), None).setting.initial
    given = fednet.open_run(directory).model().state_dict()
    changed = {name for name, value in given.items() if not torch.equal(value, initial[name])}
    assert changed == SPLIT["lgfedavg"]
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert set(file.metadata()["trained"].split()) == SPLIT["lgfedavg"]


def test_what_came_down_in_a_round_is_not_called_the_global_model_after_it(tmp_path):
    directory = run(tmp_path, **JUDGED)
    for record in lines(directory / "rounds.jsonl"):
        assert set(record["client_accuracy"]) == {"received", "personal"}
        assert record["own_model"] == "local"
    directory = run(tmp_path, name="all", **merged(JUDGED, {"evaluate": {"clients": "all"}}))
    last = lines(directory / "rounds.jsonl")[-1]["client_accuracy"]
    assert last["global"] == summary(directory)["personal"]["global"]


def test_of_many_clients_a_seeded_sample_is_judged_and_nothing_kept(tmp_path):
    changes = merged(JUDGED, {"evaluate": {"most": 3}})
    directory = run(tmp_path, **changes)
    chosen = evaluated_clients(small(**changes))
    assert len(chosen) == 3
    assert [row["client"] for row in finals(directory)] == chosen
    assert summary(directory)["judged"]["clients"] == 3
    assert summary(directory)["judged"]["of"] == 5
    assert set(summary(directory)["personal"]) == {"global"}
    assert not list((directory / "state").rglob("*.safetensors"))
    own = run(tmp_path, name="own", **merged(changes, {"algorithm": {"name": "fedper"}}))
    assert list((own / "state").rglob("*.local.safetensors"))


# -- BatchNorm -------------------------------------------------------------------------------------
NORM = merged(
    JUDGED,
    {
        "model": {"name": "judged_norm"},
        "rounds": 4,
        "clients_per_round": 4,
        "data": {"samples": 300},
        "train": {"lr": 0.1, "epochs": 3},
    },
)


@pytest.mark.parametrize("public", [0, 30])
def test_statistics_that_do_not_come_up_are_measured_before_the_global_model_is_judged(
    tmp_path, public
):
    changes = merged(NORM, {"data": {"public": {"samples": public}}})
    wanted = lines(run(tmp_path, name="average", **changes) / "rounds.jsonl")[-1]
    assert "batch_norm_measured_over" not in wanted
    for buffers in ("local", "server"):
        model = {"model": {"buffers": buffers}}
        directory = run(tmp_path, name=buffers, **merged(changes, model))
        found = lines(directory / "rounds.jsonl")[-1]
        assert found["batch_norm_measured_over"] == ("public" if public else "test")
        assert found["test_accuracy"] > wanted["test_accuracy"] - 0.1
        assert found["evaluated_sha256"] != found["model_sha256"]
        statistics = fednet.open_run(directory).model()[1]
        assert statistics.running_mean.abs().sum() > 0.1
        with safe_open(directory / "model.safetensors", "pt") as file:
            assert "measured over" in file.metadata()["batch_norm"]
        for row in finals(directory):  # the clients too, whether or not they ever took part
            assert row["accuracy_global"] > 0.6


def test_small_last_batches_are_remarked_on_at_the_start(tmp_path):
    # A batch size that leaves two samples over, of each of the clients.
    n = build.build(small(**NORM), None).federation.parts[0].size
    changes = merged(NORM, {"rounds": 1, "train": {"batch_size": (n - 2) // 2}})
    assert n % 2 == 0
    directory = run(tmp_path, **changes)
    said = [e["text"] for e in lines(directory / "events.jsonl") if e["type"] == "remark"]
    assert len(said) == 1
    assert "left out" in said[0]


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("only", [[], ["head.*"]])
def test_what_is_written_loads_strictly_whatever_the_model_is_made_of(tmp_path, only):
    changes = merged(JUDGED, {"model": {"name": "judged_odd"}, "train": {"only": only}})
    directory = run(tmp_path, **merged(changes, {"checkpoint": {"best": True}}))
    experiment = build.build(small(**changes), None)
    initial = experiment.setting.module().state_dict()
    for file in ("model.safetensors", "best.safetensors", "personal/client-0.safetensors"):
        named = load_file(directory / file)
        module = module_of(experiment, directory / file)
        assert {n: t.dtype for n, t in named.items()} == {n: t.dtype for n, t in initial.items()}
        assert torch.equal(named["one.weight"], named["two.weight"])
        assert torch.equal(named["still.weight"], initial["still.weight"])
        assert torch.equal(named["mask"], initial["mask"])
        assert torch.equal(named["causal"], initial["causal"])
        assert not torch.equal(named["head.weight"], initial["head.weight"])
        assert module.two.weight is module.one.weight
    x = torch.randn(4, 12)
    given = fednet.open_run(directory).model()
    with torch.no_grad():
        expected = module_of(experiment, directory / "model.safetensors").eval()(x)
        assert torch.equal(given(x), expected)


def test_fedrods_personal_files_hold_its_personal_head_too(tmp_path):
    changes = merged(JUDGED, {"algorithm": {"name": "fedrod"}, "clients_per_round": 5})
    directory = run(tmp_path, **changes)
    experiment = build.build(small(**changes), None)
    for row in finals(directory):
        path = directory / "personal" / f"client-{row['client']}.safetensors"
        named = load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata()["beside"].split() == ["p_head.weight", "p_head.bias"]
        weight = named.pop("p_head.weight")
        bias = named.pop("p_head.bias")
        module = experiment.setting.module()
        module.load_state_dict(named, strict=True)
        x, y = experiment.federation.site(row["client"]).test
        with torch.no_grad():
            outputs = module(x) + nn.functional.linear(module.features(x), weight, bias)
        assert int((outputs.argmax(1) == y).sum()) == row["correct_personal"]


@pytest.mark.usefixtures("readings")
@pytest.mark.parametrize("judging", ["none", "auto"])
def test_what_a_method_reports_of_a_client_is_in_its_line(tmp_path, judging):
    data = {"public": {"fraction": 0.2}}
    method = {"name": "fedrds-scaled"}
    changes = merged(SOME, {"algorithm": method, "data": data, "evaluate": {"clients": judging}})
    directory = run(tmp_path, **changes)
    rows = [row for row in lines(directory / "clients.jsonl") if not row.get("final")]
    completed = [(r["round"], c) for r in lines(directory / "rounds.jsonl") for c in r["completed"]]
    assert [(row["round"], row["client"]) for row in rows] == completed
    for row in rows:
        # 0.01 exp(cos), and at the first participation cos = 1
        assert 0.0099 < row["reported"]["sigma"] < 0.0272
        assert row["steps"] > 0
    assert ("accuracy_personal" in rows[0] and rows[0]["accuracy_personal"] is not None) == (
        judging == "auto"
    )


def test_class_means_are_of_the_real_images_and_nan_for_an_absent_class(tmp_path):
    (tmp_path / "condensed").mkdir()
    x = torch.tensor([[[[0.0]]], [[[2.0]]], [[[5.0]]]])
    data = SimpleNamespace(
        train=(x, torch.tensor([0, 0, 2])), classes=3, names=None, inputs=lambda v: v
    )
    exports.keep_class_means(
        tmp_path, SimpleNamespace(federation=SimpleNamespace(data=data), input_shape=(1, 1, 1))
    )
    means = load_file(tmp_path / "condensed" / "means.safetensors")["means"]
    assert means[0].item() == 1.0
    assert means[1].isnan().all()
    assert means[2].item() == 5.0


def test_condensed_samples_that_are_no_images_are_not_written_as_such(tmp_path):
    directory = run(tmp_path, algorithm={"name": "feddc", "iterations": 1, "ft_epochs": 1})
    assert not (directory / "condensed").exists()


def test_a_personal_model_is_the_version_that_was_used_last(tmp_path):
    experiment = build.build(small(), None)
    initial = experiment.setting.initial
    (tmp_path / "state" / "run").mkdir(parents=True)
    store = ClientStore(tmp_path / "state" / "run", experiment.algorithm.Client)
    for version, factor in (("1-0-0", 2.0), ("2-0-0", 3.0)):
        store.save(2, version, Record(), initial * factor)
    exports.keep_personal(tmp_path, "run", {2: "1-0-0", 1: "1-0-0"}, experiment, None)
    assert [p.name for p in (tmp_path / "personal").iterdir()] == ["client-2.safetensors"]
    found = load_file(tmp_path / "personal" / "client-2.safetensors")
    assert torch.equal(found["head.weight"], 2 * initial["head.weight"])
