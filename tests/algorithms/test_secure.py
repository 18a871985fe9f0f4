"""Methods whose replies are summed under masks: what comes of it, who is lost at which step, what
is refused, and what is kept to oneself.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fednet
from fednet import config as configuration
from fednet import registry, secagg
from fednet.algorithms.secure import Secure
from fednet.errors import ConfigError
from fednet.experiment import build, privacy
from fednet.secagg import primitives
from fednet.secagg.terms import STEPS
from tests.rooms import SMALL, lines, merged

SIX = {
    "clients": 6,
    "rounds": 1,
    "report": False,
    "model": {"name": "mlp", "hidden": [4]},
    "data": {
        "samples": 240,
        "shape": [1, 4, 4],
        "classes": 4,
        "partition": {"scheme": "dirichlet", "alpha": 0.5},
    },
    "train": {"batch_size": 16},
}
SUMMED = [n for n in registry.algorithm.names() if registry.algorithm.get(n).summed]
ROBUST = {"clip": 4.0, "bits": 24}
DELAY = {"round": 1, "client": 1, "kind": "delay", "seconds": 1}


def mapping(protocol: str | None = None, **sets: Any) -> dict[str, Any]:
    masked = {} if protocol is None else {"privacy": {"secagg": {"protocol": protocol, **ROBUST}}}
    return merged(merged(merged(SMALL, SIX), masked), sets)


def run(out: Path, name: str, protocol: str | None = None, **sets: Any) -> Any:
    return fednet.run({**mapping(protocol, **sets), "name": name}, in_process=True, out=out)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Two rounds of SIX in which nobody is lost."""
    return run(tmp_path_factory.mktemp("masked"), "masked", "secagg", rounds=2)


def away(a: Any, b: Any) -> float:
    one = a.model().state_dict()
    two = b.model().state_dict()
    return max(float((one[k] - two[k]).abs().max()) for k in one)


# Of the kinds of messages and of server steps one each.
@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "fedsmu", "scaffold", "fedadam", "fedper"])
def test_a_masked_round_is_that_of_the_method(tmp_path, name):
    alone = {"algorithm": {"name": name}, "model": {"buffers": "local"}}
    plain = run(tmp_path, "plain", **alone)
    masked = run(tmp_path, "masked", "secagg", **alone)
    moved = 1e-4 if name == "fedadam" else 2e-6  # a step of +-lr at 0
    assert away(plain, masked) < moved
    assert masked.rounds[0].completed == plain.rounds[0].completed


def test_clients_evaluate_in_the_step_in_which_they_train(tmp_path):
    asked = {"evaluate": {"clients": "auto"}}
    plain, masked = (run(tmp_path, str(p), p, **asked).rounds[0] for p in (None, "secagg"))
    assert set(plain.client_accuracy) == {"received", "personal"}
    assert masked.client_accuracy == plain.client_accuracy


LOST = [{"round": 1, "client": c, "kind": "drop_before_sending"} for c in (1, 4)]
SETS = {"rounds": 2, "faults": {"schedule": LOST}, "round": {"lost": {"closed": 0.2}}}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of the first protocol in which two clients are lost."""
    return run(tmp_path_factory.mktemp("one"), "one", "secagg", **SETS)


@pytest.mark.parametrize("protocol", secagg.PROTOCOLS)
def test_what_each_step_sends_is_what_was_foretold_and_both_protocols_give_one_sum(
    tmp_path, one, protocol
):
    made = one if protocol == "secagg" else run(tmp_path, "run", protocol, **SETS)
    assert made.rounds[0].completed == [0, 2, 3, 5]
    assert [r.model_sha256 for r in made.rounds] == [r.model_sha256 for r in one.rounds]
    for way, kinds in made.summary["bytes"]["predicted"].items():
        assert {k: v["difference"] for k, v in kinds.items()} == dict.fromkeys(kinds, 0), way
    ups = {
        k
        for row in lines(made.dir / "wire.jsonl")
        if row["direction"] == "up" and row["useful"]
        for k in row["kinds"]
    }
    assert ups == {*STEPS, "statistics"}


@pytest.mark.parametrize("exchange", range(5))
def test_a_client_lost_at_any_step_is_recovered_from(tmp_path, masked, exchange):
    fault = {"round": 1, "client": 2, "kind": "drop_before_training", "exchange": exchange}
    sets = {"round": {"lost": {"closed": 0.2}}, "rounds": 2, "faults": {"schedule": [fault]}}
    made = run(tmp_path, "lost", "secagg", **sets)
    counted = [0, 1, 3, 4, 5] if exchange <= 2 else [0, 1, 2, 3, 4, 5]
    assert made.rounds[0].completed == counted
    assert list(made.rounds[0].dropped) == ["2"]
    assert not made.rounds[0].void
    assert made.rounds[1].completed == [0, 1, 2, 3, 4, 5]
    if exchange > 2:  # its vector was in the sum, so nothing is missing of it
        assert made.rounds[1].model_sha256 == masked.rounds[1].model_sha256


def test_below_the_threshold_a_round_is_void_and_the_model_as_it_was(tmp_path):
    kind = {"round": 2, "kind": "drop_before_training", "exchange": 3}
    faults = [{**kind, "client": c} for c in (0, 1, 2)]
    sets = {"round": {"lost": {"closed": 0.2}}, "rounds": 3, "faults": {"schedule": faults}}
    made = run(tmp_path, "void", "secagg", **sets)
    assert [r.void for r in made.rounds] == [False, True, False]
    assert made.rounds[1].model_sha256 == made.rounds[0].model_sha256
    assert made.rounds[1].completed == []
    (warning,) = made.rounds[1].algorithm["warnings"]
    assert "3 of 6 clients answered the step 'consistency', and 4 are needed" in warning


def test_masked_counts_leave_no_statistics_and_weigh_the_same(tmp_path, masked):
    hidden = run(tmp_path, "hidden", "secagg", privacy={"secagg": {"counts": "masked"}})
    assert masked.rounds[0].model_sha256 == hidden.rounds[0].model_sha256
    sent = {k for row in lines(hidden.dir / "wire.jsonl") for k in row["kinds"]}
    assert "statistics" not in sent
    assert hidden.rounds[0].train_loss is None
    uniform = run(tmp_path, "uniform", "secagg", algorithm={"weighting": "uniform"})
    assert uniform.rounds[0].model_sha256 != masked.rounds[0].model_sha256


def test_a_client_says_how_many_entries_of_its_update_were_clipped(tmp_path):
    tight = {"privacy": {"secagg": {"clip": 0.01}}, "evaluate": {"clients": "auto"}}
    made = run(tmp_path, "tight", "secagg", **tight, rounds=1)
    start = build.build(configuration.from_mapping(mapping(rounds=1)), None).setting.initial
    rows = [row for row in lines(made.dir / "clients.jsonl") if not row.get("final")]
    assert len(rows) == 6
    for row in rows:
        local = load_file(made.dir / "personal" / f"client-{row['client']}.safetensors")
        beyond = sum(int(((local[n] - t).abs() > 0.01).sum()) for n, t in start.params.items())
        assert row["reported"]["secagg_clipped"] == beyond > 0


def test_the_page_names_the_methods_that_can():
    text = (Path(__file__).parents[2] / "docs" / "howto" / "secure-aggregation.md").read_text(
        encoding="utf-8"
    )
    said = re.search(r"It works for methods that aggregate by a weighted sum: ([^.]*)\.", text)
    assert said is not None
    assert re.findall(r"`(\w+)`", said[1]) == sorted(SUMMED)


# -- what is refused -------------------------------------------------------------------------------
def test_methods_whose_server_looks_at_single_replies_are_refused_with_the_reason():
    refused = [n for n in registry.algorithm.names() if n not in SUMMED]
    assert {"feddpc", "fedpdc", "fedexp", "feddc", "fedvarp"} <= set(refused)
    for name in refused:
        public = {"data": {"public": {"samples": 40}}}
        with pytest.raises(
            ConfigError, match=f"{name} needs more of each reply|buffers|schedule: async"
        ):
            configuration.from_mapping(mapping("secagg", algorithm={"name": name}, **public))


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ({"wire": {"up": {"state": ["topk(0.1)"]}}}, "no smaller form"),
        ({"wire": {"down": {"state": ["fp16"]}}}, "differences to what the server has"),
        ({"aggregation": {"rule": "median"}}, "looks at single replies"),
        ({"privacy": {"clip": 1.0, "noise": 1.0}}, "set client"),
        ({"checkpoint": {"every": 2}}, "summed twice"),
        ({"round": {"ask": 1.5}}, "other clients"),
        ({"train": {"pack": 2}}, "wait"),
        ({"faults": {"malicious": {"clients": 0.2, "attack": "alie"}}}, "single replies"),
        ({"privacy": {"secagg": {"threshold": 0.5}}}, "threshold"),
        ({"faults": {"schedule": [{**DELAY, "exchange": 5}]}}, "exchange"),
        ({"participation": 0.34}, "fewer than 3"),
        ({"model": {"name": "resnet18_bn_proj"}, "data": {"shape": [3, 32, 32]}}, "buffers: local"),
    ],
)
def test_what_cannot_go_with_a_sum_is_refused(sets, why):
    with pytest.raises(ConfigError, match=why):
        build.build(configuration.from_mapping(mapping("secagg", **sets)))


def test_without_the_package_the_configuration_says_what_brings_it(monkeypatch):
    monkeypatch.setattr(primitives, "_here", False)
    with pytest.raises(ConfigError, match="pip install cryptography"):
        configuration.from_mapping(mapping("secagg"))


# -- who lies under the masks ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("protocol", "step", "liars", "lie", "void", "why"),
    [
        ("secagg", "masked", (1,), np.random.default_rng(0).bytes, True, "no 6 clients"),
        ("secagg+", "masked", (1,), bytes, True, "no 6 clients"),
        ("secagg", "unmask", (1,), bytes, False, "out of order"),
        ("secagg+", "shares", (1, 3), bytes, False, "out of order"),
        ("secagg", "masked", (1, 3), lambda n: bytes(n - 1), False, "expected"),
    ],
)
def test_who_lies_costs_itself_or_the_round_and_no_run(
    tmp_path, monkeypatch, protocol, step, liars, lie, void, why
):
    """lie(n): what goes in the place of an answer of n bytes, in the first round."""

    def spoiled(answered):
        def answer(self, phase, *args):
            out = answered(self, phase, *args)
            host = args[-1]
            made = out[1] if isinstance(out, tuple) else out
            lies = self.steps[phase] == step and (host.round, host.client_id in liars) == (1, True)
            if lies and hasattr(made, "answer"):
                data = torch.frombuffer(bytearray(lie(len(made.answer))), dtype=torch.uint8)
                made = dataclasses.replace(made, answer=data)
            return (out[0], made) if isinstance(out, tuple) else made

        return answer

    for half in ("client_update", "mask_reply"):
        monkeypatch.setattr(Secure, half, spoiled(getattr(Secure, half)))
    first, second = run(tmp_path, "lied", protocol, rounds=2).rounds
    left = [c for c in range(6) if void or c not in liars]  # who was refused is not asked again
    assert (first.void, second.void, second.completed) == (void, False, left)
    said = first.algorithm.get("warnings", []) if void else list(first.dropped.values())
    assert len(said) == (1 if void else len(liars))
    assert all(why in text for text in said)


# -- what is kept to oneself -----------------------------------------------------------------------
def test_noise_that_entries_would_be_cut_off_with_is_refused():
    """It would be missing from the sum, and from what epsilon is reckoned for."""
    pytest.importorskip("dp_accounting")
    section = {"clip": 1.0, "noise": 3.0, "where": "client"}
    for clip, wrong in ((12.9, True), (13.0, False)):  # 1 + 8 * 3 / sqrt(4)
        sets = {"privacy": {**section, "secagg": {"clip": clip}}}
        built = build.build(configuration.from_mapping(mapping("secagg", **sets)))
        if wrong:
            with pytest.raises(ConfigError, match=r"privacy\.secagg\.clip: .* 13 at least"):
                privacy.check(built)
        else:
            privacy.check(built)


def test_the_sum_carries_the_noise_of_all_its_clients(tmp_path):
    pytest.importorskip("dp_accounting")
    section = {"clip": 1.0, "noise": 3.0, "where": "client"}
    made = run(tmp_path, "noise", "secagg", privacy={**section, "secagg": {"clip": 20.0}})
    spoilt = run(tmp_path, "calm", "secagg", privacy={"clip": 1.0, "secagg": {"clip": 20.0}})
    x = made.model().state_dict()
    y = spoilt.model().state_dict()
    off = torch.cat([(x[k] - y[k]).flatten() for k in x])
    # Six parts of variance 9 / 4, over six clients.
    assert float(off.std()) == pytest.approx(3.0 / math.sqrt(4 * 6), rel=0.25)
    assert made.summary["privacy"]["epsilon"] > 0
