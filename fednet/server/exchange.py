"""The round that is open, and its exchange: what exchanges.py and rounds.py work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fednet import records
from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.journal.book import Kinds
from fednet.plain import JsonDict
from fednet.protocol.tasks import TaskSpec
from fednet.records.manifest import Candidate
from fednet.records.rows import TIMES
from fednet.server.inbox import ReceivedReply
from fednet.server.schedule import Cohort
from fednet.server.sources import Asked
from fednet.training.evaluation import Counts
from fednet.wire.codec import Encoded
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Purpose, clean
from fednet.wire.payload import Run


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds. server: the method's own state at the server, which
    has the model (`Algorithm.shared_model`). versions, states: by client, of its state that was
    last used, and its SHA-256. residuals: what compressed broadcasts have left out so far, by
    field, and, by client, what compressors remember at both ends. candidates: what each client
    replied last, where the clients are selected by it.
    """

    server: State
    versions: Mapping[int, str]
    states: Mapping[int, str]
    residuals: Mapping[str, torch.Tensor]
    candidates: Mapping[int, Candidate] = field(default_factory=dict)


@dataclass
class OpenExchange:
    """cohort: in ascending order. before: what it starts from. asked: by client, in the order of
    the cohort once all are asked. residuals: what compressed broadcasts have left out, and what
    compressors remember. opened: on the monotonic clock; at: the second of the run. found: replies
    that earlier servers received, by client. encoding: seconds. judge: see `TaskSpec`.
    restarted: clients that had lost their state, and were asked again from an initial one.
    schedule: who of its clients is in time. noted: of whom it is on record that they were dropped.
    fed: clients of the cohort, from the first on, whose replies have been added up or left out.
    """

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    before: RunState
    residuals: dict[str, torch.Tensor]
    opened: float
    at: float = 0.0
    asked: dict[int, Asked] = field(default_factory=dict)
    found: dict[int, ReceivedReply] = field(default_factory=dict)
    encoding: float = 0.0
    judge: bool = False
    restarted: list[int] = field(default_factory=list)
    schedule: Cohort = field(default_factory=lambda: Cohort(()))
    noted: set[int] = field(default_factory=set)
    fed: int = 0
    last: tuple[Payload, Encoded, bytes] | None = None  # what was encoded last, and its digest
    cache: JsonDict = field(default_factory=dict)
    based: dict[bytes, TaskSpec] = field(default_factory=dict)  # see `with_base`

    @property
    def done(self) -> dict[int, ReceivedReply]:
        """The replies that count, by client."""
        return {c: a.reply for c, a in self.asked.items() if a.reply is not None and not a.reason}

    @property
    def dropped(self) -> dict[int, str]:
        """By client: why it did not complete the exchange."""
        return {client: asked.reason for client, asked in self.asked.items() if asked.reason}

    def past(self, client: int, way: str) -> Memory:
        """What is remembered with a client of earlier messages that way."""
        memory = self.asked[client].memory
        return Memory(self.residuals, memory, f"client {client}/{way}/{self.index}/")


@dataclass
class OpenRound:
    """One round, from its selection to its record: each step adds what it found.

    before, after: what it starts from, and what came of it so far; a void round changes nothing.
    started: on the monotonic clock. exchange: the one that is open, or the last one; main: the one
    that the clients train in, once it is open. virtual_start: the second of the run at which its
    virtual time began. runs: of the replies that counted. reports: by the clients. spoiled: whether
    it is void because of what a client has sent that nobody knows.
    """

    number: int
    before: RunState
    after: RunState
    started: float
    exchange: OpenExchange
    main: OpenExchange
    record: records.Round
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    virtual: float = 0.0
    virtual_split: dict[str, float] = field(default_factory=dict)
    virtual_start: float = 0.0
    predicted: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})
    dropped: dict[int, str] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    evaluated: dict[int, dict[str, Counts]] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    spoiled: bool = False

    @classmethod
    def begun(cls, first: OpenExchange) -> OpenRound:
        """A round whose first exchange is open."""
        record = records.Round(round=first.round, selected=list(first.cohort))
        return cls(first.round, first.before, first.before, first.opened, first, first, record)

    @property
    def failures(self) -> list[str]:
        """A sentence for each client that could not do its task, or whose reply was unusable."""
        return [
            clean(f"client {client}: {reason.replace(f'client {client}: ', '', 1)}")
            for client, reason in sorted(self.dropped.items())
            if reason.startswith(("failed", "refused", "damaged"))
        ]
