"""What a run cost: its bytes from `wire.jsonl`, its rounds and its seconds.

MB is 10^6 bytes of all messages, used or wasted: both directions, all clients, after compression,
protocol overhead included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from fednet.plain import JsonDict
from fednet.records import Wire
from fednet.report.read import Run, once

COSTS = ("rounds", "mb", "seconds")
CLOCKS = {"seconds": "wall clock", "seconds_virtual": "simulated time"}  # fields of a round
AFTER = 1 << 62  # the round number of the evaluation after the last round
ENVELOPE = "envelope"  # the kind of all bytes that are not payload
FIELDS = ("round", "direction", "purpose", "kind", "use")
# Values of `use`; all others are reasons of waste. Messages without a payload (greetings, joins,
# heartbeats, cancellations) keep the connection.
USED = "used"
CONNECTION = "connection"
REPEATED = "round repeated"
# Which bytes a figure or a table counts: what their fields are.
BYTES: dict[str, dict[str, str]] = {
    "total": {},
    "up": {"direction": "up"},
    "down": {"direction": "down"},
    "useful": {"use": USED},
}
SENT = {
    "total": "sent by and to all clients",
    "up": "sent by all clients",
    "down": "sent to all clients",
    "useful": "of messages that were used, each counted once, by and to all clients",
}


class RunBytes:
    """The bytes of a run, read from `wire.jsonl` one line at a time."""

    def __init__(self, run: Run) -> None:
        self.bytes = Counter[tuple[int, str, str, str, str]]()  # by the values of FIELDS
        # Bytes of payload before compression, and the number of messages, by direction.
        self.raw = Counter(up=0, down=0)
        self.messages = Counter(up=0, down=0)
        servers: dict[int, set[int]] = defaultdict(set)
        for line in run.grouped_messages():
            w = line.total()
            servers[round_of(w)].add(w.incarnation)
            self.raw[w.direction] += w.raw_bytes
            self.messages[w.direction] += len(line)
            self._count(w, _use(w), 1)
        # The numbers of the run's server processes.
        self.servers = set[int]().union(*servers.values())
        # Only a round in which two servers took part can have a payload twice.
        twice = {t for t, processes in servers.items() if len(processes) > 1}
        for w in _repeated_messages(run, twice) if twice else ():
            self._count(w, USED, -1)
            self._count(w, REPEATED, 1)

    def _count(self, w: Wire, use: str, sign: int) -> None:
        """Adds a message's bytes to those of this use, or with sign -1 takes them away."""
        t = round_of(w)
        rest = w.bytes
        for kind, n in w.kinds.items():
            self.bytes[t, w.direction, w.purpose, kind, use] += sign * n
            rest -= n
        self.bytes[t, w.direction, w.purpose, ENVELOPE, use] += sign * rest

    def by(self, *fields: str, **where: object) -> Counter[Any]:
        """Returns the bytes by one of FIELDS, or by a tuple of several. where: values of fields, to
        count only what has them.
        """
        of = itemgetter(*map(FIELDS.index, fields))
        wanted = [(FIELDS.index(name), value) for name, value in where.items()]
        found = Counter[Any]()
        for key, n in self.bytes.items():
            if n and all(key[i] == value for i, value in wanted):
                found[of(key)] += n
        return found

    def by_round(self, bytes: str = "total") -> Counter[int]:
        """bytes: a key of BYTES."""
        return self.by("round", **BYTES[bytes])

    def total(self, bytes: str = "total") -> int:
        """Of the whole run, its last evaluation included."""
        return self.by_round(bytes).total()

    @property
    def kinds(self) -> list[str]:
        """The kinds that were sent, the largest first, the envelope last."""
        size = self.by("kind")
        return sorted(size, key=lambda k: (k == ENVELOPE, -size[k], k))


@once
def ledger(run: Run) -> RunBytes:
    return RunBytes(run)


def _use(w: Wire) -> str:
    """Returns what a message's bytes were for, as in FIELDS."""
    if w.useful:
        return USED
    if w.kinds or w.reason or w.type == "refused":
        why = w.reason or ("not used" if w.kinds else w.type)
        return why.partition(":")[0]
    return CONNECTION


def round_of(w: Wire) -> int:
    """Returns the round that a message's bytes belong to."""
    return AFTER if w.final else w.round


def _repeated_messages(run: Run, rounds: set[int]) -> Iterator[Wire]:
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
    bare = dict[tuple[object, ...], int]()
    payload = dict[tuple[object, ...], int]()
    for w, what in used():
        of = payload if any(w.kinds.values()) else bare
        of[what] = max(of.get(what, 0), w.incarnation)
    last = {**bare, **payload}
    for w, what in used():
        if last[what] not in (0, w.incarnation):
            yield w


def seconds_key(run: Run) -> str:
    """Returns the field of a round that has its time: a key of CLOCKS."""
    virtual = (run.config.get("link") or {}).get("clock") == "virtual"
    if virtual and any(r.seconds_virtual is not None for r in run.rounds):
        return "seconds_virtual"
    return "seconds"


@once
def cost(run: Run, by: str, bytes: str = "total") -> dict[int, float]:
    """Returns the cumulative cost after each round, by its number. by: a name of COSTS; bytes:
    a key of BYTES.

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
    spent = sorted(ledger(run).by_round(bytes).items())
    total = 0
    out = {}
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


def what_counts(bytes: str) -> str:
    """Returns a sentence about which bytes MB counts."""
    return f"MB = 10^6 bytes {SENT[bytes]}, after compression, including protocol overhead"


# -- bytes: wasted, predicted against measured -----------------------------------------------------
def wasted_bytes(run: Run) -> dict[str, int]:
    """Returns bytes of payloads, and of the requests for them, that were not used or whose round
    was repeated, by reason, the largest first.
    """
    found = ledger(run).by("use")
    reasons = (item for item in found.items() if item[0] not in (USED, CONNECTION))
    return dict(sorted(reasons, key=lambda item: (-item[1], item[0])))


def compare_prediction(
    run: Run, prediction: Mapping[str, Mapping[str, int]] | None
) -> JsonDict | None:
    """Compares the predicted bytes of the method's own messages with the measured ones, by
    direction and kind. None without a prediction.
    """
    if prediction is None:
        return None
    out: JsonDict = {}
    for way in ("up", "down"):
        measured = ledger(run).by("kind", direction=way, purpose="train", use=USED)
        want = prediction.get(way) or {}
        for kind in sorted({*want, *measured} - {ENVELOPE}):
            p = int(want.get(kind, 0))
            m = measured[kind]
            out.setdefault(way, {})[kind] = {"predicted": p, "measured": m, "difference": m - p}
    return out


def byte_totals(run: Run, prediction: Mapping[str, Mapping[str, int]] | None) -> JsonDict:
    """up, down, total: all bytes; mb: of both; after: those in no round's record; useful: those of
    messages that were used; connection: of messages without a payload; raw: payload before
    compression.
    """
    book = ledger(run)
    sent = book.by("direction")
    useful = book.by("direction", use=USED)
    recorded = {
        "up": sum(r.bytes_up for r in run.rounds),
        "down": sum(r.bytes_down for r in run.rounds),
    }
    kinds = {}
    for way in ("up", "down"):
        found = book.by("kind", direction=way)
        kinds[way] = {kind: found[kind] for kind in book.kinds if found[kind]}
    out: JsonDict = {
        "up": sent["up"],
        "down": sent["down"],
        "total": sent.total(),
        "mb": sent.total() / 1e6,
        "after": {way: sent[way] - recorded[way] for way in ("up", "down")},
        "useful": {way: useful[way] for way in ("up", "down")},
        "connection": book.by("use")[CONNECTION],
        "raw": dict(book.raw),
        "messages": dict(book.messages),
        "kinds": kinds,
    }
    if compared := compare_prediction(run, prediction):
        out["predicted"] = compared
    return out
