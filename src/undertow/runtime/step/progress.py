"""Which rounds have run, and whether another one is owed."""

from __future__ import annotations

from collections.abc import Callable, Collection


class Progress:
    """What outlives a round.

    A rank owes a round when a training forward ran and no round has followed: the other ranks may be waiting in theirs.
    An optimizer whose parameters have not stepped since the last round steps on what that round has brought; a forward in
    between was for something else.
    """

    def __init__(self) -> None:
        self.num_rounds = 0  # synchronized ones
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
        """Number of synchronizations that are complete; asked from other threads."""
        return self.num_rounds

    def is_idle(self) -> bool:
        """Whether no step has begun since the last synchronization; asked from other threads."""
        return not self.has_begun

    @property
    def is_step_due(self) -> bool:
        """Whether no optimizer has stepped since the last round."""
        return self._is_after_round and not self._stepped

    @property
    def mode(self) -> int | None:
        """In the signature: a rank that has stepped since the last round and one that has not are not in the same place.

        None, which goes by the others, on a rank that leaves steps to another one, or takes them without torch's optimizers.
        """
        return int(self.is_step_due) if self._has_ever_stepped else None

    def has_brought(self, params: Collection[int]) -> bool:
        """Whether the last round's result is what these parameters, by id, have not stepped on yet."""
        return self._is_after_round and self._stepped.isdisjoint(params)

    def forward_begins(self, *, is_accumulating: bool) -> None:
        """A training forward."""
        self.unused = ()
        if self._is_last_run:
            self.forgets_unused()
        self.is_owed = not is_accumulating
        self.has_begun = True
        self.has_accumulated |= is_accumulating

    def round_ends(self, *, has_failed: bool, is_last: bool) -> None:
        """Has accumulated something still, where it is not the last one of a step: gradients that came are reduced already."""
        self.num_rounds += 1
        self.is_owed = self.has_begun = False
        self.has_accumulated = (self.has_accumulated and has_failed) or not is_last
        self._is_after_round = True
        self._stepped.clear()

    def forgets_unused(self) -> None:
        """A step begins."""
        self._unused_so_far = None

    def notes_unused(self, names: tuple[str, ...], *, is_last: bool, is_gone: Callable[[str], bool]) -> None:
        """A round has found these parameters unused; `is_gone` says of which the user has thrown away what came before."""
        before = self._unused_so_far
        unused = names if before is None else tuple(name for name in names if name in before or is_gone(name))
        self._unused_so_far, self._is_last_run = unused, is_last
        if is_last:
            self.unused = unused

    def steps(self, params: Collection[int]) -> None:
        """An optimizer updates these parameters, by id."""
        self._stepped.update(params)
        self._unused_so_far = None
        self._has_ever_stepped = True

    def begins_anew(self) -> None:
        """All ranks are where they are before the first round."""
        self._is_after_round = False
        self._stepped.clear()
