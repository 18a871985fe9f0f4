"""What a run's bytes come to where several servers sent or received the same."""

from __future__ import annotations

from fednet.records.manifest import RunProgress
from fednet.server.books import Accounts
from fednet.wire.ledger import Row, Tally
from fednet.wire.messages import Key

KEY = Key(2, 0, 0, 7)


def row(direction: str, type: str, incarnation: int, nbytes: int, **more: object) -> Row:
    return {
        "round": 2,
        "client": 7,
        "phase": 0,
        "attempt": 0,
        "purpose": "train",
        "direction": direction,
        "type": type,
        "incarnation": incarnation,
        "useful": True,
        "kinds": {"state": nbytes} if nbytes else {},
        "bytes": nbytes,
        **more,
    }


def accounts(*rows: Row) -> tuple[Accounts, list[Row]]:
    """Of a server that goes on from round 1, and the rows that it enters."""
    entered: list[Row] = []
    found = Accounts(lambda round: Tally(), entered.append)
    found.read(rows, round=1)
    return found, entered


def useful(accounts: Accounts) -> dict[str, dict[str, int]]:
    progress = RunProgress(run="r")
    accounts.spent(2, progress)
    return progress.useful


def test_a_reply_that_two_earlier_servers_received_counts_once_as_what_the_last_received():
    """Both got past its round, and were killed before a checkpoint had it; the spool has it."""
    found, entered = accounts(
        row("down", "task", 1, 100),
        row("up", "reply", 1, 30),
        row("down", "task", 2, 100),
        row("up", "reply", 2, 20),
    )
    found.undecided([row("down", "task", 3, 100, useful=False)])
    assert found.replay(KEY)
    assert [(r["useful"], r["reason"]) for r in entered] == [(False, "sent again")]
    assert useful(found) == {"down": {"state": 100}, "up": {"state": 20}}


def test_a_task_that_a_client_had_counts_as_it_was_sent_last_and_not_the_reply_that_comes_anew():
    """The second server found the client at it: its row has no payload."""
    found, entered = accounts(
        row("down", "task", 1, 100),
        row("up", "reply", 1, 30),
        row("down", "task", 2, 0),
        row("up", "reply", 2, 30),
    )
    asked = row("up", "pull", 3, 0, useful=False)
    found.undecided([asked, row("up", "reply", 3, 30, useful=False)])
    assert found.had(KEY)
    assert [(r["type"], r["useful"]) for r in entered] == [("reply", False), ("pull", True)]
    assert useful(found) == {"down": {"state": 100}, "up": {}}


def test_what_only_a_reply_is_known_of_was_sent_by_no_earlier_server():
    found, _ = accounts(row("up", "reply", 1, 30))
    assert not found.had(KEY)
    assert useful(found) == {"down": {}, "up": {}}
