"""How long a server waits for its first clients."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fednet import config as configuration
from fednet.errors import CannotGoOn
from fednet.server import endpoint, watch


class Clock:
    """A minute passes with each look at the clients, who come after so many."""

    def __init__(self, after: int) -> None:
        self.now, self.after, self.looks = 0.0, after, 0
        self.snapshot = {"present": 0}
        self.protocol = SimpleNamespace(clients=3)
        self.in_process = False

    def monotonic(self) -> float:
        return self.now

    def rest(self, *_: Any) -> None:
        self.now += 60.0
        self.looks += 1
        self.snapshot["present"] = 2 if self.looks >= self.after else 0


def waited(clock: Clock, monkeypatch: pytest.MonkeyPatch, alone: bool, **section: Any) -> list[str]:
    """Waits for two of three clients. Returns what is printed."""
    monkeypatch.setattr(watch, "time", clock)
    round = configuration.from_mapping({"clients": 3, "round": section}).round
    notes: list[str] = []
    display = SimpleNamespace(note=notes.append)
    watching = watch.Watch(SimpleNamespace(status=lambda **_: None), clock, display, 1)  # type: ignore[arg-type]
    watching.check = lambda: None  # type: ignore[method-assign]
    watching.await_clients(2, round.join_s(alone))
    return notes


def test_a_server_whose_clients_others_start_waits_for_them(monkeypatch):
    clock = Clock(after=100)
    notes = waited(clock, monkeypatch, alone=True)
    assert clock.looks == 100
    assert notes == ["waiting for clients: 0 of 3 are here, 2 are needed"]


def test_it_gives_up_where_the_configuration_bounds_the_wait(monkeypatch):
    with pytest.raises(CannotGoOn, match=r"no client joined within 600 s \(round\.join\)"):
        waited(Clock(after=100), monkeypatch, alone=True, join=600)


def test_a_run_that_starts_its_clients_itself_waits_for_a_minute(monkeypatch):
    with pytest.raises(CannotGoOn, match="no client joined within 60 s"):
        waited(Clock(after=100), monkeypatch, alone=False)


def test_fednet_server_is_one_whose_clients_others_start(tmp_path):
    config = configuration.from_mapping({})
    transport = SimpleNamespace(keyring=None, listen=lambda: None)
    assert endpoint.listening(config, tmp_path, transport, print).alone
    assert not endpoint.listening(config, tmp_path, transport).alone


def test_how_clients_join_names_a_place_they_can_reach_and_the_keys(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(endpoint.socket, "gethostname", lambda: "here")
    for keyring, address in (
        (None, "tcp://10.0.0.0:1"),
        (SimpleNamespace(pair=SimpleNamespace(public="P")), "tcp://0.0.0.0:1"),
    ):
        bound = SimpleNamespace(keyring=keyring, address=address, listen=lambda: None)
        made = endpoint.listening(configuration.from_mapping({}), tmp_path, bound, said.append)  # type: ignore[arg-type]
        made.announce(SimpleNamespace(), 1)  # type: ignore[arg-type]
    ends = [line.partition("--server ")[2] for line in said]
    assert ends == ["tcp://10.0.0.0:1", "tcp://here:1 --keys FILE"]


def test_while_it_waits_it_writes_down_who_is_there_and_who_is_missing(monkeypatch):
    workers = [
        SimpleNamespace(ids=frozenset({0, 1, 4}), gone_at=None),
        SimpleNamespace(ids=frozenset({2}), gone_at=None),
        SimpleNamespace(ids=frozenset({3}), gone_at=7.0),
    ]
    roster = SimpleNamespace(workers=dict(enumerate(workers)), present=lambda: frozenset({0, 1, 4}))
    tasks = SimpleNamespace(round=0, purpose="train")
    protocol = SimpleNamespace(roster=roster, tasks=tasks, clients=8)
    snapshot = {"waiting": [], "arrived": [], "present": 3, "sites": []}
    io = SimpleNamespace(protocol=protocol, snapshot=snapshot, own=contextlib.nullcontext)
    io.in_process = False
    io.rest = lambda *_: snapshot.update(present=4)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(watch, "write_status", lambda path, **said: written.append(said))
    directory = SimpleNamespace(path=Path("."))
    display = SimpleNamespace(note=lambda text: None, progress=lambda info: None)
    watching = watch.Watch(directory, io, display, 1)  # type: ignore[arg-type]
    watching.await_clients(4, None)
    watching.status("running")
    who = {k: written[0][k] for k in ("here", "coming", "missing")}
    assert who == {"here": [(0, 1), 4], "coming": [2], "missing": [3, (5, 7)]}
    assert "here" not in written[1]
