"""Runs in one process and by the command: what they show while they go, hold in memory, and may
change when they go on.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fednet.data import loading
from fednet.errors import ConfigError
from fednet.records.manifest import read_manifest
from fednet.report import status
from fednet.server.inbox import Inbox
from tests.rooms import hashes, lines, run


def test_a_callback_is_told_of_every_round_once_it_is_saved_and_status_whether_the_run_lives(
    tmp_path,
):
    seen = []

    def callback(record):
        found = status.read(tmp_path / "r")
        live, _ = status.alive(found, tmp_path / "r", time.time())
        saved = len(lines(tmp_path / "r" / "rounds.jsonl"))
        seen.append((record["round"], saved, found.state, found.rounds, live))

    directory = run(tmp_path, rounds=3, callback=callback)
    assert seen == [(n, n, "running", 3, True) for n in (1, 2, 3)]
    found = status.read(directory)
    assert (found.state, found.round) == ("done", 3)
    assert status.alive(found, directory, time.time()) == (False, "finished")
    assert "finished after round 3 of 3" in status.show(directory)


def test_server_and_clients_have_the_data_in_memory_once(tmp_path, monkeypatch):
    loaded = []
    load = loading.load

    def counted(*of, **how):
        loaded.append(load(*of, **how))
        return loaded[-1]

    monkeypatch.setattr(loading, "load", counted)
    assert len(lines(run(tmp_path, rounds=1) / "rounds.jsonl")) == 1
    assert len(loaded) == 1


def test_a_crash_between_large_replies_changes_neither_the_model_nor_the_useful_payloads(
    tmp_path, monkeypatch
):
    """Payloads of 1.5 MB, more than a part: in one process none of them is on disk."""
    large = {"model": {"name": "mlp", "hidden": [600, 600]}}
    calm = run(tmp_path / "calm", **large)
    accept = Inbox.accept
    taken = []

    def taken_in(inbox, replies):
        for record, _ in replies:
            if record.message.key.purpose == "train":
                taken.append(record.message.key.round)
                if len(taken) == 5:
                    raise KeyError("a crash in the second round")
        return accept(inbox, replies)

    monkeypatch.setattr(Inbox, "accept", taken_in)
    with pytest.raises(KeyError):
        run(tmp_path / "cut", **large)
    assert not list((tmp_path / "cut").rglob("*.bin"))
    again = run(tmp_path / "cut", resume=True, **large)
    assert hashes(again) == hashes(calm)
    useful = [
        sorted(
            (r["round"], r["client"], r["direction"], r["kinds"]["state"])
            for r in lines(directory / "wire.jsonl")
            if r["useful"] and "state" in r["kinds"]
        )
        for directory in (again, calm)
    ]
    assert useful[0] == useful[1]
    assert taken == [1, 1, 1] + [2] * (2 + 3)


@pytest.mark.parametrize("schedule", ["constant", "exponential(0.5)", "step(1, 0.5)"])
def test_a_run_with_more_rounds_has_the_bits_of_one_that_had_them_from_the_start(
    tmp_path: Path, schedule: str
) -> None:
    train = {"train": {"schedule": schedule}}
    whole = run(tmp_path / "whole", rounds=4, **train)
    run(tmp_path / "more", rounds=2, **train)
    more = run(tmp_path / "more", rounds=4, resume=True, **train)
    assert len(set(hashes(whole))) == 4
    assert hashes(more) == hashes(whole)
    # The run's clock goes on where it was.
    taken = sum(row["seconds"] for row in lines(more / "rounds.jsonl"))
    assert read_manifest(more / "checkpoint")[0].seconds == pytest.approx(taken)


def test_where_the_rates_depend_on_all_rounds_a_run_cannot_have_other_rounds(
    tmp_path: Path,
) -> None:
    train = {"train": {"schedule": "cosine"}}
    first = run(tmp_path, rounds=3, **train)
    before = hashes(first)
    for rounds in (2, 6):
        with pytest.raises(ConfigError, match=r"train.schedule: cosine .* Keep rounds=3"):
            run(tmp_path, rounds=rounds, resume=True, **train)
    assert hashes(run(tmp_path, rounds=3, resume=True, **train)) == before
