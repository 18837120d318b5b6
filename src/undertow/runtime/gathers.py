"""Parameters on their way from the ranks that own them, under the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from undertow.runtime.collectives import Handle
from undertow.runtime.exchange import Exchanges
from undertow.runtime.recorder import Recorder
from undertow.runtime.shards import FlatParams


class Gathers:
    """The gathers of a plan's buckets; who reads a parameter waits for its bucket first."""

    def __init__(self, flats: Sequence[FlatParams], exchanges: Exchanges, recorder: Recorder) -> None:
        self.in_flight: dict[int, Handle] = {}
        self._flats = flats
        self._exchanges = exchanges
        self._recorder = recorder

    def launch(self, bucket: int) -> None:
        """Sends this rank's shard of a bucket to all others, and receives theirs."""
        params = self._flats[bucket]
        params.mark_written()
        if params.flat.numel() == 0:
            return
        self._recorder.gather_launches(bucket, num_bytes=params.flat.numel() * params.flat.element_size())
        handle = self._exchanges.all_gather(params.flat, number=bucket, then=params.copy_out)
        self._recorder.gather_launched(bucket, handle)
        self.in_flight[bucket] = handle

    def wait(self, buckets: Iterable[int]) -> None:
        """Returns when the parameters of these are what the optimizer has made of them."""
        for bucket in buckets:
            handle = self.in_flight.get(bucket)
            if handle is None:
                continue
            self._recorder.gather_wait_begins(bucket)
            handle.wait()
            self._recorder.gather_wait_ends(bucket)
            del self.in_flight[bucket]  # now, so that a wait that failed fails again
            # Also now: a forward that has read too early learns of it in its backward.
            self._flats[bucket].mark_written()

    def wait_for_all(self) -> None:
        """Returns when nothing is on its way."""
        self.wait(tuple(self.in_flight))
