"""The model that training starts from: made at each site and compared, or sent to each once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fednet import models
from fednet.client.worker import with_base_model
from fednet.errors import BaseAbsent, ConfigError, Stopped
from fednet.experiment import build
from fednet.models.start import pack_state_dict, sha256, unpack_state_dict, without_server_files
from tests.parity.test_parity import bits
from tests.processes import Federation
from tests.rooms import lines, processes, run, small, summary

MLP = {"name": "mlp", "hidden": [8]}
LORA = {**MLP, "adapters": {"rank": 2, "target": ["body.*"]}}
PART = 4 * 2 * (12 + 8)


def weights(folder: Path, seed: int = 5, shape: Any = (12,), classes: int = 3) -> str:
    """A model of the runs' own kind, from elsewhere."""
    file = folder / "start.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(models.build(MLP, shape, classes, seed).state_dict(), file)
    return str(file)


def sent(directory: Path) -> list[tuple[int, int]]:
    """(client, bytes) of each useful row of the book with the model in it."""
    rows = lines(directory / "wire.jsonl")
    return [(r["client"], r["kinds"]["base"]) for r in rows if "base" in r["kinds"] and r["useful"]]


# -- sent once -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        # FedAvg keeps nothing at a client, FedRDS gives it samples once of its own.
        (MLP, {"train": {"only": ["head.*", "body.*"]}}),
        (LORA, {"algorithm": "fedrds", "data": {"public": {"samples": 9}}}),
        (LORA, {"privacy": {"secagg": {"protocol": "secagg", "clip": 1.0}}}),
        (LORA, {"wire": {"up": {"state": ["topk(0.2)"]}, "down": {"state": ["qsgd(8)"]}}}),
        (
            LORA,
            {
                "schedule": {"mode": "async", "buffer": 1},
                "link": {"clock": "virtual", "step_ms": 1.0},
            },
        ),
    ],
    ids=["fedavg", "fedrds", "secagg", "compressed", "async"],
)
def test_it_is_sent_once_to_each_client_and_gives_the_bits_of_sites_that_have_it(
    tmp_path, model, changes
):
    if "privacy" in changes:
        pytest.importorskip("cryptography")
    file = weights(tmp_path)
    here = run(tmp_path / "a", model={**model, "weights": file}, rounds=3, **changes)
    asked = {**model, "weights": file, "base": "server"}
    there = run(tmp_path / "b", model=asked, rounds=3, **changes)
    for key in ("model_sha256", "base_sha256"):
        assert summary(here)[key] == summary(there)[key]
        assert len(summary(here)[key]) == 64
    assert sent(here) == []
    once = sent(there)
    assert sorted(c for c, _ in once) == [0, 1, 2]
    base = pack_state_dict(experiment(**model, weights=file).setting.blank).base
    assert {n for _, n in once} == {len(base)}
    for directory in (here, there):
        for record in lines(directory / "rounds.jsonl"):
            assert record["predicted"] == record["useful"]


def test_who_comes_later_gets_it_then(tmp_path):
    model = {**LORA, "weights": weights(tmp_path), "base": "server"}
    directory = run(tmp_path, model=model, rounds=6, participation=0.34, seed=1)
    first: dict[int, int] = {}
    for r in lines(directory / "rounds.jsonl"):
        for client in r["selected"]:
            first.setdefault(client, r["round"])
    rows = lines(directory / "wire.jsonl")
    assert {r["client"]: r["round"] for r in rows if "base" in r["kinds"]} == first
    assert len(set(first.values())) > 1


def test_a_client_that_never_trained_is_judged_with_it(tmp_path):
    """Alone in its process it would have no model otherwise."""
    model = {**LORA, "weights": weights(tmp_path), "base": "server"}
    changes = {"rounds": 1, "participation": 0.34, "evaluate": {"clients": "auto"}}
    directory = run(tmp_path, model=model, **changes)
    rows = [r for r in lines(directory / "wire.jsonl") if "base" in r["kinds"]]
    purposes = sorted(r["purpose"] for r in rows)
    assert purposes == ["evaluate", "evaluate", "train"]
    assert len([r for r in lines(directory / "clients.jsonl") if r.get("final")]) == 3


def test_a_process_that_lacks_it_is_sent_it_for_the_last_evaluation_too(tmp_path):
    """The run stopped after its last round; its sites have their states and not the model."""

    def stop(record) -> None:
        raise Stopped("enough")

    model = {**LORA, "weights": weights(tmp_path), "base": "server"}
    changes = {"model": model, "rounds": 1, "evaluate": {"clients": "auto"}}
    with pytest.raises(Stopped):
        run(tmp_path, callback=stop, **changes)
    (kept,) = (tmp_path / "r" / "state").rglob("base-*.safetensors")
    kept.unlink()
    directory = run(tmp_path, resume=True, **changes)
    rows = [r for r in lines(directory / "wire.jsonl") if "base" in r["kinds"]]
    assert {r["purpose"] for r in rows if r["incarnation"] == 2} == {"evaluate"}
    assert len([r for r in lines(directory / "clients.jsonl") if r.get("final")]) == 3


# -- at a site -------------------------------------------------------------------------------------
def experiment(**model):
    return build.build(small(model=model))


def test_a_site_with_another_file_is_refused(tmp_path):
    ours = experiment(**LORA, weights=weights(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"model\.weights: the model of .* has SHA-256 .* never"):
        experiment(**LORA, weights=weights(tmp_path / "b", seed=6), sha256=ours.sha256)


def hollow(tmp_path):
    """(the server's experiment, that of a client which lacks the model)."""
    ours = experiment(**LORA, weights=weights(tmp_path), base="server")
    told = small(model={**LORA, "weights": "/nowhere", "base": "server", "sha256": ours.sha256})
    return ours, build.build(without_server_files(told))


def test_a_site_keeps_it_under_its_digest(tmp_path):
    ours, theirs = hollow(tmp_path)
    assert theirs.hollow
    assert not ours.hollow
    base = memoryview(bytes(ours.base.body))
    with pytest.raises(BaseAbsent, match="the server is asked to send it again"):
        with_base_model(theirs, tmp_path, None)
    begun = with_base_model(theirs, tmp_path, base)
    assert begun.sha256 == ours.sha256 == sha256(begun.holding(begun.setting.initial))
    assert not begun.hollow
    again = with_base_model(theirs, tmp_path, None)  # as a process that is started anew
    assert torch.equal(again.setting.initial.vector, ours.setting.initial.vector)
    assert (tmp_path / f"base-{ours.sha256}.safetensors").read_bytes() == bytes(base)


def test_what_is_sent_in_its_place_is_refused(tmp_path):
    _, theirs = hollow(tmp_path)
    other = pack_state_dict(experiment(**LORA).setting.blank).base.numpy().tobytes()
    with pytest.raises(ConfigError, match=r"model\.base: the model that the server sent has SHA"):
        with_base_model(theirs, tmp_path, memoryview(other))
    assert list(tmp_path.glob("base-*")) == []
    strange = pack_state_dict(torch.nn.Linear(1, 1)).base.numpy().tobytes()
    with pytest.raises(ConfigError, match="is no model of this configuration"):
        with_base_model(theirs, tmp_path, memoryview(strange))
    assert set(unpack_state_dict(strange)) == {"weight", "bias"}


def test_a_digest_of_ones_own_that_is_another_is_refused(tmp_path):
    model = {**LORA, "base": "server", "sha256": "0" * 64}
    with pytest.raises(ConfigError, match=r"model\.sha256: 0{12} is not the digest of the model"):
        run(tmp_path, model=model)


# -- in processes ----------------------------------------------------------------------------------
@pytest.mark.long
def test_adapters_have_the_same_bits_whatever_the_placement(tmp_path):
    model = {**LORA, "weights": weights(tmp_path), "base": "server"}
    changes = {"model": model, "rounds": 3, "evaluate": {"clients": "auto"}}
    alone = run(tmp_path / "a", **changes)
    apart_ = processes(tmp_path / "b", workers=2, **changes)
    assert bits(alone) == bits(apart_)
    assert summary(alone)["useful"] == summary(apart_)["useful"]
    for name in ("model.safetensors", "adapters/adapter_model.safetensors"):
        assert (alone / name).read_bytes() == (apart_ / name).read_bytes()
    assert load_file(alone / "model.safetensors").keys() == {
        f"{n}.{leaf}" for n in ("body.fc1", "head") for leaf in ("weight", "bias")
    }


@pytest.mark.long
def test_after_kills_and_resumes_it_is_not_sent_again_and_the_bits_are_the_same(tmp_path):
    """The server dies twice, and once a client's process, which finds the model where it was."""
    model = {**LORA, "weights": weights(tmp_path, shape=(1, 8, 8), classes=4), "base": "server"}
    found = {}
    for name, points in (("still", ()), ("killed", ((2, "aggregating"), (3, "checkpointing")))):
        schedule = [{"round": r, "kind": "server_crash", "at": at} for r, at in points]
        changes = {"model": model, "data": {"classes": 4}, "faults": {"schedule": schedule}}
        with Federation(tmp_path / name, algorithm="scaffold", **changes) as fed:
            fed.client("0-1")
            second = fed.client("2-3")
            fed.server()
            if points:
                fed.until(fed.rounds)
                fed.lose(second)
                fed.client("2-3")
            fed.finish()
            assert len(fed.faults()) == len(points)
            found[name] = fed.hashes()
            rows = [r for r in fed.lines("wire.jsonl") if r["kinds"].get("base")]
            assert sorted((r["client"], r["round"]) for r in rows) == [(c, 1) for c in range(4)]
    assert found["still"] == found["killed"]


@pytest.mark.long
def test_a_client_that_lost_its_state_directory_is_sent_it_again(tmp_path):
    model = {**LORA, "weights": weights(tmp_path, shape=(1, 8, 8), classes=4), "base": "server"}
    patience = {"lost": {"closed": 60.0, "silent": 60.0}, "join": 60.0}  # until a process is back
    changes = {"model": model, "data": {"classes": 4}, "round": patience}
    found = {}
    for name in ("still", "lost"):
        own = tmp_path / name / "own"
        with Federation(tmp_path / name, algorithm="fedavg", **changes) as fed:
            fed.client("0-1")
            second = fed.client("2-3", state=own)
            fed.server()
            if name == "lost":
                fed.until(fed.rounds)
                fed.lose(second)
                shutil.rmtree(own)
                fed.client("2-3", state=own)
            fed.finish()
            found[name] = fed.hashes()
            rows = [r for r in fed.lines("wire.jsonl") if r["kinds"].get("base") and r["useful"]]
            again = [r["client"] for r in rows if r["round"] > 1]
            assert sorted(r["client"] for r in rows if r["round"] == 1) == [0, 1, 2, 3]
            assert bool(again) == (name == "lost")
            assert set(again) <= {2, 3}
            assert not [e for e in fed.lines("events.jsonl") if e["type"] == "dropped"]
    assert found["still"] == found["lost"]
