"""The example of a Flower ClientApp: it runs unchanged, with what fednet has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fednet
from tests.conftest import forgotten
from tests.processes import Rig, lines

pytest.importorskip("flwr.supercore.task_identity", reason="needs flwr 1.42 or newer")
pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "configs" / "examples" / "flower"
COUNTING = """
from flwr.app import ConfigRecord
from quickstart.client_app import app as quickstart

def app(message, context):
    seen = context.state.get("seen", ConfigRecord({"tasks": 0}))["tasks"] + 1
    context.state["seen"] = ConfigRecord({"tasks": seen})
    reply = quickstart(message, context)
    reply.content["metrics"]["tasks"] = seen
    return reply
"""


@pytest.fixture(autouse=True)
def app(monkeypatch):
    """The app can be imported."""
    monkeypatch.syspath_prepend(EXAMPLE)
    with forgotten():
        yield


def importable() -> None:
    """The same in a process that is started."""
    sys.path.insert(0, str(EXAMPLE))


def test_a_client_app_trains_to_the_same_bits_in_one_process_and_in_two_workers(tmp_path):
    run = fednet.run(EXAMPLE / "flower.yaml", in_process=True, out=tmp_path)
    assert run.rounds[-1].test_accuracy > 0.6  # by chance: 1/4
    reported = [row["reported"] for row in lines(run.dir / "clients.jsonl") if row.get("reported")]
    assert all(set(numbers) == {"train_loss"} for numbers in reported)
    assert len(reported) == 2 * 5
    with Rig(tmp_path) as rig:
        words = ("--workers", 2, "--out", tmp_path, "--set", "name=workers")
        started = rig.start("main", "run", EXAMPLE / "flower.yaml", *words, before=importable)
        status, said = rig.ended(started)
        assert status == 0, said
    again = json.loads((tmp_path / "workers" / "summary.json").read_text())
    assert again["model_sha256"] == run.summary["model_sha256"]


def test_the_servers_half_may_be_another_and_see_only_the_sum_of_the_replies(tmp_path):
    text = (EXAMPLE / "flower.py").read_text()
    text = text.replace(
        "fednet.algorithms.fedavg import FedAvg", "fednet.algorithms.fedopt import FedAdam"
    )
    (tmp_path / "adam.py").write_text(text.replace("FedAvg", "FedAdam"))
    changes = {"load": [str(tmp_path / "adam.py")], "participation": 1, "rounds": 2}
    changes["privacy"] = {"secagg": {"protocol": "secagg"}}
    run = fednet.run(EXAMPLE / "flower.yaml", set=changes, in_process=True, out=tmp_path)
    assert len(run.rounds) == 2
    assert run.rounds[-1].completed == [0, 1, 2, 3]


def test_what_an_app_keeps_in_its_context_stays_at_the_client(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"algorithm.app": "counting:app", "participation": 1, "rounds": 3}
    run = fednet.run(EXAMPLE / "flower.yaml", set=changes, in_process=True, out=tmp_path)
    rows = [row for row in lines(run.dir / "clients.jsonl") if row.get("reported")]
    assert [row["reported"]["tasks"] for row in rows] == [r for r in (1, 2, 3) for _ in range(4)]
