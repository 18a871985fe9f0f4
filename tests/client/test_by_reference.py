"""Runs in one process whose payloads are handed over as tensors: the bits, books and records of
runs whose payloads are bytes; what a method must not do to them.
"""

from __future__ import annotations

import pytest

import fednet
from fednet.errors import ConfigError, FednetError
from fednet.launch import in_process
from fednet.wire import body as bodies
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
    monkeypatch.setattr(bodies, "SMALL_BYTES", 0)
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


METHOD = """
from fednet.algorithms.base import *
from fednet import Tensors


@algorithm("{name}")
class Own(Algorithm):
    paper = "-"
    kept = []
    buffer = None

    def client_update(self, phase, client, down, host):
        {body}
        return client, self.Up(x={x}, run=done.run)
"""


def own(folder, monkeypatch, small, body, x="done.x", pack=1, **changes):
    """A run in one process of a method with this body."""
    monkeypatch.setattr(bodies, "SMALL_BYTES", small)
    file = folder / "own.py"
    name = folder.name.lower()
    file.write_text(METHOD.format(name=name, body="\n        ".join(body), x=x))
    config = {**BASE, "algorithm": name, "round": {"on_error": "stop"}, **changes}
    config["train"] = {"pack": pack}
    return fednet.run(config, in_process=True, out=folder, load=[file])


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["tensors", "bytes"])
@pytest.mark.parametrize(
    "write",
    [
        "down.x.vector.zero_()",
        "down.x.vector.data.mul_(2)",
        "down.x.vector.numpy()[:5] = 0",
        "host.initial.vector.data.mul_(2)",
    ],
)
def test_a_method_that_writes_to_what_it_was_sent_is_refused(tmp_path, monkeypatch, small, write):
    """However it writes and however the payload came, so that a method works in every placement or
    in none.
    """
    with pytest.raises(FednetError, match="changes tensors that it was sent"):
        own(tmp_path, monkeypatch, small, ["done = host.train(down.x)", write])


@pytest.mark.parametrize("client", [0, 1, 2, 3])
def test_one_client_of_a_pack_that_writes_to_what_all_of_it_share_ends_the_run(
    tmp_path, monkeypatch, client
):
    """Whatever a run does with clients that fail: what the others of the pack sent may be wrong."""
    body = ["done = host.train(down.x)", f"down.x.vector.mul_(1 + (host.client_id == {client}))"]
    everyone = {"clients_per_round": 4, "round": {"on_error": "drop"}}
    with pytest.raises(ConfigError, match="changes tensors that it was sent"):
        own(tmp_path, monkeypatch, 0, body, pack=4, **everyone)


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["tensors", "bytes"])
def test_what_a_method_does_to_a_reply_after_it_has_returned_it_changes_nothing(
    tmp_path, monkeypatch, small
):
    (tmp_path / "plain").mkdir()
    plain = own(tmp_path / "plain", monkeypatch, small, ["done = host.train(down.x)"])
    train = "done = host.train(down.x)"
    later = ["for x in self.kept: x.vector.data.mul_(2)", train, "self.kept.append(done.x)"]
    one = [
        train,
        "if Own.buffer is None: Own.buffer = done.x.vector.clone()",
        "Own.buffer.data.copy_(done.x.vector)",
    ]
    for name, body, x in (
        ("later", later, "done.x"),
        ("one", one, "Tensors(done.x.layout, Own.buffer, done.x.buffers, done.x.counters)"),
    ):
        (tmp_path / name).mkdir()
        found = own(tmp_path / name, monkeypatch, small, body, x)
        assert [r.model_sha256 for r in found.rounds] == [r.model_sha256 for r in plain.rounds]
