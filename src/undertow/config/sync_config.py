"""The settings of a synchronization: what each means, and which values work."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Literal, Protocol, get_args, get_origin, runtime_checkable

from undertow.config.dtypes import dtype_name
from undertow.config.experts import ExpertGroup
from undertow.config.known_settings import with_known_settings
from undertow.config.outer import Outer
from undertow.config.refusals import refused
from undertow.errors import ConfigError, WrongType, one_of, require
from undertow.foreign import as_float
from undertow.wire import AUTO, PARAM_WIRES, WIRES

_MAX_SHOWN = 200  # characters of a path
_REMEDIES = {
    "op": "Gradients are always averaged. For the mean over all tokens, divide the loss by "
    "model.mean_over_ranks(num_tokens).wait(); for a sum, multiply it by the number of ranks.",
    "wire_dtype": 'Write wire="bfloat16".',
}
_DTYPES = ("reduce_dtype", "wire", "param_wire")


@runtime_checkable
class HasJson(Protocol):
    """A plan that settings can read; they only need its JSON text."""

    def to_json(self) -> str: ...


@with_known_settings(_REMEDIES)
@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Sets how gradients are synchronized.

    It must be the same on every rank; ranks compare it before the first step.

    Args:
        strategy: What each rank stores of gradients and optimizer state. "ddp" stores all of both;
            the other strategies store a shard and need a ShardedOptimizer. "zero1" keeps whole
            gradients between micro-batches, "zero2" keeps shards of them. "hybrid" is "zero1"
            within each row of a two-dimensional DeviceMesh; the rows are replicas of each other.
            None: "zero1" if there is a ShardedOptimizer, "ddp" until then.
        bucket_cap_mb: Largest bucket in MiB; None lets the library choose from the size of the
            model. Several sizes apply to the first buckets, one each; the last size holds for all
            buckets that follow. A parameter of less than a thirty-second of the smallest bucket
            goes with the one that follows, even above the size: a bias with its weight.
        order: The expected order of gradients: "observed" (the order of rank 0's first
            backward; reverse registration until then) or "reverse" (of registration).
        plan: A plan to pin: the path of a file written by `save_plan`, its text, or a `Plan`. It is
            stored as text. It overrides `bucket_cap_mb`, `order` and `auto_tune`.
        auto_tune: True tries at most six other plans on real steps, after the tenth, and takes one
            whose steps are clearly faster, by 2 % or more. It tries again only if parameters
            change. It has no effect with shards, if `bucket_cap_mb` or `plan` is given, with
            `overlap=False`, a communication hook or `record="off"`, or under
            torch.use_deterministic_algorithms. There another plan would round differently with
            three ranks or more; with "ordered" it would not, but the plan is kept too. False keeps
            the plan and still measures five steps, for profiles. Only `record="off"` stops that.
        overlap: False sends buckets after backward; the result is bit-identical for the same plan.
        reduction: "native" uses the backend's reduction, whose rounding may depend on the plan with
            three ranks or more. "ordered" adds in rank order, in fp32 if gradients are narrower:
            bit-identical under every plan. With "ordered" the strategies agree too if each step
            synchronizes once, parameters have 32 bits or more and `wire` is None. Two
            strategies add in another order: "zero2" averages each micro-batch over ranks and adds
            the means, and "hybrid" adds row by row, and sends sums of rows in the gradients' dtype.
        average_in_collective: False divides whole gradients before the collective, which then sums.
            It has no effect with shards or "ordered", which divide the sum.
        buffers: Before the first training forward of a step, as in torch, module buffers follow
            rank 0 ("rank0") or are left alone ("off"). With `outer`, "rank0" also averages
            floating-point ones over replicas.
        reduce_dtype: "float32", "fp32" or torch.float32 accumulates and reduces gradients of 16-bit
            parameters in fp32, and `.grad` is fp32. The optimizer must accept such gradients, as a
            ShardedOptimizer and torch's SGD do. None keeps the gradients' own dtype.
        wire: The format in which gradients are sent. "bfloat16" ("bf16") and "float16" ("fp16")
            halve the bytes of fp32; "int8" sends a byte for each element and an fp32 scale for
            each block of 512, a quarter, and rounds so that errors average out over steps. Ranks
            decode and add in fp32, in rank order, and send the mean in the same format: all ranks
            hold equal bits, under every plan. "auto" tries full width, int8 for all buckets, and
            int8 for the last ones, and keeps the fastest; it keeps full width where `auto_tune` has
            no effect, except with `bucket_cap_mb`. None is full width. For "hybrid" a pair is
            possible, within rows and across them: (None, "int8"). Sparse, complex and 16-bit
            gradients travel as they are if the format has no fewer bytes, and parameters of less
            than a block in full width.
        param_wire: The format in which a ShardedOptimizer sends updated parameters, "bfloat16" or
            "int8". Ranks send the difference to the values that all ranks hold, and
            each rank keeps the exact values of its shard; so errors do not add up. A checkpoint has
            both, if the optimizer has state. None is full width.
        ignore: Names of parameters and buffers that are left alone.
        nonfinite: The action if gradients on some rank contain NaN or Inf when an optimizer is
            about to step. "ignore" does not look for them: looking would cost a pass over every
            bucket, and on devices the host would wait for the last one. "skip" skips the step on
            every rank and changes nothing; it does not work with experts, or if a plain optimizer
            is given a closure. "raise" raises NonFiniteGradient on every rank. A step inside
            `no_sync()` is skipped, or raises, on its own rank only. Gradients that a GradScaler
            handles are left to it.
        check_replicas_every: Number of synchronizations between comparisons of a fingerprint of
            every parameter over all ranks; if one differs, every rank raises ReplicaMismatch. None
            compares none.
        stall_warning_s: Seconds of waiting after which all ranks report: the late rank, the
            operation that it is late for, and the code that it runs.
        stall_timeout_s: Seconds of waiting after which the step fails, with StallTimeout on every
            rank. Infinity turns off either limit. Over gloo the step then fails with StallTimeout
            when the timeout of the process group ends, which also cuts a longer stall_timeout_s
            short. If all ranks wait for different calls, the step fails soon after the report.
        experts: Groups of parameters that are reduced over separate process groups, each an
            ExpertGroup, in the same order on every rank. Not with "hybrid".
        record: "summary" (times of the last 64 steps), "full" (of every step) or "off".
        outer: An Outer, or a dict of its settings, lets replicas train alone for many steps and
            averages the differences of their parameters, for links between sites. None averages
            gradients in every step.

    Raises:
        ConfigError: For every value that cannot work.

    ```python
    config = SyncConfig(strategy="zero2", wire="bfloat16", nonfinite="raise")
    ```
    """

    strategy: Literal[None, "ddp", "zero1", "zero2", "hybrid"] = None
    bucket_cap_mb: float | tuple[float, ...] | None = None
    order: Literal["observed", "reverse"] = "observed"
    plan: str | os.PathLike[str] | HasJson | None = None
    auto_tune: bool = True
    overlap: bool = True
    reduction: Literal["native", "ordered"] = "native"
    average_in_collective: bool = True
    reduce_dtype: Literal["float32", "fp32"] | Any | None = None
    wire: Literal["bfloat16", "bf16", "float16", "fp16", "int8", "auto"] | Any | None = None
    param_wire: Literal["bfloat16", "bf16", "int8"] | Any | None = None
    buffers: Literal["rank0", "off"] = "rank0"
    ignore: tuple[str, ...] = ()
    experts: tuple[ExpertGroup, ...] = ()
    nonfinite: Literal["ignore", "skip", "raise"] = "ignore"
    check_replicas_every: int | None = None
    stall_warning_s: float = 30.0
    stall_timeout_s: float = 300.0
    record: Literal["summary", "full", "off"] = "summary"
    outer: Outer | None = None

    def __post_init__(self) -> None:
        caps = (
            tuple(self.bucket_cap_mb)
            if isinstance(self.bucket_cap_mb, list | tuple)
            else (self.bucket_cap_mb,)
        )
        if self.bucket_cap_mb is not None:
            for cap in caps or (None,):
                _require(
                    as_float(cap) > 0,
                    f"bucket_cap_mb must be a positive number of MiB, got {brief(cap)}.",
                    "Give a number above zero, such as 25, or leave it out for a planned size.",
                )
        ignored = (
            list(self.ignore)
            if isinstance(self.ignore, Iterable) and not isinstance(self.ignore, str)
            else [None]
        )
        _require(
            all(isinstance(name, str) for name in ignored),
            f"ignore must be a tuple of names, got {self.ignore!r}.",
            'Write ignore=("embedding.weight",).',
        )
        _require(
            isinstance(self.experts, tuple | list)
            and all(isinstance(group, ExpertGroup) for group in self.experts),
            f"experts must be a tuple of ExpertGroup, got {self.experts!r}.",
            'Write experts=(ExpertGroup(match="*.experts.*", process_group=group),).',
        )
        every = self.check_replicas_every
        _require(
            every is None or (type(every) is int and every > 0),
            "check_replicas_every must be a whole number of synchronizations, at least 1, got "
            f"{every!r}.",
            "Give a number, such as 100, or leave it out for no comparison.",
        )
        for name in ("stall_warning_s", "stall_timeout_s"):
            _require(
                as_float(getattr(self, name)) > 0,
                f"{name} must be a positive number of seconds, got {brief(getattr(self, name))}.",
                "Give a number above zero, or math.inf to switch it off.",
            )
        for name in _DTYPES:
            object.__setattr__(self, name, dtype_name(getattr(self, name)))
        object.__setattr__(self, "wire", _wire_of_axes(self.wire, self.strategy))
        if isinstance(self.bucket_cap_mb, list):
            object.__setattr__(self, "bucket_cap_mb", caps)
        # The order of a set of names differs from process to process.
        object.__setattr__(self, "ignore", tuple(sorted(ignored)))
        object.__setattr__(self, "experts", tuple(self.experts))
        object.__setattr__(self, "plan", _text_of_plan(self.plan))
        object.__setattr__(self, "outer", _outer_of(self))
        for field in dataclasses.fields(self):
            _check_choice(field, getattr(self, field.name))
        for group in self.experts:
            where = f"SyncConfig, ExpertGroup(match={group.match!r})"
            if self.strategy == "hybrid":
                raise refused("experts", "hybrid", where=where)
            if self.nonfinite == "skip":
                raise refused("experts", "skip", where=where)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, which JSON can hold; `SyncConfig(**settings)` reads them.

        A group of experts is a dict without its process group, which exists in this process only.
        """
        groups = tuple(group.to_dict() for group in self.experts)
        return {**dataclasses.asdict(dataclasses.replace(self, experts=())), "experts": groups}

    @property
    def wires(self) -> tuple[str | None, str | None]:
        """The formats of gradients from the first plan on: within rows of a mesh, and across."""
        if isinstance(self.wire, tuple):
            inside, across = self.wire
            return inside, across
        wire = None if self.wire == AUTO else self.wire
        return wire, wire

    @property
    def plan_wire(self) -> str | None:
        """The format that buckets are laid out for: the one with the larger blocks."""
        return max(filter(None, self.wires), key=lambda name: WIRES[name].block, default=None)

    @property
    def block(self) -> int:
        """The elements of a block of the format of updated parameters."""
        return 1 if self.param_wire is None else WIRES[self.param_wire].block


def _require(holds: object, what: str, remedy: str) -> None:
    require(holds, what, where="SyncConfig", remedy=remedy)


def _text_of_plan(plan: object) -> str | None:
    """Returns the plan as JSON text. A string that begins with a brace is JSON.

    Any other is the path of a file.
    """
    if isinstance(plan, HasJson):
        return plan.to_json()
    if plan is None or (isinstance(plan, str) and plan.lstrip().startswith("{")):
        return plan
    what = f"plan must be a Plan, the path of a saved one, or its text, got {type(plan).__name__}."
    if isinstance(plan, str | os.PathLike):
        try:
            return Path(plan).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            what = (
                f"the plan cannot be read from {str(plan)[:_MAX_SHOWN]!r}: "
                f"{getattr(error, 'strerror', None) or error}."
            )
    raise ConfigError(
        what,
        where="SyncConfig(plan=...)",
        remedy="Give the path of a file that save_plan() has written, its text, or a Plan.",
    )


def replaced(config: SyncConfig, settings: Mapping[str, Any]) -> SyncConfig:
    """Returns the config with other settings. A dict for `outer` replaces only the settings in it.

    Raises ConfigError for settings that cannot work.
    """
    settings = dict(settings)
    outer = settings.get("outer")
    if isinstance(outer, Mapping) and config.outer is not None:
        settings["outer"] = {**config.outer.to_dict(), **outer}
    return dataclasses.replace(config, **settings)


def _outer_of(config: "SyncConfig") -> Outer | None:
    """Returns the outer settings, which may be given as a dict."""
    outer = Outer(**config.outer) if isinstance(config.outer, Mapping) else config.outer
    _require(
        isinstance(outer, Outer | None),
        f"outer must be an Outer, got {brief(outer)}.",
        "Write outer=Outer(every=30).",
    )
    if outer is not None and config.strategy == "hybrid":
        raise refused("hybrid", "outer", where="SyncConfig")
    if outer is not None and config.experts:
        raise refused("experts", "outer", where="SyncConfig")
    return outer


def _wire_of_axes(wire: object, strategy: str | None) -> object:
    """Returns the long names of a pair of formats; any other value as it is."""
    if not isinstance(wire, list | tuple):
        return wire
    _require(
        strategy == "hybrid" and len(wire) == 2,
        f"wire must be one format, got {wire!r}.",
        'Only strategy="hybrid" takes two: within rows of the mesh, and across them.',
    )
    return tuple(map(dtype_name, wire))


def _check_choice(field: dataclasses.Field[Any], value: object) -> None:
    """Raises ConfigError unless the value is one of those that the type of the setting lists, if it
    lists them."""
    literals = get_args(field.type) if get_origin(field.type) is Literal else None
    choices: Sequence[object] | None = (True, False) if field.type is bool else literals
    match field.name:
        case "reduce_dtype":
            choices = (None, "float32")
        case "wire" if isinstance(value, tuple):
            choices = tuple(product((None, *WIRES), repeat=2))
        case "wire":
            choices = (None, *WIRES, AUTO)
        case "param_wire":
            choices = (None, *PARAM_WIRES)
    if choices is None or any(
        type(value) is type(choice) and value == choice for choice in choices
    ):
        return
    remedy = one_of(value, choices)
    if isinstance(value, tuple):
        remedy = f"Each of the two is one of: {', '.join(map(repr, (None, *WIRES)))}."
    if field.name == "strategy" and value in ("zero3", "fsdp"):
        remedy = "Use torch.distributed.fsdp.fully_shard to shard parameters."
    raise ConfigError(f"{field.name} cannot be {value!r}.", where="SyncConfig", remedy=remedy)


def require_settings(config: object) -> None:
    """Raises WrongType unless `config` is a SyncConfig or None."""
    if not isinstance(config, SyncConfig | None):
        remedy = "Write config=SyncConfig(**settings) for a dict of settings."
        raise WrongType(
            f"config must be a SyncConfig, got {type(config).__name__}.",
            where="the settings of a wrapper or of attach",
            remedy=remedy if isinstance(config, dict) else "Write config=SyncConfig(...).",
        )
