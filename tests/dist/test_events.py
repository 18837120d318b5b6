"""What happens in a step, in which order, and that neither arrivals nor delays change it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.inside import issued_ops, late_ops
from support.models import CASES, Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks
from undertow import SyncConfig, attach
from undertow.schedule import OpKind

LATE_S = 0.2  # far above what a busy machine keeps another rank waiting in most of four steps


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of torch.distributed's collectives as they are called."""
    called: list[str] = []
    names = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"]
    originals = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def ops_of_a_step(settings: dict[str, Any], order_by_rank: list[tuple[int, ...]]) -> tuple[list[str], list[str]]:
    """The ops of one step and of an accumulating backward; three layers, a bucket for each."""
    with wrapped(Branches(), bucket_cap_mb=8e-5, **{"order": "reverse", **settings}) as ddp:
        assert [bucket.params for bucket in ddp.plan.buckets] == [(5, 4), (3, 2), (1, 0)]
        ops = issued_ops(ddp)
        ddp(noise(2, 4), order_by_rank[dist.get_rank()]).sum().backward()
        synchronised = list(ops)
        ops.clear()
        with ddp.no_sync():
            ddp(noise(2, 4), order_by_rank[dist.get_rank()]).sum().backward()
        return synchronised, ops


OVERLAPPED = ["pack b0", "all_reduce b0", "pack b1", "all_reduce b1", "pack b2", "all_reduce b2"]
BINDS = ["bind b0", "bind b1", "bind b2"]
IN_ORDER, REVERSED, ROTATED = (0, 1, 2), (2, 1, 0), (1, 2, 0)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "afterwards"])
def test_a_bucket_is_packed_and_sent_before_the_next_one(ranks: Ranks, overlap: bool) -> None:
    for synchronised, accumulated in ranks.run(ops_of_a_step, {"overlap": overlap}, [IN_ORDER] * 3):
        assert synchronised == OVERLAPPED + BINDS
        assert accumulated == ["pack b0", "bind b0", "pack b1", "bind b1", "pack b2", "bind b2"]


def test_ranks_whose_gradients_arrive_in_other_orders_send_alike(three_ranks: Ranks) -> None:
    for synchronised, accumulated in three_ranks.run(ops_of_a_step, {}, [IN_ORDER, REVERSED, ROTATED]):
        assert [op for op in synchronised if op.startswith("all_reduce")] == OVERLAPPED[1::2]
        assert sorted(synchronised) == sorted(OVERLAPPED + BINDS)
        assert synchronised[-3:] == BINDS
        assert sorted(accumulated) == sorted(["pack b0", "bind b0", "pack b1", "bind b1", "pack b2", "bind b2"])


def training_with_orders(order: str, order_by_rank: list[tuple[int, ...]]) -> None:
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6, order=order) as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                model.zero_grad()
                model(noise(2, 4, step=step), order_by_rank[(dist.get_rank() + step) % 3]).square().sum().backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@pytest.mark.parametrize("order", ["observed", "reverse", "largest_first"])
def test_gradients_are_right_whatever_order_they_arrive_in(ranks: Ranks, order: str) -> None:
    ranks.run(training_with_orders, order, [IN_ORDER, REVERSED, ROTATED])


def collectives_of_steps(settings: dict[str, Any]) -> tuple[int, list[list[str]]]:
    case = CASES["mlp"]
    with wrapped(case.model(), bucket_cap_mb=1e-6, **settings) as ddp, collectives() as called:
        steps = []
        for step in range(4):
            called.clear()
            case.loss(ddp, step).backward()
            steps.append(list(called))
        called.clear()
        with ddp.no_sync():
            case.loss(ddp, 0).backward()
        ddp.report(show=False)
        assert called == []
        return len(ddp.plan.buckets), steps


def test_a_step_has_a_collective_per_bucket_and_no_other(ranks: Ranks) -> None:
    for num_buckets, steps in ranks.run(collectives_of_steps, {"order": "reverse"}):
        assert num_buckets == 4
        assert steps == [["all_reduce"] * 4] * 4


def test_the_first_step_agrees_on_the_observed_order_once(ranks: Ranks) -> None:
    for num_buckets, (first, *others) in ranks.run(collectives_of_steps, {"order": "observed"}):
        assert num_buckets == 4
        assert first == [*["all_reduce"] * 4, "broadcast"]
        assert others == [["all_reduce"] * 4] * 3


def orders_of_the_plan(settings: dict[str, Any], order_by_rank: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The plan's buckets after each of three steps."""
    plans = []
    with wrapped(Branches(), bucket_cap_mb=8e-5, **settings) as ddp:
        for step in range(3):
            ddp(noise(2, 4, step=step), order_by_rank[dist.get_rank()]).sum().backward()
            plans.append([tuple(sorted(bucket.params)) for bucket in ddp.plan.buckets])
    return plans


REGISTERED = [(4, 5), (2, 3), (0, 1)]


def test_the_second_step_has_the_order_that_rank_0_observed(ranks: Ranks) -> None:
    orders = [REVERSED, IN_ORDER, ROTATED]  # rank 0's gradients come from layer 0 first
    for plans in ranks.run(orders_of_the_plan, {}, orders):
        assert plans == [REGISTERED, REGISTERED[::-1], REGISTERED[::-1]]


@pytest.mark.parametrize("order", ["reverse", "largest_first"])
def test_an_order_that_was_asked_for_stays(two_ranks: Ranks, order: str) -> None:
    for plans in two_ranks.run(orders_of_the_plan, {"order": order}, [REVERSED] * 2):
        assert plans == plans[:1] * 3


def orders_when_deterministic() -> list[list[tuple[int, ...]]]:
    torch.use_deterministic_algorithms(True)
    try:
        return orders_of_the_plan({}, [REVERSED] * 3)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_freeze_the_order(ranks: Ranks) -> None:
    for plans in ranks.run(orders_when_deterministic):
        assert plans == [REGISTERED] * 3


def pinned_plan_stays() -> tuple[str, list[list[tuple[int, ...]]]]:
    with wrapped(Branches(), bucket_cap_mb=8e-5) as ddp:
        for _ in range(2):
            ddp(noise(2, 4), ROTATED).sum().backward()
        saved = ddp.plan.to_json()
    sync = attach(Branches(), config=SyncConfig(plan=saved))
    assert sync.plan.to_json() == saved
    sync.close()
    return orders_of_the_plan({"plan": saved}, [REVERSED] * 3)


def test_a_pinned_plan_stays(ranks: Ranks) -> None:
    for plans in ranks.run(pinned_plan_stays):
        assert plans == [[(0, 1), (4, 5), (2, 3)]] * 3


def delayed(kind: OpKind, late_rank: int) -> None:
    case = CASES["mlp"]
    with wrapped_and_bare(case.model(), bucket_cap_mb=1e-6, order="reverse") as (ddp, bare):
        late = late_ops(ddp, kind, late_rank, seconds=0.01)
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
        assert (dist.get_rank() == late_rank) == (late != [])


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("kind", [OpKind.PACK, OpKind.ALL_REDUCE, OpKind.BIND])
def test_a_delay_of_one_rank_changes_nothing(ranks: Ranks, kind: OpKind, late_rank: int) -> None:
    ranks.run(delayed, kind, late_rank)


def report_of_a_late_rank(average_in_collective: bool) -> dict[str, Any]:
    case = CASES["mlp"]
    with wrapped(case.model(), order="reverse", average_in_collective=average_in_collective) as ddp:
        for step in range(4):
            loss = case.loss(ddp, step)
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            loss.backward()
        return ddp.report(show=False).to_dict()


@pytest.mark.parametrize("average_in_collective", [True, False])
def test_the_report_names_the_late_rank(ranks: Ranks, average_in_collective: bool) -> None:
    for rank, report in enumerate(ranks.run(report_of_a_late_rank, average_in_collective)):
        assert report["slowest_rank"] == 1
        assert report["busy_ms"][1] >= LATE_S * 1e3
        if rank != 1:
            assert report["late_rank_ms"] > 0.5 * LATE_S * 1e3
            assert report["exposed_ms"] >= report["late_rank_ms"]
