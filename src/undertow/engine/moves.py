"""How all ranks move to another plan of the same parameters: to rank 0's order, and to plans that
are tried.

Reasons: docs/design/plan-changes.md.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.engine.current_plan import CurrentPlan
from undertow.engine.measuring import Present
from undertow.engine.tuning import order_of
from undertow.errors import PhaseError
from undertow.plan import Plan, first_plan, plan_in_order
from undertow.ranks.handle import Handle

_log = logging.getLogger("undertow")


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote on a new plan, on its way: if every rank has memory for it."""

    before: Plan  # all return to it if one has not
    failed: Tensor  # [1] int64: a rank that has not, or -1
    handle: Handle


class Moves:
    """Moves the plan in force where `Tuning` says, in the same round on every rank.

        a round begins: to rank 0's order, or back from a plan that some rank cannot make
        a round ends:   to the plan that is tried next; if it is new, the ranks vote

    With shards only rank 0's order counts, before the optimizer steps.
    """

    def __init__(self, current_plan: CurrentPlan) -> None:
        self._current_plan = current_plan
        self.left: Present | None = None  # the plan before the last move at the end of a round
        self._vote: Vote | None = None  # on the plan in force, if it has just been made

    def adopt_plan(self) -> None:
        """Called when a round begins: moves to the plan in rank 0's order once that has arrived, or
        back from a plan that some rank cannot make.

        Shards take over the order before the optimizer steps.
        """
        self.end_vote()
        current_plan = self._current_plan
        tuning, compiled = current_plan.tuning, current_plan.compiled
        if tuning is None or tuning.is_quiet or compiled.strategy.gather is not None:
            return
        plan = tuning.planned(compiled.plan)
        if plan is not None:
            current_plan.note_written()
            current_plan.regroup(plan)

    def round_was_sound(self, num_forwards: int) -> None:
        """Called at the end of a round that all ranks have found sound, after so many training
        forwards: tells `tuning`, and moves to the plan that it wants next.

        The gradients of the round stay in the old buckets until the user clears them.
        """
        current_plan = self._current_plan
        tuning = current_plan.tuning
        if tuning is None or tuning.is_over:
            if tuning is not None:
                tuning.has_settled = True
            return
        present = current_plan.compiled.present
        plan = tuning.round_ends(present, num_forwards=num_forwards)
        if plan is not None:
            self.left = present
        if plan is not None and tuning.is_new:
            self._try(plan)
        elif plan is not None:
            current_plan.regroup(plan)

    def _try(self, plan: Plan) -> None:
        """Moves to a new plan, and tells the other ranks if this rank has memory for it."""
        current_plan, group = self._current_plan, self._current_plan.group.deciding
        before = current_plan.compiled.plan
        failed = -1
        try:
            current_plan.regroup(plan)
        except Exception as error:
            failed = group.rank
            _log.warning("A plan could not be tried on rank %s: %s", group.name, error)
            current_plan.regroup(before)
        told = torch.tensor([failed], dtype=torch.int64).to(group.device)
        name = "whether every rank has the next plan"
        self._vote = Vote(before, told, group.all_reduce(told, name, dist.ReduceOp.MAX))

    def end_vote(self) -> None:
        """Waits for the vote on a new plan, if there is one; if a rank does not have it, all return
        to the plan before."""
        vote, self._vote = self._vote, None
        if vote is None:
            return
        vote.handle.wait()
        rank = int(vote.failed.item())
        if rank >= 0:
            current_plan = self._current_plan
            tuning = current_plan.tuning
            assert tuning is not None  # it has asked for the plan
            tuning.cannot_try(current_plan.group.deciding.names[rank])
            # otherwise this rank could not make the plan itself
            if current_plan.compiled.plan is not vote.before:
                current_plan.note_written()
                current_plan.regroup(vote.before)

    @property
    def has_order(self) -> bool:
        """True if rank 0's order is on its way, for the next `shard_plan`."""
        tuning = self._current_plan.tuning
        return tuning is not None and not tuning.is_quiet

    def shard_plan(self, updates: Mapping[int, tuple[int, bool]]) -> Plan:
        """Returns the plan for shards, in rank 0's order if that has arrived.

        `updates` has for each parameter, by id, the number of the optimizer that updates it, and
        if one rank updates all of it.

        Raises PhaseError if parameters change.
        """
        current_plan = self._current_plan
        if current_plan.change is not None:
            raise PhaseError(
                "an optimizer steps after its parameters have changed and before gradients of "
                "the new ones are averaged.",
                where=f"rank {current_plan.group.name}",
                remedy="Run a forward and a backward between the change and the step.",
            )
        self.end_vote()
        members, hooks = current_plan.members, current_plan.hooks
        members.updates = updates
        specs = members.specs(hooks.named_params)
        now = dataclasses.replace(
            current_plan.compiled.plan,
            params=tuple(specs),
            num_shards=current_plan.group.user.num_shards,
        )
        config = current_plan.compiled.reducer.config
        tuning = current_plan.tuning
        order = None if tuning is None else tuning.order()
        num_ranks, num_shards = now.num_ranks, now.num_shards
        if config.plan is not None:
            return first_plan(now.params, config, num_ranks=num_ranks, num_shards=num_shards)
        return plan_in_order(
            now.params,
            order_of(now) if order is None else order,
            config,
            num_ranks=num_ranks,
            num_shards=num_shards,
            has_shards=True,
        )
