"""The numbers of a round that TensorBoard gets."""

from __future__ import annotations

import sys

import pytest

from fednet.errors import ConfigError
from fednet.records import Round
from fednet.server.tracking import TensorBoard, numbers


def test_numbers_have_the_names_of_their_fields():
    record = Round(
        round=3,
        train_loss=0.5,
        test_accuracy=0.75,
        bytes_up=10,
        client_accuracy={"personal": 0.25},
        algorithm={"epsilon": 1.5, "warning": "text"},
    )
    assert numbers(record) == {
        "train_loss": 0.5,
        "test_accuracy": 0.75,
        "bytes_up": 10,
        "bytes_down": 0,
        "client_accuracy/personal": 0.25,
        "algorithm/epsilon": 1.5,
    }


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="track: tensorboard needs the package tensorboard"):
        TensorBoard(tmp_path)
