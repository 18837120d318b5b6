"""Sharded training has the bits of unsharded training, whatever the plan."""

from __future__ import annotations

import contextlib
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from support.models import CASES, Branches, Case, noise
from support.ranks import Ranks, in_ranks
from support.sharded import OPTIMIZERS, require_equal, trained
from undertow import DistributedDataParallel

PLANS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 2e-5},  # every parameter in pieces under shards
    {"bucket_cap_mb": 1e-4},
    {"bucket_cap_mb": 1e-3, "order": "reverse"},
    {"bucket_cap_mb": (1e-4, 1e-3)},
    {"order": "largest_first", "bucket_cap_mb": 5e-4},
    {"bucket_cap_mb": None},
]


@pytest.fixture
def four_ranks() -> Any:
    with Ranks(4) as ranks:
        yield ranks


def same_in_all_plans(case_name: str) -> None:
    case = CASES[case_name]
    expected = trained(case, "ddp", reduction="ordered")
    for strategy in ("ddp", "zero1", "zero2"):
        for plan in PLANS:
            require_equal(expected, trained(case, strategy, reduction="ordered", **plan), what=f"{strategy} {plan}")


@pytest.mark.parametrize(
    ("ranks", "case"),
    [("two_ranks", "mlp"), ("three_ranks", "mlp"), ("two_ranks", "convolutions"), ("three_ranks", "tied transformer")],
    indirect=["ranks"],
)
def test_every_plan_and_strategy_gives_the_same_bits_in_order(ranks: Ranks, case: str) -> None:
    ranks.run(same_in_all_plans, case, timeout_s=120)


def test_so_do_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(same_in_all_plans, "mlp", timeout_s=120)


@in_ranks(2)
def test_two_ranks_need_no_order() -> None:
    case = CASES["tied transformer"]
    expected = trained(case, "ddp")
    for strategy in ("zero1", "zero2"):
        for plan in PLANS[:3]:
            require_equal(expected, trained(case, strategy, **plan))


@in_ranks(3)
def test_native_reductions_are_near_with_three_ranks() -> None:
    case = CASES["mlp"]
    expected, got = trained(case, "ddp", "SGD"), trained(case, "zero1", "SGD")
    for name, param in expected.items():
        # Sums of three fp32 values in another order differ by an ulp each; twenty steps of SGD with lr 0.05 keep that small.
        assert torch.allclose(param, got[name], rtol=1e-5, atol=1e-6)


@in_ranks(2, 3)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"fused AdamW"}))
def test_every_elementwise_optimizer_has_the_bits_of_the_plain_one(optimizer: str) -> None:
    for case in (CASES["mlp"], CASES["tied transformer"]):
        expected = trained(case, "ddp", optimizer, num_steps=6, reduction="ordered")
        for strategy in ("zero1", "zero2"):
            got = trained(case, strategy, optimizer, num_steps=6, reduction="ordered", bucket_cap_mb=2e-4)
            require_equal(expected, got, what=strategy)


@in_ranks(2, 3)
def test_a_fused_optimizer_is_near() -> None:
    case = CASES["mlp"]
    expected, got = trained(case, "ddp", "fused AdamW", reduction="ordered"), trained(case, "zero1", "fused AdamW")
    for name, param in expected.items():
        # Torch's fused kernel rounds otherwise behind the last whole vector, so that it matters where a piece ends: an
        # update of at most lr = 0.01 differs by some ulps, over 20 steps.
        assert torch.allclose(param, got[name], rtol=1e-5, atol=1e-6)


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_are_alike_under_every_plan(dtype: torch.dtype) -> None:
    case = CASES["mlp"]
    narrow = Case(
        lambda: case.make().to(dtype), lambda model, step: model(noise(5, 6, step=step).to(dtype)).float().square().sum()
    )
    settings: dict[str, Any] = {"reduction": "ordered", "num_steps": 8}
    expected = trained(narrow, "zero1", **settings)
    assert {param.dtype for param in expected.values()} == {dtype}
    for strategy in ("zero1", "zero2"):
        for plan in PLANS:
            require_equal(expected, trained(narrow, strategy, **settings, **plan), what=f"{strategy} {plan}")
    plain = trained(narrow, "ddp", "SGD", **settings)  # Adam's epsilon is zero in fp16
    for plan in PLANS:
        require_equal(plain, trained(narrow, "ddp", "SGD", **settings, **plan), what=str(plan))


@in_ranks(2)
def test_master_weights_remember_what_sixteen_bits_forget() -> None:
    """Steps so small that a bf16 parameter alone would never move."""
    torch.manual_seed(0)
    ddp_case = Case(
        lambda: nn.Linear(4, 4, bias=False).bfloat16(), lambda model, step: model(torch.ones(1, 4).bfloat16()).float().sum()
    )
    start = ddp_case.model().weight.detach().clone()

    def tiny(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.param_groups[0]["lr"] = 1e-4
        opt.param_groups[0]["momentum"] = 0.0
        opt.param_groups[0]["weight_decay"] = 0.0
        opt.zero_grad()
        ddp_case.loss(ddp, step).backward()
        opt.step()

    sharded = trained(ddp_case, "zero1", "SGD", num_steps=100, each=tiny)
    plain = trained(ddp_case, "ddp", "SGD", num_steps=100, each=tiny)
    expected = start.float() - 100 * 1e-4  # every gradient is 1
    error = (sharded["module.weight"].float() - expected).abs().max()
    assert error <= 2**-9  # half an ulp of a bf16 below 0.5
    assert (plain["module.weight"].float() - expected).abs().max() > error


# Means are added where ddp averages sums: 4 ulps, 8e-6, of gradients below 32, times the learning rate of 0.05. Momentum of 0.9
# brings them into later steps too: together 18 times that of one.
OF_MEANS = 7e-6


def micro_batches(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int, *, num: int, weighs: bool) -> None:
    opt.zero_grad()
    for micro in range(num):
        with ddp.no_sync() if micro < num - 1 else contextlib.nullcontext():
            if weighs:
                ddp.weight(weight_of(micro, dist.get_rank()))
            CASES["mlp"].loss(ddp, 10 * step + micro).backward()
    opt.step()


def weight_of(micro: int, rank: int) -> float:
    return 1.0 + micro + 2 * rank


@in_ranks(2, 3)
@pytest.mark.parametrize("weighs", [False, True], ids=["means", "weights"])
@pytest.mark.parametrize("num", [2, 4])
def test_micro_batches_of_zero1_are_added_up_before_they_are_averaged(num: int, weighs: bool) -> None:
    each = partial(micro_batches, num=num, weighs=weighs)
    expected = trained(CASES["mlp"], "ddp", "SGD", num_steps=4, each=each, reduction="ordered")
    for plan in PLANS[:3]:
        got = trained(CASES["mlp"], "zero1", "SGD", num_steps=4, each=each, reduction="ordered", **plan)
        require_equal(expected, got, what=str(plan))


def mean_in_order(gradient: Tensor) -> Tensor:
    """In the order of ranks."""
    gathered = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, gradient)
    return functools.reduce(torch.add, gathered) / dist.get_world_size()


def means_added_up(*, num: int, weighs: bool, num_steps: int) -> dict[str, Tensor]:
    """What zero2 does, in plain words; the first step has whole gradients, which are added up before they are averaged."""
    bare, num_ranks = CASES["mlp"].model(), dist.get_world_size()
    cls, settings = OPTIMIZERS["SGD"]
    opt = cls(bare.parameters(), **settings)
    totals = [sum(weight_of(it, rank) for it in range(micro + 1) for rank in range(num_ranks)) for micro in range(num)]
    for step in range(num_steps):
        sums: list[Tensor] = []
        for micro in range(num):
            grads = list(torch.autograd.grad(CASES["mlp"].loss(bare, 10 * step + micro), list(bare.parameters())))
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


@in_ranks(2, 3)
@pytest.mark.parametrize("weighs", [False, True], ids=["means", "weights"])
@pytest.mark.parametrize("num", [2, 4])
def test_micro_batches_of_zero2_are_averaged_before_they_are_added_up(num: int, weighs: bool) -> None:
    each = partial(micro_batches, num=num, weighs=weighs)
    expected = means_added_up(num=num, weighs=weighs, num_steps=4)
    for reduction in ("ordered", "native") if dist.get_world_size() == 2 else ("ordered",):
        for plan in PLANS[:3]:
            got = trained(CASES["mlp"], "zero2", "SGD", num_steps=4, each=each, reduction=reduction, **plan)
            require_equal(expected, got, what=f"{reduction} {plan}")


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_several_synchronised_backwards_add_up(strategy: str) -> None:
    case = CASES["mlp"]

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            case.loss(ddp, 10 * step + micro).backward()
        opt.step()

    expected = trained(case, "ddp", "SGD", num_steps=6, each=each)
    got = trained(case, strategy, "SGD", num_steps=6, each=each, bucket_cap_mb=1e-4)
    for name, param in expected.items():
        assert torch.allclose(param, got[name], rtol=0.0, atol=OF_MEANS)


@in_ranks(2, 3)
def test_what_nobody_has_used_does_not_move() -> None:
    """Layer 2 is used in no odd step, layer 1 by rank 0 alone: momentum must not move what nobody has used."""
    case = Case(Branches, lambda model, step: model(noise(3, 4, step=step), (0, 1, 2)).square().sum())

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        order = (0, 1, 2) if step % 2 == 0 else (0, 1) if dist.get_rank() == 0 else (0,)
        ddp(noise(3, 4, step=step), order).square().sum().backward()
        opt.step()

    expected = trained(case, "ddp", "SGD", num_steps=8, each=each, reduction="ordered")
    for strategy in ("zero1", "zero2"):
        for cap in (2e-5, 2e-4, None):
            got = trained(case, strategy, "SGD", num_steps=8, each=each, reduction="ordered", bucket_cap_mb=cap)
            require_equal(expected, got, what=f"{strategy} {cap}")


@in_ranks(2, 3)
def test_a_large_embedding_is_split() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4000, 16)
            self.layer = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4000, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.embedding(tokens)).tanh())

    def tokens(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        return torch.randint(4000, (2, 9), generator=generator)

    case = Case(Words, lambda model, step: cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step + 1).flatten()))
    pieces: list[int] = []

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        case.loss(ddp, step).backward()
        opt.step()
        pieces.append(sum(0 in bucket.params for bucket in ddp.plan.buckets))

    expected = trained(case, "ddp", num_steps=5, reduction="ordered")
    got = trained(case, "zero1", num_steps=5, each=each, reduction="ordered", bucket_cap_mb=0.05)
    assert pieces[-1] >= 5
    require_equal(expected, got)


@in_ranks(2, 3)
def test_parameters_of_all_kinds_are_sharded() -> None:
    case = CASES["oddities"]
    expected = trained(case, "zero1", "SGD", num_steps=6, reduction="ordered")
    for cap in (5e-5, 1e-4, None):
        require_equal(expected, trained(case, "zero2", "SGD", num_steps=6, reduction="ordered", bucket_cap_mb=cap), what=str(cap))
