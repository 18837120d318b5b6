"""A real residual network, convolutions and batch norm, images that differ by rank: 2.8 M parameters, on CUDA 45 M."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    widths: tuple[int, ...]
    batch: int
    pixels: int  # of an edge


SIZES = {  # by type of device
    "cpu": Size(widths=(64, 128, 256), batch=8, pixels=32),
    "cuda": Size(widths=(256, 512, 1_024), batch=64, pixels=64),
}


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

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks, num_in = [], widths[0]
        for width in widths:
            blocks += [_Block(num_in, width, stride=1 if width == widths[0] else 2), _Block(width, width, stride=1)]
            num_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, NUM_CLASSES))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(self.head(self.blocks(self.stem(images))), classes)


def make_model(size: Size) -> nn.Module:
    return ResNet(size.widths)


def batch_of(rank: int, size: Size) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    images = torch.randn(size.batch, 3, size.pixels, size.pixels, generator=random)
    return images, torch.randint(NUM_CLASSES, (size.batch,), generator=random)
