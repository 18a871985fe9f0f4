"""Runs with malicious clients, which ruin the mean, and robust rules, which tolerate them."""

from __future__ import annotations

import pytest

import fednet
from tests import rooms

pytestmark = pytest.mark.long


def run(tmp_path, name, *, attack=None, rule="mean", **changes):
    section = {
        "name": name,
        "rounds": 6,
        "clients": 10,
        "participation": 1.0,
        "model": {"name": "mlp", "hidden": [16]},
        "data": {
            "dataset": "synthetic",
            "samples": 1000,
            "shape": [8],
            "classes": 4,
            "partition": {"scheme": "iid"},
        },
        "train": {"steps": 10, "lr": 0.1, "batch_size": 16},
        "evaluate": {"clients": "none"},
        "faults": {"malicious": {"clients": 0.4, **attack} if attack else {}},
        "aggregation": {"rule": rule, "tolerate": 0.4},
    } | changes
    return fednet.run(section, in_process=True, out=tmp_path)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return run(tmp_path_factory.mktemp("honest"), "honest").summary.accuracy["final"]


@pytest.mark.parametrize(
    ("attack", "rule"),
    [
        ({"attack": "sign_flip", "strength": 4}, "median"),
        ({"attack": "ipm", "strength": 4}, "rfa"),
    ],
    ids=["sign_flip", "ipm"],
)
def test_a_rule_tolerates_what_ruins_the_mean(tmp_path, honest, attack, rule):
    ruined = run(tmp_path, "mean", attack=attack).summary.accuracy["final"]
    borne = run(tmp_path, "robust", attack=attack, rule=rule).summary.accuracy["final"]
    assert ruined < honest - 0.15
    assert borne > honest - 0.1


def test_flipped_labels_are_what_a_malicious_client_trains_on(tmp_path, honest):
    everybody = {"attack": "label_flip", "clients": 1.0}
    made = run(tmp_path, "flipped", attack=everybody).summary.accuracy["final"]
    # Every class c is learned as 3 - c: none of the four is its own mirror image.
    assert made < 0.2 < honest - 0.5


def test_attackers_and_rules_have_the_same_bits_in_any_placement(tmp_path):
    changes = {
        "clients": 5,
        "faults": {"malicious": {"clients": 0.4, "attack": "alie"}},
        "aggregation": {"rule": "krum", "tolerate": 0.4},
    }
    one = rooms.hashes(rooms.run(tmp_path / "one", **changes))
    assert rooms.hashes(rooms.processes(tmp_path / "many", workers=2, **changes)) == one
