"""Makes a sharded optimizer of one that exists already."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from undertow.engine.progress import params_of
from undertow.errors import WrongType, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import description
from undertow.ranks.agreement import Agreement
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private


@private.untraced
def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    model: GradientSync | nn.Module,
    *,
    schedulers: Iterable[Any] = (),
    elementwise: bool = False,
) -> ShardedOptimizer:
    """Returns a ShardedOptimizer made of an optimizer that exists already; a collective call.

        optimizer = timm.optim.create_optimizer_v2(model.module, "adamw", weight_decay=0.05)
        optimizer = undertow.shard_optimizer(optimizer, model)

    It is for optimizers that a factory makes, as in timm, Transformers and Accelerate. The result
    has the class, the attributes, the parameter groups and the state of `optimizer`. If `optimizer`
    has stepped, its state moves, and each rank keeps its shards. Register hooks on the result.
    `optimizer` must not be stepped afterwards: its step raises PhaseError.

    Args:
        optimizer: An optimizer of a class that ShardedOptimizer takes, the same on every rank.
        model: The result of `attach` or `DistributedDataParallel`.
        schedulers: All learning-rate schedulers of `optimizer`. They continue on the result. One
            that is left out acts on the result until a state is loaded.
        elementwise: As for ShardedOptimizer.

    Returns:
        The sharded optimizer.

    Raises:
        ConfigError: If `optimizer` has hooks, a replaced `step`, or schedulers although none are
            given. Also if one of `schedulers` belongs to another optimizer, and if ShardedOptimizer
            raises it. `optimizer` and `schedulers` stay as they are.
        PlanMismatch: On every rank, if ranks have different groups or different kinds of state.
    """
    require(
        isinstance(optimizer, torch.optim.Optimizer)
        and not isinstance(optimizer, ShardedOptimizer),
        "optimizer must be an optimizer of torch's that is not sharded, got "
        f"{type(optimizer).__name__}.",
        where="shard_optimizer",
        remedy="Give the optimizer itself, such as torch.optim.AdamW(model.parameters(), lr=...).",
        error=WrongType,
    )
    schedulers = list(_with_parts(schedulers))
    own = vars(optimizer)
    # Schedulers have torch replace `step`, to warn if they step first.
    is_watched = getattr(own.get("step"), "__wrapped__", None) is type(optimizer).step
    reasons = [
        f"{type(each).__name__} is not a scheduler of it"
        for each in schedulers
        if getattr(each, "optimizer", None) is not optimizer
    ]
    if is_watched and not schedulers:
        reasons.append("it has a scheduler that is not given")
    if "step" in own and not is_watched:
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
    sharded = ShardedOptimizer._of(optimizer, model, elementwise=elementwise)
    group = sharded._sync._group
    if group.num_ranks > 1:
        states = (optimizer.state.get(param, {}) for param in params_of(optimizer))
        described = [{key: description(value) for key, value in state.items()} for state in states]
        Agreement(group, settings={"state of the optimizer": described}).require()
    # a scheduler that is not known acts on the result
    optimizer.param_groups = sharded.param_groups
    sharded.state.update(optimizer.state)
    optimizer.state = defaultdict(dict)
    for scheduler in schedulers:
        scheduler.optimizer = sharded
    if is_watched:
        # has torch replace this step too, and changes no rate
        torch.optim.lr_scheduler.ConstantLR(sharded, factor=1.0)
        if "_opt_called" in own:
            vars(sharded)["_opt_called"] = True
    return sharded


def _with_parts(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Returns schedulers, and after each one the schedulers that it runs in turn or together."""
    return chain.from_iterable(
        [each, *_with_parts(getattr(each, "_schedulers", ()))] for each in schedulers
    )
