"""What a synchronisation brings, combined with what earlier ones of the step have brought, and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from undertow.errors import ConfigError
from undertow.runtime import private
from undertow.runtime.apart import Apart
from undertow.runtime.executor import Executor, Round
from undertow.runtime.formation import Formation
from undertow.runtime.weights import Weighing, Weights


class Combination:
    """Sums and weights of one engine; `is_between` says whether no round is under way, and ends one that failed."""

    def __init__(self, formation: Formation, *, is_between: Callable[[], bool]) -> None:
        self._formation = formation
        self._is_between = is_between
        self._weights = Weights(formation.group)
        self._apart: Apart | None = None  # for the mean nothing need be kept apart
        self._divides = False  # by something that a communication hook knows nothing of
        if formation.assembly.reducer.divisor != formation.group.num_ranks:
            self._divides = True
            self.keep_apart()

    def weigh(self, weight: object) -> None:
        """The loss of the next backward is a sum over so many; see Sync.weight."""
        self._weights.give(weight)
        self._divides = True
        self.keep_apart()

    def require_plain_mean(self) -> None:
        """ConfigError where sums or weights are asked for, of which a hook cannot know."""
        if self._divides:
            raise ConfigError(
                'a communication hook divides gradients as it sees fit: it goes neither with op="sum" nor with weights.',
                where="register_comm_hook(state, hook)",
                remedy="Leave the hook out, or have it divide by what you want.",
            )

    def require_backward(self, optimizer: str) -> None:
        """PhaseError where weights were given after the backward whose gradients that optimizer is about to step on."""
        self._weights.require_backward(f"{optimizer}.step, rank {self._formation.group.rank}")

    def require_no_weights(self) -> None:
        """ConfigError where somebody is to take over what was accumulated, and weights with it."""
        self._weights.require_none()

    @property
    def has_weights(self) -> bool:
        """Whether losses are sums over tokens or samples."""
        return self._weights.are_given

    def weights_aside(self) -> AbstractContextManager[None]:
        """Inside, a round takes no weights that were given."""
        return self._weights.aside()

    def begins(self, *, is_synchronised: bool, is_shadow: bool, is_last: bool) -> Weighing | None:
        """A round begins; what this rank says of its weight, if anything."""
        formation = self._formation
        self._take()
        is_outside = is_shadow or private.graph_task_id() == -1
        return self._weights.begins(
            is_synchronised=is_synchronised,
            is_without_data=is_outside and not formation.watch.arrived_before,
            can_wait=formation.assembly.eager is None,
            is_last=is_last,
        )

    def forward_begins(self) -> None:
        """A training forward, before a backward."""
        if self._apart is not None:
            self._apart.look(self._formation.watch.params)

    def sends(self, this_round: Round, executor: Executor) -> bool:
        """Everything has left: sends the sum of weights where all ranks are found to have some for the first time."""
        weighing = this_round.weighing
        if weighing is None or weighing.is_sent or not weighing.can_wait or not executor.have_all_weights():
            return False
        weighing.send()
        return True

    def round_is_bound(self, this_round: Round) -> None:
        """Every gradient is what the round has made of it."""
        if self._apart is not None and not this_round.has_failed:
            self._apart.round_ends(self._formation.watch.params, this_round)

    def round_ends(self, this_round: Round) -> None:
        """It has ended on every rank, well or not."""
        where = f"synchronisation {this_round.number}, rank {self._formation.group.rank}"
        has_failed = this_round.has_failed or any(reading.failed_ranks for reading in this_round.readings)
        self._weights.ends(this_round.weighing, where=where, has_failed=has_failed)

    def require_sound(self) -> None:
        """PhaseError, on every rank, where its weights were not; on a device in the next round, for the host does not wait."""
        if self._formation.group.device.type == "cpu":
            self._weights.require_sound()

    def give_back(self) -> None:
        """A backward has failed, or no other one will come: `.grad` is what it would be without us."""
        if self._apart is not None:
            self._apart.give_back()

    def runs_out(self) -> None:
        """This rank has no more data: what it has accumulated and not synchronised is left out, and its weight with it."""
        self._formation.watch.arrived_before.clear()
        self._weights.forget_accumulated()

    def keep_apart(self) -> None:
        """From now on what is there is not counted again by a later round."""
        if self._apart is None:
            self._apart = Apart()
            self._formation.call_before(self._take)

    def _take(self) -> None:
        """Before the first gradient of a backward, and where a round begins without one."""
        if self._apart is None or self._apart.is_taken or not self._is_between():
            return
        formation = self._formation
        if not self._apart.take(formation.watch.named_params, has_result=lambda: formation.has_result):
            self._weights.forget_gradients(has_accumulated=bool(formation.watch.arrived_before))
