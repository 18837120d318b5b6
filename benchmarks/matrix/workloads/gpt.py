"""A real GPT with tied embeddings and a batch that differs by rank: 42 MB of gradients on a processor, 498 MB on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_tokens: int
    width: int
    num_heads: int
    num_layers: int
    length: int
    batch: int


SIZES = {  # by type of device; that of CUDA is GPT-2 small
    "cpu": Size(num_tokens=16_384, width=256, num_heads=8, num_layers=8, length=96, batch=3),
    "cuda": Size(num_tokens=50_257, width=768, num_heads=12, num_layers=12, length=1_024, batch=8),
}


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.query_key_value = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, position, width of a head]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Its forward is the loss of predicting each next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.num_tokens, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(_Block(size.width, size.num_heads) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_tokens, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: one parameter, one gradient, the sum of both uses

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.positions.weight
        scores = self.head(self.norm(self.blocks(x)))
        return cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def make_model(size: Size) -> nn.Module:
    return Gpt(size)


def batch_of(rank: int, size: Size) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    return (torch.randint(size.num_tokens, (size.batch, size.length + 1), generator=random),)
