"""Streams of random numbers that do not disturb each other."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fednet import seeds
from fednet.training.scratch import may_draw


def test_outside_a_scope_the_default_generators_are_as_they_were():
    def draws():
        return float(torch.rand(())), float(np.random.rand()), random.random()

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    alone = draws()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with seeds.scope(1, "dropout", 2, 3):
        inside = draws()
    assert draws() == alone
    with seeds.scope(1, "dropout", 2, 3):
        assert draws() == inside != alone
    with seeds.scope(1, "dropout", 2, 4):
        assert not set(draws()) & set(inside)


def test_threads_that_draw_at_once_draw_what_each_would_alone():
    def draws(client):
        with seeds.scope(7, "dropout", 1, client):
            return [float(torch.rand(())) for _ in range(2000)]

    alone = [draws(k) for k in range(4)]
    together = {}
    threads = [
        threading.Thread(target=lambda k=k: together.update({k: draws(k)})) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[k] for k in range(4)] == alone


class Noisy(nn.Module):
    """A user's own: what it draws cannot be seen from outside."""


class NoisyMemory(nn.LSTM):
    """A user's own too, whose dropout is 0."""


@pytest.mark.parametrize(
    ("part", "draws"),
    [
        (NoisyMemory(2, 2), True),
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.ReLU()), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.RReLU(), True),
        (nn.LSTM(2, 2), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (Noisy(), True),
    ],
)
def test_modules_that_may_draw_are_known(part, draws):
    assert may_draw(part) is draws
