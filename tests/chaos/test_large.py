"""A model whose payloads cross in parts: whoever is killed, the bits are the same, and the books
agree with the kernel.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.test_processes import SLOW, busy, server_pid
from tests.federation import Federation

BIG = {"model": {"name": "mlp", "hidden": [512, 512]}, "algorithm": "scaffold"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    with Federation(tmp_path_factory.mktemp("calm"), **BIG) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
    return fed


def accounted(fed: Federation) -> None:
    """The books have each client's payload, and agree with the kernel."""
    for record in fed.rounds():
        assert record["useful"] == record["predicted"]
    (*_, last) = fed.events("kernel")
    if len(fed.events("started")) == 1:  # the next also books what the one that was killed had sent
        assert (last["sent"], last["received"]) == (last["booked_down"], last["booked_up"])


def test_by_default_all_payloads_cross_and_the_books_agree_with_the_kernel(
    calm: Federation,
) -> None:
    accounted(calm)
    (*_, last) = calm.events("kernel")
    up = sum(sum(r["kinds"].values()) for r in calm.lines("wire.jsonl") if r["direction"] == "up")
    assert up > 12 * 1_000_000  # four replies in each of three rounds, of over 1 MB
    assert last["received"] > up


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_process_killed_amid_payloads_changes_no_bit(
    tmp_path: Path, calm: Federation, who: str
) -> None:
    with Federation(tmp_path, **BIG, faults=SLOW["faults"]) as fed:
        fed.supervisor(workers=2)
        worker = busy(fed)
        os.kill(worker if who == "worker" else server_pid(fed), signal.SIGKILL)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        fed.check(killed=1)
        accounted(fed)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["broadcasting", "spooling", "receiving", "aggregating"])
def test_a_server_killed_at_each_point_changes_no_bit(
    tmp_path: Path, calm: Federation, at: str
) -> None:
    plan = {"schedule": [{"round": 2, "kind": "server_crash", "at": at}]}
    with Federation(tmp_path, **BIG, faults=plan) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        fed.check()
        accounted(fed)
