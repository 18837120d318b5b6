"""The systems that take turns over a shaped link, by name. Pure data, imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.matrix.errors import require_known

_MODULES = "benchmarks.matrix.systems"
SWEEP_MB = (1, 2, 4, 8, 16, 25)
PERIOD = 30  # steps between two exchanges of systems that do not synchronize in every step
DDP, BEST, OURS, OUTER, BARE = "ddp", "ddp-best", "ours", "ours-outer", "bare"
_SETTLING, _TUNING, _EXCHANGES = 10, 200, 2 * PERIOD  # steps before the first timed one
_BF16, _INT8, _ANY = 0.01, 0.05, 1.0  # how far rounding may lead away from the reference, of the length of three steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train: a module of `benchmarks.matrix.systems` and its options."""

    name: str
    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_settling: int = _SETTLING
    is_averaged: bool = True  # False: its parameters are not compared with the reference
    rounding: float = 0.0
    period: int = 1  # steps are timed in whole periods; if it is above 1, their mean counts instead of their median
    tree: str = ""  # the name of another source tree; empty for the library that is on the path


def _ours(suffix: str, title: str, *, num_settling: int = _TUNING, **options: Any) -> Contender:
    rounding = _INT8 if options.get("wire") in ("int8", "auto") else _BF16 if options.get("wire") == "bfloat16" else 0.0
    module = f"{_MODULES}.ours_sharded" if "strategy" in options else f"{_MODULES}.ours"
    return Contender(
        name=f"{OURS}{suffix}",
        title=title,
        module=module,
        options=options,
        num_settling=num_settling,
        rounding=rounding,
    )


def _ddp(suffix: str, title: str, *, rounding: float = 0.0, **options: Any) -> Contender:
    return Contender(name=f"{DDP}{suffix}", title=title, module=f"{_MODULES}.torch_ddp", options=options, rounding=rounding)


_POWERSGD = {"bucket_cap_mb": 1000, "hook": "powersgd", "matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
CONTENDERS = {
    each.name: each
    for each in (
        Contender(name=BARE, title="compute alone", module=f"{_MODULES}.bare", is_averaged=False),
        _ddp("", "torch DDP, defaults"),
        *(_ddp(f"-{size}mb", f"torch DDP, bucket_cap_mb={size}", bucket_cap_mb=size) for size in SWEEP_MB),
        _ddp("-fp16", "torch DDP, fp16_compress_hook", rounding=_BF16, hook="fp16"),
        _ddp("-bf16", "torch DDP, bf16_compress_hook", rounding=_BF16, hook="bf16"),
        _ddp("-powersgd", "torch DDP, PowerSGD of rank 4", rounding=_ANY, **_POWERSGD),
        _ours("", "Undertow, the changed import alone"),
        _ours("-untuned", "Undertow, auto_tune=False", num_settling=_SETTLING, auto_tune=False),
        *(_ours(f"-{wire}", f'Undertow, wire="{wire}"', wire=wire) for wire in ("auto", "bfloat16", "int8")),
        _ours("-zero1", "Undertow, ShardedOptimizer, zero1", strategy="zero1"),
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
    )
}
SWEEP = tuple(f"{DDP}-{size}mb" for size in SWEEP_MB)


def chosen(names: str, trees: Mapping[str, str]) -> tuple[Contender, ...]:
    """Returns the contenders of a list such as "ours,ddp-best,old:ours". Raises UnknownName."""
    found = {each.name: each for name in names.split(",") for each in _expanded(name.strip(), trees)}
    return tuple(found.values())


def _expanded(name: str, trees: Mapping[str, str]) -> Iterator[Contender]:
    """`ddp-best` stands for every bucket size of the sweep."""
    tree, _, plain = name.rpartition(":")
    if tree:
        require_known("tree", tree, trees)
    for each in SWEEP if plain == BEST else (plain,):
        require_known("system", each, (*CONTENDERS, BEST))
        contender = CONTENDERS[each]
        yield contender if not tree else _of_tree(contender, tree)


def _of_tree(contender: Contender, tree: str) -> Contender:
    fields = {name: getattr(contender, name) for name in contender.__slots__}
    return Contender(**{**fields, "name": f"{tree}:{contender.name}", "title": f"{contender.title} ({tree})", "tree": tree})
