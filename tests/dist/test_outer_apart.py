"""Replicas that differ, and values that are not finite: every rank is told, and no replica spoils another one."""

import contextlib
import copy
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from support.alike import heard
from support.errors import text_of
from support.inside import leave_unread
from support.levels import some
from support.models import noise
from support.outer import Reference, loss_of, net, replica, require_equal, same_everywhere, step, train, values_of
from support.ranks import in_ranks
from support.sharded import mesh_of
from undertow import (
    Desync,
    DistributedDataParallel,
    NonFiniteGradient,
    Outer,
    PlanMismatch,
    ReplicaMismatch,
    load_checkpoint,
    save_checkpoint,
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("delay", some([0, 1], most=1))
@pytest.mark.parametrize(
    ("name", "values", "shown"),
    some(
        [
            ("lr", (0.01, 0.02), "0.01 on rank 0, but 0.02 on rank 1"),
            ("betas", ((0.9, 0.999), (0.8, 0.999)), "(0.9, 0.999) on rank 0, but (0.8, 0.999) on rank 1"),
            ("weight_decay", (0.01, 0.0), "0.01 on rank 0, but 0 on rank 1"),
        ],
        most=1,
    ),
)
def test_other_settings_of_an_optimizer_are_told(delay: int, name: str, values: tuple[Any, Any], shown: str) -> None:
    """Also if they were other ones in a single step before the exchange."""
    with replica(net(), Outer(every=4, fragments=1, delay=delay)) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        before = optimizer.param_groups[0][name]

        def run() -> None:
            for number in range(12):
                optimizer.param_groups[0][name] = values[dist.get_rank()] if number == 5 else before
                step(ddp, optimizer, number)

        text = text_of(PlanMismatch, run)
        assert ddp.outer.num_synchronizations == 1
    assert text == (
        "ranks step with different settings of an optimizer.\n  exchange of fragment 0, step 6\n"
        f"  first difference: {name} of group 0 of AdamW with 'blocks.0.0.bias' is {shown}\n"
        "  Give every rank the same settings. A scheduler must follow a number that all ranks have, such as the mean of "
        "their losses. If the optimizer itself changes this number, take it out of those that are compared: "
        "del optimizer.defaults[NAME], on every rank."
    )


class Estimates(torch.optim.Optimizer):
    """It estimates its learning rate, and keeps it beside its settings, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["d"] += 1e-3 * group["params"][0].grad.abs().mean().item()
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


class TakesEstimate(Estimates):
    """Its constructor takes the estimate that it begins with, by the same name: only the program knows that it is none of the
    settings."""

    def __init__(self, params: Iterable[nn.Parameter], d: float = 1e-6) -> None:
        super().__init__(params, d0=d)
        del self.defaults["d"]


@in_ranks(2)
@pytest.mark.parametrize("kind", [Estimates, TakesEstimate])
def test_each_replica_may_have_its_own_estimate_of_a_learning_rate(kind: type[Estimates]) -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = kind(ddp.parameters())
        train(ddp, optimizer, range(4))
        assert ddp.outer.num_synchronizations == 2
        assert not same_everywhere(torch.tensor([optimizer.param_groups[0]["d"]]))


@pytest.mark.deep
@in_ranks(4, is_fresh=True)
def test_they_are_told_on_every_rank_of_a_mesh() -> None:
    with mesh_of(2, 2) as mesh, replica(net(), Outer(every=2, fragments=1, delay=1), device_mesh=mesh) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01 if dist.get_rank() < 2 else 0.02)
        text = text_of(PlanMismatch, lambda: train(ddp, optimizer, range(4)))
    assert " is 0.01 on ranks 0, 1, but 0.02 on ranks 2, 3\n" in text


def train_with_skips(
    ddp: DistributedDataParallel, optimizers: list[torch.optim.Optimizer], steps: range, skips: Collection[tuple[int, int]] = ()
) -> None:
    """The scaler of a rank skips the step of the optimizer at this place, if (rank, step) is in `skips`: the last optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in steps:
        ddp.zero_grad()
        scaler.scale(loss_of(ddp, number, dist.get_rank())).backward()
        if (dist.get_rank(), number) in skips:
            for param in optimizers[-1].param_groups[0]["params"]:
                param.grad.fill_(torch.inf)
        before = scaler.get_scale()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers if scaler.get_scale() == before else optimizers[:-1]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9  # as a scheduler that waits for the step


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("skips", some([[(0, 1), (1, 2)], [(0, 1), (1, 1)], [(0, 5), (1, 5), (0, 6), (1, 7)]], most=1))
def test_settings_are_compared_again_after_as_many_skipped_steps_on_each_replica(skips: list[tuple[int, int]]) -> None:
    with replica(net(), Outer(every=4, fragments=2, delay=1)) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        train_with_skips(ddp, [optimizer], range(11), skips)
        (group,) = optimizer.param_groups
        group["weight_decay"] = 0.01 + 0.1 * dist.get_rank()
        text = text_of(PlanMismatch, lambda: train_with_skips(ddp, [optimizer], range(11, 20)))
    assert text == (
        "ranks step with different settings of an optimizer.\n  exchange of fragment 0, step 12\n"
        "  first difference: weight_decay of group 0 of AdamW with 'blocks.0.0.bias' is 0.01 on rank 0, but 0.11 on rank 1\n"
        "  Give every rank the same settings. A scheduler must follow a number that all ranks have, such as the mean of "
        "their losses. If the optimizer itself changes this number, take it out of those that are compared: "
        "del optimizer.defaults[NAME], on every rank."
    )


@in_ranks(2)
@pytest.mark.parametrize("skips", some([[(1, 3)], [(0, 2), (1, 3)], [(0, 7), (1, 7), (1, 9)]], most=1))
def test_a_learning_rate_that_waits_for_skipped_steps_is_not_a_difference(skips: list[tuple[int, int]]) -> None:
    with replica(net(), Outer(every=4, fragments=2, delay=1)) as ddp:
        train_with_skips(ddp, [torch.optim.AdamW(ddp.parameters(), lr=0.01)], range(20), skips)
        assert ddp.outer.state_dict()["step"] == 20


@in_ranks(2)
@pytest.mark.parametrize("how", some(["save", "copy", "load"], most=2))
def test_nor_is_it_after(how: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        ddp = stack.enter_context(replica(net(), Outer(every=4, fragments=2, delay=1)))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        train_with_skips(ddp, [optimizer], range(10), [(1, 3)])
        if how == "save":
            save_checkpoint(tmp_path / "saved", ddp, optimizer)
            load_checkpoint(tmp_path / "saved", ddp, optimizer)
        if how == "copy":
            of_optimizer, before = optimizer.state_dict(), ddp
            ddp = stack.enter_context(contextlib.closing(copy.deepcopy(ddp)))
            before.close()
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
            optimizer.load_state_dict(of_optimizer)
        if how == "load":
            ddp.outer.load_state_dict(ddp.outer.state_dict())
        train_with_skips(ddp, [optimizer], range(10, 20))
        assert ddp.outer.state_dict()["step"] == 20


@pytest.mark.deep
@in_ranks(4, is_fresh=True)
def test_ranks_of_one_replica_are_saved_with_the_same_settings(tmp_path: Path) -> None:
    with mesh_of(2, 2) as mesh, replica(net(), Outer(every=4, fragments=1, delay=0), device_mesh=mesh) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1 if dist.get_rank() < 3 else 0.2)
        text = text_of(PlanMismatch, lambda: save_checkpoint(tmp_path / "saved", ddp, optimizer))
    assert " is 0.1 on rank 2, but 0.2 on rank 3\n" in text


@pytest.mark.deep
@in_ranks(2)
def test_nor_is_it_if_each_replica_has_skipped_another_optimizer() -> None:
    with replica(net(), Outer(every=4, fragments=2, delay=1)) as ddp:
        params = list(ddp.parameters())
        optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (params[:3], params[3:])]
        if dist.get_rank() == 1:
            optimizers.reverse()
        train_with_skips(ddp, optimizers, range(20), [(0, 2), (1, 2)])
        assert ddp.outer.state_dict()["step"] == 20


@pytest.mark.deep
@in_ranks(2)
def test_several_optimizers_may_step_in_another_order_and_follow_schedules() -> None:
    with replica(net(), Outer(every=3, fragments=2, delay=1)) as ddp:
        params = list(ddp.parameters())
        optimizers = [torch.optim.SGD(params[:3], lr=0.1), torch.optim.AdamW(params[3:], lr=0.01)]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]
        for number in range(8):
            ddp.zero_grad()
            loss_of(ddp, number, dist.get_rank()).backward()
            for optimizer in optimizers if dist.get_rank() else reversed(optimizers):
                optimizer.step()
            for schedule in schedules:
                schedule.step()
        assert ddp.outer.num_synchronizations == 4


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("make", some([torch.optim.AdamW, torch.optim.SGD], most=1))
def test_the_step_by_which_torch_makes_a_state_does_not_count(make: type[torch.optim.Optimizer]) -> None:
    """SGD without momentum has no state: torch steps each time."""
    outer = Outer(every=3, fragments=1, delay=0)
    reference = Reference(outer, 2, optimizer=make)
    with replica(net(), outer) as ddp:
        optimizer = make(ddp.parameters(), lr=0.01)
        for number in range(7):
            ddp.zero_grad(set_to_none=True)
            get_optimizer_state_dict(ddp, optimizer)
            for model, its_own in zip(reference.models, reference.optimizers, strict=True):
                model.zero_grad(set_to_none=True)
                get_optimizer_state_dict(model, its_own)  # Adam counts it
            step(ddp, optimizer, number)
            reference.step()
            require_equal(ddp.module, reference.models[dist.get_rank()], f"step {number}")
        assert ddp.outer.state_dict()["step"] == 7


@in_ranks(2)
def test_nor_does_it_count_after_a_forward_without_a_backward() -> None:
    """Such a step after a load of outer's state would make a later load of the module begin anew."""
    outer = Outer(every=4, fragments=1, delay=0)
    with replica(net(), outer) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(6))
        own, state = values_of(ddp.module), ddp.outer.state_dict()
        assert state["momentum"]
    with replica(net(), outer) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        ddp.outer.load_state_dict(state)
        loss_of(ddp, 0, dist.get_rank())
        get_optimizer_state_dict(ddp, optimizer)
        ddp.module.load_state_dict(own)
        found = ddp.outer.state_dict()
        assert found["step"] == 6
        for name, value in state["momentum"].items():
            assert torch.equal(found["momentum"][name], value)


@in_ranks(2)
def test_a_step_with_gradients_counts_although_its_learning_rate_is_zero() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        train(ddp, optimizer, range(3))
        for param in ddp.parameters():  # of a model that is called otherwise
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert ddp.outer.state_dict()["step"] == 4


BAD = [float("nan"), float("inf"), float("-inf")]


@in_ranks(2, 3, is_fresh=True)
@pytest.mark.parametrize("wire", some([None, "bfloat16", "int8"], most=1))
@pytest.mark.parametrize(
    ("delay", "nonfinite", "bad"), some([(0, "raise", BAD[0]), (2, "ignore", BAD[1]), (1, "raise", BAD[2])], most=2)
)
def test_a_replica_that_is_not_finite_is_named_and_reaches_nobody(
    wire: str | None, delay: int, nonfinite: str, bad: float
) -> None:
    with replica(net(), Outer(every=3, fragments=1, delay=delay, wire=wire), nonfinite=nonfinite) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(5))
        if dist.get_rank() == 1:
            with torch.no_grad():
                ddp.module.blocks[1][0].weight[3, 1] = bad
        before = ddp.outer.state_dict()["global"]
        optimizer.zero_grad()
        for param in ddp.parameters():
            param.grad = torch.zeros_like(param)

        def run() -> None:
            for _ in range(1 + delay):  # no forward: the gradient would not be finite either
                optimizer.step()

        assert text_of(NonFiniteGradient, run) == (
            "the replica's 'blocks.1.0.weight' is not finite (NaN or Inf) on rank 1.\n"
            "  exchange of fragment 0, after step 6\n"
            '  No other replica has taken it over. Look for the overflow on rank 1, or set nonfinite="skip", which leaves such a '
            "replica out of the mean."
        )
        after = ddp.outer.state_dict()["global"]
        assert all(torch.equal(before[name], value) for name, value in after.items())
        if dist.get_rank() != 1:
            assert all(value.isfinite().all() for value in ddp.module.state_dict().values())


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_difference_that_a_format_cannot_hold_is_refused_too() -> None:
    with replica(nn.Linear(40, 40), Outer(every=1, fragments=1, delay=0, wire="bfloat16")) as ddp:
        with torch.no_grad():
            ddp.module.weight[0, 0] = -3.4e38 if dist.get_rank() == 0 else 0.0
        text = text_of(NonFiniteGradient, ddp.outer.step)
    assert text.startswith("the replica's 'weight' is not finite (NaN or Inf) on rank 0.\n")


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_mean_that_overflows_is_refused_too() -> None:
    with replica(nn.Linear(40, 40), Outer(every=1, fragments=1, delay=0, wire=None)) as ddp:
        with torch.no_grad():
            ddp.module.weight[0, 0] = -3e38
        text = text_of(NonFiniteGradient, ddp.outer.step)
        assert ddp.module.weight[0, 0] == torch.tensor(-3e38)
    assert text.startswith(
        "the mean of the replicas' differences is not finite (NaN or Inf).\n  exchange of fragment 0, after step 1\n"
    )


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("wire", some([None, "int8"], most=1))
@pytest.mark.parametrize("delay", [0, 2])
def test_skip_leaves_such_replicas_out_of_the_mean(wire: str | None, delay: int) -> None:
    """And their buffers; they go on from the global parameters."""
    outer = Outer(every=3, fragments=2, delay=delay, wire=wire)
    reference = Reference(outer, dist.get_world_size())
    with replica(net(), outer, nonfinite="skip") as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number in range(14):
            breaks = [1] if number in (4, 5) else [0, 1, 2] if number == 9 else []
            step(ddp, optimizer, number, breaks=breaks)
            reference.step(breaks=breaks)
            require_equal(ddp.module, reference.models[dist.get_rank()], f"step {number}")
        assert all(value.isfinite().all() for value in ddp.outer.state_dict()["global"].values())
        assert "left out" in str(ddp.report())


@pytest.mark.deep
@in_ranks(2)
def test_a_replica_that_is_left_out_for_good_is_told_ever_more_rarely() -> None:
    with heard() as told, replica(net(), Outer(every=1, fragments=1, delay=0), nonfinite="skip") as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(1))
        if dist.get_rank() == 1:
            for state in optimizer.state.values():
                state["exp_avg"].fill_(torch.nan)
        train(ddp, optimizer, range(1, 7))
    first = (
        "the replica's 'first.weight' is not finite (NaN or Inf) on rank 1. It is left out of the mean, and its "
        "optimizer keeps its state: if that has NaN too, every exchange leaves it out."
    )
    wanted = [
        f"{first}\n  exchange of fragment 0, after step 2",
        f"{first} Exchanges like this so far: 2.\n  exchange of fragment 0, after step 3",
        f"{first} Exchanges like this so far: 4.\n  exchange of fragment 0, after step 5",
    ]
    assert told == (wanted if dist.get_rank() == 0 else [])


@pytest.mark.deep
@in_ranks(4)
def test_a_buffer_of_one_rank_of_a_row_is_left_out_on_all() -> None:
    settings = {"nonfinite": "skip", "buffers": "rank0"}
    with mesh_of(2, 2) as mesh, replica(net(), Outer(every=2, fragments=1, delay=0), device_mesh=mesh, **settings) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(1))
        optimizer.zero_grad()
        loss_of(ddp, 1, dist.get_rank()).backward()
        if dist.get_rank() == 2:
            ddp.module.blocks[0][1].running_mean.fill_(torch.nan)
        optimizer.step()
        for value in ddp.outer.state_dict()["global"].values():
            assert same_everywhere(value)
            assert value.isfinite().all()


class Buffers(nn.Module):
    """Buffers that are the same on all ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 4)
        fixed = [0.1, -0.0, torch.finfo(torch.float32).min, -torch.inf, torch.nan, 1e-45]
        self.register_buffer("fixed", torch.tensor(fixed))
        self.register_buffer("counts", torch.zeros(7))
        self.register_buffer("partly", torch.full((5,), 0.1))
        self.register_buffer("wide", torch.full((2,), 0.1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts += 0.1
        self.partly[0] += dist.get_rank()
        return self.layer(x)


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("wire", some([None, "int8"], most=1))
def test_equal_values_in_buffers_keep_their_bits(wire: str | None) -> None:
    torch.manual_seed(0)
    with replica(Buffers(), Outer(every=2, fragments=1, delay=0, wire=wire)) as ddp:
        wanted = Buffers()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(8):
            optimizer.zero_grad()
            ddp(noise(3, 40, step=number, rank=dist.get_rank())).square().mean().backward()
            optimizer.step()
            wanted.counts += 0.1
        found = dict(ddp.module.named_buffers())
        for name, value in wanted.named_buffers():
            first = 1 if name == "partly" else 0
            assert torch.equal(found[name][first:].view(torch.uint8), value[first:].view(torch.uint8)), name
        assert same_everywhere(ddp.module.partly)


def with_table() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(3.0))
    return model


@in_ranks(2)
@pytest.mark.parametrize("own", [None, [1.0] * 5], ids=["dropped", "longer"])
def test_a_buffer_that_one_replica_has_dropped_or_replaced_keeps_the_mean_of_the_others(own: list[float] | None) -> None:
    """Comparisons of all ranks continue, and the state has the buffer."""
    outer, model, rank = Outer(every=2, fragments=1, delay=0), with_table(), dist.get_rank()
    with replica(model, outer, check_replicas_every=1) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(6):
            if number == 1 and rank == 1:
                model.table = None if own is None else torch.tensor(own)
            if number == 3 and rank == 0:
                model.table += 1.0
            optimizer.zero_grad()
            ddp(noise(3, 4, step=number, rank=rank)).square().mean().backward()
            optimizer.step()
        with ddp.outer.synchronized():
            found = None if model.table is None else model.table.tolist()
        assert found == ([1.0, 2.0, 3.0] if rank == 0 else own)
        state = ddp.outer.state_dict()
    model = with_table()
    with replica(model, outer) as ddp:
        ddp.outer.load_state_dict(state)
        with ddp.outer.synchronized():
            assert model.table.tolist() == [1.0, 2.0, 3.0]


@in_ranks(2)
def test_torch_in_deterministic_mode_takes_fixed_fragments() -> None:
    torch.use_deterministic_algorithms(True)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        ddp = stack.enter_context(replica(net(), Outer(every=6)))
        with warnings.catch_warnings():
            train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(8))
        assert ddp.outer.state_dict()["turns"] == [2, 1]
        assert "fixed, because torch.use_deterministic_algorithms is on" in str(ddp.report())


@pytest.mark.deep
@in_ranks(2)
def test_one_rank_in_deterministic_mode_is_enough() -> None:
    with contextlib.ExitStack() as stack:
        ddp = stack.enter_context(replica(net(), Outer(every=6, delay=3)))
        torch.use_deterministic_algorithms(dist.get_rank() == 1)
        stack.callback(torch.use_deterministic_algorithms, False)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(8))
        assert ddp.outer.state_dict()["turns"] == [2, 3]


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("saved_after", some([5, 6, 8], most=1))
def test_a_state_that_one_replica_alone_has_loaded_is_told(saved_after: int) -> None:
    """Its fragments have other sizes: gloo would end a process that receives more than it has memory for."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 3))

    outer = Outer(every=5, fragments=2, delay=1)
    with replica(make(), outer) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(saved_after))
        state = ddp.outer.state_dict()
    with replica(make(), outer) as ddp:
        if dist.get_rank() == 1:
            ddp.outer.load_state_dict(state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        text = text_of(Desync, lambda: train(ddp, optimizer, range(12)))
    assert text.startswith("rank 1 has stepped a different number of times than the other replicas")
    assert "rank 0: 5 forwards before step 5, rank 1: " in text
    assert text.endswith(" and for a state of model.outer that only some have loaded.")


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_another_fragment_in_the_same_step_is_told() -> None:
    """As after a load of a state with other fragments."""
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(2))
        leave_unread(ddp, [[4.0, 4.0, 9.0, 0.0, 0.0, 0.0], [4.0, 4.0, 8.0, 0.0, 0.0, 0.0]])
        text = text_of(Desync, ddp.outer.state_dict)
    assert text == (
        "rank 1 exchanges another fragment than the other replicas.\n  exchange of fragment 0, after step 4\n"
        "  Load a state of model.outer on every rank or on none."
    )


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("is_frozen_before", some([False, True], most=1))
def test_a_freeze_or_unfreeze_on_one_replica_alone_is_an_error_on_all(is_frozen_before: bool) -> None:
    with replica(net(), Outer(every=2, fragments=2, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(2))
        ddp.module.last.requires_grad_(not is_frozen_before)
        train(ddp, optimizer, range(2, 4))  # alike on all replicas is no error
        ddp.module.last.requires_grad_(is_frozen_before == (dist.get_rank() == 1))
        text = text_of(PlanMismatch, lambda: train(ddp, optimizer, range(4, 8)))
    assert text == (
        "parameter 'last.bias' was frozen or unfrozen on some replicas only: rank 1 trains other parameters than the "
        "other replicas.\n  exchange of fragment 1, after step 5\n"
        "  Freeze, unfreeze, add and replace parameters, and register hooks, in the same step on every rank."
    )


@in_ranks(2, is_fresh=True)
def test_frozen_parameters_that_differ_are_named() -> None:
    """Replicas never exchange them: adapters that each replica merges on its own stay different for ever."""
    model = net()
    model.first.requires_grad_(False)
    with replica(model, Outer(every=1, fragments=1, delay=0), check_replicas_every=1) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(2))
        with torch.no_grad():
            model.first.bias.add_(dist.get_rank())
        text = text_of(ReplicaMismatch, lambda: train(ddp, optimizer, range(2, 5)))
    assert text == (
        "parameter 'first.bias' has other values on rank 1 than on rank 0.\n  frozen parameters, step 4\n"
        "  Replicas never exchange frozen parameters: write the same values on every rank, as when adapters are merged. "
        "broadcast_parameters() makes all parameters equal again."
    )


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_frozen_parameters_that_replicas_write_on_their_own_are_told_once_with_an_exchange() -> None:
    model = net()
    model.first.requires_grad_(False)
    with replica(model, Outer(every=2, fragments=2, delay=1)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as silent:
            warnings.simplefilter("always")
            with torch.no_grad():
                model.first.weight.data += 1  # alike
            train(ddp, optimizer, range(4))
        assert [each for each in silent if "frozen" in str(each.message)] == []
        model.first.weight.data += 0.1 * dist.get_rank()  # as adapters are merged
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(ddp, optimizer, range(4, 12))
    (text,) = [str(each.message) for each in caught if "frozen" in str(each.message)]
    assert text.startswith("replicas have different values of the frozen parameter 'first.weight', which they never exchange.\n")
    assert f", rank {dist.get_rank()}\n" in text
