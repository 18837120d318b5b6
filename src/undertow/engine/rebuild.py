"""The one way to other parameters, or to a communication hook: all ranks leave a plan together.

Reasons: docs/design/plan-changes.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from undertow.buckets.bucket import gradients_aside
from undertow.buckets.fingerprints import fingerprints
from undertow.engine.agreed_errors import CHANGE_ALIKE, changed_unlike, require_sound
from undertow.engine.checks import has_bits, mismatch
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.params import first_change
from undertow.engine.round import Round, RoundKind, Terms


def tell_of_change(plans: CurrentPlan, terms: Terms) -> Round:
    """Sends the buckets of the plan in force, without gradients and with the flag "changed".

    A rank that has not changed is in a usual round, so both find out. Waits for nobody. Raises
    ConfigError if another engine has new parameters, and PhaseError if ranks hold shards of
    gradients.
    """
    plans.prepare_to_leave()
    told = Round(kind=RoundKind.RETIRE)
    with gradients_aside(plans.compiled.params):
        told.start(plans.compiled, None, terms)
        told.send()
    return told


def rebuild(plans: CurrentPlan, told: Round) -> None:
    """Puts the change in force, after every rank has told of its own in the round `told`.

    Waits for all ranks. Raises on every rank PlanMismatch if the ranks have changed differently,
    and ReplicaMismatch if a new parameter has other values on some of them.
    """
    with gradients_aside(plans.compiled.params):
        told.wait()
    plans.compiled.recorder.forgets_buckets()
    require_sound(told, plans.group)
    require_changed_alike(plans, told)
    change, new = plans.change, plans.new_params()
    assert change is not None  # else nobody tells of it
    params = [param for _, param in change.named_params]
    names = [name for name, _ in new]
    plans.require_alike(change.plan, params, change.reducer, new=names, remedy=CHANGE_ALIKE)
    _require_same_values(new, plans, told)
    plans.follow()


def require_changed_alike(plans: CurrentPlan, ended: Round) -> None:
    """Raises PlanMismatch, on every rank, if the plan has changed on some ranks only."""
    compiled = plans.compiled
    plan, params, reducer, described = compiled.plan, compiled.params, compiled.reducer, ""
    if ended.kind is RoundKind.RETIRE and plans.change is not None:
        plan, reducer = plans.change.plan, plans.change.reducer
        params = tuple(param for _, param in plans.change.named_params)
        described = "a communication hook was registered"
        if reducer.hook is compiled.reducer.hook:
            described = first_change(compiled.plan.params, plan.params)
    error = changed_unlike(ended, plans.group, described)
    if error is None:
        return
    # On the host every rank has read the same and is here now, and the comparison names a
    # parameter. On a device the other ranks read later, when this one is gone. If this rank's
    # backward has failed, the others have raised PeerFailed already, and nobody would answer.
    if plans.group.hardware.is_host and not ended.has_failed:
        names = [name for name, _ in plans.new_params()]
        plans.require_alike(plan, params, reducer, new=names, remedy=CHANGE_ALIKE)
    raise error


def _require_same_values(
    new: Sequence[tuple[str, Tensor]], plans: CurrentPlan, told: Round
) -> None:
    """Raises ReplicaMismatch, on every rank, if values of `new` parameters are not the same."""
    comparable = {name: param for name, param in new if has_bits(param)}
    if not comparable:
        return
    group = plans.group
    values = fingerprints(list(comparable.values()), device=group.device)
    rows = group.all_gather(values, "the comparison of new parameters").result().tolist()
    for name, of_ranks in zip(comparable, zip(*rows, strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            by_rank = dict(zip(group.names, of_ranks, strict=True))
            raise mismatch(
                name,
                by_rank,
                where=f"it was added or unfrozen, synchronization {told.terms.number}",
                remedy="Initialize it alike on every rank, as by the same seed; or call "
                "broadcast_parameters() after adding it and before the forward. Drop the gradients "
                "of this step by zero_grad().",
            )
