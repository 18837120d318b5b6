"""The one way to other parameters, or to a communication hook: all ranks leave a plan together.

Reasons: docs/design/plan-changes.md.
"""

from __future__ import annotations

from undertow.buckets.bucket import gradients_aside
from undertow.engine.agreed_errors import CHANGE_ALIKE, changed_unlike, told_to_places
from undertow.engine.checks import has_bits, unlike_values
from undertow.engine.current_plan import Change, CurrentPlan
from undertow.engine.params import first_change
from undertow.engine.round import Round, RoundKind, Terms
from undertow.errors import ConfigError, PhaseError, PlanMismatch
from undertow.ranks.agreement import any_rank, gather_json
from undertow.ranks.answers import named
from undertow.ranks.transport import OwnGroup


def tell_of_change(plans: CurrentPlan, terms: Terms, *, op: str | None, has_shards: bool) -> Round:
    """Sends the buckets of the plan in force, without gradients and with the flag `Fact.CHANGED`.

    `op` is set for a reduction by hand. `has_shards` is True if micro-batches of the step may have
    left shards of their gradients. A rank that has not changed is in a usual round, so both find
    out. Does not wait. An error that this rank has to raise is its `refusal` for now: other ranks
    wait for the buckets.
    """
    told = Round(kind=RoundKind.TELL, op=op)
    try:
        if has_shards:  # also of parameters that leave: the step would come without their gradients
            plans.compiled.layout.make_gradients_whole(plans.hooks.named_params)
        plans.prepare_to_leave()
    except (ConfigError, PhaseError) as error:
        told.refusal = error
    with gradients_aside(plans.compiled.params):
        told.start(plans.compiled, None, terms)
        told.send()
    return told


def hear_of_change(plans: CurrentPlan, told: Round) -> None:
    """Waits until every rank has told in this round if it has changed."""
    with gradients_aside(plans.compiled.params):
        told.wait()
    plans.compiled.recorder.forgets_buckets()


def rebuild(plans: CurrentPlan, told: Round) -> None:
    """Puts the change in force, after every rank has announced its change in the round `told`.

    Waits for all ranks. Raises on every rank PlanMismatch if the ranks have changed differently, or
    if only some can follow the change, and ReplicaMismatch if a new parameter has other values on
    some of them. If no rank can follow it, raises ConfigError because another engine has new
    parameters, or PhaseError because ranks hold shards of gradients.
    """
    with told_to_places(plans.group):
        _require_described_alike(plans, plans.change)
        _require_followed_by_all(plans.group, told)
        _require_same_values(plans, told)
    plans.follow()


def require_changed_alike(plans: CurrentPlan, ended: Round) -> None:
    """Raises PlanMismatch, on every rank, if the plan has changed on some ranks only."""
    # A change that was found since is of the next round.
    change = plans.change if ended.kind is RoundKind.TELL else None
    described = ""
    if change is not None:
        described = "a communication hook was registered"
        if change.reducer.hook is plans.compiled.reducer.hook:
            described = first_change(plans.compiled.plan.params, change.plan.params)
    error = changed_unlike(ended, plans.group, described)
    if error is None:
        return
    # On the host every rank has read the same and is here now, and the comparison names a
    # parameter. On a device the other ranks read later, when this one is gone. If this rank's
    # backward has failed, the others have raised PeerFailed already, and would not answer.
    if plans.group.hardware.is_host and not ended.has_failed:
        _require_described_alike(plans, change)
    raise error


def _require_described_alike(plans: CurrentPlan, change: Change | None) -> None:
    """Raises PlanMismatch, on every rank, if the ranks' changes differ; None means no change."""
    compiled = plans.compiled
    plan, params, reducer = compiled.plan, compiled.params, compiled.reducer
    if change is not None:
        plan, reducer = change.plan, change.reducer
        params = tuple(param for _, param in change.named_params)
    names = [name for name, _ in plans.new_params()]
    # Only this data axis is here: other places of a mesh have other synchronizations.
    plans.require_alike(
        plan,
        params,
        reducer,
        new=names,
        remedy=CHANGE_ALIKE,
        is_of_axis=True,
    )


def _require_followed_by_all(group: OwnGroup, told: Round) -> None:
    """Raises, on every rank, the reason why some ranks cannot follow the change: their own error if
    it is the same on all, else PlanMismatch."""
    refusal = told.refusal
    waits_for = "whether all ranks can follow the change"
    if not any_rank(group, refusal is not None, waits_for):
        return
    # Its first line says what has happened, and the last one what to do.
    lines = [line.strip() for line in str(refusal or "").splitlines()]
    of_ranks = gather_json(group, [lines[0], lines[-1]] if lines else None, waits_for=waits_for)
    refused = {
        rank: each for rank, each in zip(group.names, of_ranks, strict=True) if each is not None
    }
    reason, remedy = next(iter(refused.values()))
    is_alike = len(refused) == group.num_ranks and len({what for what, _ in refused.values()}) == 1
    if refusal is not None and is_alike:
        raise refusal
    raise PlanMismatch(
        f"the parameters, or the communication hook, have changed, and {named(refused)} cannot "
        f"follow the change: {reason}",
        where=f"synchronization {told.terms.number}, rank {group.name}",
        remedy=remedy,
    )


def _require_same_values(plans: CurrentPlan, told: Round) -> None:
    """Raises ReplicaMismatch, on every rank, if values of new parameters are not the same."""
    comparable = {name: param for name, param in plans.new_params() if has_bits(param)}
    if not comparable:
        return
    error = unlike_values(
        plans.group,
        comparable,
        "the comparison of new parameters",
        where=f"it was added or unfrozen, synchronization {told.terms.number}",
        remedy="Initialize it with the same seed on every rank; or call "
        "broadcast_parameters() after adding it and before the forward. Drop the gradients "
        "of this step by zero_grad().",
    )
    if error is not None:
        raise error
