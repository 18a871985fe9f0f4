"""Two processes host the same clients, each with states of its own: a task goes to the one that has
the state from which it starts, and the run is that of one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Federation, undisturbed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_two_processes_with_states_of_their_own_share_the_clients(
    tmp_path: Path, method: str
) -> None:
    with Federation(tmp_path, algorithm=method, clients=5) as fed:
        fed.server()
        for name in ("a", "b"):
            fed.client("0-3", state=tmp_path / name)
        fed.until(lambda: len(fed.events("ready")) == 2)
        fed.client("4")  # the first round waits for all clients, and so for both
        fed.finish()
    assert fed.hashes() == undisturbed(algorithm=method, clients=5)
    assert [r["dropped"] for r in fed.rounds()] == [{}] * 3
    judged = [c["client"] for c in fed.lines("clients.jsonl") if c.get("final")]
    assert judged == [0, 1, 2, 3, 4]
    if method == "fedavg":  # what only evaluation needs is no reason to fail at training
        assert {e["purpose"] for e in fed.events("failed")} <= {"evaluate"}
