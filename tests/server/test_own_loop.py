"""A method with a training loop of its own: what its clients are judged by."""

from __future__ import annotations

import pytest
import torch

import fednet
from fednet.errors import CannotGoOn
from tests.rooms import lines, run


@pytest.mark.parametrize("sends", ["weights", "said", "nothing"])
def test_a_training_loop_of_a_methods_own_is_judged_by_what_came_of_it(tmp_path, sends):
    """Otherwise each round would have the accuracy of the initial model as the client's own."""

    @fednet.algorithm("own_loop")
    class Loop(fednet.Algorithm):
        class Down(fednet.Payload):
            x: fednet.Weights

        class Up(fednet.Payload):
            if sends == "weights":
                x: fednet.Weights
            else:
                dx: fednet.Delta
            run: fednet.Statistics

        class Server(fednet.State):
            x: fednet.Weights

        class Accumulator(fednet.State):
            x: fednet.Sum

        def client_update(self, phase, client, down, host):
            net = host.model(down.x).train()
            x, y = host.data
            optimizer = torch.optim.SGD(net.parameters(), lr=host.lr)
            for _ in range(5):
                optimizer.zero_grad()
                host.task.loss(net(x), y).backward()
                optimizer.step()
            done = fednet.Tensors.of(net, down.x.layout)
            run = fednet.LocalRun(host.n, 5, 1.0)
            if sends == "weights":
                return client, self.Up(x=done, run=run)
            if sends == "said":
                host.trained = done
            return client, self.Up(dx=done - down.x, run=run)

        def init_accumulator(self, server, phase):
            return self.Accumulator(x=fednet.Sum.empty())

        def accumulate(self, accumulator, server, client_id, up, host):
            x = up.x if sends == "weights" else server.x + up.dx
            return self.Accumulator(x=accumulator.x.add(x, up.run.n))

    here = {"clients": 1, "algorithm": "own_loop", "evaluate": {"clients": "auto"}}
    if sends == "nothing":  # the run's last accuracy of it was the global model's
        line = Loop.client_update.__wrapped__.__code__.co_firstlineno
        said = rf"client_update of Loop \(test_own_loop\.py, line {line}\) sends dx, not the whole"
        with pytest.raises(CannotGoOn, match=said):
            run(tmp_path, **here)
        here["evaluate"]["clients"] = "none"
        path = run(tmp_path, **here, name="never")
        assert not any(row.get("accuracy_personal") for row in lines(path / "clients.jsonl"))
        return
    rows = lines(run(tmp_path, **here) / "clients.jsonl")
    first, second = [row for row in rows if not row.get("final")]
    assert first["accuracy_received"] != second["accuracy_received"]
    assert first["accuracy_personal"] == second["accuracy_received"]
