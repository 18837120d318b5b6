"""Hooks for the steps of all optimizers, and the optimizers over shards, which are not the user's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from support import inside
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import MLP, SMALL, one_step
from undertow import DistributedDataParallel, ShardedOptimizer


class StepsAsItsBase(torch.optim.AdamW):
    """torch calls the hooks of all optimizers around the step of the base once more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WithOwnHook(torch.optim.AdamW):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_steps = 0
        self.register_step_pre_hook(lambda *_: setattr(self, "num_steps", self.num_steps + 1))


@contextlib.contextmanager
def two_models(cls: type[Any], *, eager: bool) -> Iterator[tuple[DistributedDataParallel, Any]]:
    """The first one, and its optimizer; both are there and neither has to do with the other."""
    settings = {"strategy": "zero1", **SMALL}
    with wrapped(MLP.model(), **settings) as ddp, wrapped(MLP.model(), **settings):
        yield ddp, ShardedOptimizer(cls, ddp, lr=0.01, eager=eager)


@in_ranks(2)
@pytest.mark.parametrize("eager", [False, True], ids=["barrier", "eager"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, StepsAsItsBase, WithOwnHook])
def test_parameters_are_looked_through_as_often_whatever_the_number_of_buckets(cls: type[Any], eager: bool) -> None:
    """In the thread that trains: at a forward, at the step of another model. Hooks of the optimizer's own are called."""
    with two_models(cls, eager=eager) as (ddp, opt):
        for step in range(2):
            one_step(ddp, opt, step)
        assert len(ddp.plan.buckets) > 2
        with inside.looks_at_parameters() as threads:
            one_step(ddp, opt, 2)
        if cls is WithOwnHook:
            assert {inner.num_steps for inner in inside.inner_optimizers(opt)} == {3}
    assert threads == [threading.get_ident()] * 2


@in_ranks(2)
@pytest.mark.parametrize("eager", [False, True], ids=["barrier", "eager"])
def test_the_users_hooks_for_all_optimizers_are_called_once_a_step(eager: bool) -> None:
    called: list[tuple[str, str, int]] = []

    def note(when: str) -> Any:
        return lambda optimizer, *_: called.append((when, type(optimizer).__name__, threading.get_ident()))

    with two_models(torch.optim.AdamW, eager=eager) as (ddp, opt):
        hooks = [register_optimizer_step_pre_hook(note("before")), register_optimizer_step_post_hook(note("after"))]
        for step in range(3):
            called.clear()
            one_step(ddp, opt, step)
            assert called == [(when, "ShardedOptimizer", threading.get_ident()) for when in ("before", "after")]
        for hook in hooks:
            hook.remove()
