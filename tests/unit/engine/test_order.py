"""The order in which buckets leave, by a counter, is the order of the schedule, which is data."""

import pytest
import torch

from support import one_process
from support.models import noise
from support.one_process import Rank, ranks_of
from support.units import WIDTH, Units
from undertow import ShardedOptimizer
from undertow.schedule import Op, Schedule, lower_accumulation, lower_data_parallel, strategy_named
from undertow.schedule.op import EXTERNAL

CAPS = {"a parameter in each bucket": 0.00002, "a layer in each bucket": 0.00008, "one bucket": 25.0}


def require_order_of(schedule: Schedule, issued: list[Op]) -> None:
    """Each op once, after those that it follows, and on a lane of communication in the order of the lane."""
    ours = {op.id: op for op in schedule.ops if op.kind not in EXTERNAL}
    at = {op.id: place for place, op in enumerate(issued)}
    assert sorted(at) == sorted(ours)
    assert len(issued) == len(ours)
    for op in issued:
        assert all(at[earlier] < at[op.id] for earlier in op.after if earlier in ours)
    for lane in {op.lane for op in issued if op.lane != "compute"}:
        ids = [op.id for op in issued if op.lane == lane]
        assert ids == sorted(ids)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("orders", ["012|012", "210|012", "02|120", "1|0", "01201|2"])
def test_a_step_issues_the_ops_of_its_schedule_in_their_order(orders: str, cap: str, overlap: bool, strategy: str) -> None:
    def on_rank(rank: Rank) -> None:
        module = Units("linear linear linear")
        sync = rank.attach(module, bucket_cap_mb=CAPS[cap], overlap=overlap, strategy=strategy, order="reverse", auto_tune=False)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        if strategy != "ddp":
            optimizer = ShardedOptimizer(torch.optim.SGD, sync, lr=0.0)
        issued: list[Op] = []
        early: list[int] = []  # the number of ops at each gradient
        one_process.at_each_op(sync, issued.append)
        for param in module.parameters():
            param.register_hook(lambda _: early.append(len(issued)))
        for step in range(4):
            issued.clear()
            early.clear()
            module.zero_grad()
            module(noise(3, WIDTH, step=step), orders.split("|")[rank.number]).square().sum().backward()
            optimizer.step()
        sync.wait()
        schedule = lower_data_parallel(len(sync.plan.buckets), strategy_named(strategy), overlap=overlap)
        require_order_of(schedule, issued)
        if not overlap:
            assert max(early) == 0  # nothing leaves before the last gradient
        elif cap != "one bucket" and orders.split("|")[rank.number] == "012":
            assert max(early) > 0
        sync.close()

    ranks_of(2, on_rank)


def test_an_accumulation_packs_and_binds_each_bucket_once() -> None:
    def on_rank(rank: Rank) -> None:
        module = Units("linear linear linear")
        sync = rank.attach(module, bucket_cap_mb=CAPS["a parameter in each bucket"])
        issued: list[Op] = []
        one_process.at_each_op(sync, issued.append)
        with sync.accumulate():
            module(noise(3, WIDTH), "02").square().sum().backward()
        accumulation = lower_accumulation(len(sync.plan.buckets))
        wanted = [(op.kind, op.bucket) for op in accumulation.ops if op.kind not in EXTERNAL]
        assert sorted((op.kind, op.bucket) for op in issued) == sorted(wanted)
        sync.close()

    ranks_of(2, on_rank)
