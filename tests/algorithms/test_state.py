"""States as files: what was written is read again."""

from __future__ import annotations

import torch

from fednet import State, Tensors
from fednet.algorithms.state import read_state, state_sha256, write_state


class Kept(State):
    c: Tensors
    g: Tensors
    part: torch.Tensor


def test_fields_that_share_memory_are_written(tmp_path):
    one = Tensors.of(torch.nn.Linear(3, 2))
    kept = Kept(c=one, g=one, part=one.vector[2:5])
    write_state(tmp_path / "kept", kept)
    assert state_sha256(read_state(tmp_path / "kept", Kept)) == state_sha256(kept)
