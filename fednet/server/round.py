"""One round, from its selection to its record: each step adds what it found."""

from __future__ import annotations

import functools
import math
import operator
import time
from dataclasses import dataclass, field

import torch

from fednet import records
from fednet.algorithms.base import State
from fednet.algorithms.secure import Secure
from fednet.config import Config
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock
from fednet.experiment.evaluations import SPLIT
from fednet.models.start import BASE
from fednet.plain import JsonDict
from fednet.records.manifest import RunProgress
from fednet.records.rows import TIMES
from fednet.server.exchange import Exchange, RunState, virtual_times
from fednet.training.evaluation import Counts
from fednet.wire.ledger import Kinds, add_kinds
from fednet.wire.messages import clean
from fednet.wire.payload import Run


@dataclass
class OpenRound:
    """before, after: what it starts from, and what came of it so far; a void round changes nothing.
    started: on the monotonic clock. exchange: the one that is open, or the last one; main: the one
    that the clients train in, once it is open.
    """

    number: int
    before: RunState
    after: RunState
    started: float
    exchange: Exchange
    main: Exchange
    record: records.Round
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    virtual: float = 0.0
    virtual_split: dict[str, float] = field(default_factory=dict)
    base: float = 0.0  # the second of the run at which its virtual time began
    predicted: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})
    dropped: dict[int, str] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)  # by client, of the replies that counted
    evaluated: dict[int, dict[str, Counts]] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)  # by client
    reported: JsonDict = field(default_factory=dict)  # by the method, of the round
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, state: RunState, first: Exchange) -> OpenRound:
        """A round whose first exchange is open."""
        record = records.Round(round=first.round, selected=list(first.cohort))
        return cls(first.round, state, state, first.opened, first, first, record)

    def add_times(self, clock: VirtualClock | None) -> None:
        """The exchange's time on the virtual clock, and that of the clients' devices."""
        exchange, asked = self.exchange, self.exchange.asked
        training = [a.training_s for a in asked.values() if not a.reason]
        known = [seconds for seconds in training if seconds is not None]
        if known:
            self.record.training_s = (self.record.training_s or 0.0) + sum(known)
        if clock is None:
            return
        times = virtual_times(exchange)
        leaves = {c: a.leaves_s for c, a in asked.items()}
        splits = {c: a.times for c, a in asked.items() if a.times}
        span = clock.span(times, bool(set(exchange.dropped) - set(times)), leaves)
        self.virtual += span
        for name, part in clock.split(splits, times, span, leaves).items():
            self.virtual_split[name] = self.virtual_split.get(name, 0.0) + part

    def add_result(self, server: State | None) -> None:
        """The exchange's replies are aggregated. server: the next state, None where none comes of
        them, and the round is void.
        """
        exchange, record, done = self.exchange, self.record, self.exchange.done
        self.dropped |= exchange.dropped
        if exchange.restarted:
            record.restarted = sorted({*(record.restarted or ()), *exchange.restarted})
        record.completed_by_phase = [*record.completed_by_phase, sorted(done)]
        if server is None:
            # A void round never was: what its broadcast left out is not owed to those whose state
            # goes back with it.
            record.set(void=True, completed=[])
            self.after = self.before
            return
        if exchange is self.main:
            record.completed = sorted(done)
        versions, states = dict(self.after.versions), dict(self.after.states)
        memory: dict[str, torch.Tensor] = {}  # goes with the state that the client came to
        for client, reply in done.items():
            if reply.message.kept:
                versions[client] = reply.message.key.version
                states[client] = reply.message.state
                memory |= exchange.asked[client].memory
        self.after = RunState(server, versions, states, {**exchange.residuals, **memory})

    def failures(self) -> list[str]:
        """A sentence for each client that could not do its task, or whose reply was unusable."""
        return [
            clean(f"client {client}: {reason.replace(f'client {client}: ', '', 1)}")
            for client, reason in sorted(self.dropped.items())
            if reason.startswith(("failed", "refused", "damaged"))
        ]

    def abort_reason(self, config: Config, void: int) -> str:
        """Why another try could not help, after so many void rounds in a row; "" where it could."""
        whose, selected = self.failures(), len(self.record.selected)
        everybody = self.record.void and len(whose) == selected > 0
        # One client that fails whenever it is asked alone must not end a federation of many.
        if everybody and (selected > 1 or config.clients == 1):
            return f"no client could do its task in round {self.number}: {whose[0]}"
        if void < config.round.void_rounds:
            return ""
        few = f"{void} rounds in a row had fewer than {config.round.min_results} results"
        return few + "".join(f" ({first})" for first in whose[:1])


def predict(experiment: Experiment, open: Exchange, server: State, sums: Kinds) -> None:
    """Adds what an exchange's messages should amount to, from the declarations, for the clients
    that completed it. server: its state as the exchange had it.
    """
    if not experiment.predictable:
        return
    method, clients = experiment.algorithm, sorted(open.done)
    predicted = functools.partial(experiment.predicted, round=open.round)
    exchange = method.exchanges[open.index]
    if experiment.base is not None and open.index == 0:
        first = sum(1 for c in clients if not open.asked[c].job.start)
        if first:
            raw = sum(field.raw for field in experiment.base.form)
            add_kinds(sums["down"], {BASE: first * raw})
    if not experiment.sized_by_client:  # all are alike
        enrolled = [c for c in clients if open.asked[c].enrolled]
        for way, kind, who in (
            ("down", exchange.down, clients),
            ("up", exchange.up, clients),
            ("down", method.Enrolment, enrolled),
        ):
            each = predicted(kind, way, who[0]) if who and kind is not None else {}
            add_kinds(sums[way], {name: len(who) * n for name, n in each.items()})
        return
    for client in clients:
        exact = method.exact(server, open.round, client) if isinstance(method, Secure) else None
        add_kinds(sums["down"], predicted(exchange.down, "down", client, exact))
        add_kinds(sums["up"], predicted(exchange.up, "up", client, exact))
        if open.asked[client].enrolled and method.Enrolment is not None:
            add_kinds(sums["down"], predicted(method.Enrolment, "down", client))


def add_exchange(seconds: dict[str, float], exchange: Exchange) -> None:
    """Adds what an exchange took until now, `encoding` of it before its tasks went out. Of the rest
    the client whose reply came last says how much was its own training, evaluating and encoding;
    sending, down and up, is what else passed between hand-out and arrival; all before the hand-out,
    and what its site did besides, is waiting.
    """
    took = time.monotonic() - exchange.opened
    seconds["encoding"] += exchange.encoding
    left = max(0.0, took - exchange.encoding)
    timed = [r for r in exchange.done.values() if r.message.split]
    last = max(timed, key=operator.attrgetter("arrived"), default=None)
    if last is not None:
        shares = dict(zip(SPLIT, last.message.split))
        shares["sending"] = last.record.taken_s - last.message.seconds
        left -= taken(seconds, shares, left)
    seconds["waiting"] += left


def taken(into: dict[str, float], shares: dict[str, float], limit: float) -> float:
    """Adds shares of a time, none below 0 and no more than `limit` together; a client says what it
    likes. Returns their sum.
    """
    total = 0.0
    for name, share in shares.items():
        part = min(max(share, 0.0), limit - total) if math.isfinite(share) else 0.0
        into[name] += part
        total += part
    return total


def fitted(seconds: dict[str, float], elapsed: float, early: float) -> dict[str, float]:
    """The split of a round that began `early` seconds before it counts: what its clients had the
    time for then is left out, first of waiting.
    """
    out = dict(seconds)
    for name in ("waiting", "sending", "training", "encoding", "evaluating"):
        cut = min(early, out[name])
        out[name] -= cut
        early -= cut
    out["waiting"] = max(0.0, out["waiting"] + elapsed - sum(out.values()))
    return out


def reached(config: Config, progress: RunProgress) -> str | None:
    """Why the run need not go on; None where it must."""
    stop = config.stop
    spent = sum(progress.totals.get(way, 0) for way in ("up", "down"))
    if stop.accuracy is not None and progress.best is not None and progress.best >= stop.accuracy:
        return f"{progress.best_of} accuracy {progress.best:.4f} reached".lstrip()
    if stop.patience is not None and progress.best is not None:
        since = progress.round - progress.best_round
        if since >= stop.patience:
            return f"no better {stop.metric} than in round {progress.best_round}"
    if stop.megabytes is not None and spent >= stop.megabytes * 1e6:
        return f"{spent / 1e6:.4g} MB spent"
    seconds = progress.virtual if config.link.clock == "virtual" else progress.seconds
    if stop.seconds is not None and seconds >= stop.seconds:
        return f"{seconds:.4g} s spent"
    return None
