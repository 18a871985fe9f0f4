from __future__ import annotations

import contextlib

import torch

import fednet
from fednet.experiment import determinism
from tests.rooms import SMALL, lines, merged, run

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
    run(tmp_path, rounds=1)
    mine = determinism.versions()
    monkeypatch.setattr(determinism, "versions", lambda: {**mine, "torch": "9.9"})
    directory = run(tmp_path, rounds=2, resume=True)
    (said,) = [e["text"] for e in lines(directory / "events.jsonl") if e["type"] == "remark"]
    assert f"torch {mine['torch']}, now 9.9" in said


@contextlib.contextmanager
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_a_run_in_a_session_has_the_same_bits_whatever_is_set_there(tmp_path):
    modes = [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, float64]
    modes.append(lambda: torch.device("meta"))
    plain = merged(SMALL, {"report": False})
    found = set()
    for k, mode in enumerate([contextlib.nullcontext, *modes]):
        with mode():
            done = fednet.run(plain, in_process=True, out=tmp_path / f"{k}")
        found.add((done.rounds[-1].model_sha256, done.rounds[-1].test_loss))
    assert len(found) == 1
