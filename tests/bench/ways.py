"""One workload in every way: fednet over TCP and in one process, the plain loop, and pfl-research
(the package `pfl`), in turn, several times.

Each way is a process of its own, and one that fails or lasts too long costs no other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet.errors import FednetError
from fednet.experiment import placement
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import aside, fednet, spread
from tests.bench.workloads import Workload

PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the ways are measured. rounds are timed, after some that are not (untimed). train: keys
    of that section, for fednet. pfl: a Python that has the package pfl. seconds: the most that one
    run of a way may take.
    """

    work: Workload
    device: str = "cpu"
    processes: int = 1  # of the plain loop, with a thread each
    workers: tuple[int, ...] = (2,)
    untimed: int = 2
    train: JsonMapping | None = None
    pfl: str = sys.executable
    seconds: float = 600.0

    @property
    def tf32(self) -> bool:
        return (self.train or {}).get("precision") == "tf32"


def ways(plan: Plan) -> dict[str, Callable[[Path], JsonDict]]:
    """The ways by their names. Each returns its figures: `seconds` a round, and those of the
    processor.
    """
    found: dict[str, Callable[[Path], JsonDict]] = {
        "fednet in process": lambda folder: _fednet(plan, folder, None),
    }
    for workers in plan.workers:
        found[f"fednet over TCP, {workers} workers"] = lambda folder, workers=workers: _fednet(
            plan, folder, workers
        )
    found["plain loop"] = lambda folder: _plain(plan, False)
    found["plain loop, channels last"] = lambda folder: _plain(plan, True)
    found["pfl"] = lambda folder: _pfl(plan)
    return found


def measure(plan: Plan, repeat: int, folder: Path) -> Iterator[JsonDict]:
    """A record for each run of a way, in turn."""
    for turn in range(repeat):
        for number, (name, way) in enumerate(ways(plan).items()):
            record: JsonDict = {"workload": plan.work.name, "way": name, "turn": turn}
            try:
                record |= way(folder / f"{turn}-{number}")
            except (FednetError, subprocess.TimeoutExpired, OSError) as broken:
                record["failed"] = str(broken)[-1500:]
            yield record


def lines(records: Sequence[JsonMapping]) -> Iterator[str]:
    """The table: a line a way, beside the faster of the plain loops."""
    by_way: dict[str, list[JsonMapping]] = {}
    for record in records:
        by_way.setdefault(record["way"], []).append(record)
    plain = [
        statistics.median(r["seconds"] for r in done)
        for way, all in by_way.items()
        if way.startswith("plain") and (done := [r for r in all if "seconds" in r])
    ]
    for way, all in by_way.items():
        done = [r for r in all if "seconds" in r]
        if not done:
            yield f"{way:28} not measured: {all[0].get('failed', '')}"
            continue
        s = spread([r["seconds"] for r in done])
        text = f"{way:28} {s['median']:.3f} [{s['min']:.3f} {s['max']:.3f}] s a round"
        if plain:
            text += f", {s['median'] / min(plain):.2f} of the plain loop"
        if "cpu_s" in done[0]:
            text += f"; {statistics.median(r['cpu_s'] for r in done):.2f} s of processor"
        if "pss_mb" in done[0]:
            text += f"; {statistics.median(r['pss_mb'] for r in done):.0f} MB"
        yield text


def _fednet(plan: Plan, folder: Path, workers: int | None) -> JsonDict:
    return fednet(
        plan.work,
        workers or 1,
        folder,
        in_process=workers is None,
        device=plan.device,
        train=plan.train,
        untimed=plan.untimed,
        seconds=plan.seconds,
    )


def _job(plan: Plan) -> JsonDict:
    work = plan.work
    return {
        "device": plan.device,
        "threads": 1,
        "tf32": plan.tf32,
        "lr": work.lr,
        "clients": work.clients,
        "samples": work.samples,
        "batch_size": work.batch_size,
        "steps": work.steps,
        "per_round": work.per_round,
        "shape": list(work.shape),
        "model": dict(work.model),
        "rounds": work.rounds,
        "untimed": plan.untimed,
        "processes": plan.processes,
    }


def _plain(plan: Plan, channels_last: bool) -> JsonDict:
    job = {**_job(plan), "channels_last": channels_last}
    return _watched([sys.executable, "-m", "tests.bench.floor"], job, plan.seconds)


def _pfl(plan: Plan) -> JsonDict:
    return _watched([plan.pfl, str(PEER)], {**_job(plan), "threads": plan.processes}, plan.seconds)


def _watched(words: Sequence[str], job: JsonMapping, limit_s: float) -> JsonDict:
    found = aside(words, job, limit_s)
    seconds = found["seconds"]
    return {**found, "seconds": statistics.median(seconds), "all_seconds": seconds}


def bench(
    work: Workload, repeat: int, folder: Path, pfl: str | None, seconds: float
) -> Iterator[JsonDict]:
    """The ways on this machine's processor."""
    cores = placement.cores()
    plan = Plan(
        work,
        processes=cores,
        workers=(cores,),
        pfl=pfl or sys.executable,
        seconds=seconds,
    )
    yield from measure(plan, repeat, folder)
