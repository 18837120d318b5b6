"""A small GPT over bytes: its gradients take about as long on a 1 Gb/s link as its backward takes on one core."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from undertow.plan import ParamSpec
from undertow.runtime.gradients.storage import spec_of

NUM_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Size of a model and of the input of one step on one rank."""

    num_layers: int = 6
    num_heads: int = 4
    width: int = 256
    context: int = 128  # bytes that the model sees
    batch: int = 6  # sequences per rank and step


class Block(nn.Module):
    """Attention, then two linear layers, each applied to the normalized input and added to it."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.expand_norm = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, context, width]
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.expand(self.expand_norm(x)))
        grown: torch.Tensor = x + self.contract(hidden)
        return grown

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        heads = self.query_key_value(x).view(batch, context, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, context, width of a head]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
        return out


class Gpt(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(NUM_BYTE_VALUES, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTE_VALUES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss over `text`, [batch, context + 1] byte values: each byte is predicted from the ones before it."""
        seen, following = text[:, :-1], text[:, 1:]
        positions = torch.arange(seen.shape[1], device=text.device)
        x = self.byte_embedding(seen) + self.position_embedding(positions)
        scores = self.head(self.norm(self.blocks(x)))  # [batch, context, byte value]
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def demo_parameters() -> tuple[ParamSpec, ...]:
    """Returns the planner's view of the demo's model."""
    return tuple(spec_of(name, param) for name, param in Gpt(GptShape()).named_parameters())
