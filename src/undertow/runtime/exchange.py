"""Reduce-scatter and all-gather made of sends and receives that are all posted at once.

For gloo: its own reduce-scatter sends as much as an all-reduce, and a single one of its all-gathers does not fill a link.
What a rank has received it adds up itself, in rank order, in fp32 where the gradients are narrower: the same bits
whatever travels together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.runtime.group import OwnGroup


class Exchanges:
    """Exchanges over `group` that are on their way; one thread completes them in the order in which they were started.

    `close` ends the thread.
    """

    def __init__(self, group: OwnGroup) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="undertow")

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, tag: int) -> Exchange:
        """Starts to write into `shard` the mean over ranks of this rank's part of `storage`.

        storage: [number of ranks * shard.numel() or more]; parts are one behind the other. What lies in `trailer` becomes its
        sum over ranks on every rank. shard: fp32 where `storage` is of 16 bits, else of its dtype. `tag` and the one after it
        tell concurrent exchanges apart.
        """
        num_ranks, rank = self._group.num_ranks, self._group.rank
        parts = list(storage[: num_ranks * shard.numel()].view(num_ranks, -1))
        received = [part if peer == rank else torch.empty_like(part) for peer, part in enumerate(parts)]
        own_trailer = storage[trailer.start : trailer.stop]
        trailers = [own_trailer if peer == rank else torch.empty_like(own_trailer) for peer in range(num_ranks)]
        works = self._post(sent=parts, received=received, tag=tag)
        works += self._post(sent=[own_trailer] * num_ranks, received=trailers, tag=tag + 1)

        def add_up() -> None:
            _sum_in_order(received, into=shard)
            shard.div_(num_ranks)
            own_trailer.copy_(_sum_in_order(trailers, into=torch.empty_like(own_trailer)))

        return self._start(works, add_up)

    def all_gather(self, flat: Tensor, *, tag: int) -> Exchange:
        """Starts to fill `flat`, of which this rank has its part, with every other rank's. [number of ranks * part]"""
        parts = list(flat.view(self._group.num_ranks, -1))
        own = parts[self._group.rank]
        return self._start(self._post(sent=[own] * len(parts), received=parts, tag=tag), lambda: None)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _post(self, *, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int) -> list[dist.Work]:
        """Sends each peer its tensor of `sent`, and receives into that of `received`."""
        group = self._group.process_group
        peers = [peer for peer in range(self._group.num_ranks) if peer != self._group.rank]
        works = [dist.irecv(received[peer], group=group, group_src=peer, tag=tag) for peer in peers]
        works += [dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in peers]
        assert None not in works  # this rank is in the group
        return works  # type: ignore[return-value]

    def _start(self, works: Sequence[dist.Work], finish: Callable[[], None]) -> Exchange:
        def complete() -> None:
            for work in works:
                work.wait()
            with torch.no_grad():
                finish()

        return Exchange(self._thread.submit(complete))


class Exchange:
    """A handle of something that Exchanges has started."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        """Returns when it is complete; raises what the backend raised."""
        self._done.result()

    def is_completed(self) -> bool:
        return self._done.done()

    def block_stream(self) -> None:
        """The same as `wait`: sends and receives of gloo know no streams."""
        self.wait()

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Calls `callback` when it is complete, from another thread or now."""
        self._done.add_done_callback(callback)


def _sum_in_order(parts: Sequence[Tensor], *, into: Tensor) -> Tensor:
    """A chain of adds: the order within torch.sum depends on the position of an element."""
    into.copy_(parts[0])
    for part in parts[1:]:
        into.add_(part)
    return into
