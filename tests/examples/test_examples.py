"""The examples under configs/examples/ do what the README says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fednet
from fednet import loading, registry
from fednet.cli.main import main
from tests.algorithms.harness import Desk, serve, vector
from tests.conftest import forgotten

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "configs" / "examples"


@pytest.fixture(scope="module", autouse=True)
def parts():
    """The example's parts, until the last test of this file."""
    with forgotten():
        loading.load_parts([EXAMPLES / "sensors.py"])
        yield


def test_own_parts_pass_the_contract_suite(capsys):
    assert main(["check", str(EXAMPLES / "sensors.py")]) == 0
    said = capsys.readouterr().out
    for part in ("algorithm 'servermomentum'", "partitioner 'favourite'", "dataset 'sensors'"):
        assert part in said


def test_server_momentum_is_that_of_the_paper():
    method = registry.algorithm.get("servermomentum")
    mine = method(method.Config(beta=0.5), clients=1)
    server = mine.init_server(vector(0.0))
    # v <- v / 2 + mean - w, w <- w + v
    for mean, v, x in ((1.0, 1.0, 1.0), (2.0, 1.5, 2.5), (2.5, 0.75, 3.25)):
        up = mine.Up(x=vector(mean), run=fednet.LocalRun(n=3, steps=1, loss=0.0))
        server = serve(mine, server, {0: up}, Desk(1))
        assert (float(server.v.vector), float(server.x.vector)) == (v, x)


def test_each_class_has_a_home():
    y = np.arange(400) % 4
    made = registry.partitioner.get("favourite")(y, 4, np.random.default_rng(0), share=1.0)
    assert sorted(len(set(y[part])) for part in made) == [1, 1, 1, 1]
    assert sum(len(part) for part in made) == 400


@pytest.mark.parametrize(("file", "clients"), [("sensors.yaml", 6), ("people.yaml", 12)])
def test_example_runs_and_learns(file, clients, tmp_path):
    run = fednet.run(EXAMPLES / file, set={"rounds": 6}, in_process=True, out=tmp_path)
    assert run.config["clients"] == clients
    accuracy = run.rounds[-1].test_accuracy
    assert accuracy > 0.35  # by chance: 1/6
    assert (run.dir / "code" / "sensors.py").read_bytes() == (EXAMPLES / "sensors.py").read_bytes()
    # Needs nothing but the run's directory.
    again = fednet.run(run.dir / "config.yaml", in_process=True, out=tmp_path / "again")
    assert again.summary["model_sha256"] == run.summary["model_sha256"]


@pytest.mark.long
def test_a_thousand_phones_come_and_go_for_some_seconds(tmp_path):
    run = fednet.run(
        EXAMPLES / "phones.yaml", set={"stop": {"seconds": 20}}, in_process=True, out=tmp_path
    )
    assert run.summary.stopped is not None
    assert run.summary.seconds_virtual >= 20
    assert all(50 < r.here < 250 for r in run.rounds)  # of 1,000
    assert all(len(r.selected) == 26 and len(r.completed) <= 20 for r in run.rounds)
