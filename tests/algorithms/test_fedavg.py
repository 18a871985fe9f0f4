from __future__ import annotations

import pytest
import torch

from fednet import (
    Accuracy,
    Algorithm,
    ConfigError,
    Exchange,
    Payload,
    State,
    Statistics,
    Sum,
    Tensors,
    Weights,
)
from fednet.algorithms.base import LocalRun
from fednet.algorithms.fedavg import FedAvg
from tests.algorithms.harness import Desk, Federation, close, same, serve, vector


def test_counters_take_the_largest_and_buffers_the_mean():
    f = Federation(
        clients=2,
        model={"name": "mlp", "norm": "batch"},
        parts=[range(20), range(20, 60)],
        rounds=1,
    )
    run = f.run("fedavg")
    assert run.x.counters.unique().tolist() == [3]  # 40 samples in batches of 16
    expected = (run.locals[0].buffers.double() * 20 + run.locals[1].buffers.double() * 40) / 60
    assert torch.allclose(run.x.buffers.double(), expected, rtol=1e-6)


def test_fedsgd_clients_are_judged_by_the_model_they_got():
    f = Federation(rounds=2)
    run = f.run("fedsgd")
    assert same(run.locals[0], run.servers[1].x)


def test_fedsgd_obeys_clipping_and_weight_decay():
    run = Federation(train={"clip_norm": 0.01}).run("fedsgd", cohorts=[[1]] * 3)
    assert run.ups[1].g.norm() == pytest.approx(0.01, rel=1e-3)
    f = Federation(rounds=1)
    plain = f.run("fedsgd", cohorts=[[1]]).ups[1].g
    f.train = {"clip_norm": 1e6}
    assert same(f.run("fedsgd", cohorts=[[1]]).ups[1].g, plain)
    f.train = {"weight_decay": 0.5}
    assert close(f.run("fedsgd", cohorts=[[1]]).ups[1].g, plain + 0.5 * f.initial, 1e-5)


def test_local_only_sends_the_initial_model_once_and_never_changes_the_servers():
    f = Federation()
    run = f.run("local", cohorts=[[0, 1], [1], [0, 1, 2]])
    assert all(same(s.x, f.initial) for s in run.servers)
    assert sorted(run.clients) == [0, 1, 2]
    assert not any(run.algorithm.Down.fields)
    assert set(run.algorithm.Up.fields) == {"run"}


def test_local_only_may_start_each_client_from_its_own_seed():
    run = Federation(rounds=1, train={"lr": 1e-9}).run("local", init="own")
    first = run.clients[0].x
    assert not close(first, run.clients[1].x, 0.1)
    run.round([0])
    assert close(run.clients[0].x, first)
    assert run.algorithm.enroll(run.servers[0], 0, run.io) is None


def test_a_function_of_ones_own_takes_its_arguments_by_name_too():
    class Counted(FedAvg):
        def weight(self, run):
            return float(run.steps)

    assert Counted().weight(run=LocalRun(3, 2, 0.0)) == 2.0


class Answer(Payload):
    y: Weights
    seen: Statistics


@pytest.mark.parametrize("summed", [{}, {"x": "weighted"}])
def test_replies_of_any_name_in_an_exchange_are_weighted_by_their_samples(summed):
    class Counted(Answer):
        x: Weights

    class Own(Algorithm):
        exchanges = (Exchange(Algorithm.Down, Counted),)

        class Accumulator(State):
            x: Sum

    Own.summed = summed
    ups = {
        0: Counted(y=vector(1.0), seen=LocalRun(1, 1, 0.0), x=vector(1.0)),
        1: Counted(y=vector(5.0), seen=LocalRun(3, 1, 0.0), x=vector(5.0)),
    }
    after = serve(Own(), Own.Server(x=vector(0.0)), ups, Desk(2))
    assert after.x.vector.tolist() == [4.0]


def test_a_default_that_cannot_fill_what_a_method_declares_says_what_to_write():
    class Wrong(FedAvg):
        class Down(Payload):
            x: Weights
            p: Accuracy

        class Up(FedAvg.Up):
            p: Accuracy

        class Server(State):
            x: Weights
            p: dict[int, float]

        client_update = Algorithm.client_update

    run = Federation().run("fedavg")
    with pytest.raises(ConfigError, match=r"Server declares x, p, .* fills x; write init_server\."):
        Wrong().init_server(run.x)
    with pytest.raises(ConfigError, match=r"Down declares x, p, .* fills x; write broadcast\."):
        Wrong().broadcast(run.servers[0], 0, 0)
    down = run.algorithm.broadcast(run.servers[0], 0, 0)
    with pytest.raises(ConfigError, match=r"Up declares x, run, p, .*; write client_update\."):
        Wrong().client_update(0, None, down, run.site(0))


def test_a_default_sends_nothing_that_is_not_there():
    class Wrong(FedAvg):
        class Down(Payload):
            x: Weights
            c: Weights

        class Server(State):
            x: Tensors
            c: Tensors | None = None

    run = Federation().run("fedavg")
    said = r"^the default of broadcast: expected Tensors .* as \S+\.Down\.c, not NoneType; write br"
    with pytest.raises(ConfigError, match=said):
        Wrong().broadcast(Wrong().init_server(run.x), 0, 0)


def test_a_mistyped_step_of_a_method_is_refused():
    """It would train as FedAvg, and without a word."""
    with pytest.raises(ConfigError, match=r"Own\.client_updates: .* Did you mean client_update\?"):

        class Own(FedAvg):
            def client_updates(self, phase, client, down, host):
                return client, down
