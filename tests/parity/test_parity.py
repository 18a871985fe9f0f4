"""The same bits whatever the placement: one process, one worker, four, and clients started one by
one in any order.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes, lines, until

# Scaffold: what a client keeps is folded; fedper: part of the model never crosses.
METHODS = ["fedavg", "scaffold", "fedper"]
CLIENTS = 5

# `start: 4`: the round begins with one client missing, so that one can join in the middle of the
# run.
CONFIG = """
name: same
rounds: 4
clients: 5
participation: 0.6
algorithm: {{name: {method}}}
model: {{name: mlp, hidden: [16]}}
data:
  {{dataset: synthetic, samples: 300, shape: [1, 8, 8], classes: 4,
    partition: {{scheme: dirichlet, alpha: 0.5}}}}
train: {{epochs: 2, batch_size: 16, lr: 0.05, momentum: 0.9}}
round: {{start: 4, join: null}}
"""
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


def rounds(run: Path) -> list[dict[str, Any]]:
    return lines(run / "rounds.jsonl")


def bits(run: Path) -> list[dict[str, Any]]:
    return [{key: record.get(key) for key in SAME} for record in rounds(run)]


def payload(run: Path) -> Counter[tuple[Any, ...]]:
    """Useful payload bytes by round, client, direction, purpose and kind."""
    found: Counter[tuple[Any, ...]] = Counter()
    for line in (run / "wire.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["useful"]:
            for kind, n in row["kinds"].items():
                found[row["round"], row["client"], row["direction"], row["purpose"], kind] += n
    return found


def personal(run: Path) -> list[tuple[Any, ...]]:
    """What each client was judged to score, in every evaluation."""
    rows = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
    return [
        (r["round"], r["client"], r.get("final"), r["accuracy_global"], r["accuracy_personal"])
        for r in rows
    ]


def files(run: Path) -> dict[str, bytes]:
    """What is left of a run for use elsewhere: the models, and each client's own part where its
    state lies here too.
    """
    return {
        str(f.relative_to(run)): f.read_bytes()
        for f in [*run.glob("*.safetensors"), *run.glob("personal/*")]
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=pytest.mark.xdist_group(f"parity-{m}")) for m in METHODS],
)
def reference(request, tmp_path_factory) -> tuple[Path, Path]:
    """(configuration, the run of it within one process)."""
    folder = tmp_path_factory.mktemp(request.param)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(method=request.param))
    with Processes(folder) as processes:
        status, said = processes.run("main", "run", config, "--in-process", "--out", folder)
    assert status == 0, said
    run = folder / "same"
    assert len({r["model_sha256"] for r in rounds(run)}) == 4  # each round moved the model
    return config, run


def check(reference: Path, run: Path, at_home: bool) -> None:
    assert bits(run) == bits(reference)
    assert personal(run) == personal(reference)
    assert payload(run) == payload(reference)
    ends = [json.loads((r / "summary.json").read_text()) for r in (run, reference)]
    assert ends[0]["model_sha256"] == ends[1]["model_sha256"] == rounds(run)[-1]["model_sha256"]
    there = files(reference)
    assert files(run) == {
        name: content
        for name, content in there.items()
        if at_home or not name.startswith("personal/")
    }


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_processes_give_the_bits_of_one_process(reference, workers, tmp_path):
    config, one = reference
    with Processes(tmp_path) as processes:
        status, said = processes.run(
            "main", "run", config, "--workers", str(workers), "--out", tmp_path
        )
    assert status == 0, said
    check(one, tmp_path / "same", at_home=True)


METHOD = """
from fednet.algorithms.fedavg import FedAvg
from fednet.registry import algorithm

@algorithm("careless")
class Careless(FedAvg):
    def client_update(self, phase, client, down, host):
        down.x.vector.mul_(0.5)
        y = host.train(down.x)
        down.x.vector.copy_(y.x.vector)
        y.x.vector.add_(down.x.vector)
        return client, self.Up(x=y.x, run=y.run)
"""


@pytest.mark.long
def test_a_method_that_writes_to_what_came_and_to_what_it_trained_gives_the_same_bits(tmp_path):
    """A large model lies in one place at a worker, where several clients use it in turn."""
    own = tmp_path / "careless.py"
    own.write_text(METHOD)
    config = tmp_path / "config.yaml"
    config.write_text(
        CONFIG.format(method="careless").replace("hidden: [16]", "hidden: [2200, 500]")
    )
    found = []
    for words in (["--in-process"], ["--workers", 1]):
        out = tmp_path / str(len(found))
        with Processes(tmp_path) as processes:
            status, said = processes.run("main", "run", config, "--load", own, *words, "--out", out)
        assert status == 0, said
        found.append(bits(out / "same"))
    assert found[0] == found[1]
    assert len({r["model_sha256"] for r in found[0]}) == 4


def test_clients_started_before_the_server_after_it_and_during_the_run_give_the_same_bits(
    reference, tmp_path
):
    config, one = reference
    selected = [set(r["selected"]) for r in rounds(one)]
    late = min(set.union(*selected[1:]) - selected[0])  # needed, but not in round 1
    first, *rest = [c for c in range(CLIENTS) if c != late][::-1]
    run, state = tmp_path / "same", tmp_path / "state"
    with Processes(tmp_path) as processes:
        # There is no server yet.
        clients = [processes.start("client", "--id", str(first), "--run", run, "--state", state)]
        server = processes.start("server", config, "--bind", "tcp://127.0.0.1:0", "--out", tmp_path)
        file = run / "server.json"
        until(file.exists, "server.json", server)
        address = json.loads(file.read_text())["address"]
        ids = ",".join(map(str, rest))
        # Several in one.
        clients.append(
            processes.start("client", "--id", ids, "--server", address, "--state", state)
        )
        until(lambda: rounds(run), "round 1", server, *clients)
        clients.append(processes.start("client", "--id", str(late), "--run", run, "--state", state))
        for process in (server, *clients):
            status, said = processes.ended(process)
            assert status == 0, said
    check(one, run, at_home=False)  # a client's own part stays at its site
