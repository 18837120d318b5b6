"""The places of a replica's own tensors in the flat memory of one fragment.

    0                  narrow_numel   params_numel   numel      rows * share_numel
    | parameters of    | smaller ones | buffers      | padding  |
      a block or more

All of it is in fp32, or in the widest dtype of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.mesh.local_tensors import local_tensor, placed_like
from undertow.plan.layout import ParamSpec, slots_of
from undertow.ranks.buffers import kind_of
from undertow.wire import wire_for


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The place of a buffer that the ranks have compared: a module's table, and the name in it."""

    table: MutableMapping[str, Tensor | None]
    key: str
    kind: tuple[object, ...]  # of the buffer that the ranks have compared
    like: Tensor  # of its shape and dtype as real numbers, without memory
    device: torch.device

    @classmethod
    def of(cls, table: MutableMapping[str, Tensor | None], key: str, buffer: Tensor) -> BufferPlace:
        """Returns the place of `buffer`."""
        like = torch.empty_like(_real(local_tensor(buffer)), device="meta")
        return cls(table, key, kind_of(buffer), like, buffer.device)

    def present(self) -> Tensor | None:
        """Returns the buffer that is there now; None if it is gone, or has another shape or dtype
        than the ranks have compared: it is left alone."""
        buffer = self.table.get(self.key)
        return buffer if buffer is not None and kind_of(buffer) == self.kind else None


class FragmentLayout:
    """The replica's own tensors in a fragment, and their places in its flat memory."""

    def __init__(self, tensors: Mapping[str, Tensor | BufferPlace], *, wire: str | None) -> None:
        self.tensors = dict(tensors)
        of_all = {name: _like(tensor) for name, tensor in tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in of_all.items()}
        num_params = sum(isinstance(tensor, Tensor) for tensor in tensors.values())
        dtype = torch.float32
        for tensor in of_all.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        self.dtype = dtype
        self.wire = wire_for(wire, str(dtype).removeprefix("torch."), dtype.itemsize)
        block = 1 if self.wire is None else self.wire.block
        # Buffers follow the parameters in full width.
        specs = [
            ParamSpec(name=name, shape=(tensor.numel(),), dtype="float32", itemsize=4)
            for name, tensor in of_all.items()
        ]
        slots, self.narrow_numel = slots_of(specs, range(num_params), block=block)
        places = {slot.param: slice(slot.start, slot.stop) for slot in slots}
        stop = max([self.narrow_numel, *(slot.stop for slot in slots)])
        self.params_numel = stop
        for place in range(num_params, len(specs)):
            places[place] = slice(stop, stop + specs[place].numel)
            stop += specs[place].numel
        self.places = {spec.name: places[place] for place, spec in enumerate(specs)}
        self.numel = stop  # without padding
        self.device = next(iter(tensors.values())).device

    @property
    def ids(self) -> set[int]:
        """The parameters, by id."""
        return set(map(id, self.tensors.values()))

    @property
    def trained(self) -> dict[str, bool]:
        """The parameters by name, False for frozen ones."""
        return {
            name: tensor.requires_grad
            for name, tensor in self.tensors.items()
            if isinstance(tensor, Tensor)
        }

    def follow(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Follows parameters that have been put in the place of others of their shape.

        Returns the parameters that they have replaced.
        """
        replaced = []
        for name, before in self.tensors.items():
            tensor = tensors.get(name)
            if tensor is None or tensor is before or not isinstance(before, Tensor):
                continue
            if tensor.shape == before.shape:
                self.tensors[name] = tensor
                replaced.append(before)
        return replaced

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of `flat`, which may end after the parameters, by name: the same
        names on every rank."""
        return {
            name: flat[place].view(self._shapes[name])
            for name, place in self.places.items()
            if place.stop <= flat.numel()
        }

    def copy_of(self, key: object, values: Tensor) -> Tensor | None:
        """Returns a copy of one of `values` in the dtype of the replica's own tensor; None if it is
        not in this fragment, or has another shape or dtype now. `key` is a parameter, or a buffer's
        table and name."""
        for name, place in self.tensors.items():
            is_same = place is key if isinstance(place, Tensor) else _is_place(place, key)
            whole = _present(place) if is_same else None
            if whole is not None:
                own, view = self.views(values)[name]
                value = torch.empty_like(own).copy_(view)
                value = torch.view_as_complex(value) if whole.is_complex() else value
                copy: Tensor = placed_like(whole, value)
                return copy
        return None

    def placed(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns copies of the tensors of `flat` by name, as DTensors on a mesh."""
        found = {}
        for name, view in self.named(flat).items():
            place = self.tensors[name]
            copy = view.clone()
            found[name] = placed_like(place, copy) if isinstance(place, Tensor) else copy
        return found

    def _local(self) -> dict[str, Tensor]:
        """Returns the replica's own tensors, as real numbers."""
        found = {}
        for name, tensor in self.tensors.items():
            own = _present(tensor)
            if own is not None:  # else it is a buffer that is left alone
                found[name] = _real(local_tensor(own))
        return found

    def views(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns for each name the replica's own tensor, and its place in `flat`, which may end
        after the parameters."""
        return {
            name: (tensor, flat[self.places[name]].view(tensor.shape))
            for name, tensor in self._local().items()
            if self.places[name].stop <= flat.numel()
        }

    def read(self, into: Tensor) -> None:
        """Writes the replica's own tensors into `into`."""
        for tensor, view in self.views(into).values():
            view.copy_(tensor)

    def write(self, values: Tensor, *, mix: float = 0.0) -> None:
        """Writes `values` into the replica's parameters, which keep a share `mix` of what they had,
        and into its buffers."""
        for name, (tensor, view) in self.views(values).items():
            place = self.tensors[name]
            if mix and isinstance(place, Tensor):
                own = tensor.to(view.dtype)
                mixed = view * (1 - mix) + own * mix
                view = torch.where(own.isfinite(), mixed, view)
            if tensor.is_inference() and not isinstance(place, Tensor):
                # A forward under inference_mode has put it there; no other code may write to it.
                buffer = torch.empty_like(place.table[place.key])  # type: ignore[arg-type]
                place.table[place.key], tensor = buffer, _real(buffer)
            tensor.copy_(view)


def _is_place(place: BufferPlace, key: object) -> bool:
    return isinstance(key, tuple) and key[0] is place.table and key[1] == place.key


def _present(tensor: Tensor | BufferPlace) -> Tensor | None:
    return tensor if isinstance(tensor, Tensor) else tensor.present()


def _like(tensor: Tensor | BufferPlace) -> Tensor:
    return _real(local_tensor(tensor)) if isinstance(tensor, Tensor) else tensor.like


def _real(tensor: Tensor) -> Tensor:
    """Returns a view of the values, as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
