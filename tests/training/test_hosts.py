from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fednet import registry
from fednet.algorithms.base import Samples
from fednet.tensors import Tensors
from fednet.training.hosts import ServerHost
from fednet.training.scratch import Scratch
from tests.algorithms.harness import Federation, close, images, same

F5 = Federation()


def io(federation=F5):
    return federation.run("fedavg", cohorts=[[0]] * 3).io


def step(x: Tensors, samples: Samples, lr: float) -> Tensors:
    """One step of gradient descent by autograd alone."""
    module = x.into(F5.build(0))
    F.cross_entropy(module(samples.x), samples.y).backward()
    return x - lr * Tensors.pack(x.layout, {name: p.grad for name, p in module.named_parameters()})


def test_fit_with_one_full_batch_is_one_exact_step():
    samples = Samples(*images(20))
    fitted = io().fit(F5.initial, samples, epochs=1, lr=0.5, batch_size=256)
    assert close(fitted, step(F5.initial, samples, 0.5), 1e-5)


def test_fit_computes_in_the_precision_of_the_run():
    samples = Samples(*images(20))
    exact, rough = (
        io(Federation(train={"precision": precision})).fit(
            F5.initial, samples, epochs=1, lr=0.5, batch_size=256
        )
        for precision in ("fp32", "bf16")
    )
    assert not same(exact, rough)
    assert close(exact, rough, 0.05)


def test_a_client_without_test_samples_has_nothing_to_count():
    host = F5.run("fedavg", cohorts=[[0]] * 3).site(0)
    x, y = host.test
    counts = host.evaluate(F5.initial, (x[:0], y[:0]))
    assert (counts.n, counts.table.sum(), counts.loss) == (0, 0, 0.0)


def test_reports_and_warnings_are_of_one_round():
    h = ServerHost(
        F5.setting(F5.make("fedavg")), lambda: Scratch(lambda: F5.build(1), F5.layout), 4
    )
    h.begin(1)
    h.report(eta=2.0)
    h.warn("mind")
    h.begin(1, phase=1, cohort=[2])
    assert (h.reported, h.warnings, h.cohort) == ({"eta": 2.0}, ["mind"], (2,))
    h.begin(2)
    assert (h.reported, h.warnings) == ({}, [])


def test_the_server_knows_the_rate_and_its_decay():
    f = Federation(train={"schedule": "exponential(0.5)", "momentum": 0.9})
    h = f.run("fedavg", cohorts=[[0]] * 3).io
    assert h.lr == pytest.approx(0.1 * 0.25)
    assert h.lr_decay == pytest.approx(0.25)
    assert h.momentum == 0.9


class Noisy(type(registry.task.get("classification")())):
    """A user's own task, whose loss draws."""

    def loss(self, outputs, y):
        return super().loss(outputs + torch.rand(outputs.shape), y)


def noisy(module, x, y):
    """The loss of a user's own method, which draws."""
    return F.cross_entropy(module(x) + torch.rand(()) * x.flatten(1)[:, :5], y)


@pytest.mark.parametrize(
    ("task", "loss"),
    [(Noisy(), None), (registry.task.get("classification")(), noisy)],
    ids=["task", "loss"],
)
def test_what_a_loss_of_a_users_own_draws_is_the_same_each_time(task, loss):
    def trained():
        host = F5.run("fedavg", cohorts=[[0]] * 3).site(0)
        host.task = task
        host.scratch.may_draw = False  # of the model alone
        return host.train(F5.initial, loss=loss).x

    assert same(trained(), trained())


def test_fresh_initialisations_differ_by_number_and_repeat():
    host = F5.run("fedavg", cohorts=[[0]] * 3).site(0)
    assert same(host.fresh("theta", 1), host.fresh("theta", 1))
    assert not same(host.fresh("theta", 1), host.fresh("theta", 2))
