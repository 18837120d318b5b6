"""Makes a sharded optimizer of one that exists already."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from undertow.errors import WrongType, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import description, params_of
from undertow.ranks.facts import Agreement
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private

# torch's optimizers set these flags in their first step, and the last one for their schedulers.
_OF_TORCH = {
    *("state", "param_groups", "defaults"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_opt_called"),
}


@private.untraced
def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    model: GradientSync | nn.Module,
    *,
    schedulers: Iterable[Any] = (),
    state_dict: Literal["full", "sharded"] = "full",
    elementwise: bool = False,
) -> ShardedOptimizer:
    """Returns a ShardedOptimizer made of an optimizer that exists already; a collective call.

        optimizer = timm.optim.create_optimizer_v2(model.module, "adamw", weight_decay=0.05)
        optimizer = undertow.shard_optimizer(optimizer, model)

    It is for optimizers that a factory makes, as in timm, Transformers and Accelerate. The result
    has the class, the parameter groups and the state of `optimizer`. If `optimizer` has stepped,
    its state moves, and each rank keeps its shards. Register hooks on the result. `optimizer` must
    not be stepped afterwards: its step raises PhaseError.

    Args:
        optimizer: An optimizer of a class that ShardedOptimizer takes, the same on every rank.
        model: The result of `attach` or `DistributedDataParallel`.
        schedulers: All learning-rate schedulers of `optimizer`. They continue on the result. One
            that is left out acts on the result until a state is loaded.
        state_dict: As for ShardedOptimizer.
        elementwise: As for ShardedOptimizer.

    Returns:
        The sharded optimizer.

    Raises:
        ConfigError: If a new optimizer of its class would not behave the same: if its constructor
            takes other arguments than its defaults, if it has hooks, schedulers although none are
            given, or other attributes that a new one does not have. Also if one of `schedulers`
            belongs to another optimizer, and if ShardedOptimizer raises it. `optimizer` and
            `schedulers` stay as they are.
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
    settings = _constructor_settings(optimizer)
    # Schedulers have torch replace `step`, to warn if they step first.
    is_watched = getattr(vars(optimizer).get("step"), "__wrapped__", None) is type(optimizer).step
    reason = _reason_against(optimizer, schedulers, settings, is_watched=is_watched)
    require(
        not reason,
        f"{type(optimizer).__name__} cannot be taken over: {reason}.",
        where="shard_optimizer",
        remedy="Give a plain optimizer and all its schedulers, as schedulers=[...], and register "
        "hooks on the one that is returned; or write ShardedOptimizer(cls, model, params, ...).",
    )
    groups = [
        {
            name: list(value) if name == "params" else copy.deepcopy(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    sharded = ShardedOptimizer(
        type(optimizer),
        model,
        groups,
        state_dict=state_dict,
        elementwise=elementwise,
        **settings,
    )
    group = sharded._sync._group
    if group.num_ranks > 1:
        states = (optimizer.state.get(param, {}) for param in params_of(optimizer))
        described = [{key: description(value) for key, value in state.items()} for state in states]
        Agreement(group, settings={"state of the optimizer": described}).require()
    if optimizer.state:
        sharded.load_state_dict(optimizer.state_dict())
        optimizer.state.clear()
    # a scheduler that is not known acts on the result
    optimizer.param_groups = sharded.param_groups
    for scheduler in schedulers:
        scheduler.optimizer = sharded
    if is_watched:
        # has torch replace this step too, and changes no rate
        torch.optim.lr_scheduler.ConstantLR(sharded, factor=1.0)
        if "_opt_called" in vars(optimizer):
            vars(sharded)["_opt_called"] = True
    return sharded


def _reason_against(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    settings: dict[str, Any],
    *,
    is_watched: bool,
) -> str:
    """Returns why it cannot be taken over, or "" if it can."""
    for each in schedulers:
        if getattr(each, "optimizer", None) is not optimizer:
            return f"{type(each).__name__} is not a scheduler of it"
    if is_watched and not schedulers:
        return "it has a scheduler that is not given"
    return _found_different(optimizer, settings, {"step"} if is_watched else set())


def _with_parts(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Returns schedulers, and after each one the schedulers that it runs in turn or together."""
    return chain.from_iterable(
        [each, *_with_parts(getattr(each, "_schedulers", ()))] for each in schedulers
    )


def _constructor_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the defaults that are arguments of the constructor; a class may add others."""
    arguments: set[str] = set()
    for cls in type(optimizer).__mro__:
        if cls is torch.optim.Optimizer:  # every constructor passes its keyword arguments on
            return optimizer.defaults
        parameters = inspect.signature(cls).parameters.values()
        arguments.update(parameter.name for parameter in parameters)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: value for name, value in optimizer.defaults.items() if name in arguments}


def _found_different(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    passed_over: Set[str],
) -> str:
    """Returns how a new optimizer with these settings and groups differs, or "" if it does not."""
    make: Any = type(optimizer)
    try:
        # With the same values, not copies, whose texts may differ.
        new = make([dict(group) for group in optimizer.param_groups], **settings)
    except Exception as error:  # a constructor may raise anything
        return f"a new one cannot be made with its defaults ({type(error).__name__}: {error})"
    differences = _attributes(optimizer).items() ^ _attributes(new).items()
    names = sorted({name for name, _ in differences} - passed_over)
    return f"a new one differs in {', '.join(names)}" if names else ""


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, str | int]:
    """Returns the attributes of an optimizer as text, and the number of its hooks."""
    return {
        name: len(value) if isinstance(value, OrderedDict) else repr(value)
        for name, value in vars(optimizer).items()
        if name not in _OF_TORCH
    }
