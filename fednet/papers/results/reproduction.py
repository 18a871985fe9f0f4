"""The rows behind a paper's table: what each measure of a cell is on a run, as CSV.

A row is one run. Rows are plain mappings of text and numbers, as they stand in the CSV, so that the
tables can be made again from the CSV alone. Accuracies are in percent there, as in the papers.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.files import write_aside
from fednet.papers.results.measures import measured, percent
from fednet.plain import JsonDict, JsonMapping
from fednet.report import costs, metrics

if TYPE_CHECKING:
    from fednet.papers import Cell
    from fednet.report.read import Run

FIXED = (
    "table",
    "scale",
    "method",
    "in_paper",
    "dataset",
    "heterogeneity",
    "variant",
    "seed",
    "status",
    "measure",
    "paper",
    "ours",
    "best",
    "best_round",
    "last10",
    "final",
    "pfl",
    "drift",
    "class_spread",
    "max_drop",
    "avg_drop",
    "avg_increase",
    "rounds",
    "mb",
    "seconds",
    "seconds_per_round",
    "device",
    "hyperparameters",
    "changed",
)
CURVE = (
    "method",
    "dataset",
    "heterogeneity",
    "variant",
    "seed",
    "round",
    "mb",
    "accuracy",
    "personal_accuracy",
    "test_loss",
    "train_loss",
)
KEY = ("method", "dataset", "heterogeneity", "variant", "seed", "changed")  # which run a row is of


SPREADS = ("class_spread", "max_drop", "avg_drop", "avg_increase")


# -- rows ------------------------------------------------------------------------------------------
def row(
    cell: Cell,
    seed: int,
    scale: str,
    run: Run | None,
    *,
    in_paper: bool = True,
    versus: Run | None = None,
    status: str = "done",
    hyperparameters: JsonMapping | None = None,
    changed: str = "",
) -> JsonDict:
    """What stands in the CSV for one run; `run` None: `status` is "failed: why" or "not run". The
    arguments are columns; versus: the run that this one is compared with.
    """
    out: JsonDict = dict.fromkeys(FIXED)
    out |= {
        "table": f"{cell.paper}/{cell.table}",
        "scale": scale,
        "method": cell.method,
        "in_paper": "yes" if in_paper else "no",
        "dataset": cell.dataset,
        "heterogeneity": cell.heterogeneity,
        "variant": cell.variant,
        "seed": seed,
        "status": status,
        "measure": cell.measure,
        "paper": cell.figure,
        "hyperparameters": json.dumps(dict(hyperparameters or {})),
        "changed": changed,
    }
    found = {
        name: None if run is None else measured(name, run, versus, cell.target_round)
        for name in cell.figures
    }
    if run is not None:
        s, (top, at) = metrics.summary(run), metrics.best(metrics.curve(run)) or (None, None)
        curve = metrics.curve(run)
        out |= {
            "ours": found.get(cell.measure or ""),
            "best": percent(top),
            "best_round": at,
            "last10": percent(metrics.last(curve)[0]),
            "final": percent(metrics.final(curve)),
            "pfl": measured("pfl_accuracy", run),
            "drift": measured("drift_accuracy", run),
            **{k: measured(k, run) for k in SPREADS},
            "rounds": len(run.rounds),
            "mb": s["bytes"]["mb"],
            "seconds": s["seconds"],
            "seconds_per_round": s["seconds_per_round"],
            "device": device(run),
        }
    for name, paper in list(cell.figures.items())[1:]:
        out |= {f"paper:{name}": paper, f"ours:{name}": found[name]}
    return {
        k: round(v, 4) if isinstance(v, float) and math.isfinite(v) else v for k, v in out.items()
    }


def device(run: Run) -> str | None:
    """Where the clients trained. The summary alone would say where the run was ended, which a
    resumed one may be elsewhere.
    """
    joined = {str(e["device"]) for e in run.events if e.type == "joined" and "device" in e.details}
    ended: JsonMapping = run.summary.provenance or {}
    return ", ".join(sorted(joined)) or ended.get("device")


def curves(cell: Cell, seed: int, run: Run) -> list[JsonDict]:
    """The run's curves, a row an evaluated round. Accuracies in percent."""
    by, spent = (
        {
            y: dict(metrics.curve(run, y))
            for y in ("accuracy", "personal_accuracy", "test_loss", "train_loss")
        },
        costs.cost(run, "mb"),
    )
    rounds = sorted({t for y in ("accuracy", "personal_accuracy") for t in by[y]})
    here = {
        "method": cell.method,
        "dataset": cell.dataset,
        "heterogeneity": cell.heterogeneity,
        "variant": cell.variant,
        "seed": seed,
    }
    shown = {"accuracy": 100.0, "personal_accuracy": 100.0, "test_loss": 1.0, "train_loss": 1.0}
    return [
        {
            **here,
            "round": t,
            "mb": round(spent[t], 3),
            **{
                y: None if by[y].get(t) is None else round(f * by[y][t], 4)
                for y, f in shown.items()
            },
        }
        for t in rounds
    ]


def as_csv(rows: Sequence[JsonMapping], columns: Sequence[str] = FIXED) -> str:
    """Rows as CSV: the columns given, then whatever else the rows have."""
    more = list(dict.fromkeys(k for r in rows for k in r if k not in columns))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*columns, *more], lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_csv(path: Path) -> list[JsonDict]:
    """Rows as `as_csv` wrote them; what is a number is one, what is empty is None."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: _value(v) for k, v in r.items()} for r in csv.DictReader(file)]


def merge(target: Path, new: Sequence[JsonMapping], columns: Sequence[str]) -> None:
    """Rows of the same run are replaced, others stay. What was not run replaces nothing that
    was.
    """
    old = read_csv(target) if target.exists() else []
    known = {identity(r) for r in old if not unrun(r)}
    new = [r for r in new if not (unrun(r) and identity(r) in known)]
    by_run: dict[tuple[str, ...], list[JsonMapping]] = {}
    for r in new:
        by_run.setdefault(identity(r), []).append(r)
    replaced = set(by_run)
    out: list[JsonMapping] = []
    for r in old:  # in their places: a table must not change its order with what was run last
        k = identity(r)
        out += by_run.pop(k, []) if k in replaced else [r]
    write_aside(target, as_csv([*out, *(r for rs in by_run.values() for r in rs)], columns))


def plain(method: str) -> str:
    """The method's name without what a search chose for it."""
    return method.partition(" [")[0]


def unrun(row: JsonMapping) -> bool:
    """Whether it has no figure yet, of a run that may still come or be compared."""
    return str(row.get("status") or "").startswith(("not run", "not compared"))


def identity(row: JsonMapping) -> tuple[str, ...]:
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed" or "changed" in row)


def run_of(row: JsonMapping) -> tuple[str, ...]:
    """Which run a row is of, or a curve's, whatever was changed."""
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed")


def add(path: Path, entries: JsonMapping) -> None:
    """Entries into a JSON mapping; others stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_aside(path, json.dumps({**known, **entries}, indent=1) + "\n")


def _value(text: str | None) -> str | int | float | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text
