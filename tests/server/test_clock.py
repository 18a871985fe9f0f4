"""The virtual clock: times follow from bytes, steps and links alone."""

from __future__ import annotations

import pytest

from fednet.config import ClientLinkSection, Config, LinkSection, LostSection, RoundSection
from fednet.experiment.clock import VirtualClock


def clock(**round: object) -> VirtualClock:
    link = LinkSection(
        clock="virtual",
        up_mbps=8.0,
        down_mbps=16.0,
        latency_ms=50,
        step_ms=10,
        per_client={"2-3": ClientLinkSection(up_mbps=2.0)},
    )
    return VirtualClock(Config(clients=4, link=link, round=RoundSection(**round)))  # type: ignore[arg-type]


def test_a_task_takes_its_bytes_over_its_link_its_steps_and_two_latencies() -> None:
    # 2 MB at 2 MB/s down, 1 MB at 1 MB/s up, 100 steps of 10 ms, 2 x 50 ms
    assert clock().seconds(0, 1, 100, down=2_000_000, up=1_000_000) == pytest.approx(
        {"sending": 1.0 + 1.0 + 0.1, "training": 1.0}
    )
    assert clock().seconds(2, 1, 100, down=2_000_000, up=1_000_000) == pytest.approx(
        {"sending": 1.0 + 4.0 + 0.1, "training": 1.0}
    )


def test_planned_slowness_and_delay_count_in_its_seconds() -> None:
    assert clock().seconds(0, 1, 100, down=0, up=0, slow=3.0, delay=2.0)["training"] == 3.0 + 2.0


def test_jitter_is_the_same_in_every_repetition() -> None:
    shaky = VirtualClock(Config(link=LinkSection(clock="virtual", jitter_ms=100, step_ms=0)))
    times = [shaky.seconds(c, 1, 1, 0, 0)["sending"] for c in range(5)]
    assert times == [shaky.seconds(c, 1, 1, 0, 0)["sending"] for c in range(5)]
    assert len(set(times)) == 5
    assert all(0 <= t <= 0.2 for t in times)


def test_who_is_beyond_the_deadline_is_late_and_the_round_lasts_until_then() -> None:
    times = {0: 1.0, 1: 5.0, 2: 2.0}
    assert clock(deadline=3.0).late(times) == {1: "deadline"}
    assert clock(deadline=3.0).span(times) == 3.0
    assert clock(deadline=9.0).span(times) == 5.0


def test_the_first_k_count_and_ties_go_to_the_smaller_id() -> None:
    times = {3: 2.0, 0: 4.0, 1: 2.0, 2: 1.0}
    assert clock(first=2).late(times) == {3: "not among the first 2", 0: "not among the first 2"}
    assert clock(first=2).span(times) == 2.0


def test_a_lost_client_is_awaited_for_as_long_as_it_may_take_to_come_back() -> None:
    assert clock(lost=LostSection(closed=3.0)).span({0: 1.0}, lost=True) == 3.0
    assert clock(lost=LostSection(closed=3.0), deadline=2.0).span({0: 1.0}, lost=True) == 2.0
    assert clock(lost=LostSection(closed=None)).span({0: 1.0}, lost=True) == 1.0
