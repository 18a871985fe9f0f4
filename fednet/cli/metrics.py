"""`--metrics ADDRESS`: what a run does, as OpenMetrics text over HTTP, for Prometheus."""

from __future__ import annotations

import re
from collections import Counter as Counts
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fednet.cli.display import Display
from fednet.errors import ConfigError, lacking
from fednet.ids import ranges_as_text
from fednet.plain import JsonMapping
from fednet.records import all_metrics
from fednet.serve.http import Pages

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

    from fednet.records import Round

_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):|:)?(?P<port>\d{1,5})")


def address(text: str, flag: str = "--metrics") -> tuple[str, int]:
    """`9464`, `:9464` or `HOST:9464`, as (host, port); without a host it is loopback. Raises
    ConfigError.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65535:
        raise ConfigError(
            f"{flag} {text}: expected PORT or HOST:PORT, such as 9464 or 0.0.0.0:9464."
        )
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


class _Numbers(Pages):
    """Serves the numbers of a registry, at every path."""

    def __init__(self, text: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        super().__init__(address(text), f"--metrics {text}")

    def page(self, path: str, accept: str) -> tuple[bytes, str]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind


class Metrics(Display):
    """A display that also serves its numbers. While it is entered, threads do so; they touch
    nothing of the run.
    """

    def __init__(self, text: str, quiet: bool = False) -> None:
        super().__init__(quiet)
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise ConfigError(lacking("--metrics", "prometheus_client")) from None
        address(text)  # raises what is wrong with it before a run begins
        self.text = text
        self._registry = prometheus.CollectorRegistry()

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return prometheus.Gauge(f"fednet_{name}", about, labels, registry=self._registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return prometheus.Counter(f"fednet_{name}", about, labels, registry=self._registry)

        self._round = gauge("round", "The current round.")
        self._planned = gauge("rounds_planned", "Rounds of the run.")
        self._rounds = counter("rounds", "Rounds that have ended, by outcome.", "outcome")
        self._clients = gauge("clients", "Clients of the last round, by what they did.", "did")
        self._replies = counter("replies", "Replies that were used.")
        site = "clients", "host", "site"
        self._connected = gauge("site_connected", "Whether a site is connected.", *site)
        self._since = gauge("site_connected_since_seconds", "When a site connected.", *site)
        self._seen = gauge("site_last_seen_seconds", "When a site was last heard of.", *site)
        self._site_round = gauge("site_round", "The round of what a site did last.", *site)
        self._absent = gauge("site_absent", "Why a site is not connected: 1.", *site, "why")
        self._key_ends = gauge(
            "key_expires_seconds", "When clients' last keys end.", "clients", "site"
        )
        self._refused = counter("refusals", "What was refused.", "what")
        self._counted: Counts[str] = Counts()  # of these, since this server started
        self._waiting = gauge("waiting", "Clients that the round waits for.")
        self._bytes = counter("bytes", "Bytes sent, including protocol overhead.", "direction")
        self._useful = counter("useful_bytes", "Payload bytes that were used.", "direction", "kind")
        self._seconds = counter("phase_seconds", "Seconds of rounds, by phase.", "phase")
        self._gauge = gauge
        self._numbers: dict[str, Gauge] = {}

    def __enter__(self) -> Metrics:
        self._pages = _Numbers(self.text, self._registry)
        self._pages.begin()
        super().__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        super().__exit__(*what)
        self._pages.end()

    # -- called by the engine ----------------------------------------------------------------------
    def round_started(self, round: int, rounds: int, cohort: Sequence[int]) -> None:
        super().round_started(round, rounds, cohort)
        self._round.set(round)
        self._planned.set(rounds)

    def progress(self, info: JsonMapping) -> None:
        super().progress(info)
        self._waiting.set(len(info.get("waiting") or ()))
        times = ("since", self._since), ("seen", self._seen), ("round", self._site_round)
        for each in (self._connected, self._absent, *(gauge for _, gauge in times)):
            each.clear()
        for site in info.get("sites") or ():
            labels = ranges_as_text(site["clients"]), site["host"], site.get("site", "")
            self._connected.labels(*labels).set(site["connected"])
            for name, number in times:
                if site.get(name) is not None:
                    number.labels(*labels).set(site[name])
            if not site["connected"]:
                self._absent.labels(*labels, site["why"]).set(1)

        self._key_ends.clear()
        for end in info.get("keys") or ():
            clients = ranges_as_text(end["clients"])
            self._key_ends.labels(clients, end["site"]).set(end["until"])
        for what, count in (info.get("refusals") or {}).items():
            # A server that is started again in this process counts from zero.
            before = self._counted[what] if count >= self._counted[what] else 0
            self._refused.labels(what).inc(count - before)
            self._counted[what] = count

    def round_done(self, record: Round) -> None:
        self._rounds.labels("void" if record.void else "done").inc()
        self._clients.labels("asked").set(len(record.selected))
        self._clients.labels("completed").set(len(record.completed))
        self._clients.labels("dropped").set(len(record.dropped))
        self._replies.inc(len(record.completed))
        for way, count in (("up", record.bytes_up), ("down", record.bytes_down)):
            self._bytes.labels(way).inc(count)
            for kind, useful in record.useful.get(way, {}).items():
                self._useful.labels(way, kind).inc(useful)
        for phase, seconds in (record.seconds_by_phase or {}).items():
            self._seconds.labels(phase).inc(seconds)
        for metric in all_metrics([record]):
            value = metric.of(record)
            if value is None:
                continue  # what no round has measured is not served: 0 would pass for a result
            name = metric.name.replace("-", "_")
            if name not in self._numbers:
                about = f"Of the last round that measured it: {metric.label}."
                self._numbers[name] = self._gauge(name, about)
            self._numbers[name].set(value)
        super().round_done(record)
