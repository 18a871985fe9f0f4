"""Prints the paper's numbers beside ours, as text and as Markdown, with notes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from fednet.papers.mini import DESCRIPTION
from fednet.papers.results import unrun
from fednet.plain import JsonMapping, align

# Of rounds; also what begins with rounds_to_.
COUNTS = ("best_round", "flat_after_round", "steady_after_round")
LEGEND = (  # notes below the tables
    "Accuracies in percent; MB (10^6 bytes) over all clients, both directions; best is the maximum "
    "over rounds on the test set, the papers' rule where they name one; last 10 is the mean of the "
    "last ten evaluated rounds, of all where there are fewer.",
    "±: the sample standard deviation over seeds (n - 1).",
    "Rounds to a target: the first evaluated round at or above the accuracy that FedAvg has in the "
    "paper's round (at mini scale: in its last), unsmoothed. As curves swing, FedAvg itself may be "
    "there before that round, where the papers print the round.",
    "`personal`: each client's own model on its own test samples; `drift`: the same models on "
    "class-balanced test samples; best, last 10 and final are of the global model.",
)
WORDS = ("dataset", "setting", "method", "seeds")  # columns of text; the others are numbers


# -- rows by method -------------------------------------------------------------------------------
def is_cost_to_target(measure: object) -> bool:
    """Whether a measure is the cost to reach a target, which a run may never reach."""
    return str(measure).startswith(("rounds_to_", "mb_to_"))


def group_by_column(
    rows: Iterable[JsonMapping],
) -> dict[tuple[str, ...], dict[str, list[JsonMapping]]]:
    """Column (dataset, variant, heterogeneity) -> method -> its rows, one a seed."""
    found: dict[tuple[str, ...], dict[str, list[JsonMapping]]] = {}
    for r in rows:
        column = tuple(str(r[k] or "") for k in ("dataset", "variant", "heterogeneity"))
        found.setdefault(column, {}).setdefault(method_label(r), []).append(r)
    return found


def method_label(row: JsonMapping) -> str:
    """Returns the method of a row and what was changed, which makes it another run."""
    return str(row["method"]) + (f" [{row['changed']}]" if row["changed"] else "")


def mean(rows: Sequence[JsonMapping], key: str) -> float | None:
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    return statistics.fmean(values) if values else None


def deviation(rows: Sequence[JsonMapping], key: str) -> float | None:
    """Returns the sample standard deviation over the rows; None for fewer than two."""
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    return statistics.stdev(values) if len(values) > 1 else None


# -- the table -------------------------------------------------------------------------------------
def table(rows: Sequence[JsonMapping]) -> tuple[list[str], list[list[str]]]:
    """Returns (heading, lines): a line for each setting and method; ± is the standard deviation
    over seeds. Empty columns are left out, and settings of `unbegun`, which `notes` names.
    """
    found = []
    left_out = unbegun(rows)
    for column, methods in group_by_column(rows).items():
        if column not in left_out:
            dataset, *setting = column
            place = {"dataset": dataset, "setting": " ".join(p for p in setting if p)}
            found += [{**place, **_line(method, runs)} for method, runs in methods.items()]
    heading = [name for name in found[0] if any(line[name] for line in found)] if found else []
    return heading, [[line[name] for name in heading] for line in found]


def _line(method: str, runs: Sequence[JsonMapping]) -> dict[str, str]:
    """Returns a method's texts by column. runs: its rows, one for each seed."""
    first = runs[0]
    done = [r for r in runs if r["status"] == "done"]
    paper = first["paper"]
    ours = mean(done, "ours")
    difference = ""
    if done:
        text = reading(done, "ours", str(first["measure"] or ""))
        seeds = ",".join(str(seed) for seed in sorted(int(r["seed"]) for r in done))
        left = Counter(str(r["status"]).partition(":")[0] for r in runs if unrun(r))
        if left:
            seeds += f" ({', '.join(f'{n} {state}' for state, n in left.items())})"
    else:
        text, _, seeds = str(first["status"]).partition(": ")  # the reason instead of seeds
    as_printed = first["scale"] != "mini" and not first["changed"]
    # If a run never reached its target, the mean is of the others.
    if as_printed and "never" not in text and ours is not None and paper is not None:
        difference = f"{ours - paper:+.2f}"
    return {
        "method": f"{method} ({first['label']})" if first.get("label") else method,
        "paper": _text(paper),
        "ours": text,
        "difference": difference,
        "best": spread(done, "best"),
        "at round": _text(mean(done, "best_round"), 0),
        "last 10": spread(done, "last10"),
        "final": spread(done, "final"),
        "personal": spread(done, "pfl"),
        "drift": spread(done, "drift"),
        "rounds": _text(mean(done, "rounds"), 0),
        "MB": _text(mean(done, "mb"), 1),
        "seconds": _text(mean(done, "seconds"), 1),
        "seeds": seeds,
    }


def unbegun(rows: Sequence[JsonMapping]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns the settings of which no run was begun, with their methods; empty if all are such."""
    found = group_by_column(rows)
    left = {
        column: tuple(methods)
        for column, methods in found.items()
        if all(r["status"] == "not run" for runs in methods.values() for r in runs)
    }
    return left if len(left) < len(found) else {}


def spread(rows: Sequence[JsonMapping], key: str, digits: int = 2) -> str:
    m = mean(rows, key)
    s = deviation(rows, key)
    if m is None:
        return ""
    text = f"{m:.{digits}f}"
    return text if s is None else f"{text} ± {s:.{digits}f}"


def reading(rows: Sequence[JsonMapping], key: str, measure: str) -> str:
    """Returns a measure's mean and spread over seeds as text. Runs that never reached a target are
    in no mean, and are counted.
    """
    counted = measure in COUNTS or measure.startswith("rounds_to_")
    text = spread(rows, key, 0 if counted and len(rows) < 2 else 2)
    never = sum(r.get(key) is None for r in rows) if is_cost_to_target(measure) else 0
    if never:
        return f"{text} ({never} of {len(rows)} never)" if text else "never"
    return text


def _text(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def as_text(rows: Sequence[JsonMapping]) -> str:
    """Returns the table and its notes as text."""
    head, lines = table(rows)
    numbers = [i for i, name in enumerate(head) if name not in WORDS]
    return "\n".join([*align([head, *lines], numbers), "", *notes(rows)])


def as_md(rows: Sequence[JsonMapping]) -> str:
    """Returns the table and its notes as Markdown, for a page that has `LEGEND` and the description
    of the mini scale elsewhere.
    """
    head, lines = table(rows)
    bar = ["---" if name in WORDS else "---:" for name in head]
    text = ["| " + " | ".join(line) + " |" for line in (head, bar, *lines)]
    return "\n".join([*text, "", *(f"- {n}" for n in notes(rows, legend=False))]) + "\n"


def notes(rows: Sequence[JsonMapping], legend: bool = True) -> list[str]:
    """Returns the lines below the table: the scale, the measures, the changed settings."""
    out = []
    alike: dict[tuple[str, ...], list[str]] = {}  # settings by their methods
    for column, names in unbegun(rows).items():
        alike.setdefault(names, []).append(" ".join(p for p in column if p))
    if alike:
        left = (f"{', '.join(which)}: {', '.join(names)}" for names, which in alike.items())
        out.append(f"Not run here: {'; '.join(left)}.")
    if legend and any(r["scale"] == "mini" for r in rows):
        out.append(DESCRIPTION[0].upper() + DESCRIPTION[1:])
    # The measure of most rows, and the methods whose measure is another.
    found: dict[str, list[str]] = {}
    for r in rows:
        found.setdefault(str(r["measure"]), []).append(str(r["method"]))
    most = max(found, key=lambda m: len(found[m]))
    others = [
        f"{m} of {', '.join(dict.fromkeys(methods))}" for m, methods in found.items() if m != most
    ]
    measures = f"{most} ({'; '.join(others)})" if others else most
    out.append(f"`paper` and `ours`: {measures}.")
    if legend:  # those of its lines that the rows need
        figures, deviation, target, personal = LEGEND
        out.append(figures)
        by_method = [
            runs for methods in group_by_column(rows).values() for runs in methods.values()
        ]
        if any(sum(r["status"] == "done" for r in runs) > 1 for runs in by_method):
            out.append(deviation)
        if any(r["measure"] == "rounds_to_target" for r in rows):
            out.append(target)
        if any(r["pfl"] is not None for r in rows):
            out.append(personal)
    if changed := sorted({str(r["changed"]) for r in rows if r["changed"]}):
        out.append(f"Changed from the paper's setting: {'; '.join(changed)}.")
    return out
