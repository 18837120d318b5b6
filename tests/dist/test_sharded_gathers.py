"""Gathers under the next forward: every reader waits for what it reads, and for no more; delays change nothing."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.inside import call_before, gathers_of, interrupted_steps, late_calls, observe, sharding_of, slow_gathers
from support.models import Case, noise
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    ORDERED,
    SMALL,
    TIED,
    Parameters,
    one_step,
    require_bits,
    require_equal,
    step_of,
    stepped,
    training,
)
from undertow import DistributedDataParallel
from undertow.schedule import OpKind


def buckets_of_first_layer(ddp: DistributedDataParallel) -> set[int]:
    return {bucket.index for bucket in ddp.plan.buckets for param in bucket.params if param in (0, 1)}


@in_ranks(2, 3)
def test_a_module_waits_for_its_own_parameters_only() -> None:
    with stepped(3, **SMALL) as (ddp, opt):
        waited = slow_gathers(ddp)
        one_step(ddp, opt, 3)
        waited.clear()
        assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets)
        hidden = ddp.module[0](noise(5, 6))
        assert set(waited) == buckets_of_first_layer(ddp)
        assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets) - len(set(waited))
        ddp.module[2](hidden.relu())
        assert gathers_of(ddp).in_flight == {}


@in_ranks(2, 3)
def test_the_whole_model_waits_for_nothing_that_its_first_layer_does_not_need() -> None:
    with stepped(4, **SMALL) as (ddp, opt):
        waited, seen = slow_gathers(ddp), []
        ddp.module[0].register_forward_pre_hook(lambda *_: seen.append(len(waited)))
        one_step(ddp, opt, 4)  # whose gathers are the next forward's
        waited.clear()
        seen.clear()
        MLP.loss(ddp, 5)
        assert seen == [len(buckets_of_first_layer(ddp))]  # by the first layer's forward nobody has waited for more
        assert sorted(waited) == [bucket.index for bucket in ddp.plan.buckets]


@in_ranks(2, 3)
def test_gathers_leave_in_the_order_of_the_forward() -> None:
    with stepped(3, case=TIED, **SMALL) as (ddp, _):
        order = list(gathers_of(ddp).in_flight)
        names = [ddp.plan.params[ddp.plan.buckets[bucket].params[0]].name for bucket in order]
    assert names[0] == "embedding.weight"
    last_of_attention = max(at for at, name in enumerate(names) if "attn" in name)
    assert last_of_attention < min(at for at, name in enumerate(names) if "linear2" in name)


class Elsewhere(nn.Module):
    """Computes with the parameters of a layer that it never calls, and of its own under a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.layer.weight, self.layer.bias).tanh()
        return self.head(hidden) * self.scale

    @staticmethod
    def loss_of(model: Any, step: int) -> Tensor:
        """Of a method that the wrapper does not see, which reads parameters outside of every module."""
        inner = model.module
        if step == 4:
            model(noise(5, 6)).sum()  # a forward of the whole model changes nothing for the next call
        gain = inner.scale.square()  # first, so that backward comes to it last
        return (inner.forward(noise(5, 6, step=step)).square() * gain).sum()


def slowly(ddp: DistributedDataParallel, _opt: Any, step: int) -> None:
    if step == 3:
        slow_gathers(ddp, seconds=0.005)


@pytest.mark.slow
@in_ranks(2, 3)
def test_what_was_not_seen_before_reads_parameters_that_have_come() -> None:
    for case in (Case(lambda: nn.Sequential(Elsewhere()), MLP.loss), Case(Elsewhere, Elsewhere.loss_of)):
        require_bits(case, num_steps=10, before=slowly)


# What is read after a step that is interrupted on the first ranks, and trained from there, is as without.
@in_ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_interrupted", [1, 2])
def test_an_interrupted_step_leaves_no_torn_parameters(num_interrupted: int, overlap: bool) -> None:
    def run(*, is_interrupted: bool) -> list[Parameters]:
        found = []
        with training(MLP.model(), "zero1", "SGD", overlap=overlap, **ORDERED) as (ddp, opt):
            for number in range(3):
                if is_interrupted and number == 1 and dist.get_rank() < num_interrupted:
                    with interrupted_steps(), pytest.raises(KeyboardInterrupt):
                        one_step(ddp, opt, number)
                else:
                    one_step(ddp, opt, number)
                found.append({name: param.clone() for name, param in ddp.state_dict().items()})
        return found

    for found, expected in zip(run(is_interrupted=True), run(is_interrupted=False), strict=True):
        require_equal(found, expected)


@in_ranks(2)
def test_a_graph_from_before_a_step_does_not_go_through_backward() -> None:
    with stepped(2, **SMALL) as (ddp, opt):
        ddp.wait()
        before = ddp(noise(5, 6)).sum()
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()


@pytest.mark.slow
@in_ranks(2, 4)
def test_a_delay_in_a_thread_changes_nothing() -> None:
    def before(ddp: Any, opt: Any, step: int, *, place: str) -> None:
        if step == 1 and place == "updates":
            late_calls(opt, "update", seconds=0.003, rank=0)
        elif step == 1:
            call_before(ddp, place, lambda: time.sleep(0.003 * (dist.get_rank() == 1)))

    across = ["sends across", "reductions across"] if dist.get_world_size() == 4 else []
    for place in ["updates", "sends", "gathers", *across]:
        require_bits(TIED, num_steps=5, before=partial(before, place=place))


def wait_for(event: threading.Event) -> None:
    assert event.wait(40.0)


# If the training thread waited for either reduction of a bucket, nobody would let the first of them leave.
@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_backward_waits_for_neither_axis_of_a_mesh(eager: bool) -> None:
    is_over = threading.Event()

    def before(ddp: Any, _opt: Any, step: int) -> None:
        if step == 1:
            observe(ddp, before=lambda op: is_over.set() if op.kind is OpKind.BIND else None)
            call_before(ddp, "reductions", lambda: wait_for(is_over))

    require_bits(MLP, num_steps=3, before=before, among=[{"strategy": "hybrid", "eager": eager}])
    assert is_over.is_set()


# The first bucket crosses when the second one is reduced inside, which does not wait for it.
@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_the_axes_of_a_mesh_work_at_the_same_time(eager: bool) -> None:
    is_reduced = threading.Event()

    def before(ddp: Any, _opt: Any, step: int) -> None:
        if step == 1:
            inside, num_calls = sharding_of(ddp).exchanges, count()
            reduce = inside.reduce_scatter

            def reduced(*args: Any, **kwargs: Any) -> Any:
                handle = reduce(*args, **kwargs)
                if next(num_calls) == 1:
                    handle.on_done(lambda _: is_reduced.set())
                return handle

            inside.reduce_scatter = reduced
            call_before(ddp, "reductions across", lambda: wait_for(is_reduced))

    require_bits(MLP, num_steps=3, before=before, among=[{"strategy": "hybrid", "eager": eager}])
    assert is_reduced.is_set()


@in_ranks(2)
def test_the_trace_has_both_ways_of_every_bucket() -> None:
    with stepped(5, case=TIED, record="full", **SMALL) as (ddp, _):
        ddp.wait()
        trace = ddp.traces()[-1]
        ddp.report()
        kinds = [event.kind for event in trace.communication]
        assert [kinds.count(kind) for kind in ("reduce_scatter", "all_gather")] == [len(ddp.plan.buckets)] * 2
        assert all(event.start_us <= event.stop_us for event in trace.events)


@in_ranks(2)
def test_without_overlap_nothing_is_in_flight_after_a_step() -> None:
    with training(TIED.model(), overlap=False, **SMALL) as (ddp, opt):
        for number in range(4):
            step_of(ddp, opt, TIED, number)
            assert gathers_of(ddp).in_flight == {}


@pytest.mark.slow
@in_ranks(2)
def test_a_compiled_model_waits_as_a_whole() -> None:
    each = lambda ddp, opt, step: one_step(torch.compile(ddp, backend="eager"), opt, step)  # noqa: E731
    require_bits(MLP, num_steps=4, each=each, among=[{"strategy": "zero1"}])
