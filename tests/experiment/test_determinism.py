from __future__ import annotations

import fednet
from fednet.experiment import determinism
from tests.processes import lines

HERE = {"torch": "2.11.0", "processor": "A", "device": "cuda:0"}
BEGAN = {"type": "started", "versions": HERE}


def test_a_run_that_goes_on_elsewhere_is_told_what_is_another():
    assert determinism.moved([], HERE) is None
    assert determinism.moved([{"type": "started"}, {"type": "joined"}], HERE) is None  # of before
    assert determinism.moved([BEGAN], HERE) is None
    there = {**HERE, "torch": "2.14.1", "device": "cpu"}
    assert determinism.moved([BEGAN], there) == (
        "it goes on elsewhere, so its bits may be others from here on: torch 2.11.0, now 2.14.1, "
        "device cuda:0, now cpu."
    )
    # By where it was last.
    assert determinism.moved([BEGAN, {"type": "started", "versions": there}], there) is None


def test_a_resumed_run_has_on_record_that_another_torch_went_on(tmp_path, monkeypatch):
    config = {"name": "a", "rounds": 1, "report": False}
    first = fednet.run(config, in_process=True, out=tmp_path)
    mine = determinism.versions()
    monkeypatch.setattr(determinism, "versions", lambda: {**mine, "torch": "9.9"})
    fednet.run({**config, "rounds": 2}, in_process=True, out=tmp_path, resume=True)
    (said,) = [e["text"] for e in lines(first.dir / "events.jsonl") if e["type"] == "remark"]
    assert f"torch {mine['torch']}, now 9.9" in said
