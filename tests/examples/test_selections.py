"""Selections of one's own: their numbers by hand, and the same clients in every placement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fednet
from fednet import Candidate, loading, registry
from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.tools import check
from tests.conftest import forgotten
from tests.processes import Rig, lines

EXAMPLE = Path(__file__).parents[2] / "configs" / "examples" / "selections.yaml"


@pytest.fixture(autouse=True)
def parts():
    with forgotten():
        loading.load_parts([EXAMPLE.with_suffix(".py")])
        yield


def test_power_of_choice_takes_the_largest_losses_and_first_who_has_not_trained():
    part = registry.selection.get("power-of-choice")
    known = [Candidate(id=i, n=5, loss=loss) for i, loss in enumerate((0.5, 2.0, 1.0))]
    known.append(Candidate(id=3, n=5))
    assert part(known, 2, np.random.default_rng(0), d=4) == [3, 1]


def test_oort_weighs_samples_loss_staleness_and_time():
    part = registry.selection.get("oort")
    # Round 1 has no bonus, ln 1 = 0: utilities 4 * 3 = 12, of which (1/2)^2 is left, and 2 * 2 = 4.
    slow = Candidate(id=0, n=4, loss=3.0, round=1, seconds=2.0)
    fast = Candidate(id=1, n=2, loss=2.0, round=1, seconds=1.0)
    rng = np.random.default_rng(0)
    assert part(1, [slow, fast], 1, rng) == [0]
    assert part(1, [slow, fast], 1, rng, preferred_s=1.0) == [1]


@pytest.mark.long
def test_the_same_clients_in_one_process_in_two_workers_and_after_a_kill(tmp_path):
    run = fednet.run(EXAMPLE, set={"name": "one"}, in_process=True, out=tmp_path)
    cohorts = [row.selected for row in run.rounds]
    with Rig(tmp_path) as rig:
        words = ("--workers", 2, "--out", tmp_path, "--set", "name=two", "--set")
        crash = "faults.schedule=[{round: 4, kind: server_crash, at: aggregating}]"
        status, said = rig.run("main", "run", EXAMPLE, *words, crash)
        assert status == 0, said
    two = tmp_path / "two"
    assert [row["selected"] for row in lines(two / "rounds.jsonl")] == cohorts
    digest = json.loads((two / "summary.json").read_text())["model_sha256"]
    assert digest == run.summary["model_sha256"]
    again = {"name": "again", "faults.replay": str(run.dir)}
    replayed = fednet.run(EXAMPLE, set=again, in_process=True, out=tmp_path)
    assert [row.selected for row in replayed.rounds] == cohorts
    assert replayed.summary["model_sha256"] == digest


@pytest.mark.long
def test_check_tries_each_selection():
    said = list(check.check(EXAMPLE.with_suffix(".py")))
    assert sum("killed in round 3 and resumed, it gives the same bits" in s for s in said) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"secagg": {"protocol": "secagg"}}},
        {"privacy": {"clip": 1.0, "noise": 1.0}},
        {"schedule": {"mode": "semi-sync", "every": 1}},
        {"faults": {"random": {"crash": 0.1}}},
    ],
)
def test_what_a_selection_cannot_be_combined_with_is_refused(changes):
    with pytest.raises(ConfigError, match="cannot be combined with a selection of your own"):
        from_mapping({"selection": {"name": "oort"}, **changes})
