"""A real residual network, convolutions and batch norm, images that differ by rank: 2.8 M parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_NUM_CLASSES = 10
_WIDTHS = (64, 128, 256)
_BATCH = 8
_PIXELS = 32  # of an edge


class _Block(nn.Module):
    """Two convolutions, added to their input."""

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
            nn.Conv2d(3, _WIDTHS[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU()
        )
        blocks = []
        num_in = _WIDTHS[0]
        for width in _WIDTHS:
            blocks += [_Block(num_in, width, stride=1 if width == _WIDTHS[0] else 2), _Block(width, width, stride=1)]
            num_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, _NUM_CLASSES))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(self.head(self.blocks(self.stem(images))), classes)


def batch_of(rank: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(rank)
    images = torch.randn(_BATCH, 3, _PIXELS, _PIXELS, generator=random)
    return images, torch.randint(_NUM_CLASSES, (_BATCH,), generator=random)
