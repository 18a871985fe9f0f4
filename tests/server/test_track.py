"""Trackers: what they get, and that one which fails is left out and no more."""

from __future__ import annotations

import pytest

from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.records import Round
from fednet.server import tracking
from fednet.server.tracking import Trackers, numbers

ROUND = Round(
    round=3,
    train_loss=0.5,
    test_accuracy=0.75,
    bytes_up=10,
    client_accuracy={"personal": 0.25},
    algorithm={"epsilon": 1.5, "warning": "text"},
)


def asked(*names):
    return from_mapping({"seed": 7}).replace(track=names)


class Fake:
    """fails: from that call on."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.got = []

    def write(self, round, numbers):
        if self.fails == "write":
            raise OSError("no room")
        self.got.append((round, numbers))

    def close(self):
        self.got.append("closed")


def test_numbers_are_named_alike_for_every_tracker():
    found = numbers(ROUND)
    assert found["test_accuracy"] == 0.75
    assert found["train_loss"] == 0.5
    assert found["bytes_up"] == 10
    assert found["client_accuracy/personal"] == 0.25
    assert found["algorithm/epsilon"] == 1.5
    assert "algorithm/warning" not in found


def test_one_that_fails_is_left_out_said_once_and_the_others_go_on(tmp_path, monkeypatch):
    good = Fake()
    bad = Fake("write")
    said = []

    def broken(run, config):
        raise RuntimeError("cannot begin")

    kinds = {
        "a": lambda r, c: (bad.write, bad.close),
        "b": lambda r, c: (good.write, good.close),
        "c": broken,
    }
    monkeypatch.setattr(tracking, "KINDS", kinds)
    trackers = Trackers(asked("a", "b", "c"), tmp_path, said.append)
    trackers.round(ROUND)
    trackers.round(ROUND)
    trackers.close()
    assert [len(good.got), bad.got] == [3, []]
    assert said == [
        "track: c is left out from now on: RuntimeError: cannot begin",
        "track: a is left out from now on: OSError: no room",
    ]


def test_one_that_is_not_installed_is_named_with_its_package(tmp_path, monkeypatch):
    def absent(run, config):
        raise ImportError

    monkeypatch.setattr(tracking, "KINDS", {"mlflow": absent})
    with pytest.raises(ConfigError, match="track: mlflow needs the package mlflow"):
        Trackers(asked("mlflow"), tmp_path, print)


def test_mlflow_has_the_numbers_in_a_store_of_files_and_a_resume_goes_on_there(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    said = []
    for step in (1, 2):
        trackers = Trackers(asked("mlflow"), tmp_path, said.append)
        trackers.round(Round(round=step, train_loss=1.0 / step))
        trackers.close()
    assert said == []
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fednet").experiment_id])
    assert run.data.params["seed"] == "7"
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]


def test_wandb_keeps_its_run_offline_in_the_runs_directory(tmp_path):
    pytest.importorskip("wandb")
    said = []
    trackers = Trackers(asked("wandb"), tmp_path, said.append)
    trackers.round(ROUND)
    trackers.close()
    assert said == []
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
