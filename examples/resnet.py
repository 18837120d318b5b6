"""A residual network with batch norm, evaluated on one rank.

Run with:

    torchrun --nproc-per-node=2 examples/resnet.py

Each rank updates the running statistics of its batch norms with its own images. Before the first
forward of every step, all ranks take the statistics of rank 0. In evaluation and under `no_grad`
nothing is sent, so one rank may evaluate alone.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from undertow import DistributedDataParallel

NUM_CLASSES = 4
NUM_STEPS = 30


class Block(nn.Module):
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
        self.shortcut = (
            nn.Identity()
            if keeps_shape
            else nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, stride=1), Block(16, 32, stride=2), Block(32, 64, stride=2)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES)
    )


def stripes(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy images of stripes, [count, 1, 16, 16], and which of four directions they
    have."""
    classes = torch.randint(NUM_CLASSES, (count,), generator=random)
    angles = (classes * torch.pi / NUM_CLASSES).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    shifts = 6 * torch.rand(count, 1, 1, generator=random)
    images = torch.sin(rows * torch.cos(angles) + columns * torch.sin(angles) + shifts)
    return (images + torch.randn(images.shape, generator=random)).unsqueeze(1), classes


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(resnet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank sees its own images
    for step in range(1, NUM_STEPS + 1):
        images, classes = stripes(32, random)
        loss = cross_entropy(model(images.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    if dist.get_rank() == 0:  # the other ranks have continued already
        model.eval()
        images, classes = stripes(256, torch.Generator().manual_seed(1000))
        with torch.no_grad():
            is_right = model(images.to(device)).argmax(dim=1) == classes.to(device)
        print(f"right on {is_right.float().mean():.0%} of new images")
        print(model.report())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
