"""Reductions by hand, and join(): what is refused, and what programs cannot say."""

import contextlib
import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from support.alike import backwards, require_equal_values
from support.errors import text_of
from support.levels import some
from support.models import Branches, mlp, noise
from support.naive import require_same, wrapped
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    chain,
    optimizer_for,
    require_same_everywhere,
    stepped,
)
from undertow import (
    ConfigError,
    Desync,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
)


def accumulate(ddp: nn.Module, step: int = 0) -> None:
    with ddp.no_sync():
        MLP.loss(ddp, step).backward()


def nothing_to_reduce(number: int) -> str:
    return (
        "there is nothing to reduce: no accumulation has run since the last synchronization.\n"
        f"  reduce_gradients_async(), synchronization {number}, rank {dist.get_rank()}\n"
        "  Run backward inside accumulate() or no_sync() on every rank, then reduce once."
    )


@in_ranks(2)
def test_a_reduction_at_the_wrong_time_is_an_error() -> None:
    with wrapped(Branches(2)) as ddp:
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(0)
        with ddp.no_sync():
            ddp(noise(2, 4), (0, 1)).sum().backward()
        reduction = ddp.reduce_gradients_async()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == (
            "gradients are being synchronized already.\n"
            "  synchronization 0\n"
            "  Call this outside of backward, and wait for the earlier reduction first."
        )
        reduction.wait()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(1)
        ddp(noise(2, 4), (0, 1)).sum().backward()
        assert text_of(PhaseError, ddp.reduce_gradients_async) == nothing_to_reduce(2)
        ddp.module.layers[0].weight.register_hook(lambda _: ddp.reduce_gradients_async())
        assert text_of(PhaseError, ddp(noise(2, 4), (0, 1)).sum().backward) == (
            "reduce_gradients_async() was called inside a backward.\n"
            "  GradientSync.reduce_gradients_async\n"
            "  Call it after the last backward of the step."
        )


@in_ranks(2)
def test_a_backward_during_a_reduction_is_an_error() -> None:
    with wrapped(MLP.model()) as ddp:
        accumulate(ddp)
        loss, reduction = MLP.loss(ddp, 1), ddp.reduce_gradients_async()
        assert text_of(PhaseError, loss.backward) == (
            "a backward began while gradients are being synchronized.\n"
            "  synchronization 0\n"
            "  Wait for reduce_gradients_async() before the next backward."
        )
        reduction.wait()


@in_ranks(2)
def test_an_op_that_cannot_be_right_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    with wrapped(MLP.model()) as ddp:
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("avg")) == (
            'op must be "mean" or "sum", got \'avg\'.\n  reduce_gradients_async(op)\n  Leave it out for the mean.'
        )
        assert text_of(Desync, lambda: ddp.reduce_gradients_async(("sum", "mean")[rank]).wait()) == (
            f'ranks are not in the same step.\n  synchronization 0, rank {rank}\n  rank 0: synchronization 0, op="sum"\n'
            "  rank 1: synchronization 0\n"
            "  Run the same number of synchronized backwards and steps on every rank. A rank without a backward calls finish()."
        )
    with wrapped(MLP.model()) as ddp:
        ddp.register_comm_hook(None, allreduce_hook)
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("sum")) == (
            "a communication hook divides gradients itself.\n"
            "  reduce_gradients_async(op)\n"
            "  Leave op out, and let the hook divide."
        )
    with stepped(2) as (ddp, _opt):
        accumulate(ddp)
        assert text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()) == (
            "an earlier synchronization has left shards of its result, which another op would count again.\n"
            f"  reduce_gradients_async(), synchronization 2, rank {rank}\n"
            "  Call zero_grad() before the accumulation, or leave op out."
        )


BATCHES = {
    "rank 0 ends first": (1, 3, 4, 2),
    "rank 0 ends last": (4, 2, 1, 3),
    "even": (2, 2, 2, 2),
    "rank 1 has none": (2, 0, 1, 3),
}


@dataclass(frozen=True)
class Loop:
    """How each rank trains, by hand or wrapped; `num_steps` are those of each rank."""

    num_steps: tuple[int, ...]
    optimizer: str = "AdamW"
    num_micro: int = 1  # backwards of a step, of which the last synchronizes
    schedules: bool = False
    zeroes_late: bool = False  # between forward and backward
    by_active: bool = False
    ends_within: bool = False  # a rank's data may end behind a backward that only accumulates

    def loss(self, model: nn.Module, step: int, part: int, rank: int) -> Tensor:
        return model(noise(5, 6, step=10 * step + part, rank=rank)).square().mean()


def trained_wrapped(loop: Loop) -> nn.Module:
    config = SyncConfig(reduction="ordered", bucket_cap_mb=1e-4)
    ddp, rank = DistributedDataParallel(MLP.model(), config=config), dist.get_rank()
    optimizer = optimizer_for(ddp, "ddp", loop.optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def backward(step: int, part: int, *, zeroes: bool = False) -> None:
        loss = loop.loss(ddp, step, part, rank)
        if zeroes:
            optimizer.zero_grad()
        loss.backward()

    with ddp.join(divide_by_initial_world_size=not loop.by_active):
        for step in range(loop.num_steps[rank]):
            if not loop.zeroes_late:
                optimizer.zero_grad()
            for part in range(loop.num_micro):
                with ddp.no_sync() if part + 1 < loop.num_micro else contextlib.nullcontext():
                    backward(step, part, zeroes=loop.zeroes_late and part == 0)
            optimizer.step()
            if loop.schedules:
                schedule.step()
        if loop.ends_within and loop.num_steps[rank] < max(loop.num_steps):
            with ddp.no_sync():
                backward(loop.num_steps[rank], 0)
    ddp.close()
    return ddp.module


def trained_by_hand(loop: Loop, *, num_ranks: int) -> nn.Module:
    """The data of all ranks in one process; sums over ranks in their order, as `ordered` has them."""
    model = MLP.model()
    optimizer = optimizer_for(model, "ddp", loop.optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(max(loop.num_steps[:num_ranks])):
        active = [rank for rank in range(num_ranks) if step < loop.num_steps[rank]]
        of_ranks = []
        for rank in active:
            model.zero_grad()
            for part in range(loop.num_micro):
                loop.loss(model, step, part, rank).backward()
            of_ranks.append([param.grad.clone() for param in model.parameters()])
        means = [chain(grads) / num_ranks for grads in zip(*of_ranks, strict=True)]
        if loop.by_active:
            means = [mean * (num_ranks / len(active)) for mean in means]
        for param, grad in zip(model.parameters(), means, strict=True):
            param.grad = grad
        optimizer.step()
        if loop.schedules:
            schedule.step()
    return model


LOOPS = {
    "plain": Loop(()),
    "momentum": Loop((), optimizer="SGD"),
    "by active ranks": Loop((), by_active=True),
    "accumulates": Loop((), num_micro=2),
    "what was only accumulated when data ends is left out": Loop((), num_micro=2, ends_within=True),
    "schedules": Loop((), schedules=True),
    "zeroes before backward": Loop((), zeroes_late=True),
}


@in_ranks(2, 3, timeout_s=120.0)
@pytest.mark.parametrize("name", some(LOOPS, most=1))
def test_training_is_that_of_a_loop_over_who_has_data(name: str) -> None:
    """Parameters are those of the rank that trained longest."""
    for batches in BATCHES.values():
        loop = replace(LOOPS[name], num_steps=batches[: dist.get_world_size()])
        require_equal_values(trained_wrapped(loop), trained_by_hand(loop, num_ranks=dist.get_world_size()))


@in_ranks(2, 3, timeout_s=60.0)
def test_every_rank_ends_an_epoch_with_the_model_of_the_rank_that_trained_longest() -> None:
    with wrapped(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), reduction="ordered") as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for _ in range(2):
            with ddp.join():
                for step in range(1 + dist.get_rank()):
                    optimizer.zero_grad()
                    ddp(torch.full((2, 6), float(step))).sum().backward()
                    optimizer.step()
        require_same_everywhere(dict(ddp.state_dict()))
        assert ddp.module[0].running_mean[0] > 0.0  # of rank 0 alone, which has seen zeros, it would be 0


@in_ranks(2, timeout_s=20.0)
def test_a_rank_without_data_does_not_wait_for_buffers_while_others_accumulate() -> None:
    """Rank 1 has one more step than rank 0, of two micro-batches. As under torch's class."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    with wrapped(model) as ours:
        for ddp in (ours, theirs):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
            with ddp.join():
                for step in range(2 + dist.get_rank()):
                    with ddp.no_sync():
                        ddp(noise(4, 6, step=2 * step)).square().mean().backward()
                    ddp(noise(4, 6, step=2 * step + 1)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        require_same(dict(ours.state_dict()), dict(theirs.state_dict()))


@in_ranks(2, 3, timeout_s=20.0)
def test_join_can_throw_on_all_ranks_when_one_has_run_out() -> None:
    others = r"^Detected at least one rank that exhausted inputs\. Throwing across all ranks\.$"
    told = pytest.raises(RuntimeError, match=r"^Rank 0 exhausted all inputs\.$" if dist.get_rank() == 0 else others)
    with wrapped(mlp()) as ddp, told, ddp.join(throw_on_early_termination=True):
        backwards(ddp, MLP.loss, range(1 + dist.get_rank()))


@in_ranks(2, timeout_s=20.0)
def test_a_rank_without_data_waits_for_no_step_of_a_model_that_trains_nothing() -> None:
    with wrapped(mlp()) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.requires_grad_(False)
        ddp(noise(3, 6))
        ddp.finish()  # all agree that nothing is trained
        with ddp.join():
            for step in range(1 + dist.get_rank()):
                ddp(noise(3, 6, step=step))
                optimizer.step()
        assert not ddp.plan.params


@in_ranks(2, timeout_s=20.0)
def test_a_layer_that_one_rank_adds_at_the_end_of_its_data_is_an_error_on_all() -> None:
    with wrapped(mlp()) as ddp:

        def epoch() -> None:
            with ddp.join():
                MLP.loss(ddp, 0).backward()
                if dist.get_rank() == 1:
                    ddp.module.append(nn.Linear(4, 4))

        assert "first difference: parameter 4 is missing on rank 0 and '3.weight' on rank 1" in text_of(PlanMismatch, epoch)


NOT_WITH_SHARDS = (
    "join() cannot be used with a ShardedOptimizer: each step needs all shards, and a rank without data does not step.\n"
    "  join\n"
    "  Give every rank the same number of batches: drop_last=True of a DataLoader, or a sampler that pads, as "
    "DistributedSampler does."
)


@in_ranks(2, timeout_s=60.0)
def test_join_does_not_go_with_shards() -> None:
    with wrapped(mlp()) as ddp:
        ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        with ddp.join(enable=False):  # nobody runs out of data
            MLP.loss(ddp, 0).backward()
        for join in (ddp.join, lambda: Join([ddp])):
            assert text_of(PhaseError, join) == NOT_WITH_SHARDS
    with wrapped(mlp()) as ddp, ddp.join():
        assert text_of(PhaseError, lambda: ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)) == NOT_WITH_SHARDS
        MLP.loss(ddp, 0).backward()
