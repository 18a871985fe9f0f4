from __future__ import annotations

import contextlib

import pytest
import torch

import fednet
from fednet.errors import ConfigError
from fednet.experiment import determinism
from tests.processes import lines

HERE = {"torch": "2.11.0", "processor": "A", "device": "cuda:0"}
BEGAN = {"type": "started", "versions": HERE}


def test_a_run_that_goes_on_elsewhere_is_told_what_is_another():
    assert determinism.changed_since([], HERE) is None
    assert determinism.changed_since([BEGAN], HERE) is None
    there = {**HERE, "torch": "2.14.1", "device": "cpu"}
    assert determinism.changed_since([BEGAN], there) == (
        "its bits may differ from here on, since it was resumed with torch 2.11.0, now 2.14.1, "
        "device cuda:0, now cpu."
    )
    # By where it was last.
    assert determinism.changed_since([BEGAN, {"type": "started", "versions": there}], there) is None


def test_a_resumed_run_has_on_record_that_another_torch_went_on(tmp_path, monkeypatch):
    config = {"name": "a", "rounds": 1, "report": False}
    first = fednet.run(config, in_process=True, out=tmp_path)
    mine = determinism.versions()
    monkeypatch.setattr(determinism, "versions", lambda: {**mine, "torch": "9.9"})
    fednet.run({**config, "rounds": 2}, in_process=True, out=tmp_path, resume=True)
    (said,) = [e["text"] for e in lines(first.dir / "events.jsonl") if e["type"] == "remark"]
    assert f"torch {mine['torch']}, now 9.9" in said


# -- in a session of a user's ----------------------------------------------------------------------
def switches():
    """What a session may have set of torch."""
    return {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "debug": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "products": torch.get_float32_matmul_precision(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "type": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "generator": torch.random.get_rng_state().tolist(),
    }


RUN = {
    "rounds": 1,
    "report": False,
    "model": "mlp",
    "data": {"dataset": "digits", "partition": "iid"},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The last round of a run where nothing was set."""
    out = tmp_path_factory.mktemp("expected")
    return fednet.run(RUN | {"name": "a"}, in_process=True, out=out).rounds[-1]


@pytest.fixture
def session(expected):
    """A session with switches of its own, which are put back."""
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(3)
    torch.set_deterministic_debug_mode(0)
    torch.backends.cudnn.benchmark = True
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_num_threads(before[0])
    torch.set_deterministic_debug_mode(before[1])
    torch.backends.cudnn.benchmark = False
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def changed(name):
    if name == "double":
        torch.set_default_dtype(torch.float64)
    if name == "medium":
        torch.set_float32_matmul_precision("medium")
    within = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "meta": torch.device("meta"),
    }.get(name, contextlib.nullcontext())
    with within:
        yield


@pytest.mark.parametrize(
    "name", ["plain", "autocast", "no_grad", "inference", "double", "medium", "meta"]
)
def test_a_run_in_a_session_has_the_same_bits_and_leaves_its_switches(
    tmp_path, expected, session, name
):
    with changed(name):
        before = switches()
        found = fednet.run(RUN | {"name": "b"}, in_process=True, out=tmp_path)
        assert switches() == before
    assert found.rounds[-1].model_sha256 == expected.model_sha256
    assert found.rounds[-1].test_loss == expected.test_loss


def test_a_run_that_fails_leaves_the_sessions_switches_too(tmp_path, session):
    before = switches()
    with pytest.raises(ConfigError):
        fednet.run({"task": "regression"}, in_process=True, out=tmp_path)
    assert switches() == before
