"""Turns the command line of `fednet reproduce` into cells and runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fednet import papers
from fednet.config import WHERE, load, to_mapping
from fednet.errors import ConfigError, unknown
from fednet.papers import mini
from fednet.papers.tables import Cell
from fednet.plain import JsonDict
from fednet.sweep.cells import RunSpec

# Measures for which every client has to be evaluated.
PERSONAL = ("pfl_accuracy", "drift_accuracy", "solo_accuracy", "client_accuracy", "points_gained")
OWN = {
    "seed": "--seeds says with which seeds a table is run",
    "name": "a run's name says which cell it is",
    "algorithm": "each cell has its own method; --set algorithm.KEY=VALUE changes a key of them",
}
EVALUATIONS = 20  # in a run of which only the end is in the table


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
        found = []
        for seed in self.seeds:
            for cell in self.cells:
                own = {"name": f"{cell.config['name']}-seed{seed}", "seed": seed}
                found.append((cell, seed, RunSpec({**cell.config, **own}, self.folder(out))))
        return found

    def versus(self, cell: Cell) -> Cell | None:
        """Returns the cell of the same column whose method this cell's is compared with."""
        return next(
            (c for c in self.cells if c.method == cell.versus and c.column == cell.column), None
        )


def choose(asked: argparse.Namespace) -> Reproduction:
    """Chooses the cells that the command line asks for. Raises ConfigError for unknown names, and
    for keys and values that a run would refuse.
    """
    for text in asked.set:
        if why := OWN.get(text.partition("=")[0].strip()):
            raise ConfigError(f"--set {text}: {why}.")
    every = [c for c in papers.cells(asked.table) if not c.no_run]
    name = f"{every[0].paper}/{every[0].table}"
    cells = every
    if asked.dataset:  # as the paper or as the configuration calls it
        wanted = _plain(asked.dataset)
        cells = [
            c for c in cells if wanted in map(_plain, (c.dataset, c.config["data"]["dataset"]))
        ]
        if not cells:
            known = dict.fromkeys(c.dataset for c in every)
            raise ConfigError(unknown("dataset", asked.dataset, known))
    if asked.setting:  # in whole words: E1 is not E10
        words = set(asked.setting.lower().split())
        cells = [c for c in cells if words <= set(f"{c.variant} {c.heterogeneity}".lower().split())]
        if not cells:
            there = dict.fromkeys(f"{c.variant} {c.heterogeneity}".strip() for c in every)
            raise ConfigError(
                f"--setting {asked.setting}: no cell of {name} has that in its setting; they are "
                f"{', '.join(there)}."
            )
    if asked.only is not None:
        methods = _named_methods(cells, asked.only)
        chosen = [c for c in cells if c.method in methods]
        against = {(*c.column, c.versus) for c in chosen}
        others = [c for c in cells if (*c.column, c.method) in against and c not in chosen]
        cells = [*chosen, *others]
    if asked.scale == "mini":
        cells = _distinct([mini.mini(c) for c in cells])
    cells = [replace(c, config=_with_needed_evaluations(c, asked.scale)) for c in cells]
    for text in asked.set:
        if (
            text.partition("=")[0].strip() == "algorithm.name"
            and len({c.method for c in cells}) > 1
        ):
            raise ConfigError(
                f"--set {text}: each cell has its own method; --only names one of them."
            )
    if asked.set or asked.load:
        built = [load(c.config, asked.set, asked.load, c.name) for c in cells]
        cells = [replace(c, config=to_mapping(config)) for c, config in zip(cells, built)]
    return Reproduction(
        name,
        tuple(cells),
        tuple(asked.seeds or [0]),
        asked.scale,
        changed=", ".join(s for s in asked.set if s.partition("=")[0].strip() not in WHERE),
    )


def _distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells without those that are another one's run: where the mini scale replaces a
    network by that of another column.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        run = json.dumps({**cell.config, "name": ""}, sort_keys=True)
        found.setdefault(run, cell)
    return list(found.values())


def _named_methods(cells: Sequence[Cell], only: Sequence[str]) -> set[str]:
    """Returns the methods that `--only` names, as the table prints them or nearly so."""
    known = dict.fromkeys(c.method for c in cells)
    wanted = set[str]()
    left = list(only)
    while left:
        # A method's name may itself contain a comma, so that the longest match is taken.
        for count in range(len(left), 0, -1):
            name = ", ".join(left[:count])
            alike = [m for m in known if m.lower() == name.lower()]
            alike = alike or [m for m in known if _plain(m) == _plain(name)]
            if len(alike) == 1:
                break
        else:
            raise ConfigError(unknown("method", left[0], known))
        wanted.add(alike[0])
        del left[:count]
    return wanted


def _with_needed_evaluations(cell: Cell, scale: str) -> JsonDict:
    """Returns the cell's configuration with no more evaluation than its figures need.

    A table of the global model's accuracy needs it after every round, since the best accuracy and
    its round are over rounds, and needs no client's evaluation. A table of personal accuracy needs
    all clients at the end, and in between the points of a curve.
    """
    rounds = int(cell.config["rounds"])
    personal = any(m in PERSONAL for m in cell.figures) and cell.paper != "fedrds"
    if scale == "mini":
        evaluations = mini.PERSONAL_EVALUATIONS if personal else mini.EVALUATIONS
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
