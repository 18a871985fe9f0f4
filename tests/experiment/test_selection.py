"""Who takes part: seeded, the same for all methods, and as the availability models say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fednet import seeds
from fednet.config import AvailabilitySection, Config, RoundSection
from fednet.errors import ConfigError
from fednet.experiment import selection
from fednet.experiment.selection import available, cohort


def config(**changes: object) -> Config:
    return Config(**{"clients": 10, "participation": 0.5, **changes})  # type: ignore[arg-type]


def test_the_cohort_is_the_first_m_of_the_rounds_order_ascending() -> None:
    order = seeds.rng(0, "selection", 3).permutation(10)
    assert cohort(config(), 3) == sorted(int(i) for i in order[:5])
    assert cohort(config(round=RoundSection(select_extra=2)), 3) == sorted(
        int(i) for i in order[:7]
    )


@pytest.mark.parametrize(
    ("share", "clients", "m"),
    [(0.5, 10, 5), (0.25, 10, 3), (0.24, 10, 2), (0.01, 10, 1), (1.0, 10, 10)],
)
def test_m_is_the_share_rounded_half_up_but_at_least_one(
    share: float, clients: int, m: int
) -> None:
    assert len(cohort(config(participation=share, clients=clients), 1)) == m


def test_those_who_are_away_are_passed_over_in_the_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n0,1,2\n3,2,2\n4,1,9\n")
    away = config(availability=AvailabilitySection(model="trace", path=str(trace)))
    assert [cohort(away, t) for t in (1, 2, 3, 10)] == [[0, 4], [0, 3, 4], [4], []]


def test_a_trace_may_be_json_and_says_where_it_is_wrong(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("[[1, 1, 1], [2, 2, 3]]")
    away = config(availability=AvailabilitySection(model="trace", path=str(trace)))
    assert np.flatnonzero(available(away, 2)).tolist() == [2]
    trace.write_text("1,1,1\n2,two,3\n")
    with pytest.raises(ConfigError, match=r"trace.json:2: expected client, from, to"):
        available(away, 1)


def test_bernoulli_draws_each_client_anew_with_probability_p() -> None:
    some = config(clients=1000, availability=AvailabilitySection(model="bernoulli", p=0.3))
    here = np.array([available(some, t) for t in range(1, 21)])
    assert abs(here.mean() - 0.3) < 0.01  # 20 000 draws: three standard deviations
    assert (available(some, 5) == here[4]).all()
    assert not (here[0] == here[1]).all()


def test_markov_starts_and_stays_in_its_stationary_share_and_changes_at_its_rates() -> None:
    some = config(clients=5000, availability=AvailabilitySection(model="markov", up=0.1, down=0.3))
    here = np.array([available(some, t) for t in range(1, 12)])
    assert np.abs(here.mean(axis=1) - 0.25).max() < 0.03  # up / (up + down)
    came = (~here[:-1] & here[1:]).sum() / (~here[:-1]).sum()
    went = (here[:-1] & ~here[1:]).sum() / here[:-1].sum()
    assert abs(came - 0.1) < 0.01
    assert abs(went - 0.3) < 0.015


@pytest.mark.parametrize("asked", [range(1, 61), [60], [60, 3, 59, 1, 60, 24]])
def test_markov_takes_one_step_a_round_in_whatever_order_rounds_are_asked_for(asked) -> None:
    chance = {False: lambda u: u < 0.4, True: lambda u: u >= 0.2}  # that it is there next

    def by_hand(client: int, round: int) -> bool:
        u = [float(seeds.rng(7, "availability", t).random(5)[client]) for t in range(round + 1)]
        here = u[0] < 0.4 / 0.6
        for t in range(1, round + 1):
            here = chance[here](u[t])
        return here

    selection._chains.cache_clear()
    section = AvailabilitySection(model="markov", up=0.4, down=0.2)
    some = config(clients=5, seed=7, availability=section)
    for round in asked:
        assert available(some, round).tolist() == [by_hand(c, round) for c in range(5)]


def test_markov_draws_each_round_once(monkeypatch) -> None:
    drawn: list[int] = []

    def rng(seed: int, purpose: str, round: int) -> np.random.Generator:
        drawn.append(round)
        return seeds.rng(seed, purpose, round)

    monkeypatch.setattr(selection, "seeds", SimpleNamespace(rng=rng))
    selection._chains.cache_clear()
    some = config(availability=AvailabilitySection(model="markov", up=0.4, down=0.2))
    for round in range(1, 201):
        available(some, round)
    assert drawn == list(range(201))


def test_a_trace_is_read_again_only_where_it_has_changed(tmp_path: Path, monkeypatch) -> None:
    trace, read = tmp_path / "trace.csv", []
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, **k: read.append(p) or text(p, **k))
    trace.write_text("0,1,2\n")
    away = config(availability=AvailabilitySection(model="trace", path=str(trace)))
    assert [np.flatnonzero(available(away, t)).tolist() for t in (1, 2, 3)] == [[0], [0], []]
    assert read == [trace]
    trace.write_text("10,1,99999999999999999999\n9,-5,99999999999999999999\n")
    assert np.flatnonzero(available(away, 3)).tolist() == [9]  # there is no client 10
    assert read == [trace, trace]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe0,1,2", "no text, or no JSON"),
        (b"[[0, 1, 2],", "no text, or no JSON"),
        (b"[" * 100_000, "no text, or no JSON"),
        (b"[5, 6]", ":1: expected client, from, to"),
        (b"0,1,x", ":1: expected client, from, to"),
        (b"client,from,to\n0,1," + b"9x" * 10**6, ":2: expected client, from, to"),
    ],
)
def test_a_trace_of_rounds_that_is_none_is_refused_in_a_sentence(tmp_path, content, said):
    path = tmp_path / "trace"
    path.write_bytes(content)
    away = config(availability=AvailabilitySection(model="trace", path=str(path)))
    with pytest.raises(ConfigError, match=said) as refused:
        available(away, 1)
    assert len(str(refused.value)) < 400
