"""Compressors in whole runs: what both ends compute from, what is fed back, and what is left
alone.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from fednet.errors import ConfigError, Stopped
from fednet.experiment import build as experiment
from fednet.experiment.store import read_client
from fednet.registry import algorithm
from fednet.wire.compressors.base import Memory
from tests.rooms import hashes, lines, processes, run, small, summary

SPARSE = {
    "up": {"delta": ["topk(0.2)", "qsgd(8)"], "state": ["topk(0.2)"], "control": ["sign"]},
    "down": {"state": ["qsgd(4)"], "control": ["sign"]},
}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "wire": SPARSE, "rounds": 4, "participation": 0.67}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), **SCAFFOLD)


def test_residuals_are_the_clients_own_and_one_of_the_server(alone):
    method = algorithm.get("scaffold")
    saved = [
        f for f in (alone / "state").glob("*/client-*/*.safetensors") if ".local." not in f.name
    ]
    found = [read_client(f, method.Client)[0].residuals for f in saved]
    assert found
    assert all(set(r) == {"0/dy", "0/dc"} and r["0/dy"].abs().sum() > 0 for r in found)
    assert any((alone / "checkpoint").glob("state-*"))


def test_what_is_judged_comes_down_as_it_is():
    exp = experiment.build(
        small(wire={"down": {"state": ["topk(0.1)", "zstd"], "delta": ["zstd"]}})
    )
    assert set(exp.exact.chains) == {"delta"}


def test_both_sides_must_have_the_initial_values_that_differences_are_to():
    plain, one, other = (
        experiment.build(small(seed=seed, wire={"down": down}))
        for seed, down in ((0, {}), (0, {"state": ["fp16"]}), (1, {"state": ["fp16"]}))
    )
    assert plain.digest == plain.shared.digest
    assert len({plain.digest, one.digest, other.digest}) == 3


def test_a_kind_that_holds_no_tensors_of_the_model_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"wire.up.statistics: fedavg sends 'run' of this kind, which is no tensor of the "
        r"model; compressors apply to state\.",
    ):
        experiment.build(small(wire={"up": {"statistics": ["zstd"]}}))
    # Fedavg sends none: the configuration may serve others too.
    experiment.build(small(wire={"up": {"control": ["fp16"]}}))


# -- what both ends remember -----------------------------------------------------------------------
REMEMBERING = {
    "ef21-delta": {
        "up": {"delta": ["ef21", "topk(0.2)"], "control": ["ef21", "sign"]},
        "down": {"state": ["delta", "topk(0.3)"], "control": ["delta", "int8"]},
    },
    "diana-delta": {
        "up": {"delta": ["diana(0.2)", "randk(0.2)"]},
        "down": {"state": ["delta", "int8"]},
    },
    "dgc": {"up": {"delta": ["dgc(0.5, 1)", "topk(0.1)", "int8"]}},
    "ef": SPARSE,
    "powersgd": {"up": {"delta": ["powersgd(1)", "int8"], "control": ["powersgd(1)"]}},
}


def remembering(name):
    if "zstd" in str(REMEMBERING[name]):
        pytest.importorskip("zstandard")
    # four of six: who is asked was not always asked before
    return {
        "algorithm": {"name": "scaffold"},
        "wire": REMEMBERING[name],
        "rounds": 5,
        "clients": 6,
        "participation": 0.67,
    }


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_is_remembered_survives_a_resume_and_sizes_are_as_predicted(
    name, tmp_path, monkeypatch
):
    def after_two(record):
        if record["round"] == 2:
            raise Stopped("here")

    # A checkpoint writes a remembered tensor once: nothing may write to it.
    remembered = []
    keep = Memory.set

    def recorded(memory, value, name=""):
        remembered.append((value, value.clone()))
        keep(memory, value, name)

    monkeypatch.setattr(Memory, "set", recorded)
    changes = remembering(name)
    alone = run(tmp_path / "alone", **changes)
    with pytest.raises(Stopped):
        run(tmp_path / "cut", callback=after_two, **changes)
    directory = run(tmp_path / "cut", resume=True, **changes)
    assert hashes(directory) == hashes(alone)
    assert all(torch.equal(value, then) for value, then in remembered)
    assert len(remembered) > 20
    for where in (directory, alone):
        rows = lines(where / "rounds.jsonl")
        found = summary(where)
        if "zstd" in str(changes):
            assert found["predicted_is"] == "a bound"
            assert found["useful"]["up"] == found["predicted"]["up"]
            continue
        assert found["predicted_is"] == "exact"
        assert [r["useful"] for r in rows] == [r["predicted"] for r in rows]


@pytest.mark.long
def test_processes_that_remember_come_to_the_same_bits(tmp_path):
    changes = remembering("ef21-delta")
    alone = run(tmp_path / "alone", **changes)
    directory = processes(tmp_path, **changes)
    assert hashes(directory) == hashes(alone)
    assert summary(directory)["useful"] == summary(alone)["useful"]


def test_a_client_that_lost_what_came_down_last_gets_it_whole(tmp_path):
    changes = {
        "wire": {"down": {"state": ["delta", "topk(0.3)"]}, "up": {"state": ["ef21", "topk(0.3)"]}},
        "rounds": 6,
        "round": {"state_lost": "restart"},
    }

    def forgets(record):
        if record["round"] == 2:
            shutil.rmtree(next((tmp_path / "r" / "state").glob("*/client-1")))

    rows = lines(run(tmp_path, callback=forgets, **changes) / "rounds.jsonl")
    assert [r["completed"] for r in rows] == [[0, 1, 2]] * 6
    assert [r.get("restarted") for r in rows] == [None] * 2 + [[1]] + [None] * 3


def test_a_compressor_that_needs_both_ends_in_step_is_refused_without_rounds():
    given = {"schedule": {"mode": "async", "buffer": 2}, "algorithm": {"name": "fedbuff"}}
    with pytest.raises(ConfigError, match=r"wire\.up\.state: ef21 needs both ends in step.*use ef"):
        experiment.build(small(**given, wire={"up": {"state": ["ef21", "topk(0.1)"]}}))


def test_fedsmus_signs_and_zeros_cross_exactly_in_two_bits_a_value(tmp_path):
    smu = {"algorithm": {"name": "fedsmu"}, "data": {"shape": [3, 4]}, "rounds": 3}
    plain = run(tmp_path, name="plain", **smu)
    packed = run(tmp_path, name="packed", **smu, wire={"up": {"delta": ["qsgd(2)"]}})
    assert hashes(packed) == hashes(plain)
    up = [summary(d)["bytes"]["kinds"]["up"]["delta"] for d in (plain, packed)]
    assert up[1] < up[0] / 8
