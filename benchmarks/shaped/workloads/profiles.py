"""The layers of replayed models, with gradient sizes and times, in the order of the forward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_RESNET50 = Path(__file__).with_name("resnet50.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Parameters whose gradients become ready together."""

    numels: tuple[int, ...]
    forward_us: float
    backward_us: float


Layers = tuple[Layer, ...]


def scaled(layers: Layers, scale: float) -> Layers:
    """Multiplies sizes and times by `scale`: wire time over compute time stays, latencies weigh more."""
    if scale == 1:
        return layers
    return tuple(
        Layer(
            numels=tuple(max(1, round(numel * scale)) for numel in layer.numels),
            forward_us=layer.forward_us * scale,
            backward_us=layer.backward_us * scale,
        )
        for layer in layers
    )


def resnet50() -> Layers:
    """ResNet-50 on a V100: its measured backward tensor by tensor; the forward is divided as the backward is."""
    fields = json.loads(_RESNET50.read_text(encoding="utf-8"))
    tensors = fields["tensors"]  # elements and microseconds, in the order of backward
    backward_us = sum(gap_us for _, gap_us in tensors)
    return tuple(
        Layer(numels=(numel,), backward_us=gap_us, forward_us=fields["forward_us"] * gap_us / backward_us)
        for numel, gap_us in reversed(tensors)
    )


def even_layers() -> Layers:
    """24 layers of 0.5 M parameters, 48 MB; forward 120 ms, backward 240 ms."""
    return (Layer(numels=(490_000, 10_000), forward_us=5_000, backward_us=10_000),) * 24


def gpt2() -> Layers:
    """GPT-2 small, 124 M parameters.

    Sizes are those of the architecture. Times are arithmetic, not measured: 6 x parameters x 8,192 tokens at an assumed
    50 TFLOP/s, a third of it forward, by parameters of each block.
    """
    return _transformer(width=768, num_blocks=12, embeddings=(50_257 * 768, 1_024 * 768), iteration_us=122_000)


def bert_large() -> Layers:
    """BERT-Large, 335 M parameters.

    Sizes are those of the architecture. 163.3 ms per iteration on one V100, batch 8: HKBU-HPML/ddl-benchmarks, results of
    2020-05-29. Assumed: a third of it forward, by parameters of each block.
    """
    return _transformer(width=1_024, num_blocks=24, embeddings=(30_522 * 1_024, 514 * 1_024), iteration_us=163_300)


def moe() -> Layers:
    """Made up: 16 layers of 96 experts with two matrices of 4,096 elements each, all used in every step; 3,104 tensors, 51 MB."""
    return (Layer(numels=(8_192, 8_192) + (4_096,) * 192, forward_us=6_000, backward_us=12_000),) * 16


def _transformer(*, width: int, num_blocks: int, embeddings: tuple[int, ...], iteration_us: float) -> Layers:
    square = width * width
    block = (3 * square, 3 * width, square, width, 4 * square, 4 * width, 4 * square, width, width, width, width, width)
    each_us = iteration_us / num_blocks
    blocks = (Layer(numels=block, forward_us=each_us / 3, backward_us=each_us * 2 / 3),) * num_blocks
    first = Layer(numels=embeddings, forward_us=0, backward_us=0)
    return (first, *blocks)


PROFILES = {"replay": even_layers, "resnet50": resnet50, "gpt2": gpt2, "bert_large": bert_large, "moe": moe}
