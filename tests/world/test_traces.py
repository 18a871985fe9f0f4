"""Availability, links and devices, worked by hand; and the shipped traces."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednet import config, world
from fednet.errors import ConfigError
from fednet.world import Presence, Rates, World, shipped
from fednet.world.presence import cyclic, merge_spells

SOME = Presence(((10.0, 20.0), (40.0, 60.0)))
OTHER = Presence(((15.0, 30.0), (55.0, 70.0)))


# -- availability ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("presence", "until", "following"),
    [
        (
            Presence(((10.0, 20.0), (30.0, 31.0))),
            {9.9: None, 10: 20, 19.9: 20, 20: None, 30.5: 31, 31: None},
            {0: 10, 15: 15, 20: 30, 31: math.inf},
        ),
        (
            Presence(((10.0, 20.0),), period=100.0),
            {115: 120, 120: None, 1015: 1020},
            {0: 10, 21: 110, 121: 210},
        ),
        # a spell that goes on over the end of the period is one
        (cyclic([(90, 110), (40, 50)], 100.0), {95: 110, 105: 110, 5: 10}, {60: 90}),
        (Presence(((0.0, math.inf),)), {1e9: math.inf}, {7: 7}),
        (cyclic([(3, 103)], 100.0), {50: math.inf}, {7: 7}),
        (Presence(()), {0: None}, {0: math.inf}),
    ],
)
def test_until_when_a_client_is_there_and_when_it_comes(presence, until, following):
    assert {t: presence.until(t) for t in until} == until
    assert {t: presence.next(t) for t in following} == following


SECONDS = st.integers(0, 100_000).map(lambda ms: ms / 1000)


@given(
    bounds=st.lists(SECONDS, min_size=2, max_size=8, unique=True).map(sorted),
    period=st.integers(100_001, 200_000).map(lambda ms: ms / 1000),
    t=st.floats(0, 1e6),
)
def test_a_client_that_comes_is_there_and_one_that_leaves_is_not(bounds, period, t):
    """Also where a sum of whole periods is rounded to a second before the client comes or leaves:
    a run waited for ever for a client that came at that second and was not there.
    """
    presence = cyclic(list(zip(bounds[::2], bounds[1::2])), period)
    comes = presence.next(t)
    leaves = presence.until(comes)
    assert t <= comes < leaves
    assert presence.until(leaves) is None
    both = World(presence=(presence, cyclic([(0, period / 2)], period)))
    if math.isfinite(at := both.when(2, t)):
        assert both.here(at) == [True, True]


def test_spells_that_touch_are_one_and_those_without_a_length_are_none():
    assert merge_spells([(5, 7), (1, 3), (3, 4), (9, 9), (6, 8)]) == ((1, 4), (5, 8))
    assert cyclic([(90, 110), (40, 50)], 100.0).spells == ((0, 10), (40, 50), (90, 100))
    assert cyclic([(10, 20), (30, 35)], 100.0).share() == 0.15


def test_a_round_begins_once_as_many_are_there_as_it_needs():
    there = World(presence=(SOME, OTHER))
    assert [there.here(t) for t in (5, 17, 25)] == [[False, False], [True, True], [False, True]]
    assert (there.until(0, 12), there.until(1, 12)) == (20, None)
    assert [there.when(1, t) for t in (0, 12, 31, 80)] == [10, 12, 40, math.inf]
    assert [there.when(2, t) for t in (0, 17, 25)] == [15, 17, 55]
    assert there.when(3, 0) == math.inf
    assert (World().until(7, 1e6), World().here(3), World().when(9, 3)) == (math.inf, None, 3)
    never = World(presence=(Presence(((0.0, 1.0),), 10), Presence(((5.0, 6.0),), 10)))
    assert (never.when(2, 0), never.when(1, 2.5)) == (math.inf, 5)


def test_a_file_by_client_is_read_as_it_is(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("0,10,20\n1,0,5\n")

    section = {"trace": str(trace)}
    found = world.of(config.from_mapping({"clients": 2, "availability": section}))
    assert found.presence == (Presence(((10, 20),)), Presence(((0, 5),)))
    assert world.of(config.Config()) == World()
    assert world.links(config.Config(), 0) is None


def test_more_clients_are_asked_than_count():
    asked = config.from_mapping({"clients": 100, "participation": 0.1, "round": {"ask": 1.3}})
    assert (asked.cohort_size, asked.asked, asked.first) == (10, 13, 10)
    assert config.from_mapping({"round": {"ask": 9.0}}).asked == 10  # no more than there are
    plain = config.from_mapping({})
    assert (plain.asked, plain.first) == (5, None)
    # A device of a trace needs no step time of its own.
    config.from_mapping({"link": {"clock": "virtual"}, "devices": {"trace": "phones"}})


@pytest.mark.parametrize(
    ("text", "kind", "clients"),
    [
        ("client,from,to\n0,1,2\n", "availability", 1),
        ("client,step_ms\n0,1\n1,2\n", "devices", 2),
        ("second,down_mbps,up_mbps\n0,1,2\n", "link", 1),
        ("3\n5\n", "link", 1),
        ('{"a": {"computation": 3, "communication": 4}}', "devices", 1),
        ('{"a": {"active": [1], "inactive": [2], "finish_time": 9}}', "availability", 1),
    ],
)
def test_a_trace_is_recognized_by_its_name_or_its_first_line(tmp_path, text, kind, clients):
    file = tmp_path / "t"
    file.write_text(text)
    assert (world.kind(str(file)), world.clients(str(file))) == (kind, clients)
    assert (world.kind("phones"), world.kind("umts")) == ("availability", "link")
    with pytest.raises(ConfigError, match="unknown trace 'phone'"):
        world.kind("phone")


# -- links: 8 Mbit/s are a million bytes a second --------------------------------------------------
def test_bytes_take_the_rate_of_the_seconds_in_which_they_pass():
    link = Rates([8, 0, 16])
    assert [link.seconds(n) for n in (5e5, 1e6, 1.5e6, 3e6, 3.5e6)] == [0.5, 1.0, 2.25, 3.0, 3.5]
    assert link.seconds(500_000, 0.75) == 1.375  # a quarter now, the rest after the dead second
    assert link.seconds(0, 1.5) == 0.0
    assert link.seconds(1_000_000, 3 * 1000 + 2.75) == pytest.approx(0.75)
    assert [link.bytes(t) for t in (0, 0.5, 1.7, 2.5, 3, 4)] == [0, 5e5, 1e6, 2e6, 3e6, 4e6]
    rng = np.random.default_rng(0)
    other = Rates(rng.random(50) * (rng.random(50) > 0.3))
    for start, nbytes in zip(rng.random(100) * 200, rng.random(100) * 1e7):
        end = start + other.seconds(nbytes, start)
        assert other.bytes(end) - other.bytes(start) == pytest.approx(nbytes, rel=1e-9)


def test_the_longest_silence_of_a_link_is_over_the_end_too():
    assert [Rates(r).longest_silence() for r in ([0, 8, 0, 0, 4, 0, 0], [1, 2])] == [3, 0]
    with pytest.raises(ValueError, match="no second in which"):
        Rates([0, 0])


# -- what is shipped -------------------------------------------------------------------------------
def test_the_phones_are_available_as_long_and_as_often_as_the_measured_ones():
    files = [p for p in shipped.FOLDER.iterdir() if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 150_000
    assert "BSD 2-Clause License" in (shipped.FOLDER / "SOURCES.md").read_text()
    phones = shipped.phones()
    assert len(phones) == 710
    shares = [p.share() for p in phones]
    assert abs(np.mean(shares) - 0.095) < 0.002
    assert abs(np.median(shares) - 0.055) < 0.002
    lengths = np.array([b - a for p in phones for a, b in p.spells])
    p25, median, p75, p95 = np.quantile(lengths, [0.25, 0.5, 0.75, 0.95])
    # the source's 14,139 spells have 10, 138, 1,066 and 10,055 s; here without those of no length
    assert (p25, median) == (11, 186)
    assert 1200 < p75 < 1280
    assert 10_000 < p95 < 11_000
    for p in phones:
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(p.spells))
        assert p.period is not None
        assert p.spells == () or p.spells[-1][1] <= p.period


def test_more_clients_than_phones_have_them_again_on_other_days():
    found = shipped.assign_traces(shipped.phones(), 1000, seed=3)
    assert len(found) == 1000
    assert len({p.spells for p in found}) > 900  # nearly all differ
    assert found[:710] == shipped.assign_traces(shipped.phones(), 710, seed=3)
    assert found != shipped.assign_traces(shipped.phones(), 1000, seed=4)


def test_the_models_have_the_measured_quantiles_means_and_outages():
    steps = [shipped.step_s(0, c) for c in range(4000)]
    p5, median, p95 = np.quantile(steps, [0.05, 0.5, 0.95])
    assert abs(median - 0.172) < 0.006
    assert 0.049 < p5 < 0.062
    assert 0.50 < p95 < 0.60
    measured = {"lte": (8.24, 2.66), "umts": (2.02, 0.94), "evdo": (0.52, 0.84)}
    for name, means in measured.items():
        links = [shipped.link(name, 0, c) for c in range(100)]
        for direction, mean in enumerate(means):
            got = float(np.mean([pair[direction].mbps.mean() for pair in links]))
            assert abs(got / mean - 1) < 0.25, (name, direction, got)
        assert max(pair[1].longest_silence() for pair in links) > 10
    wifi = [shipped.link("wifi", 0, c)[0].mbps.mean() for c in range(300)]
    assert abs(float(np.mean(wifi)) / (5.9 * 8) - 1) < 0.15  # 19 phones' mean, MB/s
    assert shipped.link("lte", 0, 1) == shipped.link("lte", 0, 1)
    assert shipped.link("lte", 0, 1) != shipped.link("lte", 0, 2)
    assert shipped.link("lte", 0, 1) != shipped.link("lte", 1, 1)
