"""Who takes part: seeded, the same for all methods, and as the availability models say."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fednet import seeds
from fednet.config import AvailabilitySection, Config, RoundSection
from fednet.experiment import selection
from fednet.experiment.selection import available, cohort


def config(**changes: object) -> Config:
    return Config(**{"clients": 10, "participation": 0.5, **changes})  # type: ignore[arg-type]


def test_the_cohort_is_the_first_m_of_the_rounds_order_ascending() -> None:
    order = seeds.rng(0, "selection", 3).permutation(10)
    assert cohort(config(), 3) == sorted(int(i) for i in order[:5])
    assert cohort(config(round=RoundSection(ask=1.4)), 3) == sorted(int(i) for i in order[:7])


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

    selection._markov.cache_clear()
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
    selection._markov.cache_clear()
    some = config(availability=AvailabilitySection(model="markov", up=0.4, down=0.2))
    for round in range(1, 201):
        available(some, round)
    assert drawn == list(range(201))
