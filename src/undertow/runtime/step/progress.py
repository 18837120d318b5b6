"""Counts rounds, and tells if another one is owed."""

from collections.abc import Collection, Sequence

from torch import Tensor


class Progress:
    """The state of an engine that outlives a round.

    A rank owes a round when a training forward ran and no round has followed: the other ranks may be waiting in theirs.
    An optimizer whose parameters have not stepped since the last round steps on what that round has brought; a forward in
    between was for something else.
    """

    def __init__(self) -> None:
        self.num_rounds = 0  # synchronized ones
        self.rescale = 1.0  # factor for the mean over all ranks, if some of them have run out of data
        self.is_owed = False
        self.has_begun = False  # a training forward has run since the last synchronization
        self.has_accumulated = False  # since the last synchronization
        self.unused: tuple[str, ...] = ()  # parameters without a gradient in the last step
        self._unused_so_far: tuple[str, ...] | None = None  # in the synchronizations of this one
        self._is_last_run = True  # of the step, which adds up no more gradients
        self._stepped: set[int] = set()  # parameters, by id, that an optimizer has updated since the last round
        self._has_ever_stepped = False
        self._is_after_round = False

    def rounds(self) -> int:
        """Returns the number of complete synchronizations; called from other threads."""
        return self.num_rounds

    def is_idle(self) -> bool:
        """Returns True if no step has begun since the last synchronization; called from other threads."""
        return not self.has_begun

    @property
    def is_step_due(self) -> bool:
        """True if no optimizer has stepped since the last round."""
        return self._is_after_round and not self._stepped

    @property
    def mode(self) -> int | None:
        """Part of the signature: ranks differ if one has stepped since the last round and another has not.

        None, which accepts the others' mode, on a rank that leaves steps to another one, or steps without torch's optimizers.
        """
        return int(self._is_after_round and not self._stepped) if self._has_ever_stepped else None

    def has_result_for(self, params: Collection[int]) -> bool:
        """Returns True if these parameters, by id, have not stepped on the last round's result yet."""
        return self._is_after_round and self._stepped.isdisjoint(params)

    def forward_begins(self, *, is_accumulating: bool) -> None:
        """Called before a training forward."""
        self.unused = ()
        if self._is_last_run:
            self._unused_so_far = None
        self.is_owed = not is_accumulating
        self.has_begun = True
        self.has_accumulated |= is_accumulating

    def round_ends(
        self, unused: tuple[str, ...], *, has_failed: bool, is_last: bool, params: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Called after a round that found parameters with these names, of `params`, `unused`.

        Gradients stay accumulated if it was not the last one of the step: they are reduced already.
        """
        self.num_rounds += 1
        self.is_owed = self.has_begun = False
        self.has_accumulated = (self.has_accumulated and has_failed) or not is_last
        self._is_after_round = True
        self._stepped.clear()
        before = self._unused_so_far
        if before is not None and unused:
            cleared = {name for name, param in params if param.grad is None}  # so an earlier gradient counts no more
            unused = tuple(name for name in unused if name in before or name in cleared)
        self._unused_so_far, self._is_last_run = unused, is_last
        if is_last:
            self.unused = unused

    def forgets_unused(self) -> None:
        """Called when a step begins."""
        self._unused_so_far = None

    def steps(self, params: Collection[int]) -> None:
        """Called before an optimizer updates these parameters, by id."""
        self._stepped.update(params)
        self._unused_so_far = None
        self._has_ever_stepped = True

    def join_ends(self) -> None:
        """Called when all ranks contribute again, and are at the same place as before the first round."""
        self.rescale = 1.0
        self._is_after_round = False
        self._stepped.clear()
