"""Finds the trained parameters of a module, and detects when they change."""

import dataclasses
import weakref
import zlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undertow.device import device_of
from undertow.errors import ConfigError, PhaseError
from undertow.mesh.local_tensors import addresses, distributed, local_tensor, placement_of
from undertow.plan import ParamSpec
from undertow.ranks.agreement import BUILD_ALIKE, require_agreement
from undertow.ranks.buffers import CommonBuffers, Place, why_not_sent
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private, tables

_is_trained = attrgetter("requires_grad")
_device_and_dtype = attrgetter("device", "dtype")


class _Census:
    """A snapshot of a module's parameters that is fast to compare with a later state.

    The comparison runs at every forward, for thousands of parameters, so every line of `_now` is a
    loop in C, without Python frames.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = [part for _, part in tables.named_modules(module)]
        self._parameters = [tables.own_parameters(part).values for part in modules]
        # Weak, unlike the tables of parameters: a child may refer to its parent and keep it alive
        # forever.
        self._modules = list(map(weakref.ref, modules))
        self.params = self.present()  # held, so that no other tensor gets the same id
        # Without sparse and uninitialized ones, which only ignored parameters may be.
        self._dense = [
            param for param in self.params if param.layout is torch.strided and not is_lazy(param)
        ]
        self._distributed = distributed(self.params)
        # Of ordinary modules without a search for the method.
        is_usual = all(isinstance(tables.own_children(part), dict) for part in modules)
        self._values_of = dict.values if is_usual else methodcaller("values")
        self._then = self._now()

    def present(self) -> list[Tensor]:
        """Returns the parameters that these modules have now."""
        return [
            param for param in chain.from_iterable(map(call, self._parameters)) if param is not None
        ]

    def has_changed(self) -> bool:
        try:
            return self._now() != self._then
        except AttributeError:  # a module is gone
            return True

    def _now(self) -> tuple[Sequence[object], ...]:
        children = map(self._values_of, map(tables.own_children, map(call, self._modules)))
        return (
            list(map(id, chain.from_iterable(children))),
            list(map(id, chain.from_iterable(map(call, self._parameters)))),
            list(map(_is_trained, self.params)),
            list(map(Tensor.data_ptr, self._dense)),  # new dtypes and layouts need new data
            addresses(self._distributed) if self._distributed else (),
            # Two casts in turn may end at the same address.
            list(map(_device_and_dtype, self.params[:1])),
        )


class _Look(NamedTuple):
    """A frozen parameter at a look, to be compared with a later one.

    Not its identity or its device: offloading replaces and moves it between two steps.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def _looks(named_params: Iterable[tuple[str, Tensor]]) -> list[_Look]:
    return [
        _Look(name, param.dtype, tuple(local_tensor(param).shape)) for name, param in named_params
    ]


class ModuleParams:
    """The tensors of `module` that are synchronized: all except the names in `ignored`, and those
    `elsewhere`.

    Narrower parameters accumulate their gradients in `reduce_dtype`, if it is not None. `close`
    undoes this.
    """

    _seen: _Census  # all parameters, at the last look

    def __init__(
        self,
        module: nn.Module,
        ignored: Container[str],
        *,
        elsewhere: Container[str] = (),
        reduce_dtype: str | None = None,
    ) -> None:
        # Weak, because parameters' hooks refer to this object, and the garbage collector does not
        # see through those.
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._elsewhere = elsewhere  # names that another object of this class has
        self._wide: torch.dtype | None = (
            None if reduce_dtype is None else getattr(torch, reduce_dtype)
        )
        # By id: the number of the sharded optimizer that updates a parameter, and if one rank
        # updates all of it.
        self.updates: Mapping[int, tuple[int, bool]] = {}
        self.common_buffers = CommonBuffers()
        self.common_frozen: list[tuple[str, Tensor]] = []  # as of the last comparison between ranks
        self._frozen_then: list[_Look] | None = None  # the same; None before it
        # these, as all places of a mesh must have them, and their digest
        self.frozen_at_all_places: list[dict[str, Any]] = []
        self.digest_of_frozen = 0

    def trained(self, *, also: Collection[int] = ()) -> list[tuple[str, Tensor]]:
        """Returns the parameters to synchronize, by name, and resets `has_changed`.

        Parameters of the module whose ids are in `also` are included even if they are frozen.
        """
        named_params = self._see(self._present_module)
        if self._wide is not None:
            _accumulate_in(self._wide, named_params)
        return [
            (name, param)
            for name, param in named_params
            if param.requires_grad or id(param) in also
        ]

    def trained_now(self) -> list[tuple[str, Tensor]]:
        """Returns the trained parameters without resetting `has_changed`.

        Empty if the module is gone.
        """
        return [(name, param) for name, param in self.named_params() if param.requires_grad]

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Returns the parameters that are not trained now."""
        return [(name, param) for name, param in self.named_params() if not param.requires_grad]

    def named_params(self) -> list[tuple[str, Tensor]]:
        """Returns all current parameters, frozen ones included; empty if the module is gone."""
        module = self._module()
        return [] if module is None else self._synchronized(tables.named_parameters(module))

    def _synchronized(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [
            (name, tensor)
            for name, tensor in named
            if name not in self._ignored and name not in self._elsewhere
        ]

    @property
    def device(self) -> torch.device:
        """The first trained parameter's device; else the first parameter's; else the CPU."""
        params = chain(self.trained_now(), self.named_params())
        return next((param.device for _, param in params), torch.device("cpu"))

    def close(self) -> None:
        """Gives gradients the dtype of their parameters again."""
        with private.as_plain_tensors():  # parameters in flight may never arrive
            for _, param in () if self._wide is None else self.named_params():
                if private.gradient_dtype(param) != param.dtype:
                    grad, param.grad = param.grad, None
                    private.set_gradient_dtype(param, param.dtype)
                    param.grad = None if grad is None else grad.to(param.dtype)

    def has_changed(self) -> bool:
        """Returns True if a parameter was added, removed, replaced, frozen or unfrozen, or changed
        dtype, size or device."""
        with private.as_plain_tensors():  # this reads no values
            if not self.is_unseen and not self._seen.has_changed():
                return False
            return not self.are_lent()

    def are_lent(self) -> bool:
        """Returns True during a call of torch.func.functional_call: its replacements are tensors,
        not parameters.

        A copy or a loaded module of TorchScript has tensors too, from the first look on.
        """
        known = set(map(id, self._seen.params))
        added = (param for param in self._seen.present() if id(param) not in known)
        return not all(isinstance(param, nn.Parameter) for param in added)

    def has_any_of(self, params: set[int]) -> bool:
        """Returns True if one of these parameters, by id, is the module's, trained or not."""
        # Called by every optimizer's step; there may be an optimizer for each parameter.
        return not self.ids.isdisjoint(params) or self.has_new_of(params)

    def are_others_frozen(
        self, present: Iterable[tuple[str, Tensor]], *, planned: Collection[int]
    ) -> bool:
        """Returns True if a frozen parameter was added, removed, cast or resized since the last
        comparison between ranks.

        `present` are all parameters now; those of the plan, by id, are not looked at.
        """
        if self._frozen_then is None:
            return False
        outside = [(name, param) for name, param in present if id(param) not in planned]
        then = [
            look
            for (_, param), look in zip(self.common_frozen, self._frozen_then, strict=True)
            if id(param) not in planned
        ]
        return _looks(outside) != then

    def has_new_of(self, tensors: set[int], *, with_gradients: bool = False) -> bool:
        """Returns True if one of these (by id) was added, or unfrozen, in a change that has not
        been looked at yet; `with_gradients`, only if it has a gradient."""
        # This runs at every optimizer step: known parameters need no look.
        if self.ids >= tensors or not self.has_changed():
            return False
        new = {
            id(param)
            for _, param in self.trained_now()
            if param.grad is not None or not with_gradients
        }
        return not tensors.isdisjoint(new - self.ids)

    def specs(self, named_params: Sequence[tuple[str, Tensor]]) -> list[ParamSpec]:
        """Returns the planner's description of the parameters."""
        module = self._module()
        sparse = set() if module is None else sparse_params(module)
        found = []
        for name, param in named_params:
            spec = spec_of(name, param, is_sparse=id(param) in sparse)
            stepper, is_whole = self.updates.get(id(param), (0, False))
            if stepper or is_whole:
                spec = dataclasses.replace(spec, stepper=stepper, is_whole=is_whole)
            found.append(spec)
        return found

    def require_alike(  # noqa: PLR0913  # the two ends of a comparison
        self,
        group: OwnGroup,
        specs: Sequence[ParamSpec],
        params: Sequence[Tensor],
        settings: dict[str, Any],
        *,
        new: Sequence[str] = (),
        remedy: str = BUILD_ALIKE,
        is_of_axis: bool = False,
    ) -> None:
        """Compares these parameters and settings, frozen parameters and buffers of all ranks.

        A collective call. Raises PlanMismatch, on every rank, if ranks differ; if tensors do, the
        error has this `remedy`.
        """
        buffers = self._synchronized(tables.named_buffers(self._present_module))
        require_agreement(
            group,
            settings=settings,
            params=[_description(spec, param) for spec, param in zip(specs, params, strict=True)],
            at_all_places=[
                *described_at_all_places(specs, params),
                *_frozen_at_all_places(self.frozen()),
            ],
            others=[
                *(_description(spec_of(name, param), param) for name, param in self.frozen()),
                *(_description_of_buffer(name, buffer) for name, buffer in buffers),
            ],
            new=new,
            remedy=remedy,
            is_of_axis=is_of_axis,
        )

    def require_described_alike(self, group: OwnGroup, *, remedy: str) -> None:
        """Compares the descriptions of all parameters of all ranks, trained or not.

        A collective call. Raises PlanMismatch, on every rank, if ranks differ.
        """
        named_params = self.named_params()
        described = [_description(spec_of(name, param), param) for name, param in named_params]
        require_agreement(group, settings={}, params=described, remedy=remedy)

    def read_again(self) -> None:
        """Reads the tables of buffers, and the frozen parameters: all ranks have the same now."""
        self.common_frozen = self.frozen()
        self._frozen_then = _looks(self.common_frozen)
        self.frozen_at_all_places = _frozen_at_all_places(self.common_frozen)
        self.digest_of_frozen = zlib.crc32(repr(self.frozen_at_all_places).encode())
        places: list[Place] = []
        for prefix, part in tables.named_modules(self._present_module):
            table = tables.own_buffers(part)
            for key in table:
                name = tables.joined(prefix, key)
                if name not in self._ignored and name not in self._elsewhere:
                    places.append((table, key, name))
        self.common_buffers = CommonBuffers(places)

    @property
    def _present_module(self) -> nn.Module:
        module = self._module()
        if module is None:  # it was dropped when a backward had failed before it could follow
            raise PhaseError("nothing refers to the model any more, and it follows no change.")
        return module

    def _see(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        with private.as_plain_tensors():
            self._seen = _Census(module)
        self.is_unseen: bool = False  # if set, the module counts as changed until the next look
        named_params = self.named_params()
        # As of this look: optimizers of other parameters are not this object's concern.
        self.names = {id(param): name for name, param in named_params}
        self.ids = self.names.keys()
        return named_params


def first_change(before: Sequence[ParamSpec], after: Sequence[ParamSpec]) -> str:
    """Describes the first parameter that differs."""
    old, new = {spec.name: spec for spec in before}, {spec.name: spec for spec in after}
    for name in (*old, *new):
        if name not in new:
            return f"parameter {name!r} is no longer trained"
        if name not in old:
            return f"parameter {name!r} is trained now"
        if old[name] != new[name]:
            return f"parameter {name!r} was {_text(old[name])} and is {_text(new[name])}"
    return "a parameter was replaced, or a frozen one has changed"


def _text(spec: ParamSpec) -> str:
    return f"{spec.shape} {spec.dtype} on {spec.device}"


def _accumulate_in(wide: torch.dtype, named_params: Sequence[tuple[str, Tensor]]) -> None:
    for name, param in named_params:
        wanted = (
            wide
            if param.dtype.is_floating_point and param.dtype.itemsize < wide.itemsize
            else param.dtype
        )
        if private.gradient_dtype(param) == wanted or (
            param.grad is not None and not param.requires_grad
        ):
            continue
        if param.grad is not None:
            raise ConfigError(
                f"parameter {name!r} has a gradient of {param.grad.dtype}, and reduce_dtype asks "
                f"for {wanted}.",
                where="SyncConfig(reduce_dtype=...)",
                remedy="Clear gradients with zero_grad() before the model is wrapped, and before "
                "a parameter changes its dtype.",
            )
        private.set_gradient_dtype(param, wanted)


def sparse_params(module: nn.Module) -> set[int]:
    """Returns the ids of parameters in layers that are declared to produce sparse gradients.

    None of those on a device: NCCL cannot reduce sparse tensors, and buckets make them dense.
    """
    embeddings = (
        layer
        for _, layer in tables.named_modules(module)
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    )
    return {
        id(layer.weight)
        for layer in embeddings
        if layer.sparse and device_of(layer.weight.device).is_host
    }


def _description_of_buffer(name: str, buffer: Tensor) -> dict[str, Any]:
    kind = why_not_sent(buffer)
    return {"name": name, "shape": kind} if kind else _description(spec_of(name, buffer), buffer)


def _description(spec: ParamSpec, tensor: Tensor) -> dict[str, Any]:
    """Returns the properties of a tensor that must be the same on every rank."""
    local = local_tensor(tensor)
    axes = (
        [axis for axis, size in enumerate(spec.shape) if size > 1]
        if local.layout is torch.strided
        else []
    )
    if len(axes) > 1 and not local.is_contiguous():
        axes.sort(key=lambda axis: -local.stride()[axis])
    return {
        **spec.to_dict(),
        "device": local.device.type,  # without the index, which may differ
        "axes in memory": axes,
        **placement_of(tensor),
    }


def described_at_all_places(
    specs: Sequence[ParamSpec], params: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Returns the properties of parameters that must be the same at all places of a mesh.

    These have other parts of a parameter that is cut, and maybe of other sizes.
    """
    described = [_description(spec, param) for spec, param in zip(specs, params, strict=True)]
    for each in described:
        each["is frozen"] = False
        if "placements" in each:
            for name in ("shape", "axes in memory", "place on the mesh"):
                del each[name]
    return described


def _frozen_at_all_places(frozen: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Returns the properties of frozen parameters that must be the same at all places of a mesh.

    A program may have cut them by hand, so sizes are not compared.
    """
    return [
        {"name": name, "is frozen": True, "dtype": str(param.dtype).removeprefix("torch.")}
        for name, param in frozen
    ]


def spec_of(name: str, tensor: Tensor, *, is_sparse: bool = False) -> ParamSpec:
    """Returns the planner's description of `tensor`."""
    dtype = private.gradient_dtype(tensor)
    return ParamSpec(
        name=name,
        shape=tuple(local_tensor(tensor).shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        device=str(tensor.device),
        is_sparse=is_sparse,
        own_dtype=None if dtype == tensor.dtype else str(tensor.dtype).removeprefix("torch."),
    )
