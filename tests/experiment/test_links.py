"""Clients' links: drawn, emulated, and reckoned on the virtual clock."""

from __future__ import annotations

import pytest

from fednet.errors import ConfigError
from fednet.experiment import links
from fednet.records.rows import TIMES
from fednet.server.rounds import fit_seconds, take_time
from fednet.transport.shaped import LinkShape
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.rooms import hashes, lines, processes, run, small


# -- which link ------------------------------------------------------------------------------------
def test_a_figure_is_drawn_once_a_client_from_the_seed():
    config = small(
        clients=400, link={"up_mbps": "lognormal(10, 1)", "latency_ms": "uniform(5, 20)"}
    )
    rates = sorted(links.of(config, c).up_mbps for c in range(400))
    delays = [links.of(config, c).latency_ms for c in range(400)]
    assert 8 < rates[200] < 12.5  # the median
    # e: a share of 0.84 lies below one sigma above the median
    assert 2.2 < rates[336] / rates[200] < 3.3
    assert 5 <= min(delays) < 5.5 < 19.5 < max(delays) <= 20
    again = small(clients=3, rounds=9, link={"up_mbps": "lognormal(10, 1)"})
    assert [links.of(again, c).up_mbps for c in range(3)] == [
        links.of(config, c).up_mbps for c in range(3)
    ]
    other = small(clients=3, seed=1, link={"up_mbps": "lognormal(10, 1)"})
    assert links.of(other, 0).up_mbps != links.of(config, 0).up_mbps


def test_a_clients_link_is_its_own_then_the_federations_then_the_profiles():
    link = {
        "profile": "4g",
        "up_mbps": 2,
        "step_ms": 7,
        "per_client": {"0-1,4": {"down_mbps": 5, "latency_ms": 0}},
    }
    c = small(clients=5, link=link)
    two = links.of(c, 2)
    four = links.of(c, 4)
    assert (four.up_mbps, four.down_mbps, four.latency_ms, four.step_ms) == (2, 5, 0, 7)
    assert (two.up_mbps, two.down_mbps, two.latency_ms) == (2, 9, 85)
    plain = links.of(small(), 0)
    assert (plain.up_mbps, plain.down_mbps, plain.latency_ms) == (None, None, 0)


def test_a_client_may_have_a_profile_of_its_own_or_a_drawn_one():
    config = small(
        clients=3,
        link={
            "profile": "lan",
            "down_mbps": 7,
            "per_client": {"1": {"profile": "3g", "latency_ms": 9}, "2": {"up_mbps": 2}},
        },
    )
    assert links.shape(config, 0) == LinkShape(up_mbps=1000, down_mbps=7, latency_ms=0.1)
    assert links.shape(config, 1) == LinkShape(up_mbps=0.768, down_mbps=1.6, latency_ms=9)
    assert links.shape(config, 2) == LinkShape(up_mbps=2, down_mbps=7, latency_ms=0.1)
    drawn = small(clients=60, link={"profile": "choice(3g, wifi, wifi)"})
    up = [links.of(drawn, c).up_mbps for c in range(60)]
    assert set(up) == {0.768, 15}
    assert 30 < up.count(15) < 50  # twice as likely


def test_a_share_of_all_clients_may_have_a_link_of_its_own():
    config = small(clients=8, link={"up_mbps": 9, "per_client": {"2/4": {"up_mbps": 1}}})
    assert [links.of(config, c).up_mbps for c in range(8)] == [9, 9, 1, 1, 9, 9, 9, 9]
    with pytest.raises(ConfigError, match="this share of 2 clients is empty"):
        small(clients=2, link={"per_client": {"1/4": {"up_mbps": 1}}})


# -- reckoned --------------------------------------------------------------------------------------
VIRTUAL = {
    "clock": "virtual",
    "up_mbps": 0.08,
    "down_mbps": 0.8,
    "latency_ms": 50,
    "step_ms": 100,
    "per_client": {"2": {"up_mbps": 0.004}},
}


def test_the_virtual_clock_takes_the_ledgers_bytes_over_each_link(tmp_path):
    directory = run(tmp_path, link=VIRTUAL, data={"partition": {"scheme": "iid"}})
    rounds = lines(directory / "rounds.jsonl")
    book = lines(directory / "wire.jsonl")
    for record in rounds:
        took = {}
        for client, up in ((0, 1e4), (1, 1e4), (2, 500.0)):  # bytes a second
            rows = {
                r["type"]: r["bytes"]
                for r in book
                if r["round"] == record["round"] and r["client"] == client
            }
            took[client] = rows["task"] / 1e5 + rows["reply"] / up + 2 * 0.05
        training = 3 * 0.1  # 20 samples in batches of 8
        assert record["seconds_virtual"] == pytest.approx(max(took.values()) + training)
        assert record["seconds_virtual_by_phase"] == pytest.approx(
            {"sending": took[2], "training": training, "waiting": 0.0}, abs=1e-9
        )


def test_on_the_virtual_clock_who_is_late_is_the_same_wherever_it_runs(tmp_path):
    late = {"link": VIRTUAL, "round": {"deadline": 1.0}}
    one = run(tmp_path / "a", **late)
    two = processes(tmp_path / "b", **late)
    for directory in (one, two):
        assert [r["dropped"] for r in lines(directory / "rounds.jsonl")] == [{"2": "deadline"}] * 2
        assert [r["seconds_virtual"] for r in lines(directory / "rounds.jsonl")] == [1.0, 1.0]
        # The time of the last who counts; the rest of the second is waiting.
        for split in [r["seconds_virtual_by_phase"] for r in lines(directory / "rounds.jsonl")]:
            assert split["training"] == pytest.approx(0.3)
            assert split["waiting"] > 0.1
            assert sum(split.values()) == pytest.approx(1.0)
        assert {
            r["useful"]
            for r in lines(directory / "wire.jsonl")
            if r["client"] == 2 and r["type"] == "reply"
        } == {False}
    assert hashes(one) == hashes(two)


# -- emulated --------------------------------------------------------------------------------------
def test_an_emulated_link_takes_its_time_and_changes_no_bit(tmp_path):
    slow = {"link": {"up_mbps": 0.16, "latency_ms": 30}, "rounds": 1}
    directory = processes(tmp_path / "slow", workers=1, **slow)
    (record,) = lines(directory / "rounds.jsonl")
    (reply,) = {r["bytes"] for r in lines(directory / "wire.jsonl") if r["type"] == "reply"}
    # Up at 20 kB/s, and twice the latency.
    assert record["seconds_by_phase"]["sending"] >= reply / 20_000 + 0.06
    assert hashes(directory) == hashes(run(tmp_path / "fast", rounds=1))


def test_only_what_belongs_to_a_client_takes_its_link():
    link_of = links.chooser(small(link={"profile": "4g", "per_client": {"1": {"profile": "3g"}}}))
    key = m.Key(1, 0, 0, 1)
    assert link_of([encode(m.Pull(key=key, first=0, count=1))])[0] == 1
    assert link_of([encode(m.Reply(key=key, form=[], size=0)), b""])[1].up_mbps == 0.768
    assert link_of([encode(m.Progress(client=1))]) == (None, LinkShape())
    assert link_of([b"\xc1"]) == (None, LinkShape())


# -- a round's time --------------------------------------------------------------------------------
def test_a_rounds_time_is_split_without_rest(tmp_path):
    for record in lines(run(tmp_path, evaluate={"clients": "auto"}) / "rounds.jsonl"):
        split = record["seconds_by_phase"]
        assert set(split) == set(TIMES)
        assert sum(split.values()) == pytest.approx(record["seconds"])
        assert min(split.values()) >= 0
        assert split["training"] > 0


def test_what_a_client_says_of_its_time_cannot_exceed_the_rounds():
    into = dict.fromkeys(("training", "encoding", "sending"), 0.0)
    said = {"training": 8.0, "encoding": float("nan"), "sending": -1.0}
    assert take_time(into, said, 10.0) == 8.0
    assert take_time(into, {"training": 1e9, "encoding": 5.0}, 2.0) == 2.0
    assert into == {"training": 10.0, "encoding": 0.0, "sending": 0.0}


def test_what_passed_before_the_last_round_ended_was_counted_there():
    seconds = {
        "training": 3.0,
        "encoding": 0.5,
        "sending": 1.0,
        "waiting": 1.0,
        "aggregating": 0.5,
        "evaluating": 0.5,
        "recording": 0.5,
    }
    out = fit_seconds(seconds, elapsed=4.5, early=2.5)  # 7 in all
    assert out == {**seconds, "waiting": 0.0, "sending": 0.0, "training": 2.5}
