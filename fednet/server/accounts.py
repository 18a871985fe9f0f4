"""What a run's bytes come to, round by round: spent, of use, and as the declarations foretell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from fednet.algorithms.secure import Secure
from fednet.experiment.build import Experiment
from fednet.models.base import BASE
from fednet.records.manifest import RunProgress
from fednet.server.flight import key_of
from fednet.wire.book import done_again
from fednet.wire.ledger import OTHER, Direction, Kinds, Row, Tally, add_kinds
from fednet.wire.messages import Key

if TYPE_CHECKING:
    from fednet.server.asking import Phase


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

    def read(
        self, rows: Iterable[Row], round: int, under_way: Container[tuple[int, int]] = ()
    ) -> None:
        """What an earlier server received and this one folds is as useful now as it was then.
        round: the last that a checkpoint holds, but for the tasks (round, client) `under_way`.
        """
        for row in rows:
            here = row["round"] > round or (row["round"], row["client"]) in under_way
            if here and row["useful"] and row["purpose"] == "train":
                self._replayed.setdefault(
                    Key(row["round"], row["phase"], row["attempt"], row["client"]), []
                ).append(row)

    def undecided(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._undecided.setdefault(key_of(row), []).append(row)

    def replay(self, key: Key, reason: str = "") -> bool:
        """What crossed to or from an earlier server is used, or is not, for that reason. Where it
        is, its bytes were of use then, and are so now; of what crossed to several servers, what
        crossed to the last. Returns whether anything had crossed.
        """
        return self._replay(key, {"down": reason, "up": reason})

    def had(self, key: Key) -> bool:
        """As `replay`, of a task that an earlier server sent and whose reply came to this one."""
        return self._replay(key, {"down": "", "up": "sent again"})

    def _replay(self, key: Key, reasons: Mapping[str, str]) -> bool:
        """reasons: by the way of the payload."""
        rows, undecided = self._replayed.pop(key, []), self._undecided.pop(key, [])
        again = done_again(rows)
        for row in rows:
            if not reasons[_way(row)] and id(row) not in again:
                add_kinds(self._replayed_useful[row["direction"]], row["kinds"])
        used = {(row["direction"], row["type"]) for row in rows}
        for row in reversed(undecided):
            what = row["direction"], row["type"]
            why = reasons[_way(row)] or ("sent again" if what in used else "")
            used.add(what)
            if why:
                self._enter({**row, "reason": why})
            else:
                self._enter({k: v for k, v in row.items() if k != "lost"} | {"useful": True})
        return any(_way(row) == "down" for row in (*rows, *undecided))

    def spent(
        self, round: int, progress: RunProgress, under_way: Container[tuple[int, int]] = ()
    ) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's
        sums. under_way: tasks (round, client) that may still be answered.
        """
        over = [k for k in self._undecided if k.round <= round]
        for key in [k for k in over if (k.round, k.client) not in under_way]:
            self.replay(key, "the server ended")
        tally = self._take(round)
        tally.merge(Tally(useful=self._replayed_useful))
        self._replayed_useful = nothing()
        for direction, n in tally.spent.items():
            progress.totals[direction] = progress.totals.get(direction, 0) + n
            add_kinds(progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally


def _way(row: Row) -> str:
    """Of the payload that a row belongs to: what asks for one goes the other way."""
    way: Direction = row["direction"]
    return OTHER[way] if row["type"] == "pull" else way


def predict(
    experiment: Experiment, phase: Phase, server: object, completed: Iterable[int], sums: Kinds
) -> None:
    """Adds what an exchange's messages should amount to, from the declarations, for the clients
    that completed it. server: its state as the exchange had it.
    """
    if not experiment.predictable:
        return
    method = experiment.algorithm
    predicted = functools.partial(experiment.predicted, round=phase.round)
    exchange, clients = method.exchanges[phase.index], list(completed)
    if experiment.base is not None and phase.index == 0:
        first = sum(1 for c in clients if not phase.start[c])
        add_kinds(sums["down"], {BASE: first * experiment.base.raw} if first else {})
    if not experiment.sized_by_client:  # one stands for all
        enrolled = [c for c in clients if c in phase.enrolled]
        for way, kind, who in (
            ("down", exchange.down, clients),
            ("up", exchange.up, clients),
            ("down", method.Enrolment, enrolled),
        ):
            each = predicted(kind, way, who[0]) if who and kind is not None else {}
            add_kinds(sums[way], {name: len(who) * n for name, n in each.items()})
        return
    for client in clients:
        exact = method.exact(server, phase.round, client) if isinstance(method, Secure) else None
        add_kinds(sums["down"], predicted(exchange.down, "down", client, exact))
        add_kinds(sums["up"], predicted(exchange.up, "up", client, exact))
        if client in phase.enrolled and method.Enrolment is not None:
            add_kinds(sums["down"], predicted(method.Enrolment, "down", client))
