"""`fednet reproduce`: does the runs of a paper's table and prints their results beside the paper's.

    OUT/PAPER/NAME-seedS/              a run; tables of the same runs share it
    OUT/PAPER-TABLE.csv                the table
    OUT/PAPER-TABLE-curves.csv         the curves

At mini scale all of these have `-mini` in their names. Runs of one seed are paired: partition,
initial weights and participants depend on the seed, not on the method.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet import loading, papers
from fednet.errors import ConfigError, complain, speaker
from fednet.experiment.rundir import writable
from fednet.papers import notation, plan, rendering, results, search
from fednet.papers.job import Reproduction, choose
from fednet.papers.mini import DESCRIPTION
from fednet.plain import JsonDict, align
from fednet.report import costs, metrics
from fednet.report.read import open_run
from fednet.sweep import cells
from fednet.sweep.cells import RunSpec


def main(asked: argparse.Namespace) -> int:
    """Does the runs that are not done yet, then writes the table of all of them; or what else the
    command line asks for. Returns the exit status.
    """
    loading.load_parts([Path(f) for f in asked.load])
    if asked.list:
        print(listing())
        return 0
    if not asked.table:
        raise ConfigError("expected PAPER/TABLE, such as feddpc/table2; --list shows them.")
    if (printed := notation.costs(asked.table)) is not None:
        print(printed)
        return 0
    job = choose(asked)
    if asked.grid is not None:
        for path in search.write(job, asked.grid):
            print(f"fednet sweep {path}")
        return 0
    if asked.plan:
        print(plan.plan(job, asked.out, asked.device, asked.jobs))
        return 0
    writable(asked.out, "--out")  # refused before hours of runs, not after them
    say = speaker(asked.quiet)
    if job.scale == "mini":
        say(DESCRIPTION[0].upper() + DESCRIPTION[1:])
    tasks = [t for _, _, t in job.runs(asked.out)]
    if asked.gather and not any(t.state in ("done", "failed") for t in tasks):
        raise ConfigError(
            f"--gather: none of the {len(tasks)} runs of {job.table} in {job.folder(asked.out)} is "
            f"done."
        )
    refused = False

    def show(task: RunSpec, state: str) -> None:
        nonlocal refused
        if state == "begins":
            return
        refused = refused or state == "refused"
        done = sum(t.state == "done" for t in tasks)
        text = f"[{done}/{len(tasks)}] {task.name}: {_progress(job, task, state)}"
        if asked.quiet and state in ("refused", "failed"):
            complain(text)
        say(text)

    try:
        if not asked.gather:
            cells.work(tasks, asked.jobs, asked.device, notify=show)
    finally:
        made, curves = rows(job, asked.out)  # also of what was done before a stop
        table, points = (asked.out / f"{job.stem}{end}.csv" for end in ("", "-curves"))
        written = not all(str(r["status"]).startswith("not run") for r in made)
        if written:
            results.merge(table, made, results.FIXED)  # other parts of the table stay
            results.merge(points, curves, results.CURVE)
    if written:
        say(rendering.as_text(results.read_csv(table)))
        say(f"{table}\n{points}")
    return cells.REFUSED if refused else 0


def _progress(job: Reproduction, task: RunSpec, state: str) -> str:
    """Returns the line about a run that has ended, or that another process does."""
    if state == "held":
        return "another process is at it; the same command gathers it later"
    if state != "done":
        return f"{state}: {task.why}"
    run = open_run(task.run)
    name = task.name.rpartition("-seed")[0]
    cell = next(c for c in job.cells if c.config["name"] == name)
    words = []
    for measure, printed in cell.figures.items():
        value = results.measure(measure, run)
        if value is not None:
            beside = "" if printed is None else f" (paper {printed})"
            words.append(f"{measure} {value:.2f}{beside}")
    words.append(f"{costs.ledger(run).total() / 1e6:.1f} MB")
    words.append(f"{metrics.summary(run).seconds:.0f} s")
    return ", ".join(words)


def rows(job: Reproduction, out: Path) -> tuple[list[JsonDict], list[JsonDict]]:
    """Returns (the table's rows, the curves' rows). A run that is not done has its status there."""
    runs = job.runs(out)
    found = {(c.name, s): open_run(t.run) for c, s, t in runs if t.state == "done"}
    made = []
    curves = []
    for cell, seed, task in runs:
        run = found.get((cell.name, seed))
        other = None
        status = "done"
        if task.state == "failed":
            status = f"failed: {task.why or 'it printed nothing'}"
        elif task.state != "done":
            status = f"not run: {task.why}" if task.why else "not run"
        if (versus := job.versus(cell)) is not None:
            other = found.get((versus.name, seed))
        compared = cell.versus is not None and cell.measure in results.COMPARED
        if run is not None and other is None and compared:
            # Else a target that is not known would look like one that was never reached.
            status = f"not compared: {cell.versus} of this seed is not done"
        made.append(results.row(cell, seed, job.scale, run, other, status, job.changed))
        if run is not None:
            curves += results.curves(cell, seed, run)
    return made, curves


# -- what there is ---------------------------------------------------------------------------------
def listing() -> str:
    """Lists every table, with its number of cells, its datasets and its caption."""
    lines = []
    for name in papers.with_results():
        found = papers.cells(name)
        caption = papers.caption(name).partition("; class")[0]
        datasets = dict.fromkeys(str(c.config["data"]["dataset"]) for c in found)
        lines.append((name, f"{len(found):3d} cells", ", ".join(datasets), caption))
    lines += [(name, "  no runs", "", f"prints {what}") for name, what in papers.no_runs().items()]
    return "\n".join(align(lines))
