from __future__ import annotations

import pytest
import torch

from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.tensors import Tensors
from fednet.training.optimizers import tau
from tests.algorithms.harness import Federation, close, same

COHORTS = [[0, 2], [1, 2], [0, 2]]


def mean_variate(run):
    n = run.federation.clients
    total = sum((c.c for c in run.clients.values()), start=run.servers[0].c)
    return total / n


def assert_near(a: Tensors, b: Tensors, tolerance=1e-5):
    assert (a - b).norm() <= tolerance * max(b.norm(), 1e-6)


@pytest.mark.parametrize("train", [{}, {"momentum": 0.9}, {"epochs": 2, "weight_decay": 0.01}])
@pytest.mark.parametrize(
    "options", [{}, {"option": "I"}, {"correction": "post"}, {"server_lr": 0.5}]
)
def test_the_servers_variate_is_the_mean_of_all_clients(train, options):
    f = Federation(train=train)
    run = f.run("scaffold", cohorts=COHORTS, **options)
    assert run.servers[-1].c.norm() > 0
    assert_near(mean_variate(run), run.servers[-1].c)


def test_random_variates_are_gone_from_a_client_once_it_took_part_and_stay_in_the_servers_mean():
    """c_i+ = c_i - c + (x - y) / (K lr), and c = c_i at first: of four clients two took part."""
    f = Federation(rounds=1)
    random, zero = (
        f.run("scaffold", cohorts=[[0, 2]], variates=v, correction="post")
        for v in ("random", "zero")
    )
    c_0 = random.servers[0].c
    assert all(close(random.locals[i], zero.locals[i]) for i in (0, 2))
    assert all(close(random.clients[i].c, zero.clients[i].c, 1e-4) for i in (0, 2))
    assert close(random.servers[1].c - zero.servers[1].c, c_0 * 0.5, 1e-4)
    for name, drawn in f.initial.params.items():
        assert torch.equal(c_0[name].flatten(), drawn.flatten().flip(0))


def test_divided_by_participants_the_servers_variate_is_too_large_by_how_few_they_are():
    f = Federation(rounds=1)
    wrong, right = (
        f.run("scaffold", cohorts=[[0, 2]], mean_over=m).servers[1].c
        for m in ("participants", "all")
    )
    assert close(wrong, right * 2.0, 1e-5)  # two of four


def test_divided_by_its_steps_a_variate_is_too_large_by_what_momentum_adds():
    f = Federation(rounds=1, train={"momentum": 0.9, "batch_size": 8})
    naive, right = (f.run("scaffold", divisor=d) for d in ("steps", "tau"))
    for i in range(4):
        k = naive.ups[i].run.steps
        assert close(naive.clients[i].c, right.clients[i].c * (tau(k, 0.9) / k), 1e-4)


def test_a_lost_upload_leaves_both_variates_as_they_were():
    f = Federation(rounds=1)
    run = f.run("scaffold")
    c0 = run.clients[0].c
    run.round([0, 1], lost=[0])
    assert same(run.clients[0].c, c0)
    assert_near(mean_variate(run), run.servers[-1].c)


def test_after_one_full_step_the_variate_is_the_gradient_in_both_options():
    f = Federation(rounds=1, train={"batch_size": 200})
    two, one = f.run("scaffold"), f.run("scaffold", option="I")
    for i in range(4):
        gradient = one.site(i).gradient(f.initial).x
        assert close(two.clients[i].c, gradient.params, 1e-4)
        assert close(one.clients[i].c, gradient.params, 1e-6)


@pytest.mark.parametrize(
    ("k", "rho", "expected"), [(3, 0.0, 3.0), (1, 0.9, 1.0), (2, 0.9, 2.9), (3, 0.5, 4.25)]
)
def test_effective_steps_are_the_total_weight_of_all_gradients(k, rho, expected):
    assert tau(k, rho) == pytest.approx(expected)  # k = 3, rho = 0.5: 1.75 + 1.5 + 1


def test_post_correction_without_momentum_is_the_same_method():
    f = Federation(train={"epochs": 2})
    assert close(f.run("scaffold", correction="post").x, f.run("scaffold").x, 1e-4)


def test_a_client_without_samples_leaves_its_variate():
    f = Federation(parts=[range(20), range(20, 60), range(0)], clients=3)
    run = f.run("scaffold")
    assert run.clients[2].c.norm() == 0.0
    assert run.x.is_finite()


def test_option_i_with_the_correction_outside_momentum_is_refused():
    both = {"name": "scaffold", "option": "I", "correction": "post"}
    with pytest.raises(
        ConfigError, match=r"algorithm\.correction: post with option I corrects too"
    ):
        from_mapping({"algorithm": both, "train": {"momentum": 0.9}})
    from_mapping({"algorithm": both})
    for one in ({"option": "I"}, {"correction": "post"}):
        from_mapping({"algorithm": {"name": "scaffold", **one}, "train": {"momentum": 0.9}})


@pytest.mark.parametrize("method", ["fedcm", "fednova", "fedsgd", "scaffold"])
def test_methods_that_compute_with_the_steps_of_sgd_are_refused_with_other_optimizers(method):
    train = {"optimizer": "adam", "momentum": 0.0}
    with pytest.raises(ConfigError, match=f"train.optimizer: {method} assumes plain SGD steps"):
        from_mapping({"algorithm": method, "train": train})


@pytest.mark.parametrize("method", ["fedrod", "fedabc", "feddc", "feddcplus", "fedlc"])
def test_methods_with_a_loss_about_classes_are_refused_for_other_tasks(method):
    with pytest.raises(ConfigError, match=f"task: {method} trains with a loss of its own about"):
        from_mapping({"algorithm": method, "task": "regression"})
