"""`fednet compare`: a table of methods, each over its seeds.

A cell is the mean over seeds and the half-width of its 95 % confidence interval. If some seeds
never reach a target, the cell says which ones reached it, and has no mean. In the values, an
infinite cost is a target that was never reached.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fednet.plain import align
from fednet.records import metrics_shown
from fednet.report import costs, metrics
from fednet.report.groups import (
    LONG,
    Group,
    clocks,
    comparable_costs,
    differences_in_pair,
    group,
    pairs,
)
from fednet.report.read import Run

ON_CLIENTS = "on clients"
WIDTH = 120  # characters of a line of text
LISTED = 4  # seeds at most whose values are in a cell


@dataclass(frozen=True)
class Column:
    """A number of each run; None: it does not apply to that run, infinite: never reached. lower:
    whether less is better; None: not known, as for a metric of one's own.
    """

    title: str
    values: dict[Run, float | None]
    digits: int
    lower: bool | None = None


@dataclass(frozen=True)
class TableCell:
    """Values over seeds, and their text. difference: of each pair of runs."""

    values: tuple[float, ...]
    digits: int
    difference: bool = False

    @property
    def got(self) -> list[float]:
        return [v for v in self.values if math.isfinite(v)]

    @property
    def text(self) -> str:
        if not self.values:
            return "-"
        if not self.got:
            return "-" if self.difference else "not reached"
        form = f"{'+' if self.difference else ''}.{self.digits}f"
        if len(self.got) < len(self.values):
            noun = "pairs" if self.difference else "seeds"
            text = f"{len(self.got)} of {len(self.values)} {noun}"
            if len(self.values) > LISTED:
                return text
            each = ", ".join(f"{v:{form}}" if math.isfinite(v) else "-" for v in self.values)
            return f"{text} ({each})"
        mean, half = metrics.interval(self.got)
        return f"{mean:{form}}" + ("" if half is None else f" ±{half:.{self.digits}f}")


@dataclass(frozen=True)
class Table:
    columns: list[Column]
    groups: list[Group]
    cells: list[list[TableCell]]  # (groups, columns)
    differences: list[list[TableCell]]  # (groups - 1, columns): to the first, paired by seed
    notes: list[str]


def table(
    runs: Sequence[Run],
    targets: Sequence[float] = (),
    by: str | None = None,
    bytes: str = "total",
    labels: Sequence[str] = (),
) -> Table:
    """Returns the comparison as values. by: a name of `costs.COSTS`, None: all; bytes: a name of
    `costs.BYTES`; labels: of the methods. Raises ConfigError for a target that is no accuracy.
    """
    for target in targets:
        metrics.check_target(target)
    groups = group(runs, labels)
    units = [x for x in comparable_costs(groups) if by in (None, x)]
    columns = [*_results(runs), *_spent(runs, targets, units, bytes)]
    cells = [
        [TableCell(_without_none(c.values[r] for r in g.runs), c.digits) for c in columns]
        for g in groups
    ]
    apart = []
    for g in groups[1:]:
        both = pairs(groups[0], g)
        row = []
        for c in columns:
            # Not finite if one of the two did not reach the target.
            leads = (_difference(c.values[a], c.values[b]) for a, b in both)
            row.append(TableCell(_without_none(leads), c.digits, difference=True))
        apart.append(row)
    return Table(columns, groups, cells, apart, _notes(groups, runs, targets, bytes))


def _without_none(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(v for v in values if v is not None)


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _results(runs: Sequence[Run]) -> Iterator[Column]:
    """Yields the accuracies and the other metrics. Without a test set at the server, the accuracies
    are those on the clients' tests.
    """

    def column(title: str, of: Callable[[Run], float | None]) -> Column:
        return Column(title, {r: of(r) for r in runs}, 4, lower=False)

    y = metrics.accuracy_metric(runs)
    curves = {r: metrics.curve(r, y) for r in runs}
    losses = {r: metrics.curve(r, "test_loss") for r in runs}
    if any(losses.values()) and not any(curves.values()):
        for title, of in (("final", metrics.final), ("best", _least)):
            values = {r: of(losses[r]) for r in runs}
            yield Column(f"{title} test loss", values, 4, lower=True)
    where = "global" if y == "accuracy" else ON_CLIENTS
    ends = sorted({metrics.last(values)[1] for values in curves.values() if values} or {0})
    many = f"{ends[0]}" if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"
    if y == "accuracy":
        yield column("final global", lambda r: metrics.final(curves[r]))
    if any(_only_clients(r) for r in runs):
        yield column(f"final {ON_CLIENTS}", _on_clients)
    yield column(f"best {where}", lambda r: (metrics.best(curves[r]) or (None,))[0])
    yield column(f"last {many} {where}", lambda r: metrics.last(curves[r])[0])
    own = "/".join(_own_models(runs))
    if own:
        yield column(own, lambda r: metrics.accuracies(r).get("personal"))
    held_out = {r: metrics.accuracies(r, True) for r in runs}
    for name in ("global", "personal", "finetuned"):
        if any(name in found for found in held_out.values()):
            yield Column(
                f"held-out {name}", {r: held_out[r].get(name) for r in runs}, 4, lower=False
            )
    # Of the clients' own models on their own tests, in the evaluation at the end.
    ended = {r: (r.summary.client_metrics or {}).get("personal", {}) for r in runs}
    for name in sorted({name for found in ended.values() for name in found}):
        yield Column(f"{own} {name}", {r: ended[r].get(name) for r in runs}, 4)
    for m in metrics_shown("compare", (row for run in runs for row in run.rounds)):
        values = {r: metrics.final(metrics.curve(r, m.name)) for r in runs}
        if any(v is not None for v in values.values()):
            yield Column(m.full_label(), values, 4, lower=False if m.share else None)


def _least(values: Sequence[tuple[int, float]]) -> float | None:
    return min((value for _, value in values), default=None)


def _spent(
    runs: Sequence[Run], targets: Sequence[float], units: Sequence[str], bytes: str
) -> Iterator[Column]:
    """Yields the costs to the targets, and the MB in all and by kind of payload."""
    y = metrics.accuracy_metric(runs)
    way = "" if bytes == "total" else f" {bytes}"
    seconds = "virtual s" if costs.seconds_key(runs[0]) == "seconds_virtual" else "s"
    names = {"rounds": "rounds", "mb": f"MB{way}", "seconds": seconds}
    for target in targets:
        for unit in units:
            values: dict[Run, float | None] = {}
            for r in runs:
                cost = metrics.to_target(r, target, unit, bytes, y)
                # A run without a curve has no global model, or that was not evaluated.
                never = math.inf if metrics.curve(r, y) else None
                values[r] = never if cost is None else cost
            yield Column(
                f"{names[unit]} to {target:g}", values, 2 if unit == "mb" else 1, lower=True
            )
    totals = {r: costs.ledger(r).total(bytes) for r in runs}
    yield Column(f"MB{way}", {r: n / 1e6 for r, n in totals.items()}, 2, lower=True)
    if bytes == "useful":
        return
    sent = {r: costs.ledger(r).by("kind", **costs.BYTES[bytes]) for r in runs}
    # Those that are a hundredth of the bytes of one of the runs, or more.
    kinds = dict.fromkeys(
        k
        for r in runs
        for k in costs.ledger(r).kinds
        if k != costs.ENVELOPE and sent[r][k] and 100 * sent[r][k] >= totals[r]
    )
    for kind in kinds:
        yield Column(f"MB{way} {kind}", {r: sent[r][kind] / 1e6 for r in runs}, 2)
    rest = {r: totals[r] - sum(sent[r][k] for k in kinds) for r in runs}
    yield Column(f"MB{way} other", {r: n / 1e6 for r, n in rest.items()}, 2)


def _only_clients(run: Run) -> bool:
    """Whether the global model was evaluated at the end, on the clients' tests alone."""
    return not metrics.curve(run) and _on_clients(run) is not None


def _on_clients(run: Run) -> float | None:
    """Returns the global model's accuracy in the last evaluation of each client, pooled."""
    return metrics.accuracies(run).get("global")


def _own_models(runs: Sequence[Run]) -> list[str]:
    """Returns the kinds of the clients' own models, `local` or `personal`, in runs with their
    accuracy.
    """
    return sorted({r.own_model for r in runs if "personal" in metrics.accuracies(r)})


def _notes(
    groups: Sequence[Group], runs: Sequence[Run], targets: Sequence[float], bytes: str
) -> list[str]:
    notes: list[str] = []
    for g in groups[1:]:
        both = pairs(groups[0], g)
        if len(both) < max(len(g.runs), len(groups[0].runs)):
            notes.append(
                f"warning: {g.label} and {groups[0].label} share only the seeds "
                f"{[a.seed for a, _ in both]}; their difference is over these."
            )
        for a, b in both:
            if reasons := differences_in_pair(a, b):
                notes.append(
                    f"warning: {g.label} and {groups[0].label} used different "
                    f"{', '.join(reasons)} (seed {a.seed}), so their difference is not a paired "
                    f"comparison."
                )
    for g in groups:
        if len(set(g.seeds)) < len(g.seeds):
            notes.append(
                f"warning: {g.label} has several runs with the same seed; the interval is not over "
                f"seeds alone."
            )
    live = [r.name for r in runs if not r.finished]
    if live:
        notes.append(f"warning: not finished: {', '.join(live)}.")
    resumed = [r.name for r in runs if len(costs.ledger(r).servers) > 1]
    if resumed and bytes != "useful":
        notes.append(
            f"warning: {', '.join(resumed)} {'was' if len(resumed) == 1 else 'were'} resumed, so "
            f"repeated traffic is counted twice. Use --bytes useful to count each payload once."
        )
    if len(_own_models(runs)) > 1:
        local = [g.label for g in groups if g.runs[0].own_model == "local"]
        notes.append(
            f"local/personal: accuracy on the clients' own test data, of the local models of "
            f"{', '.join(local)} and of the personal models of the others."
        )
    if any(metrics.curve(r) for r in runs):
        notes.append("global: accuracy of the global model, 0 to 1, on the server's test set.")
    if any(_only_clients(r) for r in runs):
        notes.append(
            f"{ON_CLIENTS}: accuracy of the global model, 0 to 1, on the clients' test data, all "
            f"samples together, since the server has no test set. In a round it is that of the "
            f"model that the clients received."
        )
    notes.append("last N: mean global accuracy of the last N evaluated rounds.")
    if targets:
        text = "Targets: the first evaluated round at or above the accuracy (no smoothing)."
        if len(clocks(groups)) > 1:
            text += " Seconds are left out: these runs measure them by different clocks."
        elif groups[0].clock == "seconds_virtual":
            text += " virtual s: seconds of simulated time."
        notes.append(text)
    notes.append(
        f"{costs.what_counts(bytes)}. Kinds of payload are those that are 1 % of a run or more; "
        f"other: the rest, and protocol overhead."
    )
    notes.append("Mean over seeds ± half-width of the 95 % confidence interval (Student t).")
    if len(groups) > 1:
        notes[-1] += " The last rows are differences to the first method, paired by seed."
    return list(dict.fromkeys(notes))


# -- as text --------------------------------------------------------------------------------------
def grid(t: Table) -> list[list[str]]:
    """Returns the head, a row for each group, and a row for each difference."""
    first = t.groups[0].label
    if any(len(g.label) + len(first) > LONG for g in t.groups[1:]):
        first = "first method"
    rows = [["method", "seeds", *(c.title for c in t.columns)]]
    for g, cells in zip(t.groups, t.cells):
        rows.append([g.label, str(len(g.runs)), *(c.text for c in cells)])
    for g, cells in zip(t.groups[1:], t.differences):
        n = max((len(c.got) for c in cells), default=0)
        rows.append([f"{g.label} - {first}", str(n), *(c.text for c in cells)])
    return rows


def as_text(t: Table) -> str:
    """Returns the table as several below each other, if it is wider than WIDTH."""
    rows = grid(t)
    widths = [max(map(len, column)) for column in zip(*rows)]
    blocks = [[0, 1]]
    for i in range(2, len(widths)):
        if len(blocks[-1]) > 2 and sum(widths[j] + 2 for j in [*blocks[-1], i]) - 2 > WIDTH:
            blocks.append([0])
        blocks[-1].append(i)
    lines = []
    for block in blocks:
        part = align([[r[i] for i in block] for r in rows], range(1, len(block)))
        rule = "─" * max(map(len, part))
        part.insert(1, rule)
        if t.differences:
            part.insert(2 + len(t.groups), rule)
        lines += [*part, ""]
    notes = [line for note in t.notes for line in textwrap.wrap(note, WIDTH)]
    return "\n".join([*lines, *notes]) + "\n"


def as_csv(t: Table) -> str:
    """One line for each group and column. Mean, half-width and standard deviation are empty if some
    seeds did not reach the target.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(["method", "versus", "metric", "seeds", "reached", "mean", "half95", "std", "values"])
    sets = [(g.label, "", row) for g, row in zip(t.groups, t.cells)]
    sets += [(g.label, t.groups[0].label, row) for g, row in zip(t.groups[1:], t.differences)]
    for label, versus, row in sets:
        for column, cell in zip(t.columns, row):
            whole = cell.got and len(cell.got) == len(cell.values)
            mean, half = metrics.interval(cell.got) if whole else (None, None)
            spread = metrics.deviation(cell.got) if whole else None
            values = " ".join(repr(v) if math.isfinite(v) else "never" for v in cell.values)
            counts = len(cell.values), len(cell.got)
            write([label, versus, column.title, *counts, mean, half, spread, values])
    return out.getvalue()
