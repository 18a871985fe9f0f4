"""A recurrent network over tokens: next character or word."""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import nn

from fednet.registry import model

Width = Annotated[int, msgspec.Meta(ge=1)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # each layer is an object, however narrow


class Recurrent(nn.Module):
    """embedding -> GRU -> head. Inputs (n, t) int64; features (n, t, d); outputs (n, classes, t),
    as torch orders the logits of sequences.
    """

    class_axis = 1  # said, since a window may be as long as there are classes

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.gru = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.gru(self.embedding(x))[0]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.features(x))
        return out.transpose(1, 2)


@model("gru")
def gru(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    embedding: Annotated[Width, "Numbers in a token's embedding. [numbers]"] = 8,
    hidden: Annotated[Width, "Units of each GRU layer. [units]"] = 256,
    layers: Annotated[Depth, "GRU layers, one on top of the other. [layers]"] = 1,
) -> nn.Module:
    """Embedding, GRU and a linear head over tokens that are also the classes. LEAF's network for
    Shakespeare has two LSTM layers of 256 over an embedding of 8.
    """
    return Recurrent(classes, embedding, hidden, layers)
