"""Gathers parameters from the ranks that own them, during the next forward."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from undertow.errors import PhaseError
from undertow.runtime.comm.collectives import Collectives
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.sharded.awaited import AwaitedReads
from undertow.runtime.sharded.shards import FlatParams
from undertow.runtime.torch_private import private


class Gathers:
    """The gathers of a plan's buckets; a read of a parameter first waits for its bucket.

    `being_stepped` are buckets whose parameters may change during the current backward. `owed` are buckets that it still has to
    gather: of a stepped one, this rank's shards are new and the other ranks' are missing. `end_backward` ends a backward that an
    exception has interrupted.
    """

    def __init__(
        self, flats: Sequence[FlatParams], exchanges: Collectives, recorder: Recorder, *, end_backward: Callable[[], object] = int
    ) -> None:
        self.in_flight: dict[int, Handle] = {}
        self.being_stepped: set[int] = set()
        self.owed: set[int] = set()
        self._end_backward = end_backward
        self._flats = flats
        self._exchanges = exchanges
        self._recorder = recorder
        self._process = os.getpid()
        self._reads = AwaitedReads(self._before_read, {id(param) for flat in flats for param in flat.params})
        self._watched: set[int] = set()  # buckets whose parameters wait when they are read
        self._is_compiled_in = False  # code of torch.compile reads the parameters
        # `in_flight` and `_watched` must change together: other threads read them, and so do signal handlers in this one.
        self._lock = threading.RLock()

    def launch(self, bucket: int, *, step: Handle | None = None, is_read: bool = True) -> None:
        """Sends this rank's shard of a bucket to all others, and receives theirs.

        The gather starts after the `step` that updates the shard. Its result is copied to the parameters only if it `is_read`.
        """
        params = self._flats[bucket]
        params.mark_written()
        if params.flat.numel() == 0:
            self.owed.discard(bucket)
            return
        num_bytes = params.flat.numel() * params.flat.element_size()
        self._recorder.gather_launches(bucket, num_bytes=num_bytes)

        def first() -> None:
            if step is not None:
                step.wait()
                self._recorder.mark(bucket, "launched", is_gather=True)

        handle = self._exchanges.all_gather(params.flat, number=bucket, then=params.copy_out if is_read else int, first=first)
        self._recorder.launched(bucket, handle, is_gather=True)
        with self._lock:
            self.in_flight[bucket] = handle
            self._watch(bucket)
        self.owed.discard(bucket)

    def round_begins(self) -> None:
        """Resets the buckets being stepped; raises PhaseError if the last backward left parameters partly updated."""
        self.being_stepped.clear()
        self._require_whole(self.owed)
        # If no forward has waited; autograd then detects most parameters that were read too early.
        self.wait(tuple(self.in_flight))

    def steps_begin(self) -> None:
        """Marks every bucket as to be stepped and gathered in the current backward."""
        self.owed.update(range(len(self._flats)))

    def step_begins(self, bucket: int) -> None:
        """Marks that this rank's shard changes from now on, while backward continues in this thread."""
        # Now, not when it is written: from here on, values that this thread has saved and not used yet are invalid.
        self._flats[bucket].mark_written()
        with self._lock:
            self._watch(bucket)
        self.being_stepped.add(bucket)

    def require_unstepped(self, buckets: Iterable[int]) -> None:
        """Raises PhaseError if parameters of these buckets are read in the backward that has stepped them."""
        if private.graph_task_id() != -1 and not self.being_stepped.isdisjoint(buckets):
            raise PhaseError(
                "parameters are read in the backward that has updated them already.",
                where="ShardedOptimizer(..., in_backward=True), in a checkpointed part of the model or a function's backward",
                remedy="Let every step use a parameter as often as the first one did, or leave in_backward=True out.",
            )

    def make_whole(self) -> None:
        """Ends a failed backward that still owes gathers. PhaseError as for `wait`."""
        self._make_whole(self.owed)

    def wait(self, buckets: Collection[int]) -> None:
        """Waits until the parameters of these buckets have the optimizer's new values.

        It first ends, together with all ranks, a failed backward that owes their gathers. It does so even if nothing was stepped
        here, because other ranks may wait for this one. Raises PhaseError if the backward cannot be ended because it runs in
        another thread.
        """
        self._make_whole(buckets)
        for bucket in buckets:
            handle = self.in_flight.get(bucket)
            if handle is None:
                continue
            self._recorder.mark(bucket, "wait_start", is_gather=True)
            with self._exchanges.group.waiting(f"the parameters of bucket {bucket}"):
                handle.wait()
            self._recorder.mark(bucket, "wait_stop", is_gather=True)
            # Only now, so that a wait that failed fails again. Another thread may have waited too, and launched the next gather.
            with self._lock:
                if self.in_flight.get(bucket) is handle:
                    del self.in_flight[bucket]
                    # Again, so that a forward that has read too early fails in its backward.
                    self._flats[bucket].mark_written()
                    self._release(bucket)

    def wait_for_all(self) -> None:
        """Waits until nothing is in flight. PhaseError as for `wait`."""
        self.make_whole()
        self.wait(tuple(self.in_flight))
        with self._lock:  # except buckets that another thread has launched again
            for bucket in self._watched.difference(self.in_flight, self.owed):
                self._release(bucket)

    def let_go(self) -> None:
        """Ends all waits for reads, because nothing will gather the parameters."""
        for params in self._flats:
            self._reads.release(params.params)

    def is_read_unseen(self) -> bool:
        """Returns True if other tensors share the memory of parameters in flight, or compiled code guards their class."""
        return self._is_compiled_in or any(self._flats[bucket].is_referred_to for bucket in self.in_flight)

    def _watch(self, bucket: int) -> None:
        self._watched.add(bucket)
        self._reads.watch(self._flats[bucket].params)

    def _release(self, bucket: int) -> None:
        flat = self._flats[bucket]
        self._watched.discard(bucket)
        self._reads.release(flat.whole_params)
        if flat.split_params:
            coming = {id(param) for other in (*self.in_flight, *self.owed) for param in self._flats[other].split_params}
            self._reads.release(param for param in flat.split_params if id(param) not in coming)

    def _before_read(self) -> None:
        if os.getpid() != self._process:
            raise PhaseError(
                "a parameter is read in a child process, and was on its way when that was started.",
                where=f"process {os.getpid()}, a child of rank {self._exchanges.group.rank}",
                remedy="Call wait() of the model before processes are started that use it.",
            )
        self.require_unstepped(self.being_stepped)
        # Compiled code would be compiled again each time for the class of a parameter in flight.
        self._is_compiled_in |= private.is_compiling()
        self.wait_for_all()

    def _make_whole(self, buckets: Collection[int]) -> None:
        if not self.owed.isdisjoint(buckets) and private.graph_task_id() == -1:
            self._end_backward()
            self._require_whole(buckets)

    def _require_whole(self, buckets: Collection[int]) -> None:
        left = sorted(self.owed.intersection(buckets))
        if not left:
            return
        group = self._exchanges.group
        group.require_no_fault()  # raises the reason if there is one
        raise PhaseError(
            "parameters are read that a backward updates: the shards of other ranks are not there yet.",
            where=f"ShardedOptimizer(..., in_backward=True), bucket {', '.join(map(str, left))}, rank {group.rank}",
            remedy="Read them in the thread that trains, behind backward. If none runs, start again from a checkpoint.",
        )
