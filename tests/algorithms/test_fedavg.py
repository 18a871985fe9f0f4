from __future__ import annotations

import numpy as np
import pytest
import torch

from fednet.algorithms.base import Run
from fednet.algorithms.fedavg import FedAvg
from fednet.tensors import Tensors
from tests.algorithms.harness import Desk, Federation, close, same, serve, vector


def test_the_mean_is_weighted_by_samples_and_buffers_with_it():
    algorithm = Federation().make("fedavg")
    server = algorithm.init_server(vector(0.0, buffers=[0.0]))
    ups = {
        0: algorithm.Up(x=vector(1.0, buffers=[10.0]), run=Run(1, 1, 0.0)),
        1: algorithm.Up(x=vector(5.0, buffers=[20.0]), run=Run(3, 1, 0.0)),
    }
    x = serve(algorithm, server, ups, Desk(2)).x
    assert (float(x.vector[0]), float(x.buffers[0])) == (4.0, 17.5)
    uniform = Federation().make("fedavg", weighting="uniform")
    assert float(serve(uniform, server, ups, Desk(2)).x.vector[0]) == 3.0


def test_one_full_batch_each_is_gradient_descent_on_all_samples():
    f = Federation(train={"batch_size": 200}, rounds=1)
    module = f.initial.into(f.build(0))
    torch.nn.functional.cross_entropy(module(f.x), f.y).backward()
    descended = f.initial - 0.1 * Tensors.pack(
        f.layout, {n: p.grad for n, p in module.named_parameters()}
    )
    assert close(f.run("fedavg").x, descended)


def test_counters_take_the_largest_and_buffers_the_mean():
    f = Federation(model={"name": "vgg11", "norm": "batch", "width": 8}, data=None, rounds=1)
    f.x = torch.from_numpy(
        np.random.default_rng(0).standard_normal((200, 3, 32, 32)).astype(np.float32)
    )
    f.parts = [range(20), range(20, 60)]
    f.clients = 2
    run = f.run("fedavg")
    assert run.x.counters.unique().tolist() == [3]  # 40 samples in batches of 16
    expected = (run.locals[0].buffers.double() * 20 + run.locals[1].buffers.double() * 40) / 60
    assert torch.allclose(run.x.buffers.double(), expected, rtol=1e-6)


def test_fedsgd_steps_by_the_mean_gradient_however_batches_are_cut():
    runs = [Federation(train={"batch_size": size}).run("fedsgd").x for size in (16, 200)]
    assert close(*runs, tolerance=1e-5)


def test_fedsgd_clients_are_judged_by_the_model_they_got():
    f = Federation(rounds=2)
    run = f.run("fedsgd")
    assert same(run.locals[0], run.servers[1].x)


def test_fedsgd_obeys_clipping_and_weight_decay():
    algorithm = Federation().make("fedsgd")
    run = Federation(train={"clip_norm": 0.01}).run("fedsgd", cohorts=[[1]] * 3)
    assert run.ups[1].g.norm() == pytest.approx(0.01, rel=1e-3)
    f = Federation(rounds=1)
    plain = f.run("fedsgd", cohorts=[[1]]).ups[1].g
    f.train = {"weight_decay": 0.5}
    assert close(f.run("fedsgd", cohorts=[[1]]).ups[1].g, plain + 0.5 * f.initial, 1e-5)
    server = algorithm.init_server(vector(1.0))
    ups = {
        0: algorithm.Up(g=vector(1.0), run=Run(1, 0, 0.0)),
        1: algorithm.Up(g=vector(5.0), run=Run(3, 0, 0.0)),
    }
    assert float(serve(algorithm, server, ups, Desk(2, lr=0.5)).x.vector[0]) == -1.0  # 1 - 0.5 * 4


def test_local_only_sends_the_initial_model_once_and_never_changes_the_servers():
    f = Federation()
    run = f.run("local", cohorts=[[0, 1], [1], [0, 1, 2]])
    assert all(same(s.x, f.initial) for s in run.servers)
    assert sorted(run.clients) == [0, 1, 2]
    assert not any(run.algorithm.Down.fields)
    assert set(run.algorithm.Up.fields) == {"run"}


def test_local_only_may_start_each_client_from_its_own_seed():
    run = Federation(rounds=1, train={"lr": 1e-9}).run("local", init="own")
    assert not close(run.clients[0].x, run.clients[1].x, 0.1)
    assert run.algorithm.enroll(run.servers[0], 0, run.io) is None


def test_a_function_of_ones_own_takes_its_arguments_by_name_too():
    class Counted(FedAvg):
        def weight(self, run):
            return float(run.steps)

    assert Counted().weight(run=Run(3, 2, 0.0)) == 2.0
