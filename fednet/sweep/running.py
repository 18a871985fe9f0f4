"""A sweep's cells, run: each in a process of its own, by as many processes as are started, and
which of them `select` chooses.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.descriptors import named
from fednet.errors import CannotGoOn, ConfigError, StateError, Stopped, stops
from fednet.experiment.rundir import writable
from fednet.files import read_lines, read_text, write_aside, write_json
from fednet.records import sealed
from fednet.sweep import claims, marks
from fednet.sweep.grid import GridCell, Sweep, cells, check, share
from fednet.sweep.progress import SweepProgress

if TYPE_CHECKING:
    from types import FrameType

STOP_S = 30.0  # a run stops cleanly within 10 s of being asked
LOOK_S = 0.5  # between two looks at the process and at what was asked


@dataclass(frozen=True)
class Outcome:
    """Run directories of the cells that are done, and, once all are, of those that `select` chose
    (all, without it).
    """

    done: tuple[Path, ...]
    chosen: tuple[Path, ...]
    elsewhere: tuple[str, ...]  # cells that other processes are at


def home(sweep: Sweep, out: str | Path) -> Path:
    """The sweep's folder: a run directory for each cell, and `.cells/`, its own books; in them
    `order`, the cells as the sweep names them, those that differ in the seed together.
    """
    return Path(out) / (sweep.name or "sweep")


def plan(sweep: Sweep, out: str | Path, only: str | None = None) -> str:
    """What `--plan` shows: a line a cell, with its state."""
    folder, chosen = home(sweep, out), cells(sweep)
    if only:
        chosen = share(chosen, only)
    lines = [f"{len(chosen)} cells in {folder}, base {sweep.base}"]
    width = max(len(c.name) for c in chosen) if chosen else 0
    lines += [f"  {c.name.ljust(width)}  {state(folder, c)}" for c in chosen]
    return "\n".join(lines)


def state(folder: Path, cell: GridCell) -> str:
    books = folder / ".cells"
    if (books / f"{cell.name}.done").exists():
        damage = _damage(books, cell)
        return f"to be done again: {damage}" if damage else "done"
    if who := claims.holder(books, cell.name):
        return f"running ({who})"
    if (books / f"{cell.name}.failed").exists():
        return f"failed, see {books / (cell.name + '.log')}"
    return "begun" if (folder / cell.name).exists() else "to do"


def command(sweep: Sweep, cell: GridCell, out: str | Path, extra: Sequence[str] = ()) -> list[str]:
    """The command line of a cell. Always with --resume: it starts what has not begun and leaves
    alone what is done.
    """
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
        "report=false",  # drawn once, over all cells
        *extra,
        *sets,  # last, so that a cell's own settings stand
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
    """Runs the cells that nobody else is at, `jobs` at a time. only: I/N; extra: further arguments
    of `fednet run`.

    Raises ConfigError where a cell was done under another configuration, CannotGoOn (at the end)
    where cells failed, Stopped where this process, or a cell itself, was asked to stop.
    """
    sets = [value for flag, value in itertools.pairwise(extra) if flag == "--set"]
    hashes = check(sweep, load_files, sets)
    for file in load_files:
        extra = [*extra, "--load", file]
    folder, todo = home(sweep, out), cells(sweep)
    writable(folder, "--out")
    mine, books = share(todo, only) if only else todo, folder / ".cells"
    of_a_seed = len(todo) // len(sweep.seeds)
    named = [c.name for i in range(of_a_seed) for c in todo[i::of_a_seed]]
    books.mkdir(exist_ok=True)
    write_aside(books / "order", "".join(f"{name}\n" for name in named))
    failed, progress = list[str](), SweepProgress(len(mine), folder)

    def begin(number: int, cell: GridCell) -> Running | None:
        if _is_done(books, cell, hashes[cell.name]):
            return None
        held = claims.claim(books, cell.name)
        if held is None:
            return None
        if _is_done(books, cell, hashes[cell.name]):  # by the one that held it until now
            held.release()
            return None
        if (books / f"{cell.name}.done").exists():
            say(f"    {_damage(books, cell)}")
            aside = marks.set_aside(marks.RunSpec({"name": cell.name}, folder))
            say(f"    {cell.name} is done again; what there was of it is in {aside}")
        say(progress.begins(number, cell.name))
        return Running(cell, held, line(sweep, cell, out, extra), books / f"{cell.name}.log")

    for one, status in _ended(begin, mine, jobs):
        _settle(books, one, status, hashes[one.cell.name])
        progress.ended(one.cell.name)
        if status != 0 and not one.stopped(status):
            failed.append(one.cell.name)
            say(f"    {one.cell.name} failed with exit status {status}, see {one.log}")
    if failed:
        raise CannotGoOn(
            f"{len(failed)} of {len(mine)} cells failed: {', '.join(failed[:5])}; their logs are "
            f"in {books}."
        )
    done = {c.name: folder / c.name for c in todo if (books / f"{c.name}.done").exists()}
    chosen = _select(sweep, todo, folder) if len(done) == len(todo) else []
    away = tuple(c.name for c in todo if c.name not in done and claims.holder(books, c.name))
    return Outcome(tuple(done.values()), tuple(folder / n for n in chosen), away)


def _is_done(books: Path, cell: GridCell, sha256: str) -> bool:
    """Whether the cell is done, and what it left is what its tables are to be made from."""
    path = books / f"{cell.name}.done"
    if not path.exists():
        return False
    if read_text(path, marks.AGAIN).splitlines()[0] != sha256:
        raise ConfigError(
            f"{books.parent / cell.name} was run under another configuration; give the sweep "
            f"another `name` or --out."
        )
    return not _damage(books, cell)


def _damage(books: Path, cell: GridCell) -> str:
    """What is wrong with the records of a cell whose mark says that it is done; "" for nothing."""
    run = books.parent / cell.name
    said = read_text(books / f"{cell.name}.done", marks.AGAIN).splitlines()
    try:
        sealed.check(run, marks.RECORDS)
    except StateError as broken:
        return str(broken)
    if len(said) > 1 and said[1] != _digest(run / "summary.json"):
        return f"{run / 'summary.json'}: not what the run left there."
    return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(named(path).read_bytes()).hexdigest()


def _settle(books: Path, one: Running, status: int, sha256: str) -> None:
    bad = books / f"{one.cell.name}.failed"
    bad.unlink(missing_ok=True)
    if status == 0:
        summary = books.parent / one.cell.name / "summary.json"
        seal = f"{_digest(summary)}\n" if summary.exists() else ""
        write_aside(books / f"{one.cell.name}.done", f"{sha256}\n{seal}")
    elif not one.stopped(status):
        write_aside(bad, f"{status}\n")


class Running:
    """A cell's process."""

    def __init__(self, cell: GridCell, held: claims.Claim, line: list[str], log: Path) -> None:
        self.cell, self.log = cell, log
        self._held, self._beat, self._deadline = held, time.monotonic(), math.inf
        with log.open("ab") as out:
            self._process = held.start(line, out)

    def look(self, wait_s: float, stop: bool) -> int | None:
        """Its exit status once it has ended, for which so long is waited. stop: it is asked for a
        clean end, and killed where that takes too long.
        """
        now = time.monotonic()
        if stop and self._deadline == math.inf:
            self._process.terminate()
            self._deadline = now + STOP_S
        if now > self._deadline:
            self._process.kill()
        if now - self._beat > claims.BEAT_S:
            self._held.beat()
            self._beat = now
        try:
            status = self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None
        self._held.beat()  # of a folder that is gone nothing is noted
        return status

    def stopped(self, status: int) -> bool:
        """Whether it ended with that status because it was asked to: cleanly, before it knew how,
        or, as it took too long, not by itself.
        """
        asked = self._deadline < math.inf
        return status in (4, 130) or -status in stops() or (asked and status < 0)

    def close(self) -> None:
        """Nothing may leave a run behind that no claim speaks for."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._held.release()


def _ended(
    begin: Callable[[int, GridCell], Running | None], mine: Sequence[GridCell], jobs: int
) -> Iterator[tuple[Running, int]]:
    """Each cell that `begin` started, once it has ended, with its exit status; `jobs` at a time.
    Raises Stopped, once all that run have ended, where this process was asked to stop, or a cell
    was.
    """
    waiting, going = list(enumerate(mine, 1)), list[Running]()
    halted: tuple[str, bool] | None = None  # in which cell, and whether by the keyboard
    with Stop() as stop:
        try:
            while going or (waiting and not halted):
                while waiting and len(going) < jobs and not halted:
                    if (begun := begin(*waiting.pop(0))) is not None:
                        going.append(begun)
                for one in list(going):
                    status = one.look(LOOK_S / len(going), halted is not None)
                    if stop.asked and not halted:
                        halted = one.cell.name, stop.asked == signal.SIGINT
                    if status is None:
                        continue
                    going.remove(one)
                    one.close()
                    yield one, status
                    if one.stopped(status) and not halted:
                        halted = one.cell.name, status in (130, -signal.SIGINT)
        finally:
            for one in going:
                one.close()
    if halted:
        raise Stopped(f"the sweep stopped in {halted[0]}; the same command goes on.", halted[1])


class Stop:
    """Whether a signal asked this process to stop. Entered, the handlers only take note."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in stops()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)


# -- choosing --------------------------------------------------------------------------------------
def _select(sweep: Sweep, all_cells: Sequence[GridCell], folder: Path) -> list[str]:
    """The names of the chosen cells; what was chosen and why stands in `selection.json`. Ties go to
    the first point.
    """
    if sweep.select is None:
        return [c.name for c in all_cells]
    scores: dict[str, dict[str, list[float]]] = {}
    for c in all_cells:
        scores.setdefault(c.variation, {}).setdefault(c.point, []).append(
            _score(folder / c.name, sweep.select.by)
        )
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
    values = [r[by] for r in read_lines(run / "rounds.jsonl", old=True) if r.get(by) is not None]
    if not values:
        raise ConfigError(f"{run / 'rounds.jsonl'}: no round has {by}, by which select chooses.")
    return float(values[-1])
