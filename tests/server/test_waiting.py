"""How long a server waits for its first clients."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from fednet import config as configuration
from fednet.errors import CannotGoOn
from fednet.server import watch


class Clock(contextlib.nullcontext[None]):
    """A minute passes with each look at the clients, who come after so many."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.now, self.after, self.looks = 0.0, after, 0
        self.protocol = SimpleNamespace(clients=3, roster=SimpleNamespace(hosting={}))
        self.inline = False

    def monotonic(self) -> float:
        return self.now

    def rest(self, *_: Any) -> None:
        self.now += 60.0
        self.looks += 1
        self.protocol.roster.hosting = {0: {}, 1: {}} if self.looks >= self.after else {}


@pytest.mark.parametrize(
    ("alone", "section", "gives_up"),
    [
        (True, {}, ""),  # others start the clients
        (True, {"join": 600}, r"no client joined within 600 s \(round\.join\)"),
        (False, {}, "no client joined within 60 s"),
    ],
)
def test_how_long_a_server_waits_for_its_clients(monkeypatch, alone, section, gives_up):
    clock, notes = Clock(after=100), []
    monkeypatch.setattr(watch, "time", clock)
    round = configuration.from_mapping({"clients": 3, "round": section}).round
    how = SimpleNamespace(display=SimpleNamespace(note=notes.append), until=None)
    watching = watch.Watch(SimpleNamespace(), clock, how, 1)  # type: ignore[arg-type]
    watching.check = lambda: None  # type: ignore[method-assign]
    if gives_up:
        with pytest.raises(CannotGoOn, match=gives_up):
            watching.await_clients(2, round.join_s(alone))
        return
    watching.await_clients(2, round.join_s(alone))
    assert clock.looks == 100
    assert notes == ["waiting for clients: 0 of 3 are here, 2 are needed"]
