"""Hyper-parameters from the papers' grids: each point at a quarter of the rounds, with one seed, judged on a validation
split of the training pool; the winner is run at full length, on the whole pool.

The winner is the point with the highest validation accuracy over its rounds, as the papers choose by the highest over
rounds; ties go to the first point. A point that diverged is out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednet import papers
from fednet.config.tree import compose
from fednet.engine import pool
from fednet.engine.pool import Task
from fednet.errors import ConfigError
from fednet.papers.cell import Cell
from fednet.papers.reproduce import Job
from fednet.report.read import open_run

VALIDATION = 0.1  # of the training pool, where the table's own configuration has no validation split
SHARE = 4  # a quarter of the rounds
LOOKS = 25  # evaluations of a search run


def searched(job: Job, args: argparse.Namespace, say: Callable[[str], None]) -> Job:
    """Runs the search for every cell that has a grid, and returns the job with the winners in its cells."""
    given = {}
    for text in args.grid:
        key, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"--grid {text}: expected KEY=A,B, such as train.lr=0.1,0.01.")
        given[key.strip()] = compose(f"[{values}]", f"--grid {text}", one_place=True).plain()
    tasks = {c.name: [(point, task(c, point, job, args.out)) for point in points(c, given)] for c in job.cells}
    todo = [t for pairs in tasks.values() if len(pairs) > 1 for _, t in pairs]
    if not todo:
        say("search: none of these cells has a grid.")
        return job
    say(f"search: {len(todo)} runs at a quarter of the rounds")
    count = [0]

    def told(task: Task, state: str) -> None:
        count[0] += 1
        found = score(task)
        say(f"  search {task.name}: {state if found is None else f'{100 * found:.2f} on the validation split'}")

    if not args.gather:
        pool.work(todo, args.jobs, args.device, load=args.load, sets=args.set, told=told)
    chosen, books, cells = {}, {}, []
    for cell in job.cells:
        scores: list[Any] = [(score(t), point) for point, t in tasks[cell.name]] if len(tasks[cell.name]) > 1 else []
        reached = [pair for pair in scores if pair[0] is not None]
        if not reached:
            cells.append(cell)
            continue
        best = max(reached, key=lambda pair: pair[0])
        chosen[cell.name] = best[1]
        books[cell.name] = {"chosen": best[1], "scores": [{"validation_accuracy": s, **point} for s, point in scores]}
        cells.append(replace(cell, config=laid(cell.config, best[1])))
        say(f"  {cell.name}: {best[1]}")
    path = args.out / f"{job.stem}-chosen.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({**known, **books}, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)
    return replace(job, cells=tuple(cells), chosen=chosen)


def points(cell: Cell, given: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the cell's grids, with the values given for a key instead of the paper's."""
    grids = {k: given.get(k, v) for k, v in cell.grids.items()}
    return [dict(zip(grids, values)) for values in itertools.product(*grids.values())]


def laid(config: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the point's dotted keys set."""
    out = dict(config)
    for key, value in point.items():
        over: Any = value
        for step in reversed(key.split(".")):
            over = {step: over}
        out = papers.lay(out, over)
    return out


def task(cell: Cell, point: Mapping[str, Any], job: Job, out: Path) -> Task:
    """The search run of a point."""
    rounds = math.ceil(int(cell.config["rounds"]) / SHARE)
    words = [f"{k.rpartition('.')[2]}{v}" for k, v in point.items()]
    name = "_".join([str(cell.config["name"]), *words, f"seed{job.seeds[0]}"])
    every = max(1, rounds // LOOKS)
    data = {} if cell.config["data"].get("validation") else {"validation": VALIDATION}
    over = {"rounds": rounds, "data": data, "name": name, "seed": job.seeds[0],
            "evaluate": {"every": every, "clients": "none"}, "checkpoint": {"every": rounds, "best": False}}
    return Task(papers.lay(laid(cell.config, point), over), job.folder(out) / "search")


def score(task: Task) -> float | None:
    """The best validation accuracy over the run's rounds; None where it failed or has none."""
    if pool.state_now(task) != "done":
        return None
    return max((float(r.validation_accuracy) for r in open_run(task.run).rounds if r.validation_accuracy is not None), default=None)
