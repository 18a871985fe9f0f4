"""The virtual clock: times follow from bytes, steps and links alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet.config import (
    AvailabilitySection,
    ClientLinkSection,
    Config,
    DevicesSection,
    LinkSection,
)
from fednet.protocol.tasks import Leaves
from fednet.server.clock import VirtualClock


def clock() -> VirtualClock:
    link = LinkSection(
        clock="virtual",
        up_mbps=8.0,
        down_mbps=16.0,
        latency_ms=50,
        step_ms=10,
        per_client={"2-3": ClientLinkSection(up_mbps=2.0)},
    )
    return VirtualClock(Config(clients=4, link=link))


def test_a_task_takes_its_bytes_over_its_link_its_steps_and_two_latencies() -> None:
    # 2 MB at 2 MB/s down, 1 MB at 1 MB/s up, 100 steps of 10 ms, 2 x 50 ms
    assert clock().seconds(0, 100, down=2_000_000, up=1_000_000) == pytest.approx(
        {"sending": 1.0 + 1.0 + 0.1, "training": 1.0}
    )
    assert clock().seconds(2, 100, down=2_000_000, up=1_000_000) == pytest.approx(
        {"sending": 1.0 + 4.0 + 0.1, "training": 1.0}
    )


# -- who leaves ------------------------------------------------------------------------------------
def leaving(tmp_path: Path, lines: str, **link: object) -> VirtualClock:
    trace = tmp_path / "trace.csv"
    trace.write_text(lines)
    return VirtualClock(
        Config(
            clients=2,
            link=LinkSection(clock="virtual", up_mbps=8.0, down_mbps=16.0, step_ms=10, **link),  # type: ignore[arg-type]
            availability=AvailabilitySection(trace=str(trace)),
        )
    )


def test_what_has_crossed_tells_when_a_client_is_gone(tmp_path: Path) -> None:
    # from second 4 on: 1 s down (2 MB), 1 s of training (100 steps), then up at 1 MB/s
    at = leaving(tmp_path, "0,0,10\n1,0,6.5\n").leaving
    assert at(0, 100, 2_000_000, 4.0) == Leaves(up=4_000_000)
    assert at(1, 100, 2_000_000, 4.0) == Leaves(up=500_000)
    assert at(1, 100, 2_000_000, 4.5) == Leaves(up=0)  # as it ends its training
    assert at(1, 100, 2_000_000, 5.0) == Leaves(up=0)
    assert at(1, 100, 2_000_000, 6.0) == Leaves(down=1)
    # in two and a half seconds five million bytes have come, some of them of the second part
    assert at(1, 100, 10_000_000, 4.0) == Leaves(down=2)
    assert at(1, 100, 2_000_000, 7.0) == Leaves(down=0)


def test_a_rate_of_each_second_makes_sending_take_as_long_as_when_it_begins(
    tmp_path: Path,
) -> None:
    link = tmp_path / "link.csv"
    link.write_text("0,0,8,8\n0,1,0,0\n0,2,16,16\n")
    slow = VirtualClock(
        Config(clients=1, link=LinkSection(clock="virtual", step_ms=0, trace=str(link)))
    )
    # half a second down, then up from second 0.5: half there, the rest after the dead second
    assert slow.seconds(0, 1, 500_000, 1_000_000)["sending"] == 0.5 + 1.75
    assert slow.seconds(0, 1, 500_000, 1_000_000, at=2.0)["sending"] == 0.25 + 0.5


def test_a_device_takes_its_own_time_for_a_step(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,step_ms\n0,10\n1,40\n")
    paced = VirtualClock(
        Config(
            clients=2,
            link=LinkSection(clock="virtual"),
            devices=DevicesSection(trace=str(file)),
        )
    )
    assert [paced.seconds(c, 100, 0, 0)["training"] for c in (0, 1)] == [1.0, 4.0]
