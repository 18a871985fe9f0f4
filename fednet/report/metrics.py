"""What a run comes to, in numbers: pure functions of its files.

Accuracies are 0..1; a_t is the test accuracy after round t, on evaluated rounds only. MB is 10^6
bytes, counted over all messages of `wire.jsonl`, spent for use or not: both directions, all
clients, after compression, framing included.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fednet import records
from fednet.errors import ConfigError, unknown
from fednet.records import JUDGED, Client, Round, Summary, Wire
from fednet.report.read import Run, once

BYTES = ("total", "up", "down", "useful")
COSTS = ("rounds", "mb", "seconds")


# -- curves ----------------------------------------------------------------------------------------
def curve(run: Run, y: str = "accuracy") -> list[tuple[int, float]]:
    """(round, value) of the rounds that have one, unsmoothed. y: a name of `records.METRICS`, such
    as accuracy (of the global model on the global test set) or personal_accuracy (of the personal
    models on the own tests of the clients judged in that round, pooled).
    """
    try:
        of = records.metric(y).of
    except KeyError:
        raise ConfigError(unknown("curve", y, records.names())) from None
    return [(r.round, float(v)) for r in run.rounds if (v := of(r)) is not None]


@dataclass(frozen=True)
class Ledger:
    """Spent bytes summed by (round, direction, kind); the kind `envelope` is all that is not
    payload.
    """

    rows: dict[tuple[int, str, str], int]
    useful: dict[str, int]  # by direction
    raw: dict[str, int]  # payload by direction, before compression
    messages: dict[str, int]  # by direction
    used: dict[int, int]  # useful, by round
    servers: int  # processes, one after the other, that the run had

    def sum(self, **by: str | int) -> int:
        """Bytes with this `round`, `direction` and `kind`, whichever are given."""
        want = (by.get("round"), by.get("direction"), by.get("kind"))
        return sum(
            n for key, n in self.rows.items() if all(w is None or w == k for w, k in zip(want, key))
        )

    def by_round(self, bytes: str = "total") -> dict[int, int]:
        if bytes == "useful":
            return self.used
        out: dict[int, int] = defaultdict(int)
        for (t, direction, _), n in self.rows.items():
            if bytes in ("total", direction):
                out[t] += n
        return out

    @property
    def kinds(self) -> list[str]:
        """The kinds that crossed, the largest first, the envelope last."""
        size: dict[str, int] = defaultdict(int)
        for (_, _, kind), n in self.rows.items():
            size[kind] += n
        return sorted((k for k in size if size[k]), key=lambda k: (k == "envelope", -size[k], k))


def used(run: Run) -> Iterator[Wire]:
    """The rows of `wire.jsonl` that were of use, each payload once: where a server died between two
    checkpoints, the next one does rounds again, and what the first had received for them was of use
    to nobody.
    """
    servers: dict[int, set[int]] = defaultdict(set)
    # by round: only where two servers had a part can there be doubles
    for w in run.messages():
        servers[w.round].add(w.incarnation)
    again = {r for r, who in servers.items() if len(who) > 1}
    newest: dict[tuple[Any, ...], int] = {}
    if again:  # rows are in the order of time
        newest = {
            _payload(w): w.incarnation for w in run.messages() if w.useful and w.round in again
        }
    for w in run.messages():
        if w.useful and (not newest or newest.get(_payload(w), 0) in (0, w.incarnation)):
            yield w


def _payload(w: Wire) -> tuple[Any, ...]:
    return w.direction, w.type, w.round, w.phase, w.client, w.purpose


@once
def ledger(run: Run) -> Ledger:
    """One pass over `wire.jsonl`; where a run has none, the totals of `rounds.jsonl`, all booked as
    `state`.
    """
    rows: dict[tuple[int, str, str], int] = defaultdict(int)
    useful, raw, messages = ({"up": 0, "down": 0} for _ in range(3))
    by_round: dict[int, int] = defaultdict(int)
    servers: set[int] = set()
    for w in run.messages():
        for kind, n in w.kinds.items():
            rows[w.round, w.direction, kind] += n
        rows[w.round, w.direction, "envelope"] += w.bytes - sum(w.kinds.values())
        raw[w.direction] += w.raw_bytes
        messages[w.direction] += 1
        servers.add(w.incarnation)
    for payload in used(run):
        useful[payload.direction] += payload.bytes
        by_round[payload.round] += payload.bytes
    if not rows:
        for r in run.rounds:
            rows[r.round, "up", "state"] += r.bytes_up
            rows[r.round, "down", "state"] += r.bytes_down
            by_round[r.round] += sum(n for kinds in r.useful.values() for n in kinds.values())
    return Ledger(dict(rows), useful, raw, messages, dict(by_round), len(servers))


def seconds_key(run: Run) -> str:
    """Which clock the run's time is told by."""
    virtual = (run.config.get("link") or {}).get("clock") == "virtual"
    return (
        "seconds_virtual"
        if virtual and any(r.seconds_virtual is not None for r in run.rounds)
        else "seconds"
    )


def cost(run: Run, by: str, bytes: str = "total") -> dict[int, float]:
    """Cumulative cost after each round, by round number. by: rounds | mb | seconds; bytes: total |
    up | down (of what was spent), useful (each payload once, of both directions).

    What was spent before round 1 (joins) counts into round 1, what a resumed run spent twice counts
    twice.
    """
    if by not in COSTS:
        raise ConfigError(unknown("cost", by, COSTS))
    if bytes not in BYTES:
        raise ConfigError(unknown("bytes", bytes, BYTES))
    numbers = [r.round for r in run.rounds]
    if by == "rounds":
        return {t: float(t) for t in numbers}
    if by == "seconds":
        key = seconds_key(run)
        steps = np.cumsum([float(getattr(r, key) or 0.0) for r in run.rounds])
        return dict(zip(numbers, steps.tolist()))
    spent, total, out = sorted(ledger(run).by_round(bytes).items()), 0, {}
    for t in numbers:
        while spent and spent[0][0] <= t:
            total += spent.pop(0)[1]
        out[t] = total / 1e6
    return out


# -- accuracy --------------------------------------------------------------------------------------
def final(values: Sequence[tuple[int, float]]) -> float | None:
    """Of the last evaluated round."""
    return values[-1][1] if values else None


def best(values: Sequence[tuple[int, float]]) -> tuple[float, int] | None:
    """(accuracy, round); the first such round where there are several."""
    if not values:
        return None
    t, a = max(values, key=lambda p: (p[1], -p[0]))
    return a, t


def last(values: Sequence[tuple[int, float]], n: int = 10) -> float | None:
    """Mean over the last n evaluated rounds, or over all where there are fewer."""
    tail = [a for _, a in values[-n:]]
    return math.fsum(tail) / len(tail) if tail else None


# -- targets ---------------------------------------------------------------------------------------
def reached(values: Sequence[tuple[int, float]], target: float) -> int | None:
    """The first evaluated round at or above the target on the unsmoothed curve; None where none
    is.
    """
    return next((t for t, a in values if a >= target), None)


def to_target(run: Run, target: float, by: str = "rounds", bytes: str = "total") -> float | None:
    """Rounds, MB or seconds to a target accuracy; None where the run never gets there."""
    t = reached(curve(run), target)
    return None if t is None else cost(run, by, bytes)[t]


def speedup(run: Run, over: Run, at: int | None = None) -> dict[str, Any]:
    """R / t, where the target is `over`'s accuracy at round R (its last evaluated, or the last not
    after `at`) and t the first round at which `run` is there. Never: t and speedup are None and
    `text` is "<1".
    """
    before = [(t, a) for t, a in curve(over) if at is None or t <= at]
    if not before:
        return {"target": None, "round": None, "speedup": None, "text": "-"}
    R, target = before[-1]
    t = reached(curve(run), target)
    return {
        "target": target,
        "round": t,
        "speedup": None if t is None else R / t,
        "text": "<1" if t is None else f"{R / t:.2f}x",
    }


# -- stability (FedDC) -----------------------------------------------------------------------------
def differences(values: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """max drop = min d_t, avg drop = mean of d_t < 0, avg increase = mean of d_t > 0, with d_t =
    a_t - a_{t-1}.

    Zeros are in neither mean; an empty mean, and the max drop of a curve without differences, is
    None.
    """
    d = [b - a for (_, a), (_, b) in itertools.pairwise(values)]
    down, up = [x for x in d if x < 0], [x for x in d if x > 0]
    return {"max_drop": min(d) if d else None, "avg_drop": _mean(down), "avg_increase": _mean(up)}


def class_accuracy(record: Round) -> np.ndarray | None:
    """(C,) accuracy by class of one round, NaN for a class without test samples; None where it was
    not evaluated.
    """
    if not record.correct_by_class or not record.total_by_class:
        return None
    correct, total = (
        np.asarray(v, dtype=np.float64) for v in (record.correct_by_class, record.total_by_class)
    )
    rates: np.ndarray = np.divide(correct, total, out=np.full(len(total), np.nan), where=total > 0)
    return rates


def spread(accuracy: np.ndarray) -> float:
    """Class spread of one round: sqrt(mean_c (A_c - mean_c A_c)^2), as a fraction (x 100:
    percentage points).
    """
    return float(np.nanstd(accuracy))


def class_stability(run: Run) -> dict[str, float] | None:
    """FedDC's "class variance": mean over rounds of the class spread; beside it the mean of the
    literal variance.
    """
    rounds = [a for r in run.rounds if (a := class_accuracy(r)) is not None]
    if not rounds:
        return None
    return {
        "class_spread": _mean([spread(a) for a in rounds]) or 0.0,
        "class_variance": _mean([float(np.nanvar(a)) for a in rounds]) or 0.0,
    }


# -- personalised ----------------------------------------------------------------------------------
@once
def latest(run: Run, judged: str) -> dict[int, Client]:
    """Each client's record at the last evaluation of a run that has ended, else its last one, where
    it holds its accuracy as `judged`, by client.
    """
    field = f"accuracy_{judged}"
    found = {r.client: r for r in ended(run) or run.clients if getattr(r, field) is not None}
    return dict(sorted(found.items()))


@once
def ended(run: Run) -> list[Client]:
    """The records of the evaluation at the end. A run given more rounds has been judged before."""
    last = max((r.round for r in run.clients if r.final), default=0)
    return [r for r in run.clients if r.final and r.round == last]


def pooled(clients: Iterable[Client], judged: str) -> float | None:
    """FedABC Eq. 7 (Eq. 8 where `judged` is balanced): correct over all clients / test samples over
    all clients.
    """
    counts = [(getattr(r, f"correct_{judged}"), getattr(r, f"tested_{judged}")) for r in clients]
    total = sum(tested for _, tested in counts)
    return sum(correct for correct, _ in counts) / total if total else None


def personal(run: Run) -> dict[str, Any] | None:
    """Accuracy of the personal models on each client's own test split, at its last evaluation; None
    without them.

    worst_tenth: mean over the worst tenth of the clients (at least one).
    """
    own = latest(run, "personal")
    if not own:
        return None
    values = np.sort([r.accuracy_personal for r in own.values()])
    return {
        "pfl": pooled(own.values(), "personal"),
        "drift": pooled(latest(run, "balanced").values(), "balanced"),
        "clients": len(own),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values[0]),
        "max": float(values[-1]),
        "deciles": [float(q) for q in np.quantile(values, np.arange(1, 10) / 10)],
        "worst_tenth": float(values[: max(1, len(values) // 10)].mean()),
    }


# -- bytes: predicted against measured -------------------------------------------------------------
def kinds_of(run: Run) -> dict[str, dict[str, int]]:
    """Spent bytes by direction and kind."""
    book = ledger(run)
    return {
        way: {k: n for k in book.kinds if (n := book.sum(direction=way, kind=k))}
        for way in ("up", "down")
    }


def predicted(run: Run, said: Mapping[str, Mapping[str, int]] | None) -> dict[str, Any] | None:
    """What was predicted (bytes by direction and kind) beside the useful payload bytes of the
    method's own messages; None where there is no prediction.
    """
    if said is None:
        return None
    measured: dict[str, dict[str, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
    for w in used(run):
        if w.purpose == "train":
            for kind, n in w.kinds.items():
                measured[w.direction][kind] += n
    out: dict[str, Any] = {}
    for way in ("up", "down"):
        want = said.get(way) or {}
        for kind in sorted({*want, *measured[way]}):
            p, m = int(want.get(kind, 0)), measured[way].get(kind, 0)
            out.setdefault(way, {})[kind] = {"predicted": p, "measured": m, "difference": m - p}
    return out


# -- all of it -------------------------------------------------------------------------------------
def summary(run: Run) -> Summary:
    """As it stands in `summary.json`; of a run that has none yet, its metrics up to now."""
    return (
        run.summary
        if run.summary.accuracy is not None
        else Summary(**summarise(run, run.summary.predicted))
    )


def summarise(run: Run, foretold: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, Any]:
    """The metric part of `summary.json`. What does not apply is left out; a mean of nothing is
    None. foretold: the prediction of the method's own bytes, by direction and kind.
    """
    a = curve(run)
    top, at = best(a) or (None, None)
    out: dict[str, Any] = {
        "algorithm": run.algorithm,
        "seed": run.seed,
        "rounds": len(run.rounds),
        "void_rounds": sum(bool(r.void) for r in run.rounds),
        "accuracy": {"final": final(a), "best": top, "best_round": at, "last10": last(a)},
    }
    if a:
        out["stability"] = {**differences(a), **(class_stability(run) or {})}
    if judged := {
        name: p for name in JUDGED if (p := pooled(latest(run, name).values(), name)) is not None
    }:
        out["personal"] = judged
    if asked := ended(run):
        taken = [r for r in asked if r.took_part is not False]
        out["personal_of_participants"] = {
            name: p
            for name in JUDGED
            if (p := pooled([r for r in taken if r.get(f"tested_{name}")], name)) is not None
        }
        out["judged"] = {
            "clients": len(asked),
            "of": int(run.config.get("clients", 0)),
            "never_took_part": len(asked) - len(taken),
            "shared": run.config.get("evaluate", {}).get("shared"),
        }
    if own := personal(run):
        out["personal_spread"] = {k: v for k, v in own.items() if k not in ("pfl", "drift")}
    out["bytes"] = _bytes(run, foretold)
    seconds = [float(r.seconds) for r in run.rounds if r.seconds is not None]
    phases: dict[str, float] = defaultdict(float)
    for r in run.rounds:
        for phase, s in (r.seconds_by_phase or {}).items():
            phases[phase] += s
    out |= {
        "seconds": math.fsum(seconds),
        "seconds_per_round": _mean(seconds),
        "seconds_by_phase": dict(phases),
    }
    if seconds_key(run) == "seconds_virtual":
        out["seconds_virtual"] = math.fsum(float(r.seconds_virtual or 0) for r in run.rounds)
    if losses := curve(run, "train_loss"):
        out["train_loss"] = losses[-1][1]
    return out


def _bytes(run: Run, foretold: Mapping[str, Mapping[str, int]] | None) -> dict[str, Any]:
    """up, down, total: spent bytes. useful: of these, in messages that were used. raw: payload
    before compression.
    """
    book = ledger(run)
    up, down = book.sum(direction="up"), book.sum(direction="down")
    out: dict[str, Any] = {
        "up": up,
        "down": down,
        "total": up + down,
        "mb": (up + down) / 1e6,
        "useful": dict(book.useful),
        "raw": dict(book.raw),
        "messages": dict(book.messages),
        "kinds": kinds_of(run),
    }
    if said := predicted(run, foretold):
        out["predicted"] = said
    return out


# -- over seeds ------------------------------------------------------------------------------------
def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % t-interval; no half-width for a single value."""
    n, m = len(values), math.fsum(values) / len(values)
    if n < 2:
        return m, None
    from scipy.special import stdtrit

    s = math.sqrt(math.fsum((v - m) ** 2 for v in values) / (n - 1))
    return m, float(stdtrit(n - 1, 0.975)) * s / math.sqrt(n)


def band(
    runs: Sequence[Run], x: str, y: str = "accuracy", bytes: str = "total"
) -> dict[str, list[float]]:
    """Mean curve over seeds with its 95 % t-interval, at the rounds that all runs evaluated.

    x is the mean of the runs' costs at that round, so that a point is a round whatever the axis.
    Keys: round, x, mean, low, high.
    """
    curves = [dict(curve(r, y)) for r in runs]
    costs = [cost(r, x, bytes) for r in runs]
    shared = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
    out: dict[str, list[float]] = {k: [] for k in ("round", "x", "mean", "low", "high")}
    for t in shared:
        m, half = interval([c[t] for c in curves])
        out["round"].append(t)
        out["x"].append(math.fsum(c[t] for c in costs) / len(costs))
        out["mean"].append(m)
        out["low"].append(m - (half or 0.0))
        out["high"].append(m + (half or 0.0))
    return out


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
