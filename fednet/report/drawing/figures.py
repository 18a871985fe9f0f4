"""What the figures show, as plain data: the page and the plots draw the same numbers, and the CSV
files hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fednet.plain import JsonDict
from fednet.records import Row, metric
from fednet.report import costs, metrics
from fednet.report.groups import Group, flat, word
from fednet.report.read import Run, once

AXES = {"rounds": "round", "mb": "communicated MB", "seconds": "seconds"}
SHOWN = 3  # values in which runs differ, in a line about them all
CLOCKS = {"seconds": "wall clock", "seconds_virtual": "virtual clock"}
WAYS = {"total": "up and down", "up": "up", "down": "down", "useful": "useful, up and down"}
# Okabe and Ito's colours, told apart by the colour-blind; their order alternates dark and light,
# and a dash pattern and a marker go with each, so that a print in grey tells them apart too.
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#5B5B5B", "#B8A500")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1, 1, 1, 1, 1), (8, 3), (2, 3), (10, 2, 2, 2))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Series:
    """A group's curve: its mean over seeds with the 95 % interval, and the single seeds."""

    label: str
    n: int
    round: list[int]
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    place: int  # among the groups, by which colour, dashes and marker go

    @property
    def colour(self) -> str:
        return COLOURS[self.place % 8]

    @property
    def dash(self) -> tuple[float, ...]:
        return DASHES[self.place % 8]

    @property
    def marker(self) -> str:
        return MARKERS[self.place % 8]


def clocks(groups: Sequence[Group]) -> list[str]:
    """The clocks by which these runs tell their time: keys of `CLOCKS`."""
    return sorted({clock(g) for g in groups})


def clock(group: Group) -> str:
    return costs.seconds_key(group.runs[0])


def curves(
    groups: Sequence[Group],
    x: str = "rounds",
    y: str = "accuracy",
    bytes: str = "total",
    told_by: str | None = None,
) -> list[Series]:
    """One series a group that was evaluated at all. told_by: leaves out groups with another clock,
    whose seconds are not the same.
    """
    found = []
    for i, g in enumerate(groups):
        if told_by is not None and clock(g) != told_by:
            continue
        b: JsonDict = metrics.band(g.runs, x, y, bytes)
        if b["round"]:
            found.append(Series(g.label, len(g.runs), **b, place=i))
    return found


def bytes_by_kind(run: Run) -> tuple[list[int], dict[str, dict[str, list[int]]]]:
    """(rounds, {direction: {kind: bytes a round}}). Round 0 is what was spent before the first; the
    evaluation after the last round is in none.
    """
    book = costs.ledger(run)
    rounds = sorted({t for t, _, _ in book.rows} - {costs.AFTER})
    table = {
        w: {k: [book.rows.get((t, w, k), 0) for t in rounds] for k in book.kinds}
        for w in ("up", "down")
    }
    return rounds, {w: {k: v for k, v in kinds.items() if any(v)} for w, kinds in table.items()}


@dataclass(frozen=True)
class Participation:
    """grid: (clients, rounds) int8, codes whose meaning is in `words`: 0 not asked, 1 completed, 2
    asked, and neither completed nor dropped in this round (it goes on, or the round is void), 3
    and on: dropped, for reasons[code - 3].
    """

    rounds: list[int]
    grid: np.ndarray
    reasons: list[str]

    @property
    def words(self) -> list[str]:
        return ["not asked", "completed", "not finished", *self.reasons]


@once
def participation(run: Run) -> Participation:
    n = max(
        [int(run.config.get("clients", 0)), *(1 + c for r in run.rounds for c in r.selected or ())]
    )
    reasons = sorted({str(why) for r in run.rounds for why in (r.dropped or {}).values()})
    grid = np.zeros((n, len(run.rounds)), np.int8)
    for j, r in enumerate(run.rounds):
        grid[list(r.selected or ()), j] = 2
        grid[list(r.completed or ()), j] = 1
        for client, why in (r.dropped or {}).items():
            grid[int(client), j] = 3 + reasons.index(str(why))
    return Participation([r.round for r in run.rounds], grid, reasons)


class _Accuracy(Row, kw_only=True, gc=False):
    """Of a client's record, what is drawn."""

    round: int = 0
    client: int = -1
    accuracy_global: float | None = None
    accuracy_received: float | None = None
    accuracy_personal: float | None = None


@once
def client_accuracy(run: Run) -> tuple[str, list[int], list[int], np.ndarray] | None:
    """(which, clients, rounds, (clients, rounds) accuracy, NaN where not evaluated), clients by
    their last accuracy.

    Of the personal models where the method has them, else of the global model, as received or at
    the end, on each client's own test split.
    """
    judged = ("personal", "received", "global")
    which = next((w for w in judged if metrics.latest(run, w)), None)
    if which is None:
        return None
    field, last = f"accuracy_{which}", metrics.latest(run, which)
    clients = sorted(last, key=lambda c: (-getattr(last[c], field), c))
    rows = {c: i for i, c in enumerate(clients)}
    # (row, round, accuracy) of each record; at the end of a large run some clients are not judged
    found = np.fromiter(
        (
            (rows[r.client], r.round, value)
            for r in run.lines("clients", _Accuracy)
            if (value := getattr(r, field)) is not None and r.client in rows
        ),
        np.dtype((np.float64, 3)),
    )
    rounds, columns = np.unique(found[:, 1].astype(int), return_inverse=True)
    table = np.full((len(clients), len(rounds)), np.nan)
    table[found[:, 0].astype(int), columns] = found[:, 2]
    return which, clients, rounds.tolist(), table


def last_of(table: np.ndarray) -> np.ndarray:
    """(rows,) the last value of each row that is no NaN."""
    return np.asarray([row[~np.isnan(row)][-1] for row in table])


def class_accuracy(run: Run) -> tuple[list[int], np.ndarray] | None:
    """(rounds, (C, rounds))."""
    found = [(r.round, a) for r in run.rounds if (a := metrics.class_accuracy(r)) is not None]
    return ([t for t, _ in found], np.stack([a for _, a in found], axis=1)) if found else None


def class_names(run: Run, n: int) -> list[str]:
    names = run.partition.get("names") or []
    return [str(x) for x in names] if len(names) == n else [str(i) for i in range(n)]


def time_split(run: Run) -> tuple[list[int], dict[str, list[float]]]:
    """(rounds, {phase: seconds a round}), by the run's clock; what no phase accounts for is
    `other`.
    """
    key = costs.seconds_key(run)
    rounds = [r.round for r in run.rounds]
    whole = [float(r[key] or 0.0) for r in run.rounds]
    parts: list[dict[str, float]] = [r[f"{key}_by_phase"] or {} for r in run.rounds]
    phases = list(dict.fromkeys(p for by_phase in parts for p in by_phase))
    table = {p: [float(by_phase.get(p, 0.0)) for by_phase in parts] for p in phases}
    if not table:
        return rounds, {"all": whole} if any(whole) else {}
    rest = [max(0.0, s - sum(v[i] for v in table.values())) for i, s in enumerate(whole)]
    if max(rest) > 0.01 * max(whole):
        table["other"] = rest
    return rounds, table


def axis(x: str, bytes: str = "total", told_by: str = "seconds") -> str:
    """What stands at the axis: which bytes MB are, and which clock told the seconds."""
    if x == "mb":
        return f"{AXES[x]}, {WAYS[bytes]}"
    if x == "seconds":
        return f"seconds, {CLOCKS[told_by]}"
    return AXES[x]


def titled(groups: Sequence[Group], y: str) -> str:
    """A metric's label, which names the model whose accuracy it is: of several runs, each."""
    owns = sorted({r.own_model for g in groups for r in g.runs})
    return metric(y).titled(" or ".join(owns))


# -- in words --------------------------------------------------------------------------------------
def setting(runs: Sequence[Run]) -> str:
    """The experiment in a line: "digits, dirichlet alpha=0.3, 10 clients, participation 0.5,
    lenet5, 1 epoch(s)". Where runs differ in one of these, all values of it.
    """
    return ", ".join(in_common([_setting(r) for r in runs]))


def in_common(found: Sequence[Sequence[str]]) -> list[str]:
    """Of several lists of as many words, one: each word that is in all of them, or those that are,
    SHOWN of them at most. An empty word is left out.
    """
    words = []
    for place in zip(*found):
        each = [word or "none" for word in dict.fromkeys(place)]
        if each == ["none"]:
            continue
        more = [f"{len(each) - SHOWN} others"] if len(each) > SHOWN else []
        words.append(" / ".join([*each[:SHOWN], *more]))
    return words


def _setting(run: Run) -> list[str]:
    """The words of a run's setting, the same number of them for each run."""
    c = run.config
    data, train = c.get("data", {}), c.get("train", {})
    chosen = (
        f"{c['clients_per_round']} a round"
        if c.get("clients_per_round")
        else f"participation {c.get('participation')}"
    )
    work = (
        f"{train['steps']} local steps"
        if train.get("steps")
        else f"{train.get('epochs', 1)} local epoch(s)"
    )
    return [
        str(data.get("dataset") or ""),
        _partition(data),
        f"{c.get('clients')} clients",
        chosen,
        str(c.get("model", {}).get("name") or ""),
        work,
        f"lr {word(train['lr'])}" if train.get("lr") else "",
    ]


def _partition(data: JsonDict) -> str:
    """How the data were divided. Sites that bring their own are not divided by anybody."""
    if data.get("dataset") == "site":
        return "each site's own data"
    partition = data.get("partition", {})
    detail = {k: v for k, v in partition.items() if k in ("alpha", "per_client") and v is not None}
    words = [str(partition.get("scheme") or ""), *(f"{k}={word(v)}" for k, v in detail.items())]
    return " ".join(words).strip()


def link(runs: Sequence[Run]) -> str:
    """The links as the configurations have them: "virtual clock, up 10 Mbit/s, down 50 Mbit/s, 20
    ms".
    """
    return in_common([[_link(r)] for r in runs])[0]


def _link(run: Run) -> str:
    c = run.config.get("link", {})
    shaped = [
        f"{way} {word(c[key])} Mbit/s"
        for way, key in (("up", "up_mbps"), ("down", "down_mbps"))
        if c.get(key)
    ]
    shaped += [
        f"{word(c[key])} ms {what}"
        for what, key in (("latency", "latency_ms"), ("jitter", "jitter_ms"))
        if c.get(key)
    ]
    if c.get("profile"):
        shaped.append(f"profile {c['profile']}")
    if c.get("trace"):
        shaped.append(f"trace {word(c['trace'])}")
    if c.get("per_client"):
        shaped.append("some clients with links of their own")
    return ", ".join([f"{c.get('clock', 'real')} clock", *(shaped or ["unshaped"])])


def counted(bytes: str) -> str:
    """What MB means here."""
    if bytes == "useful":
        what = "up and down, all clients, each payload that was of use, once"
    else:
        ways = WAYS[bytes] if bytes == "total" else f"{bytes} only"
        what = f"{ways}, all clients, spent, a payload for several in one process once for each"
    return f"MB is 10^6 bytes, {what}, after compression, framing included"


def caption(groups: Sequence[Group], x: str, y: str, bytes: str = "total") -> str:
    """What a reader must know of a figure: seeds, band, clients, link and the bytes counted."""
    names = ", ".join(g.label for g in groups)
    seeds = {tuple(g.seeds) for g in groups}
    if len(seeds) == 1:
        which = f"seed(s) {', '.join(map(str, groups[0].seeds))}"
    else:
        which = "seeds " + "; ".join(f"{g.label}: {', '.join(map(str, g.seeds))}" for g in groups)
    several = any(len(g.runs) > 1 for g in groups)
    band = (
        f"Lines are means over {which}, bands 95 % t-intervals"
        if several
        else f"One run each, {which}, no band"
    )
    runs = [r for g in groups for r in g.runs]
    across = axis(x, bytes, clock(groups[0]))
    text = f"{titled(groups, y).capitalize()} against {across}: {names}. "
    text += f"{setting(runs)}. {band}. Link: {link(runs)}."
    return text + (f" {counted(bytes)}." if x == "mb" else "")


def differences(runs: Sequence[Run]) -> dict[str, list[object]]:
    """The settings in which the runs differ, by dotted key."""
    configs = [flat(r.config) for r in runs]
    keys = sorted(set().union(*configs))
    return {
        k: [c.get(k) for c in configs] for k in keys if len({repr(c.get(k)) for c in configs}) > 1
    }
