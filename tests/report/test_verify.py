from __future__ import annotations

import json

import pytest

from fednet.files import read_lines
from fednet.report.read import open_run
from fednet.report.verify import compare, kernel_counts, names
from tests.report.fake_run import jsonl, write


def change(path, round, **values):
    rows = list(read_lines(path / "rounds.jsonl"))
    rows[round - 1] |= values
    jsonl(path / "rounds.jsonl", rows)


def compared(tmp_path):
    return compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))


@pytest.fixture
def both(tmp_path):
    """Two runs of the same bits, a and b."""
    for name in "ab":
        write(tmp_path / name)
    return tmp_path


def test_two_runs_of_the_same_bits_are_the_same(both):
    assert compared(both) == (
        True,
        "a and b are bit-identical in all 8 rounds (model and client states).",
    )


def test_runs_of_one_name_are_told_apart_by_the_folders_above_them(tmp_path):
    for folder in ("one/out/run", "two/out/run"):
        write(tmp_path / folder)
    a, b = (open_run(tmp_path / folder) for folder in ("one/out/run", "two/out/run"))
    assert compare(a, b).text.startswith("one/out/run and two/out/run are bit-identical")
    assert names(a, a) == ("run", "run")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"tensor_sha256": {"0.weight": None, "0.bias": "00"}, "model_sha256": "11"},
            "round 3: tensor '0.bias' (1 of 2 tensors differ).",
        ),
        # tensors that one run has alone
        (
            {"tensor_sha256": {"lora_A": "00"}, "model_sha256": "11"},
            "round 3: tensor '0.weight' (3 of 3 tensors differ).",
        ),
        (
            {"tensor_sha256": {}, "model_sha256": "0123456789abcdef"},
            "0123456789ab (set record.tensors to see which tensors differ).",
        ),
        ({"clients_sha256": "00"}, "round 3: the models are the same, but the clients' states"),
        ({"evaluated_sha256": "00"}, "the models are the same, but the evaluated models differ"),
        ({"completed": []}, "round 3: the hashes are the same, but other clients completed; "),
        ({"clients_sha256": "00", "selected": []}, "differ; other clients were selected."),
        (
            {"clients_sha256": "00", "restarted": [4]},
            "restarted: [] in the first run, [4] in the second.",
        ),
    ],
)
def test_the_first_difference_is_named_with_its_reason(both, values, said):
    for t in (3, 5):
        kept = open_run(both / "b").rounds[t - 1].tensor_sha256
        new = dict(values)
        if tensors := new.get("tensor_sha256"):
            new["tensor_sha256"] = {name: sha or kept[name] for name, sha in tensors.items()}
        change(both / "b", t, **new)
    verdict = compared(both)
    assert not verdict.same
    assert said in verdict.text
    assert "the first difference is in round 3: " in verdict.text


def test_other_completed_clients_are_given_as_the_reason(both):
    done = open_run(both / "b").rounds[1].completed
    change(both / "b", 2, completed=done[1:], model_sha256="00", tensor_sha256={})
    assert f"[{done[0]}] in the first run only" in compared(both).text


def test_runs_that_began_with_different_models_are_not_the_same(both):
    """What is not trained is in no round's hashes."""
    for name, base in (("a", "aa"), ("b", "bb")):
        path = both / name / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_sha256": base}))
    assert compared(both) == (
        False,
        "a and b started from different base models: base_sha256 aa and bb.",
    )


def test_a_longer_run_is_not_the_same(tmp_path):
    for name, rounds in (("a", 3), ("b", 4)):
        write(tmp_path / name, rounds=rounds)
    assert compared(tmp_path) == (
        False,
        "a and b are bit-identical in the 3 rounds of both, but only b has round 4.",
    )


def test_runs_without_a_common_round_or_without_hashes_prove_nothing(both):
    for name in "ab":
        change(both / name, 2, model_sha256=None, tensor_sha256=None)
    verdict = compared(both)
    assert not verdict.same
    assert "round 2 has no model_sha256" in verdict.text
    for name, part in (("a", slice(4)), ("b", slice(4, None))):
        path = both / name / "rounds.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[part]))
    assert compared(both) == (False, "a and b have no finished round in common.")


KERNEL = {"sent": 1000, "received": 2000, "booked_down": 1000, "booked_up": 2000}


def test_what_the_operating_system_counted_is_compared_with_what_is_recorded(tmp_path):
    write(tmp_path / "a")
    assert kernel_counts(open_run(tmp_path / "a"), "run") == ""
    started = {"type": "started"}
    kernel = {"type": "kernel", **KERNEL}
    for events, said in [
        ([started, kernel], "1,000 bytes sent and 2,000 received by the server, as many as are"),
        ([started, kernel, kernel | {"sent": 900}], "counted 1,900 bytes sent and 4,000 received"),
        ([started, kernel | {"sent": 900}], "the server, recorded are 1,000 and 2,000."),
        ([started, started, kernel], "by the server (1 killed before it was counted), as many as"),
    ]:
        jsonl(tmp_path / "a" / "events.jsonl", events)
        assert said in kernel_counts(open_run(tmp_path / "a"), "run")
