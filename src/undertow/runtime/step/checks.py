"""Checks that gradients are finite, and that parameters stay the same on every rank."""

from __future__ import annotations

from functools import partial

from undertow.config import SyncConfig
from undertow.runtime.execute.round import RoundKind, RoundResult
from undertow.runtime.gradients.finite import not_finite
from undertow.runtime.model.replicas import Replicas
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.step.nonfinite import Finding, NonFinite
from undertow.runtime.torch_private import private


class Checks:
    """The checks of one engine."""

    def __init__(self, current_plan: CurrentPlan, config: SyncConfig) -> None:
        group = current_plan.group
        # Of a group of experts, ranks of the world: there are other groups.
        names = group.user.ranks if config.experts else range(group.num_ranks)
        self.numbers = NonFinite(
            config.nonfinite, rank=group.rank, look=partial(_found_alone, current_plan, names[0]), names=names
        )
        every = config.check_replicas_every
        self.replicas = None if every is None or group.num_ranks == 1 else Replicas(group, every, names=names)
        self._current_plan = current_plan

    def must_be_read(self, number: int) -> bool:
        """Returns True if the end of synchronization `number` waits for its trailers, on devices too."""
        # A synchronization in which the parameters change counts as two.
        replicas = self.replicas
        return self.numbers.is_on or (replicas is not None and (replicas.is_due(number) or replicas.is_due(number + 1)))

    def round_was_sound(self, result: RoundResult) -> None:
        """Called after a synchronization that all ranks have found sound: compares parameters if that is due."""
        number = result.round.number
        if self.replicas is not None and self.replicas.is_due(number):
            current_plan = self._current_plan
            current_plan.wait_for_parameters()
            params = [*current_plan.now.hooks.named_params, *current_plan.members.common_frozen]
            self.replicas.send(params, number=number, counts=result.round.kind is not RoundKind.SHADOW)

    def require_alike(self) -> None:
        """Waits for compared parameters; raises ReplicaMismatch, on every rank, if they differ.

        Does nothing inside a backward, where ranks may wait for each other in different models.
        """
        if self.replicas is not None and private.graph_task_id() == -1:
            self.replicas.require_alike()


def _found_alone(current_plan: CurrentPlan, rank: int) -> Finding | None:
    """Checks the gradients of a single rank, which has no rounds. A function: a method would hold its owner in a cycle."""
    if current_plan.is_active:
        return None
    grads = {name: param.grad for name, param in current_plan.now.hooks.named_params if param.grad is not None}
    names = list(grads)
    params = tuple(names[place] for place in not_finite(list(grads.values())))
    return Finding(params, ranks=(rank,), where="one rank, when its optimizer steps") if params else None
