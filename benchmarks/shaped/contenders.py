"""The systems that take turns, by name. Pure data, imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.errors import require_known
from benchmarks.shaped.environments import MAIN

_MODULES = "benchmarks.shaped.systems"
SIZES_MB = (1, 2, 4, 8, 16, 25)  # of a sweep
PERIOD = 30  # steps between two exchanges of systems that do not synchronize in every step
DDP, OURS, OUTER, BARE = "ddp", "ours", "ours-outer", "bare"
_MEGATRON, _DISTOPT = "megatron-ddp", "megatron-distopt"
_SETTLING, _EXCHANGES = 10, 2 * PERIOD  # steps before the first timed one
_MOST_SETTLING = 1500  # trials take some 1,000 at most
_TWO_BYTES, _INT8, _ANY = 0.01, 0.05, 1.0  # how far rounding may lead away from the reference, of the length of three steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train: a module of `benchmarks.shaped.systems` and its options."""

    name: str
    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str = MAIN  # see `environments`
    num_settling: int = _SETTLING
    most_settling: int = _MOST_SETTLING  # if the system has not settled before
    is_averaged: bool = True  # False: its parameters are not compared with the reference
    rounding: float = 0.0
    period: int = 1  # steps are timed in whole periods; if it is above 1, their mean counts instead of their median
    tree: str = ""  # the name of another source tree; empty for the library that is on the path


_ROUNDING = {"bfloat16": _TWO_BYTES, "int8": _INT8, "auto": _INT8}


def _ours(suffix: str, title: str, **options: Any) -> Contender:
    return Contender(
        name=f"{OURS}{suffix}",
        title=title,
        module=f"{_MODULES}.ours_sharded" if "strategy" in options else f"{_MODULES}.ours",
        options=options,
        rounding=_ROUNDING.get(options.get("wire", ""), 0.0),
    )


def _ddp(suffix: str, title: str, *, rounding: float = 0.0, **options: Any) -> Contender:
    return Contender(name=f"{DDP}{suffix}", title=title, module=f"{_MODULES}.torch_ddp", options=options, rounding=rounding)


def _megatron(name: str, title: str, **options: Any) -> Iterator[Contender]:
    """Megatron's buckets are counted in elements of fp32; its default of 40 million is one bucket of a smaller model."""
    common = {"module": f"{_MODULES}.megatron", "environment": "megatron"}
    yield Contender(name=name, title=title, options=options, **common)
    for size in SIZES_MB:
        of_size = {**options, "bucket_size": size * 1_000_000 // 4}
        yield Contender(name=f"{name}-{size}mb", title=f"{title}, buckets of {size} MB", options=of_size, **common)


_POWERSGD = {"bucket_cap_mb": 1000, "hook": "powersgd", "matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
CONTENDERS = {
    each.name: each
    for each in (
        Contender(name=BARE, title="compute alone", module=f"{_MODULES}.bare", is_averaged=False),
        _ddp("", "torch DDP, defaults"),
        *(_ddp(f"-{size}mb", f"torch DDP, bucket_cap_mb={size}", bucket_cap_mb=size) for size in SIZES_MB),
        _ddp("-fp16", "torch DDP, fp16_compress_hook", rounding=_TWO_BYTES, hook="fp16"),
        # In one bucket: its callbacks start collectives, which over gloo may pair those of different buckets.
        _ddp("-powersgd", "torch DDP, PowerSGD of rank 4", rounding=_ANY, **_POWERSGD),
        _ours("", "Undertow, the changed import alone"),
        _ours("-untuned", "Undertow, auto_tune=False", auto_tune=False),
        _ours("-ordered", 'Undertow, reduction="ordered"', reduction="ordered"),
        *(_ours(f"-{wire}", f'Undertow, wire="{wire}"', wire=wire) for wire in ("auto", "bfloat16", "int8")),
        *(_ours(f"-{name}", f"Undertow, ShardedOptimizer, {name}", strategy=name) for name in ("zero1", "zero2")),
        _ours(
            "-zero1-int8",
            "Undertow, ShardedOptimizer, zero1, gradients and parameters in int8",
            strategy="zero1",
            wire="int8",
            param_wire="int8",
        ),
        Contender(
            name=OUTER,
            title=f"Undertow, outer every {PERIOD}",
            module=f"{_MODULES}.ours",
            options={"outer": {"every": PERIOD}},
            num_settling=_EXCHANGES,
            is_averaged=False,
            period=PERIOD,
        ),
        Contender(
            name="averager",
            title=f"torch PeriodicModelAverager every {PERIOD}",
            module=f"{_MODULES}.torch_averager",
            options={"period": PERIOD},
            num_settling=_EXCHANGES,
            is_averaged=False,
            period=PERIOD,
        ),
        Contender(name="torch-zero", title="torch ZeroRedundancyOptimizer", module=f"{_MODULES}.torch_zero"),
        Contender(name="fsdp2", title="FSDP2 per layer, no reshard", module=f"{_MODULES}.fsdp2"),
        *_megatron(_MEGATRON, "Megatron-core DDP"),
        *_megatron(_DISTOPT, "Megatron-core distributed optimizer", use_distributed_optimizer=True),
        *(
            Contender(
                name=f"deepspeed-zero{stage}",
                title=f"DeepSpeed ZeRO-{stage}",
                module=f"{_MODULES}.deepspeed_zero",
                options={"stage": stage},
                environment="deepspeed",
            )
            for stage in (1, 2)
        ),
    )
}
# A name that stands for every bucket size of a sweep.
SWEEPS = {f"{stem}-best": tuple(f"{stem}-{size}mb" for size in SIZES_MB) for stem in (DDP, _MEGATRON, _DISTOPT)}
BEST = f"{DDP}-best"


def chosen(names: str, trees: Mapping[str, str]) -> tuple[Contender, ...]:
    """Returns the contenders of a list such as "ours,ddp-best,old:ours". Raises UnknownName."""
    found = {each.name: each for name in names.split(",") for each in _expanded(name.strip(), trees)}
    return tuple(found.values())


def _expanded(name: str, trees: Mapping[str, str]) -> Iterator[Contender]:
    tree, _, plain = name.rpartition(":")
    if tree:
        require_known("tree", tree, trees)
    require_known("system", plain, (*CONTENDERS, *SWEEPS))
    for each in SWEEPS.get(plain, (plain,)):
        contender = CONTENDERS[each]
        if tree:
            title = f"{contender.title} ({tree})"
            contender = replace(contender, name=f"{tree}:{contender.name}", title=title, tree=tree)
        yield contender
