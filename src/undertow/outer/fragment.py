"""The memory of one fragment, its exchange, and its outer step.

    0                  narrow_numel   params_numel   numel      rows * share_numel
    | parameters of    | smaller ones | buffers      | padding  |
      a block or more

All of it is in fp32, or in the widest dtype of its tensors. On a mesh each rank of a row exchanges
an equal share over its column, and the row gathers the means: a link between rows carries each byte
once. The share of a message is followed by a trailer, the facts of each replica.

A replica with a value that is not finite sends zeros for its parameters, and NaN, which no mean
counts, for its buffers. So nothing of it reaches another replica, whatever the format.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.buckets.facts import FactCodec, differing
from undertow.buckets.fingerprints import fingerprints
from undertow.device import Accelerator
from undertow.errors import CheckpointError, require
from undertow.mesh.local_tensors import local_tensor, placed_like
from undertow.outer.facts import (
    MODULO,
    REPLICA_FACTS,
    not_finite,
    overflowed,
    replica_facts,
    require_alike,
)
from undertow.outer.parcels import EncodedMean, MeanInFullWidth
from undertow.outer.replicas import Replicas
from undertow.plan.layout import ParamSpec, equal_parts, padded_numel, slots_of
from undertow.ranks.dither import Rounding, Turn
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded, Parcel
from undertow.torch_private import private
from undertow.wire import wire_for

_CHUNK_NUMEL = 1 << 18

BufferPlace = tuple[MutableMapping[str, Tensor | None], str]  # a module's table, and the name in it


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
        self._tensors, self._replicas = dict(tensors), replicas
        local = self._local()
        num_params = sum(isinstance(tensor, Tensor) for tensor in tensors.values())
        dtype = torch.float32
        for tensor in local.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        wire = wire_for(replicas.outer.wire, str(dtype).removeprefix("torch."), dtype.itemsize)
        block = 1 if wire is None else wire.block
        # Buffers follow the parameters in full width.
        specs = [
            ParamSpec(name=name, shape=(tensor.numel(),), dtype="float32", itemsize=4)
            for name, tensor in local.items()
        ]
        slots, narrow_numel = slots_of(specs, range(num_params), block=block)
        places = {slot.param: slice(slot.start, slot.stop) for slot in slots}
        stop = max([narrow_numel, *(slot.stop for slot in slots)])
        self._params_numel = stop
        for place in range(num_params, len(specs)):
            places[place] = slice(stop, stop + specs[place].numel)
            stop += specs[place].numel
        self._places = {spec.name: places[place] for place, spec in enumerate(specs)}
        self._stop = stop
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
        num_narrow = min(max(narrow_numel - start, 0), num_own)
        first_buffer = max(self._params_numel - start, 0)
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
            name: min(wide, narrow) if place.start < narrow_numel else wide
            for name, place in self._places.items()
            if place.stop <= self._params_numel and place.start < place.stop
        }
        device = next(iter(local.values())).device
        self.values = torch.zeros(padded, dtype=dtype, device=device)  # of all replicas
        self.momentum: Tensor | None = None  # [params_numel]
        self.read(self.values)

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
    def ids(self) -> set[int]:
        """The parameters, by id."""
        return set(map(id, self._tensors.values()))

    @property
    def mean(self) -> Tensor | None:
        """The mean of the differences that has arrived and is not due yet."""
        return None if self.flight is None else self.flight.mean

    def follow(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Follows parameters that have been put in the place of others of their shape.

        Returns the parameters that they have replaced.
        """
        replaced = []
        for name, before in self._tensors.items():
            tensor = tensors.get(name)
            if tensor is None or tensor is before or not isinstance(before, Tensor):
                continue
            if tensor.shape == before.shape:
                self._tensors[name] = tensor
                replaced.append(before)
        return replaced

    def is_due(self, step: int) -> bool:
        return self.flight is not None and self.flight.due <= step

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of `flat`, which may end after the parameters, by name."""
        return {name: view for name, (_, view) in self._views(flat).items()}

    def global_copy(self, key: object) -> Tensor | None:
        """Returns a copy of a global value in the dtype of the replica's own tensor; None if it is
        not in this fragment. `key` is a parameter, or a buffer's place."""
        for name, place in self._tensors.items():
            is_same = place is key if isinstance(place, Tensor) else _are_same_place(place, key)
            if is_same:
                own, view = self._views(self.values)[name]
                value = torch.empty_like(own).copy_(view)
                whole = place if isinstance(place, Tensor) else place[0].get(place[1])
                is_complex = whole is not None and whole.is_complex()
                value = torch.view_as_complex(value) if is_complex else value
                copy: Tensor = value if whole is None else placed_like(whole, value)
                return copy
        return None

    def placed(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns copies of the tensors of `flat` by name, as DTensors on a mesh."""
        found = {}
        for name, view in self.named(flat).items():
            place = self._tensors[name]
            copy = view.clone()
            found[name] = placed_like(place, copy) if isinstance(place, Tensor) else copy
        return found

    def take(
        self,
        values: Mapping[str, Tensor],
        momentum: Mapping[str, Tensor],
        mean: Mapping[str, Tensor],
        due: int | None,
    ) -> None:
        """Takes over values by name, and an exchange that has arrived and is due after a step."""
        _fill(self.named(self.values), values)
        names = [name for name, tensor in self._tensors.items() if isinstance(tensor, Tensor)]
        if momentum and names and names[0] in momentum:
            self.momentum = torch.zeros_like(self.values[: self._params_numel])
            _fill(self.named(self.momentum), momentum)
        if due is not None:
            self.flight = Flight(due, torch.zeros_like(self.values))
            _fill(self.named(self.flight.mean), mean)

    def _local(self) -> dict[str, Tensor]:
        """Returns the replica's own tensors, as real numbers."""
        found = {}
        for name, tensor in self._tensors.items():
            own = tensor if isinstance(tensor, Tensor) else tensor[0].get(tensor[1])
            if own is not None:  # a buffer that is gone
                found[name] = _real(local_tensor(own))
        return found

    def _views(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns for each name the replica's own tensor, and its place in `flat`, which may end
        after the parameters."""
        return {
            name: (tensor, flat[self._places[name]].view(tensor.shape))
            for name, tensor in self._local().items()
            if self._places[name].stop <= flat.numel()
        }

    def read(self, into: Tensor) -> None:
        """Writes the replica's own tensors into `into`."""
        for tensor, view in self._views(into).values():
            view.copy_(tensor)

    def write(self, values: Tensor, *, mix: float = 0.0) -> None:
        """Writes `values` into the replica's parameters, which keep a share `mix` of what they had,
        and into its buffers."""
        for name, (tensor, view) in self._views(values).items():
            place = self._tensors[name]
            if mix and isinstance(place, Tensor):
                own = tensor.to(view.dtype)
                mixed = view * (1 - mix) + own * mix
                view = torch.where(own.isfinite(), mixed, view)
            if tensor.is_inference() and not isinstance(place, Tensor):
                # A forward under inference_mode has put it there; no other code may write to it.
                table, key = place
                buffer = torch.empty_like(table[key])  # type: ignore[arg-type]  # it is there
                table[key], tensor = buffer, _real(buffer)
            tensor.copy_(view)

    def start(self, step: int, *, due: int, num_forwards: int, is_stopping: bool) -> None:
        """Starts the exchange of the difference to the replica's own parameters.

        `is_stopping`: a signal has asked this rank to stop.
        """
        self.require_same()
        replicas, own = self._replicas, self._share
        column = replicas.column
        numel = own.stop - own.start
        sent = self.values.new_zeros(numel + self._facts.numel)
        whole = sent[:numel] if replicas.row is None else torch.zeros_like(self.values)
        self.read(whole)
        for name, (tensor, view) in self._views(whole[: self._params_numel]).items():
            # As the replica has got them: what its dtype rounds off has not been trained.
            given = self.values[self._places[name]].view(view.shape).to(tensor.dtype)
            torch.sub(given, view, out=view)
        bad = self._not_finite(whole)
        replicas.agree_on(bad)
        if not column.hardware.is_host or bad:
            whole[: self._params_numel].masked_fill_(bad > 0, 0.0)
            whole[self._params_numel : self._stop].masked_fill_(bad > 0, torch.nan)
        if replicas.row is not None:
            sent[:numel].copy_(whole[own])
        facts: dict[str, float | Tensor] = {
            "step": step % MODULO,
            "num_forwards": num_forwards % MODULO,
            "numel": numel % MODULO,
            "settings": replicas.settings.digest % MODULO,
            "not_finite": bad,
            "stopping": float(is_stopping),
            "frozen": replicas.frozen.digest(self.values.device),
        }
        if self._is_new:
            facts["fingerprint"] = self._fingerprint()
        self._is_new = False
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
        params = self.values[: self._params_numel]
        of_all = [params] if self.momentum is None else [params, self.momentum]
        return fingerprints(of_all, device=params.device).sum() % MODULO

    def _not_finite(self, whole: Tensor) -> Tensor:
        """Returns 1 + the place of the first tensor with a value that does not arrive as a finite
        one, or 0.

        Infinities in a buffer that have been there all along, as in an attention mask, do not
        count. whole: the differences of parameters, and the buffers.
        """
        views = self.named(whole)
        largest = private.largest_of_each([views[name] for name in self._largest])
        is_bad = {
            name: ~(value <= most)
            for (name, most), value in zip(self._largest.items(), largest, strict=True)
        }
        for name, view in views.items():
            place = self._places[name]
            if place.start >= self._params_numel and place.start < place.stop:
                given = self.values[place].view(view.shape)
                is_other = (view != given) & ~(view.isnan() & given.isnan())
                is_bad[name] = (~view.isfinite() & is_other).any()
        zero = torch.zeros((), dtype=torch.bool, device=whole.device)
        flags = torch.stack([is_bad.get(name, zero) for name in self._places])
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
        num_params = min(max(self._params_numel - own.start, 0), numel)
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
                    row.complete(work)
            facts = of_row
        params = flight.mean[: self._params_numel]
        has_overflowed = torch.zeros((), dtype=torch.bool, device=params.device)
        if params.numel():
            (largest,) = private.largest_of_each([params])
            has_overflowed = ~largest.isfinite()
        if not replicas.column.hardware.is_host or has_overflowed:
            params.masked_fill_(has_overflowed, 0.0)
        buffers = slice(self._params_numel, self._stop)
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
        require_alike(of_ranks, replicas.settings, replicas.all_ranks, fragment=self.index)
        if differing({rank: facts.frozen for rank, facts in of_ranks.items()}):
            step = next(iter(of_ranks.values())).step
            where = f"exchange of fragment {self.index}, after step {step}"
            replicas.frozen.tell(replicas.all_ranks, where=where)
        error = not_finite(of_ranks, list(self._places), fragment=self.index)
        if error is None and values[-1]:
            error = overflowed(of_ranks, fragment=self.index)
        if error is not None:
            replicas.num_left_out += 1
            if not replicas.leaves_out:
                raise error

    def _are_of_one_fragment(self, told: Tensor) -> bool:
        """True if all ranks of a column exchange the same fragment after the same step."""
        of_ranks = enumerate(replica_facts(self._facts, told))
        return not differing({rank: (facts.step, facts.numel) for rank, facts in of_ranks})

    def step(self) -> None:
        """Takes the outer step, and gives the replica its share of the result."""
        flight, outer = self.flight, self._replicas.outer
        assert flight is not None  # the exchange is due
        self.arrive()
        numel = self._params_numel
        is_first = self.momentum is None
        if is_first and outer.momentum:
            self.momentum = flight.mean[:numel].clone()
        is_host = self._replicas.column.hardware.is_host
        for place in self._places.values():
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
        self.write(self.values, mix=outer.mix)
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


def _are_same_place(place: BufferPlace, key: object) -> bool:
    table, name = place
    return isinstance(key, tuple) and key[0] is table and key[1] == name


def _real(tensor: Tensor) -> Tensor:
    """Returns a view of the values, as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
