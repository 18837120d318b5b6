"""The tensors that DTensors hold on this rank, and the way back.

    parameter   DTensor ──> LocalParam     memory, shape and strides of this rank's part
    .grad       DTensor <── its part       set and read through LocalParam: one gradient, no copy

Buckets hold the parts, and never see a DTensor. A plain tensor stands for itself.

Reasons: docs/design/meshes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.errors import ConfigError, UndertowError
from undertow.torch_private import dtensors, private

Waiting = Callable[[str], AbstractContextManager[object]]


class LocalParam(Tensor):
    """This rank's part of a parameter that is a DTensor. Its `.grad` is the part of the
    parameter's `.grad`, which is set to a DTensor of the parameter's placements.

    It is made for the buckets of a plan, and has the parameter's memory of that moment.
    """

    param: Any  # the DTensor
    _spec: Any  # of its gradient

    # Its operations are those of a plain tensor, and so are their results.
    __torch_function__ = private.no_dispatch

    @property
    def grad(self) -> Tensor | None:
        return local_gradient(self.param)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.param.grad = None
            return
        if value.dtype != self._spec.tensor_meta.dtype:
            self._spec = dtensors.spec_for_gradient(self.param, value.dtype)
        self.param.grad = dtensors.dtensor_of(value, self._spec)

    @property
    def grad_dtype(self) -> torch.dtype:  # type: ignore[override]  # torch's can be set
        return private.gradient_dtype(self.param)

    def let_go(self) -> None:
        """Keeps shape and strides, and frees the memory: a sharded optimizer moves parameters, and
        asks if other tensors share their memory."""
        private.free_memory(self)


def local_params(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns what buckets hold in place of these parameters: a `LocalParam` for each DTensor."""
    return [_local_param(param) if dtensors.is_dtensor(param) else param for param in params]


def _local_param(param: Any) -> LocalParam:
    local = dtensors.local_of(param).detach()
    made: LocalParam = private.make_subclass(LocalParam, local, False)
    made.param = param
    made._spec = dtensors.spec_for_gradient(param, private.gradient_dtype(param))
    return made


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's present part of a DTensor, or the tensor itself."""
    tensor = parameter_of(tensor)
    return dtensors.local_of(tensor) if dtensors.is_dtensor(tensor) else tensor


def local_gradient(param: Tensor) -> Tensor | None:
    """Returns this rank's part of the gradient of a parameter; raises ConfigError if the gradient
    has other placements than the parameter."""
    grad: Any = param.grad
    if grad is None or not dtensors.is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    if grad.placements != param.placements:  # type: ignore[attr-defined]
        raise _other_placements(grad, param)
    return grad.to_local() if grad.requires_grad else dtensors.local_of(grad)


def parameter_of(local: Tensor) -> Tensor:
    """Returns the parameter that a `LocalParam` stands for, or the tensor itself."""
    return local.param if isinstance(local, LocalParam) else local


def let_go_of_memory(params: Iterable[Tensor]) -> None:
    """Frees what the `LocalParam`s among these hold of their parameters' memory."""
    for param in params:
        if isinstance(param, LocalParam):
            param.let_go()


def placed_like(param: Tensor, value: Any) -> Any:
    """Returns this rank's part of a value with a parameter's elements, such as a gradient, as a
    DTensor of the parameter's placements.

    The value itself if the parameter is a plain tensor, or if it has another shape.
    """
    if not dtensors.is_dtensor(param) or not isinstance(value, Tensor):
        return value
    if value.shape != local_tensor(param).shape:
        return value
    return dtensors.dtensor_of(value, dtensors.spec_for_gradient(param, value.dtype))


def part_like(param: Any, value: Any) -> Any:
    """Returns this rank's part of a value, the reverse of `placed_like`; raises ConfigError if it
    has other placements than the parameter."""
    if not dtensors.is_dtensor(value):
        return value
    if dtensors.is_dtensor(param) and value.shape == param.shape:
        if (value.device_mesh, value.placements) != (param.device_mesh, param.placements):
            raise ConfigError(
                f"a state has the placements {_text(value.placements)} on {_axes(value)}, and its "
                f"parameter has {_text(param.placements)} on {_axes(param)}.",
                where=f"a parameter of shape {tuple(param.shape)}",
                remedy="Load a state of this model, such as torch.distributed.checkpoint brings it "
                "into the placements of the parameters.",
            )
    elif not is_whole(value):
        raise ConfigError(
            f"a state of shape {tuple(value.shape)} has the placements {_text(value.placements)}.",
            where=f"a parameter of shape {tuple(param.shape)}",
            remedy="Load a state of this model.",
        )
    return dtensors.local_of(value)


def awaited_members(kind: type, arrive: Callable[[Any], object]) -> dict[str, Any]:
    """Returns members of a subclass of `kind` that call `arrive` with a tensor before its values
    are read by other ways than functions of torch: Python code of a DTensor reads its part."""
    return dtensors.watched_part(arrive) if dtensors.is_class_of_dtensors(kind) else {}


def alike_on_axes(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parameters that all places of the other axes hold whole, or all parameters if
    there are none.

    Values that follow from this rank's parts of them are the same at all places.
    """
    return list(filter(is_whole, params)) or list(params)


def is_whole(tensor: Tensor) -> bool:
    """Returns True if this rank has all elements of a tensor."""
    dtensor: Any = parameter_of(tensor)
    if not dtensors.is_dtensor(dtensor):
        return True
    return all(placement.is_replicate() for placement in dtensor.placements)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(map(local_tensor, tensors))


def distributed(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the DTensors among these."""
    return list(filter(dtensors.is_dtensor, tensors))


def in_same_memory(tensors: Iterable[Tensor]) -> tuple[int, int] | None:
    """Returns the indices of the first two tensors of which this rank's parts share memory."""
    places = sorted(
        (tensor.data_ptr(), tensor.nbytes, index)
        for index, tensor in enumerate(local_tensors(tensors))
        if tensor.nbytes and tensor.data_ptr()  # else it has no memory now
    )
    for (start, num_bytes, first), (following, _, second) in pairwise(places):
        if following < start + num_bytes:
            return min(first, second), max(first, second)
    return None


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the addresses of this rank's parts."""
    return [local_tensor(tensor).data_ptr() for tensor in tensors]


def placement_of(tensor: Tensor) -> dict[str, Any]:
    """Describes the placement of a DTensor as ranks of the data axis must agree on it; nothing for
    a plain tensor."""
    dtensor: Any = parameter_of(tensor)
    if not dtensors.is_dtensor(dtensor):
        return {}
    mesh = dtensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    place = zip(dtensor.placements, mesh.get_coordinate(), strict=True)
    return {
        "placements": list(map(str, dtensor.placements)),
        "shape on all ranks": list(dtensor.shape),
        "mesh": dict(zip(map(str, names), mesh.shape, strict=True)),
        # the index of the part on each axis
        "place on the mesh": [None if kind.is_replicate() else index for kind, index in place],
    }


class KeptPlacements:
    """Hooks on parameters that are DTensors: a gradient that arrives with other placements, such as
    a partial sum of a norm under sequence parallelism, is redistributed to the parameter's.

    That is a collective of the parameter's mesh, in the order in which gradients arrive there.
    `waiting(name)` is a context for it. `fail(error)` is called before an error: other ranks wait.
    """

    def __init__(self, waiting: Waiting, fail: Callable[[UndertowError], object]) -> None:
        self._waiting, self._fail = waiting, fail
        self._hooks: dict[Tensor, tuple[str, RemovableHandle]] = {}  # by identity; with the name
        # The ranks over which gradients may be redistributed, all in one order; none if each
        # parameter is cut on every axis, so that no gradient is a partial sum.
        self.axis: tuple[int, ...] = ()
        self._order: list[str] = []

    def follow(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Hooks the DTensors among these, frozen ones included, and no others."""
        wanted = {
            param: name
            for name, param in named_params
            if dtensors.is_dtensor(param) and private.may_train(param)
        }
        for param in self._hooks.keys() - wanted.keys():
            self._hooks.pop(param)[1].remove()
        for param, name in wanted.items():
            if param not in self._hooks:
                self._hooks[param] = name, private.hook_gradients(param, self._arrives)
        self.axis = tuple(sorted(set(chain.from_iterable(map(_whole_on, wanted)))))

    def take_order(self) -> list[str]:
        """Returns the names of the gradients that may have been partial sums, as they arrived since
        the last call."""
        order, self._order = self._order, []
        return order

    @private.untraced
    def _arrives(self, param: Any) -> None:
        grad, (name, _) = param.grad, self._hooks[param]
        if _may_be_partial(param):  # also if torch has added it to an earlier one, whole
            self._order.append(name)
        if grad is None:
            return
        if grad.device_mesh != param.device_mesh:
            error = _other_mesh(grad, param)
            self._fail(error)
            raise error
        if grad.placements == param.placements:
            return
        with torch.no_grad(), self._waiting(f"the gradient of {name!r}, over {_axes(param)}"):
            param.grad = grad.redistribute(param.device_mesh, param.placements)


def _may_be_partial(dtensor: Any) -> bool:
    """Returns True if a gradient of the parameter may be a partial sum on its mesh."""
    return any(placement.is_replicate() for placement in dtensor.placements)


def _whole_on(dtensor: Any) -> list[int]:
    """Returns the ranks of a parameter's mesh if a gradient of it may be a partial sum there."""
    if not _may_be_partial(dtensor):
        return []
    ranks: list[int] = dtensor.device_mesh.mesh.flatten().tolist()
    return ranks


def _axes(dtensor: Any) -> str:
    names = dtensor.device_mesh.mesh_dim_names
    return f"mesh axis {', '.join(map(repr, names))}" if names else str(dtensor.device_mesh)


def _other_placements(grad: Any, param: Any) -> ConfigError:
    return ConfigError(
        f"a gradient has the placements {_text(grad.placements)}, and its parameter has "
        f"{_text(param.placements)}.",
        where=f"a parameter of shape {tuple(param.shape)} on a mesh, whose gradient was assigned",
        remedy="Assign grad.redistribute(param.device_mesh, param.placements).",
    )


def _other_mesh(grad: Any, param: Any) -> ConfigError:
    return ConfigError(
        f"a gradient is on {_axes(grad)}, and its parameter on {_axes(param)}.",
        where=f"a parameter of shape {tuple(param.shape)}",
        remedy="Give inputs and parameters of a layer the same mesh.",
    )


def _text(placements: Sequence[object]) -> str:
    return ", ".join(map(str, placements))
