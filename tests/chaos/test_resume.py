"""The server is killed at any instant and started again: what was done is not done again, and the
bits are the same.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fednet.server.faults import POINTS
from tests.books import read_book
from tests.chaos.test_books import agree
from tests.processes import Federation, crashes, finished, undisturbed

# A round whose manifest is written is not passed again.
AGAIN = [point for point in POINTS if point != "between"]
MEMORY = {
    "up": {"state": ["ef21", "topk(0.1)", "int8"]},
    "down": {"state": ["delta", "topk(0.2)"]},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedavg", "wire": MEMORY},
        {"algorithm": "scaffold", "model": {"name": "mlp", "hidden": [900, 900]}},  # two parts
    ],
    ids=["memory at both ends", "large payloads"],
)
def test_a_server_that_dies_at_every_point_continues_with_the_same_bits(tmp_path, changes):
    fed = finished(tmp_path, faults=crashes(*((2, at) for at in AGAIN)), **changes)
    assert len(fed.faults()) == len(AGAIN)
    assert fed.hashes() == undisturbed(**changes)
    assert all(r["useful"] == r["predicted"] for r in fed.rounds())
    fed.check()


ASYNCHRONOUS = {
    "algorithm": "moon",
    "schedule": {"mode": "async", "buffer": 2},
    "participation": 0.75,
    "link": {"clock": "virtual", "step_ms": 10, "per_client": {"3": {"step_ms": 70}}},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "scaffold", "rounds": 2}, {**ASYNCHRONOUS, "rounds": 2}],
    ids=["sync", "async"],
)
def test_a_server_killed_at_each_step_of_its_checkpoints_continues_with_the_same_bits(
    tmp_path, changes
):
    """The first server is killed at its first change of the folder, the second at its second, and
    so on, until one comes to the end. `fednet run --in-process`: the clients die with it.
    """
    with Federation(tmp_path, **changes) as fed:
        steps = 1
        fed.supervisor(0, before=functools.partial(kill_at, fed.path / "checkpoint", steps))
        while fed.status() == -signal.SIGKILL:
            steps += 1
            before = functools.partial(kill_at, fed.path / "checkpoint", steps)
            fed.supervisor(0, resume=True, before=before)
        assert fed.status() == 0, fed.output()
        assert steps > 12
        assert fed.hashes() == undisturbed(**changes)
        fed.check()


def kill_at(folder: Path, steps: int) -> None:
    """Kill this process as it makes its nth change of a folder: before a file or a folder in it is
    opened for writing, renamed, cut, made or deleted.
    """
    names = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"}
    left = iter(range(steps - 1, -1, -1))

    def watch(name: str, what: tuple[Any, ...]) -> None:
        if name not in names or (name == "open" and not (what[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            return
        path = what[0]
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if os.fsdecode(path).startswith(f"{folder}/") and not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def test_logged_replies_are_not_asked_for_again(tmp_path):
    """Client 3 has no process when the server dies: the log has all other replies of round 1."""
    with Federation(tmp_path, algorithm="scaffold", round={"start": 3}) as fed:
        fed.begin("0-2")
        fed.until(lambda: len(read_book(fed.path).accepted) == 3)
        fed.lose(fed.last)
        fed.client("3")
        fed.server(resume=True)
        fed.finish()
        rows = [r for r in fed.lines("wire.jsonl") if r["type"] == "task"]
        again = [r["client"] for r in rows if (r["round"], r["incarnation"]) == (1, 2)]
        assert again == [3]
        assert fed.hashes() == undisturbed(algorithm="scaffold")
        fed.check()


def test_a_server_is_found_again_at_the_same_address_and_repairs_torn_last_lines(tmp_path):
    with Federation(tmp_path, algorithm="fedavg", faults=crashes((2, "receiving"))) as fed:
        fed.server()
        found = fed.path / "server.json"
        fed.until(found.exists)
        address = json.loads(found.read_text())["address"]
        fed.client("0-1", server=address)
        fed.client("2-3", server=address)
        assert fed.status() == -signal.SIGKILL
        for name in ("rounds.jsonl", "clients.jsonl", "wire.jsonl", "events.jsonl"):
            with (fed.path / name).open("a") as file:
                file.write('{"round": 3, "to')
        fed.server(resume=True, bind=address)
        fed.finish()
        assert fed.hashes() == undisturbed(algorithm="fedavg")
        for name in ("wire.jsonl", "events.jsonl"):
            assert all(line.endswith("}") for line in (fed.path / name).read_text().splitlines())


@pytest.fixture(scope="module")
def seldom(tmp_path_factory):
    """A run with one checkpoint in three rounds."""
    folder = tmp_path_factory.mktemp("seldom")
    model = {"name": "mlp", "hidden": [400]}  # so that a reply has a file of its own
    changes = {"algorithm": "scaffold", "model": model, "checkpoint": {"every": 3}}
    return finished(folder, "0-3", **changes)


@pytest.mark.parametrize("files", ["kept", "lost"])
def test_bytes_of_rounds_that_were_done_again_are_useful_once(tmp_path, seldom, files):
    """Between two checkpoints the replies of the current round are on disk. Those of the rounds
    before, and all if their files are lost, are asked for again.
    """
    faults = crashes((2, "aggregating"))
    with Federation(tmp_path, faults=faults, **seldom.mapping) as fed:
        fed.begin("0-3")
        assert fed.status() == -signal.SIGKILL
        if files == "lost":
            shutil.rmtree(fed.path / "checkpoint" / "round-2")
        fed.server(resume=True)
        fed.finish()
    assert fed.hashes() == seldom.hashes()
    for made in (fed, seldom):
        agree(made.path)
    assert fed.summary()["useful"] == seldom.summary()["useful"]
