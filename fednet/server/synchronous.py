"""A run in rounds, top to bottom.

    open: select the cohort, broadcast
    exchange: collect the replies, add them up in id order, make the next server state
    conclude: evaluate, record, checkpoint

The next round's broadcast leaves before this round is evaluated and checkpointed, so that the
clients train meanwhile; the records and the bits are the same either way.
"""

from __future__ import annotations

from fednet.server.round import may_overlap, reached
from fednet.server.rounds import Rounds


def run_rounds(rounds: Rounds) -> None:
    """All rounds, then the last evaluation."""
    config, progress = rounds.config, rounds.progress
    number = progress.round + 1
    round = rounds.open(number, rounds.carried) if rounds.more(progress.round) else None
    while round is not None:
        rounds.exchange(round)
        join = rounds.clients_join(round)
        early = round.number < config.rounds and may_overlap(config) and not join
        early = early and rounds.attendance.ready(rounds.second(round.virtual))
        ahead = None
        if early:
            ahead = rounds.open(round.number + 1, round.after, round.virtual)
        rounds.conclude(round)
        rounds.give_up(round)
        rounds.grow(round)
        progress.stopped = reached(config, progress) or ""
        if ahead is None and rounds.more(round.number):
            ahead = rounds.open(round.number + 1, round.after)
        round = ahead
    rounds.end()
