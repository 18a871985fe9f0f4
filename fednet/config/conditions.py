"""The sections about the world around a run: links, who is there, and faults."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fednet.config.types import (
    AtLeast1,
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
    bytes, links and steps. [-; server/rounds]"""
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
    """By id or range of ids, such as `0-4,7`. [-; config/conditions]"""
    step_ms: NonNegative | Drawn | None = None
    """Of one training step, on the virtual clock. [ms; experiment/clock]"""
    seed: int | None = None
    """Of these draws and the jitter; null: the run's. [-; experiment/links]"""

    def of(self, client: int) -> ClientLinkSection:
        """The link of one client: its own figures, those of its own profile, those of `link`, those
        of the profile there. A rate that stays None has no limit; a delay is one way. Figures to be
        drawn stand as they are given: see experiment.links.
        """
        from fednet import ids

        own = next(
            (link for pattern, link in self.per_client.items() if client in ids.parse(pattern)),
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
    """What happens. [-; experiment/faults]"""
    client: Count | None = None
    """Whom it strikes; not for server_crash. [id; experiment/faults]"""
    rounds: AtLeast1 | None = None
    """crash: how long the client stays away. [rounds; experiment/faults]"""
    seconds: Positive | None = None
    """delay: of how long. [s; experiment/faults]"""
    factor: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """slow: how many times as long. [-; experiment/faults]"""
    share: Share | None = None
    """drop_during_upload: what gets through before the cut. [share; experiment/faults]"""
    at: ServerPoint | None = None
    """server_crash: a task has left (broadcasting); a reply has come in part (receiving), whole
    (spooling); the last is folded (aggregating); the round is judged (evaluating); the checkpoint's
    files are written, its manifest is not (checkpointing); the manifest is, the records are not
    (recording); all is done (between). [-; experiment/faults]"""


class FaultsSection(Section, frozen=True, kw_only=True):
    """Faults, planned or at random."""

    seed: int = 0
    """Of what strikes at random. [-; experiment/faults]"""
    random: dict[str, Share] = {}
    """By kind of fault, the probability that it strikes a client in a round.
    [probability; experiment/faults]"""
    schedule: tuple[FaultSection, ...] = ()
    """Planned faults. [-; experiment/faults]"""
    replay: str | None = None
    """A run whose completed sets are forced. [-; experiment/faults]"""
