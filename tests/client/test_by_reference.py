"""Runs in one process whose payloads are handed over as tensors: the bits, books and records of
runs whose payloads are bytes; what a method must not do to them.
"""

from __future__ import annotations

import pytest

import fednet
from fednet.errors import FednetError
from fednet.launch import in_process
from fednet.wire import codec
from fednet.wire.messages import PART
from tests.processes import lines

BASE = {
    "rounds": 2,
    "clients": 4,
    "participation": None,
    "clients_per_round": 3,
    "model": {"name": "mlp"},
    "data": {
        "dataset": "synthetic",
        "samples": 120,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "dirichlet", "alpha": 0.5},
    },
    "report": False,
}
SAME = ("model_sha256", "clients_sha256", "train_loss", "test_loss", "useful", "predicted")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "scaffold"},
        {"algorithm": "fedproto"},
        {"model": {"name": "mlp", "norm": "batch", "buffers": "local"}},
        {"evaluate": {"clients": "all"}},
    ],
    ids=str,
)
def test_tensors_handed_over_give_the_results_and_the_books_of_bytes(
    changes, tmp_path, monkeypatch
):
    monkeypatch.setattr(codec, "SMALL_BYTES", 0)
    handed = fednet.run({**BASE, **changes}, in_process=True, out=tmp_path / "handed")
    monkeypatch.setattr(in_process, "WHOLE", PART)
    sent = fednet.run({**BASE, **changes}, in_process=True, out=tmp_path / "sent")
    for a, b in zip(lines(handed.dir / "rounds.jsonl"), lines(sent.dir / "rounds.jsonl")):
        assert [a.get(name) for name in SAME] == [b.get(name) for name in SAME]

    def books(run):
        rows = lines(run.dir / "wire.jsonl")
        return sorted(
            (r["direction"], r["type"], r.get("client", -1), r["round"], str(r["kinds"]))
            for r in rows
            if r["type"] in ("task", "reply", "evaluate")
        )

    assert books(handed) == books(sent)
    assert not list(handed.dir.rglob("*.bin"))


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["tensors", "bytes"])
def test_a_method_that_writes_to_what_it_was_sent_is_refused(tmp_path, monkeypatch, small):
    """However the payload came, so that a method works in every placement or in none."""
    monkeypatch.setattr(codec, "SMALL_BYTES", small)
    file = tmp_path / "own.py"
    file.write_text(
        "from fednet.algorithms.base import *\n\n\n"
        '@algorithm("inplace")\n'
        "class InPlace(Algorithm):\n"
        '    """Writes."""\n\n'
        '    paper = "-"\n\n'
        "    def client_update(self, phase, client, down, host):\n"
        "        done = host.train(down.x)\n"
        "        down.x.vector.zero_()\n"
        "        return client, self.Up(x=done.x, run=done.run)\n"
    )
    config = {**BASE, "algorithm": "inplace", "round": {"on_error": "stop"}}
    with pytest.raises(FednetError, match="changes tensors that it was sent"):
        fednet.run(config, in_process=True, out=tmp_path, load=[file])
