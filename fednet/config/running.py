"""The sections about how a run goes: rounds, checkpoints, the wire, security, privacy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fednet.config.types import AtLeast1, Carried, Count, NonNegative, Positive, Section, Taken

JOIN_S = 60.0  # `round.join: auto`


class LostSection(Section, frozen=True, kw_only=True):
    """When a client counts as lost, and its task is given to another or counted out."""

    closed: NonNegative | None = 3.0
    """How long it may take to come back after its connection closed; null: for ever, but where
    another process hosts the same client, for as long as `silent`. [s; server/endpoint]"""
    silent: Positive | None = 10.0
    """How long its heartbeat may be silent; null: for ever. [s; server/phases]"""
    beat: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] | None = None
    """How often a client says that it is there; null: each 2 s, or twice while `closed` and four
    times while `silent` pass; of N clients no oftener than each N / 1000 s, up to the latter. One
    that has not heard of its server for 8 beats connects anew. [s; server/endpoint]"""
    stalled: Positive | None = 300.0
    """How long its task may make no progress although its process is heard of, before it is given
    to another that hosts the same client. [s; server/endpoint]"""


class ScheduleSection(Section, frozen=True, kw_only=True):
    """Whether anybody is waited for. Without rounds, a round is the time between two updates, and
    `participation` says how many train at once.
    """

    mode: Literal["sync", "semi-sync", "async"] = "sync"
    """sync: rounds, each waits for its clients; async: every so many replies are an update;
    semi-sync: every so many seconds what is there is one. A method that has no rounds (fedasync,
    fedbuff, ca2fl) is async where no mode is given. [-; server/rounds]"""
    buffer: AtLeast1 | None = None
    """async: replies that make an update; null: half of those that train at once.
    [clients; config/sections]"""
    every: Positive | None = None
    """semi-sync: between two updates. [s; server/ongoing/updates]"""


class RoundSection(Section, frozen=True, kw_only=True):
    """When a round begins, closes, and is of no use."""

    deadline: Annotated[Positive, Carried] | None = None
    """For a client's own task, from its hand-out; null: wait for all that are alive.
    [s; server/phases]"""
    min_results: AtLeast1 = 1
    """A round with fewer replies is void. [clients; server/rounds]"""
    select_extra: Count = 0
    """Asked beside the cohort. [clients; config/sections]"""
    ask: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """In place of select_extra and first: so many times the cohort are asked, and the first
    replies, as many as the cohort, count. [times; config/sections]"""
    first: AtLeast1 | None = None
    """Close on the first so many replies. [clients; server/phases]"""
    lost: LostSection = LostSection()
    start: Literal["all"] | AtLeast1 = "all"
    """Joined before round 1. [clients; server/rounds]"""
    join: Literal["auto"] | Positive | None = "auto"
    """An id that has not joined by then, from the server's start, counts as lost; null: wait, for
    the first round's, and later for `min_results` to be there; auto: 60 s, but null for a server
    whose clients others start. [s; config/running]"""
    void_rounds: AtLeast1 = 3
    """So many void rounds in a row end the run. [rounds; server/round]"""
    on_error: Literal["stop", "drop"] = "drop"
    """Whether a client that could not do its task, or whose reply could not be used, is left out of
    the round, or ends the run. [-; server/phases]"""
    state_lost: Literal["stop", "restart"] = "stop"
    """Where a client no longer has the state that its task starts from, as after the server was
    restored from an older copy. restart: it begins again with an initial state, as a client that
    never took part, and the results differ; stop: the run ends and names what is missing, unless
    others start the clients and no more than half of those asked lack it: these are dropped.
    [-; server/phases]"""
    max_share: Literal["auto"] | Taken | None = "auto"
    """The largest part of a mean by samples that one client may have, where sites bring their own
    data also of the mean of their accuracies; auto: half, where sites bring their own data and
    three or more replied, else no bound, for the server then knows the counts.
    [share; server/postprocessors]"""

    def join_s(self, alone: bool = False) -> float | None:
        """Seconds; None: for ever. alone: nobody has come yet, and others start the clients."""
        if self.join == "auto":
            return None if alone else JOIN_S
        return self.join


class StopSection(Section, frozen=True, kw_only=True):
    """What ends a run before its last round."""

    accuracy: Taken | None = None
    """Reached by the global model, or by the clients' where there is none. [share;
    server/round]"""
    megabytes: Positive | None = None
    """Spent, both ways. [10^6 bytes; server/round]"""
    seconds: Positive | None = None
    """Passed, on the run's clock. [s; server/round]"""


class CheckpointSection(Section, frozen=True, kw_only=True):
    """What a run that crashed goes on from."""

    every: AtLeast1 = 1
    """A crash loses at most so many. [rounds; server/rounds]"""
    best: bool = True
    """Keep the best model too, as best.safetensors. [-; server/judging]"""
    fsync: bool = False
    """Guard against power loss too. [-; server/process]"""


class RecordSection(Section, frozen=True, kw_only=True):
    """What of a run is written down: less makes its directory lighter, and changes no bit."""

    wire: Literal["messages", "sums"] = "messages"
    """What wire.jsonl has a line for: each message, or all of a round that are alike (in type,
    direction, use and why), whoever's they are. [-; server/process]"""
    clients: Literal["each", "last"] = "each"
    """What clients.jsonl has: a line for each client and evaluation, or those of the last
    evaluation alone. [-; server/rounds]"""
    tensors: bool = True
    """Whether a round's record has the SHA-256 of each tensor, by which `fednet verify` names the
    first that differs; false: that of the whole model alone. [-; server/judging]"""


class WireSection(Section, frozen=True, kw_only=True):
    """Compressors in order, by the ledger kind they apply to: `{delta: [topk(0.01), qsgd(8)]}`."""

    up: dict[str, tuple[str, ...]] = {}
    """From clients to the server; see `fednet list compressors`. [-; experiment/build]"""
    down: dict[str, tuple[str, ...]] = {}
    """From the server to clients. [-; experiment/build]"""


class SecuritySection(Section, frozen=True, kw_only=True):
    """Who may connect, and what is believed."""

    curve: bool = False
    """Encrypt and authenticate with CURVE. [-; server/endpoint]"""
    keys: str | None = None
    """The directory of the server's keys; null: --keys of a server; of `fednet run`, keys made for
    this run. [-; server/endpoint]"""
    max_norm: Literal["auto"] | Positive | None = "auto"
    """An update of a larger Euclidean norm is refused; auto: what is a thousand times larger than
    the shared model and than most replies of its round; null: no bound.
    [-; server/inbox]"""


class SecaggSection(Section, frozen=True, kw_only=True):
    """Secure aggregation: the server sees the sum of a round's updates, and none of them."""

    protocol: Literal["none", "secagg", "secagg+", "lightsecagg"] = "none"
    """secagg: masks of all pairs (Bonawitz et al., CCS 2017); secagg+: of pairs on a random graph
    (Bell et al., CCS 2020); lightsecagg: one coded mask a client (So et al., MLSys 2022).
    [-; algorithms/secure]"""
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 0.66
    """Of a round's clients, those who must answer in each step; else the round is void.
    [share; algorithms/secure]"""
    neighbours: Annotated[int, msgspec.Meta(ge=2)] = 20
    """secagg+: with how many others each client shares secrets; an odd number counts one less.
    Where many are lost it wants more: with a tenth of 200 lost 20 do, with three tenths 80.
    [clients; algorithms/secure]"""
    colluding: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    """lightsecagg: of a round's clients, those who learn nothing together with the server.
    [share; algorithms/secure]"""
    bits: Annotated[int, msgspec.Meta(ge=2, le=32)] = 24
    """Of an entry of an update in fixed point, its sign included. [bits; secagg/fixed]"""
    clip: Positive = 1.0
    """What an entry of an update may be at most; beyond it is cut off. [-; secagg/fixed]"""
    counts: Literal["open", "masked"] = "open"
    """Whether sample counts and losses are seen by the server, or only the sum of the counts.
    [-; algorithms/secure]"""
    blame: bool = True
    """Whether a client that is known to have broken the protocol is left out of later rounds.
    [-; server/phases]"""
    max_samples: AtLeast1 | None = None
    """More than these do not count; null: what the largest client has, where that is known.
    [samples; algorithms/secure]"""


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
    secagg: SecaggSection = SecaggSection()
