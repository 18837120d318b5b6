"""The buckets of a plan in training.

BucketLayout ──> LiveBucket    gradients   its memory, and the `.grad` of its parameters
                               transfer    how it travels
                               trailer     the facts that travel with it

The first two are chosen when the bucket is made, and the trailer's codec follows from them.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from undertow.buckets.finite import bad_slots
from undertow.buckets.gradients import BucketGradients, FlatGradients
from undertow.buckets.recorder import BucketMarks, Recorder
from undertow.buckets.sparse import SparseGradients
from undertow.buckets.transfer import BucketTransfer, Reducer, transfer_of
from undertow.errors import listed
from undertow.plan import Plan
from undertow.ranks.dither import Turn
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.schedule import DDP, OpKind, Strategy
from undertow.torch_private import private


class LiveBucket:
    """One bucket of a plan in training. Positions count its slots.

    mark_ready, gradients.pack ──> start ──> [start_across ──>] finish ──> gradients.bind
    catch_late ──> start_late ──> finish_late           of gradients that arrived after `pack`
    pack_local ──> bind_local                           of a backward that only accumulates

    It holds the messages of the reduction under way, and records its times.
    """

    def __init__(
        self, plan: Plan, gradients: BucketGradients, transfer: BucketTransfer, recorder: Recorder
    ) -> None:
        self.spec = transfer.spec
        self.gradients = gradients
        self.trailer = transfer.trailer
        self.kind: OpKind = transfer.kind  # of `start`
        self._plan, self._transfer, self._recorder = plan, transfer, recorder
        self._reducer = transfer.reducer
        self._handles: Sequence[Handle] = ()  # of the reduction under way
        self._marks = BucketMarks(0, transfer.kind, ready=None)  # of the last reduction
        self._is_packed = False  # by a round that only accumulates
        # late gradients, on their way in a second collective
        self._late_sent: tuple[Sequence[Tensor], Sequence[Handle]] | None = None

    @cached_property
    def label(self) -> str:
        """Its name in messages."""
        params = self._plan.params
        names = [repr(params[index].name) for index in dict.fromkeys(self.spec.params)]
        return f"bucket {self.spec.index} ({listed(names) or 'flags only'})"

    def mark_ready(self) -> None:
        """Called when the bucket is full, before it is packed."""
        num_bytes = self._transfer.wire_bytes
        self._marks = self._recorder.ready(self.spec.index, num_bytes=num_bytes, kind=self.kind)

    def start(self, turn: Turn) -> None:
        """Sends the packed values and the trailer; `turn` is of this synchronization."""
        recorder = self._recorder
        self._marks.launched = recorder.mark()
        self._handles = self._transfer.start(turn)
        # At the end of the backward of one model, a single bucket is waited for at once: the end of
        # its collective needs no mark.
        is_alone = len(self._plan.buckets) == 1 and len(recorder.in_backward) <= 1
        if not is_alone or private.graph_task_id() == -1:
            recorder.completes(self._marks, self._handles[0])

    def start_across(self, turn: Turn) -> None:
        """Continues over the second axis of a mesh, if the strategy has one."""
        self._handles = self._transfer.start_across(self._handles, turn)
        self._recorder.completes(self._marks, self._handles[0])

    def finish(self) -> None:
        """Waits until values and trailer are reduced."""
        marks, recorder = self._marks, self._recorder
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
            param.grad is not None and param.grad.requires_grad for param in self.gradients.params
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
        for position, param in enumerate(self.gradients.params):
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
        with self._reducer.group.waiting(f"late gradients of {self.label}"):
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
        finite = self._reducer.finite
        if finite is None:
            return frozenset()
        largest = torch.finfo(values[0].dtype).max
        bad = bad_slots(values, self.spec, largest, is_host=finite.is_host)
        return frozenset() if bad is None else frozenset(bad.nonzero().flatten().tolist())

    def _keep(self, grads: Iterable[Tensor | None]) -> None:
        """Keeps gradients for the current stream."""
        hardware = self._reducer.group.hardware
        for grad in grads:
            if grad is not None and grad.is_sparse:
                for part in private.parts_of_sparse(grad):
                    hardware.keep(part)
            elif grad is not None:
                hardware.keep(grad)


class BucketLayout:
    """The layout of a plan whose parameters and reduced gradients lie whole on every rank of
    `group`, the ranks that reductions wait for.

    `Sharding` is the layout of shards.
    """

    strategy: Strategy = DDP
    # that reduce or gather its shards
    exchanges: tuple[Exchanges, ...] = ()

    def __init__(self, group: OwnGroup) -> None:
        self.group = group

    @property
    def holds_shards(self) -> bool:
        """True if ranks have shards of a gradient that was not set to zero."""
        return False

    def live_buckets(
        self, plan: Plan, params: Sequence[Tensor], reducer: Reducer, recorder: Recorder
    ) -> Sequence[LiveBucket]:
        """Returns the buckets of a plan over `params`, in its order."""
        buckets: list[LiveBucket] = []
        for spec in plan.buckets:
            own = [params[index] for index in spec.params]
            gradients: FlatGradients | SparseGradients
            gradients = SparseGradients(spec, own) if spec.is_sparse else FlatGradients(spec, own)
            transfer = transfer_of(spec, plan, gradients, reducer)
            buckets.append(LiveBucket(plan, gradients, transfer, recorder))
        return buckets

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that an optimizer has updated have arrived."""

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """


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
