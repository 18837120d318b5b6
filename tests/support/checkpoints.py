"""Stretches of training between checkpoints, over any number of ranks."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from support.models import CASES, Case
from support.sharded import NARROW, step_of, training
from undertow import DistributedDataParallel


@dataclass(frozen=True)
class Setup:
    case: str = "mlp"
    strategy: str = "zero1"
    optimizer: str = "AdamW"
    bucket_cap_mb: float | None = 3e-4
    mesh: tuple[int, ...] = ()  # its shape


def case_of(setup: Setup) -> Case:
    return NARROW[torch.bfloat16] if setup.case == "brain" else CASES[setup.case]


@contextlib.contextmanager
def trained_by(setup: Setup, *, num_steps: int = 0, seed: int = 7) -> Iterator[tuple[DistributedDataParallel, Any]]:
    torch.manual_seed(seed)
    how = {"reduction": "ordered", "bucket_cap_mb": setup.bucket_cap_mb, "shape": setup.mesh}
    with training(case_of(setup).make(), setup.strategy, setup.optimizer, **how) as (ddp, optimizer):
        train(setup, ddp, optimizer, steps=range(num_steps))
        yield ddp, optimizer


def train(setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: range) -> None:
    for step in steps:
        step_of(model, optimizer, case_of(setup), step)  # what it has sent is still on its way afterwards


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, as plain torch has it; a collective call."""
    model.wait()
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }


def state_after(setup: Setup, num_steps: int) -> dict[str, Any]:
    with trained_by(setup, num_steps=num_steps) as both:
        return whole_state(*both)


def taken_from(setup: Setup, state: dict[str, Any], *, steps: range) -> dict[str, Any]:
    with trained_by(setup, seed=8) as (model, optimizer):
        load_whole(model, optimizer, state)
        train(setup, model, optimizer, steps=steps)
        return copied(whole_state(model, optimizer))


def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def to_bytes(state: Any) -> bytes:
    """For another process: tensors would travel by shared memory."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes, *, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def copied(state: Any, *, weights_only: bool = True) -> Any:
    return from_bytes(to_bytes(state), weights_only=weights_only)


def require_equal(ours: Any, wanted: Any, where: str = "") -> None:
    torch.testing.assert_close(ours, wanted, rtol=0.0, atol=0.0, equal_nan=True, msg=lambda text: f"{where}: {text}")
