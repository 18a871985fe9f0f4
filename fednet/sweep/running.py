"""The cells of a sweep: their states, their runs, and which of them `select` chooses."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet.descriptors import named
from fednet.errors import CannotGoOn, ConfigError
from fednet.experiment.rundir import writable
from fednet.files import read_lines, write_aside, write_json
from fednet.sweep import claims, marks
from fednet.sweep.grid import GridCell, Sweep, cells, check, share
from fednet.sweep.marks import RunSpec
from fednet.sweep.pool import Pool, Running, claimed


@dataclass(frozen=True)
class Outcome:
    """Run directories of the cells that are done, and, once all are, of those that `select` chose
    (all, without it).
    """

    done: tuple[Path, ...]
    chosen: tuple[Path, ...]
    elsewhere: tuple[str, ...]  # cells that other processes run


def home(sweep: Sweep, out: str | Path) -> Path:
    """The sweep's folder: a run directory for each cell, and `.cells/` with its marks and the file
    `order`, the cells as the sweep names them, those that differ in the seed together.
    """
    return Path(out) / (sweep.name or "sweep")


def plan(sweep: Sweep, out: str | Path, only: str | None = None) -> str:
    """What `--plan` shows: a line per cell, with its state."""
    folder, chosen = home(sweep, out), cells(sweep)
    if only:
        chosen = share(chosen, only)
    lines = [f"{len(chosen)} cells in {folder}, base {sweep.base}"]
    width = max(len(c.name) for c in chosen) if chosen else 0
    lines += [f"  {c.name.ljust(width)}  {_state(task(folder, c))}" for c in chosen]
    return "\n".join(lines)


def task(folder: Path, cell: GridCell) -> RunSpec:
    return RunSpec({"name": cell.name}, folder)


def _state(task: RunSpec) -> str:
    found = marks.read(task)
    if found is not None and found[0] == "done":
        damage = marks.damage(task, found[1])
        return f"to be done again: {damage}" if damage else "done"
    if who := claims.holder(task.books, task.name):
        return f"running ({who})"
    if found is not None:
        return f"failed, see {task.book('log')}"
    return "begun" if task.run.exists() else "to do"


def command(sweep: Sweep, cell: GridCell, out: str | Path, extra: Sequence[str] = ()) -> list[str]:
    """The command line of a cell. It always has --resume, which also starts a new run."""
    sets = itertools.chain.from_iterable(("--set", s) for s in cell.sets)
    return [
        sys.executable,
        "-m",
        "fednet.cli.main",
        "run",
        sweep.base,
        "--out",
        str(home(sweep, out)),
        "--resume",
        "--set",
        "report=false",  # one page is made over all cells
        *extra,
        *sets,  # last, so that a cell's own settings hold
    ]


def run(
    sweep: Sweep,
    out: str | Path,
    *,
    only: str | None = None,
    jobs: int = 1,
    extra: Sequence[str] = (),
    load_files: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    line: Callable[[Sweep, GridCell, str | Path, Sequence[str]], list[str]] = command,
) -> Outcome:
    """Runs the cells that no other process runs, `jobs` at a time. only: I/N; extra: further
    arguments of `fednet run`.

    Raises ConfigError if a cell was done under another configuration, CannotGoOn (at the end) if
    cells failed, Stopped if this process, or a cell itself, was asked to stop.
    """
    sets = [value for flag, value in itertools.pairwise(extra) if flag == "--set"]
    asked = {name: (sha256, "-") for name, sha256 in check(sweep, load_files, sets).items()}
    extra = [*extra, *(word for file in load_files for word in ("--load", file))]
    folder, todo = home(sweep, out), cells(sweep)
    writable(folder, "--out")
    mine = share(todo, only) if only else todo
    _write_order(sweep, todo, folder / ".cells")
    progress, pool, failed = SweepProgress(len(mine), folder), Pool(jobs), list[str]()
    numbers = {cell.name: number for number, cell in enumerate(mine, 1)}

    def begin(cell: GridCell) -> Running[GridCell] | None:
        spec = task(folder, cell)
        held = claimed(spec, lambda: marks.state(spec, asked[cell.name]) == "done")
        if held is None:
            return None
        if marks.state(spec, asked[cell.name]) in ("changed", "edited"):
            say(f"    {_state(spec)}")
            aside = marks.set_aside(spec)
            say(f"    {cell.name} is done again; what there was of it is in {aside}")
        say(progress.begins(numbers[cell.name], cell.name))
        return Running(cell, held, line(sweep, cell, out, extra), spec.book("log"))

    for one, status in pool.ended(list(mine), begin):
        name = one.task.name
        if one.stopped(status):
            pool.halt(name, status in (130, -signal.SIGINT))
        else:
            word = "failed" if status else "done"
            marks.write(task(folder, one.task), word, asked[name], status)
            progress.ended(name)
        if status and not one.stopped(status):
            failed.append(name)
            say(f"    {name} failed with exit status {status}, see {one.log}")
    if failed:
        raise CannotGoOn(
            f"{len(failed)} of {len(mine)} cells failed: {', '.join(failed[:5])}; their logs are "
            f"in {folder / '.cells'}."
        )
    done = {c.name: folder / c.name for c in todo if task(folder, c).book("done").exists()}
    chosen = _select(sweep, todo, folder) if len(done) == len(todo) else []
    away = [c.name for c in todo if c.name not in done]
    elsewhere = tuple(name for name in away if claims.holder(folder / ".cells", name))
    return Outcome(tuple(done.values()), tuple(folder / n for n in chosen), elsewhere)


def _write_order(sweep: Sweep, todo: Sequence[GridCell], books: Path) -> None:
    """Writes the order of the cells in tables and pages: cells that differ in the seed together."""
    of_a_seed = len(todo) // len(sweep.seeds)
    ordered = [c.name for i in range(of_a_seed) for c in todo[i::of_a_seed]]
    books.mkdir(exist_ok=True)
    write_aside(books / "order", "".join(f"{name}\n" for name in ordered))


class SweepProgress:
    """The line for each cell that begins: how long the rest takes, and how the last one ended.
    cells: how many there are; folder: where they are.
    """

    def __init__(
        self, cells: int, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cells, self._folder, self._clock = cells, folder, clock
        self._began, self._ended, self._unsaid = clock(), 0, list[str]()

    def ended(self, name: str) -> None:
        self._ended += 1
        self._unsaid.append(name)

    def begins(self, number: int, name: str) -> str:
        """The line for the cell that begins now, the number-th."""
        said = [f"[{number}/{self._cells}] {name}"]
        if self._ended:
            each = (self._clock() - self._began) / self._ended
            said.append(f"about {_span(each * (self._cells - number + 1))} left")
        for last in self._unsaid:
            accuracy = self._accuracy(last)
            if accuracy is not None:
                said.append(f"{last} ended with global accuracy {100 * accuracy:.2f} %")
        self._unsaid.clear()
        return "; ".join(said)

    def _accuracy(self, name: str) -> float | None:
        try:
            summary = json.loads(named(self._folder / name / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # it failed
        return (summary.get("accuracy") or {}).get("final")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# -- choosing --------------------------------------------------------------------------------------
def _select(sweep: Sweep, all_cells: Sequence[GridCell], folder: Path) -> list[str]:
    """The names of the chosen cells; `selection.json` says what was chosen and why. Of equals the
    first point is chosen.
    """
    if sweep.select is None:
        return [c.name for c in all_cells]
    scores: dict[str, dict[str, list[float]]] = {}
    for c in all_cells:
        points = scores.setdefault(c.variation, {})
        points.setdefault(c.point, []).append(_score(folder / c.name, sweep.select.by))
    means = {v: {p: sum(s) / len(s) for p, s in points.items()} for v, points in scores.items()}
    best = {v: max(points, key=points.__getitem__) for v, points in means.items()}
    chosen = [c.name for c in all_cells if best[c.variation] == c.point]
    write_json(
        folder / "selection.json",
        {"by": sweep.select.by, "chosen": best, "means": means, "runs": chosen},
    )
    return chosen


def _score(run: Path, by: str) -> float:
    """The last value of `by` in `rounds.jsonl`."""
    values = [r[by] for r in read_lines(run / "rounds.jsonl") if r.get(by) is not None]
    if not values:
        raise ConfigError(f"{run / 'rounds.jsonl'}: no round has {by}, by which select chooses.")
    return float(values[-1])
