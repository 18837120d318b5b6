"""Combines the result of a synchronization with earlier ones of the step, and divides it by weights."""

from __future__ import annotations

from collections.abc import Callable

from undertow.errors import ConfigError
from undertow.runtime.execute.earlier import Apart
from undertow.runtime.execute.executor import Round
from undertow.runtime.gradients.weights import RoundWeights, Weights
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.torch_private import private


class Combination:
    """Sums and weights of one engine; `is_between` says whether no round is under way, and ends one that failed."""

    def __init__(self, current_plan: CurrentPlan, op: str, *, is_between: Callable[[], bool]) -> None:
        self._current_plan = current_plan
        self._is_between = is_between
        self._weights = Weights(current_plan.group, is_weighted=op == "weighted")
        self._apart: Apart | None = None  # for the mean nothing need be kept apart
        if op == "weighted" or current_plan.compiled.reducer.divisor != current_plan.group.num_ranks:
            self._apart = Apart()
            current_plan.call_before(self._take)

    def weigh(self, weight: object) -> None:
        """The loss of the next backward is a sum over so many; see GradientSync.loss_weight."""
        self._weights.give(weight)

    def require_plain_mean(self) -> None:
        """ConfigError where sums or weights are asked for, of which a hook cannot know."""
        if self._apart is not None:
            raise ConfigError(
                'a communication hook divides gradients as it sees fit: it goes neither with op="sum" nor with op="weighted".',
                where="register_comm_hook(state, hook)",
                remedy="Leave the hook out, or have it divide by what you want.",
            )

    def require_backward(self, optimizer: str) -> None:
        """PhaseError where weights were given after the backward whose gradients that optimizer is about to step on."""
        self._weights.require_backward(f"{optimizer}.step, rank {self._current_plan.group.rank}")

    def require_no_weights(self) -> None:
        """ConfigError where somebody is to take over what was accumulated, and weights with it."""
        self._weights.require_none()

    def begins(self, *, is_synchronized: bool, is_shadow: bool, is_last: bool) -> RoundWeights | None:
        """A round begins; the weights of all ranks, if losses are weighed."""
        self._take()
        is_outside = is_shadow or private.graph_task_id() == -1
        return self._weights.begins(
            is_synchronized=is_synchronized,
            is_without_data=is_outside and not self._current_plan.watch.arrived_before,
            is_last=is_last,
        )

    def forward_begins(self) -> None:
        """A training forward, before a backward."""
        if self._apart is not None:
            self._apart.look(self._current_plan.watch.params)

    def round_is_bound(self, this_round: Round) -> None:
        """Every gradient is what the round has made of it."""
        if self._apart is not None and not this_round.has_failed:
            self._apart.round_ends(self._current_plan.watch.params, this_round)

    def round_ends(self, this_round: Round) -> None:
        """It has ended on every rank, well or not."""
        if this_round.weighing is not None:
            self._weights.ends(this_round.weighing)

    def require_sound(self, this_round: Round) -> None:
        """PhaseError, on every rank, where its weights were not; a backward that has failed has another error to raise."""
        if this_round.weighing is not None and not this_round.has_failed:
            this_round.weighing.require_sound(f"synchronization {this_round.number}, rank {self._current_plan.group.rank}")

    def give_back(self) -> None:
        """A backward has failed, or no other one will come: `.grad` is what it would be without us."""
        if self._apart is not None:
            self._apart.give_back()

    def runs_out(self) -> None:
        """This rank has no more data: what it has accumulated and not synchronized is left out, and its weight with it."""
        self._current_plan.watch.arrived_before.clear()
        self._weights.forget_accumulated()

    def _take(self) -> None:
        """Before the first gradient of a backward, and where a round begins without one."""
        if self._apart is None or self._apart.is_taken or not self._is_between():
            return
        current_plan = self._current_plan
        if not self._apart.take(current_plan.watch.named_params, has_result=lambda: current_plan.has_result):
            self._weights.forget_gradients(has_accumulated=bool(current_plan.watch.arrived_before))
