"""Sharded training has the bits of unsharded training, whatever the plan; on a mesh those of sums row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.inside import over_collectives
from support.models import CASES, Case, noise
from support.ranks import in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import (
    MLP,
    NARROW,
    OPTIMIZERS,
    ORDERED,
    SMALL,
    TIED,
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


@pytest.mark.slow
@in_ranks(2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("case", ["mlp", "tied transformer", "convolutions"])
def test_every_plan_has_the_same_bits(case: str) -> None:
    require_bits(CASES[case], "AdamW", num_steps=12, plans=PLANS)


@in_ranks(4)
@pytest.mark.parametrize("settings", [{"strategy": "hybrid", "shape": (1, 4)}, {"strategy": "hybrid", "shape": (4, 1)}], ids=str)
def test_a_mesh_with_one_rank_along_an_axis_adds_up_in_rank_order(settings: dict[str, Any]) -> None:
    expected = reference(MLP, "ddp", num_steps=8, **ORDERED)
    for eager in (False, True):
        require_equal(expected, trained(MLP, num_steps=8, eager=eager, **settings, **ORDERED), what=f"eager={eager}")


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
    assert [name for name in got if not torch.allclose(expected[name], got[name], rtol=1e-5, atol=1e-6)] == []


@pytest.mark.slow
@in_ranks(2, 3, 4)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"fused AdamW"}))
def test_every_elementwise_optimizer_has_the_bits_of_the_plain_one(optimizer: str) -> None:
    for case in (MLP, TIED):
        require_bits(case, optimizer, plans=[{"bucket_cap_mb": 2e-4}])


@pytest.mark.slow
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


@pytest.mark.slow
@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_where_sums_are_exact_a_mesh_has_the_bits_of_plain_training(reduction: str) -> None:
    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 8, "reduction": reduction}
    for way in ways():
        require_equal(trained(WHOLE, "ddp", **settings), trained(WHOLE, **settings, **way, **SMALL), what=str(way))


# As where sends and receives are not posted: what NCCL would be asked for.
@pytest.mark.slow
@in_ranks(4)
def test_the_collectives_of_a_backend_do_the_same() -> None:
    with over_collectives():
        require_bits(MLP, num_steps=12, among=[{"strategy": "hybrid"}])
        exact = trained(WHOLE, "hybrid", "SGD", num_steps=12, **SMALL)
    require_equal(trained(WHOLE, "ddp", "SGD", num_steps=12), exact)


@pytest.mark.slow
@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_other_plans_on_the_way_change_no_bit_on_a_mesh(eager: bool) -> None:
    with scripted(all_in_one, one_each, in_pieces) as seen:
        require_bits(TIED, "Adam", num_steps=24, among=[{"strategy": "hybrid", "eager": eager}], plans=[{}])
    assert dist.get_rank() > 0 or len({plan.fingerprint for plan in seen}) > 1


@in_ranks(2, 3)
def test_parameters_of_all_kinds_are_sharded() -> None:
    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 6, "reduction": "ordered"}
    expected = trained(CASES["oddities"], "zero1", **settings)
    for cap in (5e-5, 1e-4, None):
        require_equal(expected, trained(CASES["oddities"], "zero2", **settings, bucket_cap_mb=cap), what=str(cap))
