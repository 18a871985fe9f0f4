"""What came of a table's runs: the measures of a cell (see `papers.Cell`) on a run, and the rows of
a table as CSV.

A row is one run. Rows are plain mappings of text and numbers, as they stand in the CSV, so that the
tables can be made again from the CSV alone. Accuracies are in percent there, as in the papers.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.files import write_aside
from fednet.plain import JsonDict, JsonMapping
from fednet.report import costs, metrics

if TYPE_CHECKING:
    from fednet.papers import Cell
    from fednet.report.read import Run

FLAT_POINTS = 0.1
STEADY_SHARE = 0.05  # of the loss of the first round
COMPARED = ("points_gained", "rounds_to_target", "speedup")  # with another run of the same seed
FIXED = (
    "table",
    "scale",
    "method",
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


# -- measures --------------------------------------------------------------------------------------
def measured(
    name: str, run: Run, versus: Run | None = None, target_round: int | None = None
) -> float | None:
    """A measure of a cell (see `papers.Cell`) on a run, in the papers' units; None where the run
    does not have it.

    flat_after_round: the first round from which on no later accuracy is more than 0.1 points above
    the best so far. steady_after_round: the last round whose training loss is above the one
    before by more than 5 % of the first round's. mean_accuracy: over all evaluated rounds. emd:
    mean over clients of the L1 distance of their class shares, with what is shared, to those of all
    clients together. points_gained: of the personal accuracy where the run has one, else of the
    best accuracy.
    """
    a = metrics.curve(run)
    if name in ("pfl_accuracy", "drift_accuracy", "solo_accuracy"):
        own = metrics.personal(run) or {}
        return percent(own.get("pfl" if name == "pfl_accuracy" else "drift"))
    if name == "client_accuracy":
        return percent(metrics.pooled(metrics.latest(run, "global").values(), "global"))
    if name == "seconds_per_round":
        return metrics.summary(run).seconds_per_round
    if name == "points_gained":
        ours, theirs = _standing(run), None if versus is None else _standing(versus)
        return None if ours is None or theirs is None else ours - theirs
    if name in ("final_train_loss", "steady_after_round"):
        return of_loss(name, metrics.curve(run, "train_loss"))
    if name == "emd":
        return emd(run)
    if not a:
        return None
    if match := re.fullmatch(r"accuracy_(at|in)_(\d+)", name):
        T = int(match[2])
        if match[1] == "in":
            return percent(dict(a).get(T))
        return percent(max((v for t, v in a if t <= T), default=None))
    if match := re.fullmatch(r"(rounds|mb)_to_(\d+)", name):
        return metrics.to_target(run, int(match[2]) / 100, match[1])
    if name in ("rounds_to_target", "speedup"):
        reached = None if versus is None else metrics.speedup(run, versus, target_round)
        if reached is None:
            return None
        return reached[0] if name == "rounds_to_target" else reached[1]
    if name in ("max_drop", "avg_drop", "avg_increase"):
        return percent(metrics.differences(a)[name])
    top = metrics.best(a)
    assert top is not None
    plain: JsonDict = {
        "final_accuracy": lambda: percent(metrics.final(a)),
        "best_accuracy": lambda: percent(top[0]),
        "mean_accuracy": lambda: percent(math.fsum(v for _, v in a) / len(a)),
        "best_round": lambda: top[1],
        "class_spread": lambda: percent(metrics.class_spread(run)),
        "flat_after_round": lambda: next(
            t for t, v in a if 100 * (top[0] - max(w for s, w in a if s <= t)) <= FLAT_POINTS
        ),
    }
    value: float | None = plain[name]()
    return value


def of_loss(name: str, losses: Sequence[tuple[int, float]]) -> float | None:
    """A measure of the training loss over the rounds; None where there is no loss."""
    if not losses:
        return None
    if name == "final_train_loss":
        return losses[-1][1]
    rise = STEADY_SHARE * losses[0][1]
    late = (t for (_, v), (t, w) in itertools.pairwise(losses) if w - v > rise)
    return max(late, default=losses[0][0])


def emd(run: Run) -> float | None:
    """See `measured`. What is shared has the class shares of all data, as it is drawn by them."""
    counts = np.asarray(run.partition.get("samples_by_class") or [], dtype=np.float64)
    if counts.ndim != 2 or not counts.sum():
        return None
    whole = counts.sum(0) / counts.sum()
    alpha = float(run.config["algorithm"].get("alpha", 0.0))
    held = counts + alpha * float(run.partition.get("public") or 0) * whole
    shares = held / held.sum(1, keepdims=True)
    return float(np.abs(shares - whole).sum(1).mean())


def _standing(run: Run) -> float | None:
    if own := metrics.personal(run):
        return percent(own["pfl"])
    top = metrics.best(metrics.curve(run))
    return percent(top[0]) if top else None


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


# -- rows ------------------------------------------------------------------------------------------
def row(
    cell: Cell,
    seed: int,
    scale: str,
    run: Run | None,
    *,
    versus: Run | None = None,
    status: str = "done",
    changed: str = "",
) -> JsonDict:
    """The CSV's row of one run; `run` None: `status` is "failed: why" or "not run". The
    arguments are columns; versus: the run that this one is compared with.
    """
    out: JsonDict = dict.fromkeys(FIXED)
    out |= {
        "table": f"{cell.paper}/{cell.table}",
        "scale": scale,
        "method": cell.method,
        "dataset": cell.dataset,
        "heterogeneity": cell.heterogeneity,
        "variant": cell.variant,
        "seed": seed,
        "status": status,
        "measure": cell.measure,
        "paper": cell.figure,
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


def unrun(row: JsonMapping) -> bool:
    """Whether it has no figure yet, of a run that may still come or be compared."""
    return str(row.get("status") or "").startswith(("not run", "not compared"))


def identity(row: JsonMapping) -> tuple[str, ...]:
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed" or "changed" in row)


def run_of(row: JsonMapping) -> tuple[str, ...]:
    """Which run a row is of, or a curve's, whatever was changed."""
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed")


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
