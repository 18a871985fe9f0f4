"""`fednet compare`: a table of methods, each over its seeds.

A cell is the mean over seeds and the half-width of its 95 % confidence interval. If some seeds
never reach a target, the cell says which ones reached it, and has no mean. In the values, an
infinite cost is a target that was never reached.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fednet.errors import ConfigError, unknown
from fednet.records import Metric, shown
from fednet.report import costs, metrics
from fednet.report.groups import LONG, Group, clocks, group, pairs, unpaired
from fednet.report.read import Run

ON_CLIENTS = "on clients"
WIDTH = 120  # characters of a line of text
LISTED = 4  # seeds at most whose values are in a cell
FORMATS = ("table", "csv")


@dataclass(frozen=True)
class TableCell:
    """Values over seeds, and their text. difference: of each pair of runs."""

    values: tuple[float, ...]
    digits: int = 4
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
        if len(self.got) < len(self.values):
            noun = "pairs" if self.difference else "seeds"
            text = f"{len(self.got)} of {len(self.values)} {noun}"
            if len(self.values) > LISTED:
                return text
            each = ", ".join(self._one(v) if math.isfinite(v) else "-" for v in self.values)
            return f"{text} ({each})"
        mean, half = metrics.interval(self.got)
        return self._one(mean) + ("" if half is None else f" ±{half:.{self.digits}f}")

    def _one(self, value: float) -> str:
        return f"{value:{'+' if self.difference else ''}.{self.digits}f}"


@dataclass(frozen=True)
class Column:
    """A number of each run; None: it does not apply to that run."""

    title: str
    of: Callable[[Run], float | None]
    digits: int = 4


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    cells: tuple[tuple[TableCell, ...], ...]  # (groups, columns)
    differences: tuple[tuple[TableCell, ...], ...]  # (groups - 1, columns): to the first, paired
    notes: tuple[str, ...]


def compare(
    runs: Sequence[Run],
    targets: Sequence[float] = (),
    by: str | None = None,
    bytes: str = "total",
    format: str = "table",
    labels: Sequence[str] = (),
) -> str:
    """Returns the comparison as text. by: rounds | mb | seconds, None: all three; bytes: total | up
    | down | useful; format: table | csv; labels: of the methods. Raises ConfigError
    for an unknown name or no runs.
    """
    if format not in FORMATS:
        raise ConfigError(unknown("format", format, FORMATS))
    made = table(runs, targets, by, bytes, labels)
    return as_csv(made) if format == "csv" else as_table(made)


def table(
    runs: Sequence[Run],
    targets: Sequence[float] = (),
    by: str | None = None,
    bytes: str = "total",
    labels: Sequence[str] = (),
) -> Table:
    """Returns the comparison as values."""
    if not runs:
        raise ConfigError("compare: expected at least one run directory.")
    if by is not None and by not in costs.COSTS:
        raise ConfigError(unknown("--by", by, costs.COSTS))
    if bytes not in costs.BYTES:
        raise ConfigError(unknown("--bytes", bytes, costs.BYTES))
    for t in targets:
        if not 0 < t <= 1:
            raise ConfigError(f"--target: expected an accuracy above 0 and at most 1, got {t:g}.")
    groups = group(runs, labels)
    listed = shown("compare", (row for run in runs for row in run.rounds))
    further = [m for m in listed if any(metrics.curve(r, m.name) for r in runs)]
    columns = _columns(runs, targets, _units(by, groups), bytes, further)
    cells = tuple(tuple(TableCell(tuple(_values(g, c)), c.digits) for c in columns) for g in groups)
    apart = tuple(tuple(_difference(groups[0], g, c) for c in columns) for g in groups[1:])
    return Table(columns, tuple(groups), cells, apart, tuple(_notes(groups, runs, targets, bytes)))


def _units(by: str | None, groups: Sequence[Group]) -> list[str]:
    """Returns the units of the costs: no seconds if the runs measure them by different clocks."""
    chosen = [by] if by else list(costs.COSTS)
    return [x for x in chosen if x != "seconds" or len(clocks(groups)) == 1]


def _columns(
    runs: Sequence[Run],
    targets: Sequence[float],
    by: Sequence[str],
    bytes: str,
    further: Sequence[Metric],
) -> tuple[Column, ...]:
    """further: metrics whose last value is a column. Without a test set at the server, the
    accuracies are those on the clients' tests.
    """
    y = metrics.measured(runs)
    seconds = "virtual s" if costs.seconds_key(runs[0]) == "seconds_virtual" else "s"
    units = {"rounds": "rounds", "mb": "MB", "seconds": seconds}
    where = "global" if y == "accuracy" else ON_CLIENTS
    ends = sorted(
        {metrics.last(metrics.curve(r, y))[1] for r in runs if metrics.curve(r, y)} or {0}
    )
    many = f"{ends[0]}" if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"
    columns = []
    if y == "accuracy":
        columns.append(Column("final global", lambda r: metrics.final(metrics.curve(r))))
    if any(_only_clients(r) for r in runs):
        columns.append(Column(f"final {ON_CLIENTS}", _on_clients))
    columns += [
        Column(f"best {where}", lambda r: (metrics.best(metrics.curve(r, y)) or (None,))[0]),
        Column(f"last {many} {where}", lambda r: metrics.last(metrics.curve(r, y))[0]),
    ]
    if any(metrics.personal(r) for r in runs):
        own = "/".join(_own_models(runs))
        columns.append(Column(own, lambda r: (metrics.personal(r) or {}).get("pfl")))
    for name in ("global", "personal", "finetuned"):
        if any(name in metrics.accuracies(r, True) for r in runs):
            columns.append(Column(f"held-out {name}", functools.partial(_held_out, name=name)))
    own_metrics = {k for r in runs for k in (r.summary.client_metrics or {}).get("personal", ())}
    for name in sorted(own_metrics):
        columns.append(
            Column(
                f"{'/'.join(_own_models(runs))} {name}", functools.partial(_own_metric, name=name)
            )
        )
    for m in further:
        columns.append(Column(m.titled(), functools.partial(_last, name=m.name)))
    for target in targets:
        for what in by:
            way = "" if what != "mb" or bytes == "total" else f" {bytes}"
            of = functools.partial(_to_target, target=target, by=what, bytes=bytes, y=y)
            columns.append(
                Column(f"{units[what]}{way} to {target:g}", of, 2 if what == "mb" else 1)
            )
    way = "" if bytes == "total" else f" {bytes}"
    columns.append(Column(f"MB{way}", lambda r: costs.ledger(r).total(bytes) / 1e6, 2))
    if bytes != "useful":
        kinds = _large_kinds(runs, bytes)
        for kind in kinds:
            one = functools.partial(_mb, kinds=(kind,), bytes=bytes)
            columns.append(Column(f"MB{way} {kind}", one, 2))
        rest = functools.partial(_mb, kinds=kinds, bytes=bytes, others=True)
        columns.append(Column(f"MB{way} other", rest, 2))
    return tuple(columns)


def _only_clients(run: Run) -> bool:
    """Whether the global model was evaluated at the end, on the clients' tests alone."""
    return not metrics.curve(run) and _on_clients(run) is not None


def _on_clients(run: Run) -> float | None:
    """Returns the global model's accuracy in the last evaluation of each client, pooled."""
    return metrics.pooled(metrics.latest(run, "global").values(), "global")


def _by_kind(run: Run, bytes: str) -> dict[str, int]:
    """Returns the bytes of each kind of payload in the directions that count."""
    book = costs.ledger(run)
    way = {} if bytes == "total" else {"direction": bytes}
    return {kind: book.sum(kind=kind, **way) for kind in book.kinds if kind != "envelope"}


def _large_kinds(runs: Sequence[Run], bytes: str) -> tuple[str, ...]:
    """Returns the kinds that are a hundredth of the bytes of one of the runs, or more."""
    return tuple(
        dict.fromkeys(
            kind
            for r in runs
            for kind, n in _by_kind(r, bytes).items()
            if n and 100 * n >= costs.ledger(r).total(bytes)
        )
    )


def _mb(run: Run, kinds: Sequence[str], bytes: str, others: bool = False) -> float:
    """Returns the MB of these kinds, or of all other bytes."""
    found = _by_kind(run, bytes)
    n = sum(found.get(kind, 0) for kind in kinds)
    return (costs.ledger(run).total(bytes) - n if others else n) / 1e6


def _own_models(runs: Sequence[Run]) -> list[str]:
    """Returns the kinds of the clients' own models, `local` or `personal`, in runs with their
    accuracy.
    """
    return sorted({r.own_model for r in runs if metrics.personal(r)})


def _to_target(run: Run, target: float, by: str, bytes: str, y: str) -> float | None:
    """Returns the cost to reach the target, infinite if it is not reached. None for a run without a
    curve: its method has no global model, or that was not evaluated.
    """
    if not metrics.curve(run, y):
        return None
    found = metrics.to_target(run, target, by, bytes, y)
    return math.inf if found is None else found


def _held_out(run: Run, name: str) -> float | None:
    """The accuracy of a model on the tests of the clients that never train, pooled."""
    return metrics.accuracies(run, True).get(name)


def _own_metric(run: Run, name: str) -> float | None:
    """A metric of the clients' own models on their own tests, in the evaluation at the end."""
    found = (run.summary.client_metrics or {}).get("personal", {}).get(name)
    return None if found is None else float(found)


def _last(run: Run, name: str) -> float | None:
    return metrics.final(metrics.curve(run, name))


def _values(g: Group, column: Column) -> list[float]:
    return [v for r in g.runs if (v := column.of(r)) is not None]


def _difference(first: Group, g: Group, column: Column) -> TableCell:
    """Returns each run minus the first group's run of its seed; not finite if one of the two did
    not reach the target.
    """
    found = []
    for a, b in pairs(first, g):
        x, y = column.of(a), column.of(b)
        if x is not None and y is not None:
            found.append(y - x)
    return TableCell(tuple(found), column.digits, difference=True)


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
            if reasons := unpaired(a, b):
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
    if (own := _own_models(runs)) and len(own) > 1:
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
        f"{costs.counted(bytes)}. Kinds of payload are those that are 1 % of a run or more; other: "
        f"the rest, and protocol overhead."
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


def as_table(t: Table) -> str:
    """Returns the table as several below each other, if it is wider than WIDTH."""
    rows = grid(t)
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    blocks = [[0, 1]]
    for i in range(2, len(widths)):
        if len(blocks[-1]) > 2 and sum(widths[j] + 2 for j in [*blocks[-1], i]) - 2 > WIDTH:
            blocks.append([0])
        blocks[-1].append(i)
    lines = []
    for block in blocks:
        part = [
            "  ".join(r[i].ljust(widths[i]) if i == 0 else r[i].rjust(widths[i]) for i in block)
            for r in rows
        ]
        rule = "─" * len(part[0])
        part.insert(1, rule)
        if t.differences:
            part.insert(2 + len(t.groups), rule)
        lines += [*(line.rstrip() for line in part), ""]
    notes = [line for note in t.notes for line in textwrap.wrap(note, WIDTH)]
    return "\n".join([*lines, *notes]) + "\n"


def as_csv(t: Table) -> str:
    """One line for each group and column. Mean and half-width are empty if some seeds did not reach
    the target.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(["method", "versus", "metric", "seeds", "reached", "mean", "half95", "values"])
    sets = [(g.label, "", row) for g, row in zip(t.groups, t.cells)]
    sets += [(g.label, t.groups[0].label, row) for g, row in zip(t.groups[1:], t.differences)]
    for label, versus, row in sets:
        for column, cell in zip(t.columns, row):
            whole = cell.got and len(cell.got) == len(cell.values)
            mean, half = metrics.interval(cell.got) if whole else ("", None)
            values = " ".join(repr(v) if math.isfinite(v) else "never" for v in cell.values)
            write(
                [
                    label,
                    versus,
                    column.title,
                    len(cell.values),
                    len(cell.got),
                    mean,
                    "" if half is None else half,
                    values,
                ]
            )
    return out.getvalue()
