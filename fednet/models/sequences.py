"""Networks over tokens that predict the next one, a character or a word: GRU and transformer."""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from fednet.errors import ConfigError
from fednet.registry import model

Width = Annotated[int, msgspec.Meta(ge=1)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # each layer is an object, however narrow


class NextToken(nn.Module):
    """features -> head, for inputs (n, t) int64. features(x): (n, t, d); forward(x): (n, classes,
    t), the order in which torch's losses take the logits of sequences.
    """

    class_axis = 1  # needed if there are as many classes as positions
    head: nn.Linear

    def features(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)).transpose(1, 2)


class Recurrent(NextToken):
    """embedding -> GRU -> head."""

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.gru = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.embedding(x))[0]


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


class TransformerBlock(nn.Module):
    """Causal attention and a feed-forward network, each on its normalised input and added to it
    (pre-norm, as GPT-2). (n, t, d) to (n, t, d).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = (
            part(x).view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Decoder(NextToken):
    """embedding + positions -> blocks -> norm -> head."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        start = self.embedding(x) + self.positions[: x.shape[1]]
        return self.norm(self.blocks(start))


@model("transformer")
def transformer(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    width: Annotated[Width, "Numbers in a token's embedding; `heads` divides it. [numbers]"] = 128,
    heads: Annotated[Width, "Attention heads of each block. [heads]"] = 4,
    blocks: Annotated[Depth, "Blocks of attention and MLP. [blocks]"] = 4,
) -> nn.Module:
    """GPT-2's blocks over tokens that are also the classes, learned positions, a linear head."""
    if width % heads or len(input_shape) != 1:
        raise ConfigError(
            f"model transformer: width {width}, heads {heads}, inputs of shape {input_shape}; "
            f"expected a width that heads divides, and inputs of one axis, the tokens."
        )
    return Decoder(classes, input_shape[0], width, heads, blocks)
