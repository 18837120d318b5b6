"""One fragment: its global values, its exchange, and its outer step.

On a mesh each rank of a row exchanges an equal share of the fragment over its column, and the row
gathers the means: a link between rows carries each byte once. The share of a message is followed by
a trailer, the facts of each replica.

A replica with a value that is not finite sends zeros for its parameters, and NaN, which no mean
counts, for its buffers. So nothing of it reaches another replica, whatever the format.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.buckets.facts import FactCodec, differing
from undertow.buckets.fingerprints import fingerprints
from undertow.device import Accelerator
from undertow.errors import CheckpointError, require
from undertow.mesh.local_tensors import local_tensor
from undertow.outer.facts import (
    MODULO,
    REPLICA_FACTS,
    not_finite,
    overflowed,
    replica_facts,
    require_alike,
)
from undertow.outer.fragment_layout import BufferPlace, FragmentLayout
from undertow.outer.parcels import EncodedMean, MeanInFullWidth
from undertow.outer.replicas import Replicas
from undertow.plan.layout import equal_parts, padded_numel
from undertow.ranks.dither import Rounding, Turn
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded, Parcel
from undertow.torch_private import private

_CHUNK_NUMEL = 1 << 18


@dataclass(slots=True)
class Flight:
    """An exchange on its way, or one that has arrived and is not due yet."""

    due: int  # the step after which the outer step follows
    mean: Tensor  # of the whole fragment, when it has arrived
    sent: Tensor | None = None  # this rank's share, and the trailer
    handle: Handle | None = None  # None: it has arrived
    started_s: float = 0.0
    done_s: float = 0.0

    def notes_end(self, _done: object) -> None:
        self.done_s = time.perf_counter()


class Fragment:
    """Global parameters and outer momentum of some layers, with equal bits on every rank."""

    def __init__(
        self,
        index: int,
        tensors: Mapping[str, Tensor | BufferPlace],
        replicas: Replicas,
    ) -> None:
        self.index = index
        self.flight: Flight | None = None
        self.has_stepped = False  # else its global values are the ones that it began with
        self.is_stopping = False  # a rank has asked all to stop, in the last exchange that was read
        self._is_new = True  # it has not been exchanged
        # The facts of the last exchange, if they are unread, and the end of their copy to
        # the host.
        self._said: tuple[Tensor, torch.Event | None] | None = None
        self._trained: dict[str, bool] = {}  # when the last exchange started
        self._replicas = replicas
        self.layout = layout = FragmentLayout(tensors, wire=replicas.outer.wire)
        dtype, wire, stop = layout.dtype, layout.wire, layout.numel
        block = 1 if wire is None else wire.block
        num_rows = 1 if replicas.row is None else replicas.row.num_ranks
        num_replicas = replicas.column.num_ranks
        self._facts = FactCodec.alone(
            REPLICA_FACTS, rank=replicas.column.rank, num_ranks=num_replicas
        )
        padded = padded_numel(
            stop, itemsize=dtype.itemsize, num_ranks=num_rows * num_replicas, block=block
        )
        share = padded // num_rows
        start = 0 if replicas.row is None else replicas.row.rank * share
        num_own = min(max(stop - start, 0), share)
        parts = equal_parts(num_replicas, share // num_replicas, stop=num_own)
        num_narrow = min(max(layout.narrow_numel - start, 0), num_own)
        first_buffer = max(layout.params_numel - start, 0)
        self.parcel: Parcel = MeanInFullWidth(parts, buffers=first_buffer)
        if wire is not None and num_narrow:
            is_host = replicas.column.hardware.is_host
            self.parcel = EncodedMean(
                wire, dtype, num_narrow, parts, is_host=is_host, buffers=first_buffer
            )
        self._share = slice(start, start + share)
        # The largest absolute value of each parameter that arrives as a finite one.
        wide, narrow = torch.finfo(dtype).max, math.inf if wire is None else wire.largest
        if replicas.leaves_out_together:
            # So small that no mean overflows: it would become zero at one place only. Twice as
            # small, because sums round.
            wide /= 2 * num_replicas
        self._largest = {
            name: min(wide, narrow) if place.start < layout.narrow_numel else wide
            for name, place in layout.places.items()
            if place.stop <= layout.params_numel and place.start < place.stop
        }
        self.values = torch.zeros(padded, dtype=dtype, device=layout.device)  # of all replicas
        self.momentum: Tensor | None = None  # [params_numel]
        layout.read(self.values)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank hands to an exchange."""
        return self.parcel.payload(self.values.itemsize)

    @property
    def is_read_at_end(self) -> bool:
        """True if the facts of an exchange are read when it ends; on a device, when the next one
        starts."""
        return self._replicas.column.hardware.is_host

    @property
    def mean(self) -> Tensor | None:
        """The mean of the differences that has arrived and is not due yet."""
        return None if self.flight is None else self.flight.mean

    def is_due(self, step: int) -> bool:
        return self.flight is not None and self.flight.due <= step

    def is_own(self) -> bool:
        """Returns True if the replica's own parameters have the global values."""
        params = self.layout.views(self.values[: self.layout.params_numel])
        return all(torch.equal(own.to(view.dtype), view) for own, view in params.values())

    def take(
        self,
        values: Mapping[str, Tensor],
        momentum: Mapping[str, Tensor],
        mean: Mapping[str, Tensor],
        due: int | None,
    ) -> None:
        """Takes over values by name, and an exchange that has arrived and is due after a step."""
        _fill(self.layout.named(self.values), values)
        names = [name for name, tensor in self.layout.tensors.items() if isinstance(tensor, Tensor)]
        if momentum and names and names[0] in momentum:
            self.momentum = torch.zeros_like(self.values[: self.layout.params_numel])
            _fill(self.layout.named(self.momentum), momentum)
        if due is not None:
            self.flight = Flight(due, torch.zeros_like(self.values))
            _fill(self.layout.named(self.flight.mean), mean)

    def start(self, step: int, *, due: int, num_forwards: int, is_stopping: bool) -> None:
        """Starts the exchange of the difference to the replica's own parameters.

        `is_stopping`: a signal has asked this rank to stop.
        """
        self.require_same()
        replicas, own = self._replicas, self._share
        settings = replicas.settings
        column = replicas.column
        numel = own.stop - own.start
        sent = self.values.new_zeros(numel + self._facts.numel)
        whole = sent[:numel] if replicas.row is None else torch.zeros_like(self.values)
        # No mean counts NaN: a buffer that the replica leaves alone has no part in it.
        whole[self.layout.params_numel : self.layout.numel].fill_(torch.nan)
        self.layout.read(whole)
        for name, (tensor, view) in self.layout.views(whole[: self.layout.params_numel]).items():
            # As the replica has got them: what its dtype rounds off has not been trained.
            given = self.values[self.layout.places[name]].view(view.shape).to(tensor.dtype)
            torch.sub(given, view, out=view)
        self._trained = self.layout.trained
        bad = self._not_finite(whole)
        replicas.agree_on(bad)
        if not column.hardware.is_host or bad:
            whole[: self.layout.params_numel].masked_fill_(bad > 0, 0.0)
            whole[self.layout.params_numel : self.layout.numel].masked_fill_(bad > 0, torch.nan)
        if replicas.row is not None:
            sent[:numel].copy_(whole[own])
        facts: dict[str, float | Tensor] = {
            "step": step % MODULO,
            "num_forwards": num_forwards % MODULO,
            "numel": numel % MODULO,
            "settings": settings.digest % MODULO,
            "skips": settings.skips % MODULO,
            "not_finite": bad,
            "stopping": float(is_stopping),
            "frozen": replicas.frozen.digest(self.values.device),
            "trained": zlib.crc32(repr(self._trained).encode()) % MODULO,
        }
        if self._is_new:
            facts["fingerprint"] = self._fingerprint()
        self._is_new = False
        settings.exchange_begins()
        self._facts.write_numbers(sent[numel:], facts)
        flight = self.flight = Flight(due, whole, sent)
        flight.started_s = flight.done_s = time.perf_counter()
        parcel = self.parcel
        if isinstance(parcel, Encoded):
            parcel = parcel.dithered(
                Turn(step), Rounding.OWN, rank=column.rank, device=self.values.device
            )
        with column.waiting(""):
            flight.handle = replicas.exchanges.all_reduce(
                sent[:], parcel, trailer=sent[numel:], is_alike=self._are_of_one_fragment
            )
        column.makes_call(f"fragment {self.index}")
        flight.handle.on_done(flight.notes_end)

    def _fingerprint(self) -> Tensor:
        """Returns a fingerprint of the global parameters and the outer momentum."""
        params = self.values[: self.layout.params_numel]
        of_all = [params] if self.momentum is None else [params, self.momentum]
        return fingerprints(of_all, device=params.device).sum() % MODULO

    def _not_finite(self, whole: Tensor) -> Tensor:
        """Returns 1 + the place of the first tensor with a value that does not arrive as a finite
        one, or 0.

        Infinities in a buffer that have been there all along, as in an attention mask, do not
        count. whole: the differences of parameters, and the buffers.
        """
        views = self.layout.named(whole)
        largest = private.largest_of_each([views[name] for name in self._largest])
        is_bad = {
            name: ~(value <= most)
            for (name, most), value in zip(self._largest.items(), largest, strict=True)
        }
        for name, (_, view) in self.layout.views(whole).items():
            place = self.layout.places[name]
            if place.start >= self.layout.params_numel and place.start < place.stop:
                given = self.values[place].view(view.shape)
                is_other = (view != given) & ~(view.isnan() & given.isnan())
                is_bad[name] = (~view.isfinite() & is_other).any()
        zero = torch.zeros((), dtype=torch.bool, device=whole.device)
        flags = torch.stack([is_bad.get(name, zero) for name in self.layout.places])
        first = flags.to(torch.uint8).argmax() + 1
        return torch.where(flags.any(), first, 0)

    def arrive(self) -> int | None:
        """Waits for an exchange on its way; returns the step after which its outer step is due.

        Raises the same error on every rank if replicas differ, or if one of them is not finite; the
        exchange has no effect then. None: nothing is on its way.
        """
        flight = self.flight
        if flight is None:
            return None
        if flight.handle is None or flight.sent is None:
            return flight.due
        replicas = self._replicas
        with replicas.column.waiting(f"fragment {self.index} of the replicas' differences"):
            flight.handle.wait()
        said = self._open(flight, flight.sent)
        if isinstance(self.parcel, Encoded):
            self.parcel.codings.clear()
        flight.handle = flight.sent = None
        hardware = replicas.column.hardware
        if isinstance(hardware, Accelerator):
            self._said = hardware.to_host(said), hardware.record()
            return flight.due
        self._said = said, None
        try:
            self.require_same()
        except BaseException:
            self.flight = None
            raise
        return flight.due

    def _open(self, flight: Flight, sent: Tensor) -> Tensor:
        """Completes the mean of the whole fragment; returns the facts of all ranks, and if the mean
        is not finite.

        A replica that is not finite has sent zeros: they do not count. A mean that is not finite
        becomes zero. Buffers that no replica has stay as they are.
        """
        replicas, own = self._replicas, self._share
        numel, num_replicas = own.stop - own.start, replicas.column.num_ranks
        facts = sent[numel:]
        num_left = self._facts.of(facts, "not_finite").count_nonzero()
        num_params = min(max(self.layout.params_numel - own.start, 0), numel)
        if not replicas.column.hardware.is_host or num_left:
            factor = num_replicas / (num_replicas - num_left).clamp_(min=1).double()
            sent[:num_params].mul_(factor)
        if replicas.row is not None:
            row = replicas.row
            of_row = facts.new_empty(row.num_ranks * facts.numel())
            works = [
                row.gather_parts(flight.mean, sent[:numel]),
                row.gather_parts(of_row, facts.contiguous()),
            ]
            with row.waiting(f"fragment {self.index} of the other ranks of its row"):
                for work in works:
                    row.waiter.complete(work)
            facts = of_row
        params = flight.mean[: self.layout.params_numel]
        has_overflowed = torch.zeros((), dtype=torch.bool, device=params.device)
        if params.numel():
            (largest,) = private.largest_of_each([params])
            has_overflowed = ~largest.isfinite()
        if not replicas.column.hardware.is_host or has_overflowed:
            params.masked_fill_(has_overflowed, 0.0)
        buffers = slice(self.layout.params_numel, self.layout.numel)
        of_none = flight.mean[buffers].isnan()
        flight.mean[buffers].copy_(torch.where(of_none, self.values[buffers], flight.mean[buffers]))
        return torch.cat([facts, has_overflowed.to(facts.dtype).view(1)])

    def require_same(self) -> None:
        """Reads the facts of the last exchange; of a device, when the next starts, or before anyone
        uses the global parameters.

        Raises the same error on every rank: Desync, ReplicaMismatch, PlanMismatch or
        NonFiniteGradient.
        """
        said, self._said = self._said, None
        if said is None:
            return
        values, copied = said
        if copied is not None:
            copied.synchronize()
        replicas = self._replicas
        of_ranks = replicas.of_ranks(self._facts, values[:-1])
        self.is_stopping = any(facts.stopping for facts in of_ranks.values())
        require_alike(
            of_ranks,
            replicas.settings,
            replicas.all_ranks,
            fragment=self.index,
            trained=self._trained,
        )
        if differing({rank: facts.frozen for rank, facts in of_ranks.items()}):
            step = next(iter(of_ranks.values())).step
            where = f"exchange of fragment {self.index}, after step {step}"
            replicas.frozen.tell(replicas.all_ranks, where=where)
        found = not_finite(of_ranks, list(self.layout.places), fragment=self.index)
        if found is None and values[-1]:
            found = overflowed(of_ranks, fragment=self.index)
        if found is not None:
            replicas.num_left_out += 1
            if not replicas.leaves_out:
                raise found.error()
            replicas.tell_left_out(found)

    def _are_of_one_fragment(self, told: Tensor) -> bool:
        """True if all ranks of a column exchange the same fragment after the same step."""
        of_ranks = enumerate(replica_facts(self._facts, told))
        return not differing({rank: (facts.step, facts.numel) for rank, facts in of_ranks})

    def step(self) -> None:
        """Takes the outer step, and gives the replica its share of the result."""
        flight, outer = self.flight, self._replicas.outer
        assert flight is not None  # the exchange is due
        self.arrive()
        numel = self.layout.params_numel
        is_first = self.momentum is None
        if is_first and outer.momentum:
            self.momentum = flight.mean[:numel].clone()
        is_host = self._replicas.column.hardware.is_host
        for place in self.layout.places.values():
            # A parameter that no replica has moved is frozen, and stays where it is.
            if self.momentum is not None and place.stop <= numel:
                has_moved = flight.mean[place].any()
                if not (is_host and has_moved):
                    self.momentum[place].mul_(has_moved)
        # In chunks, so that values between two operators stay in a processor's cache.
        size = _CHUNK_NUMEL if is_host else max(1, numel)
        for start in range(0, numel, size):
            chunk = slice(start, min(start + size, numel))
            update = difference = flight.mean[chunk]
            if self.momentum is not None:
                # Products and sums are apart: a fused operator may round differently at the end of
                # a vector.
                update = self.momentum[chunk]
                if not is_first:
                    update.mul_(outer.momentum).add_(difference)
                if outer.nesterov:
                    update = (update * outer.momentum).add_(difference)
            self.values[chunk].sub_(update * outer.lr)
        self.values[numel:].copy_(flight.mean[numel:])
        self.layout.write(self.values, mix=outer.mix)
        self.flight = None
        self.has_stepped = True


def _fill(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, view in views.items():
        value = local_tensor(values[name]) if name in values else None
        require(
            value is not None and value.numel() == view.numel(),
            f"the outer state has no {name!r} of shape {tuple(view.shape)}.",
            where="the global parameters of a saved state",
            remedy="Load the state into the model that has saved it.",
            error=CheckpointError,
        )
        assert value is not None
        view.copy_(value.view(view.shape))
