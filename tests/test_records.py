"""The rows of a run's files, and the table of metrics that all displays go by."""

from __future__ import annotations

import html
import json
import math

import pytest

from fednet.cli.display import round_line, summary_rows
from fednet.files import read_lines, with_digest
from fednet.records import (
    FILES,
    METRICS,
    Client,
    Event,
    Messages,
    Metric,
    Round,
    Summary,
    Wire,
    table,
)
from fednet.report import costs, curves, metrics, open_run, page, tables, verify
from tests.report.fake_run import jsonl, opened, write
from tests.rooms import lines, run


def test_the_lines_of_a_run_are_written_again_as_they_were(tmp_path):
    """The rows of each file, by attribute and by key."""
    directory = run(tmp_path, evaluate={"clients": "all"})
    for name, kind in {**FILES, "wire": Messages}.items():
        records = list(read_lines(directory / f"{name}.jsonl"))
        assert records
        for record in records:
            row = kind.of(record)
            assert json.loads(json.dumps(row.line())) == record
            assert all(row[key] == row.get(key) == getattr(row, key) for key in dict(row))
            assert dict(row) == row.line()


@pytest.mark.parametrize("kind", [Round, Client, Wire, Messages, Summary])
def test_an_unknown_field_is_ignored_and_a_missing_one_has_its_default(kind):
    row = kind.of({"of_a_later_version": {"x": 1}})
    assert row == kind()
    assert "of_a_later_version" not in row
    with pytest.raises(KeyError, match="of_a_later_version"):
        _ = row["of_a_later_version"]


def test_an_event_keeps_whatever_it_says():
    event = Event.of({"type": "left", "worker": "a"})
    assert (event.worker, event["worker"], event.line()["worker"]) == ("a", "a", "a")
    with pytest.raises(AttributeError, match="'worker'"):
        _ = event.wroker


def test_a_field_of_another_type_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "a", rounds=1)
    jsonl(path / "rounds.jsonl", [{"round": "one"}])
    with pytest.raises(Exception, match=r"rounds\.jsonl:1: Expected `int`, got `str` - at `\$\.r"):
        _ = open_run(path).rounds


def test_the_loss_of_a_training_that_diverged_is_null_and_that_of_an_older_file_nan(tmp_path):
    path = write(tmp_path / "a", rounds=2)
    first, second = read_lines(path / "rounds.jsonl")
    jsonl(path / "rounds.jsonl", [{**first, "train_loss": math.nan}, second])
    rounds = list(open_run(path).rounds)
    assert rounds[0].train_loss is None
    assert rounds[1].train_loss == second["train_loss"]

    def older(record):
        (path / "rounds.jsonl").write_bytes(with_digest(json.dumps(record).encode()))

    older({**first, "train_loss": math.nan})
    (row,) = open_run(path).rounds
    assert math.isnan(row.train_loss)
    older({**first, "train_loss": math.nan, "round": "one"})
    with pytest.raises(Exception, match=r"rounds\.jsonl:1: Expected `int`, got `str` - at `\$\.r"):
        _ = open_run(path).rounds


@pytest.fixture
def epsilon(monkeypatch):
    """One more number of each round, by one line of the table."""
    new = Metric(
        "epsilon", "privacy spent", "algorithm.epsilon", "line page compare track", word="epsilon"
    )
    monkeypatch.setattr(table, "METRICS", (*METRICS, new))


def test_a_line_of_the_table_brings_a_metric_to_every_display(tmp_path, epsilon, monkeypatch):
    path = write(tmp_path / "a", rounds=3)
    rows = list(read_lines(path / "rounds.jsonl"))
    for k, row in enumerate(rows):
        row["algorithm"] = {"epsilon": 0.5 * (k + 1)}
    jsonl(path / "rounds.jsonl", rows)
    found = open_run(path)
    assert metrics.curve(found, "epsilon") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert "epsilon 1.5000" in round_line(found.rounds[-1])
    assert "privacy spent" in page.render([found])
    made = tables.table([found])
    assert [c.text for t, c in zip(made.columns, made.cells[0]) if t.title == "privacy spent"] == [
        "1.5000"
    ]
    assert "Privacy spent" in curves.figure([found], tmp_path / "f.svg", y="epsilon")


@pytest.mark.parametrize("own", ["personal", "local"])
def test_every_accuracy_names_its_model(tmp_path, own):
    scores = {"global": 0.25, "personal": 0.5}
    line = round_line(Round(client_accuracy=scores, own_model=own))
    assert "global accuracy on clients' tests 25.00 %" in line
    assert f"{own} accuracy on clients' tests 50.00 %" in line
    both = round_line(Round(test_accuracy=0.75, client_accuracy=scores, own_model=own))
    assert "global accuracy 75.00 %" in both  # on the server's test set, that alone
    assert "50.00" not in both
    ended = Summary(personal=scores, own_model=own)
    assert (f"{own} on clients' tests", "50.00 %") in summary_rows(ended)

    found = opened(tmp_path / "a", rounds=2, personalised=True)
    for r in found.rounds:
        r.own_model = own
    named = f"{own} accuracy on clients' tests"
    assert named.capitalize() in curves.figure([found], tmp_path / "f.svg", y="personal_accuracy")
    assert own in [c.title for c in tables.table([found]).columns]
    text = page.render([found])
    assert f"<span>{own} accuracy</span>" in text
    assert f"{named.capitalize()}, by client" in html.unescape(text)


def test_a_further_metric_is_in_the_line_only_where_no_better_evaluation_has_it():
    scores = {"received": {"f1": 0.5}, "personal": {"f1": 0.75}}
    assert "received f1 0.5000  personal f1 0.7500" in round_line(Round(client_metrics=scores))
    both = round_line(Round(client_metrics={**scores, "global": {"f1": 0.25}}))
    assert "global f1 0.2500" in both
    assert "received" not in both
    assert round_line(Round(metrics={"f1": 1.0}, client_metrics=scores)).count("f1") == 1


def test_the_summary_has_the_metrics_of_the_files_to_the_last_byte(tmp_path):
    """Among them what was said when all was over, after the last round."""
    found = open_run(run(tmp_path))
    assert found.summary["bytes"]["total"] == sum(w.bytes for w in found.wire)
    whole = metrics.summarise(found, found.summary.predicted)
    assert {k: found.summary[k] for k in whole} == json.loads(json.dumps(whole))
    assert metrics.summary(found) is found.summary  # what reads it computes nothing again
    assert found.summary.provenance["fednet"]


def agree(found):
    """That each byte is in the record of one round or after the last; returns the rows after it."""
    whole = found.summary["bytes"]
    for way in ("up", "down"):
        rounds = sum(r[f"bytes_{way}"] for r in found.rounds)
        everything = sum(w.bytes for w in found.wire if w.direction == way)
        assert rounds + whole["after"][way] == everything == whole[way]
    parts = (*whole["useful"].values(), *(found.summary.wasted or {}).values(), whole["connection"])
    assert sum(parts) == whole["total"]
    # no curve has an evaluation that came after the last round
    spent = sum(w.bytes for w in found.wire if not w.final)
    assert costs.cost(found, "mb")[found.rounds[-1].round] == pytest.approx(spent / 1e6)
    return [w for w in found.wire if w.final]


@pytest.mark.parametrize("clients", ["auto", "all"])
def test_each_byte_is_in_one_round_or_after_the_last(tmp_path, clients):
    found = open_run(run(tmp_path, evaluate={"clients": clients}))
    last = agree(found)
    assert {(w.purpose, w.round) for w in last} == {("evaluate", 2)}
    asked = [w for w in last if w.direction == "down" and w.type == "evaluate"]
    assert len(asked) == 3  # every client, once
    goodbyes = sum(w.bytes for w in found.wire if w.type == "end")
    after = found.summary["bytes"]["after"]
    assert sum(after.values()) == sum(w.bytes for w in last) + goodbyes


def test_a_summary_that_was_not_written_any_more_is_written_on_resume(tmp_path):
    path = run(tmp_path)
    before = open_run(path).summary
    (path / "summary.json").unlink()
    run(tmp_path, resume=True)
    after = open_run(path).summary
    assert after.accuracy == before.accuracy
    assert after.model_sha256 == before.model_sha256
    assert after["bytes"]["total"] == sum(w.bytes for w in open_run(path).wire)


def test_a_metric_of_several_numbers_is_their_mean():
    assert table.metric("staleness").of(Round(round=1, staleness=[0, 3])) == 1.5
    assert table.metric("staleness").of(Round(round=1, staleness=[])) is None
    assert table.metric("staleness").of(Round(round=1)) is None


def test_a_lighter_directory_says_what_it_has_not(tmp_path):
    light = {"record": {"clients": "last", "tensors": False}, "evaluate": {"clients": "all"}}
    directory = run(tmp_path / "a", **light)
    rows = lines(directory / "clients.jsonl")
    assert [(r["client"], r["final"]) for r in rows] == [(c, True) for c in range(3)]
    assert not any("tensor_sha256" in r for r in lines(directory / "rounds.jsonl"))
    same = run(tmp_path / "b", **light)
    assert verify.compare(open_run(directory), open_run(same)).same
    other = verify.compare(open_run(directory), open_run(run(tmp_path / "c", seed=1, **light)))
    assert "set record.tensors to see which tensors differ" in other.text
