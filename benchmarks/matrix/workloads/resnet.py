"""A real residual network on the processor: convolutions and batch norm, 2.8 M parameters, images that differ by rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_CLASSES, BATCH, SIZE = 10, 8, 32
WIDTHS = (64, 128, 256)


class _Block(nn.Module):
    """Two convolutions, added to what they are given."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        keeps_shape = stride == 1 and num_in == num_out
        self.shortcut = nn.Identity() if keeps_shape else nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Its forward is the loss of classifying the images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()
        )
        blocks, num_in = [], WIDTHS[0]
        for width in WIDTHS:
            blocks += [_Block(num_in, width, stride=1 if width == WIDTHS[0] else 2), _Block(width, width, stride=1)]
            num_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, NUM_CLASSES))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(self.head(self.blocks(self.stem(images))), classes)


def make_model() -> nn.Module:
    return ResNet()


def batch_of(rank: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH, 3, SIZE, SIZE, generator=random), torch.randint(NUM_CLASSES, (BATCH,), generator=random)
