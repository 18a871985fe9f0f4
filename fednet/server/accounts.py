"""What a run's bytes come to, round by round: spent, of use, and as the declarations foretell."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from fednet.algorithms.base import Exchange
from fednet.experiment.build import Experiment
from fednet.server.checkpoint import Progress
from fednet.server.flight import key_of
from fednet.wire.ledger import Kinds, Row, Tally, add_kinds
from fednet.wire.messages import Key


def nothing() -> Kinds:
    return {"up": {}, "down": {}}


class Accounts:
    """take(round): what this server's book has settled up to a round, and not handed out before.
    enter(row): writes a row into the book.
    """

    def __init__(self, take: Callable[[int], Tally], enter: Callable[[Row], None]) -> None:
        self._take, self._enter = take, enter
        # What earlier servers received, and did not come to say whether it was of use.
        self._undecided: dict[Key, list[Row]] = {}
        self._replayed: dict[
            Key, list[Row]
        ] = {}  # earlier servers' useful rows of rounds that no checkpoint holds
        self._replayed_useful = nothing()  # of these, what is in no record yet

    def read(self, rows: Iterable[Row], round: int) -> None:
        """What an earlier server received and this one folds is as useful now as it was then.
        round: the last that a checkpoint holds.
        """
        for row in rows:
            if row["round"] > round and row["useful"] and row["purpose"] == "train":
                self._replayed.setdefault(
                    Key(row["round"], row["phase"], row["attempt"], row["client"]), []
                ).append(row)

    def undecided(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._undecided.setdefault(key_of(row), []).append(row)

    def replay(self, key: Key, reason: str = "") -> None:
        """What crossed to or from an earlier server is used, or is not, for that reason. Where it
        is, its bytes were of use then, and are so now.
        """
        rows = self._replayed.pop(key, ())
        for row in rows if not reason else ():
            add_kinds(self._replayed_useful[row["direction"]], row["kinds"])
        for row in self._undecided.pop(key, ()):
            if reason:
                self._enter({**row, "reason": reason})
            else:
                self._enter({k: v for k, v in row.items() if k != "lost"} | {"useful": True})

    def spent(self, round: int, progress: Progress) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's
        sums.
        """
        for key in [k for k in self._undecided if k.round <= round]:
            self.replay(key, "the server ended")
        tally = self._take(round)
        tally.merge(Tally(useful=self._replayed_useful))
        self._replayed_useful = nothing()
        for direction, n in tally.spent.items():
            progress.totals[direction] = progress.totals.get(direction, 0) + n
            add_kinds(progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally


def predict(
    experiment: Experiment,
    exchange: Exchange,
    completed: Iterable[int],
    enrolled: Container[int],
    sums: Kinds,
) -> None:
    """Adds what an exchange's messages should amount to, from the declarations, for the clients
    that completed it. enrolled: those of them that were given what is given once.
    """
    if not experiment.foretold:
        return
    predicted, enrolment = experiment.predicted, experiment.algorithm.Enrolment
    for client in completed:
        add_kinds(sums["down"], predicted(exchange.down, "down", client))
        add_kinds(sums["up"], predicted(exchange.up, "up", client))
        if client in enrolled and enrolment is not None:
            add_kinds(sums["down"], predicted(enrolment, "down", client))
