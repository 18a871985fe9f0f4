"""The round that is open, and its exchange: what exchanges.py and rounds.py work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fednet import records
from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.journal.book import Kinds
from fednet.records.manifest import Candidate
from fednet.records.rows import TIMES
from fednet.server.faulty_protocol import FaultySpec
from fednet.server.inbox import ReceivedReply
from fednet.server.schedule import Cohort
from fednet.server.sources import AskedClient
from fednet.training.evaluation import Counts
from fednet.wire.codec import Cache, Encoded
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Purpose, clean
from fednet.wire.payload import LocalRun


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds."""

    server: State
    """The method's own state at the server, which has the model (`Algorithm.shared_model`)."""
    versions: Mapping[int, str]
    """By client, of its state that was last used."""
    states: Mapping[int, str]
    """By client, the SHA-256 of that state."""
    residuals: Mapping[str, torch.Tensor]
    """What compressed broadcasts have left out so far, by field, and, by client, what compressors
    remember at both ends.
    """
    candidates: Mapping[int, Candidate] = field(default_factory=dict)
    """What each client replied last, where the clients are selected by it."""


class Broadcast(NamedTuple):
    """What the clients are sent that get the same."""

    down: Payload
    encoded: Encoded
    check: bytes
    """The digest of its body."""


@dataclass
class OpenExchange:
    """An exchange with its clients: tasks that went out, and replies that came."""

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    """In ascending order."""
    before: RunState
    """What it starts from."""
    residuals: dict[str, torch.Tensor]
    """What compressed broadcasts have left out, and what compressors remember."""
    opened: float
    """On the monotonic clock."""
    at: float = 0.0
    """The second of the run."""
    asked: dict[int, AskedClient] = field(default_factory=dict)
    """By client, in the order of the cohort once all are asked."""
    earlier: dict[int, ReceivedReply] = field(default_factory=dict)
    """Replies that earlier servers received, by client."""
    encoding: float = 0.0
    """In seconds."""
    evaluates: bool = False
    """See `TaskSpec`."""
    restarted: list[int] = field(default_factory=list)
    """Clients that had lost their state, and were asked again from an initial one."""
    schedule: Cohort = field(default_factory=lambda: Cohort(()))
    """Who of its clients is in time."""
    noted: set[int] = field(default_factory=set)
    """Of whom it is on record that they were dropped."""
    added_up: int = 0
    """Clients of the cohort, from the first on, whose replies have been added up or left out."""
    last: Broadcast | None = None  # what was encoded last
    cache: Cache = field(default_factory=dict)
    based: dict[bytes, FaultySpec] = field(default_factory=dict)  # see `with_base`

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
    """One round, from its selection to its record: each step adds what it found."""

    number: int
    before: RunState
    """What it starts from."""
    after: RunState
    """What came of it so far; a void round changes nothing."""
    started: float
    """On the monotonic clock."""
    exchange: OpenExchange
    """The one that is open, or the last one."""
    main: OpenExchange
    """The one that the clients train in, once it is open."""
    record: records.Round
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    virtual: float = 0.0
    """Seconds that it took on the virtual clock so far."""
    virtual_split: dict[str, float] = field(default_factory=dict)
    virtual_start: float = 0.0
    """The second of the run at which its virtual time began."""
    predicted: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})
    dropped: dict[int, str] = field(default_factory=dict)
    runs: dict[int, LocalRun] = field(default_factory=dict)
    """Of the replies that counted."""
    evaluated: dict[int, dict[str, Counts]] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    """By the clients."""
    spoiled: bool = False
    """Whether it is void because of what a client has sent, and it is not known which client."""

    @classmethod
    def of(cls, first: OpenExchange) -> OpenRound:
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
