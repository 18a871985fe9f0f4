from __future__ import annotations

import json

from fednet.files import read_lines
from fednet.report.read import open_run
from fednet.report.verify import compare
from tests.report.fake_run import jsonl, write


def change(path, round, **values):
    rows = list(read_lines(path / "rounds.jsonl"))
    rows[round - 1] |= values
    jsonl(path / "rounds.jsonl", rows)


def both(tmp_path):
    return write(tmp_path / "a"), write(tmp_path / "b")


def test_two_runs_of_the_same_bits_are_the_same(tmp_path):
    a, b = both(tmp_path)
    verdict = compare(open_run(a), open_run(b))
    assert verdict.same
    assert verdict.rounds == 8


def test_the_first_round_and_the_first_tensor_are_named(tmp_path):
    a, b = both(tmp_path)
    for t in (3, 5):
        change(
            b,
            t,
            tensor_sha256={**open_run(b).rounds[t - 1].tensor_sha256, "0.bias": "00"},
            model_sha256="11",
        )
    verdict = compare(open_run(a), open_run(b))
    assert (verdict.same, verdict.round, verdict.tensor) == (False, 3, "0.bias")
    assert "1 of 2 tensors" in verdict.text


def test_tensors_that_one_run_has_alone_count(tmp_path):
    a, b = both(tmp_path)
    change(b, 1, tensor_sha256={"lora_A": "00"}, model_sha256="11")
    assert "(3 of 3 tensors differ)" in compare(open_run(a), open_run(b)).text


def test_runs_that_began_with_different_models_are_not_the_same(tmp_path):
    """What is not trained is in no round's hashes."""
    a, b = both(tmp_path)
    for path, base in ((a, "aa"), (b, "bb")):
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "base_sha256": base}))
    verdict = compare(open_run(a), open_run(b))
    assert not verdict.same
    assert "started from different base models" in verdict.text
    assert "base_sha256 aa and bb" in verdict.text


def test_a_difference_in_the_clients_states_alone_is_found(tmp_path):
    a, b = both(tmp_path)
    change(b, 4, clients_sha256="00")
    verdict = compare(open_run(a), open_run(b))
    assert (verdict.same, verdict.round, verdict.tensor) == (False, 4, None)
    assert "clients' states" in verdict.text


def test_other_completed_clients_are_given_as_the_reason(tmp_path):
    a, b = both(tmp_path)
    done = open_run(b).rounds[1].completed
    change(b, 2, completed=done[1:], model_sha256="00", tensor_sha256={})
    verdict = compare(open_run(a), open_run(b))
    assert verdict.round == 2
    assert f"[{done[0]}] in the first run only" in verdict.text


def test_a_longer_run_is_not_the_same(tmp_path):
    a, b = write(tmp_path / "a", rounds=3), write(tmp_path / "b", rounds=4)
    verdict = compare(open_run(a), open_run(b))
    assert (verdict.same, verdict.round, verdict.rounds) == (False, 4, 3)


def test_runs_without_a_common_round_prove_nothing(tmp_path):
    a, b = both(tmp_path)
    lines = (a / "rounds.jsonl").read_text().splitlines(keepends=True)
    (a / "rounds.jsonl").write_text("".join(lines[:4]))
    (b / "rounds.jsonl").write_text("".join(lines[4:]))
    verdict = compare(open_run(a), open_run(b))
    assert not verdict.same
    assert verdict.text == "a and b have no finished round in common."


def test_rounds_without_hashes_prove_nothing(tmp_path):
    a, b = both(tmp_path)
    for path in (a, b):
        change(path, 2, model_sha256=None, tensor_sha256=None)
    verdict = compare(open_run(a), open_run(b))
    assert not verdict.same
    assert "cannot be compared" in verdict.text
