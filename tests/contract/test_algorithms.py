"""What every registered method must do, whoever wrote it."""

from __future__ import annotations

import dataclasses
import functools
import re

import msgspec
import numpy as np
import pytest
import torch

from fednet import registry
from fednet.algorithms.state import State, fingerprints, state_sha256
from fednet.tensors import Tensors
from fednet.wire.payload import KINDS, LocalRun, Samples, tensors_of
from tests.algorithms.harness import Federation, images

NAMES = registry.algorithm.names()
CARRIER = {
    "tensors": Tensors,
    "parameters": Tensors,
    "float": float,
    "int": int,
    "run": LocalRun,
    "samples": Samples,
    "array": torch.Tensor,
}
FAST = {"feddc": {"iterations": 2, "ft_epochs": 1}, "feddcplus": {"iterations": 2, "ft_epochs": 1}}
BATCH_NORM = {"name": "vgg11", "norm": "batch", "width": 8}


def options(name):
    """Settings that make a slow method quick; what a method does not know is left out."""
    known = {f.encode_name for f in msgspec.structs.fields(registry.algorithm.get(name).Config)}
    return {k: v for k, v in FAST.get(name, {}).items() if k in known}


def small(**changes):
    """Three clients, of 20, 1 and 19 samples; client 2 lacks class 0."""
    x, y = images(60)
    lacking = np.flatnonzero(y.numpy() != 0)[:19]
    rest = np.setdiff1d(np.arange(60), lacking)
    parts = [rest[:20], rest[20:21], lacking]
    return Federation(**{"clients": 3, "data": (x, y), "parts": parts, "rounds": 2, **changes})


@functools.cache
def one_round(name):
    """Return a run of one round, for tests that only look at it."""
    return small(rounds=1).run(name, **options(name))


def finite(state):
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if isinstance(value, Tensors):
            assert value.is_finite(), f.name


@pytest.mark.parametrize("name", NAMES)
def test_is_described(name):
    kind = registry.algorithm.get(name)
    assert kind.paper
    assert kind.__doc__
    assert msgspec.convert({}, kind.Config) == kind.Config()  # every option has a default
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"no_such_option": 1}, kind.Config)


@pytest.mark.parametrize("name", NAMES)
def test_runs_with_all_kinds_of_participation(name):
    # 2 is new in round 2
    run = small(rounds=4).run(name, cohorts=[[0], [0, 2], [1], [0, 1, 2]], **options(name))
    states = [*run.servers, *run.clients.values()]
    before = [state_sha256(state) for state in states]
    crossed = [
        tensors_of(payload) for trip in run.trips for both in trip.values() for payload in both
    ]
    crossed.append(run.federation.initial)
    as_sent = [fingerprints(each) for each in crossed]
    for state in states:
        assert isinstance(state, State)
        finite(state)
    judged = run.algorithm.global_model(run.servers[-1])
    assert (judged is not None) == run.algorithm.has_global
    if judged is not None:
        assert run.io.evaluate(judged).n == 40
    run.round([0, 1, 2])
    assert [state_sha256(state) for state in states] == before, "a later round changed a state"
    assert [fingerprints(each) for each in crossed] == as_sent, "it changed what had crossed"


@pytest.mark.parametrize("name", NAMES)
def test_every_client_can_be_evaluated_even_one_never_selected(name):
    run = small().run(name, cohorts=[[0], [0]], **options(name))
    for client in (0, 2):
        host = run.site(client)
        state = run.clients.get(client, run.algorithm.init_client(run.federation.initial))
        local = run.locals.get(client, run.federation.initial)
        assert host.evaluate(run.algorithm.personal_model(state, local, host)).n == host.n


@pytest.mark.parametrize("name", NAMES)
def test_what_crosses_is_as_declared_and_as_listed(name):
    run = one_round(name)
    algorithm = run.algorithm
    shared = run.setting.shared
    crossed = [0, 0]  # parameters down and up, of one client
    for exchange, trip in zip(algorithm.exchanges, run.trips):
        assert exchange.up.fields["run"].form == "run"
        for client, sent in trip.items():
            for way, (payload, kind) in enumerate(zip(sent, (exchange.down, exchange.up))):
                assert isinstance(payload, kind)
                for field, form in kind.fields.items():
                    value = getattr(payload, field)
                    assert form.kind in KINDS
                    assert isinstance(value, CARRIER[form.form])
                    if form.form in ("tensors", "parameters"):
                        whole = form.form == "tensors"
                        assert value.layout == (shared if whole else shared.parameters)
                        crossed[way] += value.vector.numel() if client == 0 else 0
        # A broadcast that is alike for all is one object.
        downs = [down for down, _ in trip.values()]
        for field in exchange.down.fields:
            values = [getattr(down, field) for down in downs]
            if isinstance(values[0], Tensors):
                assert len({value.vector.data_ptr() for value in values}) == 1, field
    for count, listed in zip(crossed, algorithm.sends()):
        found = re.match(r"(\d*)\|", listed)  # what is sent once stands behind
        assert count == (int(found[1] or 1) if found else 0) * shared.sizes[0]


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_after_every_step_the_bits_are_the_same(name):
    cohorts = [[0, 2], [1, 2], [0, 1]]
    found = []
    for saved in (False, True):
        run = small(rounds=3).run(name, cohorts=cohorts, saved=saved, **options(name))
        clients = {c: state_sha256(s) for c, s in run.clients.items()}
        found.append(([state_sha256(s) for s in run.servers], clients))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_samples_count_in_its_weight_where_they_count_in_what_it_makes_of_replies(name):
    """By `weight` losses are averaged, and shares of clients bounded (`round.max_share`)."""
    run = one_round(name)
    algorithm = run.algorithm
    server = run.servers[0]
    ups = run.trips[0]
    if not dataclasses.fields(algorithm.Accumulator) or name in ("fedpdc", "fedproto"):
        return  # nothing is folded; only where no model is right; by counts of each class
    made = []
    for n in (20, 5):
        run.io.begin(1, 0, sorted(ups))
        fold = algorithm.init_accumulator(server, 0)
        for client, (_, up) in sorted(ups.items()):
            counted = dataclasses.replace(up, run=dataclasses.replace(up.run, n=n if client else 1))
            fold = algorithm.accumulate(fold, server, client, counted, run.io)
        made.append(state_sha256(algorithm.server_update(fold, server, sorted(ups), run.io)))
    few, many = (algorithm.weight(LocalRun(n, 1, 0.0)) for n in (5, 20))
    assert (few == many) == (made[0] == made[1])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_works_with_batch_normalisation(name):
    data = images(24, shape=(3, 32, 32))
    parts = [range(12), range(12, 24)]
    f = Federation(clients=2, model=BATCH_NORM, data=data, parts=parts, rounds=2, public=10)
    run = f.run(name, **options(name))
    finite(run.servers[-1])
    before, after = (run.algorithm.shared_model(s) for s in (run.servers[0], run.servers[-1]))
    averaged = after is not None and name not in ("fedsgd", "local")  # of a trained model
    if averaged and after.buffers.numel():
        assert not torch.equal(after.buffers, before.buffers)
