"""Steps in eager form: a bucket is stepped as soon as it is reduced, while backward goes on.

reduce-scatter ──> settle (this rank's part of the mean) ──> update ──> all-gather        on the threads of the exchanges
backward over ──> bind ──> step(): confirms what was updated                              on the training thread
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
    """What is stepped."""

    gathers: Gathers

    def follow_parameters(self) -> None: ...


class BucketStepper(Protocol):
    """An optimizer that can step one bucket at a time."""

    def begin_updates(self, sharding: Shards) -> bool:
        """A round begins: whether it will update what `sharding` has, with hyper-parameters as they are now."""
        ...

    def update(self, bucket: int) -> None:
        """Steps this rank's parts of a bucket, whose gradients are settled; never two at a time, not in the training thread."""
        ...


class EagerSteps:
    """Whose buckets are stepped in backward, and whether its `step()` is due for that.

    `end_backward` ends a backward that an exception has left in the middle, where none runs.
    """

    def __init__(self, axes: ShardGroups, end_backward: Callable[[], object]) -> None:
        self.axes = axes
        self.end_backward = end_backward
        self.is_due = False  # a backward has updated the parameters, and step() has not confirmed it
        self._stepper: weakref.ref[BucketStepper] | None = None  # whose user holds it

    def hand_to(self, stepper: BucketStepper) -> None:
        """From now on `stepper` steps. PhaseError where the one before has not confirmed a backward."""
        self.require_confirmed("another optimizer is made")
        self._stepper = weakref.ref(stepper)

    def begin_round(self, sharding: Shards) -> bool:
        """Whether buckets are stepped in the round that begins: not before the optimizer's first step in this layout."""
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
        """Has a backward through these outputs say what is wrong before autograd does, if parameters are updated already."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in private.tensors_in(outputs):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(_require_confirmed, weakref.ref(self)))

    def require_confirmed(self, what: str) -> None:
        """PhaseError where `what` comes between a backward that has updated the parameters and step()."""
        if self.is_due:
            raise PhaseError(
                f"{what} before step(), and an eager optimizer has updated the parameters in the backward before.",
                where="ShardedOptimizer(..., eager=True)",
                remedy="Add losses up and run one backward, or run all but the last one of a step in accumulate(), "
                "or leave eager=True out.",
            )


@private.left_alone
def _require_confirmed(weak: weakref.ref[EagerSteps], _gradients: object) -> None:
    steps = weak()
    if steps is not None:
        steps.require_confirmed("a second backward runs")


def eager_steps_over(axes: ShardGroups, *, overlap: bool, end_backward: Callable[[], object]) -> EagerSteps | None:
    """None for a rank alone, which sends nothing; ConfigError where buckets cannot be stepped in backward."""
    if not overlap:
        raise ConfigError(
            "eager=True steps under backward, and overlap=False lets nothing lie there.",
            where="ShardedOptimizer",
            remedy="Leave one of the two out.",
        )
    if axes.num_ranks == 1:
        return None
    if not axes.can_step_in_backward:
        raise ConfigError(
            f"eager=True is not built yet for {axes.inside.group.backend}: buckets would have to be stepped on a stream.",
            where="ShardedOptimizer",
            remedy="Leave it out: gathers lie under the next forward.",
        )
    return EagerSteps(axes, end_backward)
