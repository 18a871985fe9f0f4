"""Runs with malicious clients, which ruin the mean, and robust rules, which tolerate them."""

from __future__ import annotations

import pytest

from fednet.report import open_run
from tests import rooms

pytestmark = pytest.mark.long


def accuracy(tmp_path, *, attack=None, rule="mean"):
    """The final accuracy of ten clients, of which four are malicious where there is an attack."""
    changes = {
        "rounds": 6,
        "clients": 10,
        "model": {"name": "mlp", "hidden": [16]},
        "data": {"samples": 1000, "shape": [8], "classes": 4},
        "train": {"steps": 10, "lr": 0.1, "batch_size": 16},
        "faults": {"malicious": {"clients": 0.4, **attack} if attack else {}},
        "aggregation": {"rule": rule, "tolerate": 0.4},
    }
    return open_run(rooms.run(tmp_path, **changes)).summary.accuracy["final"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return accuracy(tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize(
    ("attack", "rule"),
    [
        ({"attack": "sign_flip", "strength": 4}, "median"),
        ({"attack": "ipm", "strength": 4}, "rfa"),
    ],
    ids=["sign_flip", "ipm"],
)
def test_a_rule_tolerates_what_ruins_the_mean(tmp_path, honest, attack, rule):
    assert accuracy(tmp_path / "mean", attack=attack) < honest - 0.15
    assert accuracy(tmp_path / "robust", attack=attack, rule=rule) > honest - 0.1


def test_flipped_labels_are_what_a_malicious_client_trains_on(tmp_path, honest):
    everybody = {"attack": "label_flip", "clients": 1.0}
    # Every class c is learned as 3 - c: none of the four is its own mirror image.
    assert accuracy(tmp_path, attack=everybody) < 0.2 < honest - 0.5


def test_attackers_and_rules_have_the_same_bits_in_any_placement(tmp_path):
    changes = {
        "clients": 5,
        "faults": {"malicious": {"clients": 0.4, "attack": "alie"}},
        "aggregation": {"rule": "krum", "tolerate": 0.4},
    }
    one = rooms.hashes(rooms.run(tmp_path / "one", **changes))
    assert rooms.hashes(rooms.processes(tmp_path / "many", workers=2, **changes)) == one
