"""What a run's bytes come to where several servers received the same."""

from __future__ import annotations

from fednet.server.accounts import Accounts
from fednet.server.checkpoint import RunProgress
from fednet.wire.ledger import Row, Tally
from fednet.wire.messages import Key

KEY = Key(2, 0, 0, 7)


def row(direction: str, type: str, incarnation: int, useful: bool, nbytes: int) -> Row:
    return {
        "round": 2,
        "client": 7,
        "phase": 0,
        "attempt": 0,
        "purpose": "train",
        "direction": direction,
        "type": type,
        "incarnation": incarnation,
        "useful": useful,
        "kinds": {"state": nbytes},
        "bytes": nbytes,
    }


def test_a_reply_that_two_earlier_servers_received_counts_once_as_what_the_last_received():
    """Both got past its round, and were killed before a checkpoint had it; the spool has it."""
    entered: list[Row] = []
    accounts = Accounts(lambda round: Tally(), entered.append)
    accounts.read(
        [
            *(row("down", "task", n, True, 100) for n in (1, 2)),
            row("up", "reply", 1, True, 30),
            row("up", "reply", 2, True, 20),
        ],
        round=1,
    )
    accounts.undecided([row("down", "task", 3, False, 100)])
    assert accounts.replay(KEY)
    assert [(r["useful"], r["reason"]) for r in entered] == [(False, "sent again")]
    progress = RunProgress(run="r")
    accounts.spent(2, progress)
    assert progress.useful == {"down": {"state": 100}, "up": {"state": 20}}
