"""What a replayed model is: layers with gradient sizes and times, from a file or from an architecture's arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Parameters whose gradients become ready together."""

    numels: tuple[int, ...]
    forward_us: float
    backward_us: float

    def __post_init__(self) -> None:
        if not self.numels or min(self.numels) < 1 or min(self.forward_us, self.backward_us) < 0:
            raise ValueError(f"a layer needs parameters and times of zero or more: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model to replay; layers in the order of the forward."""

    name: str
    layers: tuple[Layer, ...]
    source: str

    @property
    def numel(self) -> int:
        return sum(sum(layer.numels) for layer in self.layers)

    @property
    def num_params(self) -> int:
        return sum(len(layer.numels) for layer in self.layers)

    @property
    def compute_ms(self) -> float:
        return sum(layer.forward_us + layer.backward_us for layer in self.layers) / 1e3


def scaled(profile: Profile, scale: float) -> Profile:
    """Sizes and times by `scale`: wire time over compute time stays, latencies weigh more."""
    if scale == 1:
        return profile
    layers = tuple(
        Layer(
            numels=tuple(max(1, round(numel * scale)) for numel in layer.numels),
            forward_us=layer.forward_us * scale,
            backward_us=layer.backward_us * scale,
        )
        for layer in profile.layers
    )
    return Profile(name=f"{profile.name}@{scale:g}", layers=layers, source=f"{profile.source} Scaled by {scale:g}.")


def profile_from_dict(fields: dict[str, Any]) -> Profile:
    """Inverse of the files in `profiles/`: tensors in the order of backward, the forward divided as the backward is."""
    tensors = fields["tensors"]
    backward_us = sum(gap_us for _, gap_us in tensors)
    layers = [
        Layer(numels=(numel,), backward_us=gap_us, forward_us=fields["forward_us"] * gap_us / backward_us)
        for numel, gap_us in tensors
    ]
    return Profile(name=fields["name"], layers=tuple(reversed(layers)), source=fields["source"])


def resnet50() -> Profile:
    return profile_from_dict(json.loads((FOLDER / "resnet50.json").read_text(encoding="utf-8")))


def even_layers() -> Profile:
    """24 layers of 0.5 M parameters, 48 MB."""
    layer = Layer(numels=(490_000, 10_000), forward_us=5_000, backward_us=10_000)
    return Profile(name="replay", layers=(layer,) * 24, source="24 equal layers, 48 MB; forward 120 ms, backward 240 ms.")


def gpt2() -> Profile:
    """GPT-2 small, 124 M parameters."""
    return _transformer(
        name="gpt2",
        width=768,
        num_blocks=12,
        embeddings=(50_257 * 768, 1_024 * 768),
        iteration_us=122_000,
        source=(
            "Sizes: the architecture of GPT-2 small. Times are arithmetic, not measured: 6 x parameters x 8,192 tokens "
            "at an assumed 50 TFLOP/s, a third of it forward, by parameters of each block."
        ),
    )


def bert_large() -> Profile:
    """BERT-Large, 335 M parameters."""
    return _transformer(
        name="bert_large",
        width=1_024,
        num_blocks=24,
        embeddings=(30_522 * 1_024, 514 * 1_024),
        iteration_us=163_300,
        source=(
            "Sizes: the architecture of BERT-Large. 163.3 ms per iteration on one V100, batch 8: HKBU-HPML/ddl-benchmarks, "
            "results of 2020-05-29. Assumed: a third of it forward, by parameters of each block."
        ),
    )


def moe() -> Profile:
    """16 layers of 96 small experts: 3,104 tensors, 50 MB."""
    layer = Layer(numels=(8_192, 8_192) + (4_096,) * 192, forward_us=6_000, backward_us=12_000)
    return Profile(
        name="moe",
        layers=(layer,) * 16,
        source="Made up: 16 layers of 96 experts with two matrices of 4,096 elements each, all of them used in every step.",
    )


def _transformer(
    *, name: str, width: int, num_blocks: int, embeddings: tuple[int, ...], iteration_us: float, source: str
) -> Profile:
    square = width * width
    block = (3 * square, 3 * width, square, width, 4 * square, 4 * width, 4 * square, width, width, width, width, width)
    each_us = iteration_us / num_blocks
    blocks = (Layer(numels=block, forward_us=each_us / 3, backward_us=each_us * 2 / 3),) * num_blocks
    first = Layer(numels=embeddings, forward_us=0, backward_us=0)
    return Profile(name=name, layers=(first, *blocks), source=source)


PROFILES = {"replay": even_layers, "gpt2": gpt2, "resnet50": resnet50, "bert_large": bert_large, "moe": moe}
