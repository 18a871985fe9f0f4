"""Computes a cell's measures (see `papers.Cell`) on its runs, and reads and writes a table's CSV.

A row is one run: a mapping of texts and numbers as in the CSV, so that a table can be printed from
the CSV alone. Accuracies are in percent there, as in the papers.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.files import write_aside
from fednet.plain import JsonDict, JsonMapping
from fednet.report import costs, metrics

if TYPE_CHECKING:
    from fednet.papers import Cell
    from fednet.report.read import Run

FLAT = 0.001  # of accuracy
STEADY_SHARE = 0.05  # of the loss of the first round
COMPARED = ("points_gained", "rounds_to_target", "speedup")  # with another run of the same seed
KEY = ("method", "dataset", "heterogeneity", "variant", "seed")  # which run a row is of
FIXED = (
    "table",
    "scale",
    *KEY,
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
    "changed",
)
# In percent or not, by metric.
FACTORS = {"accuracy": 100, "personal_accuracy": 100, "test_loss": 1, "train_loss": 1}
CURVE = (*KEY, "round", "mb", *FACTORS)


# -- measures --------------------------------------------------------------------------------------
def measure(
    name: str, run: Run, versus: Run | None = None, target_round: int | None = None
) -> float | None:
    """Returns a measure of a cell (see `papers.Cell`) on a run, in the papers' units: accuracies in
    percent. None if the run does not have it.
    """
    if name in COMPARED:
        if versus is None:
            return None
        if name == "points_gained":
            ours, theirs = (
                metrics.accuracies(r).get("personal", _best(r)[0]) for r in (run, versus)
            )
            return None if ours is None or theirs is None else 100 * float(ours - theirs)
        reached = metrics.speedup(run, versus, target_round)
        if reached is None:
            return None
        return reached[0] if name == "rounds_to_target" else reached[1]
    if name in MEASURES:
        value = MEASURES[name](run)
    else:
        found = re.fullmatch(r"(accuracy_at|accuracy_in|rounds_to|mb_to)_(\d+)", name)
        assert found is not None, name
        a = metrics.curve(run)
        number = int(found[2])
        if found[1] == "accuracy_at":  # the best until then
            value = max((v for t, v in a if t <= number), default=None)
        elif found[1] == "accuracy_in":
            value = dict(a).get(number)
        else:
            value = metrics.to_target(run, number / 100, found[1].removesuffix("_to"))
    in_percent = name.startswith("accuracy_") or name.endswith("_accuracy") or name in SPREADS
    return percent(value) if in_percent else value


def _best(run: Run) -> tuple[float | None, int | None]:
    """Returns (accuracy, round)."""
    return metrics.best(metrics.curve(run)) or (None, None)


def _mean_accuracy(run: Run) -> float | None:
    a = metrics.curve(run)
    return math.fsum(v for _, v in a) / len(a) if a else None


def _flat_after_round(run: Run) -> int | None:
    """Returns the first round from which on no later accuracy is more than 0.1 points above the
    best so far.
    """
    a = metrics.curve(run)
    top = max((v for _, v in a), default=0.0)
    return next((t for t, _ in a if top - max(w for s, w in a if s <= t) <= FLAT), None)


def _steady_after_round(run: Run) -> int | None:
    """Returns the last round whose training loss is above the one before by more than 5 % of the
    first round's.
    """
    losses = metrics.curve(run, "train_loss")
    if not losses:
        return None
    rise = STEADY_SHARE * losses[0][1]
    late = [t for (_, before), (t, loss) in itertools.pairwise(losses) if loss - before > rise]
    return max(late, default=losses[0][0])


def emd(run: Run) -> float | None:
    """Returns the mean over clients of the L1 distance of their class shares to those of all
    clients together. Samples shared with the clients have the class shares of all data.
    """
    counts = np.asarray(run.partition.get("samples_by_class") or [], dtype=np.float64)
    if counts.ndim != 2 or not counts.sum():
        return None
    whole = counts.sum(0) / counts.sum()
    alpha = float(run.config["algorithm"].get("alpha", 0.0))
    held = counts + alpha * float(run.partition.get("public") or 0) * whole
    shares = held / held.sum(1, keepdims=True)
    return float(np.abs(shares - whole).sum(1).mean())


# Those that need no number and no other run; accuracies 0..1.
MEASURES: dict[str, Callable[[Run], float | None]] = {
    "final_accuracy": lambda run: metrics.final(metrics.curve(run)),
    "best_accuracy": lambda run: _best(run)[0],
    "best_round": lambda run: _best(run)[1],
    "mean_accuracy": _mean_accuracy,
    "flat_after_round": _flat_after_round,
    "pfl_accuracy": lambda run: metrics.accuracies(run).get("personal"),
    "drift_accuracy": lambda run: metrics.accuracies(run).get("balanced"),
    "solo_accuracy": lambda run: metrics.accuracies(run).get("balanced"),
    "client_accuracy": lambda run: metrics.accuracies(run).get("global"),
    "class_spread": metrics.class_spread,
    "max_drop": lambda run: metrics.differences(metrics.curve(run))["max_drop"],
    "avg_drop": lambda run: metrics.differences(metrics.curve(run))["avg_drop"],
    "avg_increase": lambda run: metrics.differences(metrics.curve(run))["avg_increase"],
    "final_train_loss": lambda run: metrics.final(metrics.curve(run, "train_loss")),
    "steady_after_round": _steady_after_round,
    "seconds_per_round": lambda run: metrics.summary(run).seconds_per_round,
    "emd": emd,
}
SPREADS = ("class_spread", "max_drop", "avg_drop", "avg_increase")  # in percentage points


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


# -- rows ------------------------------------------------------------------------------------------
def key_of(cell: Cell, seed: int) -> JsonDict:
    """Returns which run a row is of, by the columns of KEY."""
    return dict(zip(KEY, (cell.method, cell.dataset, cell.heterogeneity, cell.variant, seed)))


def row(
    cell: Cell,
    seed: int,
    scale: str,
    run: Run | None,
    versus: Run | None = None,
    status: str = "done",
    changed: str = "",
) -> JsonDict:
    """Returns the CSV's row of one run; `run` None: `status` is "failed: why" or "not run". The
    arguments are columns; versus: the run that this one is compared with.
    """
    out: JsonDict = dict.fromkeys(FIXED)
    out |= {
        "table": f"{cell.paper}/{cell.table}",
        "scale": scale,
        **key_of(cell, seed),
        "status": status,
        "measure": cell.measure,
        "paper": cell.figure,
        "changed": changed,
    }
    found = {
        name: None if run is None else measure(name, run, versus, cell.target_round)
        for name in cell.figures
    }
    if run is not None:
        s = metrics.summary(run)
        curve = metrics.curve(run)
        top, at = _best(run)
        out |= {
            "ours": found.get(cell.measure or ""),
            "best": percent(top),
            "best_round": at,
            "last10": percent(metrics.last(curve)[0]),
            "final": percent(metrics.final(curve)),
            "pfl": measure("pfl_accuracy", run),
            "drift": measure("drift_accuracy", run),
            **{k: measure(k, run) for k in SPREADS},
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
    """Returns the devices that trained; a run may be resumed on another. A run whose clients report
    nothing has no lines of clients: its server names them, as a cell is one process.
    """
    found = {r.device for r in run.lines("clients") if r.device}
    if not found:
        started = [e.details["versions"] for e in run.lines("events") if e.type == "started"]
        found = {versions["device"] for versions in started if versions.get("device")}
    return ", ".join(sorted(found)) or None


def curves(cell: Cell, seed: int, run: Run) -> list[JsonDict]:
    """Returns the run's curves, one row for each evaluated round. Accuracies in percent."""
    by_round = {y: dict(metrics.curve(run, y)) for y in FACTORS}
    spent = costs.cost(run, "mb")
    rows = []
    for t in sorted({*by_round["accuracy"], *by_round["personal_accuracy"]}):
        row = {**key_of(cell, seed), "round": t, "mb": round(spent[t], 3)}
        for y, factor in FACTORS.items():
            value = by_round[y].get(t)
            row[y] = None if value is None else round(factor * value, 4)
        rows.append(row)
    return rows


def read_csv(path: Path) -> list[JsonDict]:
    """Rows as `merge` wrote them; what is a number is one, what is empty is None."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: _value(v) for k, v in r.items()} for r in csv.DictReader(file)]


def merge(target: Path, new: Sequence[JsonMapping], columns: Sequence[str]) -> None:
    """Rows of the same run are replaced in their places, since a table must not change its order
    with what was run last; others stay. What was not run replaces nothing that was.
    """
    found = by_run(read_csv(target) if target.exists() else [])
    for key, own in by_run(new).items():
        if key not in found or unrun(found[key][0]) or not unrun(own[0]):
            found[key] = own
    rows = [r for own in found.values() for r in own]
    more = list(dict.fromkeys(k for r in rows for k in r if k not in columns))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*columns, *more], lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_aside(target, out.getvalue())


def unrun(row: JsonMapping) -> bool:
    """Whether it has no figure yet, of a run that may still come or be compared."""
    return str(row.get("status") or "").startswith(("not run", "not compared"))


def run_of(row: JsonMapping) -> tuple[str, ...]:
    """Which run a row is of, or a curve's, whatever was changed."""
    return tuple(str(row.get(k) or "") for k in KEY)


def identity(row: JsonMapping) -> tuple[str, ...]:
    return (*run_of(row), str(row.get("changed") or ""))


def by_run(rows: Iterable[JsonMapping]) -> dict[tuple[str, ...], list[JsonMapping]]:
    """Returns the rows by `identity`, in the order of their first."""
    found: dict[tuple[str, ...], list[JsonMapping]] = {}
    for row in rows:
        found.setdefault(identity(row), []).append(row)
    return found


def _value(text: str | None) -> str | int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text or "")
    return text or None
