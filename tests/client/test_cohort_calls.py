"""What the clients of one pack cost beside their training, each of them: calls into Python and into
torch, counted as the difference between two cohorts, so that what is done once a round is left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

import fednet
from fednet.server import io
from fednet.server.watch import Watch
from fednet.training import packed

pytestmark = pytest.mark.long

# Clients in a round.
FEW = 8
MANY = 16
RUN = {
    "rounds": 4,
    "clients": MANY,
    "participation": None,
    "model": {"name": "mlp"},  # of more than 64 KiB: it is handed over as tensors
    "data": {"dataset": "synthetic", "samples": 30 * MANY, "shape": [1, 8, 8], "classes": 4},
    "train": {"pack": MANY, "batch_size": 16},
    "checkpoint": {"best": False},
    "report": False,
}
# The training, and what is written when a second is over.
ASIDE = (packed.Plan.train.__code__, Watch.check.__code__)


def counted(folder, cohort: int, evaluate: dict) -> Counter[str]:
    """Calls in rounds 2 and 3, but for those within `ASIDE`, by what they are."""
    found = Counter[str]()
    after: list[Counter[str]] = []
    within = 0  # calls since one of `ASIDE` began

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal within
        if event == "call":
            within += within > 0 or frame.f_code in ASIDE
            found["python"] += not within
        elif event == "return":
            within -= within > 0
        elif event == "c_call" and not within:
            owner = getattr(called, "__self__", None)
            of_torch = isinstance(owner, torch.Tensor) or "torch" in (called.__module__ or "")
            found["torch"] += of_torch or "torch" in type(owner).__module__

    sys.setprofile(profile)
    try:
        config = {**RUN, "clients_per_round": cohort, "evaluate": evaluate}
        keep = lambda record: after.append(found.copy())  # noqa: E731
        fednet.run(config, in_process=True, out=folder / str(cohort), callback=keep)
    finally:
        sys.setprofile(None)
    return after[2] - after[0]


@pytest.mark.parametrize(
    ("evaluate", "torch_calls", "python_calls"),
    [
        ({"every": 0, "clients": "none"}, 6, 285),
        # Two models are evaluated, and the client's own is kept on disk.
        ({}, 145, 790),
    ],
)
def test_a_client_of_a_pack_costs_few_calls_beside_its_training(
    tmp_path, monkeypatch, evaluate, torch_calls, python_calls
):
    for name in ("BOOK_S", "TICK_S", "STATUS_S"):  # a round is over before
        monkeypatch.setattr(io, name, 60.0)
    few, many = (counted(tmp_path, cohort, evaluate) for cohort in (FEW, MANY))
    each = {kind: (many[kind] - few[kind]) / (2 * (MANY - FEW)) for kind in ("python", "torch")}
    assert each["torch"] <= torch_calls
    assert each["python"] <= python_calls
