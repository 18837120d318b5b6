"""join(): a rank without data contributes nothing; under a sharded optimizer it takes part in every step."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import undertow
from support.alike import backward_alike, require_equal_values
from support.errors import text_of
from support.models import CASES, mlp, noise
from support.naive import require_same, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from support.sharded import OPTIMIZERS, chain, mesh_of, require_same_everywhere
from undertow import DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig

MLP = CASES["mlp"]
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
    num_micro: int = 1  # backwards of a step, of which the last synchronises
    num_synchronised: int = 1  # or several that do
    is_weighted: bool = False
    clips: bool = False
    schedules: bool = False
    zeroes_late: bool = False  # between forward and backward
    by_active: bool = False
    ends_within: bool = False  # a rank's data may end behind a backward that only accumulates

    def backwards(self) -> int:
        return self.num_micro * self.num_synchronised

    def loss(self, model: nn.Module, step: int, part: int, rank: int) -> Tensor:
        losses = model(noise(self.rows(rank), 6, step=10 * step + part, rank=rank)).square()
        return losses.sum() if self.is_weighted else losses.mean()

    def rows(self, rank: int) -> int:
        return 5 + 2 * rank if self.is_weighted else 5


def trained_wrapped(loop: Loop, *, strategy: str, **target: Any) -> nn.Module:
    config = SyncConfig(reduction="ordered", strategy=strategy, bucket_cap_mb=1e-4)
    ddp, rank = DistributedDataParallel(MLP.model(), config=config, **target), dist.get_rank()
    cls, how = OPTIMIZERS[loop.optimizer]
    optimizer = cls(ddp.parameters(), **how) if strategy == "ddp" else ShardedOptimizer(cls, ddp, **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def backward(step: int, part: int, *, zeroes: bool = False) -> None:
        loss = loop.loss(ddp, step, part, rank)
        if zeroes:
            optimizer.zero_grad()
        if loop.is_weighted:
            ddp.weight(loop.rows(rank))
        loss.backward()

    with ddp.join(divide_by_initial_world_size=not loop.by_active):
        for step in range(loop.num_steps[rank]):
            if not loop.zeroes_late:
                optimizer.zero_grad()
            for part in range(loop.backwards()):
                with ddp.no_sync() if (part + 1) % loop.num_micro else contextlib.nullcontext():
                    backward(step, part, zeroes=loop.zeroes_late and part == 0)
            if loop.clips:
                optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            if loop.schedules:
                schedule.step()
        if loop.ends_within and loop.num_steps[rank] < max(loop.num_steps):
            with ddp.no_sync():
                backward(loop.num_steps[rank], 0)
    ddp.wait()
    ddp.close()
    return ddp.module


def trained_by_hand(loop: Loop, *, num_ranks: int, strategy: str) -> nn.Module:
    """The data of all ranks in one process, with a plain optimizer; sums over ranks in their order, as `ordered` has them.

    Under zero2 each micro-batch is summed over ranks first, once there are shards, which is from the second step on.
    """
    model, (cls, how) = MLP.model(), OPTIMIZERS[loop.optimizer]
    optimizer = cls(model.parameters(), **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(max(loop.num_steps[:num_ranks])):
        active = [rank for rank in range(num_ranks) if step < loop.num_steps[rank]]
        so_far, weight_so_far = [torch.zeros_like(param) for param in model.parameters()], 0.0
        num_micro = 1 if strategy == "zero2" and step > 0 else loop.num_micro
        for turn in range(loop.backwards() // num_micro):
            of_ranks = []
            for rank in active:
                model.zero_grad()
                for part in range(turn * num_micro, (turn + 1) * num_micro):
                    loop.loss(model, step, part, rank).backward()
                of_ranks.append([param.grad.clone() for param in model.parameters()])
            means = [chain(grads) / num_ranks for grads in zip(*of_ranks, strict=True)]
            if loop.is_weighted:
                weight = sum(num_micro * loop.rows(rank) for rank in active)
                total = weight_so_far + weight
                means = [mean / (total / num_ranks) for mean in means]
                so_far = [before * (weight_so_far / total) for before in so_far]
                weight_so_far = total
            elif loop.by_active:
                means = [mean * (num_ranks / len(active)) for mean in means]
            so_far = [mean if turn == 0 else before + mean for before, mean in zip(so_far, means, strict=True)]
        for param, grad in zip(model.parameters(), so_far, strict=True):
            param.grad = grad
        if loop.clips:
            norm = torch.stack([grad.double().square().sum() for grad in so_far]).sum().sqrt().float()
            torch._foreach_mul_(so_far, (0.05 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        if loop.schedules:
            schedule.step()
    return model


def require_as_by_hand(loop: Loop, strategy: str) -> None:
    for batches in BATCHES.values():
        case = replace(loop, num_steps=batches[: dist.get_world_size()])
        require_equal_values(
            trained_wrapped(case, strategy=strategy), trained_by_hand(case, num_ranks=dist.get_world_size(), strategy=strategy)
        )


LOOPS = {
    "plain": Loop(()),
    "momentum": Loop((), optimizer="SGD"),
    "by active ranks": Loop((), by_active=True),
    "accumulates": Loop((), num_micro=2),
    "synchronises twice": Loop((), num_synchronised=2),
    "accumulates, synchronises twice": Loop((), num_micro=2, num_synchronised=2),
    "weights": Loop((), is_weighted=True),
    "weights, accumulates": Loop((), is_weighted=True, num_micro=2),
    "weights, synchronises twice": Loop((), is_weighted=True, num_synchronised=2),
    "clips": Loop((), clips=True),
    "schedules": Loop((), schedules=True),
    "zeroes before backward": Loop((), zeroes_late=True),
}


@in_ranks(2, 3, timeout_s=120.0)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("name", LOOPS)
def test_training_is_that_of_a_loop_over_who_has_data(name: str, strategy: str) -> None:
    require_as_by_hand(LOOPS[name], strategy)


@in_ranks(2, 3, timeout_s=120.0)
@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.num_synchronised == 1 and not loop.clips])
def test_it_is_so_with_a_plain_optimizer_too(name: str) -> None:
    """Parameters are those of the rank that trained longest."""
    require_as_by_hand(LOOPS[name], "ddp")


@in_ranks(2, 3, timeout_s=120.0)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_was_only_accumulated_when_data_ends_is_left_out_with_its_weight(strategy: str) -> None:
    require_as_by_hand(Loop((), is_weighted=True, num_micro=2, ends_within=True), strategy)


@pytest.mark.slow
@in_ranks(4, timeout_s=120.0)
@pytest.mark.parametrize("name", ["plain", "synchronises twice"])
def test_rows_of_a_mesh_run_out_of_data_too(name: str) -> None:
    """Rows are added up first, which is another order than that of a loop: all ranks agree to the bit, with it to rounding."""
    for batches in BATCHES.values():
        loop = replace(LOOPS[name], num_steps=batches)
        with mesh_of(2, 2) as mesh:
            ours = trained_wrapped(loop, strategy="hybrid", device_mesh=mesh)
        require_same_everywhere(dict(ours.state_dict()))
        for value, wanted in zip(
            ours.parameters(), trained_by_hand(loop, num_ranks=4, strategy="hybrid").parameters(), strict=True
        ):
            # Gradients differ by about 1e-7 of their summands, 1e-5 of themselves where those cancel to a hundredth, and so does
            # what AdamW makes of them, 0.01 a step. With the rounding of parameters below 1 that is 2e-7 in each of 4 steps.
            torch.testing.assert_close(value, wanted, rtol=0.0, atol=1e-6)


@in_ranks(2, 3, timeout_s=60.0)
def test_every_rank_ends_an_epoch_with_the_state_of_the_rank_that_trained_longest() -> None:
    """Parameters, buffers, what the optimizer has, and its hyper-parameters; so that the next epoch begins alike."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with wrapped(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), reduction="ordered", strategy="zero1") as ddp:
        optimizer, bias = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01), ddp.module[1].bias
        for epoch in range(2):
            with ddp.join():
                for step in range(1 + rank):
                    optimizer.param_groups[0]["lr"] = 0.01 / (1 + epoch + step)
                    optimizer.zero_grad()
                    ddp(torch.full((2, 6), float(step))).sum().backward()
                    optimizer.step()
                if rank == num_ranks - 1:
                    # Of a bias under a sum over two rows, on one rank that may ask alone; the mean is over all of them.
                    torch.testing.assert_close(ddp.full_gradient(bias), torch.tensor([2.0 / num_ranks]))
                    optimizer.zero_grad()
                    assert ddp.full_gradient(bias) is None  # for which nobody is asked
        assert optimizer.param_groups[0]["lr"] == 0.01 / (1 + num_ranks)
        assert [it["step"].item() for it in optimizer.full_state_dict()["state"].values()] == [2.0 * num_ranks] * 4
        ddp.wait()
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
    """In torch's words."""
    others = r"^Detected at least one rank that exhausted inputs\. Throwing across all ranks\.$"
    told = pytest.raises(RuntimeError, match=r"^Rank 0 exhausted all inputs\.$" if dist.get_rank() == 0 else others)
    with wrapped(mlp()) as ddp, told, ddp.join(throw_on_early_termination=True):
        for step in range(1 + dist.get_rank()):
            MLP.loss(ddp, step).backward()


@in_ranks(2, 3, timeout_s=20.0)
def test_join_can_be_switched_off() -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare), ddp.join(enable=False):
        backward_alike(ddp, bare, MLP.loss)


@in_ranks(2, timeout_s=60.0)
def test_what_a_rank_without_data_cannot_follow_is_refused() -> None:
    rank = dist.get_rank()
    with wrapped(mlp()) as ddp:
        ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01, eager=True)
        assert text_of(PhaseError, ddp.join) == (
            "eager=True does not go with join(): a rank without data does not know how backward is to update its shards.\n"
            "  join\n"
            "  Leave eager=True out, or give every rank as many batches."
        )
    with wrapped(mlp()) as ddp:
        optimizer, scaler = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01), torch.amp.GradScaler("cpu")
        with ddp.join(enable=False):  # nobody runs out of data: nothing is refused, and nothing told
            assert ddp.sync.own_group.company is None
        assert text_of(PhaseError, lambda: Join([ddp])) == (
            "under a ShardedOptimizer ranks without data take part in more than torch's Join tells its participants.\n"
            "  join\n"
            "  Write `with model.join():` around the loop, and leave the others out."
        )
        MLP.loss(ddp, 0).backward()
        optimizer.step()
        with ddp.join():
            optimizer.zero_grad()
            scaler.scale(MLP.loss(ddp, 1)).backward()
            assert text_of(PhaseError, lambda: undertow.clip_grad_norm_(ddp, 1.0)) == (
                "undertow.clip_grad_norm_ goes over a model, and ranks without data take part in calls of its optimizer.\n"
                f"  clip_grad_norm_, join(), rank {rank}\n"
                "  Call clip_grad_norm_ of the optimizer."
            )
            assert text_of(PhaseError, lambda: scaler.unscale_(optimizer)) == (
                "a GradScaler does not go with join() and a ShardedOptimizer: a rank without data does not know the scale.\n"
                f"  unscaling, rank {rank}\n"
                "  Train in bfloat16, which needs no scale, or give every rank as many batches."
            )
            optimizer.step()


@in_ranks(2, is_fresh=True, timeout_s=60.0)
def test_ranks_that_do_different_things_are_told_so() -> None:
    def train() -> None:
        with ddp.join():
            for step in range(2):
                MLP.loss(ddp, step).backward()
                if (step, dist.get_rank()) != (0, 1):
                    optimizer.step()

    with wrapped(mlp()) as ddp:
        optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        assert text_of(PhaseError, train) == (
            f"some ranks call the model while others step or clip.\n  join(), rank {dist.get_rank()}\n"
            "  Run the same calls on every rank that has data; a scaler, or an `if`, must decide alike."
        )
