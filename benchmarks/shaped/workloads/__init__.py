"""Models to train, by name. Runs inside any virtual environment that has torch; imports nothing of Undertow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.errors import UnknownName, require_known
from benchmarks.shaped.workloads import gpt, replay, resnet, small
from benchmarks.shaped.workloads.profiles import PROFILES, scaled

Batch = tuple[Tensor, ...]
_COMPUTED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt": (gpt.Gpt, gpt.batch_of),
    "resnet": (resnet.ResNet, resnet.batch_of),
    "small": (small.ManySmall, small.batch_of),
}
_SCALES = {"gpt2": 1 / 8, "bert_large": 1 / 16}  # of replayed models that are large, unless another one is asked for
NAMES = (*PROFILES, *_COMPUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A module whose forward returns the loss; FSDP2 shards its `blocks`. It is the same on every rank, and batches differ."""

    make_model: Callable[[], nn.Module]
    batch_of: Callable[[int], Batch]  # of a rank


def workload_from_text(text: str) -> Workload:
    """Returns the workload `NAME` or `NAME@SCALE`. Raises UnknownName."""
    name, _, scale_text = text.partition("@")
    require_known("workload", name, NAMES)
    if name not in _COMPUTED:
        layers = scaled(PROFILES[name](), _scale(name, scale_text))
        return _seeded(lambda: replay.Replay(layers), replay.batch_of)
    if scale_text:
        raise UnknownName(f"workload {text!r}: {name} computes and has one size.")
    return _seeded(*_COMPUTED[name])


def _scale(name: str, text: str) -> float:
    if not text:
        return _SCALES.get(name, 1.0)
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < math.inf:
        raise UnknownName(f"workload '{name}@{text}': a scale is a positive number, as in '{name}@0.5'.")
    return scale


def _seeded(make_model: Callable[[], nn.Module], batch_of: Callable[[int], Batch]) -> Workload:
    def make_seeded() -> nn.Module:
        torch.manual_seed(0)
        return make_model()

    return Workload(make_model=make_seeded, batch_of=batch_of)
