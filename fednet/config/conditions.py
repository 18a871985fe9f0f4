"""The sections about the world around a run: links, who is there, and faults."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fednet.config.types import (
    AtLeast1,
    Carried,
    Chosen,
    Count,
    Drawn,
    NonNegative,
    Positive,
    Profile,
    Section,
    Share,
)


class ClientLinkSection(Section, frozen=True, kw_only=True):
    """One client's own link; what is left out is as for all."""

    up_mbps: Positive | Drawn | None = None
    """From the client. [10^6 bits/s; experiment/links]"""
    down_mbps: Positive | Drawn | None = None
    """To the client. [10^6 bits/s; experiment/links]"""
    latency_ms: NonNegative | Drawn | None = None
    """One way. [ms; experiment/links]"""
    jitter_ms: NonNegative | Drawn | None = None
    """Added to the latency at random. [ms; experiment/links]"""
    step_ms: NonNegative | Drawn | None = None
    """Of one training step, on the virtual clock. [ms; experiment/clock]"""
    profile: Profile | None = None
    """A named link, for what is not given. [-; config/conditions]"""


PROFILES = {
    # WebPageTest's connectivity profiles of these names (down/up, round trip): 1.6/0.768 Mbit/s,
    # 300 ms;
    "3g": ClientLinkSection(up_mbps=0.768, down_mbps=1.6, latency_ms=150.0),
    # 9/9 Mbit/s, 170 ms;
    "4g": ClientLinkSection(up_mbps=9.0, down_mbps=9.0, latency_ms=85.0),
    # 1.5/0.384 Mbit/s, 50 ms.
    "dsl": ClientLinkSection(up_mbps=0.384, down_mbps=1.5, latency_ms=25.0),
    # Chrome's former "WiFi" preset: 30/15 Mbit/s, 2 ms.
    "wifi": ClientLinkSection(up_mbps=15.0, down_mbps=30.0, latency_ms=1.0),
    # Gigabit Ethernet through one switch.
    "lan": ClientLinkSection(up_mbps=1000.0, down_mbps=1000.0, latency_ms=0.1),
}


class LinkSection(Section, frozen=True, kw_only=True):
    """Every client's link. Each figure may be drawn, once a client: lognormal(median, sigma of its
    logarithm) or uniform(low, high).
    """

    clock: Literal["real", "virtual"] = "real"
    """real: links are emulated on each connection; virtual: nothing sleeps, time is counted from
    bytes, links and steps. [-; server/process]"""
    up_mbps: Positive | Drawn | None = None
    """From a client; null: no limit. [10^6 bits/s; experiment/links]"""
    down_mbps: Positive | Drawn | None = None
    """To a client; null: no limit. [10^6 bits/s; experiment/links]"""
    latency_ms: NonNegative | Drawn = 0.0
    """One way. [ms; experiment/links]"""
    jitter_ms: NonNegative | Drawn = 0.0
    """Added to the latency at random. [ms; experiment/links]"""
    profile: Chosen | None = None
    """A named link, for what is not given, or one drawn for each client: choice(3g, 4g, wifi), a
    name given twice counting twice. [-; experiment/links]"""
    per_client: dict[str, ClientLinkSection] = {}
    """By ids, or by a share of all, such as `0-4,7` or `1/4`. [-; config/conditions]"""
    trace: str | tuple[str, str] | None = None
    """The rate of each second, in place of up_mbps and down_mbps: `wifi`, `lte`, `umts`, `evdo`, a
    file, or the files of the uplink and the downlink. [-; world/of]"""
    step_ms: NonNegative | Drawn | None = None
    """Of one training step, on the virtual clock. [ms; experiment/clock]"""
    seed: int | None = None
    """Of these draws and the jitter; null: the run's. [-; experiment/links]"""

    def of(self, client: int, clients: int) -> ClientLinkSection:
        """The link of one of so many clients: its own figures, those of its own profile, those of
        `link`, those of the profile there. A rate that stays None has no limit; a delay is one way.
        Figures to be drawn stand as they are given: see experiment.links.
        """
        from fednet import ids

        own = next(
            (
                link
                for pattern, link in self.per_client.items()
                if client in ids.parse(pattern).resolve(clients)
            ),
            ClientLinkSection(),
        )
        mine, named = (
            PROFILES.get(p or "", ClientLinkSection()) for p in (own.profile, self.profile)
        )
        chosen = {}
        for key in ClientLinkSection.__struct_fields__:
            general = getattr(self, key) or None  # a delay of 0 is one that was not given
            given = (
                getattr(own, key),
                getattr(mine, key),
                general,
                getattr(named, key),
                getattr(self, key),
            )
            chosen[key] = next((value for value in given if value is not None), None)
        return ClientLinkSection(**chosen)


class AvailabilitySection(Section, frozen=True, kw_only=True):
    """Which clients can be asked in a round."""

    model: Literal["always", "bernoulli", "markov", "trace"] = "always"
    """How presence is decided. [-; experiment/selection]"""
    p: Share | None = None
    """bernoulli: the probability of being present, each round anew.
    [probability; experiment/selection]"""
    up: Share | None = None
    """markov: the probability of coming. [probability; experiment/selection]"""
    down: Share | None = None
    """markov: the probability of going. [probability; experiment/selection]"""
    path: str | None = None
    """trace: a file with the rounds in which each client is present. [-; experiment/selection]"""
    trace: str | None = None
    """In place of a model: in which seconds each client is there, `phones` or a file.
    [-; world/of]"""
    start: NonNegative = 0.0
    """trace: the second of it at which the run begins; of `phones`, second 0 is midnight.
    [s; world/of]"""
    repeat: Positive | None = None
    """trace: a file by client comes again after so long; null: never. [s; world/of]"""


class DevicesSection(Section, frozen=True, kw_only=True):
    """How fast the clients' devices are."""

    trace: str | None = None
    """How long a training step takes each client, `phones` or a file; null: as long as it takes.
    A client that is faster waits for the rest of its time. [-; world/of]"""
    watts: Positive = 3.0
    """Of a device that trains, for the estimate of energy. [W; report/world/there]"""


FaultKind = Literal[
    "drop_before_training",
    "drop_before_sending",
    "drop_during_upload",
    "crash",
    "delay",
    "slow",
    "duplicate",
    "corrupt",
    "disconnect",
    "server_crash",
]
ServerPoint = Literal[
    "broadcasting",
    "spooling",
    "receiving",
    "aggregating",
    "evaluating",
    "checkpointing",
    "recording",
    "between",
]


class FaultSection(Section, frozen=True, kw_only=True):
    """One planned fault."""

    round: AtLeast1
    """When it strikes. [round; experiment/faults]"""
    kind: FaultKind
    """What happens: the client falls silent before it trains (drop_before_training), with its reply
    made (drop_before_sending) or half sent (drop_during_upload); its process is killed while it
    trains (crash); its reply comes later (delay, slow), twice (duplicate), with a byte changed
    (corrupt), or its connection ends after it (disconnect); the server is killed (server_crash).
    [-; experiment/faults]"""
    exchange: Count | None = None
    """In which of the round's exchanges, from 0; null: in the first, or with privacy.secagg in the
    one that trains. [exchange; experiment/faults]"""
    client: Count | None = None
    """Whom it strikes; not for server_crash. [id; experiment/faults]"""
    rounds: Annotated[AtLeast1, msgspec.Meta(le=10**9)] | None = None
    """crash: how long the client stays away. [rounds; experiment/faults]"""
    seconds: Annotated[Positive, Carried] | None = None
    """delay: of how long. [s; experiment/faults]"""
    factor: Annotated[float, msgspec.Meta(ge=1), Carried] | None = None
    """slow: how many times as long. [-; experiment/faults]"""
    share: Share | None = None
    """drop_during_upload: what gets through before the cut, to the byte; of all, all but one.
    [share; experiment/faults]"""
    at: ServerPoint | None = None
    """server_crash: a task has left (broadcasting); a reply has come in part (receiving), whole
    (spooling); the last is folded (aggregating); the round is judged (evaluating); the checkpoint's
    files are written, its manifest is not (checkpointing); the manifest is, the records are not
    (recording); all is done (between). [-; experiment/faults]"""


class MaliciousSection(Section, frozen=True, kw_only=True):
    """Clients that lie in every round they are asked in."""

    clients: Share = 0.0
    """How many of all, rounded down; drawn from faults.seed. [share; robust/attacks]"""
    attack: Literal["sign_flip", "label_flip", "gaussian", "alie", "ipm"] = "sign_flip"
    """What they send: the update with its sign turned; one trained on flipped labels; noise; a
    little beside the honest mean (alie) or against it (ipm), which needs their sight and is made at
    the server. [-; robust/attacks]"""
    strength: NonNegative | None = None
    """The attack's factor; null: sign_flip 1, gaussian 1, alie 1.5, ipm 2. [-; robust/attacks]"""


class AggregationSection(Section, frozen=True, kw_only=True):
    """How replies become one, for methods whose fold is a sum of updates."""

    rule: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_bound", "rfa"] = (
        "mean"
    )
    """The method's own mean, or one that bears liars: every reply then counts the same.
    [-; robust/stack]"""
    tolerate: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2
    """Of a round's replies, how many may lie, rounded down (trimmed_mean, krum, multi_krum).
    [share; robust/stack]"""
    bound: Positive | None = None
    """norm_bound: the longest update; null: the round's median. [norm; robust/stack]"""
    iterations: AtLeast1 = 3
    """rfa: Weiszfeld steps. [-; robust/stack]"""
    smoothing: Positive = 1e-6
    """rfa: the least distance that a step divides by. [-; robust/stack]"""
    closest: Literal["m-f-2", "m-f-1"] = "m-f-2"
    """krum, multi_krum: how many neighbours a score sums over: as the paper has it, or ByzFL.
    [-; robust/stack]"""


class FaultsSection(Section, frozen=True, kw_only=True):
    """Faults, planned or at random."""

    seed: int = 0
    """Of what strikes at random. [-; experiment/faults]"""
    random: dict[str, Share] = {}
    """By kind of fault, the probability that it strikes a client in a round: a crash of one round,
    a delay of 1 s, half the pace, half of an upload. [probability; experiment/faults]"""
    schedule: tuple[FaultSection, ...] = ()
    """Planned faults. [-; experiment/faults]"""
    malicious: MaliciousSection = MaliciousSection()
    replay: str | None = None
    """A run whose completed sets are forced. [-; experiment/faults]"""
