"""The same bits in any placement: one process, one worker, four, and clients started one by one in
any order.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fednet
from fednet.algorithms.state import read_named
from tests.processes import Federation, in_process, lines

# Scaffold: what a client keeps is aggregated; fedper: part of the model is never sent.
METHODS = ["fedavg", "scaffold", "fedper"]
# `start: 4`: the round begins with one client missing, so that one can join in the middle.
SHAPE: dict[str, Any] = {
    "rounds": 4,
    "clients": 5,
    "participation": 0.6,
    "data": {"samples": 300, "classes": 4, "partition": {"scheme": "dirichlet", "alpha": 0.5}},
    "train": {"epochs": 2, "momentum": 0.9},
    "round": {"start": 4, "join": None},
}
SAME = (
    "round",
    "selected",
    "completed",
    "model_sha256",
    "tensor_sha256",
    "clients_sha256",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "correct_by_class",
    "client_accuracy",
)


def bits(run: Path) -> list[dict[str, Any]]:
    return [{key: record.get(key) for key in SAME} for record in lines(run / "rounds.jsonl")]


def payload(fed: Federation) -> Counter[tuple[Any, ...]]:
    """Return the useful payload bytes by round, client, direction, purpose and kind."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in fed.lines("wire.jsonl"):
        for kind, n in row["kinds"].items() if row["useful"] else ():
            found[row["round"], row["client"], row["direction"], row["purpose"], kind] += n
    return found


def personal(fed: Federation) -> list[tuple[Any, ...]]:
    """Return what each client scored, in every evaluation."""
    names = ("round", "client", "final", "accuracy_global", "accuracy_personal")
    return [tuple(row.get(name) for name in names) for row in fed.lines("clients.jsonl")]


def models(fed: Federation, personal: bool) -> dict[str, str]:
    """Return the digests of the model files, in whose headers the order of keys varies; personal:
    also of each client's own part.
    """
    found = [*fed.path.glob("*.safetensors"), *(fed.path.glob("personal/*") if personal else ())]
    return {str(f.relative_to(fed.path)): read_named(f)[1] for f in found}


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=pytest.mark.xdist_group(f"parity-{m}")) for m in METHODS],
)
def one(request, tmp_path_factory):
    """The run within one process."""
    fed = in_process(tmp_path_factory.mktemp("one"), algorithm=request.param, **SHAPE)
    assert len({r["model_sha256"] for r in fed.rounds()}) == 4  # each round moved the model
    return fed


def check(one: Federation, fed: Federation, at_home: bool) -> None:
    """at_home: the clients' states are with the run, so that their own parts are too."""
    assert bits(fed.path) == bits(one.path)
    assert personal(fed) == personal(one)
    assert payload(fed) == payload(one)
    ends = [made.summary()["model_sha256"] for made in (fed, one)]
    assert ends[0] == ends[1] == fed.rounds()[-1]["model_sha256"]
    assert models(fed, True) == models(one, at_home)


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_processes_give_the_bits_of_one_process(one, workers, tmp_path):
    with Federation(tmp_path, **one.mapping) as fed:
        fed.supervisor(workers)
        fed.finish()
    check(one, fed, at_home=True)


def test_clients_started_before_the_server_after_it_and_during_the_run_give_the_same_bits(
    one, tmp_path
):
    selected = [set(r["selected"]) for r in one.rounds()]
    late = min(set.union(*selected[1:]) - selected[0])  # needed, but not in round 1
    first, *rest = [c for c in range(5) if c != late][::-1]
    state = tmp_path / "state"
    with Federation(tmp_path, **one.mapping) as fed:
        fed.client(str(first), state=state)  # there is no server yet
        fed.server()
        file = fed.path / "server.json"
        fed.until(file.exists)
        address = json.loads(file.read_text())["address"]
        fed.client(",".join(map(str, rest)), server=address, state=state)  # several in one
        fed.until(fed.rounds)
        fed.client(str(late), state=state)
        fed.finish()
        assert [fed.status(process) for process in fed.all] == [0] * 4
    check(one, fed, at_home=False)  # a client's own part stays at its site


METHOD = """
from fednet.algorithms.fedavg import FedAvg
from fednet.registry import algorithm

@algorithm("careless")
class Careless(FedAvg):
    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        y.x.vector.mul_(0.5)
        y.x.vector.add_(down.x.vector)
        return client, self.Up(x=y.x, run=y.run)
"""


def test_a_method_that_writes_to_what_it_trained_gives_the_same_bits(tmp_path):
    """A large model is in one place at a worker, where several clients use it in turn."""
    own = tmp_path / "careless.py"
    own.write_text(METHOD)
    large = {**SHAPE, "algorithm": "careless", "model": {"hidden": [2200, 500]}}
    with Federation(tmp_path / "worker", **large) as fed:
        fed.supervisor(1, "--load", own)
        fed.finish()
    one = fednet.run(fed.mapping, load=[own], in_process=True, out=tmp_path / "one", quiet=True)
    assert bits(fed.path) == bits(one.dir)
    assert len(set(fed.hashes())) == 4
