"""FedAsync, FedBuff and CA2FL on events made by hand, beside their papers recomputed in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fednet.algorithms.base import LocalRun
from fednet.algorithms.staleness import rebase, weight
from tests.algorithms.harness import Federation, close, vector
from tests.algorithms.reference import Reference, agrees, whole_batches

F = Federation()

# (client, staleness) of each reply in the order in which it comes, in buffers of two: client 0 is
# quick, client 3 answers a model of three updates ago.
EVENTS = [[(0, 0), (1, 0)], [(0, 0), (2, 1)], [(1, 1), (0, 0)], [(0, 0), (3, 3)], [(3, 0), (2, 2)]]


def play(name, events, **options):
    """A run whose replies come in this order, each from the model that its staleness says."""
    federation = whole_batches(train={"epochs": 2}, rounds=0)
    run = federation.run(name, **options)
    algorithm = run.algorithm
    for number, buffer in enumerate(events, 1):
        server = run.servers[-1]
        fold = algorithm.init_accumulator(run.servers[-1], 0)
        for client, tau in buffer:
            base = run.servers[number - 1 - tau]
            down = algorithm.broadcast(base, 0, client)
            host = run.site(client, round=number - tau)
            _, up = algorithm.client_update(
                0, algorithm.init_client(federation.initial), down, host
            )
            run.io.staleness = tau
            if not algorithm.own_schedule:
                up = rebase(up, down.x, server.x, tau)
            fold = algorithm.accumulate(fold, server, client, up, run.io)
        run.servers.append(algorithm.server_update(fold, server, [c for c, _ in buffer], run.io))
    return run


def updates(reference, models, number, buffer, **local):
    """(client, staleness, Delta) of a buffer's replies, trained from the reference's own models."""
    for client, tau in buffer:
        base = models[number - 1 - tau]
        yield client, tau, reference.descend(base, client, steps=2, **local) - base


def test_fedasync_mixes_each_reply_in_by_its_staleness():
    run = play(
        "fedasync", [[e] for b in EVENTS for e in b], alpha=0.6, rho=0.3, staleness="poly(0.5)"
    )
    reference = Reference(run.federation)
    models = [reference.start]
    for number, (client, tau) in enumerate((e for b in EVENTS for e in b), 1):
        base = models[number - 1 - tau]
        pull = lambda g, w, base=base: g + 0.3 * (w - base)  # noqa: E731
        y = reference.descend(base, client, steps=2, change=pull)
        alpha = 0.6 / math.sqrt(1 + tau)
        models.append((1 - alpha) * models[-1] + alpha * y)
    assert all(agrees(s.x, m) for s, m in zip(run.servers, models))


def test_fedbuff_steps_by_the_weighted_sum_over_the_buffers_size():
    run = play("fedbuff", EVENTS, server_lr=0.7)
    reference = Reference(run.federation)
    models = [reference.start]
    for number, buffer in enumerate(EVENTS, 1):
        found = updates(reference, models, number, buffer)
        step = sum(delta / math.sqrt(1 + tau) for _, tau, delta in found)
        models.append(models[-1] + 0.7 * step / len(buffer))
    assert all(agrees(s.x, m) for s, m in zip(run.servers, models))


def test_ca2fl_calibrates_by_what_it_remembers_of_each_client():
    run = play("ca2fl", EVENTS, server_lr=0.7)
    reference = Reference(run.federation)
    models = [reference.start]
    memory = [torch.zeros_like(reference.start)] * 4
    for number, buffer in enumerate(EVENTS, 1):
        found = list(updates(reference, models, number, buffer))
        h = sum(memory) / 4
        v = h + sum(delta - memory[client] for client, _, delta in found) / len(buffer)
        models.append(models[-1] + 0.7 * v)
        for client, _, delta in found:
            memory[client] = delta
    assert all(agrees(s.x, m) for s, m in zip(run.servers, models))
    assert agrees(run.servers[-1].ybar, -sum(memory) / 4)  # ybar is -h


def test_a_method_made_for_rounds_runs_under_fedbuffs_rule():
    buffered = play("fedavg", EVENTS, weighting="uniform")
    assert all(
        close(a.x, b.x, 1e-5) for a, b in zip(buffered.servers, play("fedbuff", EVENTS).servers)
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("poly(1)", [1.0, 1 / 2, 1 / 3, 1 / 9]),
        ("hinge(10, 4)", [1.0, 1.0, 1.0, 1 / 41]),
        ("hinge(0.5, 1)", [1.0, 1.0, 1 / 1.5, 1 / 4.5]),
    ],
)
def test_staleness_counts_as_the_papers_say(rule, expected):
    assert [weight(rule, tau) for tau in (0, 1, 2, 8)] == pytest.approx(expected)


def test_buffers_of_a_stale_model_stay_as_they_came():
    up = F.make("fedavg").Up(x=vector(5.0, buffers=[9.0]), run=LocalRun(1, 1, 0.0))
    moved = rebase(up, vector(1.0, buffers=[0.0]), vector(10.0, buffers=[2.0]), 3)
    assert float(moved.x.vector[0]) == 12.0  # 10 + (5 - 1) / sqrt(4)
    assert float(moved.x.buffers[0]) == 9.0
