"""`fednet status RUN`: what a run is doing.

The server keeps OUT/NAME/status.json. Whether the server is still running follows from its process
if that is on this machine, and otherwise from the age of the file.
"""

from __future__ import annotations

import json as jsonlib
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from fednet import proc
from fednet.errors import StateError
from fednet.experiment.rundir import resume_hint
from fednet.ids import as_text, ranges_as_text
from fednet.plain import align
from fednet.report.read import open_run

SILENT_S = 30.0  # a live server on another machine writes at least every few seconds
ENDED = {"done": "finished", "finished": "finished", "stopped": "stopped", "failed": "failed"}

WAITING = ("client", "host", "process", "device", "stage", "step", "for", "deadline")
RECENT_S = 600.0  # refusals of so long ago are not shown
REFUSALS = ("who", "count", "last", "reason")
SITES = ("clients", "site", "host", "connected at", "last heard of", "did last", "state")
SHOWN = 50  # sites that are connected; of the others all
STAGES = {"handed": "task sent"}  # words for stages of a task whose name is not a word

Stretch = int | tuple[int, int]


class AwaitedClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client that the round waits for. since: seconds since the epoch; deadline_s: seconds left
    at `updated`, None: no deadline.
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


class SiteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client process, or clients that are not connected."""

    clients: tuple[Stretch, ...]
    connected: bool = False
    why: str = ""
    """Why they are not connected, or not ready."""
    site: str = ""
    """Its name."""
    host: str = ""
    pid: int = 0
    since: float | None = None
    """When they connected, in seconds since the epoch."""
    seen: float | None = None
    """When their last message came, in seconds since the epoch."""
    did: str = ""
    """What they did last."""
    round: int | None = None
    """In which round they did it."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a peer was refused, how often since the server started, and when, in seconds since the
    epoch.
    """

    who: str
    what: str
    reason: str
    count: int
    first: float
    last: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of status.json. updated: seconds since the epoch. here, coming, missing: while
    the server waits for clients before a round, those that are ready, that are preparing, and that
    are not connected; as ids and [first, last].
    """

    state: str
    round: int = 0
    rounds: int = 0
    phase: str | int | None = None
    waiting: tuple[AwaitedClient, ...] = ()
    arrived: tuple[int, ...] = ()
    sites: tuple[SiteStatus, ...] = ()
    refused: tuple[Refusal, ...] = ()
    updated: float = 0.0
    pid: int | None = None
    host: str | None = None
    here: tuple[Stretch, ...] | None = None
    coming: tuple[Stretch, ...] = ()
    missing: tuple[Stretch, ...] = ()


def read(run: str | Path) -> Status:
    """Raises ConfigError for a path that is no run, StateError without a valid status.json."""
    path = Path(run) / "status.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except (FileNotFoundError, NotADirectoryError):
        folder = open_run(run)
        raise StateError(
            f"{path} is missing: {folder.name} has not started its first round."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: {error}.") from None


def alive(status: Status, run: Path, now: float) -> tuple[bool, str]:
    """Whether the server is running, and how that is known."""
    if status.state in ENDED:
        resume = f"; {resume_hint(run)}" if status.state == "stopped" else ""
        return False, f"{ENDED[status.state]}{resume}"
    age = now - status.updated
    if status.host == socket.gethostname() and status.pid is not None:
        if not proc.running(status.pid):
            dead = f"server process {status.pid} has ended unexpectedly"
            return False, f"{dead} (last update {span(age)} ago); {resume_hint(run)}"
        return True, f"server process {status.pid} is running (last update {span(age)} ago)"
    if age > SILENT_S:
        silent = f"no update from {status.host} for {span(age)}"
        return False, f"{silent}: the server has ended, or this file system is not up to date"
    return True, f"server on {status.host} is running (last update {span(age)} ago)"


def text(status: Status, run: Path, now: float) -> str:
    """Returns the status as a person reads it."""
    live, how = alive(status, run, now)
    ended = status.state in ENDED
    if status.state == "starting":
        head = "starting: preparing data, model and workers before the first round"
    elif status.here is not None:
        head = f"{status.state}: before round {status.round + 1} of {status.rounds}"
    elif ended:
        head = f"{ENDED[status.state]} after round {status.round} of {status.rounds}"
    else:
        phase = "" if status.phase is None else f", {status.phase}"
        head = f"{status.state}: round {status.round} of {status.rounds}{phase}"
    lines = [head] if how == ENDED.get(status.state) else [head, how]
    for word, found in (
        ("ready", status.here or ()),
        ("preparing", status.coming),
        ("not connected", status.missing),
    ):
        if found:
            lines.append(f"{word}: {_clients(found)}: {ranges_as_text(found)}")
    waiting = sorted(status.waiting, key=lambda w: w.client)
    awaited = [w.client for w in waiting]
    if waiting and live:
        lines.append(f"waiting for {_clients(awaited)}:")
        rows = [_row(w, status, now) for w in waiting]
        lines += [f"  {line}" for line in align([WAITING, *rows])]
    elif waiting and not ended:
        lines.append(f"was waiting for {_clients(awaited)}: {as_text(awaited)}")
    if status.arrived and not ended:
        lines.append(f"replied: {as_text(status.arrived)}")
    if status.sites and live:
        there = [site for site in status.sites if site.connected]
        away = [site for site in status.sites if not site.connected]
        missing = [stretch for site in away for stretch in site.clients]
        absent = f", {_clients(missing)} not connected" if missing else ""
        more = f" ({SHOWN} are shown)" if len(there) > SHOWN else ""
        lines.append(f"client processes: {len(there)} connected{more}{absent}:")
        rows = [SITES]
        for site in (*there[:SHOWN], *away):
            since = time.strftime("%m-%d %H:%M:%S", time.localtime(site.since))
            rows.append(
                (
                    ranges_as_text(site.clients),
                    site.site or "-",
                    site.host or "-",
                    "-" if site.since is None else since,
                    "never" if site.seen is None else f"{span(now - site.seen)} ago",
                    site.did or "-",
                    site.why or "connected",
                )
            )
        lines += [f"  {line}" for line in align(rows)]
    refused = [cause for cause in status.refused if now - cause.last < RECENT_S]
    if refused and live:
        lines.append(f"refused in the last {span(RECENT_S)}:")
        rows = [REFUSALS]
        for cause in refused:
            ago = f"{span(now - cause.last)} ago"
            rows.append((cause.who, str(cause.count), ago, cause.reason))
        lines += [f"  {line}" for line in align(rows)]
    return "\n".join(lines)


def _clients(found: Iterable[Stretch]) -> str:
    count = sum(1 if isinstance(s, int) else s[1] - s[0] + 1 for s in found)
    return f"{count} client{'' if count == 1 else 's'}"


def _row(w: AwaitedClient, status: Status, now: float) -> tuple[str, ...]:
    stage = "-" if w.phase is None else STAGES.get(str(w.phase), str(w.phase))
    if not w.host and w.phase != "queued":  # queued at a worker, or for one that is busy
        stage = "not connected"
    step = "-" if w.step is None else str(w.step)
    if w.step is not None and w.steps:
        step = f"{w.step} of {w.steps}"
    since = "-" if w.since is None else span(now - w.since)
    if w.deadline_s is None:
        deadline = "none, until it disconnects" if w.host else "none, until it connects"
    else:
        left = w.deadline_s - (now - status.updated)
        deadline = f"dropped in {span(left)}" if left > 0 else f"passed {span(-left)} ago"
    pid = str(w.pid or "-")
    return str(w.client), w.host or "-", pid, w.device or "-", stage, step, since, deadline


def show(run: str | Path, json: bool = False) -> str:
    """Returns the status as text, or as a line of JSON."""
    status = read(run)
    now = time.time()
    if not json:
        return text(status, Path(run), now)
    live, how = alive(status, Path(run), now)
    return jsonlib.dumps({**msgspec.to_builtins(status), "alive": live, "known_by": how})


def span(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
