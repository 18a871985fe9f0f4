"""Training that waits for nobody, over real processes: the same bits whatever the placement, and
whoever dies.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fednet.experiment.faults import POINTS
from tests.chaos.test_resume import crashes
from tests.federation import Federation
from tests.processes import until

# MOON's clients keep a state of their own. Client 3 is slow: its task is under way through several
# updates, and through every crash.
ASYNC: dict[str, Any] = {
    "algorithm": "moon",
    "schedule": {"mode": "async", "buffer": 2},
    "rounds": 6,
    "participation": 0.75,
    "checkpoint": {"every": 2},
    "link": {
        "clock": "virtual",
        "step_ms": 10,
        "up_mbps": 8.0,
        "jitter_ms": 3,
        "per_client": {"3": {"step_ms": 70}},
    },
}
SAME = ("selected", "completed", "staleness", "seconds_virtual", "useful", "train_loss")


def told(fed: Federation) -> list[tuple[Any, ...]]:
    return [*fed.hashes(), *(tuple(r[k] for k in SAME) for r in fed.rounds())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """By two clients each in a process."""
    with Federation(tmp_path_factory.mktemp("undisturbed"), **ASYNC) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        fed.check()
        assert max(s for r in fed.rounds() for s in r["staleness"]) > 2
        return told(fed)


def test_one_process_gives_the_bits_of_several(tmp_path: Path, undisturbed) -> None:
    from tests.server.test_rounds import run

    with Federation(tmp_path, **ASYNC) as fed:
        run(tmp_path, **fed.mapping)
        assert told(fed) == undisturbed


def test_worker_processes_give_the_bits_of_clients(tmp_path: Path, undisturbed) -> None:
    with Federation(tmp_path, **ASYNC) as fed:
        fed.supervisor(workers=3)
        assert fed.status() == 0, fed.output()
        assert told(fed) == undisturbed
        fed.check()


def test_the_order_of_real_processes_is_repeated_in_one(tmp_path: Path) -> None:
    from tests.server.test_rounds import run

    real = {**ASYNC, "participation": 1.0, "link": {"clock": "real"}}
    with Federation(tmp_path / "first", **real) as first:
        first.supervisor(workers=3)
        assert first.status() == 0, first.output()
    with Federation(tmp_path / "again", faults={"replay": str(first.path)}, **real) as again:
        run(again.out, **again.mapping)
    assert again.hashes() == first.hashes()
    assert [r["staleness"] for r in again.rounds()] == [r["staleness"] for r in first.rounds()]


def test_a_server_that_dies_at_every_point_there_is_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed
) -> None:
    points = [(3 + i % 2, at) for i, at in enumerate(POINTS) if at != "between"]
    with Federation(tmp_path, faults=crashes(*points), **ASYNC) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        assert len(fed.faults()) >= 3
        assert told(fed) == undisturbed
        fed.check()


def test_a_client_process_that_is_killed_gives_its_tasks_to_the_next(
    tmp_path: Path, undisturbed
) -> None:
    with Federation(tmp_path, **ASYNC) as fed:
        fed.client("0-1")
        victim = fed.client("2-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) >= 2)
        fed.lose(victim)
        fed.client("2-3")
        fed.finish()
        assert told(fed) == undisturbed


SCHEDULES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "buffer": 2},
    "semi-sync": {"mode": "semi-sync", "every": 0.2},
}
KILLED = ("server", "worker", "client", "all")


def long_run(schedule: str, clock: str) -> dict[str, Any]:
    """A run of all clients, with a server that waits for `min_results` of them for ever."""
    # On the virtual clock whoever is killed comes back in time: no bit changes.
    closed = 20.0 if clock == "virtual" else 0.6
    return {
        **ASYNC,
        "schedule": SCHEDULES[schedule],
        "participation": 1.0,
        "rounds": 24,
        "link": ASYNC["link"] if clock == "virtual" else {"clock": "real"},
        "round": {
            "join": None,
            "min_results": 2,
            "void_rounds": 99,
            "lost": {"closed": closed, "silent": 20.0},
        },
    }


def kill(fed: Federation, killed: str) -> None:
    """Ends processes in the middle of the run; whoever nobody else starts again is started."""
    if killed == "worker":
        fed.supervisor(workers=2)
    else:
        clients = {ids: fed.client(ids) for ids in ("0-2", "3")}
        fed.server()
    until(lambda: len(fed.rounds()) >= 2, fed, fed.last)
    if killed == "worker":
        os.kill(int(fed.events("joined")[-1]["pid"]), signal.SIGKILL)
    if killed in ("server", "all"):
        os.kill(fed.last.pid, signal.SIGKILL)
        assert fed.status() == -signal.SIGKILL
    for ids in {"client": ["0-2"], "all": ["0-2", "3"]}.get(killed, []):
        fed.lose(clients[ids])
        fed.client(ids)
    if killed in ("server", "all"):
        fed.server(resume=True)
    if killed == "worker":
        assert fed.status() == 0, fed.output()
    else:
        fed.finish()


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize("clock", ["virtual", "real"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whoever_is_killed_every_client_is_asked_again(
    tmp_path: Path, schedule: str, clock: str, killed: str
) -> None:
    from tests.server.test_rounds import run

    with Federation(tmp_path / "killed", **long_run(schedule, clock)) as fed:
        kill(fed, killed)
        records = fed.rounds()
        assert [r["round"] for r in records] == list(range(1, 25))
        assert {c for r in records[-12:] for c in r["selected"]} == {0, 1, 2, 3}
        assert not fed.events("not_asked")
        fed.check(killed=0 if killed == "server" else 4)
    # The third clock: the order that the run has on record, or that of the virtual clock.
    faults = {"replay": str(fed.path)} if clock == "real" else {}
    with Federation(tmp_path / "calm", faults=faults, **fed.mapping) as calm:
        run(calm.out, **calm.mapping)
    assert calm.hashes() == fed.hashes()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_clients_that_are_all_gone_for_a_while_are_asked_again(tmp_path: Path) -> None:
    """Their tasks are counted out while the server waits for clients."""
    with Federation(tmp_path, **long_run("async", "real")) as fed:
        victim = fed.client("0-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) >= 2)
        fed.lose(victim)
        fed.until(lambda: len(fed.events("away")) == 1)
        fed.client("0-3")
        fed.finish()
        assert {c for r in fed.rounds()[-12:] for c in r["selected"]} == {0, 1, 2, 3}
        assert not fed.events("not_asked")
