"""A paper's table beside ours: what each measure of a cell is on a run, and the table as text, CSV
and Markdown.

A row is one run. Rows are plain mappings of text and numbers, as they stand in the CSV, so that the
tables can be made again from the CSV alone. Accuracies are in percent there, as in the papers.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednet.files import write_aside
from fednet.papers.measures import measured, percent
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
NEAR = 1.0  # points, which one seed does not tell apart
COUNTS = ("rounds_to_target", "best_round", "flat_after_round", "steady_after_round")  # of rounds
LESS_IS_BETTER = (
    "class_spread",
    "rounds_to_target",
    "seconds_per_round",
    "best_round",
    "flat_after_round",
    "steady_after_round",
    "final_train_loss",
    "emd",
)


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
    hyperparameters: Mapping[str, Any] | None = None,
    changed: str = "",
) -> dict[str, Any]:
    """What stands in the CSV for one run; `run` None: `status` is "failed: why" or "not run"."""
    out: dict[str, Any] = dict.fromkeys(FIXED)
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
            "last10": percent(metrics.last(curve)),
            "final": percent(metrics.final(curve)),
            "pfl": measured("pfl_accuracy", run),
            "drift": measured("drift_accuracy", run),
            **{
                k: measured(k, run)
                for k in ("class_spread", "max_drop", "avg_drop", "avg_increase")
            },
            "rounds": len(run.rounds),
            "mb": s["bytes"]["mb"],
            "seconds": s["seconds"],
            "seconds_per_round": s["seconds_per_round"],
            "device": (s.get("provenance") or {}).get("device"),
        }
    for name, paper in list(cell.figures.items())[1:]:
        out |= {f"paper:{name}": paper, f"ours:{name}": found[name]}
    return {
        k: round(v, 4) if isinstance(v, float) and math.isfinite(v) else v for k, v in out.items()
    }


def curves(cell: Cell, seed: int, run: Run) -> list[dict[str, Any]]:
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


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = FIXED) -> str:
    """Rows as CSV: the columns given, then whatever else the rows have."""
    more = list(dict.fromkeys(k for r in rows for k in r if k not in columns))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*columns, *more], lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows as `as_csv` wrote them; what is a number is one, what is empty is None."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: _value(v) for k, v in r.items()} for r in csv.DictReader(file)]


def merge(target: Path, new: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Rows of the same run are replaced, others stay. What was not run replaces nothing that
    was.
    """
    old = read_csv(target) if target.exists() else []
    known = {identity(r) for r in old if not unrun(r)}
    new = [r for r in new if not (unrun(r) and identity(r) in known)]
    by_run: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for r in new:
        by_run.setdefault(identity(r), []).append(r)
    replaced = set(by_run)
    out: list[Mapping[str, Any]] = []
    for r in old:  # in their places: a table must not change its order with what was run last
        k = identity(r)
        out += by_run.pop(k, []) if k in replaced else [r]
    write_aside(target, as_csv([*out, *(r for rs in by_run.values() for r in rs)], columns))


def plain(method: str) -> str:
    """The method's name without what a search chose for it."""
    return method.partition(" [")[0]


def unrun(row: Mapping[str, Any]) -> bool:
    return str(row.get("status") or "").startswith("not run")


def identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed" or "changed" in row)


def run_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Which run a row is of, or a curve's, whatever was changed."""
    return tuple(str(row.get(k) or "") for k in KEY if k != "changed")


def add(path: Path, entries: Mapping[str, Any]) -> None:
    """Entries into a JSON mapping; others stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_aside(path, json.dumps({**known, **entries}, indent=1) + "\n")


def _value(text: str | None) -> Any:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


# -- the table -------------------------------------------------------------------------------------
def grouped(
    rows: Iterable[Mapping[str, Any]],
) -> dict[tuple[str, ...], dict[str, list[Mapping[str, Any]]]]:
    """Column (dataset, variant, heterogeneity) -> method -> its rows, one a seed."""
    found: dict[tuple[str, ...], dict[str, list[Mapping[str, Any]]]] = {}
    for r in rows:
        column = tuple(str(r[k] or "") for k in ("dataset", "variant", "heterogeneity"))
        # Another run than the one without.
        name = str(r["method"]) + (f" [{r['changed']}]" if r["changed"] else "")
        found.setdefault(column, {}).setdefault(name, []).append(r)
    return found


HEAD = (
    "dataset",
    "setting",
    "method",
    "paper",
    "ours",
    "difference",
    "best",
    "at round",
    "last 10",
    "final",
    "personal",
    "drift",
    "rounds",
    "MB",
    "seconds",
    "seeds",
)


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(heading, lines): a line a method and column; ± is the standard deviation over seeds. Empty
    columns are left out.
    """
    lines = []
    for (dataset, variant, heterogeneity), methods in grouped(rows).items():
        for method, runs in methods.items():
            done = [r for r in runs if r["status"] == "done"]
            paper = runs[0]["paper"]
            ours = mean(done, "ours")
            name = method + ("" if runs[0]["in_paper"] == "yes" else " (not in the paper)")
            word, _, reason = ("", "", "") if done else str(runs[0]["status"]).partition(": ")
            measure = str(runs[0]["measure"] or "")
            left = sum(unrun(r) for r in runs) if done else 0
            seeds = ",".join(str(s) for s in sorted(int(r["seed"]) for r in done)) + (
                f" ({left} not run)" if left else ""
            )
            text = told(done, "ours", measure) if done else word
            # The mean is then of those that got there.
            alike = runs[0]["scale"] != "mini" and not runs[0]["changed"] and "never" not in text
            apart = (
                f"{ours - paper:+.2f}" if alike and ours is not None and paper is not None else ""
            )
            lines.append(
                [
                    dataset,
                    " ".join(p for p in (variant, heterogeneity) if p),
                    name,
                    _text(paper),
                    text,
                    apart,
                    spread(done, "best"),
                    _text(mean(done, "best_round"), 0),
                    spread(done, "last10"),
                    spread(done, "final"),
                    spread(done, "pfl"),
                    spread(done, "drift"),
                    _text(mean(done, "rounds"), 0),
                    _text(mean(done, "mb"), 1),
                    _text(mean(done, "seconds"), 1),
                    seeds if done else reason,
                ]
            )
    kept = [i for i in range(len(HEAD)) if any(line[i] for line in lines)]
    return [HEAD[i] for i in kept], [[line[i] for i in kept] for line in lines]


def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    return math.fsum(values) / len(values) if values else None


def deviation(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Sample standard deviation over the rows; None for fewer than two."""
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    if len(values) < 2:
        return None
    m = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1))


def spread(rows: Sequence[Mapping[str, Any]], key: str, digits: int = 2) -> str:
    m, s = mean(rows, key), deviation(rows, key)
    return "" if m is None else f"{m:.{digits}f}" + ("" if s is None else f" ± {s:.{digits}f}")


def told(rows: Sequence[Mapping[str, Any]], key: str, measure: str) -> str:
    """A measure's mean and spread over seeds as it reads; who never got to a target is in no mean,
    and is said.
    """
    text = spread(rows, key, 0 if measure in COUNTS and len(rows) < 2 else 2)
    never = sum(r.get(key) is None for r in rows) if measure == "rounds_to_target" else 0
    return (
        text + (f" ({never} of {len(rows)} never)" if never else "")
        if text or not never
        else "never"
    )


def _text(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def standing(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Our figure of a method, for its place among the others: the mean, or where some seeds never
    got to the target the median with those as infinite; the mean of the others would put it before
    a method that always gets there.
    """
    done = [r for r in runs if r["status"] == "done"]
    never = any(r["ours"] is None and r["measure"] == "rounds_to_target" for r in done)
    return (
        statistics.median(math.inf if r["ours"] is None else float(r["ours"]) for r in done)
        if never
        else mean(done, "ours")
    )


def ranked(
    methods: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Each method once: at the table's own values where it was run at these too, else as its search
    chose.
    """
    return {m: runs for m, runs in methods.items() if plain(m) == m or plain(m) not in methods}


def order(
    methods: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[int, int, bool | None] | None:
    """(pairs in the paper's order, pairs, whether ours has the same first): over the methods with
    both figures; None for fewer than two. A pair that the paper prints as equal is left out. The
    last is None where the paper's first was not run.
    """
    both, printed = [], []
    methods = ranked(methods)
    for runs in methods.values():
        ours = standing(runs)
        if runs[0]["paper"] is None or runs[0]["changed"]:
            continue
        printed.append(float(runs[0]["paper"]))
        if ours is not None:
            both.append((printed[-1], ours))
    pairs = [
        (a, b)
        for a, b in itertools.combinations(both, 2)
        if a[0] != b[0] and not a[1] == b[1] == math.inf
    ]
    if not pairs:
        return None
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    sign = -1 if next(iter(methods.values()))[0]["measure"] in LESS_IS_BETTER else 1
    first, best = max(both, key=lambda p: sign * p[1]), max(sign * p for p in printed)
    return (
        agree,
        len(pairs),
        sign * first[0] == best if any(sign * p == best for p, _ in both) else None,
    )


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    head, lines = table(rows)
    wide = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    left = [i for i, name in enumerate(head) if name in ("dataset", "setting", "method", "seeds")]
    out = [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, wide))
        ).rstrip()
        for line in (head, *lines)
    ]
    return "\n".join([*out, "", *notes(rows)])


def as_md(rows: Sequence[Mapping[str, Any]], scale_said: bool = False) -> str:
    """scale_said: what mini scale is stands elsewhere on the page."""
    head, lines = table(rows)
    bar = ["---" if name in ("dataset", "setting", "method", "seeds") else "---:" for name in head]
    return (
        "\n".join(
            ["| " + " | ".join(line) + " |" for line in (head, bar, *lines)]
            + ["", *(f"- {n}" for n in notes(rows, scale_said))]
        )
        + "\n"
    )


def notes(rows: Sequence[Mapping[str, Any]], scale_said: bool = False) -> list[str]:
    """What a reader of the table has to know: the scale, what was changed, whose order agrees."""
    out = []
    if any(r["scale"] == "mini" for r in rows) and not scale_said:
        from fednet.papers.mini import SAID

        out.append(SAID[0].upper() + SAID[1:])
    out.append(
        f"`paper` and `ours`: {_measures(rows)}. Accuracies in percent; MB (10^6 bytes) over all "
        f"clients, both directions; "
        "best is the maximum over rounds on the test set, the papers' rule where they name one; "
        "last 10 is the mean of the last ten evaluated rounds."
    )
    if any(
        sum(r["status"] == "done" for r in runs) > 1
        for methods in grouped(rows).values()
        for runs in methods.values()
    ):
        out.append("±: the sample standard deviation over seeds (n - 1).")
    if any(r["measure"] == "rounds_to_target" for r in rows):
        out.append(
            "Rounds to a target: the first evaluated round at or above the accuracy that FedAvg "
            "has in the paper's round (at mini scale: in "
            "its last), unsmoothed. As curves swing, FedAvg itself may be there before that "
            "round, where the papers print the round."
        )
    if any(r["pfl"] is not None for r in rows):
        out.append(
            "`personal`: each client's own model on its own test samples; `drift`: the same "
            "models on class-balanced test samples; best, "
            "last 10 and final are of the global model."
        )
    if chosen := _searched(rows):
        out.append(
            f"At the winners of a search over the paper's grids, or what --grid gave instead: "
            f"{chosen}."
        )
    if changed := sorted({str(r["changed"]) for r in rows if r["changed"]}):
        out.append(f"Changed from the paper's setting: {'; '.join(changed)}.")
    for column, methods in grouped(rows).items():
        if leads := paired(methods):
            out.append(f"{' '.join(p for p in column if p)}: {leads}.")
    for column, methods in grouped([r for r in rows if r["scale"] != "mini"]).items():
        found = order(methods)
        if found is not None:
            out.append(
                f"{' '.join(p for p in column if p)}: {found[0]} of {found[1]} pairs of methods "
                f"stand in the paper's order{_near(methods)}; "
                f"{_first(methods)}."
            )
    return out


def paired(methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What the table's own method is ahead of each other one, seed by seed: "FedDC less FedAvg
    +3.10 ± 0.42, ... (3 seeds)". The methods share partition, initial weights and participants
    within a seed, so that this says more than the spread of either. Empty for fewer than two seeds
    of both, and for what is not an accuracy.
    """
    found: dict[str, dict[int, float]] = {
        m: {
            int(r["seed"]): float(r["ours"])
            for r in runs
            if r["status"] == "done" and r["ours"] is not None
        }
        for m, runs in methods.items()
        if "accuracy" in str(runs[0]["measure"])
    }
    own = next(
        (m for m, runs in methods.items() if m.lower() == str(runs[0]["table"]).partition("/")[0]),
        None,
    )
    parts = []
    for method, values in found.items():
        seeds = sorted(values.keys() & found.get(own or "", {}).keys())
        if own is None or method == own or len(seeds) < 2:
            continue
        leads = [{"lead": found[own][s] - values[s]} for s in seeds]
        parts.append(
            f"less {method} {mean(leads, 'lead'):+.2f} ± {deviation(leads, 'lead'):.2f} "
            f"({len(seeds)})"
        )
    return (
        f"{own}'s lead seed by seed (mean ± standard deviation, seeds): {', '.join(parts)}"
        if parts
        else ""
    )


def _measures(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `ours` is: the measure of most rows, then whose is another."""
    found: dict[str, list[str]] = {}
    for r in rows:
        found.setdefault(str(r["measure"]), []).append(str(r["method"]))
    most = max(found, key=lambda m: len(found[m]))
    others = [
        f"{m} of {', '.join(dict.fromkeys(methods))}" for m, methods in found.items() if m != most
    ]
    return f"{most} ({'; '.join(others)})" if others else most


def _searched(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whose hyper-parameters a search chose: "FedProx alpha=0.2: train.lr 0.1, algorithm.mu 0.01;
    ...". Seeds that differ in them, searched apart or only one of them searched, are told apart.
    """
    chosen: dict[str, dict[str, list[str]]] = {}
    for r in (r for r in rows if not unrun(r)):
        who = " ".join(str(r[k]) for k in ("dataset", "variant", "heterogeneity", "method") if r[k])
        point = ", ".join(
            f"{k} {v}" for k, v in json.loads(str(r.get("hyperparameters") or "{}")).items()
        )
        chosen.setdefault(who, {}).setdefault(point, []).append(str(r["seed"]))
    return "; ".join(
        f"{who}: "
        + (
            next(iter(by))
            if len(by) == 1
            else "; ".join(
                f"{point or 'not searched'} (seed {','.join(seeds)})" for point, seeds in by.items()
            )
        )
        for who, by in chosen.items()
        if any(by)
    )


def _near(methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """How many pairs of accuracies are too close here to say much."""
    both = [
        (runs[0]["paper"], v)
        for runs in ranked(methods).values()
        if runs[0]["paper"] is not None
        and not runs[0]["changed"]
        and str(runs[0]["measure"]).endswith("accuracy")
        and (v := standing(runs)) is not None
    ]
    near = sum(a[0] != b[0] and abs(a[1] - b[1]) < NEAR for a, b in itertools.combinations(both, 2))
    return f" ({near} pair{'s' if near > 1 else ''} within {NEAR:g} point here)" if near else ""


def _first(methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Who is best in the paper and who is here, and of how many methods."""
    methods = ranked(methods)
    sign = -1 if next(iter(methods.values()))[0]["measure"] in LESS_IS_BETTER else 1
    printed = {
        m: sign * float(runs[0]["paper"])
        for m, runs in methods.items()
        if runs[0]["paper"] is not None and not runs[0]["changed"]
    }
    ours = {m: sign * v for m in printed if (v := standing(methods[m])) is not None}
    theirs = ", ".join(m for m, v in printed.items() if v == max(printed.values()))
    seeds = {frozenset(str(r["seed"]) for r in methods[m] if r["status"] == "done") for m in ours}
    of = f", of the {len(ours)} methods run of {len(printed)}" if len(ours) < len(printed) else ""
    unlike = " (not all over the same seeds)" if len(seeds) > 1 else ""
    best = max(ours, key=lambda m: ours[m])
    return f"best in the paper: {theirs}; best here: {best}{of}{unlike}"
