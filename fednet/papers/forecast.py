"""`fednet reproduce --plan`: what would run, how long it would take and what would cross, before anything starts.

Hours come from one measured round for each model of the job (its second: the first also warms up), taken by the table's
own method of that model; megabytes from what the methods declare to send. Both leave out what depends on the data, and
that methods train differently: a plan, not a promise.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

from fednet import config as configuration
from fednet import papers
from fednet.engine import pool
from fednet.engine.costs import payload_bytes
from fednet.engine.pool import Task
from fednet.papers.cell import Cell
from fednet.papers.reproduce import Job
from fednet.report.read import open_run

ROUNDS = 2  # of a measurement; the last is taken


def forecast(job: Job, out: Path, device: str, jobs: int) -> str:
    """The plan as text."""
    runs = job.runs(out)
    seconds = measured(job, out, device)
    lines, total, megabytes, left = [], 0.0, 0.0, 0
    wide = max(len(t.name) for _, _, t in runs)
    for cell, _, task in runs:
        state = pool.state_now(task)
        a_round, mb, rounds = seconds.get(kind(cell)), traffic(cell), int(cell.config["rounds"])
        time = "?" if a_round is None else f"{a_round * rounds / 3600:.2f} h"
        lines.append(f"  {task.name.ljust(wide)}  {state:<7} {rounds:4d} rounds  {time:>8}  {'about' if mb[1] else '     '} {mb[0] * rounds:9.1f} MB")
        if state not in ("done", "failed"):
            total, megabytes, left = total + (a_round or 0) * rounds / 3600, megabytes + mb[0] * rounds, left + 1
    head = [f"{len(runs)} runs in {job.folder(out)}, {left} left to do; scale {job.scale}"]
    tail = [f"left: {total:.2f} hours of one process, {total / min(jobs, max(1, left)):.2f} hours with --jobs {jobs} on as many free cores, "
            f"{megabytes:.0f} MB; from one measured round of each model:"]
    tail += [f"  {json.loads(k)['model']['name']}, {json.loads(k)['data']['dataset']}: {s:.2f} s a round" if s is not None
             else f"  {json.loads(k)['model']['name']}: could not be measured" for k, s in seconds.items()]
    searches = [c for c in job.cells if c.grids]
    if searches:
        many = sum(math.prod(len(v) for v in c.grids.values()) for c in searches)
        hours = sum(math.prod(len(v) for v in c.grids.values()) * math.ceil(int(c.config["rounds"]) / 4) * (seconds.get(kind(c)) or 0)
                    for c in searches) / 3600
        tail.append(f"with --search, before it: {many} points of the paper's grids at a quarter of the rounds, {hours:.1f} hours of one process")
    return "\n".join([*head, *lines, *tail])


def kind(cell: Cell) -> str:
    """What decides how long a round takes, the method aside."""
    c = cell.config
    own = ("lr", "momentum", "weight_decay")
    data = {k: c["data"].get(k) for k in ("dataset", "public", "validation")}
    return json.dumps({"model": c["model"], "data": data, "train": {k: v for k, v in c["train"].items() if k not in own},
                       "clients": c["clients"]}, sort_keys=True)


def measured(job: Job, out: Path, device: str) -> dict[str, float | None]:
    """Seconds of a round by `kind`, from a run of two rounds each; None where it failed."""
    found: dict[str, float | None] = {}
    first: dict[str, Cell] = {}
    for cell in job.cells:
        if kind(cell) not in first or int(cell.config["rounds"]) > int(first[kind(cell)].config["rounds"]):
            first[kind(cell)] = cell
    out.mkdir(parents=True, exist_ok=True)
    for k, cell in first.items():
        done = _finished(cell, job, out)
        if done is not None:
            found[k] = done
            continue
        folder = Path(tempfile.mkdtemp(prefix=".plan-", dir=out))
        try:
            over = {"rounds": min(ROUNDS, int(cell.config["rounds"])), "name": "measure", "evaluate": {"every": 1, "clients": "none"}}
            task = Task(papers.lay(cell.config, over), folder)
            state = pool.work([task], 1, device)[task.name]
            found[k] = float(open_run(task.run).rounds[-1].seconds) if state == "done" else None
        finally:
            shutil.rmtree(folder)
    return found


def _finished(cell: Cell, job: Job, out: Path) -> float | None:
    """A round of a finished run of the same kind: nothing has to be measured again."""
    for other, _, task in job.runs(out):
        if kind(other) == kind(cell) and pool.state_now(task) == "done":
            return float(open_run(task.run).summary["seconds_per_round"])
    return None


def traffic(cell: Cell) -> tuple[float, bool]:
    """(MB of a round, whether parts of it depend on the data and are left out)."""
    config = configuration.from_mapping(cell.config, cell.name)
    down, up, (open_down, open_up) = payload_bytes(config, config.algorithm.name)
    return config.cohort_size * (down + up) / 1e6, open_down or open_up

