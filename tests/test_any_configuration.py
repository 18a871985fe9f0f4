"""Whatever the configuration, it runs or is refused in a sentence, and a run that was interrupted
and goes on has the bits of one that was not.

    FEDNET_FUZZ_EXAMPLES=500 pytest -m long tests/test_any_configuration.py

Values are made from the keys' own declarations; what fails is reduced to a small example.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import fednet
from fednet import registry
from fednet.config.keys import DocumentedKey, keys
from fednet.errors import CannotGoOn, ConfigError, Stopped
from fednet.records import Round
from fednet.report.read import Run
from tests.conftest import forgotten

SAME = (
    "round",
    "selected",
    "completed",
    "model_sha256",
    "clients_sha256",
    "train_loss",
    "test_accuracy",
    "client_accuracy",
)
SMALL: dict[str, Any] = {
    "name": "any",
    "load": [str(Path(__file__).parents[1] / "configs" / "examples" / "selections.py")],
    "rounds": 3,
    "clients": 4,
    "data": {"dataset": "synthetic", "samples": 120, "shape": [1, 16, 16], "classes": 3},
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.05},
    "round": {"on_error": "stop"},
}
MODELS = ({"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [8], "norm": "batch"})
ONE_SAMPLE = "Expected more than 1 value per channel"  # BatchNorm, in a batch of one
DRAWN = {"lognormal": "lognormal(10, 1)", "uniform": "uniform(1, 9)"}
PARTS: dict[str, list[Any]] = {  # what a type alone does not say
    "availability.model": ["bernoulli", "markov"],
    "availability.trace": ["phones"],
    "devices.trace": ["phones"],
    "link.profile": ["3g", "choice(4g, wifi)"],
    "link.trace": ["wifi", "lte"],
    "aggregation.tolerate": [0.2],
    "evaluate.metrics": [["f1_macro", "balanced_accuracy"]],
    "model.adapters": [{"rank": 2}],
    "model.adapters.target": [["*"]],
    "round.gone": [{"0": 2}, {"1-2": 3}],
    "selection.name": ["oort", "power-of-choice"],
    "stop.metric": ["test_loss", "test_accuracy"],
    "train.class_weights": [[1.0, 2.0, 0.5]],
    "train.local_schedule": ["cosine", "exponential(0.9)", "step(2, 0.5)"],
    "train.per_client": [{"0-1": {"lr": 0.1, "batch_size": 8}}],
    "train.only": [["head*"]],
    "train.schedule": ["cosine", "exponential(0.9)", "step(2, 0.5)"],
    "wire.down": [{"state": ["delta", "topk(0.5)"]}, {"state": ["int8"]}],
    "wire.up": [{"state": ["topk(0.2)"]}, {"delta": ["ef", "int4"]}, {"state": ["powersgd(2)"]}],
}
# Of the whole run, of files that are not there, or of the time that it happens to take.
LEFT = (
    *("name", "load", "rounds", "clients", "task", "track", "algorithm", "security", "checkpoint"),
    *("model.name", "model.weights", "model.base", "model.sha256", "model.clients"),
    *("model.others", "model.adapters.weights"),
    *("data.root", "data.download", "data.dataset", "data.partition.scheme"),
    *("train.threads", "train.epochs", "round.on_error", "round.deadline", "stop.seconds"),
    *("faults.replay", "faults.schedule", "faults.random", "link.per_client"),
)


def values(key: DocumentedKey) -> st.SearchStrategy[Any]:
    """Values of a key, nearly all of which its type allows."""
    if key.path in PARTS:
        return st.sampled_from(PARTS[key.path])
    if key.type.startswith("one of "):
        return st.sampled_from(key.type.removeprefix("one of ").split(" or ")[0].split(", "))
    found: list[Any] = []
    for one in key.type.split(" or "):
        if one.startswith("a whole number"):
            found += [1, 2, 3]
        elif one.startswith("a float"):
            found += [0.1, 0.6] if "< 1" in key.type or "<= 1" in key.type else [0.5, 2.0, 20.0]
        elif one.partition("(")[0] in DRAWN:
            found.append(DRAWN[one.partition("(")[0]])
        elif "(" in one:
            raise AssertionError(f"PARTS must have values of {key.path}: its type is {one}")
        elif one in ("true", "false"):
            found.append(one == "true")
        elif one == "null":
            found.append(None)
        elif one.startswith(("a ", "text")):
            raise AssertionError(f"PARTS must have values of {key.path}: its type is {one}")
        else:
            found.append(one)
    return st.sampled_from(found)


def left_out(path: str) -> bool:
    return "[i]" in path or "IDS" in path or any(f"{path}.".startswith(f"{p}.") for p in LEFT)


CHOSEN = [key for key in keys() if not left_out(key.path)]


@st.composite
def configurations(draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
    """What is set over SMALL: a method, a model, and up to four keys."""
    method = draw(st.sampled_from(registry.algorithm.names()))
    fast = {"iterations": 2} if method in ("feddc", "feddcplus") else {}
    changed = {
        "algorithm": {"name": method, **fast},
        "model": draw(st.sampled_from(MODELS)),
        "seed": draw(st.integers(0, 1000)),
        "report": draw(st.integers(0, 7)) == 7,
    }
    if draw(st.booleans()):
        changed["link"] = {"clock": "virtual"}
    for key in draw(st.lists(st.sampled_from(CHOSEN), max_size=4, unique_by=lambda k: k.path)):
        changed[key.path] = draw(values(key))
    # In real time a run waits until its phones are free, and an asynchronous one uses replies in
    # the order in which they arrive, which differs from run to run.
    updates = method in ("fedasync", "fedbuff") or changed.get("schedule.mode", "sync") != "sync"
    if "availability.trace" in changed or updates:
        changed["link"] = {"clock": "virtual"}
    return changed


def bits(run: Run) -> list[dict[str, object]]:
    return [{name: getattr(record, name) for name in SAME} for record in run.rounds]


def stop(record: Round) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    with forgotten():
        yield


def test_values_can_be_drawn_for_every_key():
    for key in CHOSEN:
        values(key).validate()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_any_configuration_runs_or_is_refused_and_goes_on_with_the_same_bits(tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(SMALL))
    ran = []

    def run(changed: dict[str, Any], name: str, **more: Any) -> Run:
        return fednet.run(config, set=changed, in_process=True, out=tmp_path / name, **more)

    @settings(
        max_examples=int(os.environ.get("FEDNET_FUZZ_EXAMPLES", "30")),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed=configurations())
    def one(changed: dict[str, Any]) -> None:
        for name in ("whole", "cut"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        try:
            whole = run(changed, "whole")
        except (ConfigError, CannotGoOn) as refused:
            said = str(refused)
            event(f"refused: {said[:100]}")
            if "Error: " in said and ONE_SAMPLE not in said:
                raise  # a client's code failed
            return
        event("ran")
        ran.append(changed)
        with pytest.raises((Stopped, KeyboardInterrupt)):
            run(changed, "cut", callback=stop)
        resumed = run(changed, "cut", resume=True)
        assert bits(resumed) == bits(whole)
        assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]

    one()
    assert ran
