"""Random schedules of kills, cuts, delays and corruptions over real processes, for every method
that keeps state at its clients.

FEDNET_CHAOS_SEED chooses another schedule; FEDNET_CHAOS_MINUTES is how long the slow test goes on,
with a new one each time.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fednet import seeds
from fednet.experiment.faults import POINTS
from tests.federation import METHODS_WITH_STATE, Federation

SEED = int(os.environ.get("FEDNET_CHAOS_SEED", "0"))
QUICK = ("fedavg", "scaffold", "fedrep")  # those of the default suite
HARMLESS = ("delay", "slow", "duplicate", "corrupt", "disconnect")
LOSING = ("drop_before_training", "drop_before_sending", "drop_during_upload")


def schedule(method: str, seed: int, rounds: int, losing: bool) -> list[dict[str, object]]:
    """One or two of the faults that lose no reply and a crash of the server a round; `losing`: a
    client a round besides.
    """
    draw, found = seeds.rng(seed, f"chaos/{method}"), list[dict[str, object]]()
    for round in range(1, rounds + 1):
        for client in draw.choice(4, size=int(draw.integers(1, 3)), replace=False):
            found.append(
                {
                    "round": round,
                    "client": int(client),
                    "kind": str(draw.choice(HARMLESS)),
                    "seconds": 0.2,
                    "factor": 2.0,
                }
            )
        found.append({"round": round, "kind": "server_crash", "at": str(draw.choice(POINTS))})
        if losing:
            found.append(
                {"round": round, "client": int(draw.integers(4)), "kind": str(draw.choice(LOSING))}
            )
    return found


def disturbed(out: Path, method: str, seed: int, losing: bool, kills: int) -> Federation:
    """A run under a schedule, with clients killed at random instants beside."""
    planned = schedule(method, seed, 3, losing)
    draw = seeds.rng(seed, f"chaos/kills/{method}")
    with Federation(
        out,
        algorithm=method,
        faults={"schedule": planned},
        round={"lost": {"closed": 1.0 if losing else 20.0}},
    ) as fed:
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


@pytest.mark.parametrize(
    "method",
    [
        m if m in QUICK else pytest.param(m, marks=pytest.mark.slow)
        for m in ("fedavg", *METHODS_WITH_STATE)
    ],
)
def test_no_schedule_that_loses_no_reply_changes_a_bit(tmp_path: Path, method: str) -> None:
    with Federation(tmp_path / "calm", algorithm=method) as calm:
        calm.client("0-3")
        calm.server()
        calm.finish()
    fed = disturbed(tmp_path / "chaos", method, SEED, losing=False, kills=1)
    assert fed.hashes() == calm.hashes()
    assert fed.faults()
    fed.check(killed=1)


BAD = {"duplicate": 0.05, "delay": 0.05, "cut": 0.03, "corrupt": 0.01, "truncate": 0.01}


def replayed(fed: Federation, out: Path, **changes: object) -> Federation:
    """The same clients completing the same rounds, with nothing in their way."""
    method = fed.mapping["algorithm"]["name"]
    with Federation(out, algorithm=method, faults={"replay": str(fed.path)}, **changes) as again:
        again.client("0-3")
        again.server()
        again.finish()
    return again


@pytest.mark.parametrize("kind", ["corrupt", pytest.param("truncate", marks=pytest.mark.slow)])
def test_a_welcome_that_was_damaged_is_asked_for_anew(tmp_path: Path, kind: str) -> None:
    """The server's first messages are its welcomes, and the tasks are the next."""
    with Federation(tmp_path, algorithm="fedavg", rounds=2) as fed:
        fed.server(network=(SEED, {0: kind, 2: kind}))
        fed.client("0-3")
        fed.finish()
        assert [r["completed"] for r in fed.rounds()] == [[0, 1, 2, 3]] * 2
        assert fed.events("rejoined") or len(fed.events("joined")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_on_a_bad_network_a_round_is_right_or_short_but_never_wrong(
    tmp_path: Path, method: str
) -> None:
    """A model of two parts: cuts and spoilt bytes come in the middle of transfers."""
    wide = {"name": "mlp", "hidden": [4000]}
    with Federation(
        tmp_path / "bad",
        algorithm=method,
        model=wide,
        round={"lost": {"closed": 5.0, "silent": 2.0}},
    ) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server(network=(SEED, BAD))
        fed.finish()
    assert replayed(fed, tmp_path / "replayed", model=wide).hashes() == fed.hashes()


def the_same_clients_give_the_same_bits(out: Path, method: str, seed: int) -> None:
    fed = disturbed(out / "chaos", method, seed, losing=True, kills=0)
    fed.check()
    assert replayed(fed, out / "replayed").hashes() == fed.hashes(), seed
    assert any(len(r["completed"]) < 4 for r in fed.rounds())


def test_a_schedule_that_loses_replies_is_as_if_they_had_never_been_asked_for(
    tmp_path: Path,
) -> None:
    the_same_clients_give_the_same_bits(tmp_path, "scaffold", SEED)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_schedules_for_as_long_as_asked(tmp_path: Path) -> None:
    end, seed = time.monotonic() + 60 * float(os.environ.get("FEDNET_CHAOS_MINUTES", "2")), SEED
    methods = ("fedavg", *METHODS_WITH_STATE)
    while time.monotonic() < end:
        seed += 1
        print("seed", seed, flush=True)
        method = methods[seed % len(methods)]
        the_same_clients_give_the_same_bits(tmp_path / f"losing-{seed}", method, seed)
        with Federation(tmp_path / f"calm-{seed}", algorithm=method) as calm:
            calm.client("0-3")
            calm.server()
            calm.finish()
        kills = seed % 4
        fed = disturbed(tmp_path / f"kills-{seed}", method, seed, losing=False, kills=kills)
        assert fed.hashes() == calm.hashes(), seed
        fed.check(killed=kills)
