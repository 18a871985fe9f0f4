"""One round, from its selection to its record: each step adds what it found."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import torch

from fednet import records
from fednet.algorithms.base import State, Tensors
from fednet.algorithms.state import PerClient
from fednet.config import Config
from fednet.errors import Forgotten
from fednet.experiment.clock import VirtualClock
from fednet.experiment.store import RowStore
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.protocol.tasks import STATE_LOST
from fednet.server.accounts import nothing
from fednet.server.phases import Phase
from fednet.server.results import accuracies
from fednet.server.results.timing import TIMES
from fednet.tensors import Layout, Slot
from fednet.training.evaluation import Counts
from fednet.wire.ledger import Kinds
from fednet.wire.messages import clean
from fednet.wire.payload import Run

SHOWN = 3  # clients left out whose reasons are shown for a round


class Residuals(State):
    """What compressed broadcasts have left out so far, by field; and what compressors remember at
    both ends: (field, rows by client), a pair for each length. also: (name, another under which the
    same stands in `down`), where an earlier release wrote it.
    """

    down: dict[str, torch.Tensor]
    also: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, PerClient], ...] = ()


class Memories:
    """Writes down what compressors remember, a client's as a row on disk: what is the same as at
    the last checkpoint is not written again, nor what several clients have in common.
    """

    OF = re.compile(r"client ([0-9]+)/(.*)")

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._known: dict[int, tuple[torch.Tensor, str]] = {}  # by identity: and its row's name

    def written(self, all: Mapping[str, torch.Tensor]) -> Residuals:
        """What `read` makes the same of, for the next checkpoint."""
        down: dict[str, torch.Tensor] = {}
        rows: dict[tuple[str, int], dict[int, str]] = {}
        known = {}
        for name, value in all.items():
            whose = self.OF.fullmatch(name)
            if whose is None or value.dim() != 1 or value.dtype != torch.float32:
                down[name] = value
                continue
            at = id(value)
            if at not in known:
                known[at] = self._known.get(at) or (value, self._store.write(_as_row(value)))
            rows.setdefault((whose[2], len(value)), {})[int(whose[1])] = known[at][1]
        self._known = known
        kept = ((f, PerClient(_layout(n), of, self._store)) for (f, n), of in rows.items())
        return Residuals(down, (), tuple(kept))  # type: ignore[call-arg]

    def read(self, found: Residuals) -> dict[str, torch.Tensor]:
        """Raises StateError where a row is gone, or another."""
        by_row: dict[str, torch.Tensor] = {}
        all = found.down | {name: found.down[same] for name, same in found.also}
        for name, kept in found.rows:
            for client, row in kept.names.items():
                if row not in by_row:
                    by_row[row] = kept[client].vector.clone()
                all[f"client {client}/{name}"] = by_row[row]
        self._known = {id(value): (value, row) for row, value in by_row.items()}
        return all


def _layout(n: int) -> Layout:
    return Layout((Slot("h", (n,), "parameter"),))


def _as_row(value: torch.Tensor) -> Tensors:
    none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    return Tensors(_layout(len(value)), value, *none)


@dataclass(frozen=True)
class Carried:
    """What one round hands to the next. versions, states: by client, of its state that was last
    used, and its SHA-256. residuals: what compressed broadcasts have left out so far, by field,
    and, by client, what compressors remember at both ends.
    """

    server: State
    versions: Mapping[int, str]
    states: Mapping[int, str]
    residuals: Mapping[str, torch.Tensor]


@dataclass
class Round:
    """before, after: what it starts from, and what came of it so far; a void round changes nothing.
    started: on the monotonic clock. phase: the exchange that is open, or the last one;
    main: the one that the clients train in, once it is open.
    """

    number: int
    before: Carried
    after: Carried
    started: float
    phase: Phase
    main: Phase
    record: records.Round
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    virtual: float = 0.0
    virtual_split: dict[str, float] = field(default_factory=dict)
    base: float = 0.0  # the second of the run at which its virtual time began
    predicted: Kinds = field(default_factory=nothing)
    dropped: dict[int, str] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)  # by client: of those folded
    judged: dict[int, dict[str, Counts]] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)  # by client
    reported: JsonDict = field(default_factory=dict)  # by the method, of the round
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, carried: Carried, phase: Phase) -> Round:
        """A round whose first exchange was opened with what the one before left."""
        record = records.Round(round=phase.round, selected=list(phase.cohort))
        return cls(phase.round, carried, carried, phase.opened, phase, phase, record)

    # -- what its exchanges add --------------------------------------------------------------------
    def spent(self, clock: VirtualClock | None) -> None:
        """The exchange's time on the virtual clock, and that of the clients' devices."""
        phase = self.phase
        if phase.training:
            before = self.record.training_s or 0.0
            self.record.training_s = before + sum(phase.training[c] for c in phase.done)
        if clock is None:
            return
        times, leaves = phase.virtual, phase.leaves
        span = clock.span(times, bool(set(phase.dropped) - set(times)), leaves)
        self.virtual += span
        for name, part in clock.split(phase.virtual_split, times, span, leaves).items():
            self.virtual_split[name] = self.virtual_split.get(name, 0.0) + part

    def finished(self, server: State | None) -> None:
        """The exchange's fold is finished. server: the next state, None where none comes of it, and
        the round is void.
        """
        phase, record = self.phase, self.record
        self.dropped |= phase.dropped
        if phase.restarted:
            record.restarted = sorted({*(record.restarted or ()), *phase.restarted})
        record.completed_by_phase = [*record.completed_by_phase, sorted(phase.done)]
        if server is None:
            record.set(void=True, completed=[])
            # A void round never was: what its broadcast left out is not owed to those whose state
            # goes back with it.
            self.after = replace(self.before, residuals=remembered(self.before.residuals, phase))
            return
        kept = {c: reply for c, reply in phase.done.items() if reply.kept}
        if phase is self.main:
            record.completed = sorted(phase.done)
        self.after = Carried(
            server,
            {**self.after.versions, **{c: r.key.version for c, r in kept.items()}},
            {**self.after.states, **{c: r.state for c, r in kept.items()}},
            remembered(phase.residuals, phase, kept),
        )

    # -- what is said of it ------------------------------------------------------------------------
    def failures(self) -> list[str]:
        """A sentence for each client that could not do its task, or whose reply was of no use."""
        return [
            clean(f"client {client}: {reason.replace(f'client {client}: ', '', 1)}")
            for client, reason in sorted(self.dropped.items())
            if reason.startswith(("failed", "refused", "damaged"))
        ]

    def states_lost(self) -> dict[int, str]:
        """By client that was dropped because its state is lost: what it said."""
        return {
            client: clean(reason.removeprefix(STATE_LOST))
            for client, reason in sorted(self.dropped.items())
            if reason.startswith(STATE_LOST)
        }

    def told(self) -> list[str]:
        """The first of the failures, and how many more there are, and who began again, as they are
        shown.
        """
        whose = self.failures()
        rest = len(whose) - SHOWN
        more = [f"and {rest} more clients"] if rest > 0 else []
        if again := self.record.restarted:
            more.append(f"client(s) {as_text(again)} had lost their state and began again")
        return [f"round {self.number}: {text}" for text in [*whose[:SHOWN], *more]]

    def hopeless(self, config: Config, void: int) -> str:
        """Why another try could not help, after so many void rounds in a row; "" where it could."""
        whose, selected = self.failures(), len(self.record.selected)
        everybody = self.record.void and len(whose) == selected > 0
        # One client that fails whenever it is asked alone must not end a federation of many.
        if everybody and (selected > 1 or config.clients == 1):
            return f"nobody could do the task of round {self.number}: {whose[0]}"
        if void < config.round.void_rounds:
            return ""
        few = f"{void} rounds in a row had fewer than {config.round.min_results} results"
        return few + "".join(f" ({first})" for first in whose[:1])

    def client_lines(self) -> list[JsonDict]:
        """The round's lines of clients.jsonl: of whom there is something to say."""
        rows: dict[int, dict[str, Counts]] = {c: {} for c in self.reports}
        rows |= self.judged
        done = self.main.done
        return [
            accuracies.client_row(
                self.number,
                c,
                verdict,
                self.runs.get(c),
                reply=done.get(c),
                reported=self.reports.get(c),
            ).line()
            for c, verdict in sorted(rows.items())
        ]


def remembered(
    residuals: Mapping[str, torch.Tensor], phase: Phase, kept: Container[int] = ()
) -> Mapping[str, torch.Tensor]:
    """What is remembered after a phase: with the clients that kept the state they came to, what
    followed from it; with those that have forgotten what they had, nothing.
    """
    gone = tuple(f"client {c}/" for c, why in phase.dropped.items() if Forgotten.says in why)
    ahead = {k: v for c, more in phase.ahead.items() if c in kept for k, v in more.items()}
    if not gone and not ahead:
        return residuals
    return {k: v for k, v in residuals.items() if not k.startswith(gone)} | ahead
