"""Decides who makes the plan: measurements, the user, or only the size of the model."""

import torch

from undertow.config import SyncConfig
from undertow.errors import PhaseError
from undertow.plan import Groups, Plan, first_plan, groups_in_order, plan_from_groups, plan_in_order
from undertow.profile import Profile
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.compiled_plan import CompiledPlan
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.replan.param_hooks import ParamHooks
from undertow.runtime.replan.tuning import Tuning
from undertow.tune import Explanation, Outcome, Tuner, explanation


def measure(hooks: ParamHooks, compiled: CompiledPlan, config: SyncConfig, recorder: Recorder) -> None:
    """Starts to measure the parameters, and to improve the plan if it is not fixed."""
    group = compiled.reducer.group
    if not hooks.named_params or not recorder.is_on or group.num_ranks == 1:
        return
    order = None if config.order == "observed" else [param for bucket in compiled.plan.buckets for param in bucket.params]
    hooks.tuning = Tuning(
        hooks.arrivals,
        recorder,
        group,
        Tuner(order),
        may_move=not why_fixed(config, compiled.reducer),
    )


def sharded_plan(now: Plan, hooks: ParamHooks, groups: Groups | None, config: SyncConfig) -> Plan:
    """Returns the plan for shards, the pinned plan, or the plan to which a sharded optimizer moves."""
    order = None if hooks.order is None else hooks.order.take()
    if groups is not None:
        return plan_from_groups(now.params, groups, num_ranks=now.num_ranks)
    if config.plan is not None:
        return first_plan(now.params, config, num_ranks=now.num_ranks)
    order = [param for bucket in now.buckets for param in bucket.params] if order is None else order
    return plan_in_order(now.params, order, config, num_ranks=now.num_ranks, has_shards=True)


def planned(now: CompiledPlan, hooks: ParamHooks, config: SyncConfig) -> Plan | None:
    """Returns the plan that rank 0 has sent for the round that begins, if any: its order of arrival, or its decision.

    Not if every bucket would hold the same gradients as now: their order within a bucket changes nothing.
    """
    order = None if hooks.order is None else hooks.order.take()
    if order is not None:
        hooks.order = None
    groups = None if hooks.tuning is None else hooks.tuning.take(now.present)
    if groups is None and order is not None:
        groups = groups_in_order(now.plan.params, order, config)
    if groups is None or list(map(frozenset, groups)) == list(map(frozenset, now.plan.groups)):
        return None
    return plan_from_groups(now.plan.params, groups, num_ranks=now.plan.num_ranks)


def follows_observed_order(compiled: CompiledPlan, config: SyncConfig) -> bool:
    """Returns True if the plan takes over rank 0's order of arrival."""
    # A changed plan changes the rounding of three or more summands, which a user who wants the same bits does not expect. A hook
    # may keep state for every bucket.
    reducer = compiled.reducer
    is_free = config.plan is None and reducer.hook is None and not torch.are_deterministic_algorithms_enabled()
    return config.order == "observed" and is_free and reducer.group.num_ranks > 1 and bool(compiled.params)


def why_fixed(config: SyncConfig, reducer: Reducer) -> str:
    """Returns why the plan does not follow measurements, or "" if it does; the same on every rank."""
    reasons = (
        (reducer.group.num_ranks == 1, "a single rank has nothing to communicate"),
        (config.plan is not None, "it is pinned: SyncConfig(plan=...)"),
        (config.bucket_cap_mb is not None, f"bucket_cap_mb={config.bucket_cap_mb} was asked for"),
        (reducer.hook is not None, "a communication hook may keep state for every bucket"),
        (config.record == "off", "record='off': nothing is measured"),
        (not config.overlap, "overlap=False: nothing is to be hidden"),
        (not config.auto_tune, "auto_tune=False: sizes follow from the size of the model"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def measured_profile(hooks: ParamHooks, compiled: CompiledPlan, config: SyncConfig) -> Profile:
    """Returns the measurements of these parameters; raises PhaseError before there are any."""
    profile = None if hooks.tuner is None else hooks.tuner.profile(compiled.plan, strategy=compiled.strategy.name)
    if profile is None:
        raise no_profile(config, compiled.reducer.group)
    return profile


def no_profile(config: SyncConfig, group: OwnGroup) -> PhaseError:
    """Returns the error of a profile that is requested too early, or on a single rank."""
    if group.num_ranks == 1:
        return PhaseError(
            "a single rank has nothing to communicate, so nothing is measured.",
            where="profile()",
            remedy="Train some ten steps on two or more ranks, as with torchrun --nproc-per-node=2.",
        )
    remedy = "Set record to 'summary' or 'full'." if config.record == "off" else "Run some ten steps first, then ask again."
    return PhaseError("nothing has been measured of this model yet.", where="profile()", remedy=remedy)


def explanation_of(hooks: ParamHooks, compiled: CompiledPlan, config: SyncConfig) -> Explanation:
    """Explains the plan in force; does not communicate."""
    decision = None if hooks.tuning is None else hooks.tuning.decision
    why = why_fixed(config, compiled.reducer)
    if not why and torch.are_deterministic_algorithms_enabled():
        why = "torch.use_deterministic_algorithms: another plan rounds differently"
    elif not why:
        is_decided = decision is not None and decision.outcome in (Outcome.MOVE, Outcome.KEEP, Outcome.TOO_LARGE)
        why = "planned from measurements" if is_decided else "sizes follow from the size of the model: too little is measured"
    return explanation(compiled.plan, hooks.tuner, why=why, strategy=compiled.strategy.name, decision=decision)
