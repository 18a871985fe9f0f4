"""The server dies, at any instant, and is started again: what was done is not done again, and the
bits are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from fednet.experiment.faults import POINTS
from fednet.report import costs
from fednet.report.read import open_run
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import Log, sealed_in
from tests.federation import Federation


def crashes(*points: tuple[int, str]) -> dict[str, object]:
    return {"schedule": [{"round": r, "kind": "server_crash", "at": at} for r, at in points]}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    """The hashes of a run in which nothing happens, by method."""
    known: dict[str, list[tuple[int, str, str]]] = {}

    def run(method: str):
        if method not in known:
            with Federation(tmp_path_factory.mktemp(method), algorithm=method) as fed:
                fed.client("0-1")
                fed.client("2-3")
                fed.server()
                fed.finish()
                fed.check()
                known[method] = fed.hashes()
                assert len(known[method]) == 3
        return known[method]

    return run


@pytest.mark.slow  # the next test comes by all of them in one run
@pytest.mark.parametrize("point", POINTS)
def test_a_server_killed_at_any_point_of_a_round_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed, point: str
) -> None:
    with Federation(tmp_path, algorithm="scaffold", faults=crashes((2, point))) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        assert fed.faults() == [(2, -1, f"server_crash {point}")]
        assert fed.hashes() == undisturbed("scaffold")
        fed.check()


def test_a_server_that_dies_at_every_point_there_is_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed
) -> None:
    with Federation(
        tmp_path,
        algorithm="fedavg",
        faults=crashes(*((r, at) for r in (2,) for at in POINTS if at != "between")),
    ) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        # A round whose manifest is written is not come by again.
        assert len(fed.faults()) == len(POINTS) - 1
        assert fed.hashes() == undisturbed("fedavg")
        fed.check()


def test_what_both_ends_remember_survives_a_server_that_dies_at_every_point(tmp_path: Path) -> None:
    wire = {
        "up": {"state": ["ef21", "topk(0.1)", "int8"]},
        "down": {"state": ["delta", "topk(0.2)"]},
    }
    points = [at for at in POINTS if at != "between"]
    found = []
    for name, faults in (("whole", {}), ("cut", crashes(*((2, at) for at in points)))):
        (tmp_path / name).mkdir()
        with Federation(tmp_path / name, algorithm="fedavg", wire=wire, faults=faults) as fed:
            fed.client("0-1")
            fed.client("2-3")
            fed.server()
            fed.finish()
            assert len(fed.faults()) == (len(points) if faults else 0)
            fed.check()
            found.append(fed.hashes())
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_replies_that_were_spooled_are_not_asked_for_again(tmp_path: Path, undisturbed) -> None:
    """Client 3 has no process when the server dies: what comes before is all there can be in the
    spool.
    """
    with Federation(tmp_path, algorithm="scaffold", round={"start": 3}) as fed:
        fed.client("0-2")
        fed.server(faults=crashes())
        log = fed.path / "checkpoint" / "round-1" / "replies.log"
        # Beside evaluations.
        fed.until(
            lambda: sum(found.seal.key.purpose == "train" for found in sealed_in(log)) == 3,
        )
        os.kill(fed.last.pid, signal.SIGKILL)
        assert fed.status() == -signal.SIGKILL
        fed.client("3")
        fed.server(resume=True)
        fed.finish()
        asked = [
            r["client"]
            for r in fed.lines("wire.jsonl")
            if r["type"] == "task" and r["round"] == 1 and r["incarnation"] == 2
        ]
        assert asked == [3]
        assert fed.hashes() == undisturbed("scaffold")
        fed.check()


def test_a_reply_that_answers_another_task_is_asked_for_again(tmp_path: Path, undisturbed) -> None:
    with Federation(tmp_path, algorithm="fedavg", faults=crashes((2, "aggregating"))) as fed:
        fed.client("0-3")
        fed.server()
        assert fed.status() == -signal.SIGKILL
        path = fed.path / "checkpoint" / "round-2" / "replies.log"
        text, records = path.read_bytes(), sealed_in(path)
        path.unlink()
        log = Log(path)
        for seal, at in records:
            if seal.key.client == 1:
                seal.task = (b"other", seal.task[1])  # as if round 1 had come to another model then
            log.add(seal, text[at : at + seal.inline])
        log.flush()
        fed.server(resume=True)
        fed.finish()
        asked = [
            r["client"]
            for r in fed.lines("wire.jsonl")
            if r["type"] == "task" and r["round"] == 2 and r["incarnation"] == 2
        ]
        assert asked == [1]
        assert fed.hashes() == undisturbed("fedavg")


def test_a_server_at_the_same_address_is_found_again(tmp_path: Path, undisturbed) -> None:
    with Federation(tmp_path, algorithm="fedavg", faults=crashes((2, "receiving"))) as fed:
        fed.server()
        address = json.loads(
            fed.until(
                lambda: (
                    (fed.path / "server.json").exists() and (fed.path / "server.json").read_text()
                )
            )
        )["address"]
        fed.client("0-1", server=address)
        fed.client("2-3", server=address)
        assert fed.status() == -signal.SIGKILL
        fed.server(resume=True, bind=address)
        fed.finish()
        assert fed.hashes() == undisturbed("fedavg")


def test_records_between_checkpoints_are_cut_and_written_anew(tmp_path: Path, undisturbed) -> None:
    with Federation(
        tmp_path,
        algorithm="scaffold",
        checkpoint={"every": 2},
        faults=crashes((3, "aggregating"), (1, "between")),
    ) as fed:
        fed.client("0-3")
        fed.server()
        fed.finish()
        assert fed.hashes() == undisturbed("scaffold")
        fed.check()


@pytest.mark.parametrize("spool", ["kept", "lost"])
def test_bytes_of_rounds_that_were_done_again_are_counted_as_useful_once(
    tmp_path: Path, spool: str
) -> None:
    """Between two checkpoints the spool holds the replies of the round under way; those of the
    rounds before it, and where it is lost of all, are asked for again.
    """
    found = {}
    for name, planned in (("calm", ()), ("died", ((2, "aggregating"),))):
        with Federation(
            tmp_path / name, algorithm="scaffold", checkpoint={"every": 3}, faults=crashes(*planned)
        ) as fed:
            fed.client("0-3")
            fed.server()
            if planned:
                assert fed.status() == -signal.SIGKILL
                if spool == "lost":
                    shutil.rmtree(fed.path / "checkpoint" / "round-2")
                fed.server(resume=True)
            fed.finish()
        summary = json.loads((fed.path / "summary.json").read_text())
        measured = costs.predicted(open_run(fed.path), summary["predicted"])
        found[name] = (fed.hashes(), summary["useful"], measured)
        assert summary["useful"] == summary["predicted"]
        assert {
            d: {k: v["measured"] for k, v in kinds.items()} for d, kinds in measured.items()
        } == summary["useful"]
    assert found["calm"] == found["died"]


def test_a_torn_last_line_is_repaired(tmp_path: Path, undisturbed) -> None:
    with Federation(tmp_path, algorithm="fedavg", faults=crashes((2, "between"))) as fed:
        fed.client("0-3")
        fed.server()
        assert fed.status() == -signal.SIGKILL
        for name in ("rounds.jsonl", "clients.jsonl", "wire.jsonl", "events.jsonl"):
            with (fed.path / name).open("a") as file:
                file.write('{"round": 3, "to')
        fed.server(resume=True)
        fed.finish()
        assert fed.hashes() == undisturbed("fedavg")
        for name in ("wire.jsonl", "events.jsonl"):
            assert all(
                line.startswith("{") and line.endswith("}")
                for line in (fed.path / name).read_text().splitlines()
            )


def test_spent_bytes_are_counted_through_a_restart(tmp_path: Path) -> None:
    with Federation(tmp_path, algorithm="fedavg", faults=crashes((2, "receiving"))) as fed:
        fed.client("0-3")
        fed.server()
        fed.finish()
        booked = {
            d: sum(r["bytes"] for r in fed.lines("wire.jsonl") if r["direction"] == d)
            for d in ("up", "down")
        }
        known = Checkpoints(fed.path / "checkpoint").progress().totals
        for way in ("up", "down"):
            assert known[way] == sum(r[f"bytes_{way}"] for r in fed.rounds())
        # what is settled after the last record, the farewell, is in the book alone
        assert (
            0
            <= booked["up"] - sum(r["bytes_up"] for r in fed.rounds())
            < 0.1 * booked["up"] + 20000
        )


# The first checkpoint has 11 kB, more than the one and less than the other limit; the replies of a
# round have more.
@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (7000, "no round was finished yet; --resume starts it from the beginning"),
        (12000, "the last checkpoint is saved; continue with --resume"),
    ],
)
def test_a_full_disk_stops_the_run_and_says_what_is_left(
    tmp_path: Path, undisturbed, limit: int, left: str
) -> None:
    with Federation(tmp_path, algorithm="scaffold") as fed:
        fed.client("0-3")
        fed.server(limit=limit)
        assert fed.status() == 3
        assert left in fed.output()
        assert len(fed.rounds()) < 3
        fed.server(resume=True)
        fed.finish()
        assert fed.hashes() == undisturbed("scaffold")
