"""The cells of a sweep: their states, their runs, and which of them `select` chooses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet.descriptors import named
from fednet.errors import CannotGoOn, ConfigError
from fednet.experiment.rundir import writable
from fednet.files import read_lines, write_aside, write_json
from fednet.sweep import claims, marks, pool
from fednet.sweep.grid import Sweep, cells, configurations, share
from fednet.sweep.marks import RunSpec


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


def runs(
    sweep: Sweep, out: str | Path, load: Sequence[str] = (), sets: Sequence[str] = ()
) -> list[RunSpec]:
    """The runs of all cells, in their order. sets: further `--set`s. Raises ConfigError."""
    return [RunSpec(made, home(sweep, out)) for made in configurations(sweep, load, sets)]


def plan(
    sweep: Sweep,
    out: str | Path,
    only: str | None = None,
    load: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> str:
    """What `--plan` shows: a line per cell, with its state."""
    chosen = runs(sweep, out, load, sets)
    if only:
        chosen = share(chosen, only)
    lines = [f"{len(chosen)} cells in {home(sweep, out)}, base {sweep.base}"]
    width = max((len(task.name) for task in chosen), default=0)
    lines += [f"  {task.name.ljust(width)}  {_state(task)}" for task in chosen]
    return "\n".join(lines)


def _state(task: RunSpec) -> str:
    state = marks.state(task, marks.digest(task))
    if state in ("changed", "edited"):
        return f"to be done again: {_why(task, state)}"
    if state == "done":
        return state
    if holder := claims.holder(task.books, task.name):
        return f"running ({holder})"
    return f"failed, see {task.book('log')}" if state == "failed" else state


def _why(task: RunSpec, state: str) -> str:
    """Why a run is done again."""
    if state == "edited":
        return "your own file was edited, or it failed under another configuration"
    if state == "torn":
        return marks.why(task)
    found = marks.read(task)
    return "" if found is None else marks.damage(task, found[1])


def run(
    sweep: Sweep,
    out: str | Path,
    *,
    only: str | None = None,
    jobs: int = 1,
    device: str = "auto",
    load: Sequence[str] = (),
    sets: Sequence[str] = (),
    options: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Runs the cells that no other process runs, `jobs` at a time. only: I/N; sets: further
    `--set`s of all cells; options: further arguments of `fednet run`.

    Raises ConfigError if a cell was done under another configuration, CannotGoOn (at the end) if
    cells failed, Stopped if this process, or a cell itself, was asked to stop.
    """
    folder, all_runs = home(sweep, out), runs(sweep, out, load, sets)
    writable(folder, "--out")
    mine = share(all_runs, only) if only else all_runs
    _write_order(sweep, [task.name for task in all_runs], folder / ".cells")
    progress, failed = SweepProgress(len(mine), folder), list[str]()
    numbers = {task.name: number for number, task in enumerate(mine, 1)}

    def show(task: RunSpec, state: str) -> None:
        name = task.name
        if state == "begins":
            say(progress.begins(numbers[name], name))
        elif state in ("changed", "edited", "torn"):
            say(f"    {name} is done again: {_why(task, state)}")
            say(f"    what there was of it is in {task.books}")
        elif state == "begun":
            say(f"    {name} was stopped, see {task.book('log')}")
        elif state == "done":
            progress.ended(name)
        elif state != "held":
            failed.append(name)
            progress.ended(name)
            say(f"    {name} {state}, see {task.book('log')}")

    pool.work(mine, jobs, device, options=options, retry_failed=True, notify=show)
    if failed:
        raise CannotGoOn(
            f"{len(failed)} of {len(mine)} cells failed: {', '.join(failed[:5])}; their logs are "
            f"in {folder / '.cells'}."
        )
    done = [task.name for task in all_runs if task.book("done").exists()]
    chosen = _select(sweep, folder) if len(done) == len(all_runs) else []
    away = [task.name for task in all_runs if task.name not in done]
    elsewhere = tuple(name for name in away if claims.holder(folder / ".cells", name))
    return Outcome(
        tuple(folder / name for name in done), tuple(folder / name for name in chosen), elsewhere
    )


def _write_order(sweep: Sweep, names: Sequence[str], books: Path) -> None:
    """Writes the order of the cells in tables and pages: cells that differ in the seed together."""
    of_a_seed = len(names) // len(sweep.seeds)
    ordered = [name for i in range(of_a_seed) for name in names[i::of_a_seed]]
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
def _select(sweep: Sweep, folder: Path) -> list[str]:
    """The names of the chosen cells; `selection.json` says what was chosen and why. Of equals the
    first point is chosen.
    """
    all_cells = cells(sweep)
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
