"""The sections about how a run goes: rounds, checkpoints, the wire, security, privacy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fednet.config.types import AtLeast1, Count, NonNegative, Positive, Section, Taken


class LostSection(Section, frozen=True, kw_only=True):
    """When a client counts as lost, and its task is given to another or counted out."""

    closed: NonNegative | None = 3.0
    """How long it may take to come back after its connection closed; null: for ever.
    [s; server/phases]"""
    silent: Positive | None = 10.0
    """How long its heartbeat may be silent; null: for ever. [s; server/phases]"""
    stalled: Positive | None = 300.0
    """How long its task may make no progress although its process is heard of, before it is given
    to another that hosts the same client. [s; server/phases]"""


class RoundSection(Section, frozen=True, kw_only=True):
    """When a round begins, closes, and is of no use."""

    deadline: Positive | None = None
    """For a client's own task, from its hand-out; null: wait for all that are alive.
    [s; server/phases]"""
    min_results: AtLeast1 = 1
    """A round with fewer replies is void. [clients; server/rounds]"""
    select_extra: Count = 0
    """Asked beside the cohort. [clients; experiment/selection]"""
    first: AtLeast1 | None = None
    """Close on the first so many replies. [clients; server/phases]"""
    lost: LostSection = LostSection()
    start: Literal["all"] | AtLeast1 = "all"
    """Joined before round 1. [clients; server/rounds]"""
    join: Positive | None = 60.0
    """An id that has not joined by then, from the server's start, counts as lost; null: wait.
    [s; server/rounds]"""
    void_rounds: AtLeast1 = 3
    """So many void rounds in a row end the run. [rounds; server/rounds]"""
    on_error: Literal["stop", "drop"] = "drop"
    """Whether a client that could not do its task, or whose reply could not be used, is left out of
    the round, or ends the run. [-; server/phases]"""
    max_share: Literal["auto"] | Taken | None = "auto"
    """The largest part of a mean by samples that one client may have; auto: half, where sites bring
    their own data and three or more replied, else no bound, for the server then knows the counts.
    [share; server/folding]"""


class StopSection(Section, frozen=True, kw_only=True):
    """What ends a run before its last round."""

    accuracy: Taken | None = None
    """Reached by the global model, or by the clients' where there is none. [share;
    server/stopping]"""
    megabytes: Positive | None = None
    """Spent, both ways. [10^6 bytes; server/stopping]"""
    seconds: Positive | None = None
    """Passed, on the run's clock. [s; server/stopping]"""


class CheckpointSection(Section, frozen=True, kw_only=True):
    """What a run that crashed goes on from."""

    every: AtLeast1 = 1
    """A crash loses at most so many. [rounds; server/rounds]"""
    best: bool = True
    """Keep the best model too, as best.safetensors. [-; server/rounds]"""
    fsync: bool = False
    """Guard against power loss too. [-; server/process]"""


class WireSection(Section, frozen=True, kw_only=True):
    """Compressors in order, by the ledger kind they apply to: `{delta: [topk(0.01), qsgd(8)]}`."""

    up: dict[str, tuple[str, ...]] = {}
    """From clients to the server; see `fednet list compressors`. [-; experiment/build]"""
    down: dict[str, tuple[str, ...]] = {}
    """From the server to clients. [-; experiment/build]"""


class SecuritySection(Section, frozen=True, kw_only=True):
    """Who may connect, and what is believed."""

    curve: bool = False
    """Encrypt and authenticate with CURVE. [-; server/admission]"""
    keys: str | None = None
    """The directory of the server's keys; null: --keys, or keys made for this run.
    [-; server/admission]"""
    max_norm: Literal["auto"] | Positive | None = "auto"
    """An update of a larger Euclidean norm is refused; auto: what is a thousand times larger than
    the shared model and than most replies of its round; null: no bound. [-; server/admission]"""


class PrivacySection(Section, frozen=True, kw_only=True):
    """DP-FedAvg: clip, then noise, then compress."""

    clip: Positive | None = None
    """Bound of an update's Euclidean norm; null: off. [-; experiment/privacy]"""
    noise: NonNegative = 0.0
    """Of the Gaussian noise, a multiple of `clip`. [-; experiment/privacy]"""
    where: Literal["server", "client"] = "server"
    """Who adds the noise: the server to the sum, or each client to its update.
    [-; experiment/privacy]"""
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-5
    """For the accountant, which says epsilon. [-; experiment/privacy]"""
