from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import pytest

from fednet import config as configuration
from fednet import loading, registry
from fednet.algorithms.base import Algorithm
from fednet.config import fit, from_mapping, from_text, load, to_mapping, to_yaml
from fednet.config.keys import keys as documented
from fednet.config.keys import sections
from fednet.config.tree import wrap
from fednet.errors import ConfigError

PARTS = {
    "algorithm": {"name": "toy-avg"},
    "model": {"name": "toy-net"},
    "task": "toy-task",
    "data": {"dataset": "toy-set", "partition": {"scheme": "toy-deal"}},
}
# four lines
HEAD = (
    "algorithm: toy-avg\nmodel: toy-net\ntask: toy-task\n"
    "data: {dataset: toy-set, partition: toy-deal}\n"
)


class ToyAvg(Algorithm):
    sums_updates = True


class ToyProx(Algorithm):
    sgd_only = momentum_free = True

    class Config(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
        mu: Annotated[float, msgspec.Meta(ge=0)] = 0.01
        lambda_: float = msgspec.field(default=1.0, name="lambda")


class ToyPersonal(Algorithm):
    personalised = True


class ToyPublic(Algorithm):
    needs_public = True


def toy_net(*, input_shape, classes, hidden=8): ...


class Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    hidden: list[int] = msgspec.field(default_factory=lambda: [8, 8])


toy_net.Options = Options


def toy_set(root, seed, *, samples: int = 100, shape: tuple[int, ...] = (1, 4, 4)): ...


def toy_files(root, *, path: str): ...


def toy_deal(y, clients, rng, *, alpha: float = 0.3): ...


def toy_shards(y, clients, rng, *, per_client: int = 2): ...


class ToyTask: ...


TOYS = (
    (registry.algorithm, "toy-avg", ToyAvg),
    (registry.algorithm, "toy-prox", ToyProx),
    (registry.algorithm, "toy-public", ToyPublic),
    (registry.algorithm, "toy-personal", ToyPersonal),
    (registry.model, "toy-net", toy_net),
    (registry.dataset, "toy-set", toy_set),
    (registry.dataset, "toy-files", toy_files),
    (registry.partitioner, "toy-deal", toy_deal),
    (registry.partitioner, "toy-shards", toy_shards),
    (registry.task, "toy-task", ToyTask),
)


@pytest.fixture(autouse=True)
def toys():
    """The parts above."""
    for parts, name, part in TOYS:
        parts(name)(part)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file below the working directory and returns its name, so that errors name it
    alone.
    """
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def error(source, sets=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, sets)
    return str(caught.value)


# -- defaults and the way back ---------------------------------------------------------------------
def test_defaults_are_those_that_are_promised():
    c = from_mapping({}, check_parts=False)
    assert (c.name, c.seed, c.rounds, c.clients, c.participation) == ("quickstart", 0, 20, 10, 0.5)
    assert (
        c.algorithm.name,
        c.model.name,
        c.model.buffers,
        c.data.dataset,
        c.data.partition.scheme,
    ) == ("fedavg", "lenet5", "average", "digits", "dirichlet")
    assert (c.train.epochs, c.train.batch_size, c.train.lr, c.train.momentum) == (1, 64, 0.01, 0.0)
    assert (c.round.lost.closed, c.round.lost.silent, c.round.join, c.round.void_rounds) == (
        3,
        10,
        "auto",
        3,
    )
    assert (c.round.join_s(), c.round.join_s(alone=True)) == (60, None)
    bound = from_mapping({"round": {"join": 5}}, check_parts=False).round
    assert (bound.join_s(), bound.join_s(alone=True)) == (5, 5)
    assert c.evaluate.global_ is True
    assert c.privacy.delta == 1e-5


def test_mapping_holds_every_key_under_the_manuals_names():
    made = to_mapping(from_mapping({}, check_parts=False))
    assert list(made)[:6] == ["name", "load", "seed", "rounds", "clients", "participation"]
    assert made["evaluate"] == {
        "every": 1,
        "global": True,
        "clients": "auto",
        "most": 1000,
        "finetune": False,
        "shared": "latest",
        "keep_local": "auto",
        "batch_size": 512,
    }
    assert made["stop"] == {"accuracy": None, "megabytes": None, "seconds": None}
    assert "options" not in made["algorithm"]


def test_options_of_parts_are_filled_in_and_written_beside_the_name():
    c = from_mapping(
        {
            **PARTS,
            "algorithm": {"name": "toy-prox", "lambda": 2},
            "model": {"name": "toy-net", "hidden": [3]},
        }
    )
    assert c.algorithm.options == {"mu": 0.01, "lambda": 2.0}
    assert to_mapping(c)["model"] == {
        "name": "toy-net",
        "buffers": "average",
        "weights": None,
        "base": "sites",
        "sha256": None,
        "adapters": None,
        "clients": None,
        "others": [],
        "hidden": [3],
    }
    assert to_mapping(c)["data"]["shape"] == [1, 4, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clients_per_round": 3},
        {"train": {"lr": 1e-7, "clip_norm": 1}},
        {"wire": {"up": {"delta": []}}},
        {"name": "no"},
        {"model": {"name": "toy-net", "weights": "1e-3"}},
        {"link": {"per_client": {"0-2,5": {"up_mbps": 1}}}},
        {
            "faults": {
                "random": {"crash": 0.1},
                "schedule": [{"round": 2, "client": 1, "kind": "crash", "rounds": 2}],
            }
        },
    ],
)
def test_what_is_written_reads_back_equal(changes, tmp_path):
    c = from_mapping({**PARTS, **changes})
    text = to_yaml(c)
    (tmp_path / "config.yaml").write_text(text)
    again = load(tmp_path / "config.yaml")
    assert again == c
    assert to_yaml(again) == text


@pytest.mark.parametrize(
    ("participation", "clients", "m"),
    [(0.5, 10, 5), (0.25, 10, 3), (0.24, 10, 2), (0.01, 10, 1), (1.0, 7, 7), (0.5, 5, 3)],
)
def test_cohort_is_the_fraction_rounded_half_up_and_at_least_one(participation, clients, m):
    assert (
        from_mapping({**PARTS, "participation": participation, "clients": clients}).cohort_size == m
    )


def test_clients_per_round_stands_in_for_the_default_participation():
    c = from_mapping({**PARTS, "clients_per_round": 4})
    assert (c.cohort_size, c.participation) == (4, None)


@pytest.mark.parametrize(
    ("schedule", "round", "lr"),
    [
        ("constant", 7, 1.0),
        ("exponential(0.5)", 1, 1.0),
        ("exponential(0.5)", 3, 0.25),
        ("step(10, 0.1)", 10, 1.0),
        ("step(10, 0.1)", 11, 0.1),
        ("cosine", 1, 1.0),
        ("cosine", 11, 0.5),
    ],
)
def test_learning_rate_follows_its_schedule(schedule, round, lr):
    c = from_mapping({**PARTS, "train": {"lr": 1.0, "schedule": schedule}})
    assert c.train.lr_at(round, 20) == pytest.approx(lr)


def test_a_clients_link_is_its_own_then_the_federations_then_the_profiles():
    link = {
        "profile": "4g",
        "up_mbps": 2,
        "step_ms": 7,
        "per_client": {"0-1,4": {"down_mbps": 5, "latency_ms": 0}},
    }
    c = from_mapping({**PARTS, "link": link}).link
    two, four = c.of(2, 5), c.of(4, 5)
    assert (four.up_mbps, four.down_mbps, four.latency_ms, four.step_ms) == (2, 5, 0, 7)
    assert (two.up_mbps, two.down_mbps, two.latency_ms, two.jitter_ms) == (
        2,
        9,
        85,
        0,
    )
    plain = from_mapping(PARTS).link.of(0, 5)
    assert (plain.up_mbps, plain.down_mbps, plain.latency_ms) == (None, None, 0)


# -- YAML's traps ----------------------------------------------------------------------------------
def test_a_number_in_scientific_notation_is_a_number(written):
    assert load(written(HEAD + "train: {lr: 1e-3}")).train.lr == 0.001


def test_a_character_that_json_writes_in_two_halves_is_one(written):
    config = load(written(r'data: {root: "/a/\ud83d\ude00"}'))
    assert config.data.root == "/a/\N{GRINNING FACE}"
    assert from_text(to_yaml(config), "the server") == config


def test_no_is_text_and_not_false(written):
    assert load(written(HEAD + "name: no")).name == "no"
    assert (
        error(written(HEAD + "evaluate: {global: yes}"))
        == "c.yaml:5: evaluate.global: expected true or false, got 'yes'."
    )


def test_doubled_key_names_both_lines(written):
    assert error(written("seed: 1\nrounds: 2\nseed: 3\n")) == (
        "c.yaml:3: the key 'seed' stands twice; the first is at c.yaml:1. Keep one of them."
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [b", "c.yaml:1: not valid YAML"),
        ("- 1", "c.yaml:1: the configuration: expected a mapping of keys to values, got a list."),
        (
            "a: !!python/object:os.system x",
            "the tag 'tag:yaml.org,2002:python/object:os.system' is not allowed",
        ),
        ("a: &x [*x]", "an anchor holds itself"),
        ("train: {lr: .nan}", "c.yaml:1: train.lr: expected a finite number, got nan."),
        (f"seed: {2**70}", f"seed: expected a whole number that 64 bits hold, got {2**70}."),
        ("train: {lr: 100000000000000000000}", "train.lr: expected a whole number that 64 bits"),
        ("link: {trace: [a]}", "link.trace: expected text or a list of 2, each item text or null"),
        ("link: {trace: [a, [b]]}", "link.trace[1]: expected text, got a list."),
        ("? [1, 2]\n: 3", "a key must be plain text"),
        ("seed: 0x1F", "seed: expected a whole number, got '0x1F'."),
        ("seed: 12:30", "seed: expected a whole number, got '12:30'."),
        (r'name: "\ud83d"', r"c.yaml:1: '\ud83d' holds half a character; write it whole."),
        (r'"\ude00": 1', r"'\ude00' holds half a character"),
        (r'extends: "\ud83d.yaml"', r"'\ud83d.yaml' holds half a character"),
    ],
)
def test_what_strict_yaml_refuses(written, text, says):
    assert says in error(written(text))


def test_no_number_of_times_asks_more_clients_than_there_are(written):
    assert load(written(HEAD + "round: {ask: 1.0e+308}\n")).asked == 10


# -- errors, word for word -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "algorithm:\n  name: toy-prox\n  mu: big",
            "c.yaml:3: algorithm.mu: expected a float >= 0, got 'big'.",
        ),
        (
            "algorithm: {name: toy-prox, mu: -1}",
            "c.yaml:1: algorithm.mu: expected a float >= 0, got -1.",
        ),
        ("rounds: 1.5", "c.yaml:1: rounds: expected a whole number >= 1, got 1.5."),
        ("rounds: true", "c.yaml:1: rounds: expected a whole number >= 1, got true."),
        (
            "train:\n\n  optimizer: sdg",
            "c.yaml:3: train.optimizer: expected one of sgd, adam, adamw, got 'sdg'. Did you mean "
            "sgd?",
        ),
        (
            "train: {clip_norm: []}",
            "c.yaml:1: train.clip_norm: expected a float > 0 or null, got a list.",
        ),
        (
            "round: {start: some}",
            "c.yaml:1: round.start: expected all or a whole number >= 1, got 'some'.",
        ),
        ("load: a.py", "c.yaml:1: load: expected a list, each item text, got 'a.py'."),
        (
            "model: {weights: 3}",
            "c.yaml:1: model.weights: expected text or null, got 3. Put it in quotes to make it "
            "text.",
        ),
        (
            "track: [wandbe]",
            "c.yaml:1: track[0]: expected one of tensorboard, mlflow, wandb, got 'wandbe'. Did you "
            "mean wandb?",
        ),
        (
            "faults:\n  schedule:\n    - {round: 1, client: 0, kind: drop_before_sending}\n    - "
            "{round: 0, kind: crash}",
            "c.yaml:4: faults.schedule[1].round: expected a whole number >= 1, got 0.",
        ),
    ],
)
def test_wrong_value_is_named_with_place_and_what_is_allowed(written, text, says):
    assert error(written(text)) == says


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("comm_round: 3", "rounds"),
        ("join_ratio: 0.1", "participation"),
        ("fraction_fit: 0.1", "participation"),
        ("num_rounds: 3", "rounds"),
        ("min_available_nodes: 3", "round.start"),
        ("min_clients: 3", "round.min_results"),
        ("fraction-evaluate: 0.5", "evaluate.clients"),
        ("eg: 5", "evaluate.every"),
        ("jr: 0.5", "participation"),
        ("train_timeout: 3", "round.deadline"),
        ("initial_ckpt: a.pt", "model.weights"),
        ("train_script: client.py", "load"),
        ("local_epochs: 3", "train.epochs"),
        ("global_rounds: 3", "rounds"),
        ("num_clients: 3", "clients"),
        ("train: {lr_local: 1}", "train.lr"),
        ("batch: 3", "train.batch_size"),
        ("lr: 0.1", "train.lr"),
        ("train: {batchsize: 3}", "train.batch_size"),
        ("seeds: 3", "seed"),
        ("data: {alpha: 0.1}", "data.partition.alpha"),
        ("data: {partition: {scheme: toy-shards, per_clients: 1}}", "data.partition.per_client"),
        ("algorithm: {name: toy-prox, mue: 1}", "algorithm.mu"),
        ("train: {learning-rate: 1}", "train.lr"),
        ("privacy: {noise_multiplier: 1}", "privacy.noise"),
        ("aggregation: {name: median}", "aggregation.rule"),
        ("secure_aggregation: true", "privacy.secagg.protocol"),
        ("on_fit_config_fn: f", "train.schedule"),
        ("ls: 5", "train.epochs"),
        ("algorithm: {name: toy-prox, nu: 1}", "algorithm.mu"),  # and not num_rounds, for rounds
    ],
)
def test_unknown_key_is_answered_with_the_name_meant(written, text, meant):
    model = "" if text.startswith("model") else "model: toy-net\n"
    data = "" if text.startswith("data") else "data: {dataset: toy-set, partition: toy-deal}\n"
    text = text.replace("data: {", "data: {dataset: toy-set, ") if text.startswith("data") else text
    method = "" if text.startswith("algorithm") else "algorithm: toy-avg\n"
    if "partition" not in text and text.startswith("data"):
        text = text.replace("}", ", partition: toy-deal}")
    assert error(written(model + data + method + "task: toy-task\n" + text)).endswith(
        f" Did you mean {meant}?"
    )


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("proximal_mu: 0.1", "algorithm: {name: fedprox, mu: 0.1}."),
        ("proximal-mu: 0.1", "algorithm: {name: fedprox, mu: 0.1}."),
        ("algorithm: {name: toy-avg, proximal_mu: 1}", "algorithm: {name: fedprox, mu: 0.1}."),
        ("times: 3", "fednet sweep CONFIG --seeds 0,1,2."),
        ("t: 3", "fednet sweep CONFIG --seeds 0,1,2."),
        ("num_classes: 10", "for a dataset of your own fednet.Data(classes=...)."),
        ("client_drop_rate: 0.1", "faults.schedule, kind drop_before_sending."),
        ("min_evaluate_clients: 3", "evaluate.clients is auto, all or none."),
        ("min_evaluate_nodes: 3", "evaluate.clients is auto, all or none."),
    ],
)
def test_unknown_key_that_has_none_of_ours_is_answered_with_the_way(written, text, way):
    method = "" if text.startswith("algorithm") else "algorithm: toy-avg\n"
    head = "model: toy-net\ntask: toy-task\ndata: {dataset: toy-set, partition: toy-deal}\n"
    says = error(written(head + method + text))
    assert says.endswith(f" {way}")
    assert "Did you mean" not in says


def test_what_a_foreign_name_is_answered_with_is_there():
    known = {key.path for key in documented()} | {*sections(), "data.partition.alpha"}
    foreign = fit.foreign()
    assert len(foreign["keys"]) > 80
    assert not {name: key for name, key in foreign["keys"].items() if key not in known}
    assert not foreign["keys"].keys() & foreign["ways"].keys()
    assert not foreign["gone"].keys() & known


@pytest.mark.parametrize("key", sorted(fit.foreign()["gone"]))
def test_a_key_that_is_gone_is_refused_in_a_sentence_that_says_so(key, written):
    section, _, name = key.partition(".")
    says = error(written(f"{section}:\n  {name}: 1\n"))
    assert says.startswith(f"c.yaml:2: {key} is gone: ")
    assert "unknown key" not in says


def test_option_of_another_part_is_an_unknown_key(written):
    says = error(
        written("data:\n  dataset: toy-set\n  partition:\n    scheme: toy-shards\n    alpha: 0.3\n")
    )
    assert (
        says
        == "c.yaml:5: unknown key data.partition.alpha; data.partition has per_client, scheme, "
        "seed."
    )


def test_missing_option_is_named(written):
    says = error(written("data:\n  dataset: toy-files\n  partition: toy-deal\n"))
    assert says == (
        "c.yaml:1: data.path is missing; expected text. fednet itself gives a dataset only root, "
        "download and seed, by these names."
    )


def test_unknown_part_is_answered_with_the_nearest(written):
    says = error(
        written(
            "model: toy-net\ntask: toy-task\ndata: {dataset: toy-set, partition: "
            "toy-deal}\nalgorithm: {name: toy-porx}"
        )
    )
    assert says.startswith(
        "c.yaml:4: algorithm: unknown algorithm 'toy-porx'. Did you mean 'toy-prox'? Known: "
    )


# -- layers ----------------------------------------------------------------------------------------
def test_extends_starts_from_another_file_relative_to_its_own(written, tmp_path):
    (tmp_path / "deep").mkdir()
    written(HEAD + "rounds: 3\ntrain: {lr: 0.5, momentum: 0.9}\n", "base.yaml")
    c = load(written("extends: ../base.yaml\ntrain: {lr: 0.1}\n", "deep/x.yaml"))
    assert (c.rounds, c.train.lr, c.train.momentum) == (3, 0.1, 0.9)


def test_another_part_starts_its_mapping_afresh(written):
    written(
        HEAD.replace("algorithm: toy-avg", "algorithm: {name: toy-prox, mu: 5}").replace(
            "partition: toy-deal", "partition: {scheme: toy-deal, alpha: 9}"
        ),
        "base.yaml",
    )
    c = load(
        written(
            "extends: base.yaml\nalgorithm: {name: toy-prox, lambda: 3}\ndata: {partition: "
            "{scheme: toy-shards}}"
        )
    )
    assert c.algorithm.options == {"mu": 5.0, "lambda": 3.0}
    assert c.data.partition.options == {"per_client": 2}


def test_another_dataset_drops_the_old_ones_options_and_keeps_the_partition(written):
    written(
        HEAD.replace("dataset: toy-set,", "dataset: toy-set, samples: 7, validation: 0.1,"),
        "base.yaml",
    )
    c = load(written("extends: base.yaml\ndata: {dataset: toy-files, path: x}"))
    assert c.data.options == {"path": "x"}
    assert (c.data.validation, c.data.partition.scheme) == (0.1, "toy-deal")


def test_files_that_extend_each_other_are_an_error(written):
    written("extends: c.yaml", "base.yaml")
    assert "base.yaml:1: extends: c.yaml leads back to itself." in error(
        written("extends: base.yaml")
    )


def test_later_layer_may_change_from_participation_to_a_count(written):
    written(HEAD + "participation: 0.3", "base.yaml")
    assert load(written("extends: base.yaml\nclients_per_round: 4")).cohort_size == 4
    assert load("base.yaml", ["clients_per_round=2"]).cohort_size == 2


def test_set_goes_through_the_same_validator(written):
    name = written(HEAD)
    assert load(name, ["train.lr=1e-1"]).train.lr == 0.1
    assert (
        error(name, ["train.lr=big"])
        == "--set train.lr=big: train.lr: expected a float > 0, got 'big'."
    )
    assert error(name, ["lr=1"]).endswith("Did you mean train.lr?")
    assert (
        error(name, ["train.lr"])
        == "--set train.lr: expected key.path=value, such as train.lr=0.1."
    )


def test_set_of_a_mapping_replaces_the_whole_mapping(written):
    name = written(HEAD.replace("toy-avg", "{name: toy-prox, mu: 5}"))
    assert load(name, ["algorithm.lambda=2"]).algorithm.options == {"mu": 5.0, "lambda": 2.0}
    assert load(name, ["algorithm={name: toy-prox, lambda: 2}"]).algorithm.options == {
        "mu": 0.01,
        "lambda": 2.0,
    }


def test_order_of_sets_on_different_keys_does_not_matter(written):
    sets = ["algorithm.mu=0.5", "algorithm.name=toy-prox"]
    assert load(written(HEAD), sets) == load(written(HEAD), sets[::-1])


def test_sets_may_come_as_a_mapping_from_python(written):
    c = load(
        written(HEAD), {"rounds": 5, "train.lr": 0.5, "algorithm": {"name": "toy-prox", "mu": 1}}
    )
    assert (c.rounds, c.train.lr, c.algorithm.options["mu"]) == (5, 0.5, 1.0)


# -- combinations ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"participation": 0.5, "clients_per_round": 3},
            "clients_per_round: participation is given too; keep one of them.",
        ),
        ({"clients_per_round": 11}, "clients_per_round: 11 is more than the 10 clients there are."),
        (
            {"participation": None},
            "participation: is null and clients_per_round is not given; give one of them.",
        ),
        (
            {"round": {"min_results": 6}},
            "round.min_results: 6 is more than the 5 clients asked in a round.",
        ),
        (
            {"round": {"select_extra": 6}},
            "round.select_extra: 5 + 6 clients a round are more than the 10 there are.",
        ),
        (
            {"round": {"first": 6}},
            "round.first: expected a whole number from min_results, 1, to the 5 clients asked in "
            "a round, got 6.",
        ),
        ({"round": {"start": 11}}, "round.start: 11 is more than the 10 clients there are."),
        (
            {"link": {"clock": "virtual"}},
            "link.clock: virtual needs link.step_ms, the milliseconds of one training step, "
            "or devices.trace.",
        ),
        (
            {"link": {"per_client": {"8-10": {}}}},
            "link.per_client.8-10: there is no client 10; ids go from 0 to 9.",
        ),
        (
            {"privacy": {"noise": 1.0}},
            "privacy.noise: needs privacy.clip, the norm that it is a multiple of.",
        ),
        (
            {"stop": {"accuracy": 0.5}, "evaluate": {"every": 0}},
            "stop.accuracy: needs evaluate.every of at least 1: nothing would measure it.",
        ),
        ({"availability": {"model": "bernoulli"}}, "availability: bernoulli needs p."),
        (
            {"availability": {"model": "always", "p": 0.1}},
            "availability.p: does not belong to always, which has no options.",
        ),
        (
            {"faults": {"schedule": [{"round": 1, "kind": "delay", "client": 1}]}},
            "faults.schedule: number 1, delay, needs seconds.",
        ),
        (
            {"faults": {"schedule": [{"round": 1, "kind": "duplicate", "client": 10}]}},
            "faults.schedule: number 1: there is no client 10; ids go from 0 to 9.",
        ),
        (
            {"data": {**PARTS["data"], "public": {"samples": 5, "fraction": 0.1}}},
            "data.public: both samples and fraction are given; keep one of them.",
        ),
        (
            {"data": {**PARTS["data"], "public": {"fraction": 1.0}}},
            "data.public.fraction: expected a float >= 0 and < 1, got 1.0.",
        ),
        (
            {"data": {**PARTS["data"], "validation": 0.5, "public": {"fraction": 0.5}}},
            "data.validation: validation and public.fraction together leave no sample for the "
            "clients.",
        ),
        (
            {"data": {**PARTS["data"], "client_test": "all"}},
            "data.client_test: expected one of like_train, merge_split, none, got 'all'.",
        ),
        (
            {"link": {"per_client": {"0": {}, "1-2": {"up_mbps": -1}}}},
            "link.per_client.1-2.up_mbps: expected a float > 0 or lognormal(median, sigma) or "
            "uniform(low, high) or null, got -1.",
        ),
        (
            {"wire": {"up": {"delta": ["fp16", 8]}}},
            "wire.up.delta[1]: expected text, got 8. Put it in quotes to make it text.",
        ),
        (
            {"algorithm": "toy-prox", "train": {"optimizer": "adam"}},
            "train.optimizer: toy-prox assumes plain SGD steps; expected sgd, got 'adam'.",
        ),
        (
            {"algorithm": "toy-prox", "train": {"momentum": 0.9}},
            "train.momentum: toy-prox assumes local steps without momentum; expected 0, got 0.9.",
        ),
        (
            {"algorithm": "toy-personal", "evaluate": {"keep_local": "never"}},
            "evaluate.keep_local: toy-personal is judged by its clients' own models; expected auto "
            "or always, got 'never'.",
        ),
        (
            {"algorithm": "toy-public"},
            "data.public: toy-public needs samples held out for the server; set "
            "data.public.samples or data.public.fraction.",
        ),
        (
            {
                "algorithm": "toy-public",
                "data": {"dataset": "site", "shape": [4]},
            },
            "data.dataset: toy-public needs samples held out for the server; with site the sites "
            "have them all.",
        ),
        (
            {"algorithm": "toy-prox", "privacy": {"clip": 1.0}},
            "privacy.clip: toy-prox does not fold its replies as a sum of updates, so clipping "
            "and noise cannot be applied to it.",
        ),
    ],
)
def test_impossible_combination_is_refused(changes, says):
    with pytest.raises(ConfigError) as caught:
        from_mapping({**PARTS, **changes}, where="here")
    assert str(caught.value) == f"here: {says}"


def test_unknown_fault_and_unknown_kind_are_refused():
    with pytest.raises(
        ConfigError, match=r"unknown kind of fault 'delays'\. Did you mean 'delay'\? Known: "
    ):
        from_mapping({**PARTS, "faults": {"random": {"delays": 0.1}}})
    with pytest.raises(
        ConfigError,
        match=r"wire.up.deltas: unknown kind 'deltas'\. Did you mean 'delta'\? Known: ",
    ):
        from_mapping({**PARTS, "wire": {"up": {"deltas": []}}})


@pytest.mark.parametrize(
    ("text", "call"),
    [("fp16", ("fp16", ())), ("topk(0.01)", ("topk", (0.01,))), ("qsgd( 8 )", ("qsgd", (8,)))],
)
def test_compressor_is_a_name_with_numbers(text, call):
    assert configuration.call(text) == call


@pytest.mark.parametrize("text", ["topk(x)", "topk(0.1", "TopK(1)", "__import__('os')", ""])
def test_compressor_of_any_other_shape_is_refused(text):
    with pytest.raises(ConfigError):
        configuration.call(text)


# -- a user's own files ----------------------------------------------------------------------------
OWN = """
from fednet.registry import dataset
@dataset("{name}")
def mine(root, *, window: int = 3): ...
"""


def test_files_under_load_are_found_beside_the_file_that_names_them(written, tmp_path):
    (tmp_path / "deep").mkdir()
    written(OWN.format(name="own-one"), "deep/own_one.py")
    c = load(
        written(
            "load: [own_one.py]\nalgorithm: toy-avg\nmodel: toy-net\ntask: toy-task\ndata: "
            "{dataset: own-one, partition: toy-deal}",
            "deep/x.yaml",
        )
    )
    assert c.load == (str(tmp_path / "deep/own_one.py"),)
    assert c.data.options == {"window": 3}


def test_mapping_from_elsewhere_imports_nothing(tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit('imported')")
    from_mapping({**PARTS, "load": [str(tmp_path / "bad.py")]})


def test_missing_file_under_load_is_named_with_its_place(written, tmp_path):
    assert (
        error(written("seed: 1\nload:\n  - nope.py\n"))
        == f"c.yaml:3: load[0]: there is no file {tmp_path / 'nope.py'}."
    )


def test_loaded_file_is_known_by_its_hash_and_runs_once(tmp_path):
    (tmp_path / "counted.py").write_text(
        "import fednet.loading as l\nl.count = getattr(l, 'count', 0) + 1\n"
    )
    first = loading.load_parts([tmp_path / "counted.py"])
    assert loading.load_parts([tmp_path / "counted.py"]) == first
    assert loading.count == 1
    assert loading.loaded()["counted.py"] == first[0].sha256
    (tmp_path / "counted.py").write_text("import fednet.loading as l\nl.count = 10\n")
    edited = loading.load_parts([tmp_path / "counted.py"])
    assert loading.count == 10
    assert edited[0].sha256 != first[0].sha256


def test_exception_in_a_users_file_keeps_its_cause(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(loading.UserFileError, match="raised ZeroDivisionError") as caught:
        loading.load_parts([tmp_path / "broken.py"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "sets", [["algorithm=fedprox", "algorithm.mu=0.5"], ["algorithm.mu=0.5", "algorithm=fedprox"]]
)
def test_a_parts_bare_name_and_its_option_may_be_set_apart_in_any_order(sets):
    made = load(None, sets).algorithm
    assert (made.name, made.options["mu"]) == ("fedprox", 0.5)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "run\n"},
        {"train": {"schedule": "cosine\n"}},
        {"link": {"up_mbps": "uniform(1,2)\n"}},
        {"link": {"profile": "3g\n"}},
    ],
    ids=str,
)
def test_no_text_of_a_pattern_ends_in_a_new_line(given):
    with pytest.raises(ConfigError, match="got "):
        from_mapping({**PARTS, **given})


@pytest.mark.parametrize(
    "schedule",
    ["step(0,0.1)", "step(3,0)", "exponential(0)", "exponential(.)", "exponential(-1)"],
)
def test_a_schedule_that_only_a_task_would_stumble_over_is_refused_here(schedule):
    with pytest.raises(ConfigError, match=r"train\.schedule: .* has no learning rate for each of"):
        from_mapping({**PARTS, "train": {"schedule": schedule}})
    with pytest.raises(ConfigError, match=r"train\.schedule"):
        from_mapping({**PARTS, "rounds": 200, "train": {"schedule": "exponential(1e9)"}})


@pytest.mark.parametrize(
    "given",
    [
        {"clients": 10**12},
        {"train": {"threads": 10**9}},
        {"link": {"up_mbps": "uniform(1,1e999)"}},
        {"round": {"deadline": 1.1e9}},
        {"faults": {"schedule": [{"round": 1, "kind": "delay", "client": 0, "seconds": 1.1e9}]}},
        {"faults": {"schedule": [{"round": 1, "kind": "slow", "client": 0, "factor": 1.1e9}]}},
        {"faults": {"schedule": [{"round": 1, "kind": "crash", "client": 0, "rounds": 2 * 10**9}]}},
    ],
    ids=str,
)
def test_numbers_that_no_machine_can_follow_are_refused(given):
    with pytest.raises(ConfigError, match="expected"):
        from_mapping({**PARTS, **given})


def test_an_option_of_an_annotation_that_is_not_ours_is_refused_with_its_type():
    class Own(msgspec.Struct, forbid_unknown_fields=True):
        of: Sequence[dict[str, int]] = ()
        some: set[int] = set()

    for given, says in (
        ({"of": [1]}, r"of\[0\]: expected a mapping, got 1"),
        ({"some": ["a"]}, "some: expected"),
    ):
        with pytest.raises(ConfigError, match=says):
            fit.fit(wrap(given, "here"), Own)


def test_numbers_of_numpy_and_paths_are_values_from_python_and_classes_are_not():
    given = {"rounds": np.int64(3), "train": {"lr": np.float32(0.5)}, "data": {"root": Path("x")}}
    made = from_mapping(given)
    assert (made.rounds, made.train.lr, made.data.root) == (3, 0.5, "x")
    with pytest.raises(ConfigError, match="holds half a character"):
        from_mapping({"data": {"root": Path(os.fsdecode(b"\xff"))}})
    for value in (Path, object(), np.zeros(3)):
        with pytest.raises(ConfigError, match=r"model\.name: a configuration holds text.*model\("):
            from_mapping({"model": {"name": value}})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("clases: 3", "c.yaml:4: unknown key data.clases; .* Did you mean data.classes"),
        ("shape: 4", "data.shape: expected a list"),
        ("shape: [a]", r"data.shape\[0\]: expected a whole number >= 1, got 'a'"),
        ("classes: '3'", "data.classes: expected a whole number >= 1 or a list"),
        ("targets: 0", "data.targets: expected a whole number >= 1"),
        ("format: {a: 1}", "data.format: expected text"),
        ("size: x", "data.size: expected a whole number"),
        ("format: toy-set, size: 32", "unknown key data.size"),
    ],
)
def test_what_is_said_of_sites_data_is_checked_before_they_come(more, says):
    head = HEAD.replace("data: {dataset: toy-set, partition: toy-deal}\n", "")
    keys = {"shape": "[4]", "classes": "3"} | {more.partition(":")[0]: more.partition(": ")[2]}
    data = ", ".join(f"{key}: {value}" for key, value in keys.items())
    with pytest.raises(ConfigError, match=says):
        from_text(f"{head}data: {{dataset: site, {data}}}\n", "c.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", {"scheme": "toy-deal"}),
        ("partition", {"alpha": 0.1}),
        ("partition", {"seed": 3}),
        ("validation", 0.1),
        ("public", {"samples": 5}),
        ("client_test", "none"),
        ("baseline_pool", "full"),
        ("feature_noise", 0.1),
    ],
)
def test_what_divides_a_runs_data_is_refused_where_sites_bring_theirs(key, value):
    data = {"dataset": "site", "shape": [4], "classes": 3}
    with pytest.raises(ConfigError, match=f"here: data.{key}: says how a run divides its data"):
        from_mapping({**PARTS, "data": {**data, key: value}}, where="here")
    plain = configuration.to_mapping(from_mapping({**PARTS, "data": data}))
    assert from_mapping(plain) == from_mapping({**PARTS, "data": data})  # its own defaults pass


def test_another_configurations_division_does_not_stay_where_sites_bring_their_data(tmp_path):
    (tmp_path / "c.yaml").write_text(f"{HEAD}".replace("toy-deal}", "toy-deal, validation: 0.2}"))
    sites = "data={dataset: site, shape: [4], classes: 3}"
    for changes in ([sites], ["data.dataset=site", "data.shape=[4]", "data.classes=3"]):
        assert load(tmp_path / "c.yaml", changes).data.validation == 0


def test_sites_data_take_the_options_of_what_reads_them_and_any_of_a_dataset_of_their_own():
    for more in ({"size": 32, "grey": True}, {"format": "a-sites-own", "anything": [1]}):
        data = {"dataset": "site", "shape": [4], "classes": 3, **more}
        made = from_mapping({**PARTS, "data": data})
        assert made.data.options == {"shape": [4], "classes": 3, **more}
