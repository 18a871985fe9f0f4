"""`fednet sweep`: every combination of settings, over seeds, shared by as many processes as are
started.

    base: cifar.yaml
    vary:
      algorithm: [fedavg, {name: fedprox, mu: 0.01}]
      data.partition.alpha: [0.1, 1.0]
    seeds: [0, 1, 2]

A cell is one run, in a process of its own, in OUT/SWEEP/CELL. Cells of one seed are paired: they
see the same partition, initial weights and participants, since those depend on the seed alone. A
cell that was cut short is resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fednet import config
from fednet.config import fit, reading
from fednet.config.tree import compose
from fednet.errors import CannotGoOn, ConfigError
from fednet.experiment.rundir import writable
from fednet.plain import JsonDict
from fednet.records import reading as records
from fednet.sweep import cells
from fednet.sweep.cells import RunSpec

OWN = {
    "seed": "a sweep sets the seed of each cell; give seeds by `seeds:` or --seeds.",
    "name": "a sweep sets the name of each cell; --out sets the folder of the cells.",
}


EXPECTED = "a sweep file or a configuration with --grid"

# The values of a key of the configuration; each is checked later, as the key's own.
Values = list[Any]


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep file. base: a configuration, relative to the sweep file; vary: key.path -> values."""

    base: str
    vary: dict[str, Values] = {}
    seeds: tuple[int, ...] = (0,)
    name: str = ""


# -- what there is to run --------------------------------------------------------------------------
def load(path: str | Path) -> Sweep:
    """A sweep file; its `base` made absolute, its name the file's where it has none. Raises
    ConfigError.
    """
    path = Path(path)
    text = reading.text_of(path, EXPECTED)
    tree = compose(text, str(path))
    sweep: Sweep = fit.fit(tree, Sweep, "")
    base = path.parent / sweep.base
    if not base.is_file():
        raise ConfigError(f"{tree.value['base'].at}: base: there is no file {base}.")
    _check_values(sweep, str(path))
    return msgspec.structs.replace(sweep, base=str(base.resolve()), name=sweep.name or path.stem)


def from_grid(base: str | Path, grid: Sequence[str], seeds: Sequence[int] = (0,)) -> Sweep:
    """A sweep from flags. grid: `key.path=a,b` texts, values as in YAML."""
    top = compose(reading.text_of(Path(base), EXPECTED), str(base)).value
    if isinstance(top, dict) and "base" in top:
        raise ConfigError(
            f"{base} is a sweep file, which says itself what varies; give --grid and --seeds with "
            f"a configuration."
        )
    vary = {}
    for text in grid:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--grid {text}: expected key.path=a,b, such as train.lr=0.1,0.01.")
        vary[key.strip()] = compose(f"[{values}]", f"--grid {text}", one_place=True).plain()
    sweep = Sweep(
        base=str(Path(base).resolve()),
        vary=vary,
        seeds=tuple(seeds),
        name=f"{Path(base).stem}-sweep",
    )
    _check_values(sweep, "--grid")
    return sweep


def _check_values(sweep: Sweep, where: str) -> None:
    for key, values in sweep.vary.items():
        if not values:
            raise ConfigError(f"{where}: {key}: expected at least one value, got an empty list.")
        if key in ("seed", "name"):
            raise ConfigError(f"{where}: {key}: {OWN[key]}")
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise ConfigError(
            f"{where}: seeds: expected different whole numbers, got {list(sweep.seeds)}."
        )


def combinations(sweep: Sweep) -> dict[str, JsonDict]:
    """Every cell: the settings (key.path -> value) by its name, seed by seed, so that an unfinished
    sweep has whole comparisons. Names are stable, and differ.
    """
    made: dict[str, JsonDict] = {}
    for seed, *values in itertools.product(sweep.seeds, *sweep.vary.values()):
        words = []
        settings: JsonDict = {}
        for key, value in zip(sweep.vary, values):
            is_part = key in ("algorithm", "model") and isinstance(value, str)
            settings[key] = {"name": value} if is_part else value
            words.append(value if is_part else _text(key.rpartition(".")[2], value))
        text = re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(words)).strip("-")
        name = "_".join(part for part in (text, f"seed{seed}") if part)
        if name in made:  # values that read the same once written as a name
            whole = json.dumps(settings, sort_keys=True)
            name += f"-{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
        made[name] = {"name": name, "seed": seed, **settings}
    return made


def _text(key: str, value: object) -> str:
    """{"name": "fedprox", "mu": 0.1} as fedprox-mu0.1, and an lr of 0.01 as lr0.01."""
    if not isinstance(value, Mapping):
        return key + _short(value)
    head = str(value.get("name", value.get("scheme", key)))
    options = [k + _short(v) for k, v in value.items() if k not in ("name", "scheme")]
    return "-".join([head, *options])


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def runs(
    sweep: Sweep, out: str | Path, load: Sequence[str] = (), sets: Sequence[str] = ()
) -> list[RunSpec]:
    """The runs of all cells, in their order, each checked before anything starts. sets: further
    `--set`s that all cells get. Raises ConfigError.
    """
    for text in sets:
        key = text.partition("=")[0].strip()
        if key in OWN or key in sweep.vary:
            raise ConfigError(f"--set {text}: {OWN.get(key, f'the sweep varies {key} itself.')}")
    made = []
    for settings in combinations(sweep).values():
        # In JSON, which is YAML.
        own = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in settings.items()]
        whole = config.load(sweep.base, [*sets, *own], load)
        made.append(RunSpec(config.to_mapping(whole), Path(out) / sweep.name))
    return made


def plan(tasks: Sequence[RunSpec]) -> str:
    """What `--plan` shows: a line per cell, with its state."""
    lines = [f"{len(tasks)} runs in {tasks[0].folder}"]
    width = max(len(task.name) for task in tasks)
    for task in tasks:
        task.check()
        state = f"failed, see {task.log}" if task.state == "failed" else task.state
        lines.append(f"  {task.name.ljust(width)}  {state}")
    return "\n".join(lines)


def run(
    tasks: Sequence[RunSpec],
    jobs: int,
    device: str,
    options: Sequence[str],
    say: Callable[[str], None],
) -> list[str]:
    """Runs the cells, except those that other processes are at. Returns the names of those. Raises
    CannotGoOn at the end if cells failed.
    """
    folder = tasks[0].folder
    writable(folder, "--out")
    elsewhere = list[str]()
    failed = list[str]()
    numbers = {task.name: number for number, task in enumerate(tasks, 1)}

    def show(task: RunSpec, state: str) -> None:
        if state == "begins":
            say(f"[{numbers[task.name]}/{len(tasks)}] {task.name}")
        elif state == "held":
            elsewhere.append(task.name)
        elif state == "done":
            final = (records.read_summary(task.run).accuracy or {}).get("final")
            if final is not None:
                say(f"    {task.name}: global accuracy {100 * final:.2f} %")
        else:
            if state != "begun":
                failed.append(task.name)
            say(f"    {task.name} {state}, see {task.log}")

    cells.work(tasks, jobs, device, options, show)
    if failed:
        raise CannotGoOn(
            f"{len(failed)} of {len(tasks)} cells failed: {', '.join(failed[:5])}; their logs are "
            f"in {folder / '.cells'}."
        )
    return elsewhere
