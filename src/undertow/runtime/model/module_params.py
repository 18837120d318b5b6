"""Finds the trained parameters of a module, and detects when they change."""

import warnings
import weakref
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import chain
from operator import attrgetter, call, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from undertow.errors import ConfigError, PhaseError, require
from undertow.plan import ParamSpec
from undertow.runtime.comm.facts import Agreement, CommonBuffers, Place, why_not_sent
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.torch_private import private, tables

_children_of = attrgetter("_modules")
_is_trained = attrgetter("requires_grad")
_NUM_STEPS = 10  # steps of an optimizer that holds some old parameters; by then another one would have stepped on the new ones
_REMEDY = "Make the optimizer after the change, or give it the new parameters by add_param_group()."
_Named = Sequence[tuple[str, Tensor]]


class AnyOf:
    """Names that are in any of the containers."""

    def __init__(self, names: Sequence[Container[str]]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return any(name in names for names in self._names)


class _Census:
    """A snapshot of a module's parameters that is fast to compare with a later state."""

    def __init__(self, module: nn.Module) -> None:
        modules = [part for _, part in tables.named_modules(module)]
        self._parameters = [part._parameters.values for part in modules]
        # Weak, unlike the tables of parameters: a child may refer to its parent and keep it alive forever.
        self._modules = list(map(weakref.ref, modules))
        self.params = self.present()  # held, so that no other tensor gets the same id
        # Of ordinary modules, in C and without a search for the method.
        is_usual = all(isinstance(part._modules, dict) for part in modules)
        self._values = dict.values if is_usual else methodcaller("values")
        self._child_ids = self._ids_of_children()
        self._param_ids = _ids(map(call, self._parameters))
        self._are_trained = list(map(_is_trained, self.params))
        # Without sparse and uninitialized ones, which only ignored parameters may be.
        self._dense = [param for param in self.params if param.layout is torch.strided and not is_lazy(param)]
        self._pointers = list(map(Tensor.data_ptr, self._dense))
        self._layouts = _layouts(self._dense)
        self._kind = [(param.device, param.dtype) for param in self.params[:1]]

    def present(self) -> list[Tensor]:
        return [param for param in chain.from_iterable(map(call, self._parameters)) if param is not None]

    def added(self) -> list[Tensor]:
        """Returns the parameters that these modules have got since."""
        known = set(map(id, self.params))
        return [param for param in self.present() if id(param) not in known]

    def has_other_modules(self) -> bool:
        try:
            return self._ids_of_children() != self._child_ids
        except AttributeError:  # a module is gone
            return True

    def _ids_of_children(self) -> list[int]:
        return _ids(map(self._values, map(_children_of, map(call, self._modules))))

    def has_changed(self) -> bool:
        # This runs at every forward, for thousands of parameters, so every line is a loop in C, without Python frames.
        if _ids(map(call, self._parameters)) != self._param_ids or self.has_other_modules():
            return True
        if list(map(_is_trained, self.params)) != self._are_trained:
            return True
        pointers = list(map(Tensor.data_ptr, self._dense))
        if pointers != self._pointers:  # no new data means no new dtype or layout; reading them takes longer
            if _layouts(self._dense) != self._layouts:
                return True
            self._pointers = pointers
        # A cast and another one may end at the same place.
        return [(param.device, param.dtype) for param in self.params[:1]] != self._kind


class Replaced:
    """Former parameters of a module, and its new parameters that no optimizer has stepped on yet.

    Former parameters are referenced weakly; an optimizer that still updates them holds them. Current parameters are referenced
    strongly: torch.utils.swap_tensors refuses tensors with weak references. `former` becomes empty, and steps check nothing,
    after nobody holds a former parameter, all new ones have an optimizer, or the warning has been given.
    """

    def __init__(self) -> None:
        self.former: dict[int, weakref.ref[Tensor]] = {}  # by id
        self._last: dict[int, Tensor] = {}
        self._waiting: set[int] = set()
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_told = False

    def note(self, named_params: _Named) -> None:
        """Records the module's current parameters."""
        now = {id(param): param for _, param in named_params}
        gone = {key: weakref.ref(param) for key, param in self._last.items() if param is not now.get(key)}
        if gone and not self._is_told:
            # Parameters that return were only swapped out for a call, by torch.func.functional_call.
            returned = {key for key, param in self.former.items() if key in now and param() is now[key]}
            self.former = {key: it for key, it in (self.former | gone).items() if key not in now and it() is not None}
            self._waiting |= now.keys() - (self._last.keys() - gone.keys())
            self._waiting &= now.keys() - returned
            self._num_steps.clear()
        self._last = now

    def before_step(self, optimizer: Optimizer, stepped: Collection[int], named_params: _Named, *, is_sharded: bool) -> None:
        """Checks the parameters `stepped` (ids) that `optimizer` is about to update against the module's current `named_params`.

        Warns once if it updates no current parameter, or if no other optimizer updates the new ones. Raises PhaseError for a
        sharded optimizer, which must have all of them.
        """
        self._waiting.difference_update(stepped)
        self.former = {key: param for key, param in self.former.items() if self._waiting and param() is not None}
        if self.former.keys().isdisjoint(stepped):
            return
        now = {id(param) for _, param in named_params}
        left = [name for name, param in named_params if param.requires_grad and id(param) in self._waiting]
        if not left or not any(key in self.former and key not in now for key in stepped):
            return
        named = repr(left[0]) + (f" and {len(left) - 1} more" if len(left) > 1 else "")
        require(
            not is_sharded,
            "this optimizer updates parameters that the model no longer has, and not their replacements.",
            where=f"ShardedOptimizer, parameter {named}",
            remedy=_REMEDY,
            error=PhaseError,
        )
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        kind = type(optimizer).__name__
        if now.isdisjoint(stepped):
            what = f"{kind} updates none of the parameters that this model has now, but some that it had: {named} are new."
        elif self._num_steps[optimizer] >= _NUM_STEPS:
            what = f"{kind} updates parameters that this model had, and nobody updates those that came in their place: {named}."
        else:
            return
        self._is_told, self.former = True, {}
        warnings.warn(f"{what}\n  {_REMEDY}", stacklevel=2)


class ModuleParams:
    """The tensors of `module` that are synchronized: all except the names in `ignored`.

    Narrower parameters accumulate their gradients in `reduce_dtype`, if it is not None. `close` undoes this.
    """

    _seen: _Census  # all parameters, at the last look

    def __init__(self, module: nn.Module, ignored: Container[str], *, reduce_dtype: str | None = None) -> None:
        # Weak, because parameters' hooks refer to this object, and the garbage collector does not see through those.
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._wide: torch.dtype | None = None if reduce_dtype is None else getattr(torch, reduce_dtype)
        self.replaced = Replaced()
        self.common_buffers = CommonBuffers()
        self.common_frozen: list[tuple[str, Tensor]] = []  # as of the last comparison between ranks

    def trained(self, *, also: Collection[int] = ()) -> list[tuple[str, Tensor]]:
        """Returns the parameters to synchronize, by name, and resets `has_changed`.

        Parameters of the module whose ids are in `also` are included even if they are frozen.
        """
        named_params = self._see(self._present_module)
        if self._wide is not None:
            _accumulate_in(self._wide, named_params)
        return [(name, param) for name, param in named_params if param.requires_grad or id(param) in also]

    def trained_now(self) -> list[tuple[str, Tensor]]:
        """Returns the trained parameters without resetting `has_changed`; empty if the module is gone."""
        return [(name, param) for name, param in self.named_params() if param.requires_grad]

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Returns the parameters that are not trained now."""
        return [(name, param) for name, param in self.named_params() if not param.requires_grad]

    def named_params(self) -> list[tuple[str, Tensor]]:
        """Returns all current parameters, frozen ones included; empty if the module is gone."""
        module = self._module()
        return [] if module is None else [(name, it) for name, it in tables.named_parameters(module) if name not in self._ignored]

    @property
    def device(self) -> torch.device:
        """The device of the first trained parameter, or the CPU if no parameter is trained."""
        # Not `trained_now()`: that makes a list of thousands for one.
        named_params = tables.named_parameters(self._present_module)
        return next(
            (param.device for name, param in named_params if param.requires_grad and name not in self._ignored),
            torch.device("cpu"),
        )

    def close(self) -> None:
        """Gives gradients the dtype of their parameters again."""
        with private.as_plain_tensors():  # parameters in flight may never arrive
            for _, param in () if self._wide is None else self.named_params():
                if private.gradient_dtype(param) != param.dtype:
                    grad, param.grad = param.grad, None
                    private.set_gradient_dtype(param, param.dtype)
                    param.grad = None if grad is None else grad.to(param.dtype)

    def has_changed(self) -> bool:
        """Returns True if a parameter was added, removed, replaced, frozen or unfrozen, or changed dtype, size or device."""
        with private.as_plain_tensors():  # this reads no values
            if not self.is_unseen and not self._seen.has_changed():
                return False
            return not self.are_lent() and not self._is_elsewhere()

    def are_lent(self) -> bool:
        """Returns True during a call of torch.func.functional_call: its replacements are tensors, not parameters.

        A copy or a loaded module of TorchScript has tensors too, from the first look on.
        """
        return not all(isinstance(param, nn.Parameter) for param in self._seen.added())

    def has_more(self) -> bool:
        """Returns True if modules are others, or parameters more, than at the last look.

        A call of torch.func.functional_call only exchanges parameters, so that the change is meant to last.
        """
        return self._seen.has_other_modules() or len(self._seen.present()) != len(self._seen.params)

    def _is_elsewhere(self) -> bool:
        """Returns True if only ignored parameters have changed.

        They may be experts of another group, which this group's ranks need not know about.
        """
        module = self._module()
        if self.is_unseen or module is None or self._seen.has_other_modules() or _kinds(self.named_params()) != self._kinds:
            return False
        self._seen = _Census(module)
        return True

    def has_new_of(self, tensors: set[int]) -> bool:
        """Returns True if one of these (by id) was added, or unfrozen, in a change that has not been looked at yet."""
        # This runs at every optimizer step: known parameters need no look.
        if self.ids >= tensors or not self.has_changed():
            return False
        return not tensors.isdisjoint({id(param) for _, param in self.trained_now()} - self.ids)

    def specs(self, named_params: Sequence[tuple[str, Tensor]]) -> list[ParamSpec]:
        """Returns the planner's description of the parameters."""
        module = self._module()
        sparse = set() if module is None else sparse_params(module)
        return [spec_of(name, param, is_sparse=id(param) in sparse) for name, param in named_params]

    def compare(
        self,
        group: OwnGroup,
        specs: Sequence[ParamSpec],
        params: Sequence[Tensor],
        settings: dict[str, Any],
        *,
        new: Sequence[str],
    ) -> Agreement:
        """Starts to compare on all ranks these parameters and settings, frozen parameters and buffers."""
        buffers = [(name, it) for name, it in tables.named_buffers(self._present_module) if name not in self._ignored]
        return Agreement(
            group,
            settings=settings,
            params=[_description(spec, param) for spec, param in zip(specs, params, strict=True)],
            others=[
                *(_description(spec_of(name, param), param) for name, param in self.frozen()),
                *(_description_of_buffer(name, buffer) for name, buffer in buffers),
            ],
            new=new,
        )

    def ranks_agree(self) -> None:
        """Records that all ranks have the same buffers and frozen parameters as this one now."""
        self.common_frozen = self.frozen()
        places: list[Place] = []
        for prefix, part in tables.named_modules(self._present_module):
            table = tables.own_buffers(part)
            places += [(table, key, tables.joined(prefix, key)) for key in table]
        self.common_buffers = CommonBuffers([place for place in places if place[2] not in self._ignored])

    @property
    def _present_module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # a forward of it runs, or its optimizer steps
        return module

    def _see(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        with private.as_plain_tensors():
            self._seen = _Census(module)
        self.is_unseen: bool = False  # if set, the module counts as changed until the next look
        named_params = self.named_params()
        self.replaced.note(named_params)
        # As of this look: optimizers of other parameters are not this object's concern.
        self.names = {id(param): name for name, param in named_params}
        self.ids = self.names.keys()
        self._kinds = _kinds(named_params)
        return named_params


def _kinds(named_params: _Named) -> list[tuple[object, ...]]:
    """Returns every property of the synchronized parameters that may change, frozen parameters included."""
    return [
        (name, id(param), param.requires_grad, param.dtype, param.shape, param.stride(), param.device)
        for name, param in named_params
    ]


def first_change(before: Sequence[ParamSpec], after: Sequence[ParamSpec]) -> str:
    """Describes the first parameter that differs."""
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


def _layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(param.dtype, param.shape, param.stride()) for param in params]


def _ids(owned: Iterable[Iterable[object]]) -> list[int]:
    return list(map(id, chain.from_iterable(owned)))


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
    """Returns the ids of parameters in layers that are declared to produce sparse gradients."""
    embeddings = (layer for _, layer in tables.named_modules(module) if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return {id(layer.weight) for layer in embeddings if layer.sparse}


def _description_of_buffer(name: str, buffer: Tensor) -> dict[str, Any]:
    kind = why_not_sent(buffer)
    return {"name": name, "shape": kind} if kind else _description(spec_of(name, buffer), buffer)


def _description(spec: ParamSpec, tensor: Tensor) -> dict[str, Any]:
    """Returns the properties of a tensor that must be the same on every rank."""
    axes = [axis for axis, size in enumerate(spec.shape) if size > 1] if tensor.layout is torch.strided else []
    return {
        **spec.to_dict(),
        "device": tensor.device.type,  # without the index, which may differ
        # In a contiguous tensor they are sorted already.
        "axes in memory": axes
        if len(axes) < 2 or tensor.is_contiguous()
        else sorted(axes, key=lambda axis: -tensor.stride()[axis]),
    }


def spec_of(name: str, tensor: Tensor, *, is_sparse: bool = False) -> ParamSpec:
    """Returns the planner's description of `tensor`."""
    dtype = private.gradient_dtype(tensor)
    return ParamSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        device=str(tensor.device),
        is_sparse=is_sparse,
        own_dtype=None if dtype == tensor.dtype else str(tensor.dtype).removeprefix("torch."),
    )
