"""`fednet sweep`: every combination of settings, over seeds, shared by as many processes as are
started.

    base: cifar.yaml
    vary:
      algorithm: [fedavg, {name: fedprox, mu: 0.01}]
      data.partition.alpha: [0.1, 1.0]
    seeds: [0, 1, 2]
    select: {by: validation_accuracy, grid: {train.lr: [0.01, 0.1]}}

A cell is one run, in a process of its own, in OUT/SWEEP/CELL. Cells of one seed are paired: they
see the same partition, initial weights and participants, since those depend on the seed alone. A
cell that was cut short is resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fednet import config
from fednet.config import fit
from fednet.config.tree import compose
from fednet.errors import CannotGoOn, ConfigError, Stopped
from fednet.experiment.rundir import writable
from fednet.files import read_lines, write_aside, write_json
from fednet.sweep import claims

STOP_S = 30.0  # a run stops cleanly within 10 s of being asked
LOOK_S = 0.5  # between two looks at the process and at what was asked


class Select(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hyper-parameters to choose for each variation by a number of the validation split, the mean
    over seeds.
    """

    grid: dict[str, list[Any]]
    by: str = "validation_accuracy"


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep file. base: a configuration, relative to the sweep file; vary: key.path -> values."""

    base: str
    vary: dict[str, list[Any]] = {}
    seeds: list[int] = msgspec.field(default_factory=lambda: [0])
    select: Select | None = None
    name: str | None = None


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. variation and point: its place in `vary` and in the grid of `select`, as
    text.
    """

    name: str
    variation: str
    point: str
    seed: int
    settings: dict[str, Any]  # key.path -> value

    @property
    def sets(self) -> list[str]:
        """As values of `--set`. JSON is YAML."""
        return [f"{k}={json.dumps(v)}" for k, v in self.settings.items()]


@dataclass(frozen=True)
class Outcome:
    """Run directories of the cells that are done, and, once all are, of those that `select` chose
    (all, without it).
    """

    done: tuple[Path, ...]
    chosen: tuple[Path, ...]
    elsewhere: tuple[str, ...]  # cells that other processes are at


# -- what there is to run --------------------------------------------------------------------------
def load(path: str | Path) -> Sweep:
    """A sweep file; its `base` made absolute, its name the file's where it has none. Raises
    ConfigError.
    """
    path = Path(path)
    try:
        tree = compose(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; expected a sweep file or a configuration with --grid."
        ) from None
    sweep: Sweep = fit.fit(tree, Sweep, "")
    base = path.parent / sweep.base
    if not base.is_file():
        raise ConfigError(f"{tree.value['base'].at}: base: there is no file {base}.")
    _check_values(sweep, str(path))
    return msgspec.structs.replace(sweep, base=str(base.resolve()), name=sweep.name or path.stem)


def from_grid(base: str | Path, grid: Sequence[str], seeds: str = "0") -> Sweep:
    """A sweep from flags. grid: `key.path=a,b` texts, values as in YAML; seeds: `0,1,2` or
    `0-4`.
    """
    vary = {}
    for text in grid:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--grid {text}: expected key.path=a,b, such as train.lr=0.1,0.01.")
        vary[key.strip()] = compose(f"[{values}]", f"--grid {text}", one_place=True).plain()
    if not Path(base).is_file():
        raise ConfigError(f"{base}: there is no such file; expected a configuration.")
    sweep = Sweep(
        base=str(Path(base).resolve()),
        vary=vary,
        seeds=_seeds(seeds),
        name=f"{Path(base).stem}-sweep",
    )
    _check_values(sweep, "--grid")
    return sweep


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise ConfigError(
                f"--seeds {text}: expected whole numbers such as 0,1,2 or 0-4, got {part!r}."
            )
        first = int(match[1])
        found += range(first, int(match[2] or first) + 1)
    return found


def _check_values(sweep: Sweep, where: str) -> None:
    grid = sweep.select.grid if sweep.select else {}
    for key, values in {**sweep.vary, **grid}.items():
        if not values:
            raise ConfigError(f"{where}: {key}: expected at least one value, got an empty list.")
        if key in ("seed", "name"):
            raise ConfigError(
                f"{where}: {key}: a sweep gives each cell its {key} itself; seeds stand under "
                f"`seeds`."
            )
    if both := sweep.vary.keys() & grid.keys():
        raise ConfigError(
            f"{where}: {min(both)} stands under `vary` and under `select.grid`; keep one of them."
        )
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise ConfigError(f"{where}: seeds: expected different whole numbers, got {sweep.seeds}.")
    if sweep.select and not sweep.select.by.startswith("validation"):
        raise ConfigError(
            f"{where}: select.by: expected a number of the validation split, such as "
            f"validation_accuracy, got "
            f"{sweep.select.by!r}; what is chosen on the test set is no test any more."
        )


def cells(sweep: Sweep) -> list[Cell]:
    """Every combination, by seed, so that an unfinished sweep has whole comparisons. Names are
    stable, and differ.
    """
    made, taken = [], set()
    grid = sweep.select.grid if sweep.select else {}
    for seed in sweep.seeds:
        for variation in _product(sweep.vary):
            for point in _product(grid):
                settings = {k: _part(k, v) for k, v in {**variation, **point}.items()}
                parts = [_text(variation), _text(point), f"seed{seed}"]
                name = "_".join(p for p in parts if p)
                if name in taken:  # values that read the same once written as a name
                    name += (
                        "-"
                        + hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[
                            :6
                        ]
                    )
                taken.add(name)
                made.append(
                    Cell(name, parts[0], parts[1], seed, {"name": name, "seed": seed, **settings})
                )
    return made


def share(all_cells: Sequence[Cell], text: str) -> list[Cell]:
    """`--cell I/N`: the I-th of N shares, dealt in turn."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--cell {text}: expected I/N with 1 <= I <= N, such as 2/8.")
    return list(all_cells[int(match[1]) - 1 :: int(match[2])])


def _product(vary: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values))


def _part(key: str, value: Any) -> Any:
    """`algorithm: fedavg` for {name: fedavg}, as the other parts that are chosen by name."""
    return {"name": value} if key in ("algorithm", "model") and isinstance(value, str) else value


def _text(settings: Mapping[str, Any]) -> str:
    """{"algorithm": {"name": "fedprox", "mu": 0.1}, "train.lr": 0.01} as fedprox-mu0.1_lr0.01."""
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            named = {k: v for k, v in value.items() if k not in ("name", "scheme")}
            head = str(value.get("name", value.get("scheme", key.rpartition(".")[2])))
            words.append("-".join([head, *(f"{k}{_short(v)}" for k, v in named.items())]))
        elif isinstance(value, str) and key in ("algorithm", "model"):
            words.append(value)
        else:
            words.append(f"{key.rpartition('.')[2]}{_short(value)}")
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(words)).strip("-")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- running it ------------------------------------------------------------------------------------
def check(sweep: Sweep, load_files: Sequence[str] = (), sets: Sequence[str] = ()) -> dict[str, str]:
    """Checks every cell's configuration before anything starts. Returns the SHA-256 of each one's
    whole configuration.

    sets: further `--set`s that all cells get.
    """
    hashes = {}
    for cell in cells(sweep):
        made = config.load(sweep.base, [*sets, *cell.sets], load_files)
        if sweep.select and not made.data.validation:
            raise ConfigError(
                f"{sweep.base}: data.validation: expected a share above 0 for select.by "
                f"{sweep.select.by!r}, got 0."
            )
        text = json.dumps(config.to_mapping(made), sort_keys=True, default=str)
        hashes[cell.name] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def home(sweep: Sweep, out: str | Path) -> Path:
    """The sweep's folder: a run directory for each cell, and `.cells/`, its own books."""
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


def state(folder: Path, cell: Cell) -> str:
    books = folder / ".cells"
    if (books / f"{cell.name}.done").exists():
        return "done"
    if who := claims.holder(books, cell.name):
        return f"running ({who})"
    if (books / f"{cell.name}.failed").exists():
        return f"failed, see {books / (cell.name + '.log')}"
    return "begun" if (folder / cell.name).exists() else "to do"


def command(sweep: Sweep, cell: Cell, out: str | Path, extra: Sequence[str] = ()) -> list[str]:
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
    extra: Sequence[str] = (),
    load_files: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    line: Callable[[Sweep, Cell, str | Path, Sequence[str]], list[str]] = command,
) -> Outcome:
    """Runs the cells that nobody else is at, one after the other. only: I/N; extra: further
    arguments of `fednet run`.

    Raises ConfigError where a cell was done under another configuration, CannotGoOn (at the end)
    where cells failed, Stopped on SIGTERM, SIGUSR1, Ctrl-C or where a cell itself was stopped.
    """
    sets = [value for flag, value in itertools.pairwise(extra) if flag == "--set"]
    hashes = check(sweep, load_files, sets)
    for file in load_files:
        extra = [*extra, "--load", file]
    folder, todo = home(sweep, out), cells(sweep)
    writable(folder, "--out")
    mine = share(todo, only) if only else todo
    books = folder / ".cells"
    failed: list[str] = []
    with Stop() as stop:
        for number, cell in enumerate(mine, 1):
            if _is_done(books, cell, hashes[cell.name]):
                continue
            held = claims.claim(books, cell.name)
            if held is None:
                continue
            try:
                if _is_done(books, cell, hashes[cell.name]):  # by the one that held it until now
                    continue
                say(f"[{number}/{len(mine)}] {cell.name}")
                status = _one(line(sweep, cell, out, extra), books / f"{cell.name}.log", held, stop)
                _settle(books, cell, status, hashes[cell.name])
            finally:
                held.release()
            if stop.asked or status in (4, 130):
                by_keyboard = stop.asked == signal.SIGINT or status == 130
                raise Stopped(
                    f"the sweep stopped in {cell.name}; the same command goes on.", by_keyboard
                )
            if status:
                failed.append(cell.name)
                say(f"    failed with exit status {status}, see {books / (cell.name + '.log')}")
    if failed:
        raise CannotGoOn(
            f"{len(failed)} of {len(mine)} cells failed: {', '.join(failed[:5])}; their logs are "
            f"in {books}."
        )
    done = {c.name: folder / c.name for c in todo if (books / f"{c.name}.done").exists()}
    chosen = _select(sweep, todo, folder) if len(done) == len(todo) else []
    away = tuple(c.name for c in todo if c.name not in done and claims.holder(books, c.name))
    return Outcome(tuple(done.values()), tuple(folder / n for n in chosen), away)


def _is_done(books: Path, cell: Cell, sha256: str) -> bool:
    path = books / f"{cell.name}.done"
    if not path.exists():
        return False
    if path.read_text(encoding="utf-8").strip() != sha256:
        raise ConfigError(
            f"{books.parent / cell.name} was run under another configuration; give the sweep "
            f"another `name` or --out."
        )
    return True


def _settle(books: Path, cell: Cell, status: int, sha256: str) -> None:
    bad = books / f"{cell.name}.failed"
    bad.unlink(missing_ok=True)
    if status == 0:
        write_aside(books / f"{cell.name}.done", sha256 + "\n")
    elif status not in (4, 130):
        bad.write_text(f"{status}\n", encoding="utf-8")


def _one(line: list[str], log: Path, held: claims.Claim, stop: Stop) -> int:
    """Runs one cell's process to its end, or to a clean stop where one is asked for. Returns its
    exit status.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        held.add(process.pid)
        beat, deadline = time.monotonic(), None
        while True:
            now = time.monotonic()
            if stop.asked and deadline is None:
                process.terminate()
                deadline = now + STOP_S
            if deadline is not None and now > deadline:
                process.kill()
            if now - beat > claims.BEAT_S:
                held.beat()
                beat = now
            try:
                return process.wait(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:  # nothing may leave a run behind that no claim speaks for
        process.kill()
        process.wait()
        raise


class Stop:
    """Whether SIGTERM, SIGUSR1 or Ctrl-C asked this process to stop. Entered, the handlers only
    take note.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: Any) -> None:
        self.asked = number

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                s: signal.signal(s, self._note)
                for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)


# -- choosing --------------------------------------------------------------------------------------
def _select(sweep: Sweep, all_cells: Sequence[Cell], folder: Path) -> list[str]:
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
    sign = -1 if "loss" in sweep.select.by else 1
    means = {v: {p: sum(s) / len(s) for p, s in points.items()} for v, points in scores.items()}
    best = {v: max(points, key=lambda p: sign * points[p]) for v, points in means.items()}
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
