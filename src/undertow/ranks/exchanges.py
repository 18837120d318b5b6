"""Exchanges of parts: reduce-scatter, all-gather and an ordered all-reduce.

Each rank decodes the messages for its part and adds them itself, in rank order, and in fp32 if the
gradients are narrower. The bits of the result do not depend on the bucket that a gradient is sent
in. A carrier sends the messages: over gloo by sends and receives, because its reduce-scatter sends
as much as an all-reduce, and its single all-gather does not fill a link.

Each exchange is a chain of stages, in the order of the text: a stage returns a `Wait` for messages,
with the next stage.

Reasons: docs/design/exchanges.md.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import TypeAlias

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.plan.layout import equal_parts
from undertow.ranks.backend_collectives import BackendCollectives
from undertow.ranks.exchange_messages import Borrowed, Gathering, Recut, Wait
from undertow.ranks.handle import Handle, Task
from undertow.ranks.parcels import Encoded, FullWidth, Parcel
from undertow.ranks.posted_messages import PostedMessages
from undertow.ranks.transport import OwnGroup

Carrier: TypeAlias = PostedMessages | BackendCollectives

_GATHER_TAG = 1 << 24  # ranks may start gathers in different orders: a number identifies each
_NUM_EXCHANGES = 1 << 16  # far more than may be in flight


class Exchanges:
    """Exchanges over the group of `carrier`. `divisor` is the divisor of means.

    The second ones over a group (`is_second`) carry the gathers; their messages have other tags.
    """

    def __init__(self, carrier: Carrier, *, divisor: float, is_second: bool = False) -> None:
        self.group = carrier.group
        self.carrier = carrier
        self._divisor = divisor
        # An exchange sends messages of up to four kinds: parts and their means, and the same of
        # the trailer.
        first = 4 * _NUM_EXCHANGES * is_second
        self._tags = cycle(range(first, first + 4 * _NUM_EXCHANGES, 4))

    def reduce_scatter(
        self,
        storage: Tensor,
        shard: Tensor,
        parcel: Parcel,
        *,
        trailer: Tensor,
        parts: Sequence[range] | None = None,
        fill: Task | None = None,
    ) -> Handle:
        """Starts to write the mean over ranks of this rank's part of `storage` into `shard`.

        The mean is the sum divided by the divisor. `fill` writes `storage` first. Every rank starts
        its reduce-scatters and all-reduces in the same order.

        storage: has the parts of `parcel`. `trailer` becomes its sum over ranks on every rank.
        shard: of `accumulation_dtype(storage.dtype)`; a shorter part leaves zeros at its end.
        parts: of ranks, if they are not those of `parcel`: each rank adds up its part of `parcel`,
            and sends the means on to the ranks whose parts have them.
        """
        carrier, rank, tag = self.carrier, self.group.rank, next(self._tags)
        num_own = len((parcel.parts if parts is None else parts)[rank])

        def post() -> Wait:
            if fill is not None:
                fill()
            recut = self._recut(shard[:num_own], parcel, parts)
            own = shard[:num_own] if recut is None else recut.sent
            summands = carrier.scatter(storage, own, parcel, tag, trailer)
            flags = summands.trailers or carrier.start_sum(trailer, tag + 2)
            if recut is not None:
                carrier.expect_recut(recut, tag + 1)
            carrier.expect_sum(flags, tag + 3)

            def add_up() -> Wait | None:
                further = carrier.share_sum(flags, tag + 3)
                parcel.add_up(summands.messages, rank, into=own)
                carrier.give_back(summands.held)
                if self._divisor != 1:
                    own.div_(self._divisor)
                if recut is not None:
                    carrier.send_recut(recut, tag + 1)
                    further.extend(recut.works)
                shard[num_own:].zero_()
                if further:
                    return Wait(further, finish)
                finish()
                return None

            def finish() -> None:
                if recut is not None:
                    carrier.give_back([recut.sent])
                carrier.finish_sum(trailer, flags)

            return Wait([*summands.works, *flags.works], add_up, is_last=recut is None)

        return carrier.start(post)

    def _recut(self, into: Tensor, parcel: Parcel, parts: Sequence[range] | None) -> Recut | None:
        """Returns the way from means of the parcel's parts, in new memory, to this rank's part."""
        if parts is None:
            return None
        rank = self.group.rank
        means = self.carrier.take(len(parcel.parts[rank]), into.dtype)
        return Recut.between(means, into, rank=rank, before=parcel.parts, after=parts)

    def all_reduce(
        self,
        tensor: Tensor,
        parcel: Parcel | None = None,
        *,
        trailer: Tensor | None = None,
        is_alike: Callable[[Tensor], bool] | None = None,
    ) -> Handle:
        """Starts to replace `tensor` by its mean over ranks, added in rank order.

        Without a parcel all of it travels in full width. `trailer` is not part of the parcel, and
        becomes its sum over ranks. With `is_alike` the trailer travels first, and `tensor` only if
        this returns True for it, as it must on all ranks or none: if a message is longer than the
        memory for it, gloo ends the process. On a device it is not asked, because the host would
        have to wait.
        """
        whole = _whole(tensor, self.group) if parcel is None else parcel
        carrier, tag = self.carrier, next(self._tags)

        def post() -> Wait:
            if trailer is None or is_alike is None or not carrier.reads_trailers:
                return self._mean(tensor, tensor, whole, self._divisor, tag, trailer)
            # One wait: threads that wait one after another may wait for each other in a circle if
            # a message depends on more than the waits of two stages.
            flags = carrier.start_sum(trailer, tag + 2, is_whole=True)

            def continue_if_alike() -> Wait | None:
                carrier.finish_sum(trailer, flags)
                if not is_alike(trailer):
                    return None
                return self._mean(tensor, tensor, whole, self._divisor, tag, None)

            return Wait(flags.works, continue_if_alike, is_last=False)

        return carrier.start(post)

    def all_reduce_behind(
        self, before: Handle, tensor: Tensor, parcel: Parcel, *, trailer: Tensor
    ) -> Handle:
        """Starts an all-reduce of a tensor that is ready when `before` is complete.

        `trailer` becomes its sum over ranks. `before` are reduce-scatters over other ranks, each
        followed by one of these, in the same order. A tensor in full width is sent in the trailer's
        dtype.
        """
        carrier, tag = self.carrier, next(self._tags)

        def post() -> Wait:
            is_summed_there, divisor = carrier.sums_itself(parcel), self._divisor
            # Sums over the inner ranks that are not divided yet may be too large for a narrow
            # format, so divide before they are encoded.
            if parcel.is_narrow or trailer.dtype == torch.float16 or is_summed_there:
                tensor.div_(divisor)
                divisor = 1
            values = tensor if parcel.is_narrow else tensor.to(trailer.dtype)
            if not is_summed_there:
                return self._mean(values, tensor, parcel, divisor, tag, trailer)
            # The backend adds up both, with one wait.
            flags, total = carrier.start_sum(trailer, tag + 2), carrier.start_sum(values, tag)

            def take_over() -> None:
                if values is not tensor:
                    tensor.copy_(values)
                    carrier.give_back([values])

            return Wait([*flags.works, *total.works], take_over)

        return carrier.start(post, before)

    def _mean(
        self,
        values: Tensor,
        into: Tensor,
        parcel: Parcel,
        divisor: float,
        tag: int,
        trailer: Tensor | None,
    ) -> Wait:
        """Sends each rank its part of `values`, whose means come back to `into`."""
        carrier, rank = self.carrier, self.group.rank
        borrowed = Borrowed(carrier.take)
        messages = parcel.messages(values, borrowed.take)
        sizes = [message.numel() for message in messages]
        # Before the exchange: the side stream waits for it, and so for the stream that makes this
        # memory. A peer returns the mean of a part only after it has received the part, so the
        # memory of the part is free by then.
        means = carrier.prepare(sizes, messages[0].dtype, into=messages)
        summands = carrier.exchange(messages, tag, trailer)
        flags = summands.trailers
        if trailer is not None and flags is None:
            flags = carrier.start_sum(trailer, tag + 2)
        carrier.receive(means, tag + 1)  # after these: an emulated link receives in order
        if flags is not None:
            carrier.expect_sum(flags, tag + 3)
        # A sum of parts needs the messages of the first wait, and any other one those of the last.
        of_flags = [] if flags is None else flags.works
        first, last = (of_flags, []) if flags is not None and flags.parts else ([], of_flags)

        def add_up() -> Wait:
            total = carrier.take(len(parcel.parts[rank]), accumulation_dtype(into.dtype))
            parcel.add_up(summands.messages, rank, into=total)
            carrier.give_back(summands.held)
            parcel.write(total.div_(divisor), rank, means.own[: sizes[rank]])
            carrier.give_back([total])
            carrier.send_to_all(means, tag + 1)
            shared = [] if flags is None else carrier.share_sum(flags, tag + 3)
            return Wait([*last, *shared, *means.works], open_means)

        def open_means() -> None:
            if trailer is not None and flags is not None:
                carrier.finish_sum(trailer, flags)
            parcel.open(means.messages, into)
            carrier.give_back(means.held)
            carrier.give_back(borrowed.tensors)

        return Wait([*first, *summands.works], add_up, is_last=False)

    def all_gather(
        self, flat: Tensor, parts: Sequence[range], *, number: int, then: Task | None = None
    ) -> Handle:
        """Starts to fill `flat`, which has this rank's part, with the parts of all ranks.

        `then` is called at the end. `number` identifies a gather among those in flight.

        flat: [elements of all parts], and room up to a multiple of the ranks
        """
        carrier, over = self.carrier, self.carrier.group_to_hold()
        tag = _GATHER_TAG + 2 * number

        def post() -> Wait:
            arriving = carrier.prepare_parts(flat, parts, over=over)
            carrier.receive(arriving, tag)

            def end() -> None:
                if then is not None:
                    then()

            return self._send_to_all(arriving, tag, end)

        return carrier.start(post)

    def all_gather_differences(
        self,
        write_difference: Callable[[Tensor], None],
        flat: Tensor,
        parcel: Encoded,
        *,
        number: int,
        then: Task,
    ) -> Handle:
        """Starts to add to each part of `flat` the difference that its rank writes, as it arrives.

        `then` is called at the end. `number` identifies a gather among those in flight.
        """
        carrier, over = self.carrier, self.carrier.group_to_hold()
        tag = _GATHER_TAG + 2 * number
        rank, sizes = self.group.rank, parcel.sizes

        def post() -> Wait:
            arriving = carrier.prepare(sizes, torch.uint8, over=over)
            carrier.receive(arriving, tag)
            difference = carrier.take(len(parcel.parts[rank]), parcel.dtype)
            write_difference(difference)
            parcel.write(difference, rank, arriving.own[: sizes[rank]])
            carrier.give_back([difference])

            def add() -> None:
                parcel.add_to(arriving.messages, flat)
                then()

            return self._send_to_all(arriving, tag, add)

        return carrier.start(post)

    def _send_to_all(self, arriving: Gathering, tag: int, then: Task) -> Wait:
        """Sends this rank's message of a gather, all of it, in pieces or in hops, and reads all
        messages with `then` at the end."""
        carrier, pieces, recut = self.carrier, arriving.pieces, arriving.recut

        def end() -> None:
            then()
            carrier.give_back(arriving.held)
            if pieces is not None:
                carrier.give_back(pieces.held)

        if arriving.hops:
            return self._hop(arriving, 0, tag, end)
        if pieces is None or recut is None:
            carrier.send_to_all(arriving, tag)
            return Wait(arriving.works, end, is_in_turn=False)

        def pass_on() -> Wait:
            carrier.send_to_all(pieces, tag + 1)
            return Wait(pieces.works, end, is_in_turn=False)

        carrier.send_recut(recut, tag)
        return Wait(recut.works, pass_on, is_last=False, is_in_turn=False)

    def _hop(self, arriving: Gathering, number: int, tag: int, end: Task) -> Wait:
        """Passes on the messages that are here, in this round and those that follow."""
        hop, is_last = arriving.hops[number], number == len(arriving.hops) - 1
        self.carrier.send_hop(arriving, hop, tag)
        if is_last:
            return Wait([*hop.works, *arriving.works], end, is_in_turn=False)
        further = partial(self._hop, arriving, number + 1, tag, end)
        return Wait(hop.works, further, is_last=False, is_in_turn=False)

    def release(self) -> None:
        """Frees the memory that is kept for later messages."""
        self.carrier.release()

    def close(self) -> None:
        """Ends the threads."""
        self.carrier.close()


def _whole(tensor: Tensor, group: OwnGroup) -> Parcel:
    """Returns a parcel of all of a tensor, in full width."""
    part_numel = -(-tensor.numel() // group.num_ranks)
    return FullWidth(equal_parts(group.num_ranks, part_numel, stop=tensor.numel()))


def exchanges_over(
    group: OwnGroup, config: SyncConfig, *, divisor: float, is_second: bool = False
) -> Exchanges:
    """Returns the fastest exchanges for the group's backend; means are divided by `divisor`."""
    require(
        group.hardware.is_host or not group.can.send_from_host,
        f"{group.backend} sends and receives from the host's memory only, and parameters are on "
        f"{group.device}.",
        where='ShardedOptimizer, reduction="ordered", or wire=...',
        remedy='Initialize torch.distributed with "nccl" to train on GPUs.',
    )
    carrier: Carrier = BackendCollectives(group, in_order=config.reduction == "ordered")
    if group.can.send_from_host:
        carrier = PostedMessages(group)
    return Exchanges(carrier, divisor=divisor, is_second=is_second)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are added in."""
    return torch.float32 if dtype.itemsize == 2 else dtype
