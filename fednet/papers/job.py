"""Turns the command line of `fednet reproduce` into cells and runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fednet import papers, places
from fednet.config import WHERE, load, to_mapping
from fednet.errors import ConfigError, unknown
from fednet.papers import mini as small
from fednet.papers.mini import mini
from fednet.papers.tables import Cell
from fednet.plain import JsonDict
from fednet.sweep.cells import RunSpec

# Measures for which every client has to be evaluated.
PERSONAL = (
    "pfl_accuracy",
    "drift_accuracy",
    "solo_accuracy",
    "client_accuracy",
    "points_gained",
)
OWN = {
    "seed": "--seeds says with which seeds a table is run",
    "name": "a run's name says which cell it is",
    **dict.fromkeys(
        ("algorithm", "algorithm.name"),
        "each cell has its own method; --set algorithm.KEY=VALUE changes a key of them",
    ),
}
EVALUATIONS = 20  # in a run of which only the end is in the table


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line. table: PAPER/TABLE; list, gather, plan: do this instead of running;
    dataset, setting, only: which cells; set: settings of every run.
    """

    table: str = ""
    list: bool = False
    gather: bool = False
    plan: bool = False
    dataset: str | None = None
    only: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    scale: str = "full"
    jobs: int = 1
    device: str = "auto"
    setting: str | None = None
    set: Sequence[str] = ()
    load: Sequence[str] = ()
    out: Path = field(default_factory=places.runs)
    quiet: bool = False


@dataclass(frozen=True)
class Reproduction:
    """The cells to run, and how. changed: what `--set` changed."""

    table: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    scale: str
    changed: str = ""

    @property
    def stem(self) -> str:
        return self.table.replace("/", "-") + ("-mini" if self.scale == "mini" else "")

    def folder(self, out: Path) -> Path:
        return out / (self.cells[0].paper + ("-mini" if self.scale == "mini" else ""))

    def runs(self, out: Path) -> list[tuple[Cell, int, RunSpec]]:
        """Returns the runs ordered by seed, so that a stopped command has done whole seeds."""
        return [
            (
                c,
                s,
                RunSpec(
                    {**c.config, "name": f"{c.config['name']}-seed{s}", "seed": s}, self.folder(out)
                ),
            )
            for s in self.seeds
            for c in self.cells
        ]

    def versus(self, cell: Cell) -> Cell | None:
        """Returns the cell of the same column whose method this cell's is compared with."""
        return next(
            (c for c in self.cells if c.method == cell.versus and _column(c) == _column(cell)), None
        )


def plan(asked: Request) -> Reproduction:
    """Chooses the cells that the command line asks for. Raises ConfigError for unknown names, and
    for keys and values that a run would refuse.
    """
    for text in asked.set:
        if why := OWN.get(text.partition("=")[0].strip()):
            raise ConfigError(f"--set {text}: {why}.")
    cells = [c for c in papers.cells(asked.table) if not c.no_run]
    name = f"{cells[0].paper}/{cells[0].table}"
    cells = _of_setting(_of_dataset(cells, asked.dataset), asked.setting, name)
    if asked.only is not None:
        cells = _of_methods(cells, _named_methods(cells, asked.only))
    if asked.scale == "mini":
        cells = [mini(c) for c in cells]
    cells = [replace(c, config=_evaluated(c, asked.scale)) for c in cells]
    if asked.set or asked.load:
        cells = [replace(c, config=_with_flags(c, asked)) for c in cells]
    return Reproduction(
        name,
        tuple(cells),
        tuple(asked.seeds or [0]),
        asked.scale,
        changed=", ".join(s for s in asked.set if s.partition("=")[0].strip() not in WHERE),
    )


def _with_flags(cell: Cell, asked: Request) -> JsonDict:
    """Returns the cell's configuration with --set and --load."""
    return to_mapping(load(cell.config, asked.set, asked.load, cell.name))


def _of_dataset(cells: Sequence[Cell], dataset: str | None) -> list[Cell]:
    """dataset: as the paper or as the configuration calls it."""
    if not dataset:
        return list(cells)
    found = [
        c
        for c in cells
        if _plain(dataset) in (_plain(c.dataset), _plain(str(c.config["data"]["dataset"])))
    ]
    if not found:
        raise ConfigError(unknown("dataset", dataset, dict.fromkeys(c.dataset for c in cells)))
    return found


def _of_setting(cells: Sequence[Cell], setting: str | None, name: str) -> list[Cell]:
    """Returns the cells that have all of these whole words in their setting: E1 is not E10. In
    either case, and c=2 for #C=2, which a shell takes for a comment.
    """
    if not setting:
        return list(cells)
    found = [c for c in cells if _words(setting) <= _words(_setting(c))]
    if not found:
        there = dict.fromkeys(_setting(c).strip() for c in papers.cells(name) if not c.no_run)
        raise ConfigError(
            f"--setting {setting}: no cell of {name} has that in its setting; they are "
            f"{', '.join(there)}."
        )
    return found


def _setting(cell: Cell) -> str:
    return f"{cell.variant} {cell.heterogeneity}"


def _words(text: str) -> set[str]:
    return {_word(word) for word in text.lower().split()}


def _word(word: str) -> str:
    """Without a # before it, and a number as any number is written: alpha=1.0 as alpha=1."""
    name, equals, value = word.removeprefix("#").rpartition("=")
    try:
        return f"{name}{equals}{float(value):g}"
    except ValueError:
        return f"{name}{equals}{value}"


def _named_methods(cells: Sequence[Cell], only: Sequence[str]) -> set[str]:
    """Returns the methods that `--only` names, as the table prints them or nearly so."""
    known = list(dict.fromkeys(c.method for c in cells))
    wanted = set[str]()
    left = list(only)
    while left:
        # A method's name may itself contain a comma, so that the longest match is taken.
        for count in range(len(left), 0, -1):
            method = _meant(", ".join(left[:count]), known)
            if method is not None:
                break
        else:
            raise ConfigError(unknown("method", left[0], known))
        wanted.add(method)
        del left[:count]
    return wanted


def _meant(name: str, there: Iterable[str]) -> str | None:
    """Which of these names it is: letter by letter, or the one that is alike."""
    same = [m for m in there if m.lower() == name.lower()]
    alike = same or [m for m in there if _plain(m) == _plain(name)]
    return alike[0] if len(alike) == 1 else None


def _of_methods(cells: Sequence[Cell], wanted: Collection[str]) -> list[Cell]:
    """Returns the cells of these methods, and of those that they are measured against."""
    chosen = [c for c in cells if c.method in wanted]
    against = {(*_column(c), c.versus) for c in chosen if c.versus}
    return [*chosen, *(c for c in cells if c not in chosen and (*_column(c), c.method) in against)]


def _column(cell: Cell) -> tuple[str, str, str]:
    return cell.dataset, cell.variant, cell.heterogeneity


def _evaluated(cell: Cell, scale: str) -> JsonDict:
    """Returns the cell's configuration with no more evaluation than its figures need.

    A table of the global model's accuracy needs it after every round, since the best accuracy and
    its round are over rounds, and needs no client's evaluation. A table of personal accuracy needs
    all clients at the end, and in between the points of a curve.
    """
    rounds = int(cell.config["rounds"])
    personal = any(m in PERSONAL for m in cell.figures) and cell.paper != "fedrds"
    if scale == "mini":
        evaluations = small.PERSONAL_EVALUATIONS if personal else small.EVALUATIONS
    else:
        evaluations = EVALUATIONS if personal else rounds
    sections = {
        "evaluate": {
            "every": max(1, rounds // evaluations),
            "clients": "auto" if personal else "none",
        },
        "checkpoint": {"every": max(1, rounds // EVALUATIONS), "best": False},
    }
    return papers.lay(cell.config, sections)


def _plain(text: str) -> str:
    return "".join(ch for ch in text.lower() if ch.isalnum() or ch == "+")
