"""One point of the map: a federation over a bad link for so long, and what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fednet.plain import JsonDict, JsonMapping
from tests.bench.network.line import Bad, total
from tests.bench.network.spaces import SERVER, Spaces

CLIENTS, PORT = 10, 5555
LOOK_S = 0.2  # how often it is looked whether a process has ended
ENDING_S = 20.0  # that processes may take to end once the time is over

# A model of 6 kB, trained for one step: it is the network that is looked at.
BASE: JsonDict = {
    "rounds": 100_000,
    "clients": CLIENTS,
    "participation": 1.0,
    "model": {"name": "mlp", "hidden": [2]},
    "data": {"dataset": "digits", "partition": {"scheme": "iid"}},
    "train": {"steps": 1, "lr": 0.05},
    "evaluate": {"clients": "none"},
    "report": False,
}
# What fednet does unless it is told otherwise, and what makes it wait as long as TCP needs.
DEFAULT: JsonDict = {}
WIDE: JsonDict = {
    "round": {"join": None, "lost": {"closed": 60, "silent": None, "beat": 30}, "void_rounds": 100},
}
# How long the kernel waits at most before it sends a segment again: 120 s unless set. Below the
# round trip it would send everything twice and never learn how long that is.
ROUND_TRIPS, LEAST_MS = 4, 2000


@dataclass(frozen=True, slots=True)
class LinkCell:
    """bad: the link, the same both ways; dropout: share of tasks whose client falls silent; wide:
    whether with the settings that wait longer.
    """

    bad: Bad
    dropout: float = 0.0
    wide: bool = False


@dataclass(slots=True)
class Result:
    """rounds: done, void ones aside; seconds: from the first task to the end; ledger: bytes in the
    server's book, both ways; payload: bytes of TCP's payload that came to the link, those sent
    again too; segments, again: that the kernel sent, and sent again; lost: packets that the link
    did not deliver; ended: the server gave up before the time was over.
    """

    rounds: int
    void: int
    seconds: float
    ledger: int
    payload: int
    segments: int
    again: int
    lost: int
    said: str = ""
    ended: bool = False

    @property
    def per_hour(self) -> float:
        return 3600 * self.rounds / self.seconds if self.seconds else 0.0


def run(
    cell: LinkCell,
    folder: Path,
    limit_s: float,
    seed: int = 0,
    own: int = 0,
    over: threading.Event | None = None,
) -> Result:
    """Runs one cell for limit_s, or until `over`. own: another for each cell that this process runs
    beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "cell.yaml"
    config.write_text(json.dumps(_merged(BASE, WIDE if cell.wide else DEFAULT, _faults(cell))))
    with Spaces(own, cell.bad, seed, settings(cell)) as spaces:
        processes = [
            _start(
                spaces.within(spaces.names[0]), _server(config, folder, limit_s), folder, "server"
            ),
            _start(spaces.within(spaces.names[1]), _client(folder), folder, "client"),
        ]
        try:
            _wait(processes[:1], limit_s + ENDING_S, over or threading.Event())
            kernel = spaces.kernel()
        finally:
            for process in processes:
                process.terminate()
            _wait(processes, ENDING_S, threading.Event())
        counts = total(spaces.lines)
    return Result(
        **_rounds(folder / "runs" / "cell"),
        payload=counts.payload,
        segments=kernel["OutSegs"],
        again=kernel["RetransSegs"],
        lost=counts.lost + counts.dropped,
        ended=processes[0].returncode > 0,
    )


def settings(cell: LinkCell) -> dict[str, str]:
    """The kernel's settings of a cell, in both namespaces."""
    if not cell.wide:
        return {}
    longest = max(LEAST_MS, round(ROUND_TRIPS * 2000 * cell.bad.latency_s))
    return {"net.ipv4.tcp_rto_max_ms": str(min(120_000, longest))}


def line(cell: LinkCell, result: Result) -> str:
    bad = cell.bad
    rate = "no limit" if bad.rate is None else f"{bad.rate / 1e3:g} kB/s"
    again = 100 * result.again / result.segments if result.segments else 0.0
    paced = "then it ended" if result.ended else f"{result.per_hour:.0f} an hour"
    return (
        f"latency {bad.latency_s:g} s  loss {100 * bad.loss:g} %  rate {rate}  dropout "
        f"{100 * cell.dropout:g} %  {'wide' if cell.wide else 'default':7}  {result.rounds} rounds "
        f"({paced})  ledger {result.ledger / 1e6:.2f} MB  TCP "
        f"{result.payload / 1e6:.2f} MB  sent again {again:.1f} % of segments"
        + (f"  {result.said}" if result.said else "")
    )


def record(cell: LinkCell, result: Result) -> JsonDict:
    return {
        **asdict(cell.bad),
        "dropout": cell.dropout,
        "wide": cell.wide,
        **asdict(result),
        "per_hour": result.per_hour,
    }


def _faults(cell: LinkCell) -> JsonDict:
    rate = {"drop_before_training": cell.dropout} if cell.dropout else {}
    return {"name": "cell", "faults": {"random": rate}}


def _merged(*parts: JsonMapping) -> JsonDict:
    out: JsonDict = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = _merged(out[key], value) if both else value
    return out


def _server(config: Path, folder: Path, limit_s: float) -> list[str]:
    where = ["--bind", f"tcp://{SERVER}:{PORT}", "--insecure", "--out", str(folder / "runs")]
    until = ["--until", f"{limit_s:g}s", "--quiet"]
    return ["-m", "fednet.cli.server", str(config), *where, *until]


def _client(folder: Path) -> list[str]:
    where = ["--server", f"tcp://{SERVER}:{PORT}", "--state", str(folder / "state")]
    return ["-m", "fednet.cli.client", "--id", f"0-{CLIENTS - 1}", "--faults", "--quiet", *where]


def _start(
    within: Sequence[str], command: Sequence[str], folder: Path, name: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.txt").open("wb") as said:
        return subprocess.Popen([*within, sys.executable, *command], stdout=said, stderr=said)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], seconds: float, over: threading.Event
) -> None:
    """Until all have ended; after so many seconds they are killed, and where it is over."""
    until = time.monotonic() + seconds
    for process in processes:
        while process.poll() is None and time.monotonic() < until and not over.wait(LOOK_S):
            pass
        process.kill()
        process.wait()


def _rounds(directory: Path) -> JsonDict:
    """What the run's directory says, of a run that may not have begun."""
    from fednet.errors import FednetError
    from fednet.report import open_run

    try:
        run = open_run(directory)
        done = [r for r in run.rounds if not r.void]
        ledger = sum(row.bytes for row in run.lines("wire"))
        first = next((e.elapsed for e in run.events if e.type == "first_task"), None)
        seconds = run.events[-1].elapsed - first if first is not None else 0.0
    except FednetError as broken:
        return {"rounds": 0, "void": 0, "seconds": 0.0, "ledger": 0, "said": str(broken)}
    void = len(run.rounds) - len(done)
    return {"rounds": len(done), "void": void, "seconds": seconds, "ledger": ledger, "said": ""}
