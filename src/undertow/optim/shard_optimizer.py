"""Makes sharded optimizers of optimizers that exist already."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, cast, overload

import torch
from torch import nn

from undertow.engine.progress import params_of
from undertow.errors import WrongType, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import description, updates_whole_parameters
from undertow.ranks.agreement import require_agreement
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private


@overload
def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    model: GradientSync | nn.Module,
    *,
    schedulers: Iterable[Any] = (),
    whole: bool | None = None,
) -> ShardedOptimizer: ...


@overload
def shard_optimizer(
    optimizer: Sequence[torch.optim.Optimizer],
    model: GradientSync | nn.Module,
    *,
    schedulers: Iterable[Any] = (),
    whole: bool | None = None,
) -> list[ShardedOptimizer]: ...


@private.untraced
def shard_optimizer(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: GradientSync | nn.Module,
    *,
    schedulers: Iterable[Any] = (),
    whole: bool | None = None,
) -> ShardedOptimizer | list[ShardedOptimizer]:
    """Returns a ShardedOptimizer made of an optimizer that exists already, or a list made of
    several; a collective call.

        optimizer = timm.optim.create_optimizer_v2(model.module, "adamw", weight_decay=0.05)
        optimizer = undertow.shard_optimizer(optimizer, model)
        muon, adamw = undertow.shard_optimizer([muon, adamw], model)

    It is for optimizers that a factory makes, as in timm, Transformers and Accelerate. The result
    has the class, the attributes, the parameter groups and the state of `optimizer`. If `optimizer`
    has stepped, its state moves, and each rank keeps its shards. Register hooks on the result.
    `optimizer` must not be stepped afterwards: its step raises PhaseError.

    Args:
        optimizer: An optimizer of a class that ShardedOptimizer takes, the same on every rank; or
            several over different parameters, which together have every trained parameter.
        model: The result of `attach` or `DistributedDataParallel`.
        schedulers: All learning-rate schedulers of `optimizer`. They continue on the result. One
            that is left out acts on the result until a state is loaded.
        whole: As for ShardedOptimizer, for each optimizer.

    Returns:
        The sharded optimizer, or a list of them in the given order.

    Raises:
        ConfigError: If an optimizer has hooks, a replaced `step`, or schedulers although none are
            given. Also if one of `schedulers` belongs to another optimizer, if two optimizers have
            a parameter, and if ShardedOptimizer raises it. The given objects stay as they are.
        PlanMismatch: On every rank, if ranks have different groups or different kinds of state.
    """
    given: list[Any] = [optimizer]
    is_list = isinstance(optimizer, Sequence) and len(optimizer) > 0
    if is_list:
        given = list(cast(Sequence[torch.optim.Optimizer], optimizer))
    schedulers = list(_with_parts(schedulers))
    for each in given:
        _require_plain(each, schedulers, given)
    kinds = list(map(updates_whole_parameters, map(type, given), repeat(whole)))
    _require_apart(given)
    made = [
        ShardedOptimizer._of(each, model, is_whole=is_whole)
        for each, is_whole in zip(given, kinds, strict=True)
    ]
    group = made[0]._sync._group
    if group.num_ranks > 1:
        described = list(map(_described_state, given))
        require_agreement(group, settings={"state of the optimizer": described})
    for each, sharded in zip(given, made, strict=True):
        _move(each, sharded, schedulers)
    return made if is_list else made[0]


def _require_plain(optimizer: Any, schedulers: Sequence[Any], given: Sequence[Any]) -> None:
    """Raises an error unless `optimizer`, one of those `given`, can be taken over with its
    schedulers."""
    require(
        isinstance(optimizer, torch.optim.Optimizer)
        and not isinstance(optimizer, ShardedOptimizer),
        "optimizer must be an optimizer of torch's that is not sharded, or a list of some, got "
        f"{type(optimizer).__name__}.",
        where="shard_optimizer",
        remedy="Give the optimizer itself, such as torch.optim.AdamW(model.parameters(), lr=...).",
        error=WrongType,
    )
    own = vars(optimizer)
    reasons = [
        f"{type(each).__name__} is not a scheduler of it"
        for each in schedulers
        if getattr(each, "optimizer", None) not in given
    ]
    has_scheduler = any(getattr(each, "optimizer", None) is optimizer for each in schedulers)
    if _is_watched(optimizer) and not has_scheduler:
        reasons.append("it has a scheduler that is not given")
    if "step" in own and not _is_watched(optimizer):
        reasons.append("its `step` was replaced")
    if any(isinstance(value, OrderedDict) and value for value in own.values()):
        reasons.append("it has hooks")
    require(
        not reasons,
        f"{type(optimizer).__name__} cannot be taken over: {', '.join(reasons)}.",
        where="shard_optimizer",
        remedy="Give a plain optimizer and all its schedulers, as schedulers=[...], and register "
        "hooks on the one that is returned; or write ShardedOptimizer(cls, model, params, ...).",
    )


def _require_apart(given: Sequence[torch.optim.Optimizer]) -> None:
    counts = Counter(map(id, chain.from_iterable(map(params_of, given))))
    num_shared = sum(count > 1 for count in counts.values())
    require(
        not num_shared,
        f"several of the optimizers have the same parameters, {num_shared} of {len(counts)}.",
        where=f"shard_optimizer([{', '.join(type(each).__name__ for each in given)}], ...)",
        remedy="Give each parameter to one of them.",
    )


def _described_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    states = (optimizer.state.get(param, {}) for param in params_of(optimizer))
    return [{key: description(value) for key, value in state.items()} for state in states]


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if it has schedulers: they have torch replace `step`, to warn if they step
    first."""
    step = vars(optimizer).get("step")
    return getattr(step, "__wrapped__", None) is type(optimizer).step


def _move(
    optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer, schedulers: Sequence[Any]
) -> None:
    """Moves the state of `optimizer`, and its schedulers among these, to `sharded`."""
    # a scheduler that is not known acts on the result
    optimizer.param_groups = sharded.param_groups
    sharded.state.update(optimizer.state)
    optimizer.state = defaultdict(dict)
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer:
            scheduler.optimizer = sharded
    if _is_watched(optimizer):
        # has torch replace this step too, and changes no rate
        torch.optim.lr_scheduler.ConstantLR(sharded, factor=1.0)
        private.note_steps_before_schedulers(optimizer, sharded)


def _with_parts(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Returns schedulers, and after each one the schedulers that it runs in turn or together."""
    return chain.from_iterable(
        [each, *_with_parts(private.inner_schedulers(each))] for each in schedulers
    )
