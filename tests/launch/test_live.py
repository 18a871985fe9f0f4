"""What a run shows while it goes, and what Python has of it."""

from __future__ import annotations

import time

import pytest
import torch

import fednet
from fednet.experiment import build as experiment
from fednet.report import status
from tests.rooms import lines, run, small


def test_a_callback_is_told_of_every_round_once_its_record_is_saved(tmp_path):
    told, saved = [], []

    def callback(record):
        told.append(record["round"])
        saved.append(len(lines(tmp_path / "r" / "rounds.jsonl")))

    run(tmp_path, rounds=3, callback=callback)
    assert (told, saved) == ([1, 2, 3], [1, 2, 3])


def test_status_tells_of_a_live_run_and_of_a_finished_one(tmp_path):
    seen = []

    def callback(record):
        found = status.read(tmp_path / "r")
        seen.append((found.state, found.rounds, *status.alive(found, tmp_path / "r", time.time())))

    directory = run(tmp_path, callback=callback)
    assert [(state, rounds, live) for state, rounds, live, _ in seen] == [("running", 2, True)] * 2
    found = status.read(directory)
    assert (found.state, found.round, status.alive(found, directory, time.time())) == (
        "done",
        2,
        (False, "finished"),
    )
    assert "finished after round 2 of 2" in status.show(directory)


def test_the_model_that_is_read_back_is_the_one_that_was_judged(tmp_path):
    directory = run(tmp_path, rounds=3, train={"lr": 0.5})
    module = fednet.open_run(directory).model()
    exp = experiment.build(small())
    with torch.no_grad():
        right = module(exp.data.inputs(exp.data.test[0])).argmax(1) == exp.data.test[1]
    assert right.float().mean().item() == pytest.approx(
        fednet.open_run(directory).rounds[-1].test_accuracy
    )
