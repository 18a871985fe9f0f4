"""What a run cost: its bytes from `wire.jsonl`, its rounds and its seconds.

MB is 10^6 bytes of all messages, used or wasted: both directions, all clients, after compression,
protocol overhead included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

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


class Spent:
    """The bytes of a run, read from `wire.jsonl` one row at a time.

    rows: by (round, direction, kind); the kind `envelope` is all that is not payload, and the
    evaluation after the last round has the round AFTER. raw: payload before compression, by
    direction; messages: their number, by direction; servers: the numbers of the run's server
    processes.

    All bytes are used, wasted, or `connection`: messages without a payload (greetings, joins,
    heartbeats, cancellations). useful: used bytes by direction, used: by round; method: used
    payload of the method's own messages, by direction and kind; wasted: by reason, with the
    requests for the payloads.
    """

    def __init__(self, run: Run) -> None:
        self.rows = Counter[tuple[int, str, str]]()
        self.raw, self.messages, self.useful = (Counter(up=0, down=0) for _ in range(3))
        self.used = Counter[int]()
        self.method = {"up": Counter[str](), "down": Counter[str]()}
        self.wasted = Counter[str]()
        self.connection = 0
        servers: dict[int, set[int]] = defaultdict(set)
        for w in run.lines("wire"):
            t = round_of(w)
            servers[t].add(w.incarnation)
            for kind, n in w.kinds.items():
                self.rows[t, w.direction, kind] += n
            self.rows[t, w.direction, "envelope"] += w.bytes - sum(w.kinds.values())
            self.raw[w.direction] += w.raw_bytes
            self.messages[w.direction] += 1
            if w.useful:
                self._use(w, 1)
            elif w.kinds or w.reason or w.type == "refused":
                why = w.reason or ("not used" if w.kinds else w.type)
                self.wasted[why.partition(":")[0]] += w.bytes
            else:
                self.connection += w.bytes
        self.servers = set[int]().union(*servers.values())
        # Only a round in which two servers took part can have a payload twice.
        twice = {t for t, processes in servers.items() if len(processes) > 1}
        for w in _repeated(run, twice) if twice else ():
            self._use(w, -1)
            self.wasted[REPEATED] += w.bytes

    def _use(self, w: Wire, sign: int) -> None:
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

    def by_round(self, bytes: str = "total") -> Mapping[int, int]:
        if bytes == "useful":
            return self.used
        out = Counter[int]()
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
        size = Counter[str]()
        for (_, _, kind), n in self.rows.items():
            size[kind] += n
        return sorted((k for k in size if size[k]), key=lambda k: (k == "envelope", -size[k], k))


@once
def ledger(run: Run) -> Spent:
    return Spent(run)


def round_of(w: Wire) -> int:
    """Returns the round that a message's bytes belong to."""
    return AFTER if w.final else w.round


def _repeated(run: Run, rounds: set[int]) -> Iterator[Wire]:
    """Yields the used messages of these rounds whose payload crossed again to a later server: if
    one died between two checkpoints, the next one repeated the rounds since the first of them.
    """

    def used() -> Iterator[tuple[Wire, tuple[object, ...]]]:
        """Yields each used message with what it carried."""
        for w in run.lines("wire"):
            if w.useful and round_of(w) in rounds:
                yield w, (w.direction, w.type, w.round, w.phase, w.client, w.purpose, w.final)

    # The last server that each payload was sent to or from. A row without payload is the last only
    # if the payload never crossed.
    last: dict[tuple[object, ...], int] = {}
    crossed: set[tuple[object, ...]] = set()
    for w, what in used():
        if any(w.kinds.values()):
            crossed.add(what)
        elif what in crossed:
            continue
        last[what] = w.incarnation
    for w, what in used():
        if last[what] not in (0, w.incarnation):
            yield w


def seconds_key(run: Run) -> str:
    """Returns the field of a round that has its time: a key of CLOCKS."""
    virtual = (run.config.get("link") or {}).get("clock") == "virtual"
    if virtual and any(r.seconds_virtual is not None for r in run.rounds):
        return "seconds_virtual"
    return "seconds"


def cost(run: Run, by: str, bytes: str = "total") -> dict[int, float]:
    """Returns the cumulative cost after each round, by its number. by: a name of COSTS; bytes:
    total | up | down (all bytes), useful (each used payload once, both directions).

    Bytes before round 1 (joins) count into round 1. Traffic that a resumed run repeats counts
    twice. The evaluation after the last round is no cost of a round.
    """
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


# -- bytes: wasted, predicted against measured -----------------------------------------------------
def wasted(run: Run) -> dict[str, int]:
    """Returns bytes of payloads, and of the requests for them, that were not used or whose round
    was repeated, by reason, the largest first.
    """
    return dict(sorted(ledger(run).wasted.items(), key=lambda item: (-item[1], item[0])))


def predicted(run: Run, prediction: Mapping[str, Mapping[str, int]] | None) -> JsonDict | None:
    """Compares the predicted bytes of the method's own messages with the measured ones, by
    direction and kind. None without a prediction.
    """
    if prediction is None:
        return None
    out: JsonDict = {}
    for way, measured in ledger(run).method.items():
        want = prediction.get(way) or {}
        for kind in sorted({*want, *measured}):
            p, m = int(want.get(kind, 0)), measured[kind]
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
        "kinds": {
            way: {k: n for k in book.kinds if (n := book.sum(direction=way, kind=k))}
            for way in ("up", "down")
        },
    }
    if compared := predicted(run, prediction):
        out["predicted"] = compared
    return out
