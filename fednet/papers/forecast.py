"""`fednet reproduce --plan`: what would run, how long it would take and what would cross, before
anything starts.

A round's time is that of its SGD steps and the rest (evaluating above all). Both are measured once
for each model of the job, by a round of few steps and one of a few more; a round of the paper's
length can take a quarter of an hour. How many steps that has follows from who holds what. Megabytes
come from what the methods declare to send. That methods train differently is left out: a plan, not
a promise.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednet import config as configuration
from fednet import papers
from fednet.papers.cell import Cell
from fednet.papers.reproduce import Job
from fednet.report.read import open_run
from fednet.sweep import pool
from fednet.sweep.pool import Task
from fednet.tools.costs import cost

ROUNDS = 2  # of a measurement; the last is taken, as the first also warms up
STEPS = (5, 25)  # a client's, in the two measurements


@dataclass(frozen=True)
class Pace:
    """Seconds of a round: `rest` + `step` * mean steps of a client. samples: by client; public:
    samples of the server's set.
    """

    rest: float
    step: float
    samples: tuple[int, ...]
    public: int

    def seconds(self, cell: Cell) -> float:
        return self.rest + self.step * steps(cell, self.samples, self.public)


def steps(cell: Cell, samples: tuple[int, ...], public: int) -> float:
    """SGD steps of a client and round, in the mean over clients. FedRDS trains on its part of the
    public set too.
    """
    c = cell.config
    train, method = c["train"], c["algorithm"]
    if train.get("steps"):
        return float(train["steps"])
    shared = (
        math.floor(float(method.get("alpha", 0.5)) * public) if method["name"] == "fedrds" else 0
    )
    return (
        float(train["epochs"])
        * sum(math.ceil((n + shared) / int(train["batch_size"])) for n in samples)
        / len(samples)
    )


def forecast(
    job: Job, out: Path, device: str, jobs: int, load: Sequence[str] = (), sets: Sequence[str] = ()
) -> str:
    """The plan as text. sets: of these only those that say where the data come from; the others are
    named as left out.
    """
    runs = job.runs(out)
    paces = measured(job, out, device, load, [s for s in sets if s not in pool.changes(sets)])
    lines, total, megabytes, left = [], 0.0, 0.0, 0
    wide = max(len(t.name) for _, _, t in runs)
    for cell, _, task in runs:
        state = pool.state_now(task)
        a_round, rounds = a_round_of(cell, paces), int(cell.config["rounds"])
        mb, part = traffic(
            cell, pace.public if isinstance(pace := paces.get(kind(cell)), Pace) else 0
        )
        time = "?" if a_round is None else f"{a_round * rounds / 3600:.2f} h"
        lines.append(
            f"  {task.name.ljust(wide)}  {state:<7} {rounds:4d} rounds  {time:>8}  "
            f"{'above' if part else '     '} {mb:9.1f} MB"
        )
        if state not in ("done", "failed"):
            total, megabytes, left = (
                total + (a_round or 0) * rounds / 3600,
                megabytes + mb,
                left + 1,
            )
    head = [f"{len(runs)} runs in {job.folder(out)}, {left} left to do; scale {job.scale}"]
    known = "" if all(isinstance(p, Pace) for p in paces.values()) else ", without those marked ?"
    tail = [
        f"left: {total:.2f} hours of one process, {total / min(jobs, max(1, left)):.2f} hours "
        f"with --jobs {jobs} on as many free cores{known}, "
        f"{megabytes:.0f} MB; from measured rounds of each model:"
    ]
    for k, pace in paces.items():
        about = json.loads(k)
        said = (
            f"could not be measured: {pace}"
            if isinstance(pace, str)
            else f"{1e3 * pace.step:.1f} ms for one step of each participant, {pace.rest:.2f} s "
            f"for the rest of a round"
        )
        tail.append(f"  {about['model']['name']}, {about['data']['dataset']}: {said}")
    searches = [c for c in job.cells if c.grids]
    if searches:
        many = sum(math.prod(len(v) for v in c.grids.values()) for c in searches)
        hours = (
            sum(
                math.prod(len(v) for v in c.grids.values())
                * math.ceil(int(c.config["rounds"]) / 4)
                * (a_round_of(c, paces) or 0)
                for c in searches
            )
            / 3600
        )
        tail.append(
            f"with --search, before it: {many} points of the paper's grids at a quarter of the "
            f"rounds, {hours:.1f} hours of one process{known}"
        )
    if job.changed:
        tail.append(f"--set {job.changed}: not in this plan, which is of the table's own settings")
    return "\n".join([*head, *lines, *tail])


def a_round_of(cell: Cell, paces: Mapping[str, Pace | str]) -> float | None:
    pace = paces.get(kind(cell))
    return pace.seconds(cell) if isinstance(pace, Pace) else None


def kind(cell: Cell) -> str:
    """What decides how long a step and the rest take, the method aside."""
    c = cell.config
    own = ("lr", "momentum", "weight_decay", "epochs", "steps")
    data = {k: c["data"].get(k) for k in ("dataset", "public", "validation")}
    return json.dumps(
        {
            "model": c["model"],
            "data": data,
            "train": {k: v for k, v in c["train"].items() if k not in own},
            "clients": c["clients"],
            "each": [c.get("participation"), c.get("clients_per_round")],
        },
        sort_keys=True,
    )


def measured(
    job: Job, out: Path, device: str, load: Sequence[str] = (), sets: Sequence[str] = ()
) -> dict[str, Pace | str]:
    """The pace by `kind`; where the measurement failed, what it said."""
    first: dict[str, Cell] = {}
    for cell in job.cells:
        first.setdefault(kind(cell), cell)
    out.mkdir(parents=True, exist_ok=True)
    for k in first:
        about = json.loads(k)
        print(
            f"measuring rounds of a few steps of {about['model']['name']}, "
            f"{about['data']['dataset']}; a large network takes long on a CPU",
            file=sys.stderr,
            flush=True,
        )
    return {k: paced(cell, out, device, load, sets) for k, cell in first.items()}


def paced(
    cell: Cell, out: Path, device: str, load: Sequence[str] = (), sets: Sequence[str] = ()
) -> Pace | str:
    """From two runs of a few steps; what the run said where it failed."""
    folder = Path(tempfile.mkdtemp(prefix=".plan-", dir=out))
    try:
        seconds: list[float] = []
        held: dict[str, Any] = {}
        for few in STEPS:
            over = {
                "rounds": ROUNDS,
                "name": f"measure{few}",
                "train": {"steps": few},
                "evaluate": {"every": 1, "clients": "none"},
            }
            if "iterations" in cell.config["algorithm"]:
                # Condensed once in a run: not a part of every round.
                over["algorithm"] = {"iterations": 1}
            task = Task(papers.lay(cell.config, over), folder)
            if pool.work([task], 1, device, load=load, sets=sets)[task.name] != "done":
                return pool.why(task) or "its run said nothing"
            seconds.append(float(open_run(task.run).rounds[-1].seconds or 0.0))
            held = json.loads((task.run / "partition.json").read_text(encoding="utf-8"))
        step = max(0.0, (seconds[1] - seconds[0]) / (STEPS[1] - STEPS[0]))
        return Pace(
            max(0.0, seconds[0] - step * STEPS[0]),
            step,
            tuple(held["samples"]),
            int(held["public"]),
        )
    finally:
        shutil.rmtree(folder)


def traffic(cell: Cell, public: int) -> tuple[float, bool]:
    """(MB of the run, whether parts of it depend on the data and are left out). What a client is
    given once, when it first takes part, counts for as many clients as are expected to.
    """
    config = configuration.from_mapping(cell.config, cell.name)
    sent = cost(config, config.algorithm.name, public)
    reached = config.clients * (1 - (1 - config.cohort_size / config.clients) ** config.rounds)
    return (
        config.rounds * config.cohort_size * (sent.down + sent.up) + reached * sent.once
    ) / 1e6, any(sent.more)
