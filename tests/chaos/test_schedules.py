"""Random schedules of kills, cuts, delays and corruptions over real processes, for methods that
keep state at their clients.

FEDNET_CHAOS_SEED chooses another schedule; FEDNET_CHAOS_MINUTES is how long the slow test lasts,
with a new one each time.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednet import seeds
from fednet.server.faults import POINTS
from fednet.transport.base import Closed, Event, Frames, Received
from tests.processes import Federation, undisturbed

SEED = int(os.environ.get("FEDNET_CHAOS_SEED", "0"))
METHODS = ("scaffold", "fedrep", "fedavg", "moon", "fedrds", "fedper", "fedrod", "lgfedavg")
HARMLESS = ("delay", "slow", "duplicate", "corrupt", "disconnect")
LOSING = ("drop_before_training", "drop_before_sending", "drop_during_upload")
WIDE = {"name": "mlp", "hidden": [16000]}  # two parts: cuts come in the middle of transfers
BAD = {"duplicate": 0.05, "delay": 0.05, "cut": 0.03, "corrupt": 0.01, "truncate": 0.01}


def schedule(method: str, seed: int, losing: bool) -> list[dict[str, object]]:
    """Return for each round one or two faults that lose no reply and a crash of the server;
    losing: also a lost client.
    """
    draw = seeds.rng(seed, f"chaos/{method}")
    found = list[dict[str, object]]()
    for round in (1, 2, 3):
        for client in draw.choice(4, size=int(draw.integers(1, 3)), replace=False):
            one = {"client": int(client), "kind": str(draw.choice(HARMLESS))}
            found.append({"round": round, **one, "seconds": 0.2, "factor": 2.0})
        found.append({"round": round, "kind": "server_crash", "at": str(draw.choice(POINTS))})
        if losing:
            one = {"client": int(draw.integers(4)), "kind": str(draw.choice(LOSING))}
            found.append({"round": round, **one})
    return found


def disturbed(out: Path, method: str, seed: int, losing: bool, kills: int) -> Federation:
    """Run under a schedule, and kill clients at random moments."""
    draw = seeds.rng(seed, f"chaos/kills/{method}")
    faults = {"schedule": schedule(method, seed, losing)}
    patience = {"lost": {"closed": 1.0 if losing else 20.0}}
    with Federation(out, algorithm=method, faults=faults, round=patience) as fed:
        clients = {ids: fed.client(ids) for ids in ("0-1", "2-3")}
        fed.server()
        while fed.last.poll() in (None, -signal.SIGKILL):
            if fed.last.poll() is not None:
                fed.server(resume=True)
            if kills and fed.rounds():
                kills -= 1
                time.sleep(float(draw.random()) * 0.05)
                ids = str(draw.choice(list(clients)))
                fed.lose(clients[ids])
                clients[ids] = fed.client(ids)
            time.sleep(0.01)
        fed.finish()
    return fed


def no_reply_is_lost(out: Path, method: str, seed: int, kills: int) -> None:
    fed = disturbed(out, method, seed, losing=False, kills=kills)
    assert fed.hashes() == undisturbed(algorithm=method), seed
    assert fed.faults()
    fed.check(killed=kills)


def replayed(fed: Federation, **changes: Any) -> list[tuple[int, str, str]]:
    """Return the hashes where the same clients complete the same rounds, undisturbed."""
    method = fed.mapping["algorithm"]["name"]
    return undisturbed(algorithm=method, faults={"replay": str(fed.path)}, **changes)


def replies_are_lost(out: Path, method: str, seed: int) -> None:
    fed = disturbed(out, method, seed, losing=True, kills=0)
    fed.check()
    assert replayed(fed) == fed.hashes(), seed
    assert any(len(completed) < 4 for completed in fed.completed())


@pytest.mark.parametrize(
    "method", [*METHODS[:2], *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[2:])]
)
def test_no_schedule_that_loses_no_reply_changes_a_bit(tmp_path, method):
    no_reply_is_lost(tmp_path, method, SEED, kills=1)


def test_a_schedule_that_loses_replies_is_as_if_they_had_never_been_asked_for(tmp_path):
    replies_are_lost(tmp_path, "scaffold", SEED)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_schedules_for_as_long_as_asked(tmp_path):
    end = time.monotonic() + 60 * float(os.environ.get("FEDNET_CHAOS_MINUTES", "2"))
    seed = SEED
    while time.monotonic() < end:
        seed += 1
        print("seed", seed, flush=True)
        method = METHODS[seed % len(METHODS)]
        replies_are_lost(tmp_path / f"losing-{seed}", method, seed)
        no_reply_is_lost(tmp_path / f"kills-{seed}", method, seed, kills=seed % 4)


# -- a bad network ---------------------------------------------------------------------------------
class BadServer:
    """A server's transport on a bad network: messages are doubled, damaged, cut short or late, and
    connections end. plan: what happens to the server's messages, by number; or the probability of
    each kind, for the messages of both directions.
    """

    def __init__(self, inner: Any, plan: Mapping[Any, Any]) -> None:
        self.inner = inner
        self.plan = plan
        self.sent = itertools.count()
        self.draw = seeds.rng(SEED, "network")
        # Late messages, and until when, in the order in which they came.
        self.held: dict[tuple[bool, bytes], deque[tuple[float, Received]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = [*self.due(up=True)]
        waits = [held[0][0] - time.monotonic() for held in self.held.values() if held]
        for event in self.inner.poll(0.0 if events else max(0.0, min([timeout_s, *waits]))):
            if isinstance(event, Received):
                events += self.passing(True, event)
                continue
            if isinstance(event, Closed):
                self.held.pop((True, event.conn), None)
                self.held.pop((False, event.conn), None)
            events.append(event)
        # Not before: the connection for which it was meant might have ended.
        for message in self.due(up=False):
            self.inner.send(message.conn, message.frames)
        return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        passing = self.passing(False, Received(conn, tuple(frames)))
        return all(self.inner.send(conn, message.frames) for message in passing)

    def hang_up(self, conn: bytes) -> None:
        self.held.pop((False, conn), None)
        self.inner.hang_up(conn)

    def fault(self, up: bool) -> str:
        if 0 in self.plan:
            return "" if up else self.plan.get(next(self.sent), "")
        kinds, chances = zip(*self.plan.items())
        return str(self.draw.choice(["", *kinds], p=[1 - sum(chances), *chances]))

    def passing(self, up: bool, message: Received) -> list[Received]:
        """What of a message passes now."""
        kind = self.fault(up)
        frames = [bytes(f) for f in message.frames]
        found = [message]
        if kind == "cut":
            self.inner.hang_up(message.conn)
            return []
        if kind == "duplicate":
            found = [message, message]
        elif kind == "corrupt":  # one byte of all is another
            frame = self.draw.choice(
                len(frames), p=np.array([*map(len, frames)]) / sum(map(len, frames))
            )
            damaged = bytearray(frames[frame])
            damaged[self.draw.integers(len(damaged))] ^= self.draw.integers(1, 256)
            frames[frame] = bytes(damaged)
        elif kind == "truncate" and frames[-1]:
            frames[-1] = frames[-1][: self.draw.integers(len(frames[-1]))]
        if kind in ("corrupt", "truncate"):
            found = [Received(message.conn, tuple(frames), message.user)]
        held = self.held.setdefault((up, message.conn), deque())
        if kind != "delay" and not held:
            return found
        due = time.monotonic() + (0.2 * self.draw.random() if kind == "delay" else 0.0)
        held.extend((max([due, *(at for at, _ in held)]), one) for one in found)
        return []

    def due(self, up: bool) -> list[Received]:
        found: list[Received] = []
        for (where, _), held in self.held.items():
            while where == up and held and held[0][0] <= time.monotonic():
                found.append(held.popleft()[1])
        return found


def bad_network(plan: Mapping[Any, Any]) -> None:
    """From now on this process's servers have one."""
    from fednet.server import endpoint

    sound = endpoint.ZmqServer
    endpoint.ZmqServer = lambda *given, **more: BadServer(sound(*given, **more), plan)  # type: ignore[assignment,misc]


def test_a_damaged_welcome_is_asked_for_again(tmp_path):
    """The server's first messages are its welcomes, and the tasks are the next."""
    with Federation(tmp_path, algorithm="fedavg", rounds=2) as fed:
        fed.begin("0-3", before=functools.partial(bad_network, {0: "corrupt", 2: "truncate"}))
        fed.finish()
        assert fed.completed() == [[0, 1, 2, 3]] * 2
        assert fed.events("rejoined") or len(fed.events("joined")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_on_a_bad_network_a_round_is_right_or_short_but_never_wrong(tmp_path, method):
    patience = {"lost": {"closed": 5.0, "silent": 2.0}}
    with Federation(tmp_path, algorithm=method, model=WIDE, round=patience) as fed:
        fed.begin("0-1", "2-3", before=functools.partial(bad_network, BAD))
        fed.finish()
    assert replayed(fed, model=WIDE) == fed.hashes()
