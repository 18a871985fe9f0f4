"""States as files: what was written is read again."""

from __future__ import annotations

import pytest
import torch

from fednet import State, Tensors
from fednet.algorithms.state import read_state, state_sha256, write_state
from fednet.errors import StateError


class Kept(State):
    c: Tensors
    g: Tensors
    part: torch.Tensor


def test_fields_that_share_memory_are_written(tmp_path):
    one = Tensors.of(torch.nn.Linear(3, 2))
    kept = Kept(c=one, g=one, part=one.vector[2:5])
    write_state(tmp_path / "kept", kept)
    assert state_sha256(read_state(tmp_path / "kept", Kept)) == state_sha256(kept)


def test_a_state_in_the_place_of_another_is_an_error_that_names_the_file(tmp_path):
    class Other(State):
        part: torch.Tensor

    write_state(tmp_path / "state-1", Other(part=torch.zeros(2)))
    with pytest.raises(StateError, match=r"state-1: .*does not fit its declaration"):
        read_state(tmp_path / "state-1", Kept)
