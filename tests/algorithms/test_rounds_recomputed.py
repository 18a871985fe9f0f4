"""Methods whose server or clients keep something: rounds recomputed in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fednet.config import from_mapping
from fednet.errors import ConfigError
from tests.algorithms.harness import Federation, begun, close, same
from tests.algorithms.reference import LR, Reference, agrees, averaged, whole_batches


def test_feddyn():
    alpha = 0.1
    epochs = 3
    cohorts = [[0, 1], [1, 2, 3], [0, 3]]
    f = whole_batches(train={"epochs": epochs})
    run = f.run("feddyn", cohorts=cohorts, alpha=alpha)
    reference = Reference(f)
    theta = reference.start
    h = torch.zeros_like(reference.start)
    g = {k: torch.zeros_like(h) for k in range(4)}
    for cohort in cohorts:
        local = {}
        for k in cohort:

            def change(gradient, w, k=k, theta=theta):
                return gradient - g[k] + alpha * (w - theta)

            local[k] = reference.descend(theta, k, epochs, change=change)
        for k in cohort:
            g[k] = g[k] - alpha * (local[k] - theta)
        h = h - alpha / 4 * sum(local[k] - theta for k in cohort)
        theta = sum(local.values()) / len(cohort) - h / alpha
    assert agrees(run.x, theta)
    for k in range(4):
        assert agrees(run.clients[k].g, g[k], 1e-4)


def test_qfedavg():
    f = whole_batches(train={"epochs": 2}, rounds=3)
    q = 1.5
    run = f.run("qfedavg", q=q)
    reference = Reference(f)
    w = reference.start
    for _ in range(3):
        above = 0.0
        below = 0.0
        for k in range(4):
            loss = reference.loss(w, k) + 1e-10
            delta = (w - reference.descend(w, k, 2)) / LR
            above = above + loss**q * delta
            below += q * loss ** (q - 1) * float(delta.square().sum()) + loss**q / LR
        w = w - above / below
    assert agrees(run.x, w)


def test_fedcm():
    f = whole_batches(train={"epochs": 3})
    alpha = 0.3
    epochs = 3
    run = f.run("fedcm", alpha=alpha)
    reference = Reference(f)
    w = reference.start
    delta = torch.zeros_like(reference.start)
    for _ in range(3):
        mix = lambda g, at, delta=delta: alpha * g + (1 - alpha) * delta  # noqa: E731
        local = [reference.descend(w, k, epochs, change=mix) for k in range(4)]
        change = w - sum(local) / 4
        w = w - change
        delta = change / (LR * epochs)
    assert agrees(run.x, w)
    assert agrees(run.server.delta, delta, 1e-4)


def test_fedga_also_where_a_client_is_lost_between_the_exchanges():
    f = whole_batches(train={"epochs": 2}, rounds=1)
    beta = 0.5
    run = f.run("fedga", beta=beta)
    assert not run.warnings
    run.round([0, 1, 2], lost=[1])
    assert "1 of 3 clients" in run.warnings[0]
    reference = Reference(f)
    w = reference.start
    for cohort, lost in ((range(4), ()), (range(3), (1,))):
        own = {k: reference.gradient(w, k) for k in cohort}
        g = sum(own.values()) / len(own)
        local = [reference.descend(w - beta * (g - own[k]), k, 2) for k in cohort if k not in lost]
        w = sum(local) / len(local)
    assert agrees(run.x, w)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fedga_stale_takes_the_mean_gradients_of_the_last_trainings_in_one_exchange(rho):
    """Two steps with momentum 0.9 go as far as 1 + 1.9 = 2.9 steps of one gradient."""
    steps = 2
    beta = 0.5
    cohorts = [[0, 1], [1, 2, 3], [0, 3]]
    f = whole_batches(train={"epochs": steps, "momentum": rho}, rounds=3)
    run = f.run("fedga", cohorts=cohorts, mode="stale", beta=beta)
    assert [len(e.down.fields) for e in run.algorithm.exchanges] == [2]
    assert run.algorithm.sends() == ("2|w|", "|w|")
    reference = Reference(f)
    w = reference.start
    g = torch.zeros_like(reference.start)
    own = {}
    for cohort in cohorts:
        change = {}
        for k in cohort:
            start = w - beta * (g - own[k]) if k in own else w
            change[k] = start - reference.descend(start, k, steps, momentum=rho)
            own[k] = change[k] / (LR * (2.9 if rho else 2))
        g = sum(own[k] for k in cohort) / len(cohort)
        w = w - sum(change.values()) / len(cohort)
    assert agrees(run.x, w)
    assert agrees(run.server.g, g, 1e-4)


def test_fedga_stale_refuses_what_its_division_by_rate_and_steps_does_not_allow():
    def configured(mode):
        algorithm = {"name": "fedga", "mode": mode}
        train = {"momentum": 0.9, "keep_optimizer": True}
        return from_mapping({"algorithm": algorithm, "train": train})

    configured("exact")
    with pytest.raises(ConfigError, match=r"train.keep_optimizer: fedga does not allow it: a grad"):
        configured("stale")


def test_dilocos_outer_step_is_torchs():
    train = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "steps": 5}
    run = Federation(train=train).run("diloco")
    x = torch.nn.Parameter(run.servers[0].x.vector.double())
    outer = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    for t, server in enumerate(run.servers[:-1], 1):
        replicas = [run.site(i, round=t).train(server.x).x.vector.double() for i in range(4)]
        x.grad = server.x.vector.double() - sum(replicas) / 4
        outer.step()
        assert torch.allclose(x.detach(), run.servers[t].x.vector.double(), atol=2e-6)


def test_feddf():
    f = whole_batches(train={"epochs": 2}, rounds=1)
    run = f.run("feddf", distill_lr=0.5, distill_batch=1000)
    reference = Reference(f)
    d = f.public_data.train[0].double()
    local = [reference.descend(reference.start, k, 2) for k in range(4)]
    with torch.no_grad():
        target = sum(reference.load(w)(d) for w in local).div(4).softmax(1)

    def loss(module, x, y):
        return F.kl_div(module(d).log_softmax(1), target, reduction="batchmean")

    x = averaged(f, lambda r, w, k: local[k])
    assert agrees(run.x, x - 0.5 * reference.gradient(x, 0, loss))


def test_fedmd():
    f = whole_batches(rounds=2)
    run = f.run("fedmd", batch=1000)
    reference = Reference(f)
    x0, y0 = f.public_data.train
    x0 = x0.double()

    def step(w, loss):
        return w - LR * reference.gradient(w, 0, lambda module, _x, _y: loss(module(x0)))

    models = [step(reference.start, lambda z: F.cross_entropy(z, y0))] * 4
    models = [reference.descend(w, k, 1) for k, w in enumerate(models)]
    for _ in range(2):
        with torch.no_grad():
            consensus = sum(reference.load(w)(x0) for w in models) / 4
        digested = [step(w, lambda z, f=consensus: (z - f).abs().mean()) for w in models]
        models = [reference.descend(w, k, 1) for k, w in enumerate(digested)]
    assert all(agrees(run.clients[k].w, w, 1e-4) for k, w in enumerate(models))


def test_fedmd_draws_a_subset_of_its_own_for_each_round():
    run = whole_batches(rounds=1).run("fedmd", subset=0.25, public_epochs=0, private_epochs=0)
    first = [up.scores for _, up in run.trips[0].values()]
    assert {tuple(scores.shape) for scores in first} == {(10, 5)}
    assert all(torch.equal(scores, first[0]) for scores in first)  # of one model on one subset
    rows = []
    for round in (1, 2):
        state = run.algorithm.init_client(run.federation.initial)
        state = run.algorithm.receive_enrolment(state, run.enrolments[0], run.host(0))
        down = run.algorithm.broadcast(run.servers[0], 0, 0)
        rows.append(run.algorithm.client_update(0, state, down, run.site(0, round=round))[1].scores)
    assert torch.equal(rows[0], first[0])
    assert not torch.equal(rows[1], first[0])


def test_moon_whose_clients_come_again_or_late():
    f = whole_batches(train={"epochs": 2})
    mu = 3.0
    tau = 0.7
    cohorts = [[0, 1], [1, 2], [0, 1, 3]]
    run = f.run("moon", cohorts=cohorts, mu=mu, tau=tau)
    reference = Reference(f)
    other = Reference(f)
    w = reference.start
    v = {}
    sizes = [len(part) for part in f.parts]

    def features(at, x):
        with torch.no_grad():
            return other.load(at).features(x)

    for cohort in cohorts:
        local = {}
        for k in cohort:
            prev = v.get(k)

            def loss(module, x, y, w=w, prev=prev):
                z = module.features(x)
                value = F.cross_entropy(module.head(z), y)
                if prev is None:
                    return value
                near = torch.exp(F.cosine_similarity(z, features(w, x)) / tau)
                far = torch.exp(F.cosine_similarity(z, features(prev, x)) / tau)
                return value - mu * torch.log(near / (near + far)).mean()

            local[k] = reference.descend(w, k, 2, loss=loss)
        v |= local
        w = sum(sizes[k] * y for k, y in local.items()) / sum(sizes[k] for k in local)
    assert agrees(run.x, w)
    assert all(agrees(run.clients[k].v, v[k]) for k in range(4))


def test_in_moon_each_batch_counts_once_in_the_statistics_of_batch_norm():
    f = begun("moon", model={"name": "mlp", "norm": "batch"})
    f.rounds(1, (0,))
    before = int(f.downs[0].x.counters[0])
    f.rounds(1, (0,))  # the second participation has a contrast
    assert int(f.ups[0].x.counters[0]) - int(f.downs[0].x.counters[0]) == f.ups[0].run.steps
    assert before == 0


# -- FedSMU ----------------------------------------------------------------------------------------
def test_fedsmu():
    f = whole_batches(rounds=2)
    rates = {"server_lr": 0.01, "decay": 0.1, "beta_1": 0.5, "beta_2": 0.75}
    rates["server_lr_decay"] = 0.5
    run = f.run("fedsmu", cohorts=[[0, 1, 2], [1, 3]], **rates)
    reference = Reference(f)
    x = reference.start
    m = {k: torch.zeros_like(reference.start) for k in range(4)}
    for gamma, cohort in ((0.01, [0, 1, 2]), (0.005, [1, 3])):
        total = torch.zeros_like(x)
        for k in cohort:
            g = reference.descend(x, k, 1) - x
            total += torch.sign(0.5 * m[k] + 0.5 * g)
            m[k] = 0.75 * m[k] + 0.25 * g
        x = x + gamma * (total / len(cohort) - 0.1 * x)
    # A coordinate whose momentum is next to zero may take another sign in float32.
    apart = (run.x.vector.double() - x).abs() > 1e-6
    assert float(apart.float().mean()) < 0.01
    assert all(agrees(run.clients[k].m, m[k], 1e-3) for k in range(4))


@pytest.mark.parametrize("chain", [["sign"], ["topk(0.1)"]])
def test_fedsmu_refuses_error_feedback_that_nobody_named(chain):
    """It would send another vector than the signs."""

    def config(*named, way="up", kind="delta"):
        return from_mapping({"algorithm": "fedsmu", "wire": {way: {kind: [*named, *chain]}}})

    with pytest.raises(ConfigError, match=r"wire\.up\.delta: .* qsgd\(2\) sends -1, 0 and 1 exac"):
        config()
    for asked in (config("ef"), config("noef"), config(way="down", kind="state")):
        assert asked.algorithm.name == "fedsmu"


# -- Ditto, APFL, pFedMe ---------------------------------------------------------------------------
@pytest.mark.parametrize("epochs", [None, 2])
def test_ditto(epochs):
    f = whole_batches(train={"epochs": 3}, rounds=2)
    strength = 0.7
    run = f.run("ditto", personal_epochs=epochs, **{"lambda": strength})
    reference = Reference(f)
    v = reference.start
    for server in run.servers[:2]:
        at = server.x.vector.double()
        pull = lambda g, x, at=at: g + strength * (x - at)  # noqa: E731
        v = reference.descend(v, 2, epochs or 3, change=pull)
    assert agrees(run.clients[2].v, v)


@pytest.mark.parametrize(
    ("alpha", "adaptive"), [(0.3, False), (0.3, True), (0.0, True), (1.0, True)]
)
def test_apfl(alpha, adaptive):
    f = whole_batches(train={"epochs": 2}, rounds=2)
    run = f.run("apfl", alpha=alpha, adaptive=adaptive)
    reference = Reference(f)
    v = reference.start
    for t in range(2):
        w = run.servers[t].x.vector.double()
        if adaptive:
            slope = torch.dot(v - w, reference.gradient(alpha * v + (1 - alpha) * w, 3))
            alpha = min(1.0, max(0.0, alpha - LR * float(slope)))
        for _ in range(2):
            gradient = reference.gradient(alpha * v + (1 - alpha) * w, 3)
            w = w - LR * reference.gradient(w, 3)
            v = v - LR * alpha * gradient
    assert agrees(run.clients[3].v, v)
    assert run.clients[3].alpha == pytest.approx(alpha, rel=1e-5)
    assert agrees(run.personal(3), alpha * v + (1 - alpha) * w)


def test_pfedme():
    f = whole_batches(train={"epochs": 2}, rounds=2)
    strength = 4.0
    eta = 0.05
    beta = 0.5
    run = f.run("pfedme", **{"K": 3, "lambda": strength, "eta": eta, "beta": beta})
    reference = Reference(f)
    x = reference.start
    for _ in range(2):
        local = []
        thetas = []
        for k in range(4):
            w = theta = x
            for _ in range(2):  # R: two epochs of one batch
                theta = reference.descend(
                    theta, k, 3, change=lambda g, at, w=w: g + strength * (at - w)
                )
                w = w - eta * strength * (w - theta)
            local.append(w)
            thetas.append(theta)
        x = (1 - beta) * x + beta * sum(local) / 4
    assert agrees(run.x, x)
    assert agrees(run.clients[1].theta, thetas[1])


def test_pfedmes_k_steps_of_a_local_round_are_all_on_one_minibatch():
    parts = [[0, 1]]  # of two samples, one a batch
    f = Federation(clients=1, parts=parts, rounds=1, train={"batch_size": 1, "steps": 1, "lr": LR})
    theta = f.run("pfedme", **{"K": 4, "lambda": 2.0}).clients[0].theta
    alone = Reference(Federation(clients=2, parts=[[0], [1]]))
    expected = [
        alone.descend(alone.start, k, 4, change=lambda g, at: g + 2.0 * (at - alone.start))
        for k in (0, 1)
    ]
    apart = [float((theta.vector.double() - w).norm() / w.norm()) for w in expected]
    assert min(apart) < 1e-5 < 1e-3 < max(apart)


def test_pfedmes_local_rounds_are_the_batches_of_its_epochs_and_its_loss_is_their_mean():
    f = Federation(clients=1, parts=[range(5)], rounds=1, train={"batch_size": 2})
    assert f.run("pfedme").ups[0].run.steps == 3
    f = whole_batches(rounds=1, train={"epochs": 3, "lr": 1e-9})
    reference = Reference(f)
    loss = reference.loss(reference.start, 0)
    assert f.run("pfedme").ups[0].run.loss == pytest.approx(loss, rel=1e-5)


# -- what is evaluated -----------------------------------------------------------------------------
def test_fedexps_model_is_the_averaged_iterate_from_the_second_round_on():
    run = Federation().run("fedexp")
    first, second, third = (server.x for server in run.servers[:3])
    evaluated = [run.algorithm.global_model(server) for server in run.servers]
    assert same(evaluated[0], first)
    assert same(evaluated[1], second)
    assert close(evaluated[2], (third + second) / 2)
    assert same(run.algorithm.broadcast(run.servers[2], 0, 0).x, third)
    assert all(report["eta_g"] >= 1.0 for report in run.reports)
