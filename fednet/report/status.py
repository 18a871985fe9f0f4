"""`fednet status RUN`: what a live or dead run is doing.

The engine keeps OUT/NAME/status.json, written aside and renamed into place. Whether the run behind
it lives is told by its process where it ran on this machine, and by the file's age elsewhere.
"""

from __future__ import annotations

import json as jsonlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from fednet.descriptors import named
from fednet.errors import StateError
from fednet.experiment.rundir import left
from fednet.ids import as_text, ranges_as_text
from fednet.report.read import open_run

SILENT_S = 30.0  # a live server on another machine writes at least every few seconds
STATES = {"done": "finished", "finished": "finished", "stopped": "stopped", "failed": "failed"}

WAITING = ("client", "host", "pid", "device", "phase", "step", "since", "deadline")
ABSENT = ("clients", "host", "connected", "last seen", "why not")

Stretch = int | tuple[int, int]


class AwaitedClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client that the round waits for.

    since: seconds since the epoch; deadline_s: left at `updated`, None: it is waited for while it
    lives.
    """

    client: int
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    phase: str | int | None = None
    step: int | None = None
    steps: int | None = None
    since: float | None = None
    deadline_s: float | None = None


class AbsentSite(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that are not connected, of one site: why, since when they were connected and when
    they were last heard of, in seconds since the epoch.
    """

    clients: tuple[Stretch, ...]
    why: str = ""
    host: str = ""
    pid: int = 0
    since: float | None = None
    seen: float | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What status.json holds. `updated`: seconds since the epoch. here, coming, missing: where
    clients are awaited for the next round, who is there, has joined and is getting ready, is not
    there; as ids and [first, last].
    """

    state: str
    round: int = 0
    rounds: int = 0
    phase: str | int | None = None
    waiting: tuple[AwaitedClient, ...] = ()
    arrived: tuple[int, ...] = ()
    absent: tuple[AbsentSite, ...] = ()
    updated: float = 0.0
    pid: int | None = None
    host: str | None = None
    here: tuple[Stretch, ...] | None = None
    coming: tuple[Stretch, ...] = ()
    missing: tuple[Stretch, ...] = ()


def read(run: str | Path) -> Status:
    """Raises ConfigError where that is no run, StateError where it says nothing of itself."""
    path = Path(run) / "status.json"
    try:
        return msgspec.json.decode(named(path).read_bytes(), type=Status)
    except (FileNotFoundError, NotADirectoryError):
        folder = open_run(run)
        raise StateError(
            f"{path} is missing: {folder.name} has not started a round, or was written without it."
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StateError(f"{path}: {error}.") from None


def alive(status: Status, run: Path, now: float) -> tuple[bool, str]:
    """Whether the run lives, and how that is known."""
    if status.state in STATES:
        goes_on = f"; {left(run)}" if status.state == "stopped" else ""
        return False, f"{STATES[status.state]}{goes_on}"
    age = now - status.updated
    if status.host == socket.gethostname() and status.pid is not None:
        if not _exists(status.pid):
            return (
                False,
                f"dead: process {status.pid} is gone (last word {_span(age)} ago); {left(run)}",
            )
        return True, f"alive: process {status.pid}, last word {_span(age)} ago"
    if age > SILENT_S:
        return (
            False,
            f"silent for {_span(age)} on {status.host}: dead, or cut off from this file system",
        )
    return True, f"alive on {status.host}, last word {_span(age)} ago"


def text(status: Status, run: Path, now: float) -> str:
    """The status as a person reads it."""
    live, how = alive(status, run, now)
    head = f"{status.state}: round {status.round} of {status.rounds}" + (
        f", {status.phase}" if status.phase is not None else ""
    )
    if status.state == "starting":
        head = "starting: data, model and workers are made ready, and no round has begun"
    elif status.here is not None:
        head = f"{status.state}: before round {status.round + 1} of {status.rounds}"
    lines = [head, how]
    for word, found in (
        ("here", status.here or ()),
        ("joined, getting ready", status.coming),
        ("missing", status.missing),
    ):
        if count := _count(found):
            lines.append(f"{word}: {count} client(s), {ranges_as_text(found)}")
    if status.waiting and live:
        lines.append(f"waiting for {len(status.waiting)} client(s):")
        waiting = sorted(status.waiting, key=lambda w: w.client)
        lines += _table(WAITING, [_row(w, status, now) for w in waiting])
    elif status.waiting and status.state not in STATES:
        lines.append(f"it was waiting for client(s) {as_text(w.client for w in status.waiting)}")
    if status.arrived and status.state not in STATES:
        lines.append(f"arrived: {as_text(status.arrived)}")
    if status.absent and live:
        count = sum(_count(site.clients) for site in status.absent)
        lines.append(f"absent: {count} client(s):")
        lines += _table(ABSENT, [_absent(site, now) for site in status.absent])
    return "\n".join(lines)


def _phase(w: AwaitedClient) -> str:
    if not w.host and w.phase != "queued":  # queued at a worker, or for one that is busy
        return "not connected"
    return "-" if w.phase is None else str(w.phase)


def _row(w: AwaitedClient, status: Status, now: float) -> tuple[str, ...]:
    step = "-" if w.step is None else str(w.step)
    if w.step is not None and w.steps:
        step = f"{w.step} of {w.steps}"
    since = "-" if w.since is None else _span(now - w.since)
    if w.deadline_s is None:
        deadline = "none: waits while it lives" if w.host else "none: waits until it comes"
    else:
        left = w.deadline_s - (now - status.updated)
        deadline = f"dropped in {_span(left)}" if left > 0 else f"passed {_span(-left)} ago"
    return (
        str(w.client),
        w.host or "-",
        str(w.pid or "-"),
        w.device or "-",
        _phase(w),
        step,
        since,
        deadline,
    )


def show(
    run: str | Path,
    watch: bool = False,
    json: bool = False,
    every_s: float = 1.0,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
    ages: bool = False,
) -> Iterator[str]:
    """The status as text, once, or with `watch` each time it changes until the run lives no more;
    with `ages` each time it grows older too. The caller prints.
    """
    last = None
    while True:
        status = read(run)
        live, how = alive(status, Path(run), now())
        # What only grows older is no change: it would be said again every second.
        waiting = tuple(msgspec.structs.replace(w, deadline_s=None) for w in status.waiting)
        known = live, msgspec.structs.replace(status, updated=0.0, waiting=waiting)
        if ages or known != last:
            yield (
                jsonlib.dumps({**msgspec.to_builtins(status), "alive": live, "known_by": how})
                if json
                else text(status, Path(run), now())
            )
        last = known
        if not watch or not live:
            return
        pause(every_s)


def _exists(pid: int) -> bool:
    """A zombie has ended: only its parent has not looked yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:  # no /proc on this system
        return True
    return fields[:1] != ["Z"]


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    whole = [columns, *rows]
    widths = [max(len(r[i]) for r in whole) for i in range(len(columns))]
    return ["  " + "  ".join(c.ljust(n) for c, n in zip(r, widths)).rstrip() for r in whole]


def _absent(site: AbsentSite, now: float) -> tuple[str, ...]:
    since = (
        "-" if site.since is None else time.strftime("%m-%d %H:%M:%S", time.localtime(site.since))
    )
    seen = "never" if site.seen is None else f"{_span(now - site.seen)} ago"
    return ranges_as_text(site.clients), site.host or "-", since, seen, site.why


def _count(found: Iterable[Stretch]) -> int:
    return sum(1 if isinstance(s, int) else s[1] - s[0] + 1 for s in found)
