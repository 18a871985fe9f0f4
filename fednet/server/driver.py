"""The order of a run's steps, the same for rounds and for updates.

open        tasks go out
take_event  each event, until the schedule closes: a task is over, or its second has come
close       what has come makes the next state of the server
conclude    evaluate, record, checkpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fednet.server.schedule import Schedule
from fednet.server.sources import ScheduleEvent, Source, collect

if TYPE_CHECKING:
    from fednet.server.open_round import OpenRound


class Engine(Protocol):
    """What the driver needs of `Rounds` and `Updates`. schedule: of what is open; source: where its
    events come from.
    """

    schedule: Schedule
    source: Source

    def has_next_round(self) -> bool:
        """Whether there is another round to do."""

    def open(self, after: OpenRound | None) -> None:
        """Opens the next round. after: the one before it in this process."""

    def take_event(self, event: ScheduleEvent) -> None: ...

    def close(self) -> OpenRound | None:
        """Returns the round; None where another exchange of it is open now."""

    def admit(self, round: OpenRound) -> None:
        """Decides which clients join the run after this round."""

    def may_open_early(self, round: OpenRound) -> bool:
        """Whether the next round may begin before this one is evaluated and recorded."""

    def conclude(self, round: OpenRound) -> None: ...

    def end(self) -> None:
        """The last evaluation."""


def drive(engine: Engine) -> None:
    """All that is left of a run."""
    round: OpenRound | None = None
    opened = False  # whether the next round is open
    while opened or engine.has_next_round():
        if not opened:
            engine.open(round)
        round = None  # so that its models can be freed
        while round is None:
            collect(engine.schedule, engine.source, engine.take_event)
            round = engine.close()
        engine.admit(round)
        opened = engine.may_open_early(round)
        if opened:
            engine.open(round)
        engine.conclude(round)
    engine.end()
