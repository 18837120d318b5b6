"""What happens in a step, in which order, and that arrivals do not change it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.inside import issued_ops
from support.models import CASES, Branches, noise
from support.naive import collectives, wrapped
from support.ranks import in_ranks

MLP = CASES["mlp"]
LATE_S = 0.2  # far above what a busy machine keeps another rank waiting in most of four steps
OVERLAPPED = ["pack b0", "all_reduce b0", "pack b1", "all_reduce b1", "pack b2", "all_reduce b2"]
ACCUMULATED = ["pack b0", "bind b0", "pack b1", "bind b1", "pack b2", "bind b2"]
IN_ORDER, REVERSED, ROTATED = ORDERS = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]


@in_ranks(2, 3)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "afterwards"])
@pytest.mark.parametrize("differs", [True, False], ids=["other orders", "in order"])
def test_a_bucket_is_packed_and_sent_before_the_next_one(differs: bool, overlap: bool) -> None:
    """Three layers, a bucket for each; also where gradients arrive in another order on every rank."""
    order = ORDERS[dist.get_rank() if differs else 0]
    with wrapped(Branches(), bucket_cap_mb=8e-5, order="reverse", overlap=overlap) as ddp:
        assert [bucket.params for bucket in ddp.plan.buckets] == [(5, 4), (3, 2), (1, 0)]
        ops = issued_ops(ddp)
        ddp(noise(2, 4), order).sum().backward()
        if differs:
            assert [op for op in ops if op.startswith("all_reduce")] == OVERLAPPED[1::2]
            ops[:6] = sorted(ops[:6], key=OVERLAPPED.index)
        assert ops == [*OVERLAPPED, "bind b0", "bind b1", "bind b2"]
        ops.clear()
        with ddp.no_sync():
            ddp(noise(2, 4), order).sum().backward()
        assert (sorted(ops, key=ACCUMULATED.index) if differs else ops) == ACCUMULATED


@in_ranks(2, 3)
@pytest.mark.parametrize(("order", "first"), [("reverse", []), ("observed", ["broadcast"])])
def test_a_step_has_a_collective_per_bucket_and_the_first_one_agrees_on_the_observed_order(order: str, first: list[str]) -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-6, order=order) as ddp, collectives() as called:
        for step in range(4):
            called.clear()
            MLP.loss(ddp, step).backward()
            assert called == ["all_reduce"] * 4 + (first if step == 0 else [])
        assert len(ddp.plan.buckets) == 4
        called.clear()
        with ddp.no_sync():
            MLP.loss(ddp, 0).backward()
        ddp.report(show=False)
        assert called == []


REGISTERED = [(4, 5), (2, 3), (0, 1)]


def require_orders(*wanted: list[tuple[int, ...]], uses: list[tuple[int, ...]], **settings: Any) -> str:
    """The plan's buckets after each of three steps; returns the last plan."""
    with wrapped(Branches(), bucket_cap_mb=8e-5, **settings) as ddp:
        for step, buckets in enumerate(wanted):
            ddp(noise(2, 4, step=step), uses[dist.get_rank()]).sum().backward()
            assert [tuple(sorted(bucket.params)) for bucket in ddp.plan.buckets] == buckets
        return ddp.plan.to_json()


@in_ranks(2, 3)
def test_the_second_step_has_the_order_that_rank_0_observed() -> None:
    """Whose gradients come from layer 0 first."""
    require_orders(REGISTERED, REGISTERED[::-1], REGISTERED[::-1], uses=[REVERSED, IN_ORDER, ROTATED])


@in_ranks(2, 3)
@pytest.mark.parametrize("order", ["reverse", "largest_first", "observed, with deterministic algorithms"])
def test_an_order_that_was_asked_for_stays(order: str) -> None:
    name, _, is_deterministic = order.partition(", ")
    torch.use_deterministic_algorithms(is_deterministic != "")
    try:
        buckets = [(0,), (2,), (4,), (1, 3, 5)] if order == "largest_first" else REGISTERED
        require_orders(*[buckets] * 3, uses=[REVERSED] * 3, order=name)
    finally:
        torch.use_deterministic_algorithms(False)


@in_ranks(2, 3)
def test_a_pinned_plan_stays() -> None:
    rotated = [(0, 1), (4, 5), (2, 3)]
    saved = require_orders(REGISTERED, rotated, uses=[ROTATED] * 3)
    assert require_orders(*[rotated] * 3, uses=[REVERSED] * 3, plan=saved) == saved


@in_ranks(2, 3)
@pytest.mark.parametrize("average_in_collective", [True, False])
def test_the_report_names_the_late_rank(average_in_collective: bool) -> None:
    with wrapped(MLP.model(), order="reverse", average_in_collective=average_in_collective) as ddp:
        for step in range(4):
            loss = MLP.loss(ddp, step)
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            loss.backward()
        report = ddp.report(show=False).to_dict()
    assert report["slowest_rank"] == 1
    assert report["busy_ms"][1] >= LATE_S * 1e3
    if dist.get_rank() != 1:
        assert report["late_rank_ms"] > 0.5 * LATE_S * 1e3
        assert report["exposed_ms"] >= report["late_rank_ms"]
