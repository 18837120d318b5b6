"""Which parameters of a module are trained, and whether that is still so."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from undertow.errors import ConfigError
from undertow.plan import ParamSpec
from undertow.runtime.comm.agreement import Agreement
from undertow.runtime.comm.broadcast import BufferOwner, CommonBuffers
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.gradients.storage import spec_of
from undertow.runtime.model.replaced import Replaced
from undertow.runtime.torch_private import private

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")
_stride_of = Tensor.stride
_is_trained = attrgetter("requires_grad")
_children_of = attrgetter("_modules")


class AnyOf:
    """Names that are in any of those."""

    def __init__(self, names: Sequence[Container[str]]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return any(name in names for names in self._names)


class ModuleParams:
    """The tensors of `module` that are synchronized: all but the names in `ignored`.

    Narrower parameters accumulate their gradients in `reduce_dtype`, if that is not None, until `close`: of these members, or of
    those that have taken over, which give back what the earlier ones have widened.
    """

    # Of the moment when the module was last looked at: all of its parameters, and what those are that are synchronized.
    _seen: _Census
    _kinds: list[tuple[object, ...]]

    def __init__(self, module: nn.Module, ignored: Container[str], *, reduce_dtype: str | None = None) -> None:
        # Weakly: parameters' hooks hold us, and the garbage collector does not see through those.
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._wide: torch.dtype | None = None if reduce_dtype is None else getattr(torch, reduce_dtype)
        self.gives_back = self._wide is not None
        self.replaced = Replaced()
        self._see(module)
        self.common_buffers = CommonBuffers(())
        self.common_frozen: list[tuple[str, Tensor]] = []  # when the ranks last compared what they have

    def trained(self, *, also: Collection[int] = ()) -> list[tuple[str, Tensor]]:
        """Parameters to synchronize, by name, as they are now; `has_changed` compares with this moment.

        So are those whose ids are in `also`, if they are the module's, trained or not.
        """
        module = self._module()
        assert module is not None  # a forward of it runs, or its optimizer steps
        self._see(module)
        named_params = self._named_params(module)
        if self._wide is not None:
            _accumulate_in(self._wide, named_params)
        return [(name, param) for name, param in named_params if param.requires_grad or id(param) in also]

    def trained_now(self) -> list[tuple[str, Tensor]]:
        """The same, and `has_changed` goes on comparing with an earlier moment. None where the module is gone."""
        return [(name, param) for name, param in self.named_params() if param.requires_grad]

    def name_of(self, param: Tensor) -> str | None:
        """What the parameter was called when the module was last looked at; None if it was another one's."""
        return self._names.get(id(param))

    def frozen(self) -> list[Tensor]:
        """The parameters that are not trained now."""
        return [param for _, param in self.named_params() if not param.requires_grad]

    def close(self) -> None:
        """Gradients have the dtype of their parameters again."""
        for _, param in self.named_params() if self.gives_back else ():
            if private.gradient_dtype(param) != param.dtype:
                grad, param.grad = param.grad, None
                private.set_gradient_dtype(param, param.dtype)
                param.grad = None if grad is None else grad.to(param.dtype)

    def named_params(self) -> list[tuple[str, Tensor]]:
        """Parameters as they are now, trained or not. None where the module is gone."""
        module = self._module()
        return [] if module is None else self._named_params(module)

    def left_alone(self) -> list[tuple[str, Tensor]]:
        """What is broadcast and never reduced: parameters that are frozen, and buffers."""
        module = self._module()
        assert module is not None
        return [*self._frozen(module), *((name, buffer) for name, buffer in module.named_buffers() if name not in self._ignored)]

    def unsee(self) -> None:
        """Has the module count as changed until somebody asks for its parameters again."""
        self._is_unseen = True

    def has_changed(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen or unfrozen, or has another dtype, size or device."""
        with private.as_plain_tensors():  # their values are not asked for
            return self._has_changed()

    def _has_changed(self) -> bool:
        # What torch.func.functional_call puts in their places for the time of a call are tensors, not parameters.
        is_other = self._is_unseen or self._seen.has_changed()
        return is_other and all(isinstance(it, nn.Parameter) for it in self._seen.present()) and not self._is_elsewhere()

    def _is_elsewhere(self) -> bool:
        """Whether what has changed is not ours: the experts of another group, of which this one's ranks need not know."""
        module = self._module()
        if self._is_unseen or module is None or self._seen.has_other_modules() or self._kinds_of(module) != self._kinds:
            return False
        self._seen = _Census(module)
        return True

    def has_new_of(self, tensors: set[int]) -> bool:
        """Whether one of these, by id, has come and is trained since a change that nobody has looked at."""
        # At every step of an optimizer: what is known is no reason to look.
        if self.ids >= tensors or not self.has_changed():
            return False
        return not tensors.isdisjoint({id(param) for _, param in self.trained_now()} - self.ids)

    @property
    def device(self) -> torch.device:
        """Of the first parameter that is trained; the processor where there is none."""
        return next((param.device for _, param in self.trained_now()), torch.device("cpu"))

    def specs(self, named_params: Sequence[tuple[str, Tensor]]) -> list[ParamSpec]:
        """What the planner needs to know of the parameters."""
        module = self._module()
        sparse = set() if module is None else sparse_params(module)
        return [spec_of(name, param, is_sparse=id(param) in sparse) for name, param in named_params]

    def compare(
        self, group: OwnGroup, specs: Sequence[ParamSpec], params: Sequence[Tensor], settings: dict[str, Any]
    ) -> Agreement:
        """Compares these, and what is left alone, on all ranks."""
        return Agreement(
            group,
            settings=settings,
            params=[_description(spec, param) for spec, param in zip(specs, params, strict=True)],
            others=self._described_others(),
        )

    def compare_buffers(self, group: OwnGroup) -> Agreement:
        """Compares what is left alone on all ranks."""
        return Agreement(group, settings={}, params=[], others=self._described_others())

    def ranks_agree(self) -> None:
        """All ranks have the same buffers and frozen parameters as this one now."""
        module = self._module()
        assert module is not None
        self.common_frozen = self._frozen(module)
        tables = [part._buffers for part in module.modules()]
        self.common_buffers = CommonBuffers(_buffer_owners(module, self._ignored), tables)

    def _see(self, module: nn.Module) -> None:
        with private.as_plain_tensors():
            self._seen = _Census(module)
        self._is_unseen = False
        named_params = self._named_params(module)
        self.replaced.note(named_params)
        # Of this moment: an optimizer that steps on other parameters does not concern us.
        self._names = {id(param): name for name, param in named_params}
        self.ids = self._names.keys()
        self._kinds = self._kinds_of(module)

    def _kinds_of(self, module: nn.Module) -> list[tuple[object, ...]]:
        """All that may change of the parameters to synchronize, trained or not."""
        return [
            (name, id(it), it.requires_grad, it.dtype, it.shape, it.stride(), it.device)
            for name, it in self._named_params(module)
        ]

    def _described_others(self) -> list[dict[str, Any]]:
        return [_description(spec_of(name, tensor), tensor) for name, tensor in self.left_alone()]

    def _frozen(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in self._named_params(module) if not param.requires_grad]

    def _named_params(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in module.named_parameters() if name not in self._ignored]


class _Census:
    """Every parameter of a module at one moment, quick to compare with a later one."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parameters = [module._parameters for module in modules]
        # Weakly, unlike the tables of parameters: a child may refer to its parent, and hold it for ever.
        self._modules = list(map(weakref.ref, modules))
        params = self.present()
        self._params = params  # held, so that no other one gets the same id
        self._child_ids = _ids(map(_children_of, modules))
        self._param_ids = _ids(self._parameters)
        self._are_trained = list(map(_is_trained, params))
        self._dtypes = list(map(_dtype_of, params))
        self._pointers = list(map(Tensor.data_ptr, params))
        self._shapes = list(map(_shape_of, params))
        self._strides = list(map(_stride_of, params))
        self._device = params[0].device if params else None

    def present(self) -> list[Tensor]:
        return [param for param in chain.from_iterable(map(dict.values, self._parameters)) if param is not None]

    def has_other_modules(self) -> bool:
        try:
            return _ids(map(_children_of, [module() for module in self._modules])) != self._child_ids
        except AttributeError:  # one is gone
            return True

    def has_changed(self) -> bool:
        # At every forward, for thousands of parameters: every line is a loop in C.
        if _ids(self._parameters) != self._param_ids or self.has_other_modules():
            return True
        params = self._params
        return (
            list(map(_is_trained, params)) != self._are_trained
            or list(map(_dtype_of, params)) != self._dtypes
            or self._has_reshaped()
            or (bool(params) and params[0].device != self._device)
        )

    def _has_reshaped(self) -> bool:
        pointers = list(map(Tensor.data_ptr, self._params))
        if pointers == self._pointers:  # no new data, hence none laid out otherwise; asking for shapes takes longer
            return False
        if list(map(_shape_of, self._params)) != self._shapes or list(map(_stride_of, self._params)) != self._strides:
            return True
        self._pointers = pointers
        return False


def first_change(before: Sequence[ParamSpec], after: Sequence[ParamSpec]) -> str:
    """The first parameter that differs, in words."""
    old, new = {spec.name: spec for spec in before}, {spec.name: spec for spec in after}
    for name in (*old, *new):
        if name not in new:
            return f"parameter {name!r} is not trained any more"
        if name not in old:
            return f"parameter {name!r} is trained now"
        if old[name] != new[name]:
            return f"parameter {name!r} was {_text(old[name])} and is {_text(new[name])}"
    return "a parameter was replaced"


def _text(spec: ParamSpec) -> str:
    return f"{spec.shape} {spec.dtype} on {spec.device}"


def _ids(owned: Iterable[dict[str, Any]]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, owned))))


def _buffer_owners(module: nn.Module, ignored: Container[str]) -> list[BufferOwner]:
    """Every place where a buffer to synchronize is registered."""
    return [
        BufferOwner(part._buffers, name)
        for prefix, part in module.named_modules()
        for name in part._buffers
        if f"{prefix}.{name}".removeprefix(".") not in ignored
    ]


def _accumulate_in(wide: torch.dtype, named_params: Sequence[tuple[str, Tensor]]) -> None:
    for name, param in named_params:
        wanted = wide if param.dtype.is_floating_point and param.dtype.itemsize < wide.itemsize else param.dtype
        if private.gradient_dtype(param) == wanted or (param.grad is not None and not param.requires_grad):
            continue
        if param.grad is not None:
            raise ConfigError(
                f"parameter {name!r} has a gradient of {param.grad.dtype}, and reduce_dtype asks for {wanted}.",
                where="SyncConfig(reduce_dtype=...)",
                remedy="Clear gradients with zero_grad() before the model is wrapped, and before a parameter changes its dtype.",
            )
        private.set_gradient_dtype(param, wanted)


def sparse_params(module: nn.Module) -> set[int]:
    """The parameters, by id, of layers that say that their gradients are sparse."""
    embeddings = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return {id(layer.weight) for layer in embeddings if layer.sparse}


def _description(spec: ParamSpec, tensor: Tensor) -> dict[str, Any]:
    """What must be the same on every rank."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    return {
        **spec.to_dict(),
        "device": tensor.device.type,  # its index may well differ
        "axes in memory": sorted(axes, key=lambda axis: -tensor.stride()[axis]) if tensor.layout is torch.strided else [],
    }
