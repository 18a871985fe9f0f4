"""What a run or a site wrote, and somebody deleted, is missed: it is not made anew in silence. What
another release wrote is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fednet.algorithms.scaffold import Scaffold
from fednet.errors import CannotGoOn, StateAbsent, StateError, Stopped
from fednet.experiment import build
from fednet.experiment.store import ClientStore, Record
from fednet.files import read_record, write_record
from fednet.records.manifest import FORMAT, read_manifest
from fednet.server import exports
from tests.rooms import lines, run, small

PRIVATE = {"privacy": {"clip": 1.0, "noise": 2.0, "delta": 1e-3}, "rounds": 3}
KEPT = {"evaluate": {"clients": "all", "every": 3}, "rounds": 3}


def stop(record) -> None:
    if record.round == 2:
        raise Stopped("enough")


def stopped(out: Path, **changes) -> Path:
    with pytest.raises(Stopped):
        run(out, callback=stop, **changes)
    return out / "r"


@pytest.mark.parametrize("where", ["server", "client"])
def test_a_deleted_secret_of_noise_is_an_error_at_the_resume(tmp_path: Path, where: str) -> None:
    pytest.importorskip("dp_accounting")
    changes = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "where": where}}
    directory = stopped(tmp_path, **changes)
    (key,) = directory.rglob("noise.key")
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(StateError, match=r"noise\.key: the secret of this run's noise is gone"):
        run(tmp_path, resume=True, **changes)
    assert not key.exists()
    key.write_bytes(kept)
    assert len(lines(run(tmp_path, resume=True, **changes) / "rounds.jsonl")) == 3


def test_a_deleted_account_of_answers_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    changes = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "where": "client"}}
    directory = stopped(tmp_path, **changes)
    (directory / "state" / "answers.jsonl").unlink()
    with pytest.raises(StateError, match=r"answers\.jsonl: the account .* is gone"):
        run(tmp_path, resume=True, **changes)


@pytest.mark.parametrize("how", ["deleted", "another round's"])
def test_a_local_model_that_is_not_the_one_that_was_kept_is_an_error_when_it_is_judged(
    tmp_path: Path, how: str
) -> None:
    lost = [{"round": 3, "client": 1, "kind": "drop_before_sending"}]
    changes = {**KEPT, "faults": {"schedule": lost}, "round": {"lost": {"closed": 0.02}}}
    directory = stopped(tmp_path, **changes)
    folder = next(directory.glob("state/*/client-1"))
    first, last = sorted(folder.glob("*.local.safetensors"))
    if how == "deleted":
        last.unlink()
        why = r"its local model of round 2 is not in .*put back .*fednet-client"
    else:
        shutil.copy(first, last)
        why = "not the local model that client 1 kept"
    with pytest.raises(StateError, match=why):
        run(tmp_path, resume=True, **changes)


def test_a_client_that_may_begin_anew_does_without_its_local_model(tmp_path: Path) -> None:
    initial = build.build(small(), None).setting.initial
    store = ClientStore(tmp_path, Scaffold.Client)
    store.save(0, "1-0-0", Record(), initial)
    store.save(0, "2-0-0", Record(), None)
    assert store.local(0, "1-0-0") is not None
    assert store.local(0, "2-0-0") is store.local(0, "") is None  # none was kept
    (tmp_path / "client-0" / "1-0-0.local.safetensors").unlink()
    with pytest.raises(StateAbsent):
        store.local(0, "1-0-0")


def test_who_lacks_it_has_no_personal_model_and_the_others_have(tmp_path: Path) -> None:
    experiment = build.build(small(), None)
    (tmp_path / "state" / "run").mkdir(parents=True)
    store = ClientStore(tmp_path / "state" / "run", experiment.algorithm.Client)
    for client in (0, 1):
        store.save(client, "1-0-0", Record(), experiment.setting.initial)
    (tmp_path / "state" / "run" / "client-0" / "1-0-0.local.safetensors").unlink()
    gone = exports.keep_personal(tmp_path, "run", {0: "1-0-0", 1: "1-0-0"}, experiment, None)
    assert [p.name for p in (tmp_path / "personal").iterdir()] == ["client-1.safetensors"]
    assert list(gone) == [0]
    assert "its local model of round 1 is not in" in gone[0]


def test_it_is_not_said_that_a_checkpoint_is_whole_that_was_removed(tmp_path: Path) -> None:
    def remove(record) -> None:
        shutil.rmtree(tmp_path / "r" / "checkpoint")

    with pytest.raises(CannotGoOn, match=r"No such .*; its checkpoint is gone, so"):
        run(tmp_path, callback=remove, rounds=3)
    with pytest.raises(CannotGoOn, match="has finished rounds but no checkpoint to resume from"):
        run(tmp_path, resume=True, rounds=3)


def test_a_run_of_another_release_is_refused_in_a_sentence(tmp_path):
    file = stopped(tmp_path, rounds=3) / "checkpoint" / "manifest.json"
    write_record(file, {**read_record(file, ""), "format": FORMAT + 1})
    with pytest.raises(StateError, match="r: another release of fednet wrote this run"):
        read_manifest(file.parent)[0]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_run_whose_directory_goes_away_ends_and_makes_no_new_one(
    tmp_path: Path, how: str, method: str
) -> None:
    def take_away(record) -> None:
        if record.round == 2:
            (tmp_path / "r").rename(tmp_path / "elsewhere")
            if how == "deleted":
                shutil.rmtree(tmp_path / "elsewhere")

    with pytest.raises((CannotGoOn, StateError), match=str(tmp_path / "r")):
        run(tmp_path, callback=take_away, algorithm={"name": method}, rounds=4)
    assert not (tmp_path / "r").exists()
    if how == "moved":
        (tmp_path / "elsewhere").rename(tmp_path / "r")
        run(tmp_path, resume=True, algorithm={"name": method}, rounds=4)
        assert len(lines(tmp_path / "r" / "rounds.jsonl")) == 4
