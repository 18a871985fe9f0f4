from __future__ import annotations

import errno
import io
import os
import re
import sys

import msgspec
import pytest

from fednet.cli.display import Display, round_line, summary_rows, waiting_for
from fednet.errors import speaker
from fednet.records import Round

RECORD = Round(
    round=3,
    selected=[0, 1, 2],
    completed=[0, 2],
    dropped={"1": "deadline"},
    seconds=1.25,
    train_loss=0.5,
    test_accuracy=0.875,
    bytes_up=1_500_000,
    bytes_down=2_000_000,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(use, quiet=False, terminal=False) -> str:
    out = Terminal() if terminal else io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.delenv("JPY_PARENT_PID", raising=False)
        patch.setenv("TERM", "xterm")
        with Display(quiet) as display:
            use(display)
    return out.getvalue()


def test_round_is_one_plain_line_away_from_a_terminal():
    time, _, line = shown(lambda d: d.round_done(RECORD)).partition("  ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", time)  # a log says when
    assert line == (
        "round 3  global accuracy 87.50 %  train loss 0.5000  2 of 3 clients  down 2.00 MB  "
        "up 1.50 MB  1.2 s  client 1 dropped (deadline)\n"
    )


def test_without_a_test_set_of_the_server_the_line_has_each_model_on_the_clients_tests():
    scores = {"received": 0.25, "personal": 0.75}
    line = round_line(Round(round=3, client_accuracy=scores, own_model="local"))
    received = "global accuracy before the round, on clients' tests 25.00 %"
    assert line.startswith(f"round 3  {received}  local accuracy on clients' tests 75.00 %  0 of 0")
    site = round_line(Round(round=3, client_accuracy={"received": 0.25}))
    assert site.startswith(f"round 3  {received}  0 of 0")


@pytest.mark.parametrize(
    ("summary", "row"),
    [
        ({"seconds": 0.04}, ("wall-clock", "0.0 s")),
        ({"seconds": 10.84}, ("wall-clock", "10.8 s")),
        ({"seconds": 59.96}, ("wall-clock", "1m00s")),
        ({"seconds": 65.9}, ("wall-clock", "1m06s")),
        ({"seconds": 3599.6}, ("wall-clock", "1h00m")),
        ({"seconds": 7670, "seconds_virtual": 900.0}, ("wall-clock", "2h08m")),
        ({"seconds": 7670, "seconds_virtual": 900.0}, ("virtual time", "15m00s")),
        ({"accuracy": {"last10": 0.8, "last10_of": 5}}, ("global, mean of the last 5", "80.00 %")),
        (
            {"accuracy": {"best": 0.91, "best_round": 18, "last10": None}},
            ("best global accuracy", "91.00 % in round 18"),
        ),
        ({"bytes": {"up": 10_000_000, "down": 12_000_000}}, ("sent up", "10.00 MB")),
    ],
)
def test_the_summary_rounds_what_was_measured_and_leaves_out_the_rest(summary, row):
    rows = summary_rows(summary)
    assert row in rows
    assert "None" not in str(rows)


def test_quiet_says_nothing():
    def everything(d):
        d.round_started(1, 2, [0])
        d.progress({"waiting": [{"client": 0}]})
        d.round_done(RECORD)
        d.note("hello")
        d.finished({"algorithm": "fedavg"})

    assert shown(everything, quiet=True) == ""


def test_work_goes_on_when_nobody_is_left_to_read_what_it_says(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        say = speaker(quiet=False)
        say("one")
        say("two")


def test_waiting_names_the_client_its_host_and_its_step():
    info = {
        "arrived": [0, 1, 2],
        "waiting": [
            {"client": 7, "host": "b", "phase": "train", "step": 2, "steps": 20, "since": 100.0},
            {"client": 8},
        ],
    }
    assert (
        waiting_for(info, 104.0)
        == "3 of 5 replies, waits for client 7 on b (train, step 2 of 20, 4s) and 1 more"
    )
    assert waiting_for({}, 0.0) == ""


def test_the_final_table_is_plain_lines_away_from_a_terminal():
    text = shown(lambda d: d.finished({"algorithm": "fedavg", "rounds": 20, "seconds": 65.0}))
    assert text == "algorithm   fedavg\nrounds      20\nwall-clock  1m05s\n"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_run_goes_on_where_nobody_takes_what_it_shows(monkeypatch, number):
    """A terminal that was closed, a disk that is full, a reader that has gone."""

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fednet.cli.display.nowhere", lambda stream: None)
    for stream in (Gone(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        with Display() as shown:
            shown.note("hello")
            shown.round_done(RECORD)


def test_a_terminal_has_a_live_line_of_the_newest_round_and_is_left_without_it():
    def rounds(d):
        d.round_started(3, 9, [0])
        d.round_started(4, 9, [1])
        d.round_done(RECORD)  # the next has been opened before
        d.progress({"waiting": [{"client": 1, "host": "b"}]})
        d.round_done(msgspec.structs.replace(RECORD, round=4))

    lines = shown(rounds, terminal=True).split("\r\x1b[2K")
    assert [line.split("  ")[0] for line in lines] == [
        "",
        "round 3/9: client 0",
        "round 4/9: client 1",
        "round 3",
        "round 4/9: client 1",
        "round 4/9: client 1",
        "round 4",
        "round 4/9 is done",
        "",
    ]
    assert "waits for client 1 on b" in lines[5]


def test_a_cell_of_a_notebook_that_runs_the_command_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    with Display() as display:
        assert not display.live


def test_a_process_that_has_not_entered_its_display_draws_no_live_line(monkeypatch):
    """The launcher says how a run goes on while its server draws, and after that has ended."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    display = Display()
    display.note("before")
    with display:
        display.round_started(3, 9, [0])
    display.note("after")
    lines = stream.getvalue().split("\r\x1b[2K")
    assert [line.split("  ")[0] for line in lines] == [
        "",
        "before\n",
        "round 3/9: client 0",
        "",
        "after\n",
    ]
