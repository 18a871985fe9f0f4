"""The file of a trace that the server names is read at a site only where the site lets it look."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet import config
from fednet.client.policy import Policy
from fednet.errors import ConfigError


def named(trace: object, clock: str = "real") -> config.Config:
    return config.from_mapping({"link": {"clock": clock, "trace": trace, "step_ms": 1}})


def test_a_shipped_link_is_read_nowhere_and_a_file_below_the_sites_own_folder(
    tmp_path: Path,
) -> None:
    policy = Policy(places=(tmp_path,))
    assert policy.applied_to(named("lte")).link.trace == "lte"
    inside = str((tmp_path / "up").resolve())
    assert policy.applied_to(named(["up", "lte"])).link.trace == (inside, "lte")


def test_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"link.trace: the server names '/etc/passwd'.*refused"):
        Policy(places=(tmp_path,)).applied_to(named("/etc/passwd"))
    with pytest.raises(ConfigError, match=r"link.trace: .* started without --data"):
        Policy().applied_to(named("up.csv"))


def test_on_the_virtual_clock_a_site_reads_none() -> None:
    assert Policy().applied_to(named("/etc/passwd", "virtual")).link.trace == "/etc/passwd"
