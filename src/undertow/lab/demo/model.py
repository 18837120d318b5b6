"""A small GPT over bytes.

Its gradients take about as long on a 1 Gb/s link as its backward takes on one core.
"""

import torch
from torch import nn
from torch.nn import functional

_NUM_BYTE_VALUES = 256
CONTEXT = 128  # bytes that the model sees


class Gpt(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(
        self, *, num_layers: int = 6, num_heads: int = 4, width: int = 128, context: int = CONTEXT
    ) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(_NUM_BYTE_VALUES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _NUM_BYTE_VALUES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss over `text`, [batch, context + 1] byte values.

        Each byte is predicted from the ones before it.
        """
        seen, following = text[:, :-1], text[:, 1:]
        x = self.byte_embedding(seen) + self.position_embedding.weight[: seen.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1], device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores = self.head(self.norm(x))  # [batch, context, byte value]
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())
