"""A user's own traces: what is read, and what is refused with its line."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from fednet.errors import ConfigError
from fednet.world import Presence, reading

HUGE = "1" + "0" * 400  # no float
CAPACITY = json.dumps({"4": {"computation": 5.0, "communication": 8000.0}})


def link(path, client=0, clients=3):
    return reading.link((str(path), str(path)), 0, client, clients)


# -- what is read ----------------------------------------------------------------------------------
def test_availability_by_client_and_by_device():
    text = "client,from,to\n0,10,20\n0,22,30.5\n\n# the second is never there\n1,0,0\n2,0,5\n"
    assert reading.availability(text, "t.csv", 3) == [
        Presence(((10, 20), (22, 30.5))),
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
    assert reading.steps_s("client,step_ms\n0,10\n1,250\n", "d.csv", [32, 32]) == [0.01, 0.25]
    # three passes over a batch of 32, or 64, samples of 5 ms
    assert reading.steps_s(CAPACITY, "c.json", [32, 64]) == [0.48, 0.96]
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
    up = tmp_path / "up"
    down = tmp_path / "down"
    up.write_text("500\n1000\n")
    down.write_text("".join(f"{t}\n" for t in range(100, 1001, 100)))
    rates = reading.link((str(up), str(down)), 0, 0, 1)
    assert [r.mbps.tolist() for r in rates] == [[0.12], [0.024]]


@pytest.mark.parametrize(("text", "clients"), [("²,1,2", 1), ("0,1,2\n4,1,2", 5)])
def test_how_many_clients_a_file_has(text, clients):
    assert reading.clients(text, "t") == clients


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


AVAILABILITY = "available from second"
OTHERS = "\n1,0,0\n2,0,0"
DEVICE = {"active": [10, 15], "inactive": [20, 30], "finish_time": 100}


def device(**changes) -> str:
    good = {"active": [1], "inactive": [2], "finish_time": 10}
    return json.dumps({"a": good, "b": {**DEVICE, "inactive": [14, 30], **changes}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,0,20\n0,19,30" + OTHERS, f"t:2: {AVAILABILITY} 19 to 30; expected .* from 20 to"),
        ("0,-1,20" + OTHERS, f"t:1: {AVAILABILITY} -1"),
        ("0,1,2\n0,5,4" + OTHERS, f"t:2: {AVAILABILITY} 5 to 4"),
        ("0,1,2\n2,1,2", "t: there is no line of client 1; .* clients 0 to 2"),
        ("0,1,2\n1,1,2\n2,1,2\n3,1,2", "t:4: there is no client 3; .* clients 0 to 2"),
        ("0.5,1,2", "t:1: there is no client 0.5"),
        ("0,1,2\n0,two,3", "t:2: expected client, from, to, got '0,two,3'"),
        ("0,1,2\n0,nan,3", "t:2: expected client, from, to"),
        ("client,from,to\n", "t: it is empty"),
        (device(**DEVICE), f"device 'b': {AVAILABILITY} 15 to 30; expected .* from 20 to 100"),
        (device(inactive=[14, 120]), f"device 'b': {AVAILABILITY} 15 to 120"),
        (device(inactive=[7]), "device 'b': expected active, inactive .* shorter than"),
        (device(finish_time=None), "device 'b': expected active, inactive and finish_time"),
        (device(trace_start=9, trace_end=3, ready_time=[[1, 2]]), "from second 9 to 3"),
        (f'{{"7": {{"finish_time": {HUGE}, "active": [], "inactive": []}}}}', "'7': expected acti"),
    ],
)
def test_a_bad_file_of_availability_is_refused_with_its_line(text, said):
    with pytest.raises(ConfigError, match=said):
        reading.availability(text, "t", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1\n2,1\n", "d.csv: there is no line of client 1"),
        ("0,1\n0,1\n1,1\n2,1\n", "d.csv:2: expected one line a client"),
        ("0,1\n1,-1\n2,1\n", "d.csv:2: expected one line a client, with 0 ms or more"),
    ],
)
def test_a_bad_file_of_devices_is_refused_with_its_line(text, said):
    with pytest.raises(ConfigError, match=said):
        reading.steps_s(text, "d.csv", [1, 1, 1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1,1\n2,1,1\n", "t:2: expected second 1, so that none is left out"),
        ("0,1,1\n1,-1,1\n", "t:2: .* got second 1, -1 and 1 Mbit/s"),
        ("0,0,1\n1,0,1\n", "t: there is no second in which it carries anything"),
        ("0,0,1,1\n2,0,1,1\n", "t: there is no line of client 1"),
        ("5\n3\n", "t:2: millisecond 3; expected whole numbers from 5 to"),
        ("1\n2.5\n", "t:2: millisecond 2.5"),
        ("0\n", "t: the trace has no length"),
        ('{"0":' * 100_000, "t: maximum recursion depth"),
        (f'{{"0": {{"communication": {HUGE}}}}}', "device '0': expected communication"),
        ("second,down_mbps,up_mbps\n0,1e308,1e308\n1,1e308,1e308", "t: .* carry inf bytes"),
        ("0,1e-320,1e-320", "t: all its seconds together carry 1"),
        ("1\n99999999999999", "t:2: millisecond 1e\\+14; expected"),
        ("1,2," + "x" * 10**6, "t:1: expected second, down_mbps, up_mbps, got '1,2,x"),
    ],
)
def test_a_bad_file_of_links_is_refused_with_its_line(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("t").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        link("t")
    assert len(str(refused.value)) < 300
