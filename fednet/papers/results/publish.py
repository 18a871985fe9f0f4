"""What came of the runs behind a table: its rows and curves, as files."""

from __future__ import annotations

from pathlib import Path

from fednet.files import write_aside
from fednet.papers.cell import Cell
from fednet.papers.job import Reproduction
from fednet.papers.results import measures, rendering, reproduction
from fednet.plain import JsonDict
from fednet.report import costs, metrics
from fednet.report.read import Run, open_run
from fednet.sweep import marks
from fednet.sweep.marks import RunSpec


def rows(
    job: Reproduction, out: Path
) -> tuple[list[JsonDict], list[JsonDict], dict[tuple[str, int], Run]]:
    """(table's rows, curves, runs). What is not done has a row that says so."""
    runs = job.runs(out)
    found = {(c.name, s): open_run(t.run) for c, s, t in runs if marks.state_now(t) == "done"}
    made, curves = [], []
    for cell, seed, task in runs:
        state, run = marks.state_now(task), found.get((cell.name, seed))
        versus = next(
            (
                c
                for c in job.cells
                if reproduction.plain(c.method) == cell.versus
                and (c.dataset, c.variant, c.heterogeneity)
                == (cell.dataset, cell.variant, cell.heterogeneity)
            ),
            None,
        )
        other = None if versus is None else found.get((versus.name, seed))
        made.append(
            reproduction.row(
                cell,
                seed,
                job.scale,
                run,
                in_paper=reproduction.plain(cell.method) not in job.added,
                versus=other,
                status=_compared(cell, state, other) or _status(task, state),
                changed=job.changed,
                hyperparameters=(job.chosen or {}).get(cell.name),
            )
        )
        if run is not None:
            curves += reproduction.curves(cell, seed, run)
    return made, curves, found


def _compared(cell: Cell, state: str, other: Run | None) -> str:
    """Why a run that is done has no figure yet; "" where it has. Without the run that it is
    compared with, a target that is not known would stand as one that was never reached.
    """
    if state != "done" or cell.measure not in measures.COMPARED or not cell.versus or other:
        return ""
    return f"not compared: {cell.versus} of this seed is not done"


def _status(task: RunSpec, state: str) -> str:
    """A cell's state as it stands in the table."""
    if state == "failed":
        return f"failed: {marks.why(task) or 'it said nothing'}"
    if state == "begun":
        path = task.run / "rounds.jsonl"
        ended = path.read_bytes().count(b"\n") if path.exists() else 0
        return f"not run: {ended} of {task.config['rounds']} rounds so far" if ended else "not run"
    if state == "changed":
        return "not run: its files were changed after it ended"
    if state == "done":
        return state
    said = marks.why(task)
    return f"not run: {said}" if said else "not run"


def publish(job: Reproduction, out: Path) -> list[Path]:
    """Writes the table in every form, and the curves; nothing where no run has a result."""
    made, curves, _ = rows(job, out)
    if all(str(r["status"]).startswith("not run") for r in made):
        return []
    table, points = out / f"{job.stem}.csv", out / f"{job.stem}-curves.csv"
    reproduction.merge(table, made, reproduction.FIXED)  # other parts of the table stay
    reproduction.merge(points, curves, reproduction.CURVE)
    whole = reproduction.read_csv(table)
    text, page = out / f"{job.stem}.txt", out / f"{job.stem}.md"
    write_aside(text, rendering.as_text(whole) + "\n")
    write_aside(page, rendering.as_md(whole))
    return [table, points, text, page]


def line(job: Reproduction, task: RunSpec) -> str:
    run, cell = (
        open_run(task.run),
        next(c for c in job.cells if task.name.rpartition("-seed")[0] == c.config["name"]),
    )
    values = {name: measures.measured(name, run) for name in cell.figures}
    said = [
        f"{name} {value:.2f}"
        + ("" if cell.figures[name] is None else f" (paper {cell.figures[name]})")
        for name, value in values.items()
        if value is not None
    ]
    return ", ".join(
        [
            *said,
            f"{costs.ledger(run).total() / 1e6:.1f} MB",
            f"{metrics.summary(run).seconds:.0f} s",
        ]
    )
