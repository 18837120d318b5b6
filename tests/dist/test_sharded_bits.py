"""Sharded training has the bits of unsharded training, whatever the plan; on a mesh those of sums row by row."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from support.inside import over_collectives
from support.models import CASES, Branches, Case, noise
from support.ranks import in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import (
    MLP,
    NARROW,
    OPTIMIZERS,
    ORDERED,
    SMALL,
    TIED,
    Parameters,
    mean_in_order,
    reference,
    require_bits,
    require_equal,
    trained,
    ways,
)

PLANS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 2e-5},  # every parameter in pieces under shards
    SMALL,
    {"bucket_cap_mb": 1e-3, "order": "reverse"},
    {"bucket_cap_mb": (1e-4, 1e-3)},
    {"order": "largest_first", "bucket_cap_mb": 5e-4},
    {"bucket_cap_mb": None},
    {},
]
PLAIN = {"strategy": "ddp"}


@in_ranks(2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("case", ["mlp", "tied transformer", "convolutions"])
def test_every_plan_has_the_same_bits(case: str) -> None:
    require_bits(CASES[case], "AdamW", num_steps=12, plans=PLANS)


@in_ranks(2, 3)
def test_so_it_has_without_shards_and_without_overlap() -> None:
    require_bits(TIED, "AdamW", num_steps=12, among=[PLAIN], plans=PLANS)
    require_bits(TIED, num_steps=6, among=[{"strategy": "zero1", "overlap": False}])


@in_ranks(4)
@pytest.mark.parametrize("settings", [{"strategy": "hybrid", "shape": (1, 4)}, {"strategy": "hybrid", "shape": (4, 1)}], ids=str)
def test_a_mesh_with_one_rank_along_an_axis_adds_up_in_rank_order(settings: dict[str, Any]) -> None:
    expected = reference(MLP, "ddp", num_steps=8, **ORDERED)
    for eager in (False, True):
        require_equal(expected, trained(MLP, num_steps=8, eager=eager, **settings, **ORDERED), what=f"eager={eager}")


@in_ranks(4)
def test_a_mesh_and_plain_training_without_overlap_have_the_same_bits() -> None:
    require_bits(MLP, among=[{"strategy": "hybrid", "overlap": False}])
    expected = reference(MLP, "ddp", num_steps=12, reduction="ordered")
    for strategy in ("zero1", "zero2", "ddp"):
        require_equal(expected, trained(MLP, strategy, num_steps=12, **ORDERED), what=strategy)


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_two_ranks_need_no_order(strategy: str) -> None:
    for plan in PLANS[:3]:
        require_equal(reference(TIED, "ddp"), trained(TIED, strategy, **plan))


NEAR = {
    # Sums of three fp32 values in another order differ by an ulp each; twenty steps of SGD with lr 0.05 keep that small.
    "native reductions": ("SGD", "native"),
    # Torch's fused kernel rounds differently after the last whole vector, so that it matters where a piece ends: an update of
    # at most lr = 0.01 differs by some ulps, over 20 steps.
    "a fused optimizer": ("fused AdamW", "ordered"),
}


@in_ranks(3)
@pytest.mark.parametrize("what", NEAR)
def test_what_rounds_differently_is_near(what: str) -> None:
    optimizer, reduction = NEAR[what]
    expected, got = (trained(MLP, strategy, optimizer, reduction=reduction) for strategy in ("ddp", "zero1"))
    require_near(expected, got, rtol=1e-5, atol=1e-6)


def require_near(first: Parameters, second: Parameters, *, rtol: float = 0.0, atol: float) -> None:
    assert [name for name in first if not torch.allclose(first[name], second[name], rtol=rtol, atol=atol)] == []


@in_ranks(2, 3, 4)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"fused AdamW"}))
def test_every_elementwise_optimizer_has_the_bits_of_the_plain_one(optimizer: str) -> None:
    for case in (MLP, TIED):
        require_bits(case, optimizer, plans=[{"bucket_cap_mb": 2e-4}])


@in_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_are_alike_under_every_plan(dtype: torch.dtype) -> None:
    case, settings = NARROW[dtype], {"reduction": "ordered", "num_steps": 8}
    first, *_ = ways()
    expected = trained(case, **first, **settings)
    assert {param.dtype for param in expected.values()} == {dtype}
    for way in ways():
        for plan in PLANS[:-1]:
            require_equal(expected, trained(case, **way, **settings, **plan), what=f"{way} {plan}")
    for plan in PLANS[:-1]:  # by SGD, because Adam's epsilon is zero in fp16
        require_equal(reference(case, "ddp", "SGD", **settings), trained(case, "ddp", "SGD", **settings, **plan), what=str(plan))


@in_ranks(4)
def test_so_they_are_on_a_mesh_where_no_order_is_asked_for() -> None:
    # The backend reduces the first step's gradients, and rounds as the plan has it: there is one plan.
    barrier, eager = (trained(NARROW[torch.bfloat16], num_steps=8, **way, **SMALL) for way in ways())
    require_equal(barrier, eager)


ONES = Case(lambda: nn.Linear(4, 4, bias=False).bfloat16(), lambda model, step: model(torch.ones(1, 4).bfloat16()).float().sum())


def tiny_step(ddp: Any, opt: torch.optim.Optimizer, step: int) -> None:
    opt.param_groups[0] |= {"lr": 1e-4, "momentum": 0.0, "weight_decay": 0.0}
    opt.zero_grad()
    ONES.loss(ddp, step).backward()
    opt.step()


@in_ranks(2)
def test_master_weights_remember_what_sixteen_bits_forget() -> None:
    # Steps so small that a bf16 parameter alone would never move.
    expected = ONES.model().weight.detach().float() - 100 * 1e-4  # every gradient is 1
    sharded, plain = (
        (trained(ONES, strategy, "SGD", num_steps=100, each=tiny_step)["module.weight"].float() - expected).abs().max()
        for strategy in ("zero1", "ddp")
    )
    assert sharded <= 2**-9  # half an ulp of a bf16 below 0.5
    assert plain > sharded


# Gradients are sums of whole numbers, which are exact in any order, and do not depend on the weights.
WHOLE = Case(lambda: nn.Linear(20, 12), lambda model, step: model(noise(5, 20, step=step).mul(4).round()).sum())


@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_where_sums_are_exact_a_mesh_has_the_bits_of_plain_training(reduction: str) -> None:
    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 8, "reduction": reduction}
    for way in ways():
        require_equal(trained(WHOLE, "ddp", **settings), trained(WHOLE, **settings, **way, **SMALL), what=str(way))


# As where sends and receives are not posted: what NCCL would be asked for.
@in_ranks(4)
def test_the_collectives_of_a_backend_do_the_same() -> None:
    with over_collectives():
        require_bits(MLP, num_steps=12, among=[{"strategy": "hybrid"}])
        exact = trained(WHOLE, "hybrid", "SGD", num_steps=12, **SMALL)
    require_equal(trained(WHOLE, "ddp", "SGD", num_steps=12), exact)


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_other_plans_on_the_way_change_no_bit_on_a_mesh(eager: bool) -> None:
    with scripted(all_in_one, one_each, in_pieces) as seen:
        require_bits(TIED, "Adam", num_steps=24, among=[{"strategy": "hybrid", "eager": eager}], plans=[{}])
    assert dist.get_rank() > 0 or len({plan.fingerprint for plan in seen}) > 1


def micro_batches(ddp: Any, opt: torch.optim.Optimizer, step: int, *, num: int, weighs: bool = False) -> None:
    """Gradients become None, and then zeros in two steps."""
    opt.zero_grad(set_to_none=step % 3 == 0)
    for micro in range(num):
        with ddp.no_sync() if micro < num - 1 else contextlib.nullcontext():
            if weighs:
                ddp.weight(weight_of(micro, dist.get_rank()))
            MLP.loss(ddp, 10 * step + micro).backward()
    opt.step()


def weight_of(micro: int, rank: int) -> float:
    return 1.0 + micro + 2 * rank


def means_added_up(counts: list[int], *, weighs: bool = False) -> Parameters:
    """What is done to micro-batches, so many in each step, that are reduced one by one.

    In the first step gradients are whole, and are added up before they are averaged.
    """
    bare, num_ranks = MLP.model(), dist.get_world_size()
    cls, settings = OPTIMIZERS["SGD"]
    opt = cls(bare.parameters(), **settings)
    for step, num in enumerate(counts):
        totals = [sum(weight_of(it, rank) for it in range(micro + 1) for rank in range(num_ranks)) for micro in range(num)]
        sums: list[Tensor] = []
        for micro in range(num):
            grads = list(torch.autograd.grad(MLP.loss(bare, 10 * step + micro), list(bare.parameters())))
            if step > 0:
                grads = [mean_in_order(grad) for grad in grads]
            if step > 0 and weighs:
                grads = [grad / (totals[micro] / num_ranks) for grad in grads]
                sums = [each * (totals[micro - 1] / totals[micro]) for each in sums]
            sums = [each + grad for each, grad in zip(sums, grads, strict=True)] if sums else grads
        if step == 0:
            sums = [mean_in_order(each) / (totals[-1] / num_ranks if weighs else 1.0) for each in sums]
        for param, total in zip(bare.parameters(), sums, strict=True):
            param.grad = total
        opt.step()
    return {f"module.{name}": param.detach() for name, param in bare.named_parameters()}


@in_ranks(2, 3, 4)
@pytest.mark.parametrize("num", [2, 4])
def test_micro_batches_are_added_up_before_they_are_averaged(num: int) -> None:
    among = [way for way in ways() if way["strategy"] != "zero2"]
    require_bits(MLP, each=partial(micro_batches, num=num), among=among, plans=PLANS[:3])


@in_ranks(2, 3)
@pytest.mark.parametrize("num", [2, 4])
def test_so_they_are_with_weights(num: int) -> None:
    require_bits(MLP, each=partial(micro_batches, num=num, weighs=True), among=[{"strategy": "zero1"}], plans=PLANS[:3])


@in_ranks(2, 3)
@pytest.mark.parametrize("weighs", [False, True], ids=["means", "weights"])
@pytest.mark.parametrize("num", [2, 4])
def test_micro_batches_of_zero2_are_averaged_before_they_are_added_up(num: int, weighs: bool) -> None:
    expected = means_added_up([num] * 6, weighs=weighs)
    for reduction in ("ordered", "native") if dist.get_world_size() == 2 else ("ordered",):
        for eager in (False, True):
            for plan in PLANS[:3]:
                settings: dict[str, Any] = {"reduction": reduction, "eager": eager, **plan}
                each = partial(micro_batches, num=num, weighs=weighs)
                require_equal(expected, trained(MLP, "zero2", "SGD", num_steps=6, each=each, **settings), what=str(settings))


def two_backwards(ddp: Any, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad(set_to_none=step % 2 == 0)
    for micro in range(2 if step else 1):
        MLP.loss(ddp, 10 * step + micro).backward()
    opt.step()


@in_ranks(2, 3, 4)
def test_several_synchronised_backwards_add_up() -> None:
    strategies = ["hybrid"] if dist.get_world_size() == 4 else ["zero1", "zero2"]
    for strategy in strategies:
        got = trained(MLP, strategy, "SGD", num_steps=5, each=two_backwards, **ORDERED)
        require_equal(means_added_up([1, 2, 2, 2, 2]), got, what=strategy)


BRANCHES = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).square().sum())


def branches_step(ddp: Any, opt: torch.optim.Optimizer, step: int, *, to_none: bool) -> None:
    """Layer 2 is used in no odd step, layer 1 by one rank alone."""
    opt.zero_grad(set_to_none=to_none)
    order = (0, 1, 2) if step % 2 == 0 else (0, 1) if dist.get_rank() == step // 2 % dist.get_world_size() else (0,)
    ddp(noise(3, 4, step=step), order).square().sum().backward()
    opt.step()


# Momentum must not move what nobody has used.
@in_ranks(2, 3, 4)
@pytest.mark.parametrize("to_none", [True, False])
def test_what_one_rank_has_used_moves_on_all_and_what_nobody_has_used_on_none(to_none: bool) -> None:
    caps = [{"bucket_cap_mb": cap} for cap in (2e-5, 2e-4, None)]
    require_bits(BRANCHES, num_steps=8, each=partial(branches_step, to_none=to_none), plans=caps)


def uncleared_step(ddp: Any, opt: torch.optim.Optimizer, step: int) -> None:
    MLP.loss(ddp, step).mul(1e-3).backward()
    opt.step()


@in_ranks(2)
def test_gradients_that_are_never_cleared_add_up_in_eager_steps_too() -> None:
    barrier, eager = (
        trained(MLP, "zero1", "SGD", eager=eager, num_steps=6, each=uncleared_step, **ORDERED) for eager in (False, True)
    )
    require_equal(barrier, eager)


def tied_words() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4000, bias=False))
    model[3].weight = model[0].weight
    return model


def words(step: int) -> Tensor:
    return torch.randint(4000, (2, 9), generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


@in_ranks(2, 3)
def test_a_large_embedding_is_split() -> None:
    case = Case(tied_words, lambda model, step: cross_entropy(model(words(step)).flatten(0, 1), words(step + 1).flatten()))
    pieces: list[int] = []

    def before(ddp: Any, _opt: Any, _step: int) -> None:
        pieces.append(sum(0 in bucket.params for bucket in ddp.plan.buckets))

    require_bits(case, "AdamW", num_steps=5, before=before, among=[{"strategy": "zero1"}], plans=[{"bucket_cap_mb": 0.05}])
    assert pieces[-1] >= 5


@in_ranks(2, 3)
def test_parameters_of_all_kinds_are_sharded() -> None:
    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 6, "reduction": "ordered"}
    expected = trained(CASES["oddities"], "zero1", **settings)
    for cap in (5e-5, 1e-4, None):
        require_equal(expected, trained(CASES["oddities"], "zero2", **settings, bucket_cap_mb=cap), what=str(cap))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward; the last one shares the first one's weight, both in a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))
        self.blocks[3][2].weight = self.blocks[0][0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def checkpointed(use_reentrant: bool) -> Case:
    return Case(lambda: Checkpointed(use_reentrant), lambda model, step: model(noise(5, 6, step=step)).square().mean())


@in_ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_may_be_checkpointed_and_tied(use_reentrant: bool) -> None:
    case = checkpointed(use_reentrant)
    # In one bucket: a part of a gradient that comes behind its bucket is averaged by itself, and rounded so.
    expected = trained(case, "ddp", num_steps=6, auto_tune=False, reduction="ordered")
    for plan in (SMALL, {}):
        require_equal(expected, trained(case, "zero1", num_steps=6, eager=True, reduction="ordered", **plan), what=str(plan))


# The first step learns how often gradients come; it reduces the late parts by themselves, which rounds differently.
@in_ranks(4)
def test_parts_that_come_late_are_averaged_over_all_rows() -> None:
    case = checkpointed(True)
    barrier, eager = (trained(case, optimizer="SGD", num_steps=6, **way, **ORDERED) for way in ways())
    require_equal(barrier, eager)
    # One more rounding of gradients of the size of 1 in the first of six steps of 0.05, which momentum repeats ten times.
    expected = trained(case, "naive", "SGD", num_steps=6)
    require_near(barrier, expected, atol=10 * 0.05 * torch.finfo(torch.float32).eps * 8)


@in_ranks(2, 3)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_parts_that_come_late_are_added(strategy: str, num_micro_batches: int) -> None:
    case = checkpointed(True)

    def each(ddp: Any, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        for micro in range(num_micro_batches):
            case.loss(ddp, 10 * step + micro).backward()
        opt.step()

    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 6, "each": each, "reduction": "ordered"}
    expected = trained(case, "ddp", bucket_cap_mb=5e-5, **settings)
    for cap in (2e-5, 5e-5, 1e-4):
        # Until they are expected, late parts are averaged apart: an ulp of gradients below 10, a few times.
        require_near(expected, trained(case, strategy, bucket_cap_mb=cap, **settings), rtol=1e-5, atol=1e-5)
