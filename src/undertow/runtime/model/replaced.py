"""Detects parameters that were replaced while an optimizer continues to update the old ones."""

import warnings
import weakref
from collections.abc import Collection, Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.errors import PhaseError, require

_NUM_STEPS = 10  # steps of an optimizer that holds some old parameters; by then another one would have stepped on the new ones
_REMEDY = "Make the optimizer after the change, or give it the new parameters by add_param_group()."
_Named = Sequence[tuple[str, Tensor]]


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
            "this optimizer updates parameters that the model has no more, and not those that came in their place.",
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
