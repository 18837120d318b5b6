"""The state of an engine that outlives a round."""

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum, auto
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.engine.step_settings import ALONE, Settings

_label_of = attrgetter("label")


class Forward(IntEnum):
    """The last forward that a backward may follow, if it ran since all parameters were stepped."""

    NONE = auto()
    ENDED = auto()
    RUNNING = auto()  # a training loop inside of it may step


class Gradients(IntEnum):
    """The state of the gradients since the last synchronization that succeeded.

    A worse one replaces a better one.
    """

    SOUND = auto()
    LOCAL = auto()  # a backward that followed no forward has added to this rank's
    REPORTED = auto()  # the same, and a warning says so
    INCOMPLETE = auto()  # a backward or a synchronization has failed, or is under way


class Accumulated(IntEnum):
    """Lists what can run inside `accumulate()` between two synchronizations, without communication.

    A larger value replaces a smaller one.
    """

    NOTHING = auto()
    FORWARD = auto()  # a training forward, whose backward may have reached no parameter here
    GRADIENTS = auto()  # a backward


class Unused:
    """Names of the parameters without a gradient on this rank, over the synchronizations of a
    step."""

    def __init__(self) -> None:
        self.last: tuple[str, ...] = ()  # in the last step
        self.so_far: tuple[str, ...] | None = None  # in the synchronizations of this one
        self._is_last_run = True  # of the step, which adds up no more gradients

    def forward_begins(self) -> None:
        """Called before a training forward."""
        self.last = ()
        if self._is_last_run:
            self.so_far = None

    def round_ends(
        self, unused: tuple[str, ...], params: Sequence[tuple[str, Tensor]], *, is_last: bool
    ) -> None:
        """Called after a round that found parameters with these names, of `params`, unused."""
        before = self.so_far
        if before is not None and unused:
            # so an earlier gradient counts no more
            cleared = {name for name, param in params if param.grad is None}
            unused = tuple(name for name in unused if name in before or name in cleared)
        self.so_far, self._is_last_run = unused, is_last
        if is_last:
            self.last = unused


class Steps:
    """The steps of optimizers since the last round."""

    def __init__(self) -> None:
        self.settings: Settings = ()
        # by id, those that were updated; None before the first round
        self._params: set[int] | None = None
        self._have_ever_been = False

    @property
    def are_due(self) -> bool:
        """True if no optimizer has stepped since the last round."""
        return self._params is not None and not self._params

    @property
    def mode(self) -> int | None:
        """Part of the signature: ranks differ if one has stepped since the last round and another
        has not.

        None on a rank that does not step itself, or steps without torch's optimizers; it then
        accepts the mode of the others.
        """
        return int(self._params == set()) if self._have_ever_been else None

    def are_due_for(self, params: Collection[int]) -> bool:
        """Returns True if these parameters, by id, have not stepped on the last round's result
        yet."""
        return self._params is not None and self._params.isdisjoint(params)

    def add(self, params: set[int], settings: Settings, *, is_alone: bool) -> set[int]:
        """Adds a step of these parameters, by id, with these settings.

        It `is_alone` inside `accumulate()`: ranks that step so and ranks that average first would
        not be in the same step. Returns all that have stepped since the last round.
        """
        if is_alone and self.settings[:1] != ALONE:
            self.settings = ALONE + self.settings
        # Otherwise this is an optimizer inside one that has told its settings, or a further step.
        if self._params is None:
            # Before the first round the last step of each group counts. There may never be a round.
            labels = set(map(_label_of, settings))
            self.settings = tuple([one for one in self.settings if one.label not in labels])
        if not self._params or self._params.isdisjoint(params):
            self.settings += settings
        stepped = self._params | params if self._params else params
        if self._params is not None:
            self._params = stepped
        self._have_ever_been = True
        return stepped

    def add_settings(self, settings: Settings) -> None:
        """Adds settings that ranks compare in the next round."""
        self.settings += settings

    def round_ends(self) -> None:
        self._params, self.settings = set(), ()

    def join_ends(self) -> None:
        self._params, self.settings = None, ()


class Progress:
    """The state of an engine that outlives a round.

    A rank owes a round when a training forward ran and no round has followed: the other ranks may
    be waiting in theirs. If an optimizer's parameters have not been stepped since the last round,
    it uses that round's gradients, even if a forward ran in between. A backward is this rank's own
    if no forward has run since all parameters were stepped.
    """

    def __init__(self) -> None:
        self.num_rounds = 0  # synchronized ones
        # factor for the mean over all ranks, if some of them have run out of data
        self.rescale = 1.0
        self.is_owed = False
        self.num_forwards = 0  # training forwards since the last synchronization
        self.num_forwards_before = 1  # training forwards between the last one and the one before
        self.forward = Forward.NONE
        self.gradients = Gradients.SOUND
        self.has_accumulated = False  # since the last synchronization
        self.accumulated = Accumulated.NOTHING
        # by id, parameters that have stepped inside `accumulate()` on the accumulated gradients
        self.stepped_alone: set[int] = set()
        # by `follows_forward`: warnings of averages before a step, outside of backward
        self.told_of_averages: set[bool] = set()
        self.are_buffers_due = True  # before the next training forward, unless it continues a step
        # the number of rounds when the optimizer that steps now had a mean that it has not used yet
        self.round_to_step_on: int | None = None
        self.unused = Unused()
        self.steps = Steps()

    @property
    def has_begun(self) -> bool:
        """True if a training forward has run since the last synchronization."""
        return self.num_forwards > 0

    def forward_begins(self, *, synchronizes: bool, is_last: bool) -> None:
        """Called before a training forward."""
        self.unused.forward_begins()
        self.is_owed = synchronizes
        self.num_forwards += 1
        self.has_accumulated |= not synchronizes
        self.are_buffers_due = is_last
        if not synchronizes:
            self.accumulates(Accumulated.FORWARD)

    def accumulates(self, more: Accumulated) -> None:
        """Called when a training forward or a backward runs that only accumulates."""
        self.accumulated = max(self.accumulated, more)
        self.stepped_alone.clear()

    def is_averaged(self) -> None:
        """Called when nothing is left that has only accumulated."""
        self.accumulated = Accumulated.NOTHING
        self.stepped_alone.clear()

    def round_ends(self, *, has_failed: bool, is_last: bool) -> None:
        """Called after a round; gradients stay accumulated if it was not the last one of the step.

        They are reduced already.
        """
        self.num_rounds += 1
        self.is_owed = False
        self.num_forwards_before, self.num_forwards = self.num_forwards, 0
        self.are_buffers_due = is_last
        self.has_accumulated = (self.has_accumulated and has_failed) or not is_last
        self.steps.round_ends()
        if not has_failed:
            self.is_averaged()

    def optimizer_steps(
        self,
        params: set[int],
        settings: Settings,
        *,
        of: frozenset[int],
        has_closure: bool,
        is_alone: bool,
    ) -> None:
        """Called before an optimizer updates these parameters, by id, with these settings.

        `of` are all that are trained. A step inside `accumulate()` `is_alone`.
        """
        self.round_to_step_on = self.num_rounds if self.steps.are_due_for(params) else None
        if is_alone:
            self.stepped_alone |= params
        stepped = self.steps.add(params, settings, is_alone=is_alone)
        # After a step with a closure, its backward is still to come.
        if self.forward is Forward.ENDED and stepped >= of and not has_closure:
            self.forward = Forward.NONE
        self.unused.so_far = None

    def has_mean_for(self, optimizer: Optimizer, *, is_stepping: bool) -> bool:
        """Returns True if a round has followed the last step of this optimizer's parameters; the
        same on every rank. `is_stepping`: called within its step."""
        if is_stepping and self.round_to_step_on is not None:
            return True
        return self.steps.are_due_for(set(map(id, params_of(optimizer))))

    def join_ends(self) -> None:
        """Called when all ranks contribute again, and are at the same place as before the first
        round."""
        self.rescale = 1.0
        self.are_buffers_due = True
        self.steps.join_ends()


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))
