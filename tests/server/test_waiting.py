"""How long a server waits for its first clients."""

from __future__ import annotations

import contextlib
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from fednet import config as configuration
from fednet.algorithms.fedavg import FedAvg
from fednet.errors import CannotGoOn, Stopped
from fednet.report import status
from fednet.server import watch
from fednet.transport.keys import KeyEnd
from tests.rooms import lines, run


class Clock(contextlib.nullcontext[None]):
    """A minute passes with each look at the clients, who come after so many."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.now = 0.0
        self.after = after
        self.looks = 0
        roster = SimpleNamespace(hosting={}, sites=self.sites)
        self.protocol = SimpleNamespace(clients=3, roster=roster)
        self.inline = False

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sites(self, clients: int, offset: float) -> list[dict[str, Any]]:
        absent = {"connected": False, "why": "has not connected"}
        return [{"clients": [(0, clients - 1)], **absent}]

    def do_io(self, *_: Any) -> None:
        self.now += 60.0
        self.looks += 1
        self.protocol.roster.hosting = {0: {}, 1: {}} if self.looks >= self.after else {}


@pytest.mark.parametrize(
    ("external", "section", "gives_up"),
    [
        (True, {}, ""),
        (True, {"join": 600}, r"no client joined within 600 s \(round\.join\)"),
        (False, {}, "no client joined within 60 s"),
    ],
)
def test_how_long_a_server_waits_for_its_clients(monkeypatch, external, section, gives_up):
    clock = Clock(after=100)
    notes = []
    monkeypatch.setattr(watch, "time", clock)
    round = configuration.from_mapping({"clients": 3, "round": section}).round
    how = SimpleNamespace(display=SimpleNamespace(note=notes.append), until=None)
    watching = watch.Watch(SimpleNamespace(), clock, how, 1)  # type: ignore[arg-type]
    watching.check = lambda: None  # type: ignore[method-assign]
    if gives_up:
        with pytest.raises(CannotGoOn, match=gives_up):
            watching.await_clients(2, round.join_s(external))
        return
    watching.await_clients(2, round.join_s(external))
    assert clock.looks == 100
    assert [note.partition("  ")[2] for note in notes] == [
        "waiting for clients: 0 of 3 are ready, 2 are needed; not connected: 0-2 (has not "
        "connected)"
    ]


def watching(monkeypatch, tmp_path):
    clock = Clock(after=0)
    clock.protocol.round = 1
    clock.protocol.phase = 0
    clock.protocol.purpose = "train"
    clock.status_rows = {"waiting": [], "arrived": [], "sites": [], "refused": []}
    monkeypatch.setattr(watch, "time", clock)
    said: list[str] = []
    display = SimpleNamespace(progress=lambda info: None, note=said.append)
    how = SimpleNamespace(display=display, until=90.0, said=said)
    clock.now = 10.0
    return clock, watch.Watch(tmp_path, clock, how, 1)  # type: ignore[arg-type]


def test_a_look_for_a_request_alone_writes_no_status(monkeypatch, tmp_path):
    """The run's directory has its last status then."""
    clock, here = watching(monkeypatch, tmp_path)
    here.check(show=False)
    assert not list(tmp_path.iterdir())
    here.check()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    clock.now = 90.0
    with pytest.raises(Stopped, match="the time of --until is over"):
        here.check(show=False)


def test_only_three_presses_of_ctrl_c_end_what_runs_and_one_may_come_twice(monkeypatch, tmp_path):
    clock, here = watching(monkeypatch, tmp_path)
    handlers = []
    monkeypatch.setattr(watch.signal, "signal", lambda *what: handlers.append(what))
    press = signal.SIGINT
    other = signal.SIGTERM
    for at, number in ((1.0, press), (1.1, press), (1.6, other), (2.0, press), (2.4, other)):
        clock.now = at
        here.on_signal(number, None)
    with pytest.raises(Stopped, match="SIGTERM") as stopped:
        here.check()
    assert stopped.value.exit_status == 4
    assert not handlers
    clock.now = 3.0
    with pytest.raises(KeyboardInterrupt):
        here.on_signal(signal.SIGINT, None)
    assert handlers == [(signal.SIGINT, signal.default_int_handler)]


def test_a_round_that_waits_for_clients_that_are_not_connected_says_so_once(monkeypatch, tmp_path):
    clock, here = watching(monkeypatch, tmp_path)
    away = {"client": 2, "host": "", "phase": "waiting", "since": 10.0, "deadline_s": 50.0}
    busy = {"client": 0, "host": "a", "phase": "training", "since": 10.0, "deadline_s": None}
    queued = {"client": 1, "host": "", "phase": "queued", "since": 10.0, "deadline_s": None}
    sites = [
        {"clients": [0, 1], "connected": True, "why": ""},
        {"clients": [2, 3], "connected": False, "why": "key expired"},
    ]
    clock.status_rows |= {"waiting": [busy, queued, away], "sites": sites}
    said = here._how.said
    clock.now = 19.0
    here.check()
    assert said == []
    for clock.now in (20.5, 22.0):
        here.check()
    assert [line.partition("  ")[2] for line in said] == [
        "round 1 waits for clients that are not connected: 2 (key expired); without them in 50 s"
    ]
    clock.protocol.phase = 1  # the round's next exchange waits for it again
    clock.now = 24.0
    here.check()
    assert len(said) == 2


def test_keys_that_end_within_two_weeks_are_told_once_a_day(monkeypatch, tmp_path):
    clock, here = watching(monkeypatch, tmp_path)
    told: list[tuple[str, dict[str, Any]]] = []
    clock.tell = lambda event, fields: told.append((event, fields))
    day = 86_400.0
    ends = [((0, 1), "uke", 9 * day), ((2,), "", 13.5 * day), ((3,), "", 20 * day)]
    here._keyring = SimpleNamespace(ends=[KeyEnd(*end) for end in ends])
    here._how = SimpleNamespace(display=here._how.display, until=None)
    clock.now = 100.0
    here.check()
    clock.now = 200.0
    here.check()
    assert [(event, fields["clients"], fields["site"]) for event, fields in told] == [
        ("key_ends", [0, 1], "uke"),
        ("key_ends", [2], ""),
    ]
    assert "1970-01-10T00:00:00 UTC, in 9 days" in told[0][1]["why"]
    clock.now = 100.0 + day
    here.check()
    assert len(told) == 4


def test_of_very_many_reasons_for_which_clients_are_absent_some_are_named():
    rows = [{"clients": [k], "connected": False, "why": f"left: {k}"} for k in range(12)]
    text = watch.absent_as_text(rows, range(12))
    assert text.startswith("0 (left: 0), 1 (left: 1)")
    assert text.endswith("9 (left: 9), and 2 more")


def test_a_run_that_is_stopped_within_a_round_says_which_was_over(monkeypatch, tmp_path):
    fold = FedAvg.accumulate

    def stopped(self, before, server, client_id, up, host):
        if host.round == 3:
            raise Stopped("enough")
        return fold(self, before, server, client_id, up, host)

    monkeypatch.setattr(FedAvg, "accumulate", stopped)
    with pytest.raises(Stopped):
        run(tmp_path, rounds=4)
    found = status.read(tmp_path / "r")
    assert (found.state, found.round) == ("stopped", 2)
    assert "stopped after round 2 of 4" in status.text(found, tmp_path / "r", 0.0)
    (last,) = [e for e in lines(tmp_path / "r" / "events.jsonl") if e["type"] == "stopped"]
    assert last["round"] == 2


def test_the_events_of_a_connection_say_in_which_round_it_was_lost_and_came_back(tmp_path):
    planned = {"schedule": [{"round": 2, "client": 1, "kind": "disconnect"}]}
    directory = run(tmp_path, rounds=3, faults=planned)
    found = [(e["type"], e["round"]) for e in lines(directory / "events.jsonl")]
    for event in ("away", "rejoined"):
        assert (event, 2) in found
