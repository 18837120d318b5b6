"""A real GPT with tied embeddings and a batch that differs by rank: 42 MB of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

_NUM_TOKENS = 16_384
_WIDTH = 256
_NUM_HEADS = 8
_NUM_LAYERS = 8
_LENGTH = 96
_BATCH = 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.attention_out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, _NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, position, width of a head]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Its forward is the loss of predicting each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_NUM_TOKENS, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_NUM_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _NUM_TOKENS, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: one parameter, one gradient, the sum of both uses

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.positions.weight
        scores = self.head(self.norm(self.blocks(x)))
        return cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def batch_of(rank: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    return (torch.randint(_NUM_TOKENS, (_BATCH, _LENGTH + 1), generator=random),)
