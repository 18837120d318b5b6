"""Experts on 2 x 2 ranks: reduced over ranks of their own, with a divisor of their own, beside the dense parameters."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.mixture import (
    MATCH,
    SGD,
    WIDTH,
    Mixture,
    experts_group,
    loss,
    mixture,
    reduce_naively,
    require_equal_gradients,
    require_equal_values,
    trained_naively,
    wrapped_mixture,
)
from support.ranks import Ranks, in_ranks
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
    clip_grad_norm_,
    save_checkpoint,
)

NUM_STEPS = 8


def of_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


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
    """Every gradient of every step, and what an optimizer makes of them."""
    with wrapped_mixture(mixture(), divisor=divisor, **settings) as (ddp, bare, group):
        ours, theirs = torch.optim.SGD(ddp.parameters(), **SGD), torch.optim.SGD(bare.parameters(), **SGD)
        for step in range(NUM_STEPS):
            ours.zero_grad()
            theirs.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group, divisor=2 if divisor is None else divisor)
            require_equal_gradients(ddp.module, bare)
            ours.step()
            theirs.step()
        require_equal_values(ddp.module, bare)


def native() -> None:
    with wrapped_mixture(mixture(), reduction="native") as (ddp, bare, group):
        for step in range(NUM_STEPS):
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module.experts, bare.experts)
            for param, wanted in zip(ddp.module.after.parameters(), bare.after.parameters(), strict=True):
                # Four summands in another order: three roundings, each of at most half a unit of the largest partial sum.
                assert torch.allclose(param.grad, wanted.grad, rtol=0.0, atol=1e-6)


def test_the_backends_own_sums_give_the_same_experts(four_ranks: Ranks) -> None:
    """Of two ranks, whose sum has one order, divided by a power of two."""
    four_ranks.run(native)


def unused() -> tuple[tuple[str, ...], list[bool]]:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows = dist.get_rank(), torch.ones(2, WIDTH)
        route = (0,) if rank == 0 else ()
        kept = torch.full_like(ddp.module.experts["1"].weight, 1 / 3)
        for model in (ddp, bare):
            model(rows, route).sum().backward()
        reduce_naively(bare, group)
        require_equal_gradients(ddp.module, bare)
        first = ddp.unused_parameters
        # What no rank uses keeps what it has, to the bit.
        ddp.module.experts["1"].weight.grad = kept
        ddp(rows, route).sum().backward()
        assert torch.equal(ddp.module.experts["1"].weight.grad, torch.full_like(kept, 1 / 3))
        return first, [param.grad is not None for param in ddp.module.experts["0"].parameters()]


def test_an_expert_that_one_rank_uses_has_its_gradient_on_all_that_hold_it_when_backward_is_over(four_ranks: Ranks) -> None:
    both = tuple(f"experts.{index}.{kind}" for index in (0, 1) for kind in ("weight", "bias"))
    answers = four_ranks.run(unused)
    assert [sorted(names) for names, _ in answers] == [sorted(both[2:]), sorted(both), sorted(both), sorted(both)]
    assert [has for _, has in answers] == [[True, True], [False, False], [True, True], [False, False]]


@in_ranks(4)
def test_a_backward_that_reaches_one_part_only_is_a_synchronisation_of_all() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows = dist.get_rank(), torch.ones(2, WIDTH)
        for model in (ddp, bare):
            if rank == 0:  # experts alone
                model.get_submodule("module.experts.0" if model is ddp else "experts.0")(rows).sum().backward()
            elif rank == 1:  # dense parameters alone
                model.get_submodule("module.after" if model is ddp else "after")(rows).sum().backward()
            elif rank == 3:
                model(rows, (0, 1)).sum().backward()
        if rank == 2:  # nothing at all
            ddp.finish()
        reduce_naively(bare, group)
        require_equal_gradients(ddp.module, bare)


@in_ranks(4)
@pytest.mark.parametrize("way", ["no_sync", "by hand"])
def test_micro_batches_are_summed_and_reduced_once(way: str) -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        for step in range(4):
            ddp.zero_grad()
            bare.zero_grad()
            for part in range(3):
                is_last = part == 2
                context = ddp.no_sync() if not is_last or way == "by hand" else contextlib.nullcontext()
                with context:
                    loss(ddp, step, part=part).backward()
                loss(bare, step, part=part).backward()
            if way == "by hand":
                ddp.reduce_gradients_async().wait()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module, bare)


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
            for name, param in ddp.module.named_parameters():
                assert (param.grad is None) == (name not in wanted), name
                if param.grad is not None:
                    is_mean_of_mean = op == "mean" and ".experts." not in f".{name}"
                    if is_mean_of_mean:  # rounded in another place
                        assert torch.allclose(param.grad, wanted[name], rtol=0.0, atol=1e-6), name
                    else:
                        assert torch.equal(param.grad, wanted[name]), name


class WithStatistics(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((2,), float(dist.get_rank())))
        self.experts["0"].register_buffer("load", torch.full((2,), float(dist.get_rank())))


def values_and_buffers() -> tuple[float, float, list[float], list[float]]:
    torch.manual_seed(dist.get_rank())
    model = WithStatistics()
    with wrapped_mixture(model) as (ddp, _, _):
        first = model.before.weight[0, 0].item(), model.experts["0"].weight[0, 0].item()
        model.seen += 10 * dist.get_rank()
        model.experts["0"].load += 10 * dist.get_rank()
        ddp(torch.ones(2, WIDTH)).sum().backward()
        return *first, model.seen.tolist(), model.experts["0"].load.tolist()


def test_experts_take_over_values_and_buffers_of_the_first_rank_of_their_group(four_ranks: Ranks) -> None:
    answers = four_ranks.run(values_and_buffers)
    dense, experts, seen, load = zip(*answers, strict=True)
    assert len(set(dense)) == 1
    assert experts[0] == experts[2] != experts[1] == experts[3]
    assert seen == ([0.0, 0.0],) * 4
    assert load == ([0.0, 0.0], [11.0, 11.0], [0.0, 0.0], [11.0, 11.0])


def parts() -> tuple[list[str], list[str], list[int], list[int], bool]:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        (experts,) = ddp.sync.experts
        return (
            sorted(spec.name for spec in ddp.plan.params),
            sorted(spec.name for spec in experts.plan.params),
            dist.get_process_group_ranks(ddp.process_group),
            dist.get_process_group_ranks(experts.process_group),
            experts.own_group.process_group is not experts.process_group,
        )


def test_experts_have_buckets_and_a_process_group_of_their_own(four_ranks: Ranks) -> None:
    for rank, (dense, experts, all_ranks, own_ranks, is_clone) in enumerate(four_ranks.run(parts)):
        assert dense == ["after.bias", "after.weight", "before.bias", "before.weight"]
        assert experts == ["experts.0.bias", "experts.0.weight", "experts.1.bias", "experts.1.weight"]
        assert (all_ranks, own_ranks, is_clone) == ([0, 1, 2, 3], [rank % 2, rank % 2 + 2], True)


@in_ranks(4)
def test_experts_may_have_other_names_on_other_ranks() -> None:
    """Experts by their numbers among those of all ranks."""
    first = 2 * (dist.get_rank() % 2)
    model = mixture((str(first), str(first + 1)))
    with wrapped_mixture(model) as (ddp, bare, group):
        for step in range(4):
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(model, bare)


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
        for it in (model, bare, model, bare):
            it.zero_grad()
            rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
            it["ours"](it["mine"](it["dense"](rows))).square().sum().backward()
        for name, param in bare.named_parameters():
            kind = name.split(".")[0]
            over, divisor = {"dense": (None, 4), "mine": (alone, 4), "ours": (group, 2.5)}[kind]
            of_ranks = [torch.empty_like(param.grad) for _ in range(dist.get_world_size(over))]
            dist.all_gather(of_ranks, param.grad, group=over)
            wanted = sum(of_ranks[1:], of_ranks[0]) / divisor
            assert torch.equal(model.get_parameter(name).grad, wanted), name
        sync.close()
    dist.destroy_process_group(alone)


@in_ranks(4)
@pytest.mark.parametrize("late_rank", [0, 3])
def test_a_late_rank_changes_nothing(late_rank: int) -> None:
    """The rank comes late to its experts' gradients; those of the others arrive, and leave, in another order."""
    with wrapped_mixture(mixture(), bucket_cap_mb=1e-4) as (ddp, bare, group):

        def sleep(grad: Tensor) -> Tensor:
            if dist.get_rank() == late_rank:
                time.sleep(0.05)
            return grad

        for param in ddp.module.experts.parameters():
            param.register_hook(sleep)
        for step in range(4):
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module, bare)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> Tensor:
        raise ValueError("a cosmic ray")


def failing() -> str:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        said = ""
        rows = torch.ones(2, WIDTH)
        try:
            ddp(Broken.apply(rows.requires_grad_()) if dist.get_rank() == 1 else rows).sum().backward()
        except (ValueError, PeerFailed) as error:
            said = type(error).__name__
        for step in range(3):
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module, bare)
        return said


def test_after_a_failure_on_one_rank_all_go_on(four_ranks: Ranks) -> None:
    assert four_ranks.run(failing) == ["PeerFailed", "ValueError", "PeerFailed", "PeerFailed"]


def frozen() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        for step in range(6):
            for model in (ddp.module, bare):
                model.experts["0"].requires_grad_(step < 2 or step > 3)
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module, bare)


def test_experts_may_be_frozen_and_thawed(four_ranks: Ranks) -> None:
    four_ranks.run(frozen)


@in_ranks(4)
@pytest.mark.parametrize("change", ["frozen", "replaced"])
def test_experts_of_one_group_may_change_alone(change: str) -> None:
    """Ranks 1 and 3, which hold other experts, know nothing of it."""
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        for step in range(6):
            for model in (ddp.module, bare) if dist.get_rank() % 2 == 0 else ():
                expert = model.experts["0"]
                if change == "frozen":
                    expert.weight.requires_grad_(step < 2 or step > 3)
                elif step == 2:
                    expert.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))
            ddp.zero_grad()
            bare.zero_grad()
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(ddp.module, bare)


@in_ranks(4)
def test_a_copy_has_groups_of_its_own() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        twin = copy.deepcopy(ddp)
        assert [group.match for group in twin.sync.config.experts] == [MATCH]
        for step in range(3):
            twin.zero_grad()
            bare.zero_grad()
            loss(twin, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            require_equal_gradients(twin.module, bare)
        twin.close()


def distinct_norm(model: nn.Module, norm_type: float) -> float:
    """Dense gradients once, experts of ranks 0 and 1."""
    mine = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    is_expert = {name: ".experts." in f".{name}" for name in mine}
    found = of_all_ranks(mine)
    grads = [grad for rank in (0, 1) for name, grad in found[rank].items() if ".experts." in f".{name}" or rank == 0]
    assert any(is_expert.values())
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type).item()


@in_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_counts_each_parameter_once(norm_type: float) -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        ddp(torch.randn(3, WIDTH)).square().sum().backward()
        before = {name: param.grad.clone() for name, param in ddp.module.named_parameters()}
        wanted = distinct_norm(ddp.module, norm_type)
        total = clip_grad_norm_(ddp, 0.1, norm_type)
        # Summed in fp64 and rounded once, and so is the reference: half a unit in the last place of fp32 each.
        assert abs(total.item() - wanted) <= torch.finfo(torch.float32).eps * wanted
        assert len(set(of_all_ranks(total.item()))) == 1
        scale = (0.1 / (total + 1e-6)).clamp(max=1.0)
        assert scale < 1.0
        for name, param in ddp.module.named_parameters():
            assert torch.equal(param.grad, before[name] * scale), name
        assert torch.equal(clip_grad_norm_(ddp.sync, 1e9, norm_type), clip_grad_norm_(ddp, 1e9, norm_type))
        ddp.module.experts["0"].weight.grad[0, 0] = float("inf") if dist.get_rank() % 2 == 1 else 0.0
        with pytest.raises(RuntimeError, match="is inf"):
            clip_grad_norm_(ddp, 0.1, norm_type, error_if_nonfinite=True)


@in_ranks(2)
def test_clipping_goes_without_experts_as_well() -> None:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 2), torch.ones(2, 3) + dist.get_rank()
    ddp = DistributedDataParallel(model)
    ddp(rows).square().sum().backward()
    wanted = torch.nn.utils.get_total_norm([param.grad.double() for param in model.parameters()])
    assert clip_grad_norm_(ddp, 1.0) == wanted.float()
    ddp.close()
    for strategy in ("zero1", "zero2"):
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy))
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        ddp.zero_grad()
        ddp(rows).square().sum().backward()
        assert torch.equal(clip_grad_norm_(ddp, 1e9), optimizer.clip_grad_norm_(1e9))
        ddp.close()
    assert "target must be what attach()" in text_of(WrongType, lambda: clip_grad_norm_(model, 1.0))
    assert "norm_type must be above zero" in text_of(ConfigError, lambda: clip_grad_norm_(ddp, 1.0, 0.0))


def clipping_too_early() -> str:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        with ddp.no_sync():
            loss(ddp, 0).backward()
        text = text_of(PhaseError, lambda: clip_grad_norm_(ddp, 1.0))
        loss(ddp, 1).backward()
        assert clip_grad_norm_(ddp, 1.0) > 0.0
        return text


def test_clipping_what_is_not_synchronised_is_an_error(four_ranks: Ranks) -> None:
    assert four_ranks.run(clipping_too_early) == [
        "gradients were accumulated and are not synchronised: each rank would find another norm.\n"
        f"  clip_grad_norm_, rank {rank}\n"
        "  Run the last backward of a step outside of accumulate() and no_sync()."
        for rank in range(4)
    ]


@in_ranks(2)
def test_clipping_takes_rows_of_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    ddp = DistributedDataParallel(model)
    ddp(torch.tensor([1, 1, 2 + dist.get_rank()])).sum().backward()
    dense = model.weight.grad.to_dense()
    assert dense.unique().tolist() == [0.0, 0.5, 2.0]
    assert clip_grad_norm_(ddp, 1.0) == 3.0  # 2 of 2 each, 4 of 0.5 each: the root of 9
    assert torch.equal(model.weight.grad.to_dense(), dense * torch.tensor(1.0 / (3.0 + 1e-6)))
    ddp.close()


ADAMW = {"lr": 0.01}


def optimizers_of(ddp: DistributedDataParallel, *, eager: bool = False) -> list[ShardedOptimizer]:
    dense, (experts,) = [param for _, param in ddp.sync.named_parameters()], ddp.sync.experts
    parts: tuple[tuple[Any, Any], ...] = ((ddp, dense), (experts, None))
    return [ShardedOptimizer(torch.optim.AdamW, target, params, eager=eager, **ADAMW) for target, params in parts]


def sharded(strategy: str, is_eager: bool, settings: dict[str, Any]) -> None:
    with wrapped_mixture(mixture(), strategy=strategy, **settings) as (ddp, bare, group):
        optimizers = optimizers_of(ddp, eager=is_eager)
        for step in range(NUM_STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(ddp, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        ddp.wait()
        trained_naively(bare, group, torch.optim.AdamW(bare.parameters(), **ADAMW), num_steps=NUM_STEPS)
        require_equal_values(ddp.module, bare)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("is_eager", [False, True], ids=["barrier", "eager"])
@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 1e-4}], ids=str)
def test_shards_of_experts_over_their_group_make_the_same_model(
    four_ranks: Ranks, strategy: str, is_eager: bool, settings: Any
) -> None:
    four_ranks.run(sharded, strategy, is_eager, settings)


@in_ranks(4, is_fresh=True)
def test_a_dropped_wrapper_leaves_parameters_that_have_come() -> None:
    model, num_steps = mixture(), 4

    def train(group: dist.ProcessGroup) -> nn.Module:
        experts = (ExpertGroup(match=MATCH, process_group=group, divisor=4),)
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy="zero1", reduction="ordered", experts=experts))
        bare = copy.deepcopy(model)
        optimizers = optimizers_of(ddp)
        for step in range(num_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(ddp, step).backward()
            if step == num_steps - 1:
                for part in (ddp.sync, *ddp.sync.experts):
                    posting = part._engine.formation.assembly.reducer.sharding.exchanges._posting
                    posting.submit(time.sleep, 0.2)
            for optimizer in optimizers:
                optimizer.step()
        return bare

    with experts_group() as group:
        bare = train(group)
        trained_naively(bare, group, torch.optim.AdamW(bare.parameters(), **ADAMW), num_steps=num_steps)
        require_equal_values(model, bare)


def sharded_beside_plain() -> str:
    """Dense state in shards, all of the experts' on each rank that holds them, in groups of one rank."""
    torch.manual_seed(dist.get_rank())
    model = Mixture()
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    experts = (ExpertGroup(match=MATCH, process_group=alone, divisor=4),)
    sync = attach(model, config=SyncConfig(experts=experts, reduction="ordered"))
    bare = copy.deepcopy(model)
    dense = ShardedOptimizer(torch.optim.AdamW, sync, [param for _, param in sync.named_parameters()], **ADAMW)
    plain = torch.optim.AdamW([param for _, param in sync.experts[0].named_parameters()], **ADAMW)
    for step in range(NUM_STEPS):
        for optimizer in (dense, plain):
            optimizer.zero_grad()
        loss(model, step).backward()
        for optimizer in (dense, plain):
            optimizer.step()
    sync.wait()
    trained_naively(bare, alone, torch.optim.AdamW(bare.parameters(), **ADAMW), num_steps=NUM_STEPS)
    require_equal_values(model, bare)
    refusal = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, sync.experts[0], **ADAMW))
    sync.close()
    dist.destroy_process_group(alone)
    return refusal


def test_experts_on_one_rank_each_go_with_a_plain_optimizer(four_ranks: Ranks) -> None:
    assert four_ranks.run(sharded_beside_plain)[0] == (
        "these experts are on one rank only, which has nobody to share an optimizer with.\n"
        "  ShardedOptimizer, ExpertGroup(match='*experts.*')\n"
        "  Give them to a plain optimizer."
    )


@in_ranks(4)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_clipping_is_exact_over_shards_of_both(strategy: str) -> None:
    with wrapped_mixture(mixture(), strategy=strategy) as (ddp, bare, group):
        optimizers = optimizers_of(ddp)
        for step in (0, 4, 8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            bare.zero_grad()
            with torch.no_grad():
                for param, value in zip(bare.parameters(), ddp.module.parameters(), strict=True):
                    param.copy_(value)
            loss(ddp, step).backward()
            loss(bare, step).backward()
            reduce_naively(bare, group)
            wanted = distinct_norm(bare, 2.0)
            total = clip_grad_norm_(ddp, 0.01)
            # As without shards: rounded to fp32 once on either side.
            assert abs(total.item() - wanted) <= torch.finfo(torch.float32).eps * wanted
            scale = (0.01 / (total + 1e-6)).clamp(max=1.0)
            for param, theirs in zip(ddp.module.parameters(), bare.parameters(), strict=True):
                full = ddp.full_gradient(param)
                assert (full is None) == (theirs.grad is None)
                assert full is None or torch.equal(full, theirs.grad * scale)
            for optimizer in optimizers:
                optimizer.step()
            ddp.wait()


@in_ranks(4)
@pytest.mark.parametrize("way", ["clip", "look", "unscale", "step"])
def test_a_rank_without_gradients_joins_all_parts_before_a_collective_of_one(way: str) -> None:
    """In the last step rank 1's backward reaches nothing, and a collective call about one part only comes before the other's."""
    with wrapped_mixture(mixture(), strategy="zero1", overlap=way != "step") as (ddp, bare, group):
        optimizers, scaler = optimizers_of(ddp), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=way == "unscale")
        theirs = torch.optim.AdamW(bare.parameters(), **ADAMW)
        for step in range(3):
            for optimizer in (*optimizers, theirs):
                optimizer.zero_grad()
            is_without = step == 2 and dist.get_rank() == 1
            for model in (ddp, bare):
                value = loss(model, step)
                value = value.detach().requires_grad_() if is_without else value
                (scaler.scale(value) if model is ddp else value).backward()
            if way == "clip":
                optimizers[0].clip_grad_norm_(float("inf"))
            elif way == "look":
                ddp.full_gradient(ddp.module.before.weight)
            for optimizer in optimizers:
                if way == "unscale":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            reduce_naively(bare, group)  # collectives that rank 1 would begin while others are in backward
            theirs.step()
        ddp.wait()
        require_equal_values(ddp.module, bare)


def hooked() -> list[int]:
    seen: list[int] = []

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(4), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with wrapped_mixture(mixture(), reduction="native") as (ddp, bare, group):
        ddp.register_comm_hook(None, hook)
        loss(ddp, 0).backward()
        loss(bare, 0).backward()
        reduce_naively(bare, group)
        require_equal_gradients(ddp.module.experts, bare.experts)
    return seen


def test_communication_hooks_see_the_dense_parameters_only(four_ranks: Ranks) -> None:
    num_dense = WIDTH * WIDTH + WIDTH + WIDTH + 1
    assert [sum(seen) for seen in four_ranks.run(hooked)] == [num_dense] * 4


def reports() -> tuple[int, int, int]:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        for step in range(3):
            loss(ddp, step).backward()
        ddp.report()
        ddp.explain()
        dense, experts = ddp.report(show=False), ddp.sync.experts[0].report(show=False)
        return dense.num_steps, experts.num_steps, len(ddp.sync.experts[0].explain(show=False).bucket_mb)


def test_each_part_has_a_report(four_ranks: Ranks) -> None:
    for dense, experts, num_buckets in four_ranks.run(reports):
        assert min(dense, experts, num_buckets) > 0


def refusals() -> dict[str, str]:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    found: dict[str, str] = {}
    with experts_group() as group:

        def refuse(name: str, kind: type[Exception], *groups: ExpertGroup, **how: Any) -> None:
            found[name] = text_of(kind, lambda: attach(model, config=SyncConfig(experts=groups), **how))

        mine = ExpertGroup(match="a.*", process_group=group)
        refuse("no match", ConfigError, mine, ExpertGroup(match="c.*", process_group=group))
        refuse("two groups", ConfigError, mine, ExpertGroup(match="*.weight", process_group=group))
        refuse("ignored", ConfigError, mine, ignore=("a",))
        refuse("no group", WrongType, ExpertGroup(match="a.*", process_group=None))
        refuse("not in it", ConfigError, ExpertGroup(match="a.*", process_group=dist.GroupMember.NON_GROUP_MEMBER))
        refuse("strangers", ConfigError, ExpertGroup(match="a.*", process_group=dist.group.WORLD), process_group=group)
        sync = attach(model, config=SyncConfig(experts=(mine,)))
        found["weight"] = text_of(ConfigError, lambda: sync.weight(3))
        found["optimizer"] = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, sync, lr=0.1))
        found["other group"] = text_of(PhaseError, lambda: sync.change_process_group(group))
        sync.close()
        ddp = DistributedDataParallel(model, config=SyncConfig(experts=(mine,)))
        found["join"] = text_of(PhaseError, lambda: ddp.join_hook())
        found["checkpoint"] = text_of(CheckpointError, lambda: save_checkpoint("nowhere", ddp))
        ddp.close()
    return found


def test_what_cannot_be_is_refused(four_ranks: Ranks) -> None:
    assert four_ranks.run(refusals)[1] == {
        "no match": "no parameter matches 'c.*'.\n"
        "  ExpertGroup, for a model of type ModuleDict\n"
        "  Match names of named_parameters(), such as 'b.bias'.",
        "two groups": "parameter 'a.weight' is in several groups of experts.\n"
        "  it matches 'a.*' and '*.weight'\n"
        "  Write patterns of which each parameter matches one.",
        "ignored": "no parameter matches 'a.*'.\n"
        "  ExpertGroup, for a model of type ModuleDict\n"
        "  Match names of named_parameters(), such as 'b.bias'.",
        "no group": "process_group must be a torch.distributed.ProcessGroup, got NoneType.\n"
        "  ExpertGroup(match='a.*')\n"
        "  Pass what torch.distributed.new_group() returned for the ranks that hold the same experts.",
        "not in it": "rank 1 is not in the process group of its experts.\n"
        "  ExpertGroup(match='a.*')\n"
        "  Give each rank the group of the ranks that hold the same experts as it does.",
        "strangers": "experts are on ranks that do not train this model: 0, 2.\n"
        "  ExpertGroup(match='a.*'), the model is on ranks 1, 3\n"
        "  Give a group of ranks of the model.",
        "weight": "weights do not go with experts: their ranks know the weights of their own group only.\n"
        "  weight(n)\n"
        "  Divide the loss by the number of tokens of all ranks, over the number of ranks.",
        "optimizer": "this model has experts, whose parameters and optimizer state are sharded over other ranks than the dense "
        "ones.\n"
        "  ShardedOptimizer\n"
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
