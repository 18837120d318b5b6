"""Measurements of a model, and their use: profile, explanation, costs of the network."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from undertow.buckets.transfer import Reducer
from undertow.config import SyncConfig
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.engine import Engine
from undertow.engine.tuning import Tuning, may_move, why_fixed
from undertow.errors import PhaseError
from undertow.ranks.transport import OwnGroup
from undertow.sync.views import profile_of
from undertow.tune import Explanation, explanation, trial_text
from undertow.wire import AUTO

if TYPE_CHECKING:
    from undertow.lab.profile import Profile

_SIZES = tuple(4096 * 4**power for power in range(8))  # bytes: 4 KiB to 64 MiB
_NUM_TIMES = 5


def measured_profile(current_plan: CurrentPlan, config: SyncConfig) -> Profile:
    """Returns the measurements of these parameters; raises PhaseError before there are any."""
    profile, compiled = None, current_plan.compiled
    if current_plan.tuning is not None:
        reduced = compiled.reducer.config
        profile = profile_of(
            current_plan.tuning.measured,
            compiled.plan,
            strategy=compiled.strategy.name,
            wire=AUTO if reduced.wire == AUTO else reduced.plan_wire,
            param_wire=reduced.param_wire,
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


def explanation_of(current_plan: CurrentPlan, config: SyncConfig) -> Explanation:
    """Explains the plan in force; does not communicate."""
    tuning, compiled = current_plan.tuning, current_plan.compiled
    return explanation(
        compiled.plan,
        why=_why(current_plan, config),
        strategy=compiled.strategy.name,
        trials=() if tuning is None else tuning.tried,
        trials_are_over=tuning is None or not tuning.will_try,
    )


def plans_not_tried(tuning: Tuning | None) -> tuple[str, ...]:
    """Returns a text for each plan that could not be tried, because of memory for example."""
    tried = () if tuning is None else tuning.tried
    return tuple(trial_text(trial) for trial in tried if trial.failure)


def _why(current_plan: CurrentPlan, config: SyncConfig) -> str:
    """Returns the reason for the plan in force."""
    tuning, compiled = current_plan.tuning, current_plan.compiled
    why = why_fixed(compiled.reducer)
    if not why and compiled.strategy.gather is not None:
        why = "no other is tried with shards: the optimizer's state would have to move"
    if why and config.wire == AUTO and config.plan is None:
        tries = may_move(compiled.reducer) and compiled.strategy.gather is None
        why += "; wire='auto' " + ("tries formats" if tries else "keeps full width")
    told = "" if tuning is None else tuning.told()
    return ": ".join(filter(None, (why, told))) or "sizes follow from the size of the model"


def sweep(engine: Engine, config: SyncConfig) -> None:
    """Measures the cost of all-reduces of many sizes; a collective call.

    Raises PhaseError if nothing is measured.
    """
    engine.rounds.finish()
    tuning, group = engine.current_plan.tuning, engine.current_plan.group
    if tuning is None or config.record == "off":
        raise no_profile(config, group)
    engine.current_plan.open_group()
    with group.waiting("the measurement of the network"):
        tuning.measured.all_reduces += _swept_costs(engine.current_plan.compiled.reducer)


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
            group.all_reduce_unnamed(times[0, 0].to(group.device)).wait()
            began_s = time.perf_counter()
            reducer.reduce(part).wait()
            group.hardware.synchronize()  # measures the end, not the launch
            if at >= 0:
                row[at] = (time.perf_counter() - began_s) * 1e6
    latest = times.to(group.device)
    group.all_reduce_unnamed(latest, dist.ReduceOp.MAX).wait()
    return tuple(
        (float(num_bytes), median(row))
        for num_bytes, row in zip(_SIZES, latest.tolist(), strict=True)
    )
