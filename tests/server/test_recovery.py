"""What the books of a run have of tasks and replies that a server left half done: of those under
way when it was stopped, and of a round that was not in a checkpoint yet when it was killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednet.errors import RemoteProtocolError, Stopped
from fednet.records import Round
from fednet.records.manifest import read_manifest
from fednet.server.asynchronous import Updates
from fednet.server.checkpoint import Checkpoints
from fednet.server.inbox import Inbox
from fednet.server.open_round import OpenRound
from tests.books import read_book
from tests.chaos.test_books import agree
from tests.processes import lines
from tests.rooms import Killed, run

ASYNC: dict[str, Any] = {
    "algorithm": {"name": "fedbuff"},
    "schedule": {"mode": "async", "buffer": 1},
    "rounds": 6,
}
Task = tuple[int, int]  # round, client


def stopped_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, set[Task]]:
    """A run of three clients that was stopped when each of three replies had made an update; its
    directory, and the tasks of the two clients whose replies are in none.
    """
    conclude = Updates.conclude

    def stopped(self: Updates, round: OpenRound) -> None:
        conclude(self, round)
        if round.number == 3:
            raise Stopped("stopped: SIGTERM; continue with --resume.")

    with monkeypatch.context() as patch:
        patch.setattr(Updates, "conclude", stopped)
        with pytest.raises(Stopped):
            run(tmp_path, **ASYNC)
    left = read_manifest(tmp_path / "r" / "checkpoint")[0].under_way
    assert len(left) == 2
    return tmp_path / "r", {(task.round, client) for client, task in left.items()}


def rows_of(directory: Path, tasks: set[Task]) -> list[dict[str, Any]]:
    rows = lines(directory / "wire.jsonl")
    return [r for r in rows if (r["round"], r["client"]) in tasks]


def test_a_task_under_way_at_a_stop_is_open_in_the_journal_and_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, tasks = stopped_under_way(tmp_path, monkeypatch)
    assert rows_of(directory, tasks) == []
    names = [name for mine in read_book(directory).open_accounts.values() for name in mine]
    assert tasks & {(name[3].round, name[3].client) for name in names if name[2] == "task"}


def test_rounds_after_a_stop_have_all_bytes_to_date_and_tasks_under_way_count_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One had a reply on the disk, which is the next update; one is asked again, and replies to
    another one.
    """
    directory, tasks = stopped_under_way(tmp_path, monkeypatch)
    sums: list[tuple[int, int]] = []

    def to_date(record: Round) -> None:
        rows = [r for r in lines(directory / "wire.jsonl") if r["round"] <= record.round]
        rounds = lines(directory / "rounds.jsonl")
        recorded = sum(r["bytes_up"] + r["bytes_down"] for r in rounds)
        sums.append((recorded, sum(r["bytes"] for r in rows)))

    run(tmp_path, resume=True, callback=to_date, **ASYNC)
    assert len(sums) == 3
    assert all(recorded == written for recorded, written in sums)
    found = [
        (r["type"], r["incarnation"], r["useful"], r.get("reason"))
        for r in rows_of(directory, tasks)
    ]
    replied = [("task", 1, True, None), ("reply", 1, True, None)]  # before the stop
    asked_again = [("task", 1, False, "sent again"), ("task", 2, True, None)]
    assert found == [*replied, *asked_again, ("reply", 2, True, None)]
    agree(directory)


def test_a_reply_that_was_refused_stays_so_in_a_round_that_a_later_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply of client 1 in round 2 is refused and its second one is good; the server is
    killed before the round is in a checkpoint.
    """
    accept = Inbox.accept
    save = Checkpoints.save
    refused = list[Any]()

    def refuses(self: Inbox, arrived: Any) -> Any:
        keys = [record.message.key for record, _ in arrived]
        for i, key in enumerate(keys):
            if (key.round, key.client) == (2, 1) and not refused:
                refused.append(key)
                found = accept(self, [*arrived[:i], *arrived[i + 1 :]])
                return [*found[:i], RemoteProtocolError("not what was asked for"), *found[i:]]
        return accept(self, arrived)

    def dies(self: Checkpoints, server: Any, progress: Any, *more: Any) -> None:
        if progress.round == 2:
            raise Killed
        save(self, server, progress, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "accept", refuses)
        patch.setattr(Checkpoints, "save", dies)
        with pytest.raises(Killed):
            run(tmp_path, rounds=2)
    assert refused
    directory = run(tmp_path, resume=True, rounds=2)
    rows = [r for r in lines(directory / "wire.jsonl") if (r["round"], r["client"]) == (2, 1)]
    useful = [(r["type"], r["useful"]) for r in rows if r["type"] in ("task", "reply")]
    assert sorted(useful) == [("reply", False), ("reply", True), ("task", False), ("task", True)]
    agree(directory)
