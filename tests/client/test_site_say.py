"""What a site may ask and refuse before it takes part: --explain and --allow, with real
processes.
"""

from __future__ import annotations

import pytest

from fednet.client.preparing import explanation
from fednet.config import from_mapping
from fednet.experiment.build import build
from tests.processes import Processes, lines

pytestmark = pytest.mark.long


def test_a_site_is_told_what_would_leave_it_and_refuses_kinds_it_does_not_allow(tmp_path):
    with Processes(tmp_path) as all:
        server = all.server()
        asks = all.client(0, "--explain")
        refuses = all.client(0, "--allow", "delta,statistics")
        assert asks.wait(120) == 0, asks.said()
        told = asks.said()
        # mlp of 16 -> 8 -> 4: (16 * 8 + 8 + 8 * 4 + 4) float32; a Run is 24 bytes
        assert (
            "client 0, exchange 1: up state 688 bytes, statistics 24 bytes; down 688 bytes" in told
        )
        assert "the data of synthetic" in told
        assert f"stored here: {tmp_path / 'state-1'}" in told
        assert refuses.wait(120) == 2
        assert (
            "the method fedavg sends up 'x' of kind 'state', and --allow names only delta, "
            "statistics" in refuses.said()
        )
        clients = [all.client(k, "--allow", "state,statistics,accuracy") for k in (0, 1)]
        assert server.wait(120) == 0, server.said()
        assert [c.wait(60) for c in clients] == [0, 0]
        assert not (tmp_path / "state-1").exists()
    assert [r["completed"] for r in lines(tmp_path / "run" / "rounds.jsonl")] == [[0, 1], [0, 1]]


def test_what_a_method_gives_once_is_explained():
    mapping = {
        "clients": 3,
        "model": "mlp",
        "data": {
            "dataset": "synthetic",
            "samples": 200,
            "shape": [1, 8, 8],
            "classes": 4,
            "public": {"fraction": 0.1},
            "partition": "iid",
        },
    }
    said = {
        name: explanation(build(from_mapping({**mapping, "algorithm": name})), [1])
        for name in ("fedrds", "fedavg")
    }
    # half of 20 samples of 64 bytes, with an int64 label each
    assert said["fedrds"][0] == "client 1, once, with its first task: down shared 720 bytes"
    assert not any("once" in line for line in said["fedavg"])
