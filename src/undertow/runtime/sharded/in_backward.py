"""Steps in backward: a bucket is stepped as soon as it is reduced, while backward continues.

reduce-scatter ──> settle (this rank's part of the mean) ──> update ──> all-gather        on the threads of the exchanges
backward ends ──> bind ──> step(): confirms the updates                                   on the training thread
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from undertow.errors import ConfigError, PhaseError
from undertow.runtime.sharded.gathers import Gathers
from undertow.runtime.sharded.groups import ShardGroups
from undertow.runtime.torch_private import private


class Shards(Protocol):
    """The shards to step."""

    gathers: Gathers

    def follow_parameters(self) -> None: ...


class BucketStepper(Protocol):
    """An optimizer that can step one bucket at a time."""

    def begin_updates(self, sharding: Shards) -> bool:
        """Called when a synchronization begins; returns True if it updates `sharding` with the current hyper-parameters."""
        ...

    def update(self, bucket: int) -> None:
        """Steps this rank's parts of a bucket with settled gradients; one call at a time, not in the training thread."""
        ...


class StepsInBackward:
    """The optimizer that steps buckets in backward, and whether its `step()` is due.

    `end_backward` ends a backward that an exception has interrupted, if none is running.
    """

    def __init__(self, groups: ShardGroups, end_backward: Callable[[], object]) -> None:
        self.groups = groups
        self.end_backward = end_backward
        self.is_due = False  # a backward has updated the parameters, and step() has not confirmed it
        self._stepper: weakref.ref[BucketStepper] | None = None  # the user holds it

    def hand_to(self, stepper: BucketStepper) -> None:
        """Makes `stepper` step from now on; raises PhaseError if the previous one has not confirmed a backward."""
        self.require_confirmed("another optimizer is made")
        self._stepper = weakref.ref(stepper)

    def begin_round(self, sharding: Shards) -> bool:
        """Returns True if this synchronization steps buckets.

        It does not before the optimizer's first step in this layout.
        """
        sharding.gathers.wait_for_all()
        sharding.follow_parameters()
        stepper = None if self._stepper is None else self._stepper()
        return stepper is not None and stepper.begin_updates(sharding)

    def update(self, bucket: int) -> None:
        """Steps one bucket."""
        stepper = None if self._stepper is None else self._stepper()
        if stepper is not None:
            stepper.update(bucket)

    @private.left_alone
    def forward_ends(self, outputs: object) -> None:
        """Makes a second backward through these outputs raise a clear error, instead of autograd's, after an update."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in private.tensors_in(outputs):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(_require_confirmed, weakref.ref(self)))

    def require_confirmed(self, what: str) -> None:
        """Raises PhaseError if `what` comes between a backward that has updated the parameters and its step()."""
        if self.is_due:
            raise PhaseError(
                f"{what} before step(), and with in_backward=True the last backward has updated the parameters.",
                where="ShardedOptimizer(..., in_backward=True)",
                remedy="Add losses up and run one backward, or run all but the last one of a step in accumulate(), "
                "or leave in_backward=True out.",
            )


@private.left_alone
def _require_confirmed(weak: weakref.ref[StepsInBackward], _gradients: object) -> None:
    steps = weak()
    if steps is not None:
        steps.require_confirmed("a second backward runs")


def steps_in_backward_over(groups: ShardGroups, *, overlap: bool, end_backward: Callable[[], object]) -> StepsInBackward | None:
    """Returns None for a single rank, which sends nothing; raises ConfigError if buckets cannot be stepped in backward."""
    if not overlap:
        raise ConfigError(
            "in_backward=True steps under backward, and overlap=False lets nothing lie there.",
            where="ShardedOptimizer",
            remedy="Leave one of the two out.",
        )
    if groups.num_ranks == 1:
        return None
    if not groups.can_step_in_backward:
        raise ConfigError(
            f"in_backward=True is not built yet for {groups.shard.group.backend}: buckets would have to be stepped on a stream.",
            where="ShardedOptimizer",
            remedy="Leave it out: gathers lie under the next forward.",
        )
    return StepsInBackward(groups, end_backward)
