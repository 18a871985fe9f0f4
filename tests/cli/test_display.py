from __future__ import annotations

import errno
import io
import os
import re
import sys

import pytest
from rich.console import Console

from fednet.cli import words
from fednet.cli.display import Display, PlainConsole
from fednet.errors import speaker

RECORD = {
    "round": 3,
    "selected": [0, 1, 2],
    "completed": [0, 2],
    "dropped": {"1": "deadline"},
    "void": False,
    "seconds": 1.25,
    "train_loss": 0.5,
    "test_accuracy": 0.875,
    "bytes_up": 1_500_000,
    "bytes_down": 2_000_000,
}


def shown(use, quiet=False, terminal=False) -> str:
    out = io.StringIO()
    with Display(quiet, Console(file=out, force_terminal=terminal, width=200)) as display:
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
    record = {"round": 3, "test_accuracy": None, "client_accuracy": scores, "own_model": "local"}
    received = "global accuracy before the round, on clients' tests 25.00 %"
    assert (
        words.round_line(record) == f"round 3  {received}  local accuracy on clients' tests 75.00 %"
    )
    site = words.round_line({"round": 3, "client_accuracy": {"received": 0.25}})
    assert site == f"round 3  {received}"


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
    rows = words.summary_rows(summary)
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


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_run_goes_on_where_nobody_takes_what_it_shows(monkeypatch, number):
    """A terminal that was closed, a disk that is full, a reader that has gone."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fednet.cli.display.nowhere", lambda stream: None)
    for terminal in (False, True):
        with Display(console=PlainConsole(file=Gone(), force_terminal=terminal)) as shown:
            shown.note("hello")
            shown.round_done(RECORD)


def test_work_goes_on_when_nobody_is_left_to_read_what_it_says(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        say = speaker(quiet=False)
        say("one")
        say("two")


def test_names_in_brackets_are_text_and_not_markup():
    assert shown(lambda d: d.note("client[red]")) == "client[red]\n"


def test_terminal_is_left_with_the_rounds_and_without_the_live_line():
    def one(d):
        d.round_started(1, 2, [0, 1])
        d.round_done(RECORD)

    assert "round 3" in shown(one, terminal=True)


def test_waiting_names_the_client_its_host_and_its_step():
    info = {
        "arrived": [0, 1, 2],
        "waiting": [
            {"client": 7, "host": "b", "phase": "train", "step": 2, "steps": 20, "since": 100.0},
            {"client": 8},
        ],
    }
    assert (
        words.waiting_for(info, 104.0)
        == "3 of 5 replies, waits for client 7 on b (train, step 2 of 20, 4s) and 1 more"
    )
    assert words.waiting_for({}, 0.0) == ""


def test_the_final_table_is_plain_lines_away_from_a_terminal():
    text = shown(lambda d: d.finished({"algorithm": "fedavg", "rounds": 20, "seconds": 65.0}))
    assert text == "algorithm   fedavg\nrounds      20\nwall-clock  1m05s\n"


def test_ids_are_shown_as_ranges():
    assert words.ids([0, 1, 2, 7]) == "clients 0-2, 7"
    assert words.ids([4]) == "client 4"
    assert words.ids(range(0, 40, 2)).endswith(", ...")


def test_the_next_rounds_number_stays_where_it_was_opened_before_the_last_ended():
    display = Display(console=Console(file=io.StringIO()))
    assert "starting" in str(display._line())
    display.round_started(3, 9, [0])
    assert "round 3/9" in str(display._line())
    display.round_started(4, 9, [1])
    display.round_done(RECORD)
    assert "round 4/9: client 1" in str(display._line())
    display.round_done({**RECORD, "round": 4})
    assert "round 4/9 is done" in str(display._line())


@pytest.mark.parametrize(("notebook", "live"), [(True, False), (False, True)])
def test_a_cell_of_a_notebook_that_runs_the_command_is_no_terminal(monkeypatch, notebook, live):
    monkeypatch.setattr(sys, "stdout", Terminal())
    if notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    else:
        monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert Display().console.is_terminal is live


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_that_are_asked_for_make_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display() as display:
        assert display.live is None
        display.note("hello")
    assert capsys.readouterr().out == "hello\n"
