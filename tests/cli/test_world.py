"""`fednet list world`: a trace in figures."""

from __future__ import annotations

import pytest

from fednet.cli.main import main
from fednet.world import Presence
from fednet.world.presence import available


def test_how_many_are_available_is_counted_over_a_week_or_until_the_last_has_left():
    """One is there for the first half of each hour, one always: 1.5 in the mean."""
    half = Presence(((0.0, 1800.0),), 3600.0)
    whole = Presence(((0.0, 3600.0),), 3600.0)
    found = available([half, whole])
    assert len(found) == 7 * 24 * 6
    assert found.mean() == pytest.approx(1.5, abs=0.01)
    assert set(found) == {1, 2}
    assert available([Presence(((0.0, 50.0),)), Presence(((0.0, 100.0),))]).mean() == 1.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,from,to\n0,0,100\n1,50,100\n", ["clients available at once", "1.5", "1.0 of 1"]),
        ("client,step_ms\n0,10\n1,30\n", ["median", "20"]),
        ("second,down_mbps,up_mbps\n0,4,1\n1,0,0\n2,2,1\n", ["down", "longest silence", "1 s"]),
    ],
)
def test_a_file_is_said_in_figures(text, words, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    assert main(["list", "world", str(trace)]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in words), said


def test_without_a_trace_those_that_fednet_has_are_listed(capsys):
    assert main(["list", "world"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == ["phones", "wifi", "lte", "umts", "evdo"]
    for name in listed:
        assert main(["list", "world", name, "--set", "clients=3"]) == 0


def test_a_bad_trace_is_refused_with_its_line(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n0,0,100\n0,50,100\n")
    assert main(["list", "world", str(trace)]) == 2
    assert f"{trace}:3: available from second 50" in capsys.readouterr().err
