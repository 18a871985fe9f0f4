from __future__ import annotations

from fednet.experiment import determinism
from tests.rooms import lines, run

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
