"""Checks that an optimizer is elementwise, so that it can update a parameter in pieces."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.errors import ConfigError
from undertow.runtime.torch_private import private

# Their update of a shard differs from the same elements of an update of the whole parameter.
_NOT_ELEMENTWISE = {
    "Adafactor": "it keeps one statistic for each row and column of a matrix",
    "LBFGS": "it takes scalar products of whole gradients, and evaluates the model several times in a step",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it updates the rows of sparse gradients",
    "Shampoo": "it keeps a statistic for each pair of rows",
    "SOAP": "it rotates whole matrices",
    "LAMB": "it scales an update by the norm of the whole parameter",
    "LARS": "it scales an update by the norm of the whole parameter",
}
_KNOWN = frozenset(["SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD"])
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # takes parameters or parameter groups
_SHAPE, _CUT, _NUM_STEPS = (4, 6), 9, 3


def require_elementwise(cls: type[Any], make: MakeOptimizer, hyper_parameters: dict[str, Any], *, device: torch.device) -> None:
    """Raises ConfigError if an optimizer is not elementwise, or if its steps change values in its parameter groups.

    torch's optimizers are in a table; any other is tried out on a few numbers.
    """
    is_torchs = cls.__module__.startswith("torch.optim")
    reason = _NOT_ELEMENTWISE.get(cls.__name__)
    if reason is None and not (is_torchs and cls.__name__ in _KNOWN):
        reason = _found_out(make, hyper_parameters, device)
    if reason is not None:
        raise ConfigError(
            f"{cls.__name__} cannot be sharded: {reason}.",
            where="ShardedOptimizer, which gives each rank a part of a parameter as a flat piece",
            remedy="Use an elementwise optimizer such as AdamW or SGD, or this one without sharding.",
        )


def state_of_one_element(make: MakeOptimizer, hyper_parameters: dict[str, Any], *, like: Tensor) -> dict[str, Any]:
    """Returns the optimizer's state of a parameter with one element, after one step."""
    optimizer, _ = _stepped(make, hyper_parameters, [torch.zeros_like(like)], [[torch.ones_like(like)]])
    (param,) = optimizer.param_groups[0]["params"]
    return dict(optimizer.state.get(param, {}))


def _found_out(make: MakeOptimizer, hyper_parameters: dict[str, Any], device: torch.device) -> str | None:
    """Runs a few steps of an unknown optimizer; returns why it cannot be sharded, or None if it can."""
    generator = torch.Generator().manual_seed(0)  # does not touch the user's generator
    start, *grads = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(_NUM_STEPS + 1))
    whole, before = _stepped(make, hyper_parameters, [start], [[grad] for grad in grads])
    parts, _ = _stepped(make, hyper_parameters, _cut(start), map(_cut, grads))
    if not torch.equal(_values(whole), _values(parts)):
        return "it updates parts of a parameter differently from the whole"
    after = _settings(whole)
    changed = [repr(name) for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        return f"its steps change {', '.join(changed)} in its parameter groups, and only its state is kept, moved and saved"
    return None


def _stepped(
    make: MakeOptimizer, hyper_parameters: dict[str, Any], start: Sequence[Tensor], grads: Iterable[Sequence[Tensor]]
) -> tuple[torch.optim.Optimizer, dict[str, str]]:
    """Returns an optimizer of parameters like `start`, after one step for each of `grads`, and its settings before them."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = make([{"params": params, **copy.deepcopy(hyper_parameters)}])
    before = _settings(optimizer)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        private.step_unwatched(optimizer)
    return optimizer, before


def _cut(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten()[:_CUT], tensor.flatten()[_CUT:]]


def _values(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([param.detach().flatten() for param in optimizer.param_groups[0]["params"]])


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns settings as text, because a function or NaN among them does not equal its own copy."""
    return {name: repr(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
