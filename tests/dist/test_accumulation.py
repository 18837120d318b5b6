"""Reductions by hand that cannot be right. What is accumulated and reduced is in test_programs.py."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.errors import text_of
from support.models import CASES, Branches, noise
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import one_step, parameters, require_same_everywhere, stepped
from undertow import ConfigError, Desync, PhaseError

CASE = CASES["mlp"]


def accumulate(ddp: nn.Module, step: int = 0) -> None:
    with ddp.no_sync():
        CASE.loss(ddp, step).backward()


def nothing_to_reduce(number: int, ranks: str = "0, 1") -> str:
    return (
        f"there is nothing to reduce on rank {ranks}: no accumulation has run there since the last synchronisation.\n"
        f"  reduce_gradients_async(), synchronisation {number}\n"
        "  Run backward inside accumulate() or no_sync() on every rank, then reduce once."
    )


def reduced_twice(number: int, ranks: str = "0, 1") -> str:
    return (
        f"an earlier reduction was not waited for on rank {ranks}.\n"
        f"  reduce_gradients_async(), synchronisation {number}\n"
        "  Call wait() on what reduce_gradients_async() has returned before the next call."
    )


@in_ranks(2)
def test_a_reduction_at_the_wrong_time_is_an_error() -> None:
    with wrapped(Branches(2)) as ddp:
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(0)
        with ddp.no_sync():
            ddp(noise(2, 4), (0, 1)).sum().backward()
        reduction = ddp.reduce_gradients_async()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == reduced_twice(2)
        reduction.wait()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(3)
        ddp(noise(2, 4), (0, 1)).sum().backward()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(5)
        ddp.module.layers[0].weight.register_hook(lambda _: ddp.reduce_gradients_async())
        assert text_of(PhaseError, ddp(noise(2, 4), (0, 1)).sum().backward) == (
            "reduce_gradients_async() was called inside a backward.\n"
            "  Sync.reduce_gradients_async\n"
            "  Call it after the last backward of the step."
        )


@in_ranks(2)
def test_a_backward_during_a_reduction_is_an_error() -> None:
    with wrapped(CASE.model()) as ddp:
        accumulate(ddp)
        loss = CASE.loss(ddp, 1)
        reduction = ddp.reduce_gradients_async()
        assert text_of(PhaseError, loss.backward) == (
            "a backward began while gradients are being synchronised.\n"
            "  synchronisation 0\n"
            "  Wait for reduce_gradients_async() before the next backward."
        )
        reduction.wait()


@in_ranks(2)
def test_a_rank_alone_is_told_the_same() -> None:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with wrapped(CASE.model(), process_group=group) as ddp:
        for then in (int, lambda: CASE.loss(ddp, 1).backward(), int):
            assert text_of(PhaseError, ddp.reduce_gradients_async).startswith("there is nothing to reduce on rank 0: ")
            accumulate(ddp)
            ddp.reduce_gradients_async("sum").wait()
            then()
    dist.destroy_process_group(group)


@in_ranks(2, 3)
@pytest.mark.parametrize("is_twice", [False, True], ids=["nothing accumulated", "twice"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_where_one_rank_reduces_at_the_wrong_time_all_are_told(strategy: str, is_twice: bool) -> None:
    """Rank 1 alone is wrong, and all go on afterwards."""
    is_wrong = dist.get_rank() == 1
    with stepped(1, strategy, bucket_cap_mb=1e-4) as (ddp, opt):
        opt.zero_grad()
        if is_twice:
            accumulate(ddp)
            reduction = ddp.reduce_gradients_async()
        if is_twice and not is_wrong:
            reduction.wait()
        if not is_wrong:
            accumulate(ddp)
        expected = reduced_twice(2, "1") if is_twice else nothing_to_reduce(1, "1")
        assert text_of(PhaseError, lambda: ddp.reduce_gradients_async().wait()) == expected
        for step in range(2):
            one_step(ddp, opt, step)
        require_same_everywhere(parameters(ddp))


@in_ranks(2)
def test_an_op_that_cannot_be_right_is_refused_on_every_rank() -> None:
    """Unknown ones, hooks, weights, shards of an earlier mean, and ranks that differ."""
    rank = dist.get_rank()
    with wrapped(CASE.model()) as ddp:
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("avg")) == (
            'op must be "mean" or "sum", got \'avg\'.\n  reduce_gradients_async(op)\n  Leave it out for the op of the settings.'
        )
        assert text_of(Desync, lambda: ddp.reduce_gradients_async(("sum", "mean")[rank]).wait()) == (
            f'ranks are not in the same step.\n  synchronisation 0, rank {rank}\n  rank 0: synchronisation 0, op="sum"\n'
            "  rank 1: synchronisation 0\n"
            "  Run as many synchronised backwards and optimizer steps on every rank; one without a backward calls finish()."
        )
        ddp.weight(2.0)
        accumulate(ddp)
        assert text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()) == (
            'weights divide gradients, and op="sum" was asked for on rank 0, 1.\n'
            "  reduce_gradients_async(), synchronisation 1\n"
            "  Leave the op or the weights out."
        )
    with wrapped(CASE.model()) as ddp:
        ddp.register_comm_hook(None, allreduce_hook)
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("sum")) == (
            "with a communication hook it is the hook that divides gradients.\n"
            "  reduce_gradients_async(op)\n"
            "  Leave op out, and have the hook do what you want."
        )
    with stepped(2) as (ddp, _opt):
        accumulate(ddp)
        assert text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()) == (
            "rank 0, 1 holds shards of what an earlier synchronisation has brought, which another op would count again.\n"
            "  reduce_gradients_async(), synchronisation 2\n"
            "  Call zero_grad() before the accumulation, or set op in SyncConfig."
        )
