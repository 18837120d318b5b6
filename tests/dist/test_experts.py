"""Experts on 2 x 2 ranks: reduced over ranks of their own, with a divisor of their own, beside the dense parameters."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import of_all_ranks, require_equal_gradients, require_equal_values
from support.errors import text_of
from support.mixture import (
    MATCH,
    SGD,
    WIDTH,
    experts_group,
    loss,
    mixture,
    reduce_naively,
    reduced,
    steps_alike,
    wrapped_mixture,
)
from support.models import Fails
from support.ranks import in_ranks
from undertow import (
    CheckpointError,
    ConfigError,
    DistributedDataParallel,
    ExpertGroup,
    PeerFailed,
    PhaseError,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
    save_checkpoint,
)

ALL_EXPERTS = [f"experts.{index}.{kind}" for index in (0, 1) for kind in ("bias", "weight")]


@in_ranks(4)
@pytest.mark.parametrize(
    ("divisor", "settings"),
    [
        (4, {}),
        (None, {}),
        (3, {}),  # no power of two: dividing first would round differently
        (4, {"bucket_cap_mb": 1e-4}),
        (4, {"overlap": False}),
        (4, {"order": "reverse", "auto_tune": False}),
    ],
    ids=str,
)
def test_a_training_run_is_that_of_the_naive_reference(divisor: float | None, settings: dict[str, Any]) -> None:
    with wrapped_mixture(mixture(), divisor=divisor, **settings) as (ddp, bare, group):
        optimizers = [torch.optim.SGD(model.parameters(), **SGD) for model in (ddp, bare)]
        for step in range(8):
            steps_alike(ddp, bare, group, steps=[step], divisor=2 if divisor is None else divisor)
            for optimizer in optimizers:
                optimizer.step()
        require_equal_values(ddp.module, bare)


@in_ranks(4)
def test_the_backends_own_sums_give_the_same_experts() -> None:
    """Of two ranks, whose sum has one order, divided by a power of two."""
    with wrapped_mixture(mixture(), reduction="native") as (ddp, bare, group):
        for step in range(8):
            for model in (ddp, bare):
                model.zero_grad()
                loss(model, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module.experts, bare.experts)
            for param, wanted in zip(ddp.module.after.parameters(), bare.after.parameters(), strict=True):
                # Four summands in another order: three roundings, each of at most half a unit of the largest partial sum.
                assert torch.allclose(param.grad, wanted.grad, rtol=0.0, atol=1e-6)


def even_freezes(model: Any, step: int) -> None:
    model.experts["0"].weight.requires_grad_(dist.get_rank() % 2 == 1 or step < 2 or step > 3)


def even_replaces(model: Any, step: int) -> None:
    if dist.get_rank() % 2 == 0 and step == 2:
        model.experts["0"].weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))


def late(model: Any, step: int, *, rank: int) -> None:
    """Its gradients of experts come late: those of the others arrive, and leave, in another order."""

    def sleep(_gradient: Tensor) -> None:
        time.sleep(0.05)

    for param in model.experts.parameters() if step == 0 and dist.get_rank() == rank else ():
        param.register_hook(sleep)


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "frozen and thawed": lambda model, step: model.experts["0"].requires_grad_(step < 2 or step > 3),
    # Ranks 1 and 3, which hold other experts, know nothing of it.
    "frozen in one group": even_freezes,
    "replaced in one group": even_replaces,
    "rank 0 is late": lambda model, step: late(model, step, rank=0),
    "rank 3 is late": lambda model, step: late(model, step, rank=3),
}


@pytest.mark.slow
@in_ranks(4)
@pytest.mark.parametrize("name", CHANGES)
def test_experts_may_change_and_be_late(name: str) -> None:
    with wrapped_mixture(mixture(), bucket_cap_mb=1e-4 if "late" in name else None) as (ddp, bare, group):
        for step in range(6):
            for model in (ddp.module, bare):
                CHANGES[name](model, step)
            steps_alike(ddp, bare, group, steps=[step])


@in_ranks(4)
def test_a_copy_has_groups_of_its_own_and_experts_their_own_names() -> None:
    """Experts by their numbers among those of all ranks."""
    first = 2 * (dist.get_rank() % 2)
    with wrapped_mixture(mixture((str(first), str(first + 1)))) as (ddp, bare, group):
        steps_alike(ddp, bare, group)
        with contextlib.closing(copy.deepcopy(ddp)) as twin:
            assert [group.match for group in twin.sync.config.experts] == [MATCH]
            steps_alike(twin, bare, group)


@in_ranks(4)
def test_an_expert_that_one_rank_uses_has_its_gradient_on_all_that_hold_it_when_backward_is_over() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows, experts = dist.get_rank(), torch.ones(2, WIDTH), ddp.module.experts
        route = (0,) if rank == 0 else ()
        steps_alike(ddp, bare, group, steps=[0], loss=lambda model, _: model(rows, route).sum())
        assert sorted(ddp.unused_parameters) == (ALL_EXPERTS[2:] if rank == 0 else ALL_EXPERTS)
        assert [param.grad is not None for param in experts["0"].parameters()] == [rank in (0, 2)] * 2
        # What no rank uses keeps what it has, to the bit.
        experts["1"].weight.grad = torch.full((WIDTH, WIDTH), 1 / 3)
        ddp(rows, route).sum().backward()
        assert torch.equal(experts["1"].weight.grad, torch.full((WIDTH, WIDTH), 1 / 3))


@in_ranks(4)
def test_a_backward_that_reaches_one_part_only_is_a_synchronisation_of_all() -> None:
    """Rank 0 reaches experts alone, rank 1 dense parameters alone, rank 2 nothing at all."""
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows = dist.get_rank(), torch.ones(2, WIDTH)
        for model in (ddp, bare):
            parts = getattr(model, "module", model)
            reached = [parts.experts["0"], parts.after, None, model][rank]
            if reached is not None:
                reached(rows).sum().backward()
        if rank == 2:
            ddp.finish()
        reduce_naively(bare, group)
        require_equal_gradients(ddp, bare)


@in_ranks(4)
@pytest.mark.parametrize("way", ["no_sync", "by hand"])
def test_micro_batches_are_summed_and_reduced_once(way: str) -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):

        def last_loss(model: nn.Module, step: int) -> Tensor:
            with ddp.no_sync():
                for part in range(2 if way == "no_sync" else 3):
                    loss(model, step, part=part).backward()
            if way == "no_sync":
                return loss(model, step, part=2)
            if model is ddp:
                ddp.reduce_gradients_async().wait()
            return torch.zeros((), requires_grad=True)  # whose backward reaches nothing

        steps_alike(ddp, bare, group, loss=last_loss)


@in_ranks(4)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_several_synchronised_backwards_of_a_step_add_up(op: str) -> None:
    """A sum over two ranks over four is no mean over them: what is there already must not be counted for each again."""
    divisors = {"divisor": 1, "dense_divisor": 1} if op == "sum" else {"divisor": 4, "dense_divisor": 4}
    with wrapped_mixture(mixture(), op=op, divisor=None if op == "sum" else 4) as (ddp, bare, group):
        for step in range(3):
            wanted: dict[str, Tensor] = {}
            ddp.zero_grad()
            for part in range(2):
                loss(ddp, step, part=part).backward()
                bare.zero_grad()
                loss(bare, step, part=part).backward()
                reduce_naively(bare, group, **divisors)
                for name, param in bare.named_parameters():
                    if param.grad is not None:
                        wanted[name] = param.grad + wanted[name] if name in wanted else param.grad
            found = {name: param.grad for name, param in ddp.module.named_parameters() if param.grad is not None}
            assert found.keys() == wanted.keys()
            # A mean of a mean is rounded in another place.
            inexact = {name for name in found if op == "mean" and ".experts." not in f".{name}"}
            tolerances = {name: 1e-6 if name in inexact else 0.0 for name in found}
            assert [it for it in found if not torch.allclose(found[it], wanted[it], rtol=0.0, atol=tolerances[it])] == []


@in_ranks(4)
def test_experts_take_over_values_and_buffers_of_the_first_rank_of_their_group() -> None:
    rank, model = dist.get_rank(), mixture()
    expert = model.experts["0"]
    for owner in (model, expert):
        owner.register_buffer("load", torch.full((2,), float(rank)))
    with wrapped_mixture(model) as (ddp, _, _):
        values = of_all_ranks((model.before.weight[0, 0].item(), expert.weight[0, 0].item()))
        for owner in (model, expert):
            owner.load += 10 * rank
        ddp(torch.ones(2, WIDTH)).sum().backward()
    dense, experts = zip(*values, strict=True)
    assert len(set(dense)) == 1
    assert experts[0] == experts[2] != experts[1] == experts[3]
    assert (model.load.tolist(), expert.load.tolist()) == ([0.0] * 2, [11.0 * (rank % 2)] * 2)


@in_ranks(4)
def test_experts_have_buckets_a_process_group_and_a_report_of_their_own() -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        (experts,) = ddp.sync.experts
        assert sorted(spec.name for spec in ddp.plan.params) == ["after.bias", "after.weight", "before.bias", "before.weight"]
        assert sorted(spec.name for spec in experts.plan.params) == ALL_EXPERTS
        assert dist.get_process_group_ranks(ddp.process_group) == [0, 1, 2, 3]
        assert dist.get_process_group_ranks(experts.process_group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
        assert experts.own_group.process_group is not experts.process_group
        for step in range(3):
            loss(ddp, step).backward()
        ddp.report()
        ddp.explain()
        assert min(ddp.report(show=False).num_steps, experts.report(show=False).num_steps) > 0
        assert len(experts.explain(show=False).bucket_mb) > 0


@in_ranks(4)
def test_several_groups_go_side_by_side_and_a_rank_alone_divides_too() -> None:
    """Two kinds of experts, one of which every rank has alone."""
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "mine": nn.Linear(2, 2), "ours": nn.Linear(2, 2)})
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    with experts_group() as group:
        groups = (
            ExpertGroup(match="mine.*", process_group=alone, divisor=4),
            ExpertGroup(match="ours.*", process_group=group, divisor=2.5),
        )
        sync = attach(model, config=SyncConfig(experts=groups, reduction="ordered"))
        bare = copy.deepcopy(model)
        rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
        for it in (model, bare, model, bare):
            it.zero_grad()
            it["ours"](it["mine"](it["dense"](rows))).square().sum().backward()
        for name, over, divisor in (("dense", None, 4), ("mine", alone, 4), ("ours", group, 2.5)):
            for param in bare[name].parameters():
                param.grad = reduced(param, over, divisor=divisor)
        require_equal_gradients(model, bare)
        sync.close()
    dist.destroy_process_group(alone)


@in_ranks(4)
def test_after_a_failure_on_one_rank_all_go_on() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rows = torch.ones(2, WIDTH)
        with pytest.raises(ZeroDivisionError if dist.get_rank() == 1 else PeerFailed):
            ddp(Fails.apply(rows.requires_grad_()) if dist.get_rank() == 1 else rows).sum().backward()
        steps_alike(ddp, bare, group)


@in_ranks(4)
def test_communication_hooks_see_the_dense_parameters_only() -> None:
    seen: list[int] = []

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(4), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with wrapped_mixture(mixture(), reduction="native") as (ddp, bare, group):
        ddp.register_comm_hook(None, hook)
        for model in (ddp, bare):
            loss(model, 0).backward()
        reduce_naively(bare, group)
        require_equal_gradients(ddp.module.experts, bare.experts)
    assert sum(seen) == WIDTH * WIDTH + WIDTH + WIDTH + 1


NO_MATCH = (
    "no parameter matches '{}'.\n"
    "  ExpertGroup, for a model of type ModuleDict\n"
    "  Match names of named_parameters(), such as 'b.bias'."
)
REFUSED = {
    "no match": NO_MATCH.format("c.*"),
    "two groups": "parameter 'a.weight' is in several groups of experts.\n"
    "  it matches 'a.*' and '*.weight'\n"
    "  Write patterns of which each parameter matches one.",
    "ignored": NO_MATCH.format("a.*"),
    "no group": "process_group must be a torch.distributed.ProcessGroup, got NoneType.\n"
    "  ExpertGroup(match='a.*')\n"
    "  Pass what torch.distributed.new_group() returned for the ranks that hold the same experts.",
    "not in it": "rank {rank} is not in the process group of its experts.\n"
    "  ExpertGroup(match='a.*')\n"
    "  Give each rank the group of the ranks that hold the same experts as it does.",
    "strangers": "experts are on ranks that do not train this model: {strangers}.\n"
    "  ExpertGroup(match='a.*'), the model is on ranks {own}\n"
    "  Give a group of ranks of the model.",
    "weight": "weights do not go with experts: their ranks know the weights of their own group only.\n"
    "  weight(n)\n"
    "  Divide the loss by the number of tokens of all ranks, over the number of ranks.",
    "optimizer": "this model has experts, whose parameters and optimizer state are sharded over other ranks than the dense "
    "ones.\n  ShardedOptimizer\n"
    "  Make one for the model with params=[param for _, param in sync.named_parameters()], its dense ones, and one for each "
    "of sync.experts.",
    "other group": "the ranks of a model with experts cannot change.\n"
    "  _update_process_group\n"
    "  Close the wrapper, and wrap the model anew.",
    "join": "a rank that has run out of data cannot leave a model with experts: tokens of others need those that it holds.\n"
    "  join\n"
    "  Give every rank as many batches.",
    "checkpoint": "this model has experts: ranks have other tensors under the same names, and a checkpoint has one of each.\n"
    "  save_checkpoint, load_checkpoint\n"
    "  Save model.state_dict() and optimizer.full_state_dict() on each rank, in a file of its own.",
}


@in_ranks(4)
def test_what_cannot_be_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    places = {"rank": dist.get_rank(), "strangers": "0, 2" if dist.get_rank() % 2 else "1, 3"}
    places["own"] = "1, 3" if dist.get_rank() % 2 else "0, 2"
    refused: set[str] = set()

    def refuse(name: str, kind: type[Exception], call: Callable[[], object]) -> None:
        assert text_of(kind, call) == REFUSED[name].format_map(places)
        refused.add(name)

    with experts_group() as group:

        def attaching(*groups: ExpertGroup, **how: Any) -> Callable[[], object]:
            return lambda: attach(model, config=SyncConfig(experts=groups), **how)

        mine = ExpertGroup(match="a.*", process_group=group)
        strange = ExpertGroup(match="a.*", process_group=dist.group.WORLD)
        refuse("no match", ConfigError, attaching(mine, ExpertGroup(match="c.*", process_group=group)))
        refuse("two groups", ConfigError, attaching(mine, ExpertGroup(match="*.weight", process_group=group)))
        refuse("ignored", ConfigError, attaching(mine, ignore=("a",)))
        refuse("no group", WrongType, attaching(ExpertGroup(match="a.*", process_group=None)))
        refuse("not in it", ConfigError, attaching(ExpertGroup(match="a.*", process_group=dist.GroupMember.NON_GROUP_MEMBER)))
        refuse("strangers", ConfigError, attaching(strange, process_group=group))
        with contextlib.closing(attaching(mine)()) as sync:
            refuse("weight", ConfigError, lambda: sync.weight(3))
            refuse("optimizer", ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, sync, lr=0.1))
            refuse("other group", PhaseError, lambda: sync.change_process_group(group))
        with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(experts=(mine,)))) as ddp:
            refuse("join", PhaseError, ddp.join_hook)
            refuse("checkpoint", CheckpointError, lambda: save_checkpoint("nowhere", ddp))
    assert refused == REFUSED.keys()
