"""Clients that never train (`evaluate.held_out`): they only evaluate, and are recorded apart."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fednet import world
from fednet.errors import ConfigError
from fednet.experiment import build, privacy
from fednet.experiment.selection import cohort
from fednet.robust.attacks import malicious
from fednet.server.client_evaluation import evaluated_clients
from tests.rooms import hashes, lines, merged, processes, run, small, summary

# ceil(0.3 * 5) = 2 clients are held out, and the other three train in each round.
HELD_OUT = {
    "rounds": 2,
    "clients": 5,
    "participation": 1.0,
    "seed": 1,
    "data": {"samples": 300},
    "evaluate": {"clients": "all", "held_out": 0.3, "finetune": True},
}


def counted(module, site):
    x, y = site.test
    with torch.no_grad():
        return int((module.eval()(x).argmax(1) == y).sum()), len(y)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "scaffold", "local"])
def test_held_out_clients_never_train_and_are_evaluated_apart(tmp_path, method):
    changes = merged(HELD_OUT, {"algorithm": {"name": method}})
    directory = run(tmp_path, **changes)
    experiment = build.build(small(**changes), None)
    left_out = world.held_out(experiment.config)
    assert len(left_out) == 2
    rounds = lines(directory / "rounds.jsonl")
    clients = lines(directory / "clients.jsonl")
    assert all(r["completed"] == sorted({*range(5)} - left_out) for r in rounds)
    assert {r["client"] for r in clients if r.get("held_out")} == left_out
    # The newest shared model, or shared part beside initial values, on their own tests.
    module = experiment.setting.module()
    named = experiment.state_dict(experiment.setting.initial)
    if method != "local":
        named |= load_file(directory / "model.safetensors")
    module.load_state_dict(named)
    counts = [counted(module, experiment.federation.site(c)) for c in sorted(left_out)]
    right = sum(r for r, _ in counts) / sum(n for _, n in counts)
    personalised = experiment.algorithm.personalised
    expected = {"personal" if personalised else "global": right}
    assert rounds[-1]["held_out"] == expected
    assert rounds[-1]["own_model"] == ("personal" if personalised else "local")
    finals = [r for r in clients if r.get("final")]
    apart, others = (
        [r for r in finals if bool(r.get("held_out")) == wanted] for wanted in (True, False)
    )

    def pooled(rows, name):
        return sum(r[f"correct_{name}"] for r in rows) / sum(r[f"tested_{name}"] for r in rows)

    found = summary(directory)
    assert found["held_out"].items() >= expected.items()
    assert found["held_out"]["finetuned"] == pooled(apart, "finetuned")
    assert found["personal"]["personal"] == pooled(others, "personal")
    assert rounds[-1]["client_accuracy"]["personal"] == pooled(others, "personal")
    assert (found["judged"]["clients"], found["judged"]["of"]) == (3, 3)
    assert found["judged"]["never_took_part"] == 0
    # In processes, and where a run is continued, the same.
    if method == "fedper":
        other = processes(tmp_path / "processes", **changes)
        resumed = tmp_path / "resumed"
        run(resumed, **merged(changes, {"rounds": 1}))
        resumed = run(resumed, resume=True, **changes)
        for again in other, resumed:
            assert hashes(again) == hashes(directory)
            assert [r["held_out"] for r in lines(again / "rounds.jsonl")] == [
                r["held_out"] for r in rounds
            ]
            assert summary(again)["held_out"] == found["held_out"]


def test_a_resume_may_not_hold_out_other_clients(tmp_path):
    run(tmp_path, **merged(HELD_OUT, {"rounds": 1}))
    with pytest.raises(ConfigError, match=r"^--resume: evaluate.held_out differs from"):
        run(tmp_path, resume=True, **merged(HELD_OUT, {"evaluate": {"held_out": 0.5}}))


def test_shares_of_clients_and_n_are_of_those_that_may_train():
    config = small(
        clients=10,
        participation=0.5,
        evaluate={"clients": "auto", "held_out": 0.35, "most": 3},
        faults={"malicious": {"clients": 0.5, "attack": "sign_flip"}},
        privacy={"clip": 1.0, "noise": 1.0},
    )
    left_out = world.held_out(config)
    assert (len(left_out), config.training_clients, config.cohort_size) == (4, 6, 3)
    assert all(len(cohort(config, t)) == 3 for t in range(1, 20))
    assert set().union(*(cohort(config, t) for t in range(1, 20))) == {*range(10)} - left_out
    assert len(malicious(config)) == 3
    assert not malicious(config) & left_out
    # evaluate.most: three of all, of those that are held out too
    nobody_held_out = small(clients=10, evaluate={"clients": "auto", "most": 3})
    asked = evaluated_clients(config)
    assert len(asked) == 3
    assert asked == evaluated_clients(nobody_held_out)
    enough = small(clients=10, evaluate={"clients": "auto", "held_out": 0.35, "most": 10})
    assert evaluated_clients(enough) == list(range(10))
    # The privacy of a sample of 3 of 6, not of 10.
    pytest.importorskip("dp_accounting")
    apart = privacy.Accountant(config).spent(1)["epsilon_sampled"]
    six = small(clients=6, participation=0.5, privacy={"clip": 1.0, "noise": 1.0})
    assert apart == pytest.approx(privacy.Accountant(six).spent(1)["epsilon_sampled"])


def test_a_round_does_not_begin_for_held_out_clients_alone(tmp_path):
    trace = tmp_path / "trace.csv"
    config = small(clients=2, evaluate={"clients": "auto", "held_out": 0.5}, seed=1)
    (apart,) = world.held_out(config)
    other = 1 - apart
    rows = sorted([f"{apart},0,100", f"{other},40,50"])
    trace.write_text("client,from,to\n" + "\n".join(rows) + "\n")
    present = world.of(config.replace(availability=type(config.availability)(trace=str(trace))))
    assert present.here(10) == [False, False]
    assert present.when(1, 10) == 40
