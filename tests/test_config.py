from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec
import numpy as np
import pytest
import yaml

from fednet import config as configuration
from fednet import loading, registry
from fednet.algorithms.base import Algorithm
from fednet.config import fit, from_mapping, load, to_mapping, to_yaml
from fednet.config.keys import keys as documented
from fednet.config.keys import sections
from fednet.errors import ConfigError

T = TypeVar("T")
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


def toy_any(root, **options): ...


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
    (registry.dataset, "toy-any", toy_any),
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
    c = from_mapping({})
    assert (c.name, c.seed, c.rounds, c.clients, c.participation) == (
        "fedavg-digits",
        0,
        20,
        10,
        0.5,
    )
    assert (
        c.algorithm.name,
        c.model.name,
        c.model.buffers,
        c.data.dataset,
        c.data.partition.scheme,
    ) == ("fedavg", "lenet5", "average", "digits", "dirichlet")
    assert (c.train.epochs, c.train.batch_size, c.train.lr, c.train.momentum) == (5, 16, 0.05, 0.0)
    assert (c.round.lost.closed, c.round.lost.silent, c.round.join, c.round.void_rounds) == (
        3,
        10,
        "auto",
        3,
    )
    assert (c.round.join_s(), c.round.join_s(alone=True)) == (60, None)
    bound = from_mapping({"round": {"join": 5}}).round
    assert (bound.join_s(), bound.join_s(alone=True)) == (5, 5)
    assert c.evaluate.global_ is True
    assert c.privacy.delta == 1e-5


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


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.05), ("adam", 0.001), ("adamw", 0.001)])
def test_a_rate_that_is_not_given_is_the_optimizers(optimizer, lr):
    for given in ({}, {"lr": None}):
        c = from_mapping({**PARTS, "train": {"optimizer": optimizer, **given}})
        assert (c.train.lr, to_mapping(c)["train"]["lr"]) == (lr, lr)
    assert from_mapping({**PARTS, "train": {"optimizer": optimizer, "lr": 0.3}}).train.lr == 0.3


def test_no_is_text_and_not_false(written):
    assert load(written(HEAD + "name: no")).name == "no"
    assert (
        error(written(HEAD + "evaluate: {global: yes}"))
        == "c.yaml:5: evaluate.global: expected true or false, got 'yes'."
    )


def test_a_list_of_models_is_the_first_one_with_the_others():
    first = {"name": "mlp", "clients": 0}
    other = {"name": "mlp", "hidden": [4], "clients": "1-2"}
    c = from_mapping({"clients": 3, "algorithm": "fedproto", "model": [first, other]})
    assert (c.model.clients, configuration.parts.model_owners(c)) == ("0", {1: 0, 2: 0})
    hidden = [one.model.options["hidden"] for one in configuration.parts.each_model(c)]
    assert hidden == [configuration.parts.model_of(c, 0)["hidden"], (4,)]


def test_a_users_own_type_may_pass_over_unknown_keys():
    class Loose(msgspec.Struct, Generic[T]):
        x: T
        more: dict = {}  # type: ignore[type-arg]  # as a user may write it

    tree = configuration.compose("{x: 2, y: 3, more: {a: [1]}}", "here")
    assert fit.fit(tree, Loose[int]) == Loose(2, {"a": [1]})
    wrong = configuration.compose("{x: a, more: {}}", "here")
    with pytest.raises(ConfigError, match=r"^here:1: x: expected a whole number, got 'a'\.$"):
        fit.fit(wrong, Loose[int])


class Fixed(msgspec.Struct, tag="fixed", forbid_unknown_fields=True):
    rate: float


class Falling(msgspec.Struct, tag="falling", forbid_unknown_fields=True):
    factor: float = 0.5


class Planned(msgspec.Struct, forbid_unknown_fields=True):
    plan: Fixed | Falling


def test_a_users_own_types_may_be_told_apart_by_a_tag():
    for text, plan in (
        ("{type: fixed, rate: 0.1}", Fixed(0.1)),
        ("{type: falling, factor: 0.9}", Falling(0.9)),
    ):
        tree = configuration.compose(f"plan: {text}", "here")
        assert fit.fit(tree, Planned) == Planned(plan)
    wrong = configuration.compose("plan: {type: falling, factor: a}", "here")
    with pytest.raises(ConfigError, match=r"^here:1: plan: expected .*, got a mapping\.$"):
        fit.fit(wrong, Planned)


# -- errors, word for word -------------------------------------------------------------------------
REFUSED = yaml.safe_load((Path(__file__).parent / "refused.yaml").read_text())
CASES = [
    (kind, *case) for kind, cases in REFUSED.items() for each in cases for case in each.items()
]


@pytest.mark.parametrize(("kind", "text", "says"), CASES, ids=[text[:40] for _, text, _ in CASES])
def test_a_wrong_configuration_is_refused_in_one_sentence(written, kind, text, says):
    if kind == "with_parts":
        written(HEAD, "parts.yaml")
        text += "\nextends: parts.yaml\n"
    pattern = ".*".join(re.escape(piece) for piece in says.split("..."))
    assert re.fullmatch(pattern, error(written(text))), error("c.yaml")


def test_what_a_foreign_name_is_answered_with_is_there():
    known = {key.path for key in documented()} | {*sections(), "data.partition.alpha"}
    foreign = fit.foreign()
    assert len(foreign["keys"]) > 80
    assert not {name: key for name, key in foreign["keys"].items() if key not in known}
    assert not foreign["keys"].keys() & foreign["ways"].keys()


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
        == "--set train.lr=big: train.lr: expected a float > 0 or null, got 'big'."
    )
    assert error(name, ["lr=1"]).endswith("Did you mean train.lr?")
    assert (
        error(name, ["train.lr"])
        == "--set train.lr: expected key.path=value, such as train.lr=0.1."
    )


def test_set_of_bytes_that_are_no_text_is_refused():
    with pytest.raises(ConfigError, match=r"^--set name=.*: not valid YAML: unacceptable char"):
        load(None, ["name=\udcff"])


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
    ("text", "call"),
    [("fp16", ("fp16", ())), ("topk(0.01)", ("topk", (0.01,))), ("qsgd( 8 )", ("qsgd", (8,)))],
)
def test_compressor_is_a_name_with_numbers(text, call):
    assert configuration.call(text) == call


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


def test_numbers_of_numpy_and_paths_are_values_from_python_and_classes_are_not():
    given = {"rounds": np.int64(3), "train": {"lr": np.float32(0.5)}, "data": {"root": Path("x")}}
    made = from_mapping(given)
    assert (made.rounds, made.train.lr, made.data.root) == (3, 0.5, "x")
    with pytest.raises(ConfigError, match="holds half a character"):
        from_mapping({"data": {"root": Path(os.fsdecode(b"\xff"))}})
    for value in (Path, object(), np.zeros(3)):
        with pytest.raises(ConfigError, match=r"model\.name: a configuration holds text.*model\("):
            from_mapping({"model": {"name": value}})


def test_the_written_defaults_of_a_division_pass_where_sites_bring_their_data():
    data = {"dataset": "site", "shape": [4], "classes": 3}
    plain = configuration.to_mapping(from_mapping({**PARTS, "data": data}))
    assert from_mapping(plain) == from_mapping({**PARTS, "data": data})


def test_another_configurations_division_does_not_stay_where_sites_bring_their_data(tmp_path):
    (tmp_path / "c.yaml").write_text(f"{HEAD}".replace("toy-deal}", "toy-deal, validation: 0.2}"))
    sites = "data={dataset: site, shape: [4], classes: 3}"
    for changes in ([sites], ["data.dataset=site", "data.shape=[4]", "data.classes=3"]):
        assert load(tmp_path / "c.yaml", changes).data.validation == 0


def test_sites_data_take_the_options_of_what_reads_them_and_any_of_a_dataset_of_their_own():
    own = ({"format": name, "anything": [1]} for name in ("a-sites-own", "toy-any"))
    for more in ({"size": 32, "grey": True}, *own):
        data = {"dataset": "site", "shape": [4], "classes": 3, **more}
        made = from_mapping({**PARTS, "data": data})
        assert made.data.options == {"shape": [4], "classes": 3, **more}


def test_what_a_run_writes_is_read_back_as_the_same_configuration():
    """A resume compares them: with K: 5 in a file, 5.0 is not another value than 5."""
    for name in registry.algorithm.names():
        public = {"fraction": 0.1} if registry.algorithm.get(name).needs_public else {}
        config = from_mapping({"algorithm": name, "data": {"public": public}}, "test")
        again = configuration.from_text(to_yaml(config), "again")
        assert configuration.differing([to_mapping(config), to_mapping(again)]) == {}
    both = [{"train": {"lr": 1}}, {"train": {"lr": 1.0}}, {"train": {"lr": 2, "epochs": 1}}]
    assert configuration.differing(both[:2]) == {}
    assert configuration.differing(both) == {"train.epochs": [None, None, 1], "train.lr": [1, 1, 2]}
