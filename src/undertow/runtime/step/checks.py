"""What ranks look at besides: whether gradients are finite, and whether parameters are still the same everywhere."""

from __future__ import annotations

from functools import partial

from undertow.config import SyncConfig
from undertow.runtime.execute.executor import Round
from undertow.runtime.gradients.finite import not_finite
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.model.replicas import Replicas
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.step.nonfinite import Finding, NonFinite
from undertow.runtime.torch_private import private


class Checks:
    """Of one engine."""

    def __init__(self, current_plan: CurrentPlan, members: ModuleParams, config: SyncConfig) -> None:
        group = current_plan.group
        # Of a group of experts, ranks as everybody knows them: there are other groups.
        names = group.user.ranks if config.experts else range(group.num_ranks)
        self.numbers = NonFinite(
            config.nonfinite, rank=group.rank, look=partial(_found_alone, current_plan, names[0]), names=names
        )
        self._replicas = Replicas(group, config.check_replicas_every, names=names)
        self._current_plan = current_plan
        self._members = members

    def must_be_read(self, number: int) -> bool:
        """Whether the end of synchronization `number` waits, on devices too, for what its trailers say."""
        # One in which the parameters change counts as two.
        return self.numbers.is_on or self._replicas.is_due(number) or self._replicas.is_due(number + 1)

    def round_ends(self, this_round: Round) -> None:
        """A synchronization has ended on every rank, well or not."""
        self.numbers.round_ends(this_round, self._current_plan.plan)

    def round_was_sound(self, this_round: Round) -> None:
        """It has, well, and all ranks know it."""
        if self._replicas.is_due(this_round.number):
            self._current_plan.wait_for_parameters()
            params = [*self._current_plan.watch.named_params, *self._members.common_frozen]
            self._replicas.send(params, number=this_round.number, counts=not this_round.is_shadow)

    def require_alike(self) -> None:
        """ReplicaMismatch, on every rank, where the parameters that were compared are not the same; waits for them.

        Not within a backward, in which ranks may wait for each other in different models.
        """
        if private.graph_task_id() == -1:
            self._replicas.require_alike()


def _found_alone(current_plan: CurrentPlan, rank: int) -> Finding | None:
    """Of a rank alone, which has no rounds: what its gradients are now. No method, which would hold its owner in a circle."""
    if current_plan.is_active:
        return None
    grads = {name: param.grad for name, param in current_plan.watch.named_params if param.grad is not None}
    names = list(grads)
    params = tuple(names[place] for place in not_finite(list(grads.values())))
    return Finding(params, ranks=(rank,), where="one rank, when its optimizer steps") if params else None
