"""Settings: frozen, validated, with a JSON form."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Protocol, runtime_checkable

from undertow.errors import ConfigError, WrongType
from undertow.foreign import parsed_json

_MAX_SHOWN = 200  # characters of a path

# What each setting may be.
_CHOICES: dict[str, tuple[object, ...]] = {
    "strategy": (None, "ddp", "zero1", "zero2", "hybrid"),
    "order": ("observed", "reverse", "largest_first"),
    "reduction": ("native", "ordered"),
    "op": ("mean", "sum", "weighted"),
    "buffers": ("rank0", "mean", "off"),
    "record": ("summary", "full", "off"),
    "auto_tune": (True, False),
    "reduce_dtype": (None, "float32"),
    "wire_dtype": (None, "bfloat16", "float16"),
    "nonfinite": ("ignore", "warn", "skip", "raise"),
    "overlap": (True, False),
    "average_in_collective": (True, False),
}


@runtime_checkable
class HasJson(Protocol):
    """A `Plan`, of which settings need the text only."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """Experts whose gradients are reduced over ranks of their own: those that hold the same experts.

    match: a pattern of names of parameters and buffers, such as "*.experts.*"; `*`, `?` and `[...]` as in `fnmatch`.
    process_group: the torch.distributed.ProcessGroup of the ranks that hold the same experts as this one.
    divisor: what the sum over those ranks is divided by. Where tokens of all ranks reach an expert it is the number of all
        ranks, over whose batches the mean is; None is the number of ranks of the group.

    Raises ConfigError for a pattern that is no text, and a divisor that is no positive number.
    """

    match: str
    process_group: Any
    divisor: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str) or not self.match:
            raise ConfigError(
                f"match must be a pattern of parameter names, got {self.match!r}.",
                where="ExpertGroup",
                remedy='Write match="*.experts.*"; for several patterns give several groups.',
            )
        divisor = self.divisor
        is_number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
        if divisor is not None and not (is_number and math.isfinite(divisor) and divisor > 0):
            raise ConfigError(
                f"divisor must be a positive number, got {divisor!r}.",
                where=f"ExpertGroup(match={self.match!r})",
                remedy="Give the number of ranks whose tokens reach the experts, or leave it out for that of the group.",
            )

    def to_dict(self) -> dict[str, Any]:
        """Without the process group, which is of this process."""
        return {"match": self.match, "divisor": self.divisor}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How gradients are synchronized. The same on every rank; compared before the first step.

    strategy: what each rank has of gradients and optimizer state: all of both ("ddp"), or a shard with a ShardedOptimizer;
        "zero1" keeps whole gradients between micro-batches, "zero2" shards of them too. "hybrid" is "zero1" within each row of
        a two-dimensional DeviceMesh, and rows are replicas of each other. None: "zero1" once there is a ShardedOptimizer,
        "ddp" until then.
    bucket_cap_mb: largest bucket in MiB; None lets the library choose from the size of the model. Several sizes are
        those of the first buckets, one after another; the last holds for all that follow.
    order: in which order gradients are expected: "observed" (that of rank 0's first backward; reverse registration
        until then), "reverse" (of registration) or "largest_first".
    plan: a plan to pin: the path of a file that `save_plan` has written, its text, or a `Plan`. It is kept as text. It switches
        `bucket_cap_mb`, `order` and `auto_tune` off.
    auto_tune: the plan follows what the run itself measures: ready times of gradients, and what collectives take. Not where
        `bucket_cap_mb` or `plan` is given, with `overlap=False`, a communication hook, or `record="off"`, nor under
        torch.use_deterministic_algorithms, whatever `reduction` is: with three ranks or more another plan rounds differently
        (not with "ordered", whose plan is kept too). False keeps the plan and still measures, for reports and profiles: five
        steps in a hundred, and one small all-reduce for each five; only `record="off"` ends that.
    overlap: False sends buckets after backward; the same bits for the same plan.
    reduction: "native" (the backend's; its rounding may depend on the plan where three ranks or more add up) or "ordered"
        (in rank order, in fp32 where gradients are narrower: the same bits under every plan). With "ordered" the strategies agree
        too if each step synchronizes once, parameters have 32 bits or more and `wire_dtype` is None. Two add up in another order:
        "zero2" averages each micro-batch over ranks and adds up the means, and "hybrid" adds up row by row.
    op: what becomes of the ranks' gradients: "mean", "sum", or "weighted": their sum over the sum of all weights, of which every
        rank gives one by `loss_weight(n)` before each backward. Not with experts.
    average_in_collective: False divides whole gradients before the collective, which sums. It changes nothing with shards and
        "ordered", where the sum is divided.
    buffers: before a training forward module buffers follow rank 0 ("rank0"), become the mean over ranks ("mean"; what
        is no real or complex number follows rank 0), or are left alone ("off").
    reduce_dtype: "float32": gradients of parameters of 16 bits are accumulated over micro-batches and reduced in it, and `.grad`
        is of it; an optimizer must take such gradients, as a ShardedOptimizer and torch's SGD do. None: in their own.
    wire_dtype: "bfloat16" or "float16": in it wider gradients travel, half the bytes; where ranks add up themselves ("ordered",
        and shards over gloo) they add in fp32.
    ignore: names of parameters and buffers that are left alone.
    nonfinite: what is done about gradients that are infinite or no number on some rank when an optimizer is about to step on
        them: nothing ("ignore"; they are not looked for, which would cost a pass over every bucket, and on devices the host would
        wait for the last one), a line on rank 0 ("warn"), the step is skipped on every rank and changes nothing ("skip"; not in
        eager form, with experts, or where a plain optimizer is given a closure), or NonFiniteGradient on every rank ("raise").
        What a GradScaler deals with stays its own.
    check_replicas_every: after how many synchronizations a fingerprint of every parameter is compared over all ranks;
        where one differs every rank raises ReplicaMismatch. None: never.
    stall_warning_s: after how many seconds of waiting a rank has all ranks report who is late, for what, and what it is doing.
    stall_timeout_s: after how many the step fails, with StallTimeout on every rank. Infinity switches either off; over gloo the
        step then fails so when the timeout of the process group is over, which also ends a longer stall_timeout_s.
    experts: groups of parameters that are reduced over ranks of their own, each an ExpertGroup, in the same order on every rank.
        Not with "hybrid". A process group is of one process: the JSON form says what there is, and is not read back.
    record: "summary" (times of the last 64 steps), "full" (of every step) or "off".

    Raises ConfigError for every value that cannot work.
    """

    strategy: str | None = None
    bucket_cap_mb: float | tuple[float, ...] | None = None
    order: str = "observed"
    plan: str | os.PathLike[str] | HasJson | None = None
    auto_tune: bool = True
    overlap: bool = True
    reduction: str = "native"
    op: str = "mean"
    average_in_collective: bool = True
    reduce_dtype: str | None = None
    wire_dtype: str | None = None
    buffers: str = "rank0"
    ignore: tuple[str, ...] = ()
    experts: tuple[ExpertGroup, ...] = ()
    nonfinite: str = "ignore"
    check_replicas_every: int | None = None
    stall_warning_s: float = 30.0
    stall_timeout_s: float = 300.0
    record: str = "summary"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        if isinstance(self.bucket_cap_mb, tuple | list):
            object.__setattr__(self, "bucket_cap_mb", tuple(self.bucket_cap_mb))
            for cap in self.bucket_cap_mb or (None,):
                bytes_from_mib(cap, name="bucket_cap_mb")
        elif self.bucket_cap_mb is not None:
            bytes_from_mib(self.bucket_cap_mb, name="bucket_cap_mb")
        object.__setattr__(self, "plan", _text_of_plan(self.plan))
        for name in ("stall_warning_s", "stall_timeout_s"):
            _require_seconds(getattr(self, name), name=name)
        _require_count(self.check_replicas_every, name="check_replicas_every")
        object.__setattr__(self, "ignore", _sorted_names(self.ignore))
        object.__setattr__(self, "experts", _expert_groups(self.experts))
        for group in self.experts:
            _check_goes_with_experts(self, group)

    def to_dict(self) -> dict[str, Any]:
        groups = tuple(group.to_dict() for group in self.experts)
        return {**dataclasses.asdict(dataclasses.replace(self, experts=())), "experts": groups}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SyncConfig:
        """The settings that `to_json` wrote; ConfigError for an unknown name or a value that cannot work."""
        try:
            data: dict[str, Any] = parsed_json(text)
        except (ValueError, TypeError) as error:
            raise _unreadable(f"these settings are no JSON: {error}.") from error
        if not isinstance(data, dict):
            raise _unreadable(f"settings are a JSON object, got {type(data).__name__}.")
        known = {field.name for field in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                raise _unreadable(f"there is no setting {name!r}.", remedy=_did_you_mean(name, known))
        experts = data.get("experts")
        if experts and isinstance(experts, list):
            raise _unreadable(
                f"these settings have {len(experts)} groups of experts, whose process groups are not in a text.",
                remedy="Leave `experts` out of the text, and add it by dataclasses.replace(config, experts=(...)).",
            )
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)


def _text_of_plan(plan: object) -> str | None:
    """Its JSON text, which begins with a brace; any other text is the path of a file."""
    reason = None
    if isinstance(plan, HasJson):
        return plan.to_json()
    if plan is None or (isinstance(plan, str) and plan.lstrip().startswith("{")):
        return plan
    if isinstance(plan, str | os.PathLike):
        try:
            return Path(plan).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    what = f"plan must be a Plan, the path of a saved one, or its text, got {type(plan).__name__}."
    if reason is not None:
        what = f"the plan cannot be read from {str(plan)[:_MAX_SHOWN]!r}: {reason}."
    raise ConfigError(
        what, where="SyncConfig(plan=...)", remedy="Give the path of a file that save_plan() has written, its text, or a Plan."
    )


def bytes_from_mib(value: Any, *, name: str) -> float:
    """`value` MiB in bytes; ConfigError, naming the setting, for what is not a positive number."""
    if not _is_positive(value):
        raise ConfigError(
            f"{name} must be a positive number of MiB, got {brief(value)}.",
            where="SyncConfig",
            remedy="Give a size above zero, or leave it out for a planned one.",
        )
    return value * 1024 * 1024  # type: ignore[no-any-return]  # a number


def _is_positive(value: object) -> bool:
    """True for a number above zero, and infinity; an integer beyond all floats is not one."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and float(value) > 0
    except OverflowError:
        return False


def _require_seconds(value: object, *, name: str) -> None:
    if not _is_positive(value):
        raise ConfigError(
            f"{name} must be a positive number of seconds, got {brief(value)}.",
            where="SyncConfig",
            remedy="Give a number above zero, or math.inf to switch it off.",
        )


def _require_count(value: object, *, name: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"{name} must be a whole number of synchronizations from 1 on, got {value!r}.",
            where="SyncConfig",
            remedy="Give a number, such as 100, or leave it out for no comparison.",
        )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        return
    allowed = ", ".join(repr(choice) for choice in choices)
    shards_parameters = name == "strategy" and value in ("zero3", "fsdp")
    remedy = "Use torch.distributed.fsdp.fully_shard to shard parameters." if shards_parameters else f"Choose one of: {allowed}."
    raise ConfigError(f"{name} cannot be {value!r}.", where="SyncConfig", remedy=remedy)


def _sorted_names(names: object) -> tuple[str, ...]:
    """In one order on every rank: that of a set of names differs from process to process."""
    listed = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise ConfigError(
            f"ignore must be a tuple of names, got {names!r}.",
            where="SyncConfig",
            remedy='Write ignore=("embedding.weight",).',
        )
    return tuple(sorted(listed))


def _expert_groups(groups: object) -> tuple[ExpertGroup, ...]:
    listed = tuple(groups) if isinstance(groups, tuple | list) else None
    if listed is None or not all(isinstance(group, ExpertGroup) for group in listed):
        raise ConfigError(
            f"experts must be a tuple of ExpertGroup, got {groups!r}.",
            where="SyncConfig",
            remedy='Write experts=(ExpertGroup(match="*.experts.*", process_group=group),).',
        )
    return listed


def _check_goes_with_experts(config: SyncConfig, group: ExpertGroup) -> None:
    if config.strategy == "hybrid":
        what, remedy = 'experts do not go with strategy="hybrid".', 'Use "ddp", "zero1" or "zero2".'
    elif config.nonfinite == "skip":
        what = 'nonfinite="skip" does not go with experts: only some ranks would know that a step is to be skipped.'
        remedy = 'Use "raise" or "warn".'
    elif config.op == "weighted":
        what = 'op="weighted" does not go with experts: their ranks know the weights of their own group only.'
        remedy = "Divide the loss by the number of tokens of all ranks, over the number of ranks."
    elif config.op == "sum" and group.divisor is not None:
        what, remedy = 'op="sum" does not divide, and a group of experts has a divisor.', 'Leave op="sum" or the divisor out.'
    else:
        return
    raise ConfigError(what, where=f"SyncConfig, ExpertGroup(match={group.match!r})", remedy=remedy)


def require_settings(config: object) -> None:
    """WrongType for what is neither settings nor None."""
    if not isinstance(config, SyncConfig | None):
        raise WrongType(
            f"config must be a SyncConfig, got {type(config).__name__}.",
            where="the settings of a wrapper or of attach",
            remedy="Write config=SyncConfig(**settings) for a dict of settings."
            if isinstance(config, dict)
            else "Write config=SyncConfig(...).",
        )


def _unreadable(what: str, *, remedy: str = "Use text that to_json() has written.") -> ConfigError:
    return ConfigError(what, where="SyncConfig.from_json", remedy=remedy)


def _did_you_mean(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known settings: {', '.join(sorted(known))}."
