"""A real GPT on the processor: 8 layers, tied embeddings, 42 MB of gradients, a batch that differs by rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

NUM_TOKENS, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, BATCH = 16_384, 256, 8, 8, 96, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.query_key_value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, position, width of a head]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Its forward is the loss of predicting each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: one parameter, one gradient, the sum of both uses

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.positions.weight
        scores = self.head(self.norm(self.blocks(x)))
        return cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def make_model() -> nn.Module:
    return Gpt()


def batch_of(rank: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    return (torch.randint(NUM_TOKENS, (BATCH, LENGTH + 1), generator=random),)
