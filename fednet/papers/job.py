"""What `fednet reproduce` is asked for, and the runs that follow from it.

Runs of one seed are paired: partition, initial weights and participants follow from the seed, not
from the method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fednet import papers, places
from fednet.config import reading
from fednet.config.reading import expand
from fednet.config.tree import compose, wrap
from fednet.errors import ConfigError, unknown
from fednet.papers import mini as small
from fednet.papers.mini import mini
from fednet.papers.tables import Cell
from fednet.plain import JsonDict, JsonMapping
from fednet.registry import algorithm
from fednet.sweep import marks
from fednet.sweep.marks import RunSpec

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
        "each cell has its own method; --add puts another beside them, and "
        "--set algorithm.KEY=VALUE changes a key of them",
    ),
}
LOOKS = 20  # evaluations in a run of which only the end is in the table


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line. table: PAPER/TABLE; list, gather, plan: what is done instead of running;
    dataset, setting, only, add, open: which cells; grid: values for the search; set: for every run.
    """

    table: str = ""
    list: bool = False
    gather: bool = False
    plan: bool = False
    dataset: str | None = None
    only: Sequence[str] | None = None
    add: Sequence[str] = ()
    open: bool = False
    seeds: Sequence[int] | None = None
    scale: str = "full"
    jobs: int = 1
    device: str = "auto"
    setting: str | None = None
    search: bool = False
    grid: Sequence[str] = ()
    set: Sequence[str] = ()
    load: Sequence[str] = ()
    out: Path = field(default_factory=places.runs)
    quiet: bool = False


@dataclass(frozen=True)
class Reproduction:
    """The cells asked for, and how. added: names of methods that are not in the paper; chosen:
    cell's name -> settings that a search chose; changed: what `--set` changed.
    """

    table: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    scale: str
    added: frozenset[str] = frozenset()
    chosen: Mapping[str, JsonMapping] | None = None
    changed: str = ""

    @property
    def stem(self) -> str:
        return self.table.replace("/", "-") + ("-mini" if self.scale == "mini" else "")

    def folder(self, out: Path) -> Path:
        return out / (self.cells[0].paper + ("-mini" if self.scale == "mini" else ""))

    def runs(self, out: Path) -> list[tuple[Cell, int, RunSpec]]:
        """The runs ordered by seed, so that what is cut short has whole comparisons."""
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


def plan(asked: Request) -> Reproduction:
    """The job that the command line asks for. Raises ConfigError for names that are not there, and
    keys and values that a run of it would refuse.
    """
    for text in asked.set:
        if why := OWN.get(text.partition("=")[0].strip()):
            raise ConfigError(f"--set {text}: {why}.")
    cells = [c for c in papers.cells(asked.table) if asked.search or not c.by_search]
    name = f"{cells[0].paper}/{cells[0].table}"
    cells = _of_setting(_of_dataset(cells, asked.dataset), asked.setting, name)
    added = dict(own_method(text) for text in asked.add)
    own = {c.name: c.method for c in papers.cells(name)}
    wanted = _wanted(cells, asked, added)
    chosen = [*_of_methods(cells, wanted), *_beside(cells, added, own, name)]
    runs = {c.name for c in chosen}  # a table of ablations has some of the choices itself
    opened = [v for v in _open(cells, asked.open, wanted) if v.name not in runs]
    chosen += opened
    if asked.scale == "mini":
        chosen = [mini(c) for c in chosen]
    chosen = [replace(c, config=_evaluated(c, asked.scale)) for c in chosen]
    for c in chosen if asked.set or asked.add else ():
        reading.build(expand(wrap(c.config, c.name)), asked.set, asked.load)
    return Reproduction(
        name,
        tuple(chosen),
        tuple(asked.seeds or [0]),
        asked.scale,
        frozenset([*added, *(c.method for c in opened if c.name not in own)]),
        changed=", ".join(marks.changes(asked.set)),
    )


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
    """The cells that have all of these whole words in their setting: E1 is not E10. In either case,
    and c=2 for #C=2, which a shell takes for a comment.
    """
    if not setting:
        return list(cells)
    found = [c for c in cells if _words(setting) <= _words(_setting(c))]
    if not found:
        there = dict.fromkeys(
            _setting(c).strip() + (" (with --search)" if c.by_search else "")
            for c in papers.cells(name)
        )
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


def _wanted(cells: Sequence[Cell], asked: Request, added: Iterable[str]) -> set[str] | None:
    """The methods that `--only` names, as the table prints them or nearly so; None for all. added:
    names beside the cells'.
    """
    if asked.only is None:
        return None
    opened = dict.fromkeys(v.method for c in cells for v in papers.choices(c))
    there = [*dict.fromkeys(c.method for c in cells), *(opened if asked.open else ()), *added]
    there = list(dict.fromkeys(there))
    wanted, left = set[str](), list(asked.only)
    while left:
        # a name may have a comma of its own
        tried = [(n, _meant(", ".join(left[:n]), there)) for n in range(len(left), 0, -1)]
        n, method = next(((n, m) for n, m in tried if m), (1, None))
        if method is None and _meant(left[0], opened):
            raise ConfigError(f"--only {left[0]}: is run with --open.")
        if method is None:
            raise ConfigError(unknown("method", left[0], there))
        wanted.add(method)
        del left[:n]
    return wanted


def _meant(name: str, there: Iterable[str]) -> str | None:
    """Which of these names it is: letter by letter, or the one that is alike."""
    same = [m for m in there if m.lower() == name.lower()]
    alike = same or [m for m in there if _plain(m) == _plain(name)]
    return alike[0] if len(alike) == 1 else None


def _of_methods(cells: Sequence[Cell], wanted: Collection[str] | None) -> list[Cell]:
    """The cells of these methods, and of those that they are measured against."""
    if wanted is None:
        return list(cells)
    chosen = [c for c in cells if c.method in wanted]
    against = {(*_column(c), c.versus) for c in chosen if c.versus}
    return [*chosen, *(c for c in cells if c not in chosen and (*_column(c), c.method) in against)]


def _open(cells: Sequence[Cell], asked: bool, wanted: Collection[str] | None) -> list[Cell]:
    """What the paper leaves open: of its own method, or what is named of it."""
    found = [v for c in cells for v in papers.choices(c)] if asked else []
    return [
        v for v in found if wanted is None or {v.method, papers.own_method(v.paper)} & {*wanted}
    ]


def _column(cell: Cell) -> tuple[str, str, str]:
    return cell.dataset, cell.variant, cell.heterogeneity


def _beside(
    cells: Sequence[Cell],
    added: Mapping[str, JsonMapping],
    own: Mapping[str, str],
    name: str,
) -> list[Cell]:
    """A cell of each added method in each column of the table. own: method by name of its run."""
    columns: dict[tuple[str, str, str], Cell] = {}
    # The first, which trains as the paper says: a later one may be of no federation, or an ablation
    # with other data.
    for c in cells:
        columns.setdefault(_column(c), c)
    made = []
    for label, mapping in added.items():
        for c in columns.values():
            other = c.swapped(label, mapping)
            if other.name in own:
                raise ConfigError(
                    f"--add {label}: {own[other.name]} of {name} has runs of that name; to tell "
                    f"them apart write out one of its keys, as in '{{name: {mapping['name']}, KEY: "
                    f"VALUE}}'."
                )
            grids = {k: v for k, v in c.grids.items() if not k.startswith("algorithm.")}
            made.append(replace(other, grids=grids))
    return made


def own_method(text: str) -> tuple[str, JsonDict]:
    """`--add mine` or `--add '{name: mine, mu: 0.1}'` as (label, the algorithm's mapping)."""
    value = compose(text, f"--add {text}", one_place=True).plain()
    mapping = {"name": value} if isinstance(value, str) else value
    if not isinstance(mapping, dict) or not isinstance(mapping.get("name"), str):
        raise ConfigError(
            f"--add {text}: expected a method's name, or '{{name: mine, key: value}}'."
        )
    algorithm.get(mapping["name"])  # an unknown name is answered before anything starts
    return "-".join(
        [mapping["name"], *(f"{k}{v}" for k, v in mapping.items() if k != "name")]
    ), mapping


def _evaluated(cell: Cell, scale: str) -> JsonDict:
    """The cell's configuration with no more evaluation than its figures need.

    A table of the global model's accuracy needs no client's judgement, and every round's: best
    accuracy, and the round of it, are over rounds. A table of personal accuracy needs all clients
    at the end, and in between a curve's points.
    """
    rounds = int(cell.config["rounds"])
    personal = any(m in PERSONAL for m in cell.figures) and cell.paper != "fedrds"
    if scale == "mini":
        looks = small.PERSONAL_LOOKS if personal else small.LOOKS
    else:
        looks = LOOKS if personal else rounds
    section = {"every": max(1, rounds // looks), "clients": "auto" if personal else "none"}
    return papers.lay(
        cell.config,
        {"evaluate": section, "checkpoint": {"every": max(1, rounds // LOOKS), "best": False}},
    )


def _plain(text: str) -> str:
    return "".join(ch for ch in text.lower() if ch.isalnum() or ch == "+")
