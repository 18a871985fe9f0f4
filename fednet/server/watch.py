"""While the server waits: whether someone asked it to stop; status.json and the display; who is
there for a round to begin. What signals do to a server, and what it is started with.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from fednet.config import Config
from fednet.errors import Asked, CannotGoOn, Stopped, ask, signal_name, stops
from fednet.experiment import selection
from fednet.experiment.faults import Replay
from fednet.experiment.rundir import RunDirectory, write_status
from fednet.ids import ranges
from fednet.plain import JsonDict, JsonMapping
from fednet.records.rows import Round, Row
from fednet.server.io import ServerIO
from fednet.world import World


class Watcher(Protocol):
    """Who is told of a run while it goes: `cli.display.Display`, `launch.start.Silent`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *what: object) -> None: ...

    def round_started(self, round: int, rounds: int, cohort: Sequence[int], /) -> None: ...

    def progress(self, info: JsonMapping, /) -> None:
        """Whom the round waits for: `waiting` and `arrived`, see `ServerIO.snapshot`."""
        ...

    def round_done(self, record: Row, /) -> None: ...

    def note(self, text: str, /) -> None: ...

    def warn(self, text: str, /) -> None:
        """What is said with --quiet too."""
        ...

    def finished(self, summary: JsonMapping, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Hosting:
    """display: shows the run while it goes. command: the words that started it, for the summary.
    data: where data lie. until: on the monotonic clock, when to stop. callback: called with the
    record of each round. on_event: called with each event of a client process and its fields, in
    the thread of the server's input and output.
    """

    display: Watcher
    command: Sequence[str] = ()
    device: str = "auto"
    data: Path | None = None
    until: float | None = None
    callback: Callable[[Round], None] | None = None
    on_event: Callable[[str, JsonMapping], None] | None = None


Handler = Callable[[int, FrameType | None], None]
Before = Handler | int | signal.Handlers | None  # what a signal did


def stop_later(watch: Watch, number: int, _: FrameType | None) -> None:
    """Once there is something to be saved: the rounds look for this."""
    watch.requested = signal_name(number), number == signal.SIGINT


def on_stop(handler: Handler) -> dict[int, Before]:
    """What the signals that ask for a stop do from now on; returns what they did."""
    before: dict[int, Before] = {}
    for number in stops():
        with contextlib.suppress(ValueError):  # in a thread of a caller's own, who has the signals
            before[number] = signal.signal(number, handler)
    return before


@contextlib.contextmanager
def while_stopping(handler: Handler) -> Iterator[None]:
    """As `on_stop`, and afterwards they do again what they did."""
    before = on_stop(handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


TOGETHER_S = 0.3
"""One press of Ctrl-C may come twice: from the terminal, and passed on by whoever started this
process.
"""


def thrice_kills(handler: Handler) -> Handler:
    """Does what `handler` does, but the third Ctrl-C ends what is going on where it stands: a
    method's own part may never come to its end.
    """
    presses = list[float]()

    def on(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and (not presses or now - presses[-1] > TOGETHER_S):
            presses.append(now)
        if len(presses) >= 3:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        handler(number, frame)

    return on


@contextlib.contextmanager
def stopped_early() -> Iterator[None]:
    """Before there is anything to be saved, a request to stop is Stopped once it comes out here."""
    try:
        with while_stopping(ask):
            yield
    except Asked as asked:
        raise early(asked) from None


def early(asked: Asked) -> Stopped:
    """Of a run, of which there may be a checkpoint."""
    return Stopped(f"{asked}; go on with --resume.", asked.exit_status == 130)


LOOK_S = 0.2  # how often a request to stop is looked for


class Watch:
    """requested: who asked, and whether at the keyboard. until: on the monotonic clock, when to
    stop.
    """

    def __init__(
        self, directory: RunDirectory, io: ServerIO, display: Watcher, rounds: int
    ) -> None:
        self._directory, self._io, self.display, self._rounds = directory, io, display, rounds
        self.requested: tuple[str, bool] | None = None
        self.until: float | None = None
        self._status_at, self._began = 0.0, time.monotonic()
        self._awaiting = 0  # the round before which clients are awaited

    def check(self) -> None:
        """Raises Stopped where someone asked for it; writes status.json every second."""
        if self.until is not None and time.monotonic() >= self.until:
            self.requested = ("the time of --until is over", False)
        if self.requested is not None:
            raise Stopped(
                f"stopped: {self.requested[0]}; go on with --resume.",
                by_keyboard=self.requested[1],
            )
        now = time.monotonic()
        if now - self._status_at >= 1.0:
            self._status_at = now
            self.status("running", **(self._who() if self._awaiting else {}))
            round = self._io.protocol.round
            self.display.progress({**self._io.snapshot, "round": round, "rounds": self._rounds})

    def _who(self) -> JsonDict:
        """Ranges of ids: who is there, who has joined and is getting ready, who is missing."""
        protocol = self._io.protocol
        with self._io.own():
            here = protocol.present()
            workers = [w.ids for w in protocol.workers.values() if w.gone_at is None]
        joined = set[int]().union(*workers)
        return {
            "here": ranges(sorted(here)),
            "coming": ranges(sorted(joined - here)),
            "missing": ranges([c for c in range(protocol.clients) if c not in joined]),
        }

    def status(self, state: str, **who: object) -> None:
        """Writes status.json. The snapshot may be older than the run's end."""
        protocol, snapshot = self._io.protocol, self._io.snapshot
        over = state == "done"
        write_status(
            self._directory.path,
            state=state,
            round=self._awaiting - 1 if self._awaiting else protocol.round,
            rounds=self._rounds,
            phase=protocol.purpose,
            waiting=[] if over else snapshot["waiting"],
            arrived=[] if over else snapshot["arrived"],
            absent=[] if over else [s for s in snapshot["sites"] if not s["connected"]],
            **who,
        )

    def present(self) -> int:
        """How many clients are there."""
        return int(self._io.snapshot["present"])

    def await_clients(
        self, wanted: int, join_s: float | None, resumed: bool, round: int = 1
    ) -> None:
        """Waits until so many clients are there, or `join_s` is over. Raises CannotGoOn where none
        has come.
        After a restart nobody is waited for in advance: each task waits for its own client.
        """
        until, noted = None if join_s is None else time.monotonic() + join_s, False
        self._awaiting = 0 if resumed else round
        while self.present() < wanted:
            if resumed or (until is not None and time.monotonic() >= until):
                break
            if not noted and time.monotonic() - self._began > 2.0:
                self.display.note(f"waiting for clients: {self.present()} of {wanted} are here")
                noted = True
            self._io.rest(0.05)
            self.check()
        self._awaiting = 0
        if not self.present() and until is not None and time.monotonic() >= until:
            raise CannotGoOn(f"no client joined within {join_s:g} s (round.join).")


class Attendance:
    """Who is there when a round begins. at: a second of the run. alone: others start the
    clients.
    """

    def __init__(self, config: Config, world: World, watch: Watch, replay: Replay | None) -> None:
        self._config, self._world, self._watch, self._replay = config, world, watch, replay
        self._sleeps, self.alone = config.link.clock == "real", False

    def ready(self, at: float) -> bool:
        """Whether there are as many as a round needs."""
        return self._when(at) <= at and not self.short()

    def gather(self, round: int) -> None:
        """Where clients are waited for without a bound, until there are as many as the round needs:
        with fewer it would be void, and a few such rounds end a run.
        """
        if self.short():
            least = self._config.round.min_results
            self._watch.await_clients(least, None, resumed=False, round=round)

    def short(self) -> bool:
        """Whether more clients are waited for, without a bound, before a round begins."""
        bound = self._config.round.join_s(self.alone)
        return bound is None and self._watch.present() < self._config.round.min_results

    def wait(self, at: float) -> float:
        """The second at which there are, on the real clock once it has come; infinite: never."""
        when, began = self._when(at), time.monotonic()
        while self._sleeps and math.isfinite(when) and time.monotonic() - began < when - at:
            self._watch.check()
            time.sleep(min(LOOK_S, max(0.0, when - at - (time.monotonic() - began))))
        return when

    def never(self, at: float) -> str:
        """Why no further round can begin."""
        return (
            f"after second {at:g} of the run there are never {self._config.round.min_results} "
            f"clients at once (availability.trace); availability.repeat lets a trace come again."
        )

    def cohort(self, round: int, at: float) -> tuple[list[int], int | None]:
        """Whom the round asks; and how many are there, where that depends on the time."""
        here = self._world.here(at)
        count = None if here is None else sum(here)
        if here is not None and self._replay is not None:
            return self._replay.selected(round), count
        return selection.cohort(self._config, round, here), count

    def _when(self, at: float) -> float:
        if self._replay is not None:
            return at
        return self._world.when(self._config.round.min_results, at)
