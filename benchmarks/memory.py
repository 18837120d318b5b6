"""Memory for gradients: 2 ranks, a model of 101 MB, three steps of SGD without momentum, zero_grad() as it comes.

Every system runs in processes of its own. Counted after the last backward, exactly: the storages of every `.grad` and
of all other tensors that Python can see, but for the parameters' (each storage once; buckets count with padding and
trailers). torch's reducer keeps its buckets in C++, out of sight: for torch the resident size of the process tells,
above that of the bare model's process at the same place. The peak is that of the whole process, above the
bare model's.

All of it twice: with the allocator as it comes, and with glibc's MALLOC_MMAP_THRESHOLD_ fixed at 1 MB, so that every
large tensor goes back to the system when it is freed. The difference is the allocator's fragmentation, the rest is
what is really held.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.figure import Figure, Relation, Row, Target, Tell, row_where
from benchmarks.matrix.worker import peak_rss_bytes
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel

NUM_LAYERS, WIDTH, BATCH = 24, 1024, 8
NUM_STEPS = 3
ALLOCATORS = {"as it comes": None, "large blocks returned": "1000000"}  # of MALLOC_MMAP_THRESHOLD_, which glibc reads
_PADDING = 0.01  # of the gradients' bytes, for padding, trailers, and the few tensors that are none

TorchDDP = nn.parallel.DistributedDataParallel
_BARE, _TORCH, _OURS = "bare model", "torch DDP, default", "Undertow"
SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    _BARE: lambda model: model,
    _TORCH: lambda model: TorchDDP(model),
    "torch DDP, gradient_as_bucket_view": lambda model: TorchDDP(model, gradient_as_bucket_view=True),
    _OURS: lambda model: DistributedDataParallel(model),
}


class Layers(nn.Module):
    """Linear layers that run in another order than they are registered: buckets are made anew after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        for layer in (*layers[1::2], *layers[::2]):
            x = functional.relu(layer(x))
        return x.sum()


def measure_rank(_rank: int, name: str) -> Row:
    """What one system holds; bytes."""
    bare = Layers()
    model = SYSTEMS[name](bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(x).backward()
        if step == NUM_STEPS - 1:
            resident_bytes = psutil.Process().memory_info().rss
            visible_bytes = _visible_bytes(bare)
        optimizer.step()
    return {
        "gradient_bytes": sum(param.nbytes for param in bare.parameters()),
        "visible_bytes": visible_bytes,
        "resident_bytes": resident_bytes,
        "peak_bytes": peak_rss_bytes(),
    }


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per allocator and system: medians over repetitions, in MB of 1e6 bytes."""
    num_repetitions = 1 if is_quick else 5
    found: dict[tuple[str, str], list[Row]] = {(allocator, name): [] for allocator in ALLOCATORS for name in SYSTEMS}
    for repetition in range(num_repetitions):
        for allocator, name in found:
            tell(f"{name}, allocator {allocator}, repetition {repetition + 1} of {num_repetitions}")
            with _mmap_threshold(ALLOCATORS[allocator]):
                found[allocator, name].append(run_ranks(measure_rank, 2, name))
    return [_row(allocator, name, rows, found[allocator, _BARE]) for (allocator, name), rows in found.items()]


def _row(allocator: str, name: str, found: Sequence[Row], bare: Sequence[Row]) -> Row:
    def mb(rows: Sequence[Row], key: str) -> float:
        return median(row[key] for row in rows) / 1e6

    return {
        "allocator": allocator,
        "system": name,
        "gradients_mb": round(mb(found, "gradient_bytes"), 2),
        "visible_after_backward_mb": round(mb(found, "visible_bytes"), 2),
        "copies_visible": round(mb(found, "visible_bytes") / mb(found, "gradient_bytes"), 4),
        "resident_above_bare_mb": round(mb(found, "resident_bytes") - mb(bare, "resident_bytes"), 1),
        "peak_above_bare_mb": round(mb(found, "peak_bytes") - mb(bare, "peak_bytes"), 1),
        "peaks_mb": [round(row["peak_bytes"] / 1e6, 1) for row in found],
    }


def judge(rows: Sequence[Row]) -> list[Figure]:
    copies = max(row["copies_visible"] for row in rows if row["system"] == _OURS)
    held = Figure(
        name="gradients held after backward, in copies",
        measured=copies,
        unit="x",
        num_decimals=4,
        target=Target(relation=Relation.AT_MOST, bound=1 + _PADDING),
    )
    return [held, *(_judge_peak(allocator, rows) for allocator in ALLOCATORS)]


def _judge_peak(allocator: str, rows: Sequence[Row]) -> Figure:
    ours, torchs = (row_where(rows, allocator=allocator, system=name) for name in (_OURS, _TORCH))
    return Figure(
        name=f"peak above the bare model, allocator {allocator} (target: torch DDP's)",
        measured=ours["peak_above_bare_mb"],
        unit="MB",
        num_decimals=1,
        target=Target(relation=Relation.AT_MOST, bound=torchs["peak_above_bare_mb"]),
    )


@contextmanager
def _mmap_threshold(value: str | None) -> Iterator[None]:
    """Sets it for the processes that are started inside."""
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _visible_bytes(model: nn.Module) -> int:
    """Of gradients, and of all other tensors that Python can see; garbage counts as long as it has not been collected."""
    seen = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    # A gradient that nobody has asked for yet is no Python object.
    seen += [param.grad for param in model.parameters() if param.grad is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in seen}
    for param in model.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    return sum(storages.values())
