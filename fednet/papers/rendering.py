"""The paper's table beside ours, as text and as Markdown, with what a reader has to know of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fednet.papers.mini import DESCRIPTION
from fednet.papers.results import unrun
from fednet.plain import JsonMapping

# Of rounds; also what begins with rounds_to_.
COUNTS = ("best_round", "flat_after_round", "steady_after_round")
LEGEND = (  # what a reader of any of these tables has to know
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


# -- rows by method -------------------------------------------------------------------------------
def targeted(measure: object) -> bool:
    """Whether it is what it took to a target, which a run may never get to."""
    return str(measure).startswith(("rounds_to_", "mb_to_"))


def grouped(
    rows: Iterable[JsonMapping],
) -> dict[tuple[str, ...], dict[str, list[JsonMapping]]]:
    """Column (dataset, variant, heterogeneity) -> method -> its rows, one a seed."""
    found: dict[tuple[str, ...], dict[str, list[JsonMapping]]] = {}
    for r in rows:
        column = tuple(str(r[k] or "") for k in ("dataset", "variant", "heterogeneity"))
        # Another run than the one without.
        name = str(r["method"]) + (f" [{r['changed']}]" if r["changed"] else "")
        found.setdefault(column, {}).setdefault(name, []).append(r)
    return found


def mean(rows: Sequence[JsonMapping], key: str) -> float | None:
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    return math.fsum(values) / len(values) if values else None


def deviation(rows: Sequence[JsonMapping], key: str) -> float | None:
    """Sample standard deviation over the rows; None for fewer than two."""
    values = [float(r[key]) for r in rows if r.get(key) is not None]
    if len(values) < 2:
        return None
    m = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1))


# -- the table -------------------------------------------------------------------------------------
def table(rows: Sequence[JsonMapping]) -> tuple[list[str], list[list[str]]]:
    """(heading, lines): a line a method and setting; ± is the standard deviation over seeds. Empty
    columns are left out, and settings of `unbegun`, which `notes` names.
    """
    lines, left_out = [], unbegun(rows)
    for (dataset, variant, heterogeneity), methods in grouped(rows).items():
        if (dataset, variant, heterogeneity) in left_out:
            continue
        for method, runs in methods.items():
            done = [r for r in runs if r["status"] == "done"]
            paper = runs[0]["paper"]
            ours = mean(done, "ours")
            name = method if runs[0].get("in_paper") != "no" else f"{method} (not in the paper)"
            word, _, reason = ("", "", "") if done else str(runs[0]["status"]).partition(": ")
            measure = str(runs[0]["measure"] or "")
            left = Counter(str(r["status"]).partition(":")[0] for r in runs if unrun(r))
            seeds = ",".join(str(s) for s in sorted(int(r["seed"]) for r in done)) + (
                f" ({', '.join(f'{n} {state}' for state, n in left.items())})" if left else ""
            )
            text = reading(done, "ours", measure) if done else word
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


def unbegun(rows: Sequence[JsonMapping]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """By setting of which no run was begun, its methods; none where that is so of all."""
    found = grouped(rows)
    left = {
        column: tuple(methods)
        for column, methods in found.items()
        if all(r["status"] == "not run" for runs in methods.values() for r in runs)
    }
    return left if len(left) < len(found) else {}


def spread(rows: Sequence[JsonMapping], key: str, digits: int = 2) -> str:
    m, s = mean(rows, key), deviation(rows, key)
    return "" if m is None else f"{m:.{digits}f}" + ("" if s is None else f" ± {s:.{digits}f}")


def reading(rows: Sequence[JsonMapping], key: str, measure: str) -> str:
    """A measure's mean and spread over seeds as text. Runs that never reached a target are in no
    mean, and are counted.
    """
    counted = measure in COUNTS or measure.startswith("rounds_to_")
    text = spread(rows, key, 0 if counted and len(rows) < 2 else 2)
    never = sum(r.get(key) is None for r in rows) if targeted(measure) else 0
    return (
        text + (f" ({never} of {len(rows)} never)" if never else "")
        if text or not never
        else "never"
    )


def _text(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def as_text(rows: Sequence[JsonMapping]) -> str:
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


def as_md(rows: Sequence[JsonMapping], legend: bool = True) -> str:
    """legend: False where the page has `LEGEND` and what the mini scale is."""
    head, lines = table(rows)
    bar = ["---" if name in ("dataset", "setting", "method", "seeds") else "---:" for name in head]
    return (
        "\n".join(
            ["| " + " | ".join(line) + " |" for line in (head, bar, *lines)]
            + ["", *(f"- {n}" for n in notes(rows, legend))]
        )
        + "\n"
    )


def notes(rows: Sequence[JsonMapping], legend: bool = True) -> list[str]:
    """Lines below the table: the scale, what is shown, what was changed."""
    out = []
    alike: dict[tuple[str, ...], list[str]] = {}  # settings by their methods
    for column, names in unbegun(rows).items():
        alike.setdefault(names, []).append(" ".join(p for p in column if p))
    if alike:
        left = (f"{', '.join(which)}: {', '.join(names)}" for names, which in alike.items())
        out.append(f"Not run here: {'; '.join(left)}.")
    if legend and any(r["scale"] == "mini" for r in rows):
        out.append(DESCRIPTION[0].upper() + DESCRIPTION[1:])
    out.append(f"`paper` and `ours`: {_measures(rows)}.")
    if legend:
        out += _legend(rows)
    if changed := sorted({str(r["changed"]) for r in rows if r["changed"]}):
        out.append(f"Changed from the paper's setting: {'; '.join(changed)}.")
    return out


def _legend(rows: Sequence[JsonMapping]) -> list[str]:
    """The lines of `LEGEND` that the rows need."""
    figures, deviation, target, personal = LEGEND
    out = [figures]
    by_method = [runs for methods in grouped(rows).values() for runs in methods.values()]
    if any(sum(r["status"] == "done" for r in runs) > 1 for runs in by_method):
        out.append(deviation)
    if any(r["measure"] == "rounds_to_target" for r in rows):
        out.append(target)
    if any(r["pfl"] is not None for r in rows):
        out.append(personal)
    return out


def _measures(rows: Sequence[JsonMapping]) -> str:
    """What `ours` is: the measure of most rows, then whose is another."""
    found: dict[str, list[str]] = {}
    for r in rows:
        found.setdefault(str(r["measure"]), []).append(str(r["method"]))
    most = max(found, key=lambda m: len(found[m]))
    others = [
        f"{m} of {', '.join(dict.fromkeys(methods))}" for m, methods in found.items() if m != most
    ]
    return f"{most} ({'; '.join(others)})" if others else most
