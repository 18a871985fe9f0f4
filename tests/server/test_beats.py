"""How often a client says that it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednet import config
from fednet.errors import ConfigError
from fednet.server.endpoint import beat_seconds, listening


def beat(**lost: object) -> float:
    return beat_seconds(config.from_mapping({"round": {"lost": lost}}))


def test_often_enough_for_the_patience_and_each_two_seconds_at_least() -> None:
    assert [beat(), beat(closed=1.0), beat(silent=2.0, closed=9)] == [1.5, 0.5, 0.5]
    assert beat(beat=30, closed=60, silent=None) == 30  # as configured
    assert beat(closed=None, silent=None) == 2.0


def test_a_server_of_thousands_hears_of_each_as_seldom_as_its_patience_lets_it() -> None:
    def of(clients: int, **lost: object) -> float:
        return beat_seconds(config.from_mapping({"clients": clients, "round": {"lost": lost}}))

    assert [of(1500), of(2000), of(10_000)] == [1.5, 2.0, 2.5]  # silent: 10
    assert [of(50_000, silent=None), of(100_000, silent=None)] == [50.0, 60.0]
    assert of(5000, beat=1.0) == 1.0


def test_not_so_seldom_that_one_who_is_alive_counts_as_lost() -> None:
    with pytest.raises(ConfigError, match=r"round.lost.beat: 6 s: round.lost.silent of 10 s"):
        beat(beat=6, closed=60)


def test_the_patience_of_the_configuration_holds_before_the_first_round_too(
    tmp_path: Path,
) -> None:
    class Bound:
        keyring = None

        def listen(self) -> None:
            pass

    asked = config.from_mapping({"round": {"lost": {"silent": None, "closed": 60, "beat": 30}}})
    found = listening(asked, tmp_path, Bound())  # type: ignore[arg-type]
    assert found.rules is not None
    assert (found.rules.silent, found.rules.closed, found.beat_s) == (None, 60, 30)
