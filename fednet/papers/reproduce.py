"""`fednet reproduce`: does the runs of a paper's table and prints their results beside the paper's.

    OUT/PAPER/NAME-seedS/              a run; tables of the same runs share it
    OUT/PAPER-TABLE.{csv,md,txt}       the table
    OUT/PAPER-TABLE-curves.csv         the curves

At mini scale all of these have `-mini` in their names. Runs of one seed are paired: partition,
initial weights and participants depend on the seed, not on the method.
"""

from __future__ import annotations

from pathlib import Path

from fednet import loading, papers
from fednet.errors import ConfigError, complain, speaker
from fednet.experiment.rundir import removed_if_empty, writable
from fednet.files import write_aside
from fednet.papers import plan as planning
from fednet.papers import rendering, results
from fednet.papers.job import Reproduction, Request, plan
from fednet.papers.mini import DESCRIPTION
from fednet.plain import JsonDict
from fednet.report import costs, metrics
from fednet.report.read import open_run
from fednet.sweep import claims, marks, pool
from fednet.sweep.marks import RunSpec


def main(asked: Request) -> int:
    """Returns the exit status."""
    loading.load_parts([Path(f) for f in asked.load])
    if asked.list:
        print(listing())
        return 0
    if not asked.table:
        raise ConfigError("expected PAPER/TABLE, such as feddpc/table2; --list shows them.")
    job = plan(asked)
    if asked.plan:
        print(planning.plan(job, asked.out, asked.device, asked.jobs, asked.set))
        return 0
    with removed_if_empty(asked.out):
        writable(asked.out, "--out")  # refused before hours of runs, not after them
        return _run(job, asked)


def _run(job: Reproduction, asked: Request) -> int:
    """Does the runs that are not done yet, then writes the table of all of them."""
    say = speaker(asked.quiet)
    if job.scale == "mini":
        say(DESCRIPTION[0].upper() + DESCRIPTION[1:])
    tasks = [t for _, _, t in job.runs(asked.out)]
    states = [marks.state(t, marks.digest(t, asked.load, asked.set)) for t in tasks]
    if asked.gather and not {"done", "failed", "edited"} & set(states):
        raise ConfigError(
            f"--gather: none of the {len(tasks)} runs of {job.table} in {job.folder(asked.out)} is "
            f"done."
        )
    done = states.count("done")
    refused = False

    def show(task: RunSpec, state: str) -> None:
        nonlocal done, refused
        if state == "begins":
            return
        if state == "done":
            done += 1
        elif state == "changed":
            done -= 1
        elif state == "refused":
            refused = True
        text = f"[{done}/{len(tasks)}] {task.name}: {_progress(job, task, state)}"
        if asked.quiet and state in ("refused", "failed"):
            complain(text)
        say(text)

    try:
        if not asked.gather:
            pool.work(tasks, asked.jobs, asked.device, load=asked.load, sets=asked.set, notify=show)
    finally:
        written = publish(job, asked.out)  # also of what was done before a stop
    failed = [t for t in tasks if marks.state_now(t) == "failed"]
    if failed and not asked.gather:
        say(
            f"{len(failed)} of these runs failed, and are left at that; to have one tried again, "
            f"remove its mark: {failed[0].books / failed[0].name}.failed"
        )
    if written:
        say((asked.out / f"{job.stem}.txt").read_text(encoding="utf-8"))
        say("\n".join(str(p) for p in written))
    return marks.REFUSED if refused else 0


def _progress(job: Reproduction, task: RunSpec, state: str) -> str:
    """Returns the line about a run that has changed its state."""
    if state == "done":
        return _result(job, task)
    if state == "changed":
        return "its files were changed after it ended; it is done again"
    if state == "edited":
        return (
            "your own file was edited, or it failed under another configuration; it is done again"
        )
    if state == "held":
        holder = claims.holder(task.books, task.name) or "it has just ended"
        return f"another process is at it ({holder}); the same command gathers it later"
    if state == "torn":
        return f"cannot be resumed, it is done again: {marks.why(task)}"
    return f"{state}: {marks.why(task)}"


def _result(job: Reproduction, task: RunSpec) -> str:
    """Returns the measures of a run that is done, its MB and its seconds."""
    run = open_run(task.run)
    name = task.name.rpartition("-seed")[0]
    cell = next(c for c in job.cells if c.config["name"] == name)
    words = []
    for measure, printed in cell.figures.items():
        value = results.measured(measure, run)
        if value is not None:
            beside = "" if printed is None else f" (paper {printed})"
            words.append(f"{measure} {value:.2f}{beside}")
    words.append(f"{costs.ledger(run).total() / 1e6:.1f} MB")
    words.append(f"{metrics.summary(run).seconds:.0f} s")
    return ", ".join(words)


# -- the table -------------------------------------------------------------------------------------
def publish(job: Reproduction, out: Path) -> list[Path]:
    """Writes the table in every form, and the curves; nothing if no run has a result."""
    made, curves = rows(job, out)
    if all(str(r["status"]).startswith("not run") for r in made):
        return []
    table, points = out / f"{job.stem}.csv", out / f"{job.stem}-curves.csv"
    results.merge(table, made, results.FIXED)  # other parts of the table stay
    results.merge(points, curves, results.CURVE)
    whole = results.read_csv(table)
    text, page = out / f"{job.stem}.txt", out / f"{job.stem}.md"
    write_aside(text, rendering.as_text(whole) + "\n")
    write_aside(page, rendering.as_md(whole))
    return [table, points, text, page]


def rows(job: Reproduction, out: Path) -> tuple[list[JsonDict], list[JsonDict]]:
    """Returns (the table's rows, those of the curves). A run that is not done has a row with its
    status.
    """
    runs = job.runs(out)
    found = {(c.name, s): open_run(t.run) for c, s, t in runs if marks.state_now(t) == "done"}
    made, curves = [], []
    for cell, seed, task in runs:
        run, other, status = found.get((cell.name, seed)), None, _status(task)
        if (versus := job.versus(cell)) is not None:
            other = found.get((versus.name, seed))
        compared = cell.versus is not None and cell.measure in results.COMPARED
        if run is not None and other is None and compared:
            # Else a target that is not known would look like one that was never reached.
            status = f"not compared: {cell.versus} of this seed is not done"
        made.append(
            results.row(
                cell, seed, job.scale, run, versus=other, status=status, changed=job.changed
            )
        )
        if run is not None:
            curves += results.curves(cell, seed, run)
    return made, curves


def _status(task: RunSpec) -> str:
    """Returns the state of a run as the table shows it."""
    state = marks.state_now(task)
    if state == "done":
        return state
    if state == "failed":
        return f"failed: {marks.why(task) or 'it printed nothing'}"
    if state == "changed":
        return "not run: its files were changed after it ended"
    if state == "begun":
        path = task.run / "rounds.jsonl"
        ended = path.read_bytes().count(b"\n") if path.exists() else 0
        return f"not run: {ended} of {task.config['rounds']} rounds so far" if ended else "not run"
    why = marks.why(task)
    return f"not run: {why}" if why else "not run"


# -- what there is ---------------------------------------------------------------------------------
def listing() -> str:
    """Lists every table, with its number of cells, its datasets and its caption."""
    lines = []
    for name in papers.with_results():
        cells = papers.cells(name)
        caption = papers.caption(name).partition("; class")[0]
        datasets = dict.fromkeys(str(c.config["data"]["dataset"]) for c in cells)
        lines.append((name, f"{len(cells):3d} cells", ", ".join(datasets), caption))
    lines += [(name, "  no runs", "", f"prints {what}") for name, what in papers.no_runs().items()]
    wide = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(part.ljust(w) for part, w in zip(line, wide)), line[3]]) for line in lines
    )
