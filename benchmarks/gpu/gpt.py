"""A GPT as many write it: blocks of causal attention and a perceptron, one matrix for tokens in and out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "SMALL", "TINY", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT."""

    layers: int
    heads: int
    width: int
    tokens: int
    """Of the vocabulary."""
    context: int


SMALL = Shape(layers=12, heads=12, width=768, tokens=50_304, context=1024)
"""124 million parameters."""
TINY = Shape(layers=2, heads=2, width=32, tokens=64, context=16)
"""For what is to be the same and not fast."""


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.into = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.perceptron = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.into(self.norm_1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.drop(self.perceptron(self.norm_2(hidden)))


class GPT(nn.Module):
    """(batch, context) tokens -> the mean loss of predicting ``targets``."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.tokens, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape, dropout) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.tokens, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(tokens) + self.places(places)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())
