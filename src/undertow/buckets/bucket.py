"""The buckets of a plan in training: gradients, trailer and transfer of each.

A bucket is memory, and the `.grad` of its parameters (`gradients`). A transfer is how it travels.
Both are chosen when the bucket is made, and do not know of each other's variants.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undertow.buckets.finite import bad_slots
from undertow.buckets.gradients import BucketGradients
from undertow.buckets.memory import BucketMemory
from undertow.buckets.recorder import BucketMarks, Recorder
from undertow.buckets.reducer import Reducer
from undertow.buckets.trailer import TrailerCodec
from undertow.buckets.transfer import BucketTransfer
from undertow.errors import listed
from undertow.plan import Bucket, Plan
from undertow.ranks.dither import Turn
from undertow.ranks.handle import Handle
from undertow.schedule import OpKind
from undertow.torch_private import private


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all buckets of a plan share."""

    plan: Plan
    params: Sequence[Tensor]
    reducer: Reducer
    recorder: Recorder

    def params_of(self, spec: Bucket) -> Sequence[Tensor]:
        return tuple([self.params[index] for index in spec.params])


class LiveBucket:
    """One bucket of a plan in training. Positions count its slots.

    mark_ready, gradients.pack ──> start ──> [start_across ──>] finish ──> gradients.bind
    catch_late ──> start_late ──> finish_late           of gradients that arrived after `pack`
    pack_local ──> bind_local                           of a backward that only accumulates

    It holds the messages of the reduction under way, and records its times.
    """

    def __init__(
        self, spec: Bucket, shared: Shared, gradients: BucketGradients, transfer: BucketTransfer
    ) -> None:
        self.spec = spec
        self.gradients = gradients
        self.params = shared.params_of(spec)
        self.kind: OpKind = transfer.kind  # of `start`
        self._transfer = transfer
        group = shared.reducer.group
        divisor = 1 if transfer.sums_trailer else group.num_ranks
        self.trailer = TrailerCodec(
            spec, gradients.memory, divisor=divisor, rank=group.rank, names=group.names
        )
        self._shared = shared
        self._handles: Sequence[Handle] = ()  # of the reduction under way
        self._marks = BucketMarks(0, transfer.kind, ready=None)  # of the last reduction
        self._is_packed = False  # by a round that only accumulates
        # late gradients, on their way in a second collective
        self._late_sent: tuple[Sequence[Tensor], Sequence[Handle]] | None = None

    @cached_property
    def label(self) -> str:
        """Its name in messages."""
        params = self._shared.plan.params
        names = [repr(params[index].name) for index in dict.fromkeys(self.spec.params)]
        return f"bucket {self.spec.index} ({listed(names) or 'flags only'})"

    @property
    def memory(self) -> BucketMemory:
        return self.gradients.memory

    def mark_ready(self) -> None:
        """Called when the bucket is full, before it is packed."""
        num_bytes = self._transfer.wire_bytes
        self._marks = self._shared.recorder.ready(
            self.spec.index, num_bytes=num_bytes, kind=self.kind
        )

    def start(self, turn: Turn) -> None:
        """Sends the packed values and the trailer; `turn` is of this synchronization."""
        recorder = self._shared.recorder
        self._marks.launched = recorder.mark()
        self._handles = self._transfer.start(self.trailer, turn)
        # At the end of the backward of one model, a single bucket is waited for at once: the end of
        # its collective needs no mark.
        is_alone = len(self._shared.plan.buckets) == 1 and len(recorder.in_backward) <= 1
        if not is_alone or private.graph_task_id() == -1:
            recorder.completes(self._marks, self._handles[0])

    def start_across(self, turn: Turn) -> None:
        """Continues over the second axis of a mesh, if the strategy has one."""
        self._handles = self._transfer.start_across(self._handles, turn)
        self._shared.recorder.completes(self._marks, self._handles[0])

    def finish(self) -> None:
        """Waits until values and trailer are reduced."""
        marks, recorder = self._marks, self._shared.recorder
        marks.wait_start = recorder.mark()
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.wait()
        marks.wait_stop = recorder.mark()
        for parcel in self._transfer.encoded:
            marks.take_codings(parcel.codings)

    def is_completed(self) -> bool:
        """Returns True if `finish` would not wait."""
        return all(handle.is_completed() for handle in self._handles)

    def keep_gradients(self) -> None:
        """Keeps new gradients, which other streams have made, until the current one has packed."""
        self._keep(self.gradients.arrived())

    def pack_local(self) -> None:
        """Packs in a backward that only accumulates.

        Not if a gradient can be differentiated again (`create_graph=True`), which a copy could not.
        """
        self._is_packed = not any(
            param.grad is not None and param.grad.requires_grad for param in self.params
        )
        if self._is_packed:
            self.gradients.pack(())

    def bind_local(self) -> None:
        """Binds `.grad` to values of `pack_local`, if it has packed."""
        if self._is_packed:
            self._is_packed = False
            self.gradients.bind_local()

    def catch_late(self) -> dict[int, Tensor]:
        """Takes gradients that arrived after the bucket was packed out of `.grad`.

        Returns them by position.
        """
        late: dict[int, Tensor] = {}
        for position, param in enumerate(self.params):
            if param.grad is not None:
                late[position], param.grad = param.grad, None
        return late

    @torch.no_grad()
    def start_late(self, late: Mapping[int, Tensor]) -> None:
        """Reduces, in a second round, the gradients that arrived late on any rank.

        `late` has the gradients of this rank, by position. They count as part of no bucket's time.
        """
        self._keep(late.values())
        values = self.gradients.late_values(late)
        self._late_sent = values, self._transfer.start_late(values)

    @torch.no_grad()
    def finish_late(self, *, rescale: float) -> frozenset[int]:
        """Waits for these gradients, if there are any, and adds them times `rescale`.

        Returns the positions that are not finite on some rank, if the settings ask for that.
        """
        if self._late_sent is None:
            return frozenset()
        (values, handles), self._late_sent = self._late_sent, None
        reducer = self._shared.reducer
        with reducer.group.waiting(f"late gradients of {self.label}"):
            for handle in handles:
                handle.wait()
        # They have no trailer, but their reduced values are the same on all ranks.
        bad = self._not_finite(values)
        if rescale != 1.0:
            for value in values:
                value.mul_(rescale)
        self.gradients.add_late(values)
        return bad

    def bad_results(self) -> frozenset[int]:
        """Returns the positions that are not finite after a communication hook, if the settings ask
        for that: the hook may remember an earlier gradient that was not."""
        return self._not_finite(self.gradients.values())

    def _not_finite(self, values: Sequence[Tensor]) -> frozenset[int]:
        """Returns the positions with reduced values that are not finite, if the settings ask for
        that."""
        finite = self._shared.reducer.finite
        if finite is None:
            return frozenset()
        largest = torch.finfo(values[0].dtype).max
        bad = bad_slots(values, self.spec, largest, is_host=finite.is_host)
        return frozenset() if bad is None else frozenset(bad.nonzero().flatten().tolist())

    def release(self) -> None:
        """Frees the memory, except the parts that other code holds. The bucket is not used any
        more."""
        memory = self.memory
        self._shared.reducer.group.hardware.keep(memory.flat)  # another stream may have made it
        memory.release()

    def _keep(self, grads: Iterable[Tensor | None]) -> None:
        """Keeps gradients for the current stream."""
        hardware = self._shared.reducer.group.hardware
        for grad in grads:
            if grad is not None and grad.is_sparse:
                for part in private.parts_of_sparse(grad):
                    hardware.keep(part)
            elif grad is not None:
                hardware.keep(grad)


@contextlib.contextmanager
def gradients_aside(params: Sequence[Tensor]) -> Iterator[None]:
    """Context that sets every `.grad` to None, and restores all at its end."""
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
