"""The numbers of a run: pure functions of its files.

Accuracies are 0..1; a_t is the test accuracy after round t, on evaluated rounds only. MB is 10^6
bytes of all messages, used or wasted: both directions, all clients, after compression, protocol
overhead included.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fednet.config.schema import held_out_count
from fednet.errors import ConfigError
from fednet.plain import JsonDict
from fednet.records import EVALUATED_MODELS, Client, Round, Summary, metric
from fednet.report import costs
from fednet.report.costs import cost, seconds_key
from fednet.report.read import Run, once

# What a band over seeds may be.
BANDS = {
    "ci": "95 % confidence intervals (Student t)",
    "std": "one standard deviation to each side",
    "minmax": "from the lowest to the highest seed",
}


# -- curves ----------------------------------------------------------------------------------------
@once
def curve(run: Run, y: str = "accuracy") -> list[tuple[int, float]]:
    """Returns (round, value) of the rounds that have one, not smoothed. y: a name of
    `records.METRICS`: accuracy is of the global model on the server's test set, personal_accuracy
    of the personal models of the clients evaluated in that round, on their own tests, pooled; or a
    metric of `evaluate.metrics`. Empty for a name that the run does not have.
    """
    try:
        of = metric(y, run.rounds).of
    except KeyError:
        return []
    values = [(r.round, of(r)) for r in run.rounds]
    return [(round, float(value)) for round, value in values if value is not None]


# -- accuracy --------------------------------------------------------------------------------------
def final(values: Sequence[tuple[int, float]]) -> float | None:
    """Returns the metric's value in the last evaluated round."""
    return values[-1][1] if values else None


def best(values: Sequence[tuple[int, float]]) -> tuple[float, int] | None:
    """Returns (accuracy, round); the first of several such rounds."""
    if not values:
        return None
    t, a = max(values, key=lambda p: (p[1], -p[0]))
    return a, t


def last(values: Sequence[tuple[int, float]]) -> tuple[float | None, int]:
    """Returns (mean, how many) of the last ten evaluated rounds, or of all if there are fewer."""
    tail = [a for _, a in values[-10:]]
    return _mean(tail), len(tail)


def accuracy_metric(runs: Iterable[Run]) -> str:
    """Returns the metric that is the global model's accuracy in these runs: on the server's test
    set, or if no run has one, on the clients' tests.
    """
    known = ("accuracy", "client_accuracy", "received_accuracy")
    return next((y for y in known if any(curve(r, y) for r in runs)), "accuracy")


# -- targets ---------------------------------------------------------------------------------------
def check_target(target: float) -> None:
    """Raises ConfigError for a target that is no accuracy."""
    if not 0 < target <= 1:
        raise ConfigError(f"--target: expected an accuracy above 0 and at most 1, got {target:g}.")


def first_round_at(values: Sequence[tuple[int, float]], target: float) -> int | None:
    """Returns the first evaluated round at or above the target, None if there is none."""
    return next((t for t, a in values if a >= target), None)


def to_target(
    run: Run, target: float, by: str = "rounds", bytes: str = "total", y: str = "accuracy"
) -> float | None:
    """Rounds, MB or seconds to a target accuracy; None if the run does not reach it."""
    t = first_round_at(curve(run, y), target)
    return None if t is None else cost(run, by, bytes)[t]


def speedup(run: Run, over: Run, at: int | None = None) -> tuple[int, float] | None:
    """Returns (t, R / t). R: the last evaluated round of `over`, not after round `at`; t: the first
    round in which `run` has the accuracy that `over` has in R. None if it never has.
    """
    before = [(R, a) for R, a in curve(over) if at is None or at >= R]
    if not before:
        return None
    R, target = before[-1]
    t = first_round_at(curve(run), target)
    return None if t is None else (t, R / t)


# -- stability (FedDC) -----------------------------------------------------------------------------
def differences(values: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """max drop = min d_t, avg drop = mean of d_t < 0, avg increase = mean of d_t > 0, with d_t =
    a_t - a_{t-1}.

    Zeros are in neither mean; an empty mean, and the max drop of a curve without differences, is
    None.
    """
    d = [b - a for (_, a), (_, b) in itertools.pairwise(values)]
    down = [x for x in d if x < 0]
    up = [x for x in d if x > 0]
    return {"max_drop": min(d) if d else None, "avg_drop": _mean(down), "avg_increase": _mean(up)}


def class_accuracy(record: Round) -> np.ndarray | None:
    """Returns (C,) accuracy by class of one round, NaN for a class without test samples; None where
    it was not evaluated.
    """
    if not record.correct_by_class or not record.total_by_class:
        return None
    correct, total = np.asarray([record.correct_by_class, record.total_by_class], np.float64)
    return np.divide(correct, total, out=np.full(len(total), np.nan), where=total > 0)


def class_spread(run: Run) -> float | None:
    """FedDC's "class variance", as a fraction (x 100: percentage points): the mean over rounds of
    sqrt(mean_c (A_c - mean_c A_c)^2); None without accuracies by class.
    """
    rounds = map(class_accuracy, run.rounds)
    return _mean([float(np.nanstd(by_class)) for by_class in rounds if by_class is not None])


# -- personalised ----------------------------------------------------------------------------------
class ClientRows:
    """What reports need of `clients.jsonl`, read one line at a time."""

    def __init__(self, run: Run) -> None:
        # Seconds of training by device, then by round.
        self.seconds: dict[str, Counter[int]] = defaultdict(Counter)
        final = []
        latest: Latest = {}
        for r in run.lines("clients"):
            if r.seconds is not None and r.device:
                self.seconds[f"{r.host} {r.device}" if r.host else r.device][r.round] += r.seconds
            if r.final:
                final.append(r)
            _note_latest(latest, r)
        last_round = max((r.round for r in final), default=0)
        # The evaluation at the end; the last one, if a run was continued with more rounds.
        self.final: list[Client] = [r for r in final if r.round == last_round]
        if self.final:
            latest = {}
            for r in self.final:
                _note_latest(latest, r)
        self.latest: Latest = {of: dict(sorted(rows.items())) for of, rows in latest.items()}


# Records by client, of each model and of whether they are of the clients that never train.
Latest = dict[tuple[str, bool], dict[int, Client]]


def _note_latest(latest: Latest, r: Client) -> None:
    for name in (*EVALUATED_MODELS, "received"):
        if getattr(r, f"accuracy_{name}") is not None:
            latest.setdefault((name, bool(r.held_out)), {})[r.client] = r


@once
def client_rows(run: Run) -> ClientRows:
    return ClientRows(run)


def latest(run: Run, name: str, held_out: bool = False) -> dict[int, Client]:
    """Returns, by client, its last record with the accuracy `name` (one of EVALUATED_MODELS, or
    `received`); if there was an evaluation at the end, its record in that. held_out: of the clients
    that never train instead of the others.
    """
    return client_rows(run).latest.get((name, held_out), {})


def accuracies(run: Run, held_out: bool = False) -> dict[str, float]:
    """Returns the pooled accuracies of `latest`, by model."""
    found = {
        name: pooled_accuracy(latest(run, name, held_out).values(), name)
        for name in EVALUATED_MODELS
    }
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def pooled_accuracy(clients: Iterable[Client], name: str) -> float | None:
    """FedABC Eq. 7 (Eq. 8 if `name` is balanced): correct over all clients / test samples over
    all clients.
    """
    counts = [(getattr(r, f"correct_{name}"), getattr(r, f"tested_{name}")) for r in clients]
    total = sum(tested for _, tested in counts)
    return sum(correct for correct, _ in counts) / total if total else None


def personal_spread(run: Run) -> JsonDict | None:
    """Returns how the accuracy of the personal models is spread over the clients, each on its own
    test split at its last evaluation; None without them.

    worst_tenth: mean over the worst tenth of the clients (at least one).
    """
    own = latest(run, "personal")
    if not own:
        return None
    values = np.sort([r.accuracy_personal for r in own.values()])
    return {
        "clients": len(own),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values[0]),
        "max": float(values[-1]),
        "worst_tenth": float(values[: max(1, len(values) // 10)].mean()),
    }


def class_names(run: Run, n: int) -> list[str]:
    names = run.partition.get("names") or []
    return [str(x) for x in names] if len(names) == n else [str(i) for i in range(n)]


# -- all of it -------------------------------------------------------------------------------------
def summary(run: Run) -> Summary:
    """Returns the run's `summary.json`; before the run has ended, its metrics until now."""
    if run.summary.accuracy is not None:
        return run.summary
    return Summary(**summarise(run, run.summary.predicted))


def summarise(run: Run, prediction: Mapping[str, Mapping[str, int]] | None = None) -> JsonDict:
    """Returns the metric part of `summary.json`. What does not apply is left out; a mean of nothing
    is None. prediction: the prediction of the method's own bytes, by direction and kind.
    """
    a = curve(run)
    top, at = best(a) or (None, None)
    ending, of = last(a)
    out: JsonDict = {
        "algorithm": run.algorithm,
        "seed": run.seed,
        "rounds": len(run.rounds),
        "void_rounds": sum(bool(r.void) for r in run.rounds),
        "accuracy": {
            "final": final(a),
            "best": top,
            "best_round": at,
            "last10": ending,
            "last10_of": of,
        },
    }
    losses = curve(run, "test_loss")
    if losses and not a:
        best_round, least = min(losses, key=lambda found: found[1])
        out["loss"] = {"final": final(losses), "best": least, "best_round": best_round}
    if own_tests := accuracies(run):
        out["personal"] = own_tests
    if left_out := accuracies(run, True):
        out["held_out"] = left_out
    if asked := [r for r in client_rows(run).final if not r.held_out]:
        taken = [r for r in asked if r.took_part is not False]
        settings = run.config.get("evaluate", {})
        clients = int(run.config.get("clients", 0))
        of_participants = {}
        for name in EVALUATED_MODELS:
            accuracy = pooled_accuracy([r for r in taken if r.get(f"tested_{name}")], name)
            if accuracy is not None:
                of_participants[name] = accuracy
        out["personal_of_participants"] = of_participants
        out["judged"] = {
            "clients": len(asked),
            "of": clients - held_out_count(settings.get("held_out", 0.0), clients),
            "never_took_part": len(asked) - len(taken),
            "shared": settings.get("shared"),
        }
    if spread := personal_spread(run):
        out["personal_spread"] = spread
    out["bytes"] = costs.byte_totals(run, prediction)
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
    if wasted := costs.wasted_bytes(run):
        out["wasted"] = wasted
    return out


# -- over seeds ------------------------------------------------------------------------------------
def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half-width of its 95 % t-interval; no half-width for a single value."""
    n = len(values)
    m = math.fsum(values) / len(values)
    s = deviation(values)
    return m, None if s is None else t_quantile(n - 1) * s / math.sqrt(n)


def deviation(values: Sequence[float]) -> float | None:
    """Returns the standard deviation of a sample, with n - 1; None for a single value."""
    n = len(values)
    m = math.fsum(values) / len(values)
    if n < 2:
        return None
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (n - 1))


@functools.cache
def t_quantile(degrees: int) -> float:
    """Returns the t below which 97.5 % of Student's distribution lie.

    With theta = atan(t / sqrt(degrees)) the share between -t and t is a finite sum of powers of
    cos(theta) (Abramowitz and Stegun, 26.7.3 and 26.7.4), which grows with theta: it is bisected.
    """

    def share(theta: float) -> float:
        cosine = math.cos(theta)
        odd = degrees % 2
        term = cosine if odd else 1.0
        terms = 0.0
        for k in range(2 + odd, degrees + 1, 2):
            terms += term
            term *= cosine * cosine * (k - 1) / k
        inner = math.sin(theta) * terms
        return 2 / math.pi * (theta + inner) if odd else inner

    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if share(middle) < 0.95:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(high)


def around(values: Sequence[float], kind: str = "ci") -> tuple[float, float, float]:
    """Returns the mean of some seeds and the ends of their band, a key of BANDS; of a single value
    all three are the value.
    """
    m, half = interval(values)
    if half is None:
        return m, m, m
    if kind == "minmax":
        return m, min(values), max(values)
    if kind == "std":
        half = deviation(values) or 0.0
    return m, m - half, m + half


def band(
    runs: Sequence[Run], x: str, y: str, bytes: str, kind: str = "ci"
) -> dict[str, list[float]]:
    """Returns the mean curve over seeds with its band, at the rounds that all runs evaluated.

    x is the mean of the runs' costs at that round, so that a point is a round whatever the axis.
    Keys: round, x, mean, low, high.
    """
    curves = [dict(curve(r, y)) for r in runs]
    spent = [cost(r, x, bytes) for r in runs]
    shared = sorted(set.intersection(*map(set, curves)))
    points = [around([c[t] for c in curves], kind) for t in shared]
    return {
        "round": list(shared),
        "x": [math.fsum(c[t] for c in spent) / len(spent) for t in shared],
        "mean": [m for m, _, _ in points],
        "low": [low for _, low, _ in points],
        "high": [high for _, _, high in points],
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
