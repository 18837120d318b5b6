"""Parameters on their way from the ranks that own them, under the next forward."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from undertow.errors import PhaseError
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.p2p import Collectives
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.sharded.awaited import AwaitedReads
from undertow.runtime.sharded.shards import FlatParams
from undertow.runtime.torch_private import private


class Gathers:
    """The gathers of a plan's buckets; a read of a parameter waits for its bucket first.

    `being_stepped` are those whose parameters may change while backward goes on, `owed` those that it is still to gather: of
    what is stepped this rank's shards are new, and the others' are not there. `end_backward` ends one that an exception has left.
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
        self._watched: set[int] = set()  # buckets whose parameters wait where they are read
        self._is_compiled_in = False  # parameters are read by what torch.compile makes
        # What is in flight, and what is watched, change together: other threads read, and so do handlers of signals in this one.
        self._lock = threading.RLock()

    def launch(self, bucket: int, *, step: Handle | None = None, is_read: bool = True) -> None:
        """Sends this rank's shard of a bucket to all others, and receives theirs.

        It leaves when the `step` that updates the shard is over. What comes is not for the parameters unless it `is_read`.
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
                self._recorder.gather_leaves(bucket)

        handle = self._exchanges.all_gather(params.flat, number=bucket, then=params.copy_out if is_read else int, first=first)
        self._recorder.gather_launched(bucket, handle)
        with self._lock:
            self.in_flight[bucket] = handle
            self._watch(bucket)
        self.owed.discard(bucket)

    def round_begins(self) -> None:
        """Nothing is being stepped. PhaseError where the last backward has left parameters updated in part."""
        self.being_stepped.clear()
        self._require_whole(self.owed)
        self.wait(tuple(self.in_flight))  # where no forward has: of what was read too early autograd then finds most

    def steps_begin(self) -> None:
        """The backward under way will have every bucket stepped and gathered."""
        self.owed.update(range(len(self._flats)))

    def step_begins(self, bucket: int) -> None:
        """This rank's shard is written from now on, while backward goes on in this thread."""
        # Now, and not where it is written: what this thread has saved and not used yet must not be used any more.
        self._flats[bucket].mark_written()
        with self._lock:
            self._watch(bucket)
        self.being_stepped.add(bucket)

    def require_unstepped(self, buckets: Iterable[int]) -> None:
        """PhaseError where parameters of these are read in the backward that has stepped them."""
        if private.graph_task_id() != -1 and not self.being_stepped.isdisjoint(buckets):
            raise PhaseError(
                "parameters are read in the backward that has updated them already.",
                where="ShardedOptimizer(..., eager=True), in a checkpointed part of the model or in a function's own backward",
                remedy="Let every step use a parameter as often as the first one did, or leave eager=True out.",
            )

    def make_whole(self) -> None:
        """Ends a backward that has failed with gathers owed. PhaseError as for `wait`."""
        self._make_whole(self.owed)

    def wait(self, buckets: Collection[int]) -> None:
        """Returns when the parameters of these are what the optimizer has made of them.

        A backward that has failed, and owes their gathers, is ended before, with all ranks: also where it has stepped none here,
        for other ranks may wait for this one. PhaseError where it cannot be ended: it runs, in another thread.
        """
        self._make_whole(buckets)
        for bucket in buckets:
            handle = self.in_flight.get(bucket)
            if handle is None:
                continue
            self._recorder.gather_wait_begins(bucket)
            with self._exchanges.group.waiting(f"the parameters of bucket {bucket}"):
                handle.wait()
            self._recorder.gather_wait_ends(bucket)
            # Now, so that a wait that failed fails again. Another thread may have waited as well, and launched the next one.
            with self._lock:
                if self.in_flight.get(bucket) is handle:
                    del self.in_flight[bucket]
                    # Also now: a forward that has read too early learns of it in its backward.
                    self._flats[bucket].mark_written()
                    self._release(bucket)

    def wait_for_all(self) -> None:
        """Returns when nothing is on its way. PhaseError as for `wait`."""
        self.make_whole()
        self.wait(tuple(self.in_flight))
        with self._lock:  # but for what another thread has sent again
            for bucket in self._watched.difference(self.in_flight, self.owed):
                self._release(bucket)

    def let_go(self) -> None:
        """Nothing waits any more where a parameter is read: nobody will bring it."""
        for params in self._flats:
            self._reads.release(params.params)

    def is_read_unseen(self) -> bool:
        """Whether something that is no parameter refers to the memory of one on its way, or compiled code guards its class."""
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
        self._is_compiled_in |= private.is_compiling()  # which would be compiled again for a class on its way, each time
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
        group.require_no_fault()  # which says why, where there is one
        raise PhaseError(
            "parameters are read that a backward updates: the shards of other ranks are not there yet.",
            where=f"ShardedOptimizer(..., eager=True), bucket {', '.join(map(str, left))}, rank {group.rank}",
            remedy="Read them in the thread that trains, behind backward. If none runs, start again from a checkpoint.",
        )
