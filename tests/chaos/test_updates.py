"""Asynchronous training over real processes: the same bits in any placement and whoever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fednet.server.faults import POINTS
from tests.processes import Federation, crashes, finished, in_process, until

# MOON's clients keep a state of their own. Client 3 is slow: its task lasts for several updates,
# and for every crash.
LINK: dict[str, Any] = {
    "clock": "virtual",
    "step_ms": 10,
    "up_mbps": 8.0,
    "per_client": {"3": {"step_ms": 50}},
}
ASYNC: dict[str, Any] = {
    "algorithm": "moon",
    "schedule": {"mode": "async", "buffer": 2},
    "rounds": 6,
    "participation": 0.75,
    "checkpoint": {"every": 2},
    "link": LINK,
}
SAME = ("selected", "completed", "staleness", "seconds_virtual", "useful", "train_loss")


def facts(fed: Federation) -> list[tuple[Any, ...]]:
    return [*fed.hashes(), *(tuple(r[k] for k in SAME) for r in fed.rounds())]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The facts of the run in one process."""
    fed = in_process(tmp_path_factory.mktemp("calm"), **ASYNC)
    assert max(s for r in fed.rounds() for s in r["staleness"]) > 2
    return facts(fed)


def test_workers_give_the_bits_of_one_process(tmp_path, calm):
    with Federation(tmp_path, **ASYNC) as fed:
        fed.supervisor(workers=3)
        fed.finish()
        fed.check()
        assert facts(fed) == calm


def replayed(fed: Federation, out: Path) -> Federation:
    """Return the run in one process, with the order that is on record."""
    return in_process(out, **fed.mapping | {"faults": {"replay": str(fed.path)}})


def test_the_order_of_real_processes_is_repeated_in_one(tmp_path):
    real = {**ASYNC, "participation": 1.0, "link": {"clock": "real"}}
    with Federation(tmp_path / "first", **real) as first:
        first.supervisor(workers=3)
        first.finish()
    again = replayed(first, tmp_path / "again")
    assert again.hashes() == first.hashes()
    assert [r["staleness"] for r in again.rounds()] == [r["staleness"] for r in first.rounds()]


def test_a_server_that_dies_at_every_point_continues_with_the_same_bits(tmp_path, calm):
    points = [(3 + i % 2, at) for i, at in enumerate(POINTS)]
    fed = finished(tmp_path, faults=crashes(*points), **ASYNC)
    assert "server_crash between" in {kind for _, _, kind in fed.faults()}
    assert len(fed.faults()) >= 4
    assert facts(fed) == calm
    fed.check()


SCHEDULES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "buffer": 2},
    "semi-sync": {"mode": "semi-sync", "every": 0.2},
}


def long_run(schedule: str, clock: str) -> dict[str, Any]:
    """Return a run of all clients, whose server waits for `min_results` of them for ever."""
    # On the virtual clock a killed client comes back in time: no bit changes.
    closed = 20.0 if clock == "virtual" else 0.6
    return {
        **ASYNC,
        "schedule": SCHEDULES[schedule],
        "participation": 1.0,
        "rounds": 24,
        "link": LINK if clock == "virtual" else {"clock": "real"},
        "round": {
            "join": None,
            "min_results": 2,
            "void_rounds": 99,
            "lost": {"closed": closed, "silent": 20.0},
        },
    }


def kill(fed: Federation, killed: str) -> None:
    """End processes in the middle of the run; start again those that nothing else starts."""
    if killed == "worker":
        fed.supervisor(workers=2)
    else:
        clients = {ids: fed.client(ids) for ids in ("0-2", "3")}
        fed.server()
    until(lambda: len(fed.rounds()) >= 2, fed, fed.last)
    if killed == "worker":
        os.kill(int(fed.events("joined")[-1]["pid"]), signal.SIGKILL)
    if killed in ("server", "all"):
        fed.lose(fed.last)
    for ids in {"client": ["0-2"], "all": ["0-2", "3"]}.get(killed, []):
        fed.lose(clients[ids])
        fed.client(ids)
    if killed in ("server", "all"):
        fed.server(resume=True)
    fed.finish()


def every_client_is_asked(fed: Federation) -> None:
    assert [r["round"] for r in fed.rounds()] == list(range(1, 25))
    assert {c for r in fed.rounds()[-12:] for c in r["selected"]} == {0, 1, 2, 3}


# Each schedule with each clock, and each of the killed.
CASES = [
    ("async", "virtual", "all"),
    ("async", "real", "client"),
    ("semi-sync", "virtual", "worker"),
    ("semi-sync", "real", "server"),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("schedule", "clock", "killed"), CASES)
def test_whoever_is_killed_every_client_is_asked_again(tmp_path, schedule, clock, killed):
    with Federation(tmp_path / "killed", **long_run(schedule, clock)) as fed:
        kill(fed, killed)
        every_client_is_asked(fed)
        fed.check(killed=0 if killed == "server" else 4)
    if clock == "real":
        assert replayed(fed, tmp_path / "calm").hashes() == fed.hashes()
    else:
        assert facts(in_process(tmp_path / "calm", **fed.mapping)) == facts(fed)


@pytest.mark.timeout(120)
def test_clients_that_are_all_gone_for_a_while_are_asked_again(tmp_path):
    """Their tasks are given up while the server waits for clients."""
    with Federation(tmp_path, **long_run("async", "real")) as fed:
        victim = fed.client("0-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) >= 2)
        fed.lose(victim)
        fed.until(lambda: len(fed.events("away")) == 1)
        fed.client("0-3")
        fed.finish()
        every_client_is_asked(fed)
