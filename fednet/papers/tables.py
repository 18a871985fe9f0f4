"""The papers' tables, from one YAML file a paper.

    title, settings, anomalies   what the paper states, and what is doubtful in print
    base                         the configuration that all cells start from
    changes                      words -> what they change in it
    mini                         words -> the settings that the mini scale does not change
    grids                        words -> key.path -> the values that the paper searched
    tables                       by name

A cell has four words: method, dataset, heterogeneity, variant (any of them may be empty). A line
whose key is `A & B` counts for the cells that have both words, `all` for every cell. All lines that
count are applied, in their order, those of the paper before those of the table.

    caption                      what the table is about
    no_runs                      why there are no runs behind it; then nothing else is needed
    shown_by                     of a figure: the table whose runs it shows
    base, changes, mini          as of the paper, for this table
    at                           the words that all cells share
    by                           which words the levels of `cells` are; `variant heterogeneity` is
                                 two words, parted at the space. Where nothing is printed: for each
                                 level its words, of which every combination is a cell
    columns                      the last level's words, where its figures are a list
    measures                     what is measured (see `Cell`); the first is what the table is about
    versus, target_round,        see `Cell`; these three and `measures` may be given by words, of
    no_run                       which the last that counts is taken
    cells                        the figures: one, or a list with one for each measure
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fednet.config.reading import merge
from fednet.config.tree import wrap
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict, JsonMapping

DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion-mnist",
    "SVHN": "svhn",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Tiny-ImageNet": "tiny-imagenet",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run behind a table.

    Measures: final_accuracy, best_accuracy, best_round, accuracy_at_T (the best up to round T),
    accuracy_in_T (in round T itself), solo_accuracy (mean over clients on the global test set),
    pfl_accuracy, drift_accuracy, class_spread, max_drop, avg_drop, avg_increase, rounds_to_target,
    speedup, seconds_per_round, flat_after_round, steady_after_round, points_gained (over `versus`),
    client_accuracy (the global model on the clients' own test samples), rounds_to_P and mb_to_P (to
    P percent for the first time), mean_accuracy (over all rounds), final_train_loss, emd (class
    shares of the clients).
    """

    paper: str
    table: str
    method: str
    dataset: str
    heterogeneity: str
    config: JsonDict
    """Its whole configuration, in the configuration's keys, for `fednet.config.from_mapping`."""
    figures: dict[str, float | None] = field(default_factory=dict)
    """By measure, what the paper prints (accuracies in percent), None where it prints none. The
    first is the one the table is about.
    """
    variant: str = ""  # what else tells it from its neighbours: a model, a number of epochs
    versus: str | None = None
    """The cell's method is measured against this method of the same column."""
    target_round: int | None = None
    """It is measured by the accuracy that `versus` has after so many rounds."""
    kept: JsonDict = field(default_factory=dict)
    """The settings that the mini scale does not change."""
    no_run: bool = False
    """The figure is the best of several settings that the paper does not name, so that nothing can
    be run.
    """

    @property
    def name(self) -> str:
        """The name of the run, of letters that a directory may have. Two tables that print the same
        run have the same name for it.
        """
        words = (self.paper, self.dataset, self.variant, self.heterogeneity, self.method)
        text = "-".join(w.replace("+", "plus").replace(" ", "-") for w in words if w)
        return re.sub(r"[^A-Za-z0-9._=-]", "", text).lower()

    @property
    def column(self) -> tuple[str, str, str]:
        """What it shares with the cells of other methods that it is compared with."""
        return self.dataset, self.variant, self.heterogeneity

    @property
    def measure(self) -> str | None:
        """What the table is about."""
        return next(iter(self.figures), None)

    @property
    def figure(self) -> float | None:
        """What the paper prints for `measure`."""
        return self.figures[self.measure] if self.measure else None


def lay(below: JsonMapping, over: JsonMapping) -> JsonDict:
    """Returns the configuration `below` with the keys of `over`, as a file has those of the file
    that it extends.
    """
    found: JsonDict = merge(wrap(below, ""), wrap(over, "")).plain()
    return found


# -- the descriptions ------------------------------------------------------------------------------
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
FIELD = ("niidbench", "mcmahan", "pflib", "fedsmu", "gas")  # what the field compares with
WORDS = ("method", "dataset", "heterogeneity", "variant")


@functools.cache
def paper(key: str) -> JsonDict:
    """Returns the description of a paper (`fedpdc`, ...). Not to be changed."""
    path = Path(__file__).parent / f"{key}.yaml"
    found: JsonDict = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def with_results() -> list[str]:
    """Returns the tables and figures that have runs: `fedpdc/table2`, ..., `gas/table1`."""
    return [
        f"{key}/{name}"
        for key in NAMES
        for name, table in paper(key)["tables"].items()
        if "no_runs" not in table
    ]


def no_runs() -> dict[str, str]:
    """Returns the tables without runs, and what they print."""
    return {
        f"{key}/{name}": str(table["no_runs"])
        for key in NAMES
        for name, table in paper(key)["tables"].items()
        if "no_runs" in table
    }


def table(name: str) -> JsonDict:
    """Returns the description of a table that has runs, such as `feddpc/table2`. Raises ConfigError
    for another name.
    """
    key, _, title = _check_table_name(name).partition("/")
    found: JsonDict = paper(key)["tables"][title]
    return found


def caption(name: str) -> str:
    """Returns the table's caption, in the paper's words where it has some."""
    return str(table(name)["caption"])


def cells(name: str) -> list[Cell]:
    """Returns every cell of a table such as `feddpc/table2`, in the order of its runs. Raises
    ConfigError for a name that is none of `with_results()`.
    """
    key, _, title = _check_table_name(name).partition("/")
    described = paper(key)
    own = described["tables"][title]
    found = []
    for words, figures in _printed_cells(own):
        config = lay(described["base"], own.get("base", {}))
        config = lay(config, {"data": {"dataset": DATASETS[words["dataset"]]}})
        kept: JsonDict = {}
        for source in (described, own):
            for change in _counting(source.get("changes", {}), words):
                config = lay(config, change)
            for change in _counting(source.get("mini", {}), words):
                kept = lay(kept, change)
        measures = _last(own["measures"], words)
        cell = Cell(
            paper=key,
            table=title,
            config=config,
            figures=dict(itertools.zip_longest(measures, figures)),
            versus=_last(own.get("versus"), words),
            target_round=_last(own.get("target_round"), words),
            kept=kept,
            no_run=bool(_last(own.get("no_run"), words)),
            **words,
        )
        found.append(replace(cell, config={**config, "name": cell.name}))
    return found


def grid(cell: Cell) -> dict[str, list[Any]]:
    """Returns the values that the paper searched for this cell, by dotted key; empty for none."""
    words = {word: str(getattr(cell, word)) for word in WORDS}
    found: dict[str, list[Any]] = {}
    for values in _counting(paper(cell.paper).get("grids", {}), words):
        found |= values
    return found


def _printed_cells(table: JsonMapping) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Yields (words, figures) of each cell of a table, in the table's order."""
    shared = {**dict.fromkeys(WORDS, ""), **table.get("at", {})}
    levels = table["by"]
    if isinstance(levels, Mapping):
        for combination in itertools.product(*levels.values()):
            yield {**shared, **dict(zip(levels, combination, strict=True))}, []
        return
    for values, found in _leaves(table["cells"], len(levels), table.get("columns")):
        words = dict(shared)
        for level, value in zip(levels, values, strict=True):
            names = level.split(" ")
            parts = value.split(" ", len(names) - 1)
            words |= dict(zip(names, parts, strict=True))
        yield words, found if isinstance(found, list) else [found]


def _leaves(tree: Any, depth: int, columns: list[str] | None) -> Iterator[tuple[list[str], Any]]:
    """Yields (the names on the way, what is there) at a depth of a tree of mappings, whose last
    level may be a list under the names of the columns; a list may end early.
    """
    if depth == 0:
        yield [], tree
        return
    if depth == 1 and columns:
        if len(tree) > len(columns):
            raise ValueError(f"{tree} has more figures than the columns {columns}")
        tree = dict(zip(columns, tree))
    for name, below in tree.items():
        for names, leaf in _leaves(below, depth - 1, columns):
            yield [name, *names], leaf


def _counting(lines: JsonMapping, words: Mapping[str, str]) -> list[Any]:
    """Returns the values of the lines whose words the cell has."""
    have = {"all", *words.values()}
    return [value for key, value in lines.items() if have >= set(key.split(" & "))]


def _last(given: Any, words: Mapping[str, str]) -> Any:
    """Returns a value that may be given by words: then the last that counts, None if none does."""
    if not isinstance(given, Mapping):
        return given
    counting = _counting(given, words)
    return counting[-1] if counting else None


def _check_table_name(name: str) -> str:
    """Returns the table's name as it is written in the YAML file, from a name in any case."""
    known = with_results()
    found = next((k for k in known if k.lower() == name.lower()), None)
    if found is not None:
        return found
    for other, why in no_runs().items():
        if other.lower() == name.lower():
            raise ConfigError(f"{other} has no runs behind it: it prints {why}.")
    raise ConfigError(unknown("table", name, known))
