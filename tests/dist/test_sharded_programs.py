"""Programs of steps in shards against the naive reference, in every way to train so: on two and three ranks, and on a mesh.

After a step that is "flying" the next event comes while parameters are on their way.
"""

import dataclasses
from itertools import cycle

import pytest

from support.programs import Program, run
from support.ranks import in_ranks

STEP = "zero, forward 012, backward, step flying"
IN_PLACE = "zero in-place, forward 012"
STEPS = {
    "two forwards and one after": Program(
        events="zero, forward 012, forward 02|012, backward together, step flying, evaluate now", times=5
    ),
    "a rank without data": Program(events=f"{STEP}, zero, train 012|none, step flying"),
    "one unit is frozen for a while": Program(events=f"{STEP}, freeze 1, {STEP}, {STEP}, thaw 1"),
    "frozen, with gradients that are zeros": Program(
        events=f"{IN_PLACE}, backward, step, zero in-place, freeze 1, forward 012, backward, step flying, thaw 1",
        has_momentum=False,
    ),
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
    "weighted micro-batches": Program(
        events="zero, forward 01, weight 1|3, accumulate, forward 2, weight 2, accumulate, forward 0, weight 5|7, backward, step"
    ),
    "reduced by hand": Program(events=f"{STEP}, zero, forward 012, accumulate, reduce, step flying"),
    "gradients that are never cleared": Program(events="forward 012, backward, step flying"),
    "one rank uses what nobody else does": Program(
        events=f"{STEP}, zero, forward 01|0, backward, step flying, {STEP}, zero, forward 0|01, backward, step flying"
    ),
    "that is so, zeroed in place": Program(
        events=f"{IN_PLACE}, backward, step flying, zero in-place, forward 01|0, backward, step flying"
    ),
    "a checkpoint and a tied weight": Program(
        units="linear checkpoint tied", events="zero, forward 0121, backward, step flying", plan="pieces"
    ),
    "statistics travel too": Program(units="linear norm linear", events=f"late 0 all_gather surely, {STEP}"),
    "other orders of units": Program(
        events=", ".join(["late 0 all_gather surely", *(STEP.replace("012", order) for order in ("210", "1", "2012"))])
    ),
    "a method of the module": Program(
        events=f"late 0 all_gather surely, zero, forward 012 inside, backward, step flying, {STEP}"
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
        events=f"{STEP}, zero, forward 012, overflow now|, backward, forward 012, backward, step", settings={**SKIPS, "op": "sum"}
    ),
    "an infinity in the last of two backwards": Program(
        events=f"{STEP}, zero, forward 012, backward, forward 012, overflow |now, backward, step", settings=SKIPS
    ),
}
# An eager step has one backward, which has updated a part of the parameters when it fails.
BARRIER_STEPS = {
    **OVERFLOWS,
    "without overlap": Program(events=f"{STEP}, zero, forward 02|012, backward, step flying", settings={"overlap": False}),
    "several backwards": Program(events="zero, forward 012, backward, forward 012, backward, step flying", times=5),
    "several backwards, zeroed in place": Program(events=f"{IN_PLACE}, backward, forward 012, backward, step flying"),
    "several backwards with weights": Program(
        events="zero, forward 012, weight 1|3, backward, forward 012, weight 2|4, backward, step flying"
    ),
    "parts that come late": Program(
        units="linear twice-reentrant linear",
        events=f"{STEP}, zero, forward 02|012, backward, step",
    ),
    "parts that come late in several backwards": Program(
        units="linear twice-reentrant tied", events="zero, forward 012, backward, forward 012, backward, step flying"
    ),
    "a backward that fails on all ranks": Program(events=f"{STEP}, zero, fail backward, {STEP}"),
    "a backward that fails on one": Program(events=f"{STEP}, zero, fail |backward, {STEP}"),
    "a backward that fails on another one": Program(events=f"{STEP}, zero, fail backward|, {STEP}"),
}
IN_SHARDS = {"zero1": ("zero1", False), "zero2": ("zero2", False), "eager": ("zero1", True), "eager zero2": ("zero2", True)}
ON_A_MESH = {"barrier": ("hybrid", False), "eager": ("hybrid", True)}
LATE = ["pack", "reduce_scatter", "bind", "all_gather"]
PLANS = cycle(["each", "pieces", "several", "default"])


def examples(ways: dict[str, tuple[str, bool]]) -> dict[str, Program]:
    found = {
        f"{name}, {way}": dataclasses.replace(
            program, strategy=strategy, is_eager=is_eager, plan=next(PLANS) if program.plan == "each" else program.plan
        )
        for way, (strategy, is_eager) in ways.items()
        for name, program in {**STEPS, **({} if is_eager else BARRIER_STEPS)}.items()
    }
    late = {
        f"{kind} comes late on rank {rank}, {way}": Program(
            events=f"{STEP}, {STEP}, late {rank} {kind} surely, {STEP}",
            times=1,
            strategy=strategy,
            is_eager=is_eager,
            plan="several",
        )
        for way, (strategy, is_eager) in ways.items()
        for kind in [*LATE, *(["step"] * is_eager), *(["all_reduce"] * (strategy == "hybrid"))]
        for rank in ([0, 1] if strategy != "hybrid" else [0, 3])
    }
    return {**found, **late}


EXAMPLES, MESHES = {**OVERFLOWS, **examples(IN_SHARDS)}, examples(ON_A_MESH)


@pytest.mark.parametrize("name", EXAMPLES)
@in_ranks(2)
def test_steps_in_shards_have_the_results_of_the_reference(name: str) -> None:
    run(EXAMPLES[name])


# A third rank is neither the first nor the last, and sums of three have an order.
@pytest.mark.parametrize("name", list(EXAMPLES)[::4])
@in_ranks(3)
def test_three_ranks_have_them(name: str) -> None:
    run(EXAMPLES[name])


@pytest.mark.parametrize("name", MESHES)
@in_ranks(4)
def test_steps_on_a_mesh_have_them(name: str) -> None:
    run(MESHES[name])


@pytest.mark.parametrize("strategy", ["zero1", "hybrid"])
@in_ranks(4)
def test_an_attached_model_has_them(strategy: str) -> None:
    run(Program(strategy=strategy, is_attached=True, events=STEP))


# Sums, shards and rows that are longer than those of the other tests.
@pytest.mark.slow
@in_ranks(8, is_fresh=True)
def test_eight_ranks_have_them() -> None:
    for strategy in ("ddp", "zero1", "zero2", "hybrid"):
        run(Program(strategy=strategy, plan="pieces", events="zero, forward 012, backward, step"))
