"""Sharded training has the bits of unsharded training, whatever the plan; on a mesh those of sums row by row."""

import dataclasses
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from support.inside import over_collectives
from support.levels import some
from support.models import CASES, Case, noise
from support.one_process import ranks_of
from support.programs import Program, run
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    NARROW,
    OPTIMIZERS,
    ORDERED,
    SMALL,
    reference,
    require_bits,
    require_equal,
    step_of,
    trained,
    ways,
)

PLANS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 2e-5},  # a bucket for each parameter
    {"bucket_cap_mb": 1e-3, "order": "reverse"},
    {"bucket_cap_mb": (1e-4, 1e-3)},
    {},
]


@pytest.mark.slow
@in_ranks(2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("case", ["mlp", "tied transformer", "convolutions"])
def test_every_plan_has_the_same_bits(case: str) -> None:
    require_bits(CASES[case], "AdamW", plans=PLANS)


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("settings", [{"strategy": "hybrid", "shape": (1, 4)}, {"strategy": "hybrid", "shape": (4, 1)}], ids=str)
def test_a_mesh_with_one_rank_along_an_axis_adds_up_in_rank_order(settings: dict[str, Any]) -> None:
    expected = reference(MLP, "ddp", num_steps=8, **ORDERED)
    require_equal(expected, trained(MLP, num_steps=8, **settings, **ORDERED))


# How many ranks there are changes nothing of an optimizer; with three, shards end within parameters.
@pytest.mark.deep
@in_ranks(3)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"fused AdamW"}))
def test_every_elementwise_optimizer_has_the_bits_of_the_plain_one(optimizer: str) -> None:
    require_bits(MLP, optimizer)


@pytest.mark.slow
@in_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_are_alike_under_every_plan(dtype: torch.dtype) -> None:
    case, settings = NARROW[dtype], {"reduction": "ordered", "num_steps": 5}
    first, *_ = ways()
    expected = trained(case, **first, **settings)
    assert {param.dtype for param in expected.values()} == {dtype}
    for way in ways():
        for plan in PLANS:
            require_equal(expected, trained(case, **way, **settings, **plan), what=f"{way} {plan}")
    for plan in PLANS:  # by SGD, because Adam's epsilon is zero in fp16
        require_equal(reference(case, "ddp", "SGD", **settings), trained(case, "ddp", "SGD", **settings, **plan), what=str(plan))


ONES = Case(lambda: nn.Linear(4, 4, bias=False).bfloat16(), lambda model, step: model(torch.ones(1, 4).bfloat16()).float().sum())


def tiny_step(ddp: Any, opt: torch.optim.Optimizer, step: int) -> None:
    opt.param_groups[0] |= {"lr": 1e-4, "momentum": 0.0, "weight_decay": 0.0}
    step_of(ddp, opt, ONES, step)


@pytest.mark.deep
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


# As where sends and receives are not posted: what NCCL would be asked for.
@pytest.mark.slow
@in_ranks(4)
def test_the_collectives_of_a_backend_do_the_same() -> None:
    with over_collectives():
        require_bits(MLP, among=[{"strategy": "hybrid"}])
        exact = trained(WHOLE, "hybrid", "SGD", num_steps=6, **SMALL)
    require_equal(trained(WHOLE, "ddp", "SGD", num_steps=6), exact)


@pytest.mark.deep
@in_ranks(2, 3)
def test_parameters_of_all_kinds_are_sharded() -> None:
    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 6, "reduction": "ordered"}
    expected = trained(CASES["oddities"], "zero1", **settings)
    for cap in (5e-5, 1e-4, None):
        require_equal(expected, trained(CASES["oddities"], "zero2", **settings, bucket_cap_mb=cap), what=str(cap))


# Programs of steps in shards against the naive reference, in every way to train so: on two and three ranks, and on a mesh.


STEP = "zero, forward 012, backward, step flying"
IN_PLACE = "zero in-place, forward 012"
STEPS = {
    "two forwards and one after": Program(
        events="zero, forward 012, forward 02|012, backward together, step flying, evaluate now", times=5
    ),
    "one unit is frozen for a while": Program(events=f"{STEP}, freeze 1, {STEP}, {STEP}, thaw 1"),
    "everything is frozen for a while": Program(
        events=f"{STEP}, freeze 0, freeze 1, freeze 2, zero, forward 012, backward, thaw 0, thaw 1, thaw 2"
    ),
    "parameters are loaded and given other memory": Program(
        events=f"{STEP}, reload, zero, forward 012, backward, step, move, {STEP}"
    ),
    "parameters get another memory format": Program(
        units="channels channels channels", events=f"{STEP}, zero, to contiguous_format, {STEP}, {STEP}", times=1
    ),
    "micro-batches": Program(
        events="zero, forward 012, accumulate, forward 012|02, accumulate, forward 012, backward, step flying"
    ),
    "no order is asked for": Program(events=STEP, settings={"reduction": "native"}),
    "micro-batches, zeroed in place": Program(
        events=f"{IN_PLACE}, accumulate, forward 02, accumulate, forward 012, backward, step flying"
    ),
    "reduced by hand": Program(events=f"{STEP}, zero, forward 012, accumulate, reduce, step flying"),
    "one rank uses what nobody else does": Program(
        events=f"{STEP}, zero, forward 01|0, backward, step flying, {STEP}, zero, forward 0|01, backward, step flying"
    ),
    "a checkpoint and a tied weight": Program(
        units="linear checkpoint tied", events="zero, forward 0121, backward, step flying", plan="each"
    ),
    "statistics travel too": Program(units="linear norm linear", events=f"late 0 all_gather surely, {STEP}"),
    "a method of the module": Program(
        events=f"late 0 all_gather surely, look now, zero, forward 012 inside, backward, step flying, {STEP}"
    ),
    "ranks evaluate one by one": Program(
        events=f"{STEP}, evaluate now|, {STEP}, evaluate |now, {STEP}, evaluate |now|, {STEP}, evaluate now"
    ),
}
SKIPS = {"nonfinite": "skip"}
# A step that one rank's infinity spoils is skipped on all, and no other.
OVERFLOWS = {
    "an infinity": Program(events=f"{STEP}, zero, forward 012, overflow |now, backward, step", settings=SKIPS),
    "an infinity in a micro-batch": Program(
        events=f"{STEP}, zero, forward 012, overflow |now, accumulate, forward 012, accumulate, forward 012, backward, step",
        settings=SKIPS,
    ),
    "an infinity in the first of two backwards": Program(
        events=f"{STEP}, zero, forward 012, overflow now|, backward, forward 012, backward, step", settings=SKIPS
    ),
    "an infinity in the last of two backwards": Program(
        events=f"{STEP}, zero, forward 012, backward, forward 012, overflow |now, backward, step", settings=SKIPS
    ),
}
MORE_STEPS = {
    **OVERFLOWS,
    "without overlap": Program(events=f"{STEP}, zero, forward 02|012, backward, step flying", settings={"overlap": False}),
    "several backwards": Program(events="zero, forward 012, backward, forward 012, backward, step flying", times=5),
    "parts that come late": Program(
        units="linear twice-reentrant linear",
        events=f"{STEP}, zero, forward 02|012, backward, step",
    ),
    "a backward that fails on all ranks": Program(events=f"{STEP}, zero, fail backward, {STEP}"),
    "a backward that fails on one": Program(events=f"{STEP}, zero, fail |backward, {STEP}"),
}
CAPS_IN_TURN = cycle(["each", "several", "default"])


def examples(*strategies: str) -> dict[str, Program]:
    found = {
        f"{name}, {strategy}": dataclasses.replace(
            program,
            strategy=strategy,
            plan=next(CAPS_IN_TURN) if program.plan == "each" else program.plan,
        )
        for strategy in strategies
        for name, program in {**STEPS, **MORE_STEPS}.items()
    }
    late = {
        f"{kind} comes late on rank {rank}, {strategy}": Program(
            events=f"{STEP}, {STEP}, late {rank} {kind} surely, {STEP}",
            times=1,
            strategy=strategy,
            plan="several",
        )
        for strategy in strategies
        for kind in ["pack", "reduce_scatter", "bind", "all_gather", *(["all_reduce"] * (strategy == "hybrid"))]
        for rank in ([0, 1] if strategy != "hybrid" else [0, 3])
    }
    return {**found, **late}


EXAMPLES = {
    **OVERFLOWS,
    **examples("zero1", "zero2"),
}
MESHES = examples("hybrid")


# In one process a read that comes too early reads NaN.
@pytest.mark.parametrize("name", some(EXAMPLES, most=10))
def test_steps_in_shards_have_the_results_of_the_reference(name: str) -> None:
    ranks_of(2, lambda _: run(EXAMPLES[name]))


# A third rank is neither the first nor the last, and sums of three have an order.
@pytest.mark.deep
@pytest.mark.parametrize("name", list(EXAMPLES)[::7])
@in_ranks(3)
def test_three_ranks_have_them(name: str) -> None:
    run(EXAMPLES[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", list(MESHES)[::2])
@in_ranks(4)
def test_steps_on_a_mesh_have_them(name: str) -> None:
    run(MESHES[name])


@pytest.mark.deep
@pytest.mark.parametrize("strategy", some(["zero1", "hybrid"], most=1))
@in_ranks(4)
def test_an_attached_model_has_them(strategy: str) -> None:
    run(Program(strategy=strategy, is_attached=True, events=STEP))


# Sums, shards and rows that are longer than those of the other tests.
@pytest.mark.slow
@in_ranks(8, is_fresh=True)
def test_eight_ranks_have_them() -> None:
    for strategy in ("ddp", "zero1", "zero2", "hybrid"):
        run(Program(strategy=strategy, plan="each", events="zero, forward 012, backward, step"))
