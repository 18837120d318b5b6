"""Sums over ranks, means over all tokens, reductions by hand, and join(): what is refused, and what programs cannot say."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from support.alike import backward_alike, backwards, require_equal_values
from support.errors import text_of
from support.models import Branches, mlp, noise
from support.naive import TIMEOUT_S, alone, require_same, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    chain,
    optimizer_for,
    parameters,
    require_equal,
    require_moved,
    require_same_everywhere,
    stepped,
    training,
)
from undertow import (
    ConfigError,
    Desync,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.full((1, 3), dist.get_rank() + 1.0)).sum()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("op", ["sum", "weighted"])
def test_ranks_that_have_left_their_loop_add_nothing_and_have_no_weight(op: str) -> None:
    rank, model = dist.get_rank(), nn.Linear(3, 1, bias=False)
    with wrapped(model, op=op) as ddp, ddp.join(divide_by_initial_world_size=False):
        for number in range(3 - rank % 2):
            ddp.zero_grad()
            if op == "weighted":
                ddp.loss_weight(3 + 2 * rank)
            loss_of(ddp).backward()
            present = range(0, dist.get_world_size(), 2 if number == 2 else 1)
            total = sum(3 + 2 * it for it in present) if op == "weighted" else 1
            assert model.weight.grad[0].tolist() == pytest.approx([sum(it + 1 for it in present) / total] * 3)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("op", ["sum", "weighted"])
def test_two_models_in_one_backward(op: str) -> None:
    models, rank, num_ranks = [nn.Linear(1, 1, bias=False) for _ in range(2)], dist.get_rank(), dist.get_world_size()
    for model in models:
        nn.init.constant_(model.weight, 2.0)
    wanted = [num_ranks * (num_ranks + 1)] * 2 if op == "sum" else [2.0, (num_ranks + 1) / 2]
    with wrapped(models[0], op=op) as first, wrapped(models[1], op=op) as second:
        for _ in range(3):
            for ddp, weight in ((first, rank + 1), (second, 2)):
                ddp.zero_grad()
                if op == "weighted":
                    ddp.loss_weight(torch.tensor(weight))
            second(first(torch.full((1, 1), rank + 1.0))).backward()
            assert [model.weight.grad.item() for model in models] == pytest.approx(wanted)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_a_change_on_one_rank_is_told_with_weights_too() -> None:
    """Ranks that meet under the old plan must still start the same collectives."""
    model = nn.Linear(3, 2)
    with wrapped(model, op="weighted") as ddp:
        ddp.loss_weight(3)
        loss_of(ddp).backward()
        ddp.zero_grad()
        model.bias.requires_grad_(dist.get_rank() > 0)
        ddp.loss_weight(3)
        assert "'bias'" in text_of(PlanMismatch, lambda: loss_of(ddp).backward())


ALL = (1.0, 1.0)  # of rank 0, and of each of the others
LACKING = (
    "no weight was given on rank {others}.\n  {where}\n"
    "  Call loss_weight(n) before every backward on every rank, with 0 where a rank has nothing to learn from."
)
ZERO = (
    "the weights of all ranks add up to 0, and gradients cannot be divided by that.\n  {where}\n"
    "  Leave out a step if no rank has data for it."
)
# How many steps are sound, the weights of the next one, and its error.
UNSOUND: dict[str, tuple[int, Any, str]] = {
    "of rank 0 first": (0, (3.0, None), LACKING),
    "of rank 0": (2, (3.0, None), LACKING),
    "zero first": (0, (0.0, 0.0), ZERO),
    "zero": (2, (0.0, 0.0), ZERO),
}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("name", UNSOUND)
def test_weights_that_are_not_sound_are_an_error_on_every_rank_and_update_nothing(name: str) -> None:
    num_sound, unsound, text = UNSOUND[name]
    rank, model, is_other = dist.get_rank(), nn.Linear(3, 2), dist.get_rank() > 0
    with training(model, "ddp", "SGD", op="weighted", bucket_cap_mb=1e-6) as (ddp, optimizer):

        def backward(weights: Any) -> None:
            optimizer.zero_grad()
            if weights[is_other] is not None:
                ddp.loss_weight(weights[is_other])
            loss_of(ddp).backward()

        for _ in range(num_sound):
            backward(ALL)
            optimizer.step()
        before, found = parameters(ddp), text_of(PhaseError, lambda: backward(unsound))
        assert found == text.format(
            where=f"synchronization {num_sound}, rank {rank}", others=", ".join(map(str, range(1, dist.get_world_size())))
        )
        require_equal(before, parameters(ddp))
        backward(ALL)
        # The mean over ranks of rank + 1.
        assert model.weight.grad.flatten().tolist() == pytest.approx([(dist.get_world_size() + 1) / 2] * 6)
        optimizer.step()
        require_moved(before, parameters(ddp))


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_step_of_weight_zero_is_an_error_when_it_ends(strategy: str) -> None:
    with training(nn.Linear(3, 2), strategy, "SGD", op="weighted") as (ddp, optimizer):
        ddp.loss_weight(1)
        loss_of(ddp).backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.loss_weight(0)
        with ddp.accumulate():
            loss_of(ddp).backward()
        ddp.loss_weight(0)
        assert "add up to 0" in text_of(PhaseError, lambda: loss_of(ddp).backward())


@in_ranks(2)
def test_a_weight_behind_its_backward_is_an_error_when_the_optimizer_steps() -> None:
    """Unseen, a weight would be that of the next step. Then with a closure, whose backward comes within the step."""
    with wrapped(nn.Linear(3, 2), op="weighted") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        ddp.loss_weight(1)
        loss_of(ddp).backward()
        ddp.loss_weight(3)
        assert text_of(PhaseError, optimizer.step) == (
            "loss_weight(3) was called, and no backward ran before the optimizer step.\n"
            f"  SGD.step, rank {dist.get_rank()}\n"
            "  Call loss_weight(n) before the backward of the loss that is a sum over n, not after it."
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ddp(torch.ones(4, 3)).sum()
            loss.backward()
            return loss

        ddp.loss_weight(Fraction(4))  # a number like numpy's, of no type of Python's own
        optimizer.step(closure)
        assert ddp.module.bias.grad.tolist() == [1.0, 1.0]


ASK = "  loss_weight(n)\n  Give how many tokens, or samples, the loss of the next backward is a sum over."


NOT_WEIGHTED = (
    'op="{}" does not divide gradients by weights.\n  loss_weight(n)\n'
    '  Set SyncConfig(op="weighted") on every rank, or leave the call out.'
)


def weigh(weight: Any) -> Callable[[DistributedDataParallel], None]:
    return lambda ddp: ddp.loss_weight(weight)


REFUSED: list[tuple[str, Any, type[Exception], str]] = [  # the op, what is refused, and how
    ("mean", weigh(3), ConfigError, NOT_WEIGHTED.format("mean")),
    ("sum", weigh(3), ConfigError, NOT_WEIGHTED.format("sum")),
    *(
        (
            op,
            lambda ddp: ddp.register_comm_hook(None, allreduce_hook),
            ConfigError,
            (
                'a communication hook divides gradients itself: it cannot be used with op="sum" or op="weighted".\n'
                "  register_comm_hook(state, hook)\n"
                "  Leave the hook out, or leave op out and let the hook divide."
            ),
        )
        for op in ("sum", "weighted")
    ),
    ("weighted", weigh("3"), WrongType, f"a weight must be a number, got str.\n{ASK}"),
    ("weighted", weigh(-1), ConfigError, f"a weight must be a number from 0 on, got -1.\n{ASK}"),
    ("weighted", weigh(float("nan")), ConfigError, f"a weight must be a number from 0 on, got nan.\n{ASK}"),
    (
        "weighted, alone",
        lambda ddp: ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1),
        ConfigError,
        (
            "weights with a ShardedOptimizer are not built for a rank alone.\n"
            '  ShardedOptimizer, SyncConfig(op="weighted")\n'
            "  Divide the loss by the weight, or use a plain optimizer there."
        ),
    ),
]


@in_ranks(2)
def test_what_does_not_go_with_weights_is_refused() -> None:
    with alone() as mine:
        for op, refused, error, text in REFUSED:
            with wrapped(nn.Linear(3, 2), process_group=mine if "alone" in op else None, op=op.partition(",")[0]) as ddp:
                assert text_of(error, partial(refused, ddp)) == text


@in_ranks(2, 3)
def test_weights_cost_one_small_all_reduce_that_leaves_first() -> None:
    with wrapped(nn.Linear(3, 2), op="weighted", auto_tune=False, record="off") as ddp:
        for _ in range(3):
            ddp.loss_weight(1)
            loss_of(ddp).backward()
        numels, all_reduce = list[int](), dist.ProcessGroup.allreduce

        def counted(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> Any:
            numels.append(tensors[0].numel())
            return all_reduce(group, tensors, *args)

        with mock.patch.object(dist.ProcessGroup, "allreduce", counted):
            ddp.loss_weight(1)
            loss_of(ddp).backward()
        assert (len(numels), numels[0]) == (len(ddp.plan.buckets) + 1, 1 + dist.get_world_size())


@in_ranks(2)
def test_weights_are_a_setting_of_all_ranks() -> None:
    assert SyncConfig.from_json(SyncConfig(op="weighted").to_json()).op == "weighted"
    assert "op is 'weighted' on rank 0 and 'mean' on rank 1" in text_of(
        PlanMismatch,
        lambda: DistributedDataParallel(nn.Linear(3, 2), config=SyncConfig(op=("weighted", "mean")[dist.get_rank()])),
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
            'op must be "mean" or "sum", got \'avg\'.\n  reduce_gradients_async(op)\n  Leave it out for the op of the settings.'
        )
        assert text_of(Desync, lambda: ddp.reduce_gradients_async(("sum", "mean")[rank]).wait()) == (
            f'ranks are not in the same step.\n  synchronization 0, rank {rank}\n  rank 0: synchronization 0, op="sum"\n'
            "  rank 1: synchronization 0\n"
            "  Run as many synchronized backwards and optimizer steps on every rank; one without a backward calls finish()."
        )
    with wrapped(MLP.model(), op="weighted") as ddp:
        ddp.loss_weight(2.0)
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("sum")) == (
            'SyncConfig(op="weighted") divides gradients by weights, and op="sum" does not.\n'
            "  reduce_gradients_async(op)\n"
            "  Leave op out."
        )
        ddp.reduce_gradients_async("weighted").wait()
    with wrapped(MLP.model()) as ddp:
        ddp.register_comm_hook(None, allreduce_hook)
        accumulate(ddp)
        assert text_of(ConfigError, lambda: ddp.reduce_gradients_async("sum")) == (
            "with a communication hook it is the hook that divides gradients.\n"
            "  reduce_gradients_async(op)\n"
            "  Leave op out, and let the hook divide."
        )
    with stepped(2) as (ddp, _opt):
        accumulate(ddp)
        assert text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()) == (
            "an earlier synchronization has left shards of its result, which another op would count again.\n"
            f"  reduce_gradients_async(), synchronization 2, rank {rank}\n"
            "  Call zero_grad() before the accumulation, or set op in SyncConfig."
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
    is_weighted: bool = False
    schedules: bool = False
    zeroes_late: bool = False  # between forward and backward
    by_active: bool = False
    ends_within: bool = False  # a rank's data may end behind a backward that only accumulates

    def loss(self, model: nn.Module, step: int, part: int, rank: int) -> Tensor:
        losses = model(noise(self.rows(rank), 6, step=10 * step + part, rank=rank)).square()
        return losses.sum() if self.is_weighted else losses.mean()

    def rows(self, rank: int) -> int:
        return 5 + 2 * rank if self.is_weighted else 5


def trained_wrapped(loop: Loop) -> nn.Module:
    config = SyncConfig(reduction="ordered", op="weighted" if loop.is_weighted else "mean", bucket_cap_mb=1e-4)
    ddp, rank = DistributedDataParallel(MLP.model(), config=config), dist.get_rank()
    optimizer = optimizer_for(ddp, "ddp", loop.optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def backward(step: int, part: int, *, zeroes: bool = False) -> None:
        loss = loop.loss(ddp, step, part, rank)
        if zeroes:
            optimizer.zero_grad()
        if loop.is_weighted:
            ddp.loss_weight(loop.rows(rank))
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
        if loop.is_weighted:
            total = sum(loop.num_micro * loop.rows(rank) for rank in active)
            means = [mean / (total / num_ranks) for mean in means]
        elif loop.by_active:
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
    "weights": Loop((), is_weighted=True),
    "weights, accumulates": Loop((), is_weighted=True, num_micro=2),
    "what was only accumulated when data ends is left out with its weight": Loop(
        (), is_weighted=True, num_micro=2, ends_within=True
    ),
    "schedules": Loop((), schedules=True),
    "zeroes before backward": Loop((), zeroes_late=True),
}


@in_ranks(2, 3, timeout_s=120.0)
@pytest.mark.parametrize("name", LOOPS)
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


@in_ranks(2, 3, timeout_s=20.0)
def test_join_can_be_switched_off() -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare), ddp.join(enable=False):
        backward_alike(ddp, bare, MLP.loss)


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
