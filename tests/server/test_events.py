"""What the run's events and the console say of sites that come and go, and of those refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fednet.server import events as server_events
from fednet.server.events import CAUSES_AT_ONCE, PEERS, Events

REFUSED = {"what": "connection", "reason": "key expired: K", "address": "10.0.0.7:4711"}


class Clock(SimpleNamespace):
    """Both clocks, which stand still until a test moves them."""

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(now=1000.0)
    monkeypatch.setattr(server_events, "time", clock)
    monkeypatch.setattr(server_events, "with_time", lambda text: text)
    return clock


@pytest.fixture
def told(clock):
    """Events of a server whose clients are started by others, what it wrote, and what it said."""
    notes = []
    said = []
    events = Events(
        lambda event, fields: notes.append((event, fields)), said.append, external_clients=True
    )
    return events, notes, said


def test_a_site_that_is_refused_every_two_seconds_is_told_at_once_and_then_with_its_number(
    told, clock
):
    events, notes, said = told
    for second in range(0, 600, 2):  # 300 tries, each from another port
        clock.now = 1000.0 + second
        events.tell("refused", {**REFUSED, "address": f"10.0.0.7:{40000 + second}"})
    # at 0 s; a minute later; two minutes after that; four minutes after that
    assert [fields["count"] for _, fields in notes] == [1, 30, 60, 120]
    assert said == [
        "refused 10.0.0.7: key expired: K",
        "refused 10.0.0.7 31 times: key expired: K",
        "refused 10.0.0.7 91 times: key expired: K",
        "refused 10.0.0.7 211 times: key expired: K",
    ]
    assert events.refused == {"connection": 300}
    (row,) = events.refusals()
    assert (row["who"], row["count"], row["first"], row["last"]) == ("10.0.0.7", 300, 1000, 1598)
    events.close()
    assert sum(fields["count"] for _, fields in notes) == 300


def test_the_lines_of_very_many_causes_are_bounded_and_all_are_counted(told, clock):
    events, notes, said = told
    for n in range(2 * PEERS):
        events.tell("refused", {**REFUSED, "reason": f"key not allowed: {n}"})
    assert len(notes) == len(said) == CAUSES_AT_ONCE
    assert len(events.refusals()) <= 20
    assert events.refused["connection"] == 2 * PEERS


def test_a_reply_that_is_refused_has_a_line_of_its_own(told):
    events, notes, said = told
    for round in (1, 2):
        fields = {"what": "reply", "reason": "too long", "worker": "w", "round": round}
        events.tell("refused", fields)
    assert [fields["round"] for _, fields in notes] == [1, 2]
    assert said == []
    assert events.refused == {"reply": 2}


SITE = {"worker": "w", "clients": [0, 1], "host": "a", "pid": 7}


def test_a_server_that_others_join_says_who_came(told):
    events, _, said = told
    for event in ("joined", "ready"):
        events.tell(event, dict(SITE))
    who = "client(s) 0-1 on a, process 7"
    assert said == [f"{who}: joined, getting ready", f"{who}: ready"]


def test_a_site_is_named_where_its_key_has_a_name(told):
    events, _, said = told
    events.tell("away", {**SITE, "site": "uke", "why": "key expired"})
    why = "the key ends at 2027-01-31T00:00:00 UTC, in 9 days"
    events.tell("key_ends", {"clients": [0, 1], "site": "uke", "until": 1.0, "why": why})
    assert said == [
        "client(s) 0-1 (uke) on a, process 7: key expired",
        f"client(s) 0-1 (uke): {why}",
    ]


def test_where_fednet_starts_the_clients_only_one_that_was_away_is_said_to_be_ready(clock):
    said = []
    events = Events(lambda event, fields: None, said.append)
    events.tell("ready", dict(SITE))
    events.tell("away", {**SITE, "why": "connection closed"})
    for event in ("joined", "ready", "ready"):
        events.tell(event, dict(SITE))
    who = "client(s) 0-1 on a, process 7"
    assert said == [
        f"{who}: connection closed",
        f"{who}: joined, getting ready",
        f"{who}: ready",
    ]


def test_who_is_refused_at_its_join_is_named_by_its_clients_and_host(told):
    events, _, said = told
    fields = {"what": "join", "reason": "join: other files", "worker": ""}
    for pid in (7, 8):  # the process is started again and again
        who = {"clients": [3], "host": "b", "pid": pid}
        events.tell("refused", {**fields, **who})
    events.tell("refused", {**fields, "clients": [], "host": "b", "pid": 9})
    assert said == [
        "refused client(s) 3 on b: join: other files",
        "refused a client process on b: join: other files",
    ]
