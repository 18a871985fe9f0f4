from __future__ import annotations

import json
import os
import shutil
import socket

import pytest

from fednet.errors import ConfigError, StateError
from fednet.files import write_record
from fednet.report import status
from tests.report.fake_run import write

NOW = 1000.0
GONE = 2**22 + 1  # above the largest process id Linux gives


def put(path, **more):
    said = {
        "state": "running",
        "round": 3,
        "rounds": 20,
        "phase": "train",
        "arrived": [0, 1, 2, 5],
        "updated": NOW - 4,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "waiting": [
            {
                "client": 7,
                "host": "b",
                "pid": 9,
                "device": "cuda:1",
                "phase": "train",
                "step": 40,
                "steps": 90,
                "since": NOW - 12,
                "deadline_s": 30.0,
            }
        ],
    }
    (path / "status.json").write_text(json.dumps(said | more))
    return path


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "a")


def test_a_live_run_says_whom_it_waits_for_and_what_the_deadline_will_do(run):
    shown = status.text(status.read(put(run)), run, NOW)
    assert "round 3 of 20, train" in shown
    assert "is running (last update 4 s ago)" in shown
    assert "7 b 9 cuda:1 train 40 of 90 12 s dropped in 26 s" in " ".join(shown.split())
    assert "replied: 0-2, 5" in shown


@pytest.mark.parametrize(
    ("more", "live", "how"),
    [
        ({}, True, "is running (last update 4 s ago)"),
        ({"pid": GONE}, False, "has ended unexpectedly"),
        ({"host": "far", "updated": NOW - 29}, True, "server on far is running"),
        ({"host": "far", "updated": NOW - 31}, False, "no update from far for 31 s"),
        ({"state": "done", "pid": GONE}, False, "finished"),
    ],
)
def test_a_run_is_alive_by_its_process_and_elsewhere_by_its_last_update(run, more, live, how):
    found = status.alive(status.read(put(run, **more)), run, NOW)
    assert found[0] is live
    assert how in found[1]
    assert more or f"server process {os.getpid()} " in found[1]


def checkpoint(run, **more):
    (run / "checkpoint").mkdir(exist_ok=True)
    lengths = {"rounds.jsonl": (run / "rounds.jsonl").stat().st_size}
    progress = {"run": "r", "round": 3, "lengths": lengths}
    record = {"format": 1, "files": {"server": "state-0a.safetensors"}, "progress": progress}
    write_record(run / "checkpoint" / "manifest.json", record | more)


@pytest.mark.parametrize("ended", [{"state": "stopped"}, {"pid": GONE}])
def test_of_a_run_that_ended_early_it_says_whether_a_resume_goes_on(run, ended):
    put(run, **ended)

    def how():
        live, known = status.alive(status.read(run), run, NOW)
        assert not live
        return known.partition("; ")[2]

    assert how() == "its checkpoint is gone, so it cannot be resumed"
    for odd in ({"format": 99}, {"files": {}}, {"progress": {"round": 3}}):
        checkpoint(run, **odd)
        assert how().startswith("its checkpoint or records are damaged; restore the files")
    checkpoint(run)
    assert how() == "the last checkpoint is saved; continue with --resume"
    (run / "rounds.jsonl").write_bytes((run / "rounds.jsonl").read_bytes()[:-1])
    assert how().startswith("its checkpoint or records are damaged; restore the files")
    shutil.rmtree(run / "checkpoint")
    (run / "rounds.jsonl").unlink()
    assert how() == "no round was finished yet; --resume starts it from the beginning"


def test_as_json_it_says_how_life_is_known(run):
    shown = status.show(put(run), json=True)
    assert json.loads(shown)["alive"] is True
    assert json.loads(shown)["waiting"][0]["client"] == 7


def test_a_run_that_says_nothing_and_a_path_that_is_no_run_are_told_apart(run, tmp_path):
    with pytest.raises(StateError, match=r"status\.json is missing"):
        status.read(run)
    with pytest.raises(ConfigError, match="expected a run directory"):
        status.read(tmp_path / "none")


@pytest.mark.parametrize("damaged", [b"{", b'{"state": "\xff"}'])
def test_a_damaged_status_is_an_error_that_names_it(run, damaged):
    (run / "status.json").write_bytes(damaged)
    with pytest.raises(StateError, match=r"status\.json: "):
        status.read(run)


def test_a_client_that_is_not_connected_is_told_from_one_that_is_queued(run):
    row = {"client": 7, "host": "", "pid": 0, "device": "", "phase": "waiting", "since": NOW}
    shown = status.text(status.read(put(run, waiting=[row])), run, NOW)
    assert "not connected" in shown
    shown = status.text(status.read(put(run, waiting=[{**row, "phase": "queued"}])), run, NOW)
    assert "not connected" not in shown
    assert "queued" in shown


def test_before_the_first_round_it_says_who_is_there_and_who_is_missing(run):
    put(run, round=0, waiting=[], arrived=[], here=[[0, 2], 5], coming=[3], missing=[4, [6, 9]])
    lines = status.text(status.read(run), run, NOW).splitlines()
    assert lines[0] == "running: before round 1 of 20"
    assert lines[2:] == [
        "ready: 4 clients: 0-2, 5",
        "preparing: 1 client: 3",
        "not connected: 5 clients: 4, 6-9",
    ]


def test_each_process_is_listed_with_what_it_did_last_and_why_it_is_not_there(run):
    did = {"did": "answered for client 1 in round 3", "round": 3}
    here = {"clients": [[0, 1]], "connected": True, "host": "a", "seen": NOW - 2, **did}
    here |= {"site": "uke"}
    gone = {"clients": [4, 5], "host": "b", "seen": NOW - 300, "why": "key expired"}
    never = {"clients": [7], "why": "has not connected"}
    put(run, sites=[here, gone, never])
    *_, head, _, first, second, third = status.text(status.read(run), run, NOW).splitlines()
    assert head == "client processes: 1 connected, 3 clients not connected:"
    said = [" ".join(line.split()) for line in (first, second, third)]
    assert said == [
        "0-1 uke a - 2 s ago answered for client 1 in round 3 connected",
        "4, 5 - b - 5 min ago - key expired",
        "7 - - - never - has not connected",
    ]
