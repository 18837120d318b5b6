"""A plan ready to run: its buckets, and the trailers that are on their way.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undertow.buckets.bucket import BucketLayout, LiveBucket
from undertow.buckets.facts import Reading, Snapshot
from undertow.buckets.recorder import Recorder
from undertow.buckets.transfer import Reducer
from undertow.engine.measuring import Present
from undertow.engine.params import described_at_all_places
from undertow.engine.step_settings import Settings
from undertow.mesh.local_tensors import alike_on_axes, local_tensors
from undertow.plan import Plan
from undertow.ranks.dither import Rotation
from undertow.ranks.transport import OwnGroup
from undertow.schedule import Op, OpKind, Strategy, lower_data_parallel
from undertow.torch_private import private
from undertow.wire import WIRES

_LEAST_CUT_BYTES = 1024 * 1024  # torch cuts no smaller graphs
_NUM_ROUNDS_READ_AT_ONCE = 2  # on a device, where the host waits for it
_UNOBSERVED = nullcontext()


class CompiledPlan:
    """A plan over `params`, ready to run; `generation` counts the plans of an engine.

    `recorded_as` is the number of its steps in the record: a plan that comes back after a trial has
    the one that it had before.

    It takes the place of the plan `before`: trailers on their way pass to it, and memory for
    messages is freed, because others have other sizes.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        reducer: Reducer,
        recorder: Recorder,
        *,
        before: CompiledPlan | None = None,
        layout: BucketLayout | None = None,
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        # of this moment, as buckets are laid out
        self.strides = tuple(param.stride() for param in params)
        self.reducer, self.recorder = reducer, recorder
        self.layout = BucketLayout(reducer.group) if layout is None else layout
        self.generation = self.recorded_as = 0
        # The plan that this one replaced, and the number of its recorded steps.
        self._left: tuple[Plan, int] | None = None
        # Trailers on their way from a device to the host, with the settings that each one compares.
        self.snapshots: list[tuple[Snapshot, Settings]] = []
        is_host = reducer.group.hardware.is_host
        self.turns: Rotation = Rotation(is_host=is_host) if before is None else before.turns
        if before is not None:
            self.generation = before.generation + 1
            number = before.recorded_before(plan, reducer)
            self.recorded_as = self.generation if number is None else number
            self._left = before.plan, before.recorded_as
            self.snapshots += before.snapshots
            before.release_messages()
        self.is_profiling = False  # torch's profiler runs
        self.has_formats = any(plan.wires)
        is_dithered = any(wire and WIRES[wire].is_dithered for wire in plan.wires)
        # The parameters that give each round its dither.
        self._dithered_by = alike_on_axes(params) if is_dithered else []
        self._num_rounds = 0

    @cached_property
    def buckets(self) -> Sequence[LiveBucket]:
        """Constructed at the first access: a group of one rank never needs them."""
        return self.layout.live_buckets(self.plan, self.params, self.reducer, self.recorder)

    @cached_property
    def group(self) -> OwnGroup:
        """The ranks that its reductions wait for.

        With shards it may be over another clone than `reducer.group`, which late gradients use.
        """
        return self.layout.group

    @cached_property
    def strategy(self) -> Strategy:
        return self.layout.strategy

    @cached_property
    def cut_bytes(self) -> int:
        """The bucket size at which torch.compile cuts graphs, or 0 if they stay whole."""
        largest = max((bucket.num_bytes for bucket in self.plan.buckets), default=0)
        return largest if self.plan.num_ranks > 1 and largest >= _LEAST_CUT_BYTES else 0

    @cached_property
    def at_all_places(self) -> list[dict[str, Any]]:
        """Describes the parameters as all places of a mesh must have them."""
        with private.as_plain_tensors():  # parameters may be on their way, and this reads no values
            return described_at_all_places(self.plan.params, self.params)

    @cached_property
    def digest_at_all_places(self) -> int:
        return zlib.crc32(repr(self.at_all_places).encode())

    @property
    def present(self) -> Present:
        return Present(
            plan=self.plan, generation=self.recorded_as, has_shards=self.strategy.gather is not None
        )

    def recorded_before(self, plan: Plan, reducer: Reducer) -> int | None:
        """Returns the number of recorded steps under `plan`, or None.

        It has one if it is this plan, or the one before, as after a trial.
        """
        if reducer is not self.reducer:
            return None
        present = self.plan, self.recorded_as
        known = (present, self._left) if self._left is not None else (present,)
        return next((number for earlier, number in known if earlier == plan), None)

    def round_begins(self, *, is_synchronized: bool) -> list[tuple[Reading, Settings]]:
        """Called when a round starts.

        Returns the contents of earlier trailers that have reached the host since, once, with the
        settings that they compare. Only a synchronization takes them, because an accumulation draws
        no conclusions.
        """
        self.is_profiling = private.is_profiling()
        self._num_rounds += is_synchronized
        if self.reducer.hook is not None:
            self.reducer.hook.begin_round()
        if self.reducer.finite is not None:
            self.reducer.finite.begin()
        if self.strategy.gather is not None:
            # In case no forward has. Autograd detects most parameters that were read too early.
            self.layout.wait_for_parameters()
        if is_synchronized and self.has_formats:
            if self._dithered_by:
                self.turns.advance(local_tensors(self._dithered_by))
            self.reducer.lost.begin()
        if not self.snapshots or not is_synchronized:
            return []
        there = [each for each in self.snapshots if each[0].is_there()]
        self.snapshots = [each for each in self.snapshots if each not in there]
        read = [(snapshot.read(), settings) for snapshot, settings in there]
        return [(reading, settings) for reading, settings in read if reading is not None]

    @property
    def is_learning(self) -> bool:
        """True in the first rounds, whose trailers are read at once on devices too.

        They show late arrivals, which the following rounds expect.
        """
        return self._num_rounds <= _NUM_ROUNDS_READ_AT_ONCE

    def observed(self, kind: OpKind, bucket: LiveBucket) -> AbstractContextManager[object]:
        """Context around an op that packs, sends, binds or gathers: tests can watch ops, and
        torch's profiler shows them."""
        if self.recorder.observer is None and not self.is_profiling:
            return _UNOBSERVED
        return self._observed(self._ops[kind, bucket.spec.index])

    @contextmanager
    def _observed(self, op: Op) -> Iterator[None]:
        observer = self.recorder.observer
        with (
            torch.profiler.record_function(f"undertow.{op.label}")
            if self.is_profiling
            else _UNOBSERVED,
            _UNOBSERVED if observer is None else observer(op),
        ):
            yield

    @cached_property
    def _ops(self) -> dict[tuple[OpKind, int | None], Op]:
        """The ops of the schedule, which is data for reports, tests and the simulator: buckets
        leave by a counter (`Round`), and a test compares the two orders."""
        overlap = self.reducer.config.overlap
        schedule = lower_data_parallel(len(self.plan.buckets), self.strategy, overlap=overlap)
        return {(op.kind, op.bucket): op for op in schedule.ops}

    def is_completed(self) -> bool:
        """Returns True if the collectives of all buckets are complete."""
        return all(bucket.is_completed() for bucket in self.buckets)

    def written(self, params: Collection[int]) -> set[int]:
        """Returns the `params` whose `.grad` was written without a gradient from autograd."""
        if not params:
            return set()
        try:
            return {
                param
                for bucket in self.buckets
                for position, param in enumerate(bucket.spec.params)
                if param in params and bucket.gradients.is_written(position)
            }
        except BaseException as error:
            self.group.watch.fail(error)  # others wait for the buckets
            raise

    def has_result(self) -> bool:
        """Returns True if some `.grad` still holds the result of a round, changed or not, and was
        not zeroed."""
        return any(bucket.gradients.has_result() for bucket in self.buckets)

    def release_messages(self) -> None:
        """Frees the memory that exchanges keep for later messages."""
        for exchanges in (self.reducer.exchanges, *self.layout.exchanges):
            if exchanges is not None:
                exchanges.release()

    def let_go(self) -> None:
        """Frees the buckets. The next plan's buckets then reuse the pages of the process. If memory
        is too small for them, this plan is gone too, and training ends.
        """
        made = self.__dict__.get("buckets", ())  # empty if there was no memory for them
        for bucket in made:
            bucket.gradients.release()
