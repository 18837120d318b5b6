"""What the matrix knows by name: workloads, links, systems. Pure data, imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.matrix.errors import UnknownName, require_known
from benchmarks.matrix.job import SystemJob
from benchmarks.matrix.profile import PROFILES, scaled

MAIN = "main"  # the project's own virtual environment
DEVICES = ("cpu", "cuda")
_MODULES = "benchmarks.matrix.systems"
SWEEP_MB = (1, 2, 4, 8, 16, 25)
NUM_SETTLING = 40  # four looks of the tuner; they are not timed
_MEGATRON_NOTE = (
    "Its constructors are patched to succeed without CUDA; all its collectives are asynchronous on a processor. "
    "Its default buckets have 40 million elements: smaller models are one bucket. "
    "The best of several medians is chosen after the fact: noise is in its favor."
)


# An element of a block is off by up to the 254th part of the largest one; the format of some buckets may be any.
_ROUNDING = {"bfloat16": 0.01, "int8": 0.05, "auto": 0.05}


def _megatron_sweep(sizes_mb: Iterable[int], **options: Any) -> dict[str, dict[str, Any]]:
    return {f"@{size}MB": {"bucket_size": size * 1_000_000 // 4, **options} for size in sizes_mb}  # in elements of fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSpec:
    """A system by the name that users give it. Its variants are all measured, and the best one is its row."""

    name: str
    title: str
    module: str  # with build(setting), see benchmarks.matrix.systems
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})  # suffix -> options
    environment: str = MAIN
    devices: tuple[str, ...] = DEVICES  # that the module sets it up for
    is_averaged: bool = True
    rounding: float = 0.0  # of the length of the first steps: how far fewer bytes may lead away; 0 for full width
    is_sharded: bool = False  # its update communicates: the whole step is compared, not the backward
    num_settling: int = 0  # steps before the turns in which it finds its plan
    note: str = ""  # what would be unfair to conclude

    def jobs(self) -> list[SystemJob]:
        return [
            SystemJob(
                name=self.name + suffix,
                module=self.module,
                options=dict(options),
                num_settling=self.num_settling,
                is_averaged=self.is_averaged,
                rounding=self.rounding,
            )
            for suffix, options in self.variants.items()
        ]


SYSTEMS = {
    spec.name: spec
    for spec in (
        SystemSpec(name="bare", title="compute alone", module=f"{_MODULES}.bare", is_averaged=False),
        SystemSpec(name="per-parameter", title="a reduction per parameter, after backward", module=f"{_MODULES}.per_parameter"),
        SystemSpec(name="ours", title="Undertow, defaults", module=f"{_MODULES}.ours", num_settling=NUM_SETTLING),
        SystemSpec(
            name="ours-untuned",
            title="Undertow, sizes that follow from the model's",
            module=f"{_MODULES}.ours",
            variants={"": {"auto_tune": False}},
        ),
        SystemSpec(
            name="ours-ordered",
            title="Undertow, added up in rank order",
            module=f"{_MODULES}.ours",
            variants={"": {"reduction": "ordered"}},
            num_settling=NUM_SETTLING,
        ),
        *(
            SystemSpec(
                name=f"ours-zero{stage}",
                title=f"Undertow, sharded optimizer, zero{stage}",
                module=f"{_MODULES}.ours_sharded",
                variants={"": {"strategy": f"zero{stage}"}},
                is_sharded=True,
                num_settling=NUM_SETTLING,
            )
            for stage in (1, 2)
        ),
        *(
            SystemSpec(
                name=f"ours-{wire}",
                title=f'Undertow, wire="{wire}"',
                module=f"{_MODULES}.ours",
                variants={"": {"wire": wire}},
                rounding=_ROUNDING[wire],
                num_settling=NUM_SETTLING,
            )
            for wire in ("bfloat16", "int8", "auto")
        ),
        SystemSpec(
            name="ours-zero1-int8",
            title="Undertow, sharded optimizer, zero1, gradients and gathers in int8",
            module=f"{_MODULES}.ours_sharded",
            variants={"": {"strategy": "zero1", "wire": "int8", "param_wire": "int8"}},
            is_sharded=True,
            rounding=_ROUNDING["int8"],
            num_settling=NUM_SETTLING,
        ),
        SystemSpec(name="torch-ddp", title="torch DDP, default", module=f"{_MODULES}.torch_ddp"),
        SystemSpec(
            name="torch-ddp-best",
            title="torch DDP, best bucket size of a sweep",
            module=f"{_MODULES}.torch_ddp",
            variants={f"@{size}MB": {"bucket_cap_mb": size} for size in SWEEP_MB},
            note="The best of several medians is chosen after the fact: noise is in its favor.",
        ),
        SystemSpec(
            name="torch-ddp-bfloat16",
            title="torch DDP with its bf16_compress_hook, better of two bucket sizes",
            module=f"{_MODULES}.torch_ddp",
            variants={f"@{size}MB": {"bucket_cap_mb": size, "hook": "bf16"} for size in (4, 25)},
            rounding=_ROUNDING["bfloat16"],
        ),
        SystemSpec(
            name="torch-ddp-powersgd",
            title="torch DDP with PowerSGD of rank 4",
            module=f"{_MODULES}.torch_ddp",
            variants={"": {"bucket_cap_mb": 1000, "hook": "powersgd", "matrix_approximation_rank": 4, "start_powerSGD_iter": 2}},
            rounding=1.0,
            note="In one bucket: its callbacks start collectives, which over gloo may pair those of different buckets. "
            "Vectors, as replayed layers have them, are sent in full width.",
        ),
        SystemSpec(
            name="torch-zero",
            title="torch ZeroRedundancyOptimizer",
            module=f"{_MODULES}.torch_zero",
            is_sharded=True,
            note="Reduces everything on every rank and broadcasts parameters after the step: it saves memory, not time.",
        ),
        SystemSpec(
            name="fsdp2",
            title="FSDP2 per layer, no reshard",
            module=f"{_MODULES}.fsdp2",
            is_sharded=True,
            note="Made for device streams: on gloo its reductions are synchronous.",
        ),
        SystemSpec(
            name="megatron-ddp",
            title="Megatron-core DDP, best bucket size of a sweep",
            module=f"{_MODULES}.megatron",
            variants={"@default": {}, **_megatron_sweep(SWEEP_MB)},
            environment="megatron",
            devices=("cpu",),
            note=_MEGATRON_NOTE,
        ),
        SystemSpec(
            name="megatron-distopt",
            title="Megatron-core distributed optimizer, best bucket size of a sweep",
            module=f"{_MODULES}.megatron",
            variants=_megatron_sweep(SWEEP_MB, use_distributed_optimizer=True),
            environment="megatron",
            devices=("cpu",),
            is_sharded=True,
            note=f"{_MEGATRON_NOTE} It uses gloo's reduce-scatter, which sends as much as an all-reduce.",
        ),
        *(
            SystemSpec(
                name=f"deepspeed-zero{stage}",
                title=f"DeepSpeed ZeRO-{stage}",
                module=f"{_MODULES}.deepspeed_zero",
                variants={"": {"stage": stage}},
                environment="deepspeed",
                devices=("cpu",),
                is_sharded=True,
                note="Made for device streams: on a processor all its collectives are synchronous. It saves memory, not time.",
            )
            for stage in (1, 2)
        ),
    )
}
BARE, OURS, PER_PARAMETER, TORCH = "bare", "ours", "per-parameter", "torch-ddp"
OWN = tuple(name for name in SYSTEMS if name.startswith(OURS))  # what is not a peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload by name, with the scale at which it runs unless asked otherwise (`gpt2@1`)."""

    name: str
    title: str
    scale: float = 1.0
    real_bytes: Mapping[str, int] = field(default_factory=dict)  # by device, of gradients that are not replayed

    @property
    def is_replayed(self) -> bool:
        return self.name in PROFILES

    def gradient_bytes(self, device: str = "cpu") -> int:
        return 4 * scaled(PROFILES[self.name](), self.scale).numel if self.is_replayed else self.real_bytes[device]

    @property
    def label(self) -> str:
        return self.name if self.scale == 1 == WORKLOADS[self.name].scale else f"{self.name}@{self.scale:g}"


WORKLOADS = {
    spec.name: spec
    for spec in (
        WorkloadSpec(name="replay", title="replay: 24 equal layers, 48 MB, forward 120 ms, backward 240 ms"),
        WorkloadSpec(
            name="gpt",
            title="a real GPT: on CPU 8 layers, 42 MB; on CUDA GPT-2 small, 498 MB",
            real_bytes={"cpu": 42_000_000, "cuda": 498_000_000},
        ),
        WorkloadSpec(
            name="resnet",
            title="a real residual network, convolutions and batch norm: on CPU 11 MB, on CUDA 177 MB",
            real_bytes={"cpu": 11_000_000, "cuda": 177_000_000},
        ),
        WorkloadSpec(name="resnet50", title="replay of ResNet-50 on a V100"),
        WorkloadSpec(name="gpt2", title="replay of GPT-2 small", scale=0.125),
        WorkloadSpec(name="bert_large", title="replay of BERT-Large", scale=0.0625),
        WorkloadSpec(name="moe", title="replay of a mixture of experts: 3,104 tensors, 51 MB"),
    )
}
LINKS = ("1gbit", "5gbit", "none")  # of a run that names none
RANKS = (2, 4)


def workload_from_text(text: str) -> WorkloadSpec:
    """`NAME` or `NAME@SCALE`; raises UnknownName."""
    name, _, scale_text = text.partition("@")
    require_known("workload", name, WORKLOADS)
    spec = WORKLOADS[name]
    if not scale_text:
        return spec
    try:
        scale = float(scale_text)
    except ValueError:
        scale = 0.0
    if not (spec.is_replayed and 0 < scale < math.inf):
        raise UnknownName(f"workload {text!r}: {_scale_hint(spec)}")
    return WorkloadSpec(name=name, title=spec.title, scale=scale)


def _scale_hint(spec: WorkloadSpec) -> str:
    if spec.is_replayed:
        return f"a scale is a positive number, as in '{spec.name}@0.5'."
    return f"{spec.name} computes for real and has one size."
