"""join(): a rank without data contributes nothing; under a sharded optimizer it takes part in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import undertow
from support.errors import text_of
from support.models import mlp, noise
from support.naive import require_same
from support.ranks import Ranks, in_ranks
from support.sharded import OPTIMIZERS, mesh_of, parameters, require_equal
from undertow import DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig

BATCHES = {
    "rank 0 ends first": (1, 3, 4, 2),
    "rank 0 ends last": (4, 2, 1, 3),
    "even": (2, 2, 2, 2),
    "rank 1 has none": (2, 0, 1, 3),
}
ROWS = 5


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
        return ROWS + 2 * rank if self.is_weighted else ROWS


def trained_wrapped(loop: Loop, *, model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(
        model, device_mesh=settings.pop("mesh", None), config=SyncConfig(reduction="ordered", **settings)
    )
    cls, how = OPTIMIZERS[loop.optimizer]
    is_sharded = settings.get("strategy") != "ddp"
    optimizer = ShardedOptimizer(cls, ddp, **how) if is_sharded else cls(ddp.parameters(), **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    rank = dist.get_rank()
    with ddp.join(divide_by_initial_world_size=not loop.by_active):
        for step in range(loop.num_steps[rank]):
            if not loop.zeroes_late:
                optimizer.zero_grad()
            for part in range(loop.backwards()):
                is_kept = (part + 1) % loop.num_micro != 0
                with ddp.no_sync() if is_kept else contextlib.nullcontext():
                    loss = loop.loss(ddp, step, part, rank)
                    if loop.zeroes_late and part == 0:
                        optimizer.zero_grad()
                    if loop.is_weighted:
                        ddp.weight(loop.rows(rank))
                    loss.backward()
            if loop.clips:
                optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            if loop.schedules:
                schedule.step()
        if loop.ends_within and loop.num_steps[rank] < max(loop.num_steps):
            with ddp.no_sync():
                loss = loop.loss(ddp, loop.num_steps[rank], 0, rank)
                ddp.weight(loop.rows(rank))
                loss.backward()
    found = parameters(ddp)
    ddp.close()
    return {name.removeprefix("module."): value for name, value in found.items()}


def trained_by_hand(loop: Loop, *, model: nn.Module, num_ranks: int, strategy: str) -> dict[str, Tensor]:
    """The data of all ranks in one process, with a plain optimizer; sums over ranks in their order, as `ordered` has them.

    Under zero2 each micro-batch is summed over ranks first, once there are shards, which is from the second step on.
    """
    cls, how = OPTIMIZERS[loop.optimizer]
    optimizer = cls(model.parameters(), **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(max(loop.num_steps)):
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
            means = [mean_of(list(grads), loop, num_ranks) for grads in zip(*of_ranks, strict=True)]
            if loop.is_weighted:
                weight = sum(num_micro * loop.rows(rank) for rank in active)
                total = weight_so_far + weight
                means = [mean / (total / num_ranks) for mean in means]
                keep, weight_so_far = weight_so_far / total, total
                so_far = [before * keep for before in so_far] if turn else so_far
            so_far = [mean if turn == 0 else before + mean for before, mean in zip(so_far, means, strict=True)]
        for param, grad in zip(model.parameters(), so_far, strict=True):
            param.grad = grad
        if loop.clips:
            norm = torch.stack([grad.double().square().sum() for grad in so_far]).sum().sqrt().float()
            scale = (0.05 / (norm + 1e-6)).clamp(max=1.0)
            for grad in so_far:
                grad.mul_(scale)
        optimizer.step()
        if loop.schedules:
            schedule.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def mean_of(grads: list[Tensor], loop: Loop, num_ranks: int) -> Tensor:
    total = grads[0].clone()
    for grad in grads[1:]:
        total += grad
    total /= num_ranks
    return total * (num_ranks / len(grads)) if loop.by_active and not loop.is_weighted else total


def fresh_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def as_by_hand(loop: Loop, settings: dict[str, Any]) -> None:
    num_ranks = dist.get_world_size()
    ours = trained_wrapped(loop, model=fresh_mlp(), **settings)
    wanted = trained_by_hand(loop, model=fresh_mlp(), num_ranks=num_ranks, strategy=settings["strategy"])
    if max(loop.num_steps[:num_ranks]) == 0:
        return
    require_equal(ours, wanted)


def each_as_by_hand(loop: Loop, settings: dict[str, Any]) -> None:
    for batches in BATCHES.values():
        as_by_hand(replace(loop, num_steps=batches[: dist.get_world_size()]), settings)


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


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("name", LOOPS)
def test_training_is_that_of_a_loop_over_who_has_data(ranks: Ranks, name: str, strategy: str) -> None:
    ranks.run(each_as_by_hand, LOOPS[name], {"strategy": strategy, "bucket_cap_mb": 1e-4}, timeout_s=120.0)


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.num_synchronised == 1 and not loop.clips])
def test_it_is_so_with_a_plain_optimizer_too(ranks: Ranks, name: str) -> None:
    """Parameters are those of the rank that trained longest."""
    ranks.run(each_as_by_hand, LOOPS[name], {"strategy": "ddp", "bucket_cap_mb": 1e-4}, timeout_s=120.0)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_was_only_accumulated_when_data_ends_is_left_out_with_its_weight(ranks: Ranks, strategy: str) -> None:
    loop = Loop((), is_weighted=True, num_micro=2, ends_within=True)
    ranks.run(each_as_by_hand, loop, {"strategy": strategy, "bucket_cap_mb": 1e-4}, timeout_s=120.0)


@pytest.mark.parametrize("name", ["plain", "synchronises twice"])
def test_rows_of_a_mesh_run_out_of_data_too(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(on_a_mesh, LOOPS[name], timeout_s=120.0)


def on_a_mesh(loop: Loop) -> None:
    """Rows are added up first, which is another order than that of a loop: all ranks agree to the bit, with it to rounding."""
    for batches in BATCHES.values():
        loop = replace(loop, num_steps=batches)
        with mesh_of(2, 2) as mesh:
            ours = trained_wrapped(loop, model=fresh_mlp(), strategy="hybrid", bucket_cap_mb=1e-4, mesh=mesh)
        wanted = trained_by_hand(loop, model=fresh_mlp(), num_ranks=4, strategy="hybrid")
        for name, value in ours.items():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first)
            # Gradients differ by about 1e-7 of their summands, 1e-5 of themselves where those cancel to a hundredth, and so does
            # what AdamW makes of them, 0.01 a step. With the rounding of parameters below 1 that is 2e-7 in each of 4 steps.
            torch.testing.assert_close(value, wanted[name], rtol=0.0, atol=1e-6)


@in_ranks(2, 3, timeout_s=60.0)
def test_a_second_epoch_begins_alike_on_every_rank() -> None:
    """Whoever has left the first epoch early has the hyper-parameters and the state of the others in the second."""
    ddp = DistributedDataParallel(fresh_mlp(), config=SyncConfig(reduction="ordered"))
    optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
    for epoch in range(2):
        with ddp.join():
            for step in range(1 + dist.get_rank()):
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + epoch + step)
                optimizer.zero_grad()
                ddp(noise(ROWS, 6, step=10 * epoch + step)).square().mean().backward()
                optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / (1 + dist.get_world_size())
    assert [state["step"].item() for state in optimizer.full_state_dict()["state"].values()] == [2.0 * dist.get_world_size()] * 4
    mine = torch.cat([value.flatten() for value in parameters(ddp).values()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
    ddp.close()


def gradients_and_buffers() -> list[dict[str, Any]]:
    """A gradient that the last rank asks for alone, and its running mean, which all take over."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), config=SyncConfig(strategy="zero1"))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    found = []
    with ddp.join():
        for step in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            x = torch.full((2, 6), float(step))
            ddp(x).sum().backward()
            optimizer.step()
        if dist.get_rank() == dist.get_world_size() - 1:
            found.append(float(ddp.full_gradient(ddp.module[1].bias)))
            optimizer.zero_grad()
            assert ddp.full_gradient(ddp.module[1].bias) is None  # for which nobody is asked
    mean = ddp.module[0].running_mean.clone()
    ddp.close()
    return [{"mean": mean.tolist(), "found": found}]


def test_buffers_are_those_of_the_rank_that_trained_longest(ranks: Ranks) -> None:
    found = [each[0] for each in ranks.run(gradients_and_buffers, timeout_s=60.0)]
    assert len({tuple(each["mean"]) for each in found}) == 1
    assert found[0]["mean"][0] > 0.0  # of rank 0 alone, which has seen zeros, it would be 0
    # Of a bias under a sum over two rows, on one rank; the mean is over all of them.
    torch.testing.assert_close(found[-1]["found"], [2.0 / ranks.num_ranks])


def accumulated_with_buffers(wrapper: type[nn.parallel.DistributedDataParallel]) -> dict[str, Tensor]:
    """Rank 1 has one more step than rank 0, of two micro-batches."""
    torch.manual_seed(0)
    ddp = wrapper(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            with ddp.no_sync():
                ddp(noise(4, 6, step=2 * step)).square().mean().backward()
            ddp(noise(4, 6, step=2 * step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(ddp, DistributedDataParallel):
        ddp.close()
    return dict(ddp.module.state_dict())


@in_ranks(2, timeout_s=20.0)
def test_a_rank_without_data_does_not_wait_for_buffers_while_others_accumulate() -> None:
    wrappers = (DistributedDataParallel, nn.parallel.DistributedDataParallel)
    require_same(*(accumulated_with_buffers(wrapper) for wrapper in wrappers))


def refusals() -> dict[str, str]:
    def joined(make: Callable[[], Any]) -> str:
        return text_of(PhaseError, make)

    found = {}
    ddp = DistributedDataParallel(fresh_mlp())
    ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01, eager=True)
    found["eager"] = joined(ddp.join)
    ddp.close()
    ddp = DistributedDataParallel(fresh_mlp())
    optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
    with ddp.join(enable=False):  # nobody runs out of data: nothing is refused, and nothing told
        assert ddp.sync.own_group.company is None
    found["torch's Join"] = joined(lambda: Join([ddp]))
    optimizer.zero_grad()
    ddp(noise(ROWS, 6)).square().mean().backward()
    optimizer.step()
    with ddp.join():
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(ddp(noise(ROWS, 6)).square().mean()).backward()
        found["clip"] = joined(lambda: undertow.clip_grad_norm_(ddp, 1.0))
        found["scaler"] = joined(lambda: scaler.unscale_(optimizer))
        optimizer.step()
    ddp.close()
    return found


def test_what_a_rank_without_data_cannot_follow_is_refused(two_ranks: Ranks) -> None:
    for rank, found in enumerate(two_ranks.run(refusals, timeout_s=60.0)):
        assert found == {
            "eager": "eager=True does not go with join(): "
            "a rank without data does not know how backward is to update its shards.\n"
            "  join\n"
            "  Leave eager=True out, or give every rank as many batches.",
            "torch's Join": "under a ShardedOptimizer ranks without data take part in more than "
            "torch's Join tells its participants.\n"
            "  join\n"
            "  Write `with model.join():` around the loop, and leave the others out.",
            "clip": "undertow.clip_grad_norm_ goes over a model, and ranks without data take part in calls of its optimizer.\n"
            f"  clip_grad_norm_, join(), rank {rank}\n"
            "  Call clip_grad_norm_ of the optimizer.",
            "scaler": "a GradScaler does not go with join() and a ShardedOptimizer: "
            "a rank without data does not know the scale.\n"
            f"  unscaling, rank {rank}\n"
            "  Train in bfloat16, which needs no scale, or give every rank as many batches.",
        }


def differing_calls() -> str:
    ddp = DistributedDataParallel(fresh_mlp())
    optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)

    def train() -> None:
        with ddp.join():
            for step in range(2):
                ddp(noise(ROWS, 6, step=step)).square().mean().backward()
                if (step, dist.get_rank()) != (0, 1):
                    optimizer.step()

    text = text_of(PhaseError, train)
    ddp.close()
    return text


def test_ranks_that_do_different_things_are_told_so(fresh_pair: Ranks) -> None:
    for rank, text in enumerate(fresh_pair.run(differing_calls, timeout_s=60.0)):
        assert text == (
            f"some ranks call the model while others step or clip.\n  join(), rank {rank}\n"
            "  Run the same calls on every rank that has data; a scaler, or an `if`, must decide alike."
        )
