"""Measurements of a model, and their use: profile, explanation, costs of the network."""

import time
from statistics import median

import torch
import torch.distributed as dist

from undertow.buckets.reducer import Reducer
from undertow.config import SyncConfig
from undertow.engine.engine import Engine
from undertow.engine.hooks import ParamHooks
from undertow.engine.round import CompiledPlan
from undertow.engine.tuning import may_move, why_fixed
from undertow.errors import PhaseError
from undertow.profile import Profile
from undertow.ranks.transport import OwnGroup
from undertow.tune import Explanation, Outcome, explanation
from undertow.wire import AUTO

_SIZES = tuple(4096 * 4**power for power in range(8))  # bytes: 4 KiB to 64 MiB
_NUM_TIMES = 5


def measured_profile(hooks: ParamHooks, compiled: CompiledPlan, config: SyncConfig) -> Profile:
    """Returns the measurements of these parameters; raises PhaseError before there are any."""
    profile = (
        None
        if hooks.tuner is None
        else hooks.tuner.profile(compiled.plan, strategy=compiled.strategy.name)
    )
    if profile is None:
        raise no_profile(config, compiled.reducer.group)
    return profile


def no_profile(config: SyncConfig, group: OwnGroup) -> PhaseError:
    """Returns the error of a profile that is requested too early, or on a single rank."""
    if group.num_ranks == 1:
        return PhaseError(
            "a single rank has nothing to communicate, so nothing is measured.",
            where="profile()",
            remedy="Train some ten steps on two or more ranks, as with torchrun "
            "--nproc-per-node=2.",
        )
    remedy = (
        ("Set record to 'summary' or 'full'.")
        if config.record == "off"
        else "Run some ten steps first, then ask again."
    )
    return PhaseError(
        "nothing has been measured of this model yet.", where="profile()", remedy=remedy
    )


def explanation_of(hooks: ParamHooks, compiled: CompiledPlan, config: SyncConfig) -> Explanation:
    """Explains the plan in force; does not communicate."""
    decision = None if hooks.tuning is None else hooks.tuning.decision
    why = why_fixed(compiled.reducer)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if not why and is_deterministic:
        why = "torch.use_deterministic_algorithms: another plan rounds differently"
    if why and config.wire == AUTO and config.plan is None:
        chooses = may_move(compiled.reducer) and not is_deterministic
        why += "; wire='auto' " + ("chooses the formats" if chooses else "keeps full width")
    elif not why:
        is_decided = decision is not None and decision.outcome in (
            Outcome.MOVE,
            Outcome.KEEP,
            Outcome.TOO_LARGE,
            Outcome.OWNED,
        )
        why = (
            ("planned from measurements")
            if is_decided
            else ("sizes follow from the size of the model: too little is measured")
        )
    return explanation(
        compiled.plan, hooks.tuner, why=why, strategy=compiled.strategy.name, decision=decision
    )


def sweep(engine: Engine, config: SyncConfig) -> None:
    """Teaches the tuner the cost of all-reduces of many sizes; a collective call.

    Raises PhaseError if nothing is measured.
    """
    engine.finish_round()
    tuner, group = engine.current_plan.hooks.tuner, engine.current_plan.group
    if tuner is None:
        raise no_profile(config, group)
    engine.current_plan.open_group()
    with group.waiting("the measurement of the network"):
        tuner.learn_costs("all_reduce", _swept_costs(engine.current_plan.compiled.reducer))


def _swept_costs(reducer: Reducer) -> tuple[tuple[float, float], ...]:
    """Returns pairs of bytes and microseconds of all-reduces, the same on every rank; a collective
    call.

    Each time is the median of some, on the rank that waited longest.
    """
    group = reducer.group
    tensor = torch.zeros(_SIZES[-1] // 4, device=group.device)
    times = torch.zeros(len(_SIZES), _NUM_TIMES, dtype=torch.float64)
    for row, num_bytes in zip(times, _SIZES, strict=True):
        part = tensor[: num_bytes // 4]
        for at in range(-1, _NUM_TIMES):  # the first one allocates memory for the others
            # all begin at the same time
            group.all_reduce_async(times[0, 0].to(group.device)).wait()
            began_s = time.perf_counter()
            reducer.reduce(part).wait()
            group.hardware.synchronize()  # measures the end, not the launch
            if at >= 0:
                row[at] = (time.perf_counter() - began_s) * 1e6
    latest = times.to(group.device)
    group.all_reduce_async(latest, dist.ReduceOp.MAX).wait()
    return tuple(
        (float(num_bytes), median(row))
        for num_bytes, row in zip(_SIZES, latest.tolist(), strict=True)
    )
