"""A user's own traces: what is read, and what is refused with its line."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from fednet.errors import ConfigError
from fednet.world import Pace, Presence, reading

HUGE = "1" + "0" * 400  # no float
CAPACITY = json.dumps({"4": {"computation": 5.0, "communication": 8000.0}})


def link(path, client=0, clients=3):
    return reading.link((str(path), str(path)), 0, client, clients)


# -- what is read ----------------------------------------------------------------------------------
def test_availability_by_client_and_by_device():
    text = "client,from,to\n0,10,20\n0,20,30.5\n\n# the second is never there\n1,0,0\n2,0,5\n"
    assert reading.availability(text, "t.csv", 3) == [
        Presence(((10, 20), (20, 30.5))),
        Presence(()),
        Presence(((0, 5),)),
    ]
    fedscale = {"duration": 30, "active": [10, 50], "inactive": [20, 70], "finish_time": 100}
    assert reading.availability(json.dumps({"17": fedscale}), "b.json", 9) == (
        Presence(((10, 20), (50, 70)), 100),
    )
    flash = {
        "681": {
            "trace_start": 250.0,
            "trace_end": 350.0,
            "ready_time": [[255.0, 265.0], [300.0, 300.0], [320.0, 340.0]],
        },
        "9": {"isSuccess": False, "trace_start": None, "trace_end": None, "ready_time": []},
    }
    first, second = reading.availability(json.dumps(flash), "f.json", 9)
    assert first == Presence(((20, 40), (55, 65)), 100)
    assert second.spells == ()


def test_steps_by_client_and_fedscales_capacity(tmp_path):
    steps = list(reading.paces("client,step_ms\n0,10\n1,250\n", "d.csv", [32, 32]))
    assert steps == [Pace(0.01), Pace(0.25)]
    # three passes over a batch of 32, or 64, samples of 5 ms
    assert list(reading.paces(CAPACITY, "c.json", [32, 64])) == [Pace(0.48), Pace(0.96)]
    file = tmp_path / "capacity.json"
    file.write_text(CAPACITY)
    down, up = link(file, client=3, clients=5)
    assert down.mbps.tolist() == up.mbps.tolist() == [8.0]


def test_links_without_clients_begin_at_a_second_of_each_clients_own(tmp_path):
    file = tmp_path / "link.csv"
    rows = "".join(f"{t},{t + 1},{2 * t + 1}\n" for t in range(100))
    file.write_text("second,down_mbps,up_mbps\n" + rows)
    found = [link(file, client, 5) for client in range(5)]
    assert len({down.mbps[0] for down, _ in found}) == 5
    for down, up in found:
        assert sorted(down.mbps) == list(range(1, 101))
        assert (up.mbps == 2 * down.mbps - 1).all()  # both directions begin together


def test_mahimahis_traces_are_the_uplink_and_the_downlink(tmp_path):
    # two packets in the first second, none in the second, one in the third, half a second long
    assert reading.mahimahi("0\n999\n2500\n", "up").mbps.tolist() == [0.024, 0.0, 0.024]
    up, down = tmp_path / "up", tmp_path / "down"
    up.write_text("500\n1000\n")
    down.write_text("".join(f"{t}\n" for t in range(100, 1001, 100)))
    rates = reading.link((str(up), str(down)), 0, 0, 1)
    assert [r.mbps.tolist() for r in rates] == [[0.12], [0.024]]


@pytest.mark.parametrize(("text", "clients"), [("²,1,2", 1), ("0,1,2\n4,1,2", 5)])
def test_how_many_clients_a_file_has(text, clients):
    assert reading.clients(text, "t") == clients
    with pytest.raises(ConfigError, match=r"t:1: .*; expected JSON"):
        reading.clients('{"0": ', "t")


def test_a_pickle_is_not_read_and_the_command_that_converts_it_to_json_works(tmp_path, monkeypatch):
    file = tmp_path / "trace"
    file.write_bytes(pickle.dumps({3: {"active": [1], "inactive": [2], "finish_time": 10}}))
    with pytest.raises(ConfigError, match="is a pickle, and reading it runs the code") as refused:
        reading.text(str(file), "availability.trace", ())
    command = str(refused.value).partition("convert it to JSON: ")[2]
    code = command.partition('-c "')[2].partition('"')[0]
    monkeypatch.setattr(sys, "argv", ["-c", str(file), f"{file}.json"])
    exec(code, {})
    found = reading.availability(Path(f"{file}.json").read_text(), "x", 2)
    assert found == (Presence(((1, 2),), 10),)


# -- what is refused -------------------------------------------------------------------------------
def test_a_name_that_is_none_says_the_nearest():
    with pytest.raises(ConfigError, match=r"availability.trace: unknown trace 'phone'.*'phones'"):
        reading.text("phone", "availability.trace", ("phones",))
    with pytest.raises(ConfigError, match=r"x/absent.csv: No such file"):
        reading.text("x/absent.csv", "availability.trace", ("phones",))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0,0,20\n0,19,30", r"t.csv:2: from second 19, but the session before lasts until 20"),
        ("0,-1,20", r"t.csv:1: from second -1; expected 0 or later"),
        ("0,1,2\n0,5,5", r"t.csv:2: to second 5, which is not after second 5"),
        ("0,1,2\n2,1,2", r"t.csv:2: client 2 comes, and client 1 is left out; .* `1,0,0`"),
        ("1,1,2\n0,1,2", r"t.csv:1: client 1 comes, and client 0 is left out"),
        ("0,1,2\n1,1,2\n0,3,4", r"t.csv:3: client 0 after client 1; order the lines"),
        ("0,1,2\n1,1,2\n2,1,2\n3,1,2", r"t.csv:4: there is no client 3; .* clients 0 to 2"),
        ("0,1,2\n1,1,2", r"t.csv:2: the last client is 1; .* clients 0 to 2; .* `2,0,0`"),
        ("0,1,2\n0,two,3", r"t.csv:2: expected client, from, to, got '0,two,3'"),
        ("0,1,2\n0,nan,3", r"t.csv:2: expected client, from, to"),
        ("0.5,1,2", r"t.csv:1: there is no client 0.5"),
        ("client,from,to\n", r"t.csv: it is empty"),
        (
            f'{{"7": {{"finish_time": {HUGE}, "active": [0], "inactive": [5]}}}}',
            "t.csv: device '7': expected active",
        ),
    ],
)
def test_a_bad_file_of_availability_is_refused_with_its_line(lines, said):
    with pytest.raises(ConfigError, match=said):
        reading.availability(lines, "t.csv", 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"active": [10, 15], "inactive": [20, 30], "finish_time": 100},
            "spell 2: from second 15 to 30; expected ascending seconds from 20 to",
        ),
        ({"active": [-5], "inactive": [20], "finish_time": 100}, "from second -5"),
        ({"active": [5], "inactive": [120], "finish_time": 100}, "to 120; .* end, 100"),
        ({"active": [5, 6], "inactive": [7], "finish_time": 100}, "active 2 times and inactive 1"),
        ({"active": [5], "inactive": [7]}, "KeyError: 'finish_time'"),
        ({"trace_start": 9, "trace_end": 3, "ready_time": [[1, 2]]}, "from second 9 to 3"),
    ],
)
def test_a_bad_device_is_refused_with_its_id(value, said):
    good = {"active": [1], "inactive": [2], "finish_time": 10}
    text = json.dumps({"a": good, "b": value})
    with pytest.raises(ConfigError, match=rf"b.json: device 'b'.*{said}"):
        reading.availability(text, "b.json", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1\n2,1\n", "d.csv:2: client 2 comes, and client 1 is left out"),
        ("0,1\n0,1\n", "d.csv:2: client 0 has a second line"),
        ("0,1\n1,-1\n", "d.csv:2: -1 ms a step"),
        ("0,1\n1,1\n", "d.csv:2: the last client is 1"),
    ],
)
def test_a_bad_file_of_devices_is_refused_with_its_line(text, said):
    with pytest.raises(ConfigError, match=said):
        list(reading.paces(text, "d.csv", [1, 1, 1]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1,1\n2,1,1\n", "t:2: second 2; expected second 1, so that none is left out"),
        ("0,1,1\n1,-1,1\n", "t:2: -1 and 1 Mbit/s; expected 0 or more"),
        ("0,0,1\n1,0,1\n", "t: there is no second in which it carries anything"),
        ("0,0,1,1\n2,0,1,1\n", "t:2: client 2 comes, and client 1 is left out"),
        ("0,0,1,1\n", "t:1: the last client is 0"),
        ("5\n3\n", "t:2: millisecond 3; expected 5 to"),
        ("-1\n3\n", "t:1: millisecond -1"),
        ("1\n2.5\n", "t:2: expected a millisecond, got '2.5'"),
        ("\n", "t:1: the trace has no length"),
        # rubbish
        ('{"0":' * 100_000, r"t:1: maximum recursion depth"),
        (
            '{"0": {"communication": 1' + "0" * 9000 + "}}",
            r"t(:1|: device '0'): (Exceeds|expected)",
        ),
        (
            f'{{"0": {{"communication": {HUGE}}}}}',
            r"t: device '0': expected computation and communication",
        ),
        ("second,down_mbps,up_mbps\n0,1e308,1e308\n1,1e308,1e308", r"t: .* carry inf bytes"),
        ("0,1e-320,1e-320", r"t: all its seconds together carry 1"),
        ("1\n99999999999999", r"t:2: millisecond 99999999999999; expected 1 to"),
        ("ab1" * 10**6, r"t:1: expected a millisecond, got 'ab1.* and 2999940 more"),
        ("1,2," + "x" * 10**6, r"t:1: expected second, down_mbps, up_mbps, got '1,2,x.* more"),
    ],
)
def test_a_bad_file_of_links_is_refused_with_its_line(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("t").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        link("t")
    assert len(str(refused.value)) < 300
