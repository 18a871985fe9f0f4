"""States as files: what was written is read again."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from safetensors import safe_open

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


class Numbers(State):
    best: float
    rest: tuple[float, ...]


def test_numbers_that_are_not_finite_are_kept_in_strict_json(tmp_path):
    kept = Numbers(best=math.inf, rest=(-math.inf, math.nan, 0.1))  # type: ignore[call-arg]
    write_state(tmp_path / "kept", kept)
    with safe_open(tmp_path / "kept", "pt") as file:
        msgspec.json.decode(file.metadata()["tree"])
    found = read_state(tmp_path / "kept", Numbers)
    assert (found.best, found.rest[0], found.rest[2]) == (math.inf, -math.inf, 0.1)
    assert math.isnan(found.rest[1])


def test_a_state_in_the_place_of_another_is_an_error_that_names_the_file(tmp_path):
    class Other(State):
        part: torch.Tensor

    write_state(tmp_path / "state-1", Other(part=torch.zeros(2)))
    with pytest.raises(StateError, match=r"state-1: .*does not fit its declaration"):
        read_state(tmp_path / "state-1", Kept)
