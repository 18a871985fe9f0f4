"""Papers' settings and printed figures: FedPDC, FedABC, FedDC, FedDPC, FedRDS, and the tables that
the field compares with (`fednet.papers.field`).

`tables.yaml` and `field.yaml` hold what they print. `bases/` holds one runnable configuration a
results table. `cells("feddpc/table2")` puts the two together: every combination of
method, dataset and heterogeneity, with the whole configuration of its run and the figures that the
paper prints for it.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType

import yaml

from fednet.errors import ConfigError, unknown
from fednet.papers.cell import Cell, lay
from fednet.plain import JsonDict

__all__ = [
    "FIELD",
    "LOSSES",
    "NAMES",
    "NO_RUNS",
    "Cell",
    "base",
    "caption",
    "cells",
    "elsewhere",
    "folder",
    "lay",
    "printed",
    "with_results",
]

NAMES = {
    "fedpdc": "FedPDC",
    "fedabc": "FedABC",
    "feddc": "FedDC",
    "feddpc": "FedDPC",
    "fedrds": "FedRDS",
    "niidbench": "NIID-Bench",
    "mcmahan": "McMahan et al.",
    "pflib": "PFLlib",
    "fedsmu": "FedSMU",
    "gas": "GAS",
}
FIELD = ("niidbench", "mcmahan", "pflib", "fedsmu", "gas")  # in `fednet.papers.field`
NO_RUNS = {
    "feddpc/table1": "computation cost in O notation",
    "feddc/figure7_text": "the class counts of one client of the authors' own partition",
}
LOSSES = (  # figures of the papers with panels of training loss
    *(f"feddpc/{t}" for t in ("table2", "figure3", "figure4", "figure5", "figure6")),
    *(f"fedrds/{t}" for t in ("table3", "figure4")),
    "fedrds/text_section43",
)
HERE = Path(__file__).parent


@functools.cache
def printed() -> JsonDict:
    """What the papers print: paper (`fedpdc`, ...) -> title, settings, tables, anomalies. Not to be
    changed.
    """
    whole = {**_read(HERE / "tables.yaml")["papers"], **_read(HERE / "field.yaml")["papers"]}
    return {key: whole[title] for key, title in NAMES.items()}


@functools.cache
def elsewhere() -> list[JsonDict]:
    """The values that other sources print for cells of these tables, one mapping a line: table,
    variant, heterogeneity, source, values by method.
    """
    found: list[JsonDict] = _read(HERE / "field.yaml")["elsewhere"]
    return found


def with_results() -> list[str]:
    """The tables and figures that runs stand behind: `fedpdc/table2`, ..., `fedrds/figure7`."""
    return [f"{paper}/{table}" for paper in NAMES for table in _builders(paper)]


def caption(name: str) -> str:
    """What the table is about, in the paper's words where it has some."""
    paper, table = _split(name)
    found = printed()[paper]["tables"].get(table, {}).get("caption", "")
    return str(found or getattr(_module(paper), "CAPTIONS", {}).get(table, ""))


def base(name: str) -> JsonDict:
    """The configuration that all cells of a table start from, as a mapping
    under the configuration's keys.
    """
    paper, table = _split(name)
    return _extended(folder() / paper / f"{table}.yaml")


def cells(name: str) -> list[Cell]:
    """Every cell of a table such as `feddpc/table2`. Raises ConfigError for a name that is none of
    `with_results()`.
    """
    paper, table = _split(name)
    return list(_builders(paper)[table](base(name), printed()[paper]["tables"].get(table, {})))


def folder() -> Path:
    """Where the tables' configurations lie."""
    return HERE / "bases"


def _split(name: str) -> tuple[str, str]:
    known = with_results()
    found = next((k for k in known if k.lower() == name.lower()), None)
    if found is None:
        if name.lower() in NO_RUNS:
            raise ConfigError(f"{name} has no runs behind it: it prints {NO_RUNS[name.lower()]}.")
        raise ConfigError(unknown("table", name, known))
    paper, _, table = found.partition("/")
    return paper, table


def _builders(paper: str) -> JsonDict:
    """The builders by name: tables and figures with numbers in the paper, then figures whose
    numbers it does not print.
    """
    module = _module(paper)
    return {**module.TABLES, **getattr(module, "FIGURES", {})}


def _module(paper: str) -> ModuleType:
    folder = "field." if paper in FIELD else ""
    return importlib.import_module(f"fednet.papers.{folder}{paper}")


def _extended(path: Path) -> JsonDict:
    own = _read(path)
    below = own.pop("extends", None)
    return own if below is None else lay(_extended(path.parent / below), own)


def _read(path: Path) -> JsonDict:
    found: JsonDict = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
