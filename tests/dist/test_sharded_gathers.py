"""Gathers under the next forward: every reader waits for what it reads, and for no more."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.inside import gathers_of, late_ops, sharding_of, slow_gathers
from support.models import CASES, Branches, Case, noise
from support.ranks import Ranks, in_ranks
from support.sharded import (
    SMALL,
    Parameters,
    parameters,
    require_equal,
    step_of,
    trained,
    training,
)
from undertow import DistributedDataParallel
from undertow.runtime import private
from undertow.schedule import OpKind

MLP = CASES["mlp"]
TIED = CASES["tied transformer"]


@in_ranks(2, 3)
def test_a_module_waits_for_its_own_parameters_only() -> None:
    with training(MLP.model(), **SMALL) as (ddp, opt):
        for number in range(3):
            step_of(ddp, opt, MLP, number)
        waited = slow_gathers(ddp)
        step_of(ddp, opt, MLP, 3)
        waited.clear()
        assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets)
        hidden = ddp.module[0](noise(5, 6))
        own = {bucket.index for bucket in ddp.plan.buckets for param in bucket.params if param in (0, 1)}
        assert set(waited) == own
        assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets) - len(own)
        ddp.module[2](hidden.relu())
        assert gathers_of(ddp).in_flight == {}


@in_ranks(2, 3)
def test_the_whole_model_waits_for_nothing_that_its_first_layer_does_not_need() -> None:
    with training(MLP.model(), **SMALL) as (ddp, opt):
        for number in range(4):
            step_of(ddp, opt, MLP, number)
        waited = slow_gathers(ddp)
        seen: list[int] = []
        watch = ddp.module[0].register_forward_pre_hook(lambda *_: seen.append(len(waited)))
        step_of(ddp, opt, MLP, 4)  # whose gathers are the next forward's
        waited.clear()
        seen.clear()
        MLP.loss(ddp, 5)
        watch.remove()
        own = {bucket.index for bucket in ddp.plan.buckets for param in bucket.params if param in (0, 1)}
        assert seen == [len(own)]  # by the first layer's forward nobody has waited for more than its parameters
        assert sorted(waited) == [bucket.index for bucket in ddp.plan.buckets]


@in_ranks(2, 3)
def test_gathers_leave_in_the_order_of_the_forward() -> None:
    orders = []
    with training(TIED.model(), **SMALL) as (ddp, opt):
        for number in range(4):
            step_of(ddp, opt, TIED, number)
            if number == 2:
                first_needed = list(dict.fromkeys(gathers_of(ddp).in_flight))
                orders.append(first_needed)
        names = [ddp.plan.params[ddp.plan.buckets[bucket].params[0]].name for bucket in orders[0]]
    assert names[0] == "embedding.weight"
    assert max(at for at, name in enumerate(names) if "attn" in name) < min(
        at for at, name in enumerate(names) if "linear2" in name
    )
    return orders


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

    def loss(self, x: Tensor) -> Tensor:
        gain = self.scale.square()  # first, so that backward comes to it last
        return (self.forward(x).square() * gain).sum()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Elsewhere()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def read_in_another_module(delay_s: float) -> None:
    def run(strategy: str) -> Any:
        torch.manual_seed(5)
        with training(Holder(), strategy, "SGD", reduction="ordered", **SMALL) as (ddp, opt):
            for number in range(6):
                step_of(ddp, opt, MLP, number)
                if strategy != "ddp" and number == 2:
                    slow_gathers(ddp, seconds=delay_s)
            return parameters(ddp)

    require_equal(run("ddp"), run("zero1"))


def test_a_parameter_read_in_another_module_has_come(ranks: Ranks) -> None:
    ranks.run(read_in_another_module, 0.01)


@in_ranks(2)
@pytest.mark.parametrize("eager", [False, True])
def test_a_method_of_the_module_reads_parameters_that_have_come(eager: bool) -> None:
    """Of whose forward the wrapper hears nothing, and which reads parameters outside of every module."""

    def run(strategy: str) -> Parameters:
        torch.manual_seed(5)
        is_eager = eager and strategy != "ddp"
        with training(Elsewhere(), strategy, "SGD", eager=is_eager, reduction="ordered", **SMALL) as (ddp, opt):
            for number in range(6):
                opt.zero_grad()
                if number == 4:
                    ddp(noise(5, 6)).sum()  # a forward of the whole model changes nothing for the next call
                ddp.module.loss(noise(5, 6, step=number)).backward()
                opt.step()
                if strategy != "ddp" and number == 2:
                    slow_gathers(ddp)
            return parameters(ddp)

    require_equal(run("ddp"), run("zero1"))


@in_ranks(2, 3)
def test_another_order_of_layers_is_right() -> None:
    """A path through the model that was never taken before is slower, and right."""

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        order = [(0, 1, 2), (2, 1, 0), (1,), (0, 2), (2, 0, 1, 2)][step % 5]
        ddp(noise(3, 4, step=step), order).square().sum().backward()
        opt.step()
        if step == 2 and sharding_of(ddp) is not None:
            slow_gathers(ddp, seconds=0.005)

    case = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).sum())
    expected = trained(case, "ddp", "SGD", num_steps=10, each=each, reduction="ordered")
    for strategy in ("zero1", "zero2"):
        require_equal(expected, trained(case, strategy, "SGD", num_steps=10, each=each, reduction="ordered", **SMALL))


@in_ranks(2, 3)
def test_a_hook_after_the_step_reads_new_parameters() -> None:
    def run(strategy: str) -> list[Tensor]:
        with training(MLP.model(), strategy, "SGD", reduction="ordered", **SMALL) as (ddp, opt):
            averaged = [param.detach().clone() for param in ddp.module.parameters()]

            def follow(*_arguments: Any) -> None:
                for mine, theirs in zip(averaged, ddp.module.parameters(), strict=True):
                    mine.lerp_(theirs.detach(), 0.1)

            opt.register_step_post_hook(follow)
            for number in range(5):
                step_of(ddp, opt, MLP, number)
            return averaged

    for mine, theirs in zip(run("ddp"), run("zero1"), strict=True):
        assert torch.equal(mine, theirs)


@in_ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_interrupted", [1, 2])
def test_an_interrupted_step_leaves_no_torn_parameters(num_interrupted: int, overlap: bool) -> None:
    """What is read behind a step that is interrupted on the first ranks, and trained from there, is as without."""

    def interrupted(optimizer: torch.optim.Optimizer) -> None:
        step_unwatched(optimizer)
        raise KeyboardInterrupt

    def step(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, number: int, *, is_interrupted: bool) -> Parameters:
        if is_interrupted and number == 1 and dist.get_rank() < num_interrupted:
            with mock.patch.object(private, "step_unwatched", interrupted), pytest.raises(KeyboardInterrupt):
                step_of(ddp, opt, MLP, number)
        else:
            step_of(ddp, opt, MLP, number)
        return {name: param.clone() for name, param in ddp.state_dict().items()}

    def run(*, is_interrupted: bool) -> list[Parameters]:
        with training(MLP.model(), "zero1", "SGD", reduction="ordered", overlap=overlap, **SMALL) as (ddp, opt):
            return [step(ddp, opt, number, is_interrupted=is_interrupted) for number in range(3)]

    step_unwatched = private.step_unwatched
    for found, expected in zip(run(is_interrupted=True), run(is_interrupted=False), strict=True):
        require_equal(found, expected)


@in_ranks(2)
def test_a_stale_parameter_is_found_by_autograd() -> None:
    """A graph from before a step does not go through backward."""
    with training(MLP.model(), **SMALL) as (ddp, opt):
        step_of(ddp, opt, MLP, 0)
        step_of(ddp, opt, MLP, 1)
        ddp.wait()
        before = ddp(noise(5, 6)).sum()
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()


@in_ranks(2, 3)
@pytest.mark.parametrize(("strategy", "late_rank"), [("zero1", 0), ("zero2", 1)])
@pytest.mark.parametrize("kind", [OpKind.PACK, OpKind.REDUCE_SCATTER, OpKind.BIND, OpKind.ALL_GATHER])
def test_a_delay_at_any_op_changes_nothing(kind: OpKind, late_rank: int, strategy: str) -> None:
    expected, late = trained(TIED, "ddp", "SGD", num_steps=5, reduction="ordered"), []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        nonlocal late
        if step == 1:
            late = late_ops(ddp, kind, late_rank, seconds=0.004)
        step_of(ddp, opt, TIED, step)

    require_equal(expected, trained(TIED, strategy, "SGD", num_steps=5, each=each, reduction="ordered", **SMALL))
    assert (dist.get_rank() == late_rank) == (late != [])


def traced() -> list[tuple[str, int]]:
    with training(TIED.model(), record="full", **SMALL) as (ddp, opt):
        for number in range(5):
            step_of(ddp, opt, TIED, number)
        ddp.wait()
        trace = ddp.traces()[-1]
        ddp.report()
        kinds = [event.kind for event in trace.communication]
        num_buckets = len(ddp.plan.buckets)
        assert all(event.start_us <= event.stop_us for event in trace.events)
        return [
            ("reduce_scatter", kinds.count("reduce_scatter") - num_buckets),
            ("all_gather", kinds.count("all_gather") - num_buckets),
        ]


def test_the_trace_has_both_ways_of_every_bucket(two_ranks: Ranks) -> None:
    for counts in two_ranks.run(traced):
        assert counts == [("reduce_scatter", 0), ("all_gather", 0)]


@in_ranks(2)
def test_without_overlap_nothing_is_in_flight_after_a_step() -> None:
    expected = trained(TIED, "zero1", reduction="ordered", num_steps=4)

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        step_of(ddp, opt, TIED, step)
        assert gathers_of(ddp).in_flight == {}

    require_equal(expected, trained(TIED, "zero1", each=each, num_steps=4, reduction="ordered", overlap=False, **SMALL))


@in_ranks(2, 3)
def test_buffers_travel_beside_gathers() -> None:
    case = CASES["convolutions"]

    def run(strategy: str) -> dict[str, Tensor]:
        with training(case.model(), strategy, "SGD", reduction="ordered", **({} if strategy == "ddp" else SMALL)) as (ddp, opt):
            for number in range(5):
                step_of(ddp, opt, case, number)
                if number == 1 and strategy != "ddp":
                    slow_gathers(ddp, seconds=0.003)
            return {name: value.clone() for name, value in ddp.state_dict().items()}

    require_equal(run("ddp"), run("zero1"))


@in_ranks(2)
def test_a_compiled_model_waits_as_a_whole() -> None:
    expected = trained(MLP, "zero1", "SGD", num_steps=4, reduction="ordered")
    with training(MLP.model(), "zero1", "SGD", reduction="ordered", **SMALL) as (ddp, opt):
        fast = torch.compile(ddp, backend="eager")
        for number in range(4):
            opt.zero_grad()
            MLP.loss(fast, number).backward()
            opt.step()
        require_equal(expected, parameters(ddp))
