"""What the engine does with the shared model follows from the declared kinds, whatever the fields
are called.
"""

from __future__ import annotations

import pytest
import torch

from fednet import registry
from fednet.algorithms.base import (
    Layout,
    Payload,
    PerClient,
    State,
    Statistics,
    Sum,
    Tensors,
    Weights,
)
from fednet.algorithms.fedavg import FedAvg
from fednet.server.evaluation import model_hashes
from fednet.server.rows import RowStore, on_disk
from fednet.tensors import Slot
from tests.rooms import hashes, run, summary


class Renamed(FedAvg):
    """FedAvg as its paper writes it: the model is w."""

    class Down(Payload):
        w: Weights

    class Up(Payload):
        w_k: Weights
        ran: Statistics

    class Server(State):
        w: Tensors

    class Accumulator(State):
        total: Sum

    def client_update(self, phase, client, down, host):
        done = host.train(down.w)
        return client, self.Up(w_k=done.x, ran=done.run)

    def init_accumulator(self, server, phase):
        return self.Accumulator(total=Sum.empty())

    def accumulate(self, accumulator, server, client_id, up, host):
        return self.Accumulator(total=accumulator.total.add(up.w_k, self.weight(up.ran)))

    def server_update(self, accumulator, server, cohort, host):
        return self.Server(w=accumulator.total.mean())


@pytest.fixture(autouse=True)
def registered():
    registry.algorithm("renamed")(Renamed)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"privacy": {"clip": 0.05}},
        {"wire": {"up": {"state": ["topk(0.5)"]}}},
        {"model": {"name": "mlp", "hidden": [8], "buffers": "server"}},
    ],
    ids=["plain", "clip", "compressed", "buffers"],
)
def test_fedavg_with_other_names_gives_the_bits_of_fedavg(tmp_path, changes):
    plain = run(tmp_path / "a", **changes)
    renamed = run(tmp_path / "b", algorithm={"name": "renamed"}, **changes)
    assert [model for model, _ in hashes(renamed)] == [model for model, _ in hashes(plain)]
    assert summary(renamed)["model_sha256"] == summary(plain)["model_sha256"]
    assert summary(renamed)["predicted"] == summary(plain)["predicted"]


class Rows(State):
    y: PerClient
    round: int = 0


def test_the_hash_of_a_method_without_a_model_is_that_of_its_whole_state(tmp_path):
    class Without(FedAvg):
        Server = Rows

    layout = Layout((Slot("w", (2,), "parameter"),))
    row = Tensors.zeros(layout)
    first = Rows(y=PerClient(layout, {3: row}))
    other = Rows(y=PerClient(layout, {3: row.with_vector(torch.ones(2))}))
    method = Without()
    hashed = {model_hashes(method, s)[0] for s in (first, other, first.replace(round=1))}
    assert len(hashed) == 3
    rows = RowStore(tmp_path)
    rows.write(row)  # so that the row's file has another name
    assert model_hashes(method, on_disk(first, rows)) == model_hashes(method, first)
