"""What a run cost: its bytes from `wire.jsonl`, its rounds and its seconds.

MB is 10^6 bytes of all messages, used or wasted: both directions, all clients, after compression,
protocol overhead included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict
from fednet.records import Wire
from fednet.report.read import Run, once

BYTES = ("total", "up", "down", "useful")
COSTS = ("rounds", "mb", "seconds")
CLOCKS = {"seconds": "wall clock", "seconds_virtual": "simulated time"}  # fields of a round
SENT = {
    "total": "sent by and to all clients",
    "up": "sent by all clients",
    "down": "sent to all clients",
    "useful": "of messages that were used, each counted once, by and to all clients",
}
REPEATED = "round repeated"  # a reason of waste
AFTER = 1 << 62  # the round number of the evaluation after the last round


@dataclass
class Spent:
    """The bytes of a run.

    rows: by (round, direction, kind); the kind `envelope` is all that is not payload, and the
    evaluation after the last round has the round AFTER. raw: payload before compression, by
    direction; messages: their number, by direction; servers: the numbers of the run's server
    processes.

    All bytes are used, wasted, or `connection`: messages without a payload (greetings, joins,
    heartbeats, cancellations). useful: used bytes by direction, used: by round; method: used
    payload of the method's own messages, by direction and kind; wasted: by reason, with the
    requests for the payloads.
    """

    rows: dict[tuple[int, str, str], int] = field(default_factory=lambda: defaultdict(int))
    raw: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    messages: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    servers: set[int] = field(default_factory=set)
    useful: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    method: dict[str, dict[str, int]] = field(
        default_factory=lambda: {"up": defaultdict(int), "down": defaultdict(int)}
    )
    wasted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    connection: int = 0

    def add(self, w: Wire) -> None:
        """Adds a row: a message, or several that are counted together."""
        t, payload = round_of(w), sum(w.kinds.values())
        for kind, n in w.kinds.items():
            self.rows[t, w.direction, kind] += n
        self.rows[t, w.direction, "envelope"] += w.bytes - payload
        self.raw[w.direction] += w.raw_bytes
        self.messages[w.direction] += 1
        self.servers.add(w.incarnation)
        if w.useful:
            self.use(w)
        elif w.kinds or w.reason or w.type == "refused":
            why = w.reason or ("not used" if w.kinds else w.type)
            self.wasted[why.partition(":")[0]] += w.bytes
        else:
            self.connection += w.bytes

    def use(self, w: Wire, sign: int = 1) -> None:
        """Counts a message as used; with sign -1, no longer."""
        self.useful[w.direction] += sign * w.bytes
        self.used[round_of(w)] += sign * w.bytes
        if w.purpose == "train":
            for kind, n in w.kinds.items():
                self.method[w.direction][kind] += sign * n

    def sum(self, **by: str | int) -> int:
        """Returns bytes with this `round`, `direction` and `kind`, whichever are given."""
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

    def total(self, bytes: str = "total") -> int:
        """Of the whole run, its last evaluation included."""
        return sum(self.by_round(bytes).values())

    @property
    def kinds(self) -> list[str]:
        """The kinds that were sent, the largest first, the envelope last."""
        size: dict[str, int] = defaultdict(int)
        for (_, _, kind), n in self.rows.items():
            size[kind] += n
        return sorted((k for k in size if size[k]), key=lambda k: (k == "envelope", -size[k], k))


@once
def ledger(run: Run) -> Spent:
    """Sums `wire.jsonl`, one row at a time."""
    spent = Spent()
    servers: dict[int, set[int]] = defaultdict(set)
    for w in run.lines("wire"):
        spent.add(w)
        servers[round_of(w)].add(w.incarnation)
    # Only a round in which two servers took part can have a payload twice.
    for w in _repeated(run, {t for t, processes in servers.items() if len(processes) > 1}):
        spent.use(w, -1)
        spent.wasted[REPEATED] += w.bytes
    return spent


def round_of(w: Wire) -> int:
    """Returns the round that a message's bytes belong to."""
    return AFTER if w.final else w.round


def _repeated(run: Run, rounds: set[int]) -> Iterator[Wire]:
    """Yields the used messages of these rounds whose payload crossed again to a later server: one
    that is started after a crash repeats the rounds since its checkpoint.
    """
    if not rounds:
        return

    def used() -> Iterator[Wire]:
        return (w for w in run.lines("wire") if w.useful and round_of(w) in rounds)

    last = _newest(used())
    yield from (w for w in used() if not _counts(w, last))


def _newest(rows: Iterable[Wire]) -> dict[tuple[object, ...], int]:
    """Returns the last server that each payload was sent to or from, of useful rows in the order of
    time: if a server died between two checkpoints, the next one repeated rounds, and the rows of
    the next one count. A row without payload is the last only if the payload never crossed.
    """
    last: dict[tuple[object, ...], int] = {}
    crossed: set[tuple[object, ...]] = set()
    for row in rows:
        what = _payload_of(row)
        if any(row.kinds.values()):
            crossed.add(what)
        elif what in crossed:
            continue
        last[what] = row.incarnation
    return last


def _counts(row: Wire, newest: Mapping[tuple[object, ...], int]) -> bool:
    """Returns whether no later server repeated the payload of a useful row."""
    return newest[_payload_of(row)] in (0, row.incarnation)


def _payload_of(w: Wire) -> tuple[object, ...]:
    return (w.direction, w.type, w.round, w.phase, w.client, w.purpose, w.final)


def seconds_key(run: Run) -> str:
    """Returns the field of a round that has its time: a key of CLOCKS."""
    virtual = (run.config.get("link") or {}).get("clock") == "virtual"
    return (
        "seconds_virtual"
        if virtual and any(r.seconds_virtual is not None for r in run.rounds)
        else "seconds"
    )


def cost(run: Run, by: str, bytes: str = "total") -> dict[int, float]:
    """Returns the cumulative cost after each round, by its number. by: rounds | mb | seconds;
    bytes: total | up | down (all bytes), useful (each used payload once, both directions).

    Bytes before round 1 (joins) count into round 1. Traffic that a resumed run repeats counts
    twice. The evaluation after the last round is no cost of a round.
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


def axis(by: str, bytes: str = "total", clock: str = "seconds") -> str:
    """Returns the label of an axis of costs. clock: a key of CLOCKS."""
    if by == "rounds":
        return "round"
    if by == "seconds":
        return f"seconds ({CLOCKS[clock]})"
    ways = {"total": "up and down", "useful": "used, up and down"}
    return f"MB sent ({ways.get(bytes, bytes)})"


def counted(bytes: str) -> str:
    """Returns a sentence about which bytes MB counts."""
    return f"MB = 10^6 bytes {SENT[bytes]}, after compression, including protocol overhead"


def time_split(run: Run) -> tuple[list[int], dict[str, list[float]]]:
    """Returns (rounds, {phase: seconds per round}), by the run's clock; the rest of a round is
    `other`.
    """
    key = seconds_key(run)
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


# -- bytes: by kind, wasted, predicted against measured --------------------------------------------
def bytes_by_kind(run: Run) -> tuple[list[int], dict[str, dict[str, list[int]]]]:
    """Returns (rounds, {direction: {kind: bytes per round}}). Round 0 is what was sent before the
    first; the evaluation after the last round is left out.
    """
    book = ledger(run)
    rounds = sorted({t for t, _, _ in book.rows} - {AFTER})
    table: dict[str, dict[str, list[int]]] = {"up": {}, "down": {}}
    for way, by_kind in table.items():
        for kind in book.kinds:
            values = [book.rows.get((t, way, kind), 0) for t in rounds]
            if any(values):
                by_kind[kind] = values
    return rounds, table


def wasted(run: Run) -> dict[str, int]:
    """Returns bytes of payloads, and of the requests for them, that were not used or whose round
    was repeated, by reason, the largest first.
    """
    return dict(sorted(ledger(run).wasted.items(), key=lambda item: (-item[1], item[0])))


def kinds_of(run: Run) -> dict[str, dict[str, int]]:
    """Returns bytes by direction and kind."""
    book = ledger(run)
    return {
        way: {k: n for k in book.kinds if (n := book.sum(direction=way, kind=k))}
        for way in ("up", "down")
    }


def predicted(run: Run, prediction: Mapping[str, Mapping[str, int]] | None) -> JsonDict | None:
    """Compares the predicted bytes of the method's own messages with the measured ones, by
    direction and kind. None without a prediction.
    """
    if prediction is None:
        return None
    measured = ledger(run).method
    out: JsonDict = {}
    for way in ("up", "down"):
        want = prediction.get(way) or {}
        for kind in sorted({*want, *measured[way]}):
            p, m = int(want.get(kind, 0)), measured[way].get(kind, 0)
            out.setdefault(way, {})[kind] = {"predicted": p, "measured": m, "difference": m - p}
    return out


def summed(run: Run, prediction: Mapping[str, Mapping[str, int]] | None) -> JsonDict:
    """up, down, total: all bytes; mb: of both; after: those in no round's record; useful: those of
    messages that were used; connection: see `Spent`; raw: payload before compression.
    """
    book = ledger(run)
    up, down = book.sum(direction="up"), book.sum(direction="down")
    out: JsonDict = {
        "up": up,
        "down": down,
        "total": up + down,
        "mb": (up + down) / 1e6,
        "after": {
            "up": up - sum(r.bytes_up for r in run.rounds),
            "down": down - sum(r.bytes_down for r in run.rounds),
        },
        "useful": dict(book.useful),
        "connection": book.connection,
        "raw": dict(book.raw),
        "messages": dict(book.messages),
        "kinds": kinds_of(run),
    }
    if compared := predicted(run, prediction):
        out["predicted"] = compared
    return out
