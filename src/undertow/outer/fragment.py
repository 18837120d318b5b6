"""The memory of one fragment, its exchange, and its outer step.

    0                  narrow_numel   params_numel   numel      rows * share_numel
    | parameters of    | smaller ones | buffers      | padding  |
      a block or more

All of it is in fp32, or in the widest dtype of its tensors. On a mesh each rank of a row exchanges
an equal share over its column, and the row gathers the means: a link between rows carries each byte
once. The share of a message is followed by a trailer, three numbers of each replica: its step, the
forwards that it has run, and in the first exchange a fingerprint of the global parameters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.config import Outer
from undertow.device import Accelerator
from undertow.errors import CheckpointError, Desync, ReplicaMismatch, listed, require
from undertow.plan.layout import ParamSpec, equal_parts, padded_numel, slots_of
from undertow.ranks.dither import Stage, Turn
from undertow.ranks.exchanges import Collectives
from undertow.ranks.parcels import Encoded, FullWidth, Parcel
from undertow.ranks.transport import Handle, OwnGroup
from undertow.wire import wire_for

_FACTS = 3  # numbers of each replica in a trailer
_MODULO = 1 << 20  # steps that fp32 counts exactly
_CHUNK_NUMEL = 1 << 18

BufferPlace = tuple[MutableMapping[str, Tensor | None], str]  # a module's table, and the name in it


class Replicas:
    """The groups of an outer synchronization: `column` has one rank of each replica, and `row` is
    this rank's replica if it has several ranks."""

    def __init__(
        self, all_ranks: OwnGroup, exchanges: Collectives, row: OwnGroup | None, outer: Outer
    ) -> None:
        self.all_ranks, self.exchanges, self.row, self.outer = all_ranks, exchanges, row, outer
        self.column = exchanges.group

    def close(self) -> None:
        self.exchanges.close()
        self.column.close()
        if self.row is not None:
            self.row.close()


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
        self._is_new = True  # it has not been exchanged
        # Facts of the last exchange that are not read yet, and the end of their copy to the host.
        self._said: tuple[Tensor, torch.Event | None] | None = None
        self._tensors, self._replicas = tensors, replicas
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
        num_rows = 1 if replicas.row is None else replicas.row.num_ranks
        num_replicas = replicas.column.num_ranks
        padded = padded_numel(
            stop, itemsize=dtype.itemsize, num_ranks=num_rows * num_replicas, block=block
        )
        share = padded // num_rows
        start = 0 if replicas.row is None else replicas.row.rank * share
        num_own = min(max(stop - start, 0), share)
        parts = equal_parts(num_replicas, share // num_replicas, stop=num_own)
        num_narrow = min(max(narrow_numel - start, 0), num_own)
        self.parcel: Parcel = FullWidth(parts)
        if wire is not None and num_narrow:
            is_host = replicas.column.hardware.is_host
            self.parcel = Encoded(wire, dtype, num_narrow, parts, is_host=is_host)
        self._share = slice(start, start + share)
        device = next(iter(local.values())).device
        self.values = torch.zeros(padded, dtype=dtype, device=device)  # of all replicas
        self.momentum: Tensor | None = None  # [params_numel]
        self.read(self.values)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank hands to an exchange."""
        return self.parcel.payload(self.values.itemsize)

    @property
    def ids(self) -> set[int]:
        """The parameters, by id."""
        return set(map(id, self._tensors.values()))

    @property
    def mean(self) -> Tensor | None:
        """The mean of the differences that has arrived and is not due yet."""
        return None if self.flight is None else self.flight.mean

    def is_due(self, step: int) -> bool:
        return self.flight is not None and self.flight.due <= step

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of `flat`, which may end after the parameters, by name."""
        return {name: view for name, (_, view) in self._views(flat).items()}

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
                found[name] = _real(own)
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
            if mix and isinstance(self._tensors[name], Tensor):
                view = view * (1 - mix) + tensor.to(view.dtype) * mix
            tensor.copy_(view)

    def start(self, step: int, *, due: int, num_forwards: int) -> None:
        """Starts the exchange of the difference to the replica's own parameters."""
        self.require_same()
        replicas, own = self._replicas, self._share
        column = replicas.column
        numel = own.stop - own.start
        sent = self.values.new_zeros(numel + _FACTS * column.num_ranks)
        whole = sent[:numel] if replicas.row is None else torch.zeros_like(self.values)
        self.read(whole)
        for name, (tensor, view) in self._views(whole[: self._params_numel]).items():
            # As the replica has got them: what its dtype rounds off has not been trained.
            given = self.values[self._places[name]].view(view.shape).to(tensor.dtype)
            torch.sub(given, view, out=view)
        if replicas.row is not None:
            sent[:numel].copy_(whole[own])
        facts = sent[numel:].view(column.num_ranks, _FACTS)[column.rank]
        facts[0], facts[1] = step % _MODULO, num_forwards % _MODULO
        if self._is_new:
            params = self.values[: self._params_numel]
            facts[2].copy_(fingerprints([params], device=params.device)[0] % _MODULO)
        self._is_new = False
        flight = self.flight = Flight(due, whole, sent)
        flight.started_s = flight.done_s = time.perf_counter()
        parcel = self.parcel
        if isinstance(parcel, Encoded):
            parcel = parcel.dithered(
                Turn(step), Stage.OWN, rank=column.rank, device=self.values.device
            )
        with column.waiting(""):
            flight.handle = replicas.exchanges.all_reduce(sent[:], parcel, trailer=sent[numel:])
        flight.handle.on_done(flight.notes_end)

    def arrive(self) -> int | None:
        """Waits for an exchange on its way; returns the step after which its outer step is due.

        Raises Desync on every rank if replicas are in different steps. None: nothing is on its way.
        """
        flight, replicas, own = self.flight, self._replicas, self._share
        if flight is None:
            return None
        if flight.handle is None or flight.sent is None:
            return flight.due
        numel = own.stop - own.start
        with replicas.column.waiting(f"fragment {self.index} of the replicas' differences"):
            flight.handle.wait()
        if replicas.row is not None:
            work = replicas.row.gather_parts(flight.mean, flight.sent[:numel])
            with replicas.row.waiting(f"fragment {self.index} of the other ranks of its row"):
                replicas.row.complete(work)
        if isinstance(self.parcel, Encoded):
            self.parcel.codings.clear()
        facts = flight.sent[numel:].view(-1, _FACTS)
        flight.handle = flight.sent = None
        hardware = replicas.column.hardware
        if isinstance(hardware, Accelerator):
            self._said = hardware.to_host(facts), hardware.record()
        else:
            self._said = facts, None
            self.require_same()
        return flight.due

    def require_same(self) -> None:
        """Reads what replicas have said in the last exchange; of a device, when the next starts, or
        before anyone uses the global parameters.

        Raises Desync or ReplicaMismatch on every rank.
        """
        said, self._said = self._said, None
        if said is not None:
            facts, copied = said
            if copied is not None:
                copied.synchronize()
            _require_same(facts.long().tolist(), self._replicas.column, fragment=self.index)

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


def _require_same(facts: Sequence[Sequence[int]], column: OwnGroup, *, fragment: int) -> None:
    """Raises Desync if replicas are in other steps, or have run other numbers of forwards, and
    ReplicaMismatch if their global parameters differ."""
    where = f"exchange of fragment {fragment}"
    of_ranks = dict(zip(column.user.ranks, (tuple(row[:2]) for row in facts), strict=True))
    named = _others(of_ranks)
    if not named:
        values = dict(zip(column.user.ranks, (row[2] for row in facts), strict=True))
        differing = _others(values)
        require(
            not differing,
            f"rank {differing} has other global parameters than the other replicas.",
            where=where,
            remedy="Load the same parameters on every rank, or call broadcast_parameters() after.",
            error=ReplicaMismatch,
        )
        return
    texts = [
        f"rank {rank}: {num_forwards} forwards before step {step}"
        for rank, (step, num_forwards) in of_ranks.items()
    ]
    raise Desync(
        f"rank {named} has stepped a different number of times than the "
        "other replicas for the forwards that it ran.",
        where=f"{where}: {listed(texts, most=8)}",
        remedy="Look for a step, or a forward outside of accumulate(), that only some ranks run.",
    )


def _others(of_ranks: Mapping[int, object]) -> str:
    """Returns the ranks that do not have what most ranks have."""
    (common, _), *_rest = Counter(of_ranks.values()).most_common()
    return ", ".join(str(rank) for rank, found in of_ranks.items() if found != common)


def _fill(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, view in views.items():
        require(
            name in values and values[name].numel() == view.numel(),
            f"the outer state has no {name!r} of shape {tuple(view.shape)}.",
            where="the global parameters of a saved state",
            remedy="Load the state into the model that has saved it.",
            error=CheckpointError,
        )
        view.copy_(values[name].view(view.shape))


def _real(tensor: Tensor) -> Tensor:
    """Returns a view of the values, as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
