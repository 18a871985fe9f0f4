"""The bad link of `bench network`: packet by packet, and a federation over it."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fednet.errors import ConfigError
from tests.bench.network import cell, spaces, sweep
from tests.bench.network.cell import LinkCell
from tests.bench.network.line import Bad, Line, payload
from tests.processes import lines, until


def packet(data: int, header: int = 20) -> bytes:
    """IPv4 and TCP with that many bytes of payload."""
    ip = bytearray(20)
    ip[0], ip[9] = 0x45, 6
    ip[2:4] = (20 + header + data).to_bytes(2, "big")
    tcp = bytearray(header)
    tcp[12] = (header // 4) << 4
    return bytes(ip + tcp) + bytes(data)


def line(**bad: float) -> Line:
    return Line(Bad(**bad), np.random.default_rng(0))  # type: ignore[arg-type]


def test_the_payload_of_tcp_is_counted_without_headers() -> None:
    assert [payload(packet(n, h)) for n, h in ((0, 20), (1000, 32))] == [0, 1000]
    other = bytearray(packet(8))
    other[9] = 17  # UDP
    assert payload(bytes(other)) == 0


def test_a_packet_arrives_after_its_bytes_over_the_rate_and_the_latency() -> None:
    way = line(latency_s=2.0, rate=1000.0)
    for _ in range(2):
        way.offer(packet(460), 10.0)  # 500 bytes each
    assert [len(way.ready(t)) for t in (12.49, 12.5, 12.99, 13.0)] == [0, 1, 0, 1]


def test_what_the_queue_has_no_room_for_is_dropped() -> None:
    way = line(rate=1000.0)
    for _ in range(100):
        way.offer(packet(960), 0.0)
    assert way.counts.dropped == 100 - 32  # 32 packets of 1,000 bytes fit into 32,768
    assert way.counts.packets == 100


def test_packets_are_lost_at_random_and_the_same_ones_each_time() -> None:
    ways = [line(loss=0.3) for _ in range(2)]
    for way, _ in itertools.product(ways, range(10_000)):
        way.offer(packet(1), 0.0)
    assert abs(ways[0].counts.lost / 10_000 - 0.3) < 0.015
    assert ways[0].counts == ways[1].counts


def test_packets_overtake_one_another_where_some_take_longer() -> None:
    way = line(latency_s=1.0, jitter_s=0.5)
    sent = [packet(n) for n in range(50)]
    for n, one in enumerate(sent):
        way.offer(one, n / 1000)
    arrived = way.ready(10.0)
    assert sorted(arrived) == sorted(sent)
    assert arrived != sent


def test_the_map_has_each_latency_with_each_loss_then_rates_and_dropouts() -> None:
    cells = sweep.grid(True)
    assert len(cells) == 6 * 7 + 4 + 4
    assert all(c.wide for c in cells)
    assert sweep.grid(False, ["latency"], [5.0], [0.5]) == [
        LinkCell(Bad(5.0, 0.5, None, 0.5), 0.0, False)
    ]


def test_the_picture_says_where_training_stops(tmp_path: Path) -> None:
    def record(one: LinkCell, rounds: int) -> dict[str, object]:
        return cell.record(one, cell.Result(rounds, 0, 100.0, 1, 1, 1, 0, 0))

    records = [record(c, n % 3) for n, c in enumerate((*sweep.grid(False), *sweep.grid(True)))]
    drawn = sweep.picture(records, tmp_path / "map.svg").read_text()
    assert "stops" in drawn
    assert "wide settings" in drawn


def test_rounds_of_a_server_that_gave_up_are_no_rounds_an_hour(tmp_path: Path) -> None:
    one = LinkCell(Bad(latency_s=0.1, loss=0.5))
    result = cell.Result(7, 3, 20.0, 1, 1, 1, 0, 0, ended=True)
    assert "7 rounds (then it ended)" in cell.line(one, result)
    drawn = sweep.picture([cell.record(one, result)], tmp_path / "map.svg").read_text()
    assert "stops (7)" in drawn
    assert "1260" not in drawn


def test_the_namespaces_of_two_processes_have_other_names() -> None:
    names = [spaces.Spaces(own, Bad(), 0, {}).names for own in (0, 1)]
    assert len({*names[0], *names[1]}) == 4
    reached = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(reached[1], " ".join(spaces.Spaces(0, Bad(), 0, {}).names).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    others = os.read(reached[0], 100).decode().split()
    assert len({*names[0], *others}) == 4
    assert all(len(name) <= 15 for name in others)  # a device's name takes no more


@pytest.mark.long
@pytest.mark.skipif(bool(spaces.refusal()), reason=spaces.refusal())
def test_a_federation_trains_over_a_slow_and_lossy_link_in_namespaces(tmp_path: Path) -> None:
    one = LinkCell(Bad(latency_s=0.05, loss=0.05, rate=1e6, jitter_s=0.01))
    rounds, over = tmp_path / "runs" / "cell" / "rounds.jsonl", threading.Event()

    def watch() -> None:
        until(lambda: over.is_set() or lines(rounds), "a round")
        over.set()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        result = cell.run(one, tmp_path, 150.0, over=over)
    finally:
        over.set()
        watching.join()
    assert result.rounds >= 1, (tmp_path / "server.txt").read_text()
    assert result.again > 0  # the kernel sent segments again
    assert result.payload > 0.9 * result.ledger  # TCP carried what the ledger has, and more


def test_without_a_link_of_its_own_the_bench_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep, "refusal", lambda: "only root may")
    with pytest.raises(ConfigError, match="bench network: only root may"):
        next(sweep.sweep([LinkCell(Bad())], tmp_path, 1.0, 1))
