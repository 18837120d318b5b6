"""Steps in backward: a bucket is stepped as soon as it is reduced, while backward continues.

reduce-scatter ──> settle (this rank's part of the mean) ──> update ──> all-gather        on the threads of the exchanges
backward ends ──> bind ──> step(): confirms the updates                                   on the training thread
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from undertow.errors import PhaseError, require
from undertow.runtime.comm.collectives import Collectives
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.peers.waiting import require_no_fault
from undertow.runtime.sharded.gathers import Gathers
from undertow.runtime.sharded.shards import FlatParams
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook, OutputHook


class GathersInBackward(Gathers):
    """The gathers of buckets that backward steps.

    `being_stepped` are buckets whose parameters may change during the current backward. `owed` are buckets that it still has to
    gather: of a stepped one, this rank's shards are new and the other ranks' are missing. `steps` has the updates in flight.
    `end_backward` ends a backward that an exception has interrupted.
    """

    def __init__(
        self, flats: Sequence[FlatParams], exchanges: Collectives, recorder: Recorder, end_backward: Callable[[], object]
    ) -> None:
        super().__init__(flats, exchanges, recorder)
        self.being_stepped: set[int] = set()
        self.steps: dict[int, Handle] = {}
        self.unready = (self.in_flight.keys(), self.owed, self.being_stepped)
        self._end_backward = end_backward

    def launch(self, bucket: int, *, is_read: bool = True, first: Callable[[], object] = int) -> None:
        step = self.steps.pop(bucket, None)
        super().launch(bucket, is_read=is_read, first=first if step is None else partial(self._end_step, bucket, step))
        self.owed.discard(bucket)

    def _end_step(self, bucket: int, step: Handle) -> None:
        step.wait()
        self._recorder.mark_gather(bucket, "launched")

    def round_begins(self) -> None:
        """Resets the buckets being stepped; raises PhaseError if the last backward left parameters partly updated."""
        self.being_stepped.clear()
        self._require_whole(self.owed)
        super().round_begins()

    def step_begins(self, bucket: int) -> None:
        """Marks that this rank's shard changes from now on, while backward continues in this thread."""
        # Now, not when it is written: from here on, values that this thread has saved and not used yet are invalid.
        increment_version(self.flats[bucket].params)
        with self._lock:
            self._watch(bucket)
        self.being_stepped.add(bucket)

    def before_forward(self, buckets: Collection[int]) -> None:
        self._require_unstepped(buckets)
        self.wait(buckets)

    def wait(self, buckets: Collection[int]) -> None:
        """Waits as in the other form.

        It first ends, together with all ranks, a failed backward that owes their gathers. It does so even if nothing was stepped
        here, because other ranks may wait for this one. Raises PhaseError if the backward cannot be ended because it runs in
        another thread.
        """
        if not self.owed.isdisjoint(buckets) and private.graph_task_id() == -1:
            self._end_backward()
            self._require_whole(buckets)
        super().wait(buckets)

    def before_read(self) -> None:
        self._require_unstepped(self.being_stepped)
        super().before_read()

    def _require_unstepped(self, buckets: Iterable[int]) -> None:
        require(
            self.being_stepped.isdisjoint(buckets) or private.graph_task_id() == -1,
            "parameters are read in the backward that has updated them already.",
            where="ShardedOptimizer(..., in_backward=True), in a checkpointed part of the model or a function's backward",
            remedy="Let every step use a parameter as often as the first one did, or leave in_backward=True out.",
            error=PhaseError,
        )

    def _require_whole(self, buckets: Collection[int]) -> None:
        left = sorted(self.owed.intersection(buckets))
        if left:
            group = self._exchanges.group
            require_no_fault(group.member)  # raises the reason if there is one
            raise PhaseError(
                "parameters are read while a backward updates them: the shards of other ranks have not arrived.",
                where=f"ShardedOptimizer(..., in_backward=True), bucket {', '.join(map(str, left))}, rank {group.rank}",
                remedy="Read them in the thread that trains, after backward. If none runs, start again from a checkpoint.",
            )


class StepsInBackward:
    """The optimizer that steps the buckets of `module` in backward, and whether its `step()` is due.

    `end_backward` ends a backward that an exception has interrupted, if none is running. `make_whole` does so if parameters are
    partly updated. `stepper` refers to the optimizer, which has two methods for it:

    - `begin_updates(sharding)` is called when a synchronization begins; it returns True if it updates these shards, with the
      current hyper-parameters;
    - `update(bucket)` steps this rank's parts of a bucket with settled gradients: one call at a time, not in the training thread.
    """

    stepper: weakref.ref[Any]  # there is one before there is a layout

    def __init__(self, module: nn.Module, *, end_backward: Callable[[], object], make_whole: Callable[[], object]) -> None:
        self.is_due = False  # a backward has updated the parameters, and step() has not confirmed it
        self.end_backward = end_backward
        # After a failed backward that stepped nothing, no read on this rank waits, but the other ranks wait for its end.
        self._hooks = (
            module.register_forward_hook(OutputHook(module, self.forward_ends)),
            module.register_state_dict_pre_hook(ModuleHook(module, make_whole)),  # type: ignore[no-untyped-call]
        )

    def begin_round(self, sharding: Any, *, is_last: bool) -> bool:
        """Returns True if this synchronization, the last one of a step if `is_last`, steps buckets.

        It does not before the optimizer's first step in this layout.
        """
        sharding.gathers.wait_for_all()
        sharding.follow_parameters()
        stepper = self.stepper()
        steps = stepper is not None and stepper.begin_updates(sharding) and is_last
        if steps:
            sharding.gathers.owed.update(range(len(sharding.plan.buckets)))
        return steps

    def update(self, bucket: int) -> None:
        stepper = self.stepper()
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
        require(
            not self.is_due,
            f"{what} before step(), and with in_backward=True the last backward has updated the parameters.",
            where="ShardedOptimizer(..., in_backward=True)",
            remedy="Add losses up and run one backward, or run all but the last one of a step in accumulate(), "
            "or leave in_backward=True out.",
            error=PhaseError,
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@private.left_alone
def _require_confirmed(weak: "weakref.ref[StepsInBackward]", _gradients: object) -> None:
    steps = weak()
    if steps is not None:
        steps.require_confirmed("a second backward runs")
