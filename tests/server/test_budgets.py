"""A run ends early where a target is reached or a budget spent, and says so."""

from __future__ import annotations

import pytest

from tests.rooms import lines, run, summary

LONG = {"rounds": 12}


@pytest.mark.parametrize(("algorithm", "model"), [("fedavg", "global"), ("local", "personal")])
def test_it_stops_at_an_accuracy_of_the_clients_without_a_global_model(tmp_path, algorithm, model):
    more = {"train": {"lr": 0.5}, "evaluate": {"clients": "auto"}, **LONG}
    directory = run(tmp_path, algorithm={"name": algorithm}, stop={"accuracy": 0.5}, **more)
    rows = lines(directory / "rounds.jsonl")
    curve = [r.get("test_accuracy", r["client_accuracy"]["personal"]) for r in rows]
    assert len(curve) < 12
    assert curve[-1] >= 0.5 > max(curve[:-1], default=0)
    assert summary(directory)["stopped"] == f"{model} accuracy {curve[-1]:.4f} reached"
    exact = {"algorithm": {"name": algorithm}, "stop": {"accuracy": curve[-1]}}
    again = run(tmp_path / "exactly", **exact, **more)
    assert len(lines(again / "rounds.jsonl")) == len(curve)


def test_it_stops_when_its_megabytes_are_spent(tmp_path):
    directory = run(tmp_path, stop={"megabytes": 0.02}, **LONG)
    spent = [r["bytes_up"] + r["bytes_down"] for r in lines(directory / "rounds.jsonl")]
    assert sum(spent) >= 20_000 > sum(spent[:-1])
    assert summary(directory)["stopped"] == f"{sum(spent) / 1e6:.4g} MB spent"


def test_it_stops_when_its_seconds_are_over_and_a_larger_budget_goes_on(tmp_path):
    """20 samples in batches of 8: 3 s a round."""
    link = {"clock": "virtual", "step_ms": 1000}
    for budget, rounds, spent in ((5, 2, 6.0), (9, 3, 9.0)):
        directory = run(tmp_path, resume=rounds > 2, stop={"seconds": budget}, link=link, **LONG)
        found = [r["seconds_virtual"] for r in lines(directory / "rounds.jsonl")]
        assert found == [3.0] * rounds
        done = summary(directory)
        assert (done["rounds"], done["seconds_virtual"]) == (rounds, spent)
        assert done["stopped"] == f"{spent:g} s spent"


@pytest.mark.parametrize(("mode", "n"), [("sync", 3), ("async", 7)])
def test_the_model_that_a_spent_budget_leaves_is_judged(tmp_path, mode, n):
    link = {"clock": "virtual", "step_ms": 1000}
    more = {"schedule": {"mode": mode}, "link": link, "rounds": 12}
    directory = run(tmp_path, stop={"seconds": 7}, evaluate={"every": 2}, **more)
    rows = lines(directory / "rounds.jsonl")
    assert [r["round"] for r in rows if "test_accuracy" in r] == [*range(2, n, 2), n]
    assert summary(directory)["accuracy"]["final"] == rows[-1]["test_accuracy"]
    whole = run(tmp_path / "b", evaluate={"every": 1}, **{**more, "rounds": n})
    assert rows[-1]["test_accuracy"] == lines(whole / "rounds.jsonl")[-1]["test_accuracy"]
