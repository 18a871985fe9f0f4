from __future__ import annotations

import pytest
import torch

import fednet
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
MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
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


@pytest.mark.parametrize("name", MODES)
def test_a_run_in_a_session_has_the_same_bits_in_every_mode(tmp_path, expected, name):
    with MODES[name]():
        found = fednet.run(RUN | {"name": "b"}, in_process=True, out=tmp_path)
    assert found.rounds[-1].model_sha256 == expected.model_sha256
    assert found.rounds[-1].test_loss == expected.test_loss


def test_another_default_type_changes_no_bits_and_is_the_sessions_again(tmp_path, expected):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = fednet.run(RUN | {"name": "b"}, in_process=True, out=tmp_path)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert found.rounds[-1].model_sha256 == expected.model_sha256
