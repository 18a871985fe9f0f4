"""Two processes that host the same clients, each with states of its own: a task goes to the one
that has the state it starts from, and the run is that of one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.federation import Federation


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_two_processes_with_states_of_their_own_share_the_clients(
    tmp_path: Path, method: str
) -> None:
    with Federation(tmp_path / "one", algorithm=method, clients=5) as one:
        one.client("0-4")
        one.server()
        one.finish()
    with Federation(tmp_path / "two", algorithm=method, clients=5) as two:
        two.server()
        hosts = [two.client("0-3", state=tmp_path / name) for name in ("a", "b")]
        two.until(lambda: len(two.events("ready")) == 2)
        hosts.append(two.client("4"))  # the first round waits for all clients, and so for both
        assert [two.status(p) for p in (two.last, *hosts)] == [0] * 4, two.output()
    assert two.hashes() == one.hashes()
    assert [r["dropped"] for r in two.rounds()] == [{}] * 3
    judged = [c["client"] for c in two.lines("clients.jsonl") if c.get("final")]
    assert judged == [0, 1, 2, 3, 4]
    if method == "fedavg":  # what only judging needs is no reason to fail at training
        assert {e["purpose"] for e in two.events("failed")} <= {"evaluate"}
