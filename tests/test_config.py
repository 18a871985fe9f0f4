from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from fednet import config as configuration
from fednet import registry
from fednet.config import fit, from_mapping, load, to_mapping, to_yaml
from fednet.config.keys import keys as documented
from fednet.config.keys import sections
from fednet.errors import ConfigError
from fednet.options import call


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
def test_a_client_is_waited_for_as_long_as_round_join_says():
    found = {join: from_mapping({"round": {"join": join}}).round for join in ("auto", 5, None)}
    assert [r.join_s() for r in found.values()] == [60, 5, None]
    assert [r.join_s(external_clients=True) for r in found.values()] == [None, 5, None]


def test_options_of_parts_are_filled_in_and_written_beside_the_name():
    c = from_mapping(
        {
            "algorithm": {"name": "ditto", "lambda": 2},
            "model": {"name": "mlp", "hidden": [3]},
            "data": "synthetic",
        }
    )
    assert c.algorithm.options["lambda"] == 2.0
    assert c.algorithm.options["personal_epochs"] is None
    assert to_mapping(c)["model"] == {
        "name": "mlp",
        "buffers": "average",
        "weights": None,
        "base": "sites",
        "sha256": None,
        "adapters": None,
        "clients": None,
        "others": [],
        "hidden": [3],
        "norm": "none",
    }
    assert to_mapping(c)["data"]["classes"] == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"clients_per_round": 3},
        {"train": {"lr": 1e-7, "clip_norm": 1}},
        {"wire": {"up": {"delta": []}}},
        {"name": "no"},
        {"model": {"name": "mlp", "weights": "1e-3"}},
        {"link": {"per_client": {"0-2,5": {"up_mbps": 1}}}},
        {
            "faults": {
                "random": {"crash": 0.1},
                "schedule": [{"round": 2, "client": 1, "kind": "crash", "rounds": 2}],
            }
        },
    ],
)
def test_what_is_written_reads_back_equal(changes, written):
    c = from_mapping(changes)
    text = to_yaml(c)
    again = load(written(text))
    assert again == c
    assert to_yaml(again) == text


def test_what_a_run_of_each_method_writes_is_read_back_as_the_same_configuration():
    """A resume compares them: with K: 5 in a file, 5.0 is not another value than 5."""
    for name in registry.algorithm.names():
        public = {"fraction": 0.1} if registry.algorithm.get(name).needs_public else {}
        config = from_mapping({"algorithm": name, "data": {"public": public}}, "test")
        again = configuration.from_text(to_yaml(config), "again")
        assert configuration.differing([to_mapping(config), to_mapping(again)]) == {}
    both = [{"train": {"lr": 1}}, {"train": {"lr": 1.0}}, {"train": {"lr": 2, "epochs": 1}}]
    assert configuration.differing(both[:2]) == {}
    assert configuration.differing(both) == {"train.epochs": [None, None, 1], "train.lr": [1, 1, 2]}


@pytest.mark.parametrize(
    ("participation", "clients", "m"),
    [(0.5, 10, 5), (0.25, 10, 3), (0.24, 10, 2), (0.01, 10, 1), (1.0, 7, 7), (0.5, 5, 3)],
)
def test_cohort_is_the_fraction_rounded_half_up_and_at_least_one(participation, clients, m):
    assert from_mapping({"participation": participation, "clients": clients}).cohort_size == m


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
    c = from_mapping({"train": {"lr": 1.0, "schedule": schedule}})
    assert c.train.lr_at(round, 20) == pytest.approx(lr)


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.05), ("adam", 0.001), ("adamw", 0.001)])
def test_a_rate_that_is_not_given_is_the_optimizers(optimizer, lr):
    for given in ({}, {"lr": None}):
        c = from_mapping({"train": {"optimizer": optimizer, **given}})
        assert (c.train.lr, to_mapping(c)["train"]["lr"]) == (lr, lr)
    assert from_mapping({"train": {"optimizer": optimizer, "lr": 0.3}}).train.lr == 0.3


def test_a_list_of_models_is_the_first_one_with_the_others():
    first = {"name": "mlp", "clients": 0}
    other = {"name": "mlp", "hidden": [4], "clients": "1-2"}
    c = from_mapping({"clients": 3, "algorithm": "fedproto", "model": [first, other]})
    assert (c.model.clients, configuration.parts.model_owners(c)) == ("0", {1: 0, 2: 0})
    hidden = [one.model.options["hidden"] for one in configuration.parts.each_model(c)]
    assert hidden == [configuration.parts.model_of(c, 0)["hidden"], (4,)]


# -- errors, word for word -------------------------------------------------------------------------
REFUSED = yaml.safe_load((Path(__file__).parent / "refused.yaml").read_text())
CASES = [case for each in REFUSED for case in each.items()]


@pytest.mark.parametrize(("text", "says"), CASES, ids=[text[:40] for text, _ in CASES])
def test_a_wrong_configuration_is_refused_in_one_sentence(written, text, says):
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
    written("rounds: 3\ntrain: {lr: 0.5, momentum: 0.9}\n", "base.yaml")
    c = load(written("extends: ../base.yaml\ntrain: {lr: 0.1}\n", "deep/x.yaml"))
    assert (c.rounds, c.train.lr, c.train.momentum) == (3, 0.1, 0.9)


def test_another_part_starts_its_mapping_afresh_and_the_same_part_is_added_to(written):
    written(
        "algorithm: {name: pfedme, eta: 0.1}\ndata: {partition: {scheme: dirichlet, alpha: 9}}\n",
        "base.yaml",
    )
    shards = "data: {partition: {scheme: shards, per_client: 3}}"
    c = load(written(f"extends: base.yaml\nalgorithm: {{name: pfedme, lambda: 3}}\n{shards}"))
    assert (c.algorithm.options["eta"], c.algorithm.options["lambda"]) == (0.1, 3.0)
    assert c.data.partition.options == {"per_client": 3}


def test_another_dataset_drops_the_old_ones_options_and_keeps_the_partition(written):
    data = "data: {dataset: synthetic, samples: 7, validation: 0.1, partition: iid}"
    written(data, "base.yaml")
    c = load(written("extends: base.yaml\ndata: {dataset: arrays, path: x}"))
    assert (c.data.options["path"], "samples" in c.data.options) == ("x", False)
    assert (c.data.validation, c.data.partition.scheme) == (0.1, "iid")


def test_files_that_extend_each_other_are_an_error(written):
    written("extends: c.yaml", "base.yaml")
    said = error(written("extends: base.yaml"))
    assert said == "base.yaml:1: extends: c.yaml leads back to itself."


def test_later_layer_may_change_from_participation_to_a_count(written):
    written("participation: 0.3", "base.yaml")
    assert load(written("extends: base.yaml\nclients_per_round: 4")).cohort_size == 4
    assert load("base.yaml", ["clients_per_round=2"]).cohort_size == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train.lr=big", "train.lr: expected a float > 0 or null, got 'big'."),
        ("lr=1", "unknown key lr. Did you mean train.lr?"),
        ("train.lr", "expected key.path=value, such as train.lr=0.1."),
        ("name=\udcff", "not valid YAML: 'utf-8' codec can't encode"),  # bytes that are no text
    ],
)
def test_set_goes_through_the_same_validator(text, says):
    assert load(None, ["train.lr=1e-1"]).train.lr == 0.1
    assert error(None, [text]).startswith(f"--set {text}: {says}")


def test_set_of_a_mapping_replaces_the_whole_mapping(written):
    name = written("algorithm: {name: pfedme, eta: 0.1}")
    chosen = load(name, ["algorithm.lambda=2"]).algorithm.options
    assert (chosen["eta"], chosen["lambda"]) == (0.1, 2.0)
    chosen = load(name, ["algorithm={name: pfedme, lambda: 2}"]).algorithm.options
    assert (chosen["eta"], chosen["lambda"]) == (0.005, 2.0)


def test_order_of_sets_on_different_keys_does_not_matter():
    sets = ["algorithm.mu=0.5", "algorithm.name=fedprox"]
    assert load(None, sets) == load(None, sets[::-1])


def test_sets_may_come_as_a_mapping_from_python():
    c = load(None, {"rounds": 5, "train.lr": 0.5, "algorithm": {"name": "fedprox", "mu": 1}})
    assert (c.rounds, c.train.lr, c.algorithm.options["mu"]) == (5, 0.5, 1.0)


# -- compressors -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found"),
    [("fp16", ("fp16", ())), ("topk(0.01)", ("topk", (0.01,))), ("qsgd( 8 )", ("qsgd", (8,)))],
)
def test_compressor_is_a_name_with_numbers_of_which_whole_ones_are_int(text, found):
    name, numbers = call(text)
    assert (name, numbers, [*map(type, numbers)]) == (*found, [*map(type, found[1])])


# -- a user's own files and values -----------------------------------------------------------------
OWN = """
from fednet.registry import dataset
@dataset("own-one")
def mine(root, *, window: int = 3): ...
"""


def test_files_under_load_are_found_beside_the_file_that_names_them(written, tmp_path):
    (tmp_path / "deep").mkdir()
    written(OWN, "deep/own_one.py")
    c = load(written("load: [own_one.py]\ndata: {dataset: own-one}", "deep/x.yaml"))
    assert c.load == (str(tmp_path / "deep/own_one.py"),)
    assert c.data.options == {"window": 3}


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
    plain = configuration.to_mapping(from_mapping({"data": data}))
    assert from_mapping(plain) == from_mapping({"data": data})


def test_another_configurations_division_does_not_stay_where_sites_bring_their_data(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {dataset: synthetic, validation: 0.2}")
    sites = "data={dataset: site, shape: [4], classes: 3}"
    for changes in ([sites], ["data.dataset=site", "data.shape=[4]", "data.classes=3"]):
        assert load(tmp_path / "c.yaml", changes).data.validation == 0


def test_sites_data_take_the_options_of_what_reads_them_and_any_of_a_dataset_of_their_own():
    @registry.dataset("takes-any")
    def takes_any(root, **options): ...

    own = ({"format": name, "anything": [1]} for name in ("a-sites-own", "takes-any"))
    for more in ({"size": 32, "grey": True}, *own):
        data = {"dataset": "site", "shape": [4], "classes": 3, **more}
        made = from_mapping({"data": data})
        assert made.data.options == {"shape": [4], "classes": 3, **more}
