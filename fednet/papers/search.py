"""Hyper-parameters from the papers' grids: each point at a quarter of the rounds, with one seed,
evaluated on a validation split of the training pool; the winner is run at full length, on the whole
pool.

The winner is the point with the highest validation accuracy over its rounds, as the papers choose
by the highest over rounds; ties go to the first point. A point that diverged is out. A grid of one
point is taken without a search. A winner that is not what the table has anyway is a run and a row
of its own name, beside the table's own in one --out: a quarter of the rounds may choose what is no
good at full length, and that is to be seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fednet import papers
from fednet.config.tree import compose
from fednet.errors import ConfigError, unknown
from fednet.papers.job import Reproduction, Request
from fednet.papers.results import add
from fednet.papers.tables import Cell
from fednet.plain import JsonDict, JsonMapping
from fednet.report.read import open_run
from fednet.sweep import marks, pool
from fednet.sweep.grid import Values
from fednet.sweep.marks import RunSpec

# Of the training pool, where the table's own configuration has no validation split.
VALIDATION = 0.1
SHARE = 4  # a quarter of the rounds
LOOKS = 25  # evaluations of a search run


def searched(job: Reproduction, asked: Request, say: Callable[[str], None]) -> Reproduction:
    """Runs the search for every cell that has a grid, and returns the job with the winners in its
    cells.
    """
    given = grids(asked, job)
    tasks = {
        c.name: [(point, task(c, point, job, asked.out)) for point in points(c, given)]
        for c in job.cells
    }
    todo = [t for pairs in tasks.values() if len(pairs) > 1 for _, t in pairs]
    say(
        f"search: {len(todo)} runs at a quarter of the rounds"
        if todo
        else "search: none of these cells has a grid of several points."
    )
    count = [0]

    def note(task: RunSpec, state: str) -> None:
        count[0] += 1
        found = score(task)
        came = state if found is None else f"{100 * found:.2f} on the validation split"
        say(f"  search {task.name}: {came}")

    if todo and not asked.gather:
        pool.work(todo, asked.jobs, asked.device, load=asked.load, sets=asked.set, notify=note)
    chosen, books, cells = {}, {}, []
    for cell in job.cells:
        pairs = tasks[cell.name]
        if pairs[0][0] == {}:  # no grid
            cells.append(cell)
            continue
        alone = len(pairs) == 1  # taken without a search
        scores = [(None if alone else score(t), point) for point, t in pairs]
        reached = [pair for pair in scores if alone or pair[0] is not None]
        if not reached:
            say(
                f"  {cell.name}: none of its {len(pairs)} points has a validation accuracy; "
                + ("it is left out." if cell.by_search else "it runs at the table's own values.")
            )
            cells += [] if cell.by_search else [cell]
            continue
        best = max(reached, key=lambda pair: pair[0] or 0.0)
        books[cell.name] = {
            "chosen": best[1],
            "scores": [{"validation_accuracy": s, **point} for s, point in scores],
        }
        cells.append(won(cell, best[1]))
        chosen[cells[-1].name] = best[1]
        say(f"  {cell.name}: {best[1]}")
    if not cells:
        raise ConfigError(
            f"--search: no point of {job.table} has a validation accuracy; what failed is in "
            f"{job.folder(asked.out) / 'search'}."
        )
    add(asked.out / f"{job.stem}-chosen.json", books)
    return replace(job, cells=tuple(cells), chosen=chosen)


def grids(asked: Request, job: Reproduction) -> dict[str, Values]:
    """The values that `--grid` gives, by key. Raises ConfigError for what would be of no effect."""
    known = {k for c in job.cells for k in c.grids}
    given: dict[str, Values] = {}
    for text in asked.grid:
        key, equals, values = (part.strip() for part in text.partition("="))
        given[key] = (
            compose(f"[{values}]", f"--grid {text}", one_place=True).plain() if equals else []
        )
        if not given[key]:
            raise ConfigError(f"--grid {text}: expected KEY=A,B, such as train.lr=0.1,0.01.")
        if key not in known:
            none = (
                f"--grid {text}: none of these cells of {job.table} has a grid; "
                "--set sets a value for all."
            )
            raise ConfigError(unknown("--grid key", key, known) if known else none)
    if asked.grid and not asked.search:
        raise ConfigError("--grid says what --search tries; give both, or --set for one value.")
    for text in asked.set if asked.search else ():
        key = text.partition("=")[0].strip()
        if found := next((k for k in sorted(known) if f"{k}.".startswith(f"{key}.")), None):
            raise ConfigError(
                f"--set {text}: {found} is searched, and every point would have that value; leave "
                f"out --set, or --search."
            )
    return given


def points(cell: Cell, given: Mapping[str, Values]) -> list[JsonDict]:
    """Every combination of the cell's grids, with the values given for a key instead of the
    paper's.
    """
    grids = {k: given.get(k, v) for k, v in cell.grids.items()}
    return [dict(zip(grids, values)) for values in itertools.product(*grids.values())]


def laid(config: JsonMapping, point: JsonMapping) -> JsonDict:
    """The configuration with the point's dotted keys set."""
    out = dict(config)
    for key, value in point.items():
        *above, last = key.split(".")
        over: JsonDict = {last: value}
        for step in reversed(above):
            over = {step: over}
        out = papers.lay(out, over)
    return out


def won(cell: Cell, point: JsonMapping) -> Cell:
    """The cell at the winner's values. Where they differ from the table's own, which may be run in
    the same --out, under a name of its own: "FedCM [lr 1, alpha 0.1]".
    """
    config = laid(cell.config, point)
    if config == cell.config:
        return cell
    name = "_".join([str(config["name"]), *words(point)])
    method = cell.method if cell.by_search else f"{cell.method} [{', '.join(words(point, ' '))}]"
    return replace(cell, config={**config, "name": name}, method=method)


def words(point: JsonMapping, between: str = "") -> list[str]:
    """The settings as they stand in a run's name."""
    return [f"{k.rpartition('.')[2]}{between}{v}" for k, v in point.items()]


def task(cell: Cell, point: JsonMapping, job: Reproduction, out: Path) -> RunSpec:
    """The search run of a point."""
    rounds = math.ceil(int(cell.config["rounds"]) / SHARE)
    name = "_".join([str(cell.config["name"]), *words(point), f"seed{job.seeds[0]}"])
    every = max(1, rounds // LOOKS)
    data = {} if cell.config["data"].get("validation") else {"validation": VALIDATION}
    over = {
        "rounds": rounds,
        "data": data,
        "name": name,
        "seed": job.seeds[0],
        "evaluate": {"every": every, "clients": "none"},
        "checkpoint": {"every": rounds, "best": False},
    }
    return RunSpec(papers.lay(laid(cell.config, point), over), job.folder(out) / "search")


def score(task: RunSpec) -> float | None:
    """The best validation accuracy over the run's rounds; None where it failed or has none."""
    if marks.state_now(task) != "done":
        return None
    return max(
        (
            float(r.validation_accuracy)
            for r in open_run(task.run).rounds
            if r.validation_accuracy is not None
        ),
        default=None,
    )
