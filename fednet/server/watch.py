"""What a server does while it waits: it looks whether it was asked to stop, writes status.json, and
waits until enough clients are there for a round. Also: how signals ask a server to stop, and what
it is started with.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from fednet.errors import (
    CannotGoOn,
    Stopped,
    StopRequested,
    raise_stop,
    signal_name,
    stop_signals,
    with_time,
)
from fednet.experiment.rundir import write_status
from fednet.ids import expand_ranges, ranges, ranges_as_text
from fednet.plain import JsonDict, JsonMapping
from fednet.protocol.workers import SHOWN
from fednet.records.rows import Round
from fednet.server.io import ServerIO
from fednet.transport.keys import Keyring, date_text


class Watcher(Protocol):
    """Shows a run while it goes: `cli.display.Display`, `launch.start.Silent`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *what: object) -> None: ...

    def round_started(self, round: int, rounds: int, cohort: Sequence[int], /) -> None: ...

    def progress(self, info: JsonMapping, /) -> None:
        """info: whom the round waits for, `waiting` and `arrived`, see `ServerIO.status_rows`."""
        ...

    def round_done(self, record: Round, /) -> None: ...

    def note(self, text: str, /) -> None: ...

    def warn(self, text: str, /) -> None:
        """Shows a sentence, with --quiet too."""
        ...

    def finished(self, summary: JsonMapping, /) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server runs, beside its configuration."""

    display: Watcher
    """Shows the run while it goes."""
    command: Sequence[str] = ()
    """The words that started it, for the summary."""
    device: str = "auto"
    data: Path | None = None
    """The folder of the data."""
    until: float | None = None
    """On the monotonic clock, when to stop."""
    callback: Callable[[Round], None] | None = None
    """Called with the record of each round."""
    on_event: Callable[[str, JsonMapping], None] | None = None
    """Called with each event of a client process and its fields, in the thread of the server's
    input and output.
    """


def absent_as_text(rows: Sequence[JsonMapping], clients: Collection[int]) -> str:
    """Returns those of the clients that are not connected, and why: `3 (key expired), 4-5 (has not
    connected)`. rows: as of `Roster.sites`.
    """
    found = []
    for row in rows:
        if not row["connected"]:
            ids = expand_ranges(row["clients"], sys.maxsize)
            among = ranges([client for client in ids if client in clients])
            if among:
                site = f"{row['site']}: " if row.get("site") else ""
                found.append(f"{ranges_as_text(among)} ({site}{row['why']})")
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return ", ".join([*found[:NAMED], *more])


Handler = Callable[[int, FrameType | None], object]
Before = Callable[[int, FrameType | None], object] | int | None  # what a signal did


def handle_stop_signals(handler: Handler) -> dict[int, Before]:
    """Sets the handler of the signals that ask for a stop; returns the handlers before."""
    before: dict[int, Before] = {}
    for number in stop_signals():
        with contextlib.suppress(ValueError):  # a caller's own thread, which may not
            before[number] = signal.signal(number, handler)
    return before


@contextlib.contextmanager
def stop_signals_handled(handler: Handler) -> Iterator[None]:
    """The same inside; afterwards the handlers are again those before."""
    before = handle_stop_signals(handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


@contextlib.contextmanager
def stop_raises() -> Iterator[None]:
    """Inside, a request to stop ends the work at once, and is raised as Stopped. For what happens
    before there is anything to save.
    """
    try:
        with stop_signals_handled(raise_stop):
            yield
    except StopRequested as asked:
        raise stopped_by(asked) from None


def stopped_by(asked: StopRequested) -> Stopped:
    """The error of a request to stop. There may be a checkpoint of an earlier server."""
    return Stopped(f"{asked}; continue with --resume.", asked.exit_status == 130)


# A round that has waited for so long for clients that are not connected says so, once.
TELL_S = 10.0
# Before a round the console says again who is there, where that has changed, but not more often.
TELL_AGAIN_S = 10.0
DAY_S = 86_400.0
KEY_ENDS_S = 14 * DAY_S  # a key that ends within this time is told, every day
NAMED = 10  # reasons for which clients are not there, in a line

# One press of Ctrl-C may come twice: from the terminal, and passed on by the parent process.
TOGETHER_S = 0.3


class Watch:
    """requested: the signal that asked for a stop, and whether it was Ctrl-C. completed: the last
    round that is over.
    """

    def __init__(
        self,
        directory: Path,
        io: ServerIO,
        how: ServerOptions,
        rounds: int,
        keyring: Keyring | None = None,
    ) -> None:
        self._keyring = keyring
        self._keys_at = 0.0
        self._directory = directory
        self._io = io
        self._how = how
        self._rounds = rounds
        self.requested: tuple[str, bool] | None = None
        self.completed = 0
        self._status_at = 0.0
        self._began = time.monotonic()
        self._awaiting = 0  # the round before which clients are awaited
        self._told_of: tuple[int, int, str] | None = None  # the exchange of which was told
        self._presses: list[float] = []  # of Ctrl-C

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A signal handler for when there is something to save: `check` looks for the request. The
        third Ctrl-C interrupts whatever runs: a user's own part may never return.
        """
        now = time.monotonic()
        presses = self._presses
        if number == signal.SIGINT and (not presses or now - presses[-1] > TOGETHER_S):
            presses.append(now)
        if len(presses) >= 3:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.requested = signal_name(number), number == signal.SIGINT

    def check(self, show: bool = True) -> None:
        """Raises Stopped if a stop was requested; with `show`, writes status.json every second."""
        now = time.monotonic()
        if self._how.until is not None and now >= self._how.until:
            self.requested = ("the time of --until is over", False)
        if self.requested is not None:
            why, by_keyboard = self.requested
            raise Stopped(f"stopped: {why}; continue with --resume.", by_keyboard=by_keyboard)
        if show and now - self._status_at >= 1.0:
            self._status_at = now
            protocol = self._io.protocol
            who = {}
            if self._awaiting:
                with self._io:
                    here = protocol.roster.present()
                    workers = protocol.roster.workers.values()
                    joined = set[int]().union(*[w.ids for w in workers if w.gone_at is None])
                missing = [c for c in range(protocol.clients) if c not in joined]
                who = {"here": sorted(here), "coming": sorted(joined - here), "missing": missing}
            self.status("running", **{what: ranges(ids) for what, ids in who.items()})
            round = protocol.round
            self._how.display.progress(
                {
                    **self._io.status_rows,
                    "round": round,
                    "rounds": self._rounds,
                    "keys": self._key_ends(),
                }
            )
            self._tell_waiting()
            if now >= self._keys_at:
                self._keys_at = now + DAY_S
                self._tell_keys()

    def _key_ends(self) -> list[JsonDict]:
        """Returns a row for each time at which the last key of clients ends."""
        if self._keyring is None:
            return []
        return [
            {"clients": ranges(end.clients), "site": end.name, "until": end.until}
            for end in self._keyring.ends[:SHOWN]
        ]

    def _tell_keys(self) -> None:
        """Says which clients have no key any more in two weeks."""
        now = time.time()
        for end in () if self._keyring is None else self._keyring.ends:
            left = end.until - now
            if 0 < left <= KEY_ENDS_S:
                in_days = f"{left / DAY_S:.0f} days" if left > 2 * DAY_S else f"{left / 3600:.0f} h"
                why = (
                    f"the key ends at {date_text(end.until)} UTC, in {in_days}: allow the site's "
                    f"next key (fednet keys allow)"
                )
                who = {"clients": list(end.clients), "site": end.name}
                self._io.tell("key_ends", {**who, "until": end.until, "why": why})

    def _tell_waiting(self) -> None:
        """Says for whom the round waits, if these clients are not connected."""
        protocol = self._io.protocol
        rows = self._io.status_rows
        exchange = protocol.round, protocol.phase, protocol.purpose
        if self._awaiting or exchange == self._told_of:
            return
        missing = [w for w in rows["waiting"] if not w["host"] and w["phase"] != "queued"]
        now = time.time()
        if not any(now - w["since"] >= TELL_S for w in missing):
            return
        self._told_of = exchange
        ids = [w["client"] for w in missing]
        until = ""
        if all(w["deadline_s"] is not None for w in missing):
            left = max(w["deadline_s"] for w in missing)
            until = f"; without them in {max(0.0, left):.0f} s"
        absent = absent_as_text(rows["sites"], ids)
        text = f"round {protocol.round} waits for clients that are not connected: {absent}{until}"
        self._how.display.note(with_time(text))

    def status(self, state: str, **who: object) -> None:
        """Writes status.json. The rows may be older than the run's end."""
        protocol = self._io.protocol
        rows = self._io.status_rows
        over = state == "done"
        round = self._awaiting - 1 if self._awaiting else protocol.round
        if state != "running":  # the round that was under way is not over
            round = self.completed
        write_status(
            self._directory,
            state=state,
            round=round,
            rounds=self._rounds,
            phase=protocol.purpose,
            waiting=[] if over else rows["waiting"],
            arrived=[] if over else rows["arrived"],
            sites=[] if over else rows["sites"],
            refused=[] if over else rows["refused"],
            **who,
        )

    def _who_is_there(self, wanted: int, among: range | None) -> str:
        clients = range(self._io.protocol.clients) if among is None else among
        with self._io:
            rows: list[JsonDict] = self._io.protocol.roster.sites(self._io.protocol.clients, 0.0)
        coming = [row for row in rows if row["connected"] and row["why"]]
        text = f"{self.present(among)} of {len(clients)} are ready, {wanted} are needed"
        if coming:
            ids = ", ".join(ranges_as_text(row["clients"]) for row in coming[:NAMED])
            text += f"; getting ready: {ids}"
        if absent := absent_as_text(rows, clients):
            text += f"; not connected: {absent}"
        return f"waiting for clients: {text}"

    def present(self, among: range | None = None) -> int:
        """How many clients are ready. among: ids; None: all."""
        with self._io:
            hosting = self._io.protocol.roster.hosting
            if among is None:
                return len(hosting)
            return sum(client in hosting for client in among)

    def await_clients(
        self, wanted: int, join_s: float | None, round: int = 1, among: range | None = None
    ) -> None:
        """Waits until so many clients are ready, or for `join_s`. among: see `present`. Raises
        CannotGoOn if none came to a run that begins. Clients in this process always come, however
        long they prepare.
        """
        if self._io.inline:
            join_s = None
        until = None if join_s is None else time.monotonic() + join_s
        said = ""
        say_at = self._began + 2.0
        self._awaiting = round
        while self.present(among) < wanted:
            if until is not None and time.monotonic() >= until:
                break
            if time.monotonic() > say_at:
                text = self._who_is_there(wanted, among)
                if text != said:
                    self._how.display.note(with_time(text))
                said = text
                say_at = time.monotonic() + TELL_AGAIN_S
            self._io.do_io(0.05, lambda: self.present(among) >= wanted)
            self.check()
        self._awaiting = 0
        if among is None and until is not None and not self.present():
            raise CannotGoOn(f"no client joined within {join_s:g} s (round.join).")
