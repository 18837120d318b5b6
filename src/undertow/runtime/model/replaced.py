"""Parameters that were replaced behind the back of an optimizer, which goes on with those that the module had before."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.errors import PhaseError

_NUM_STEPS = 10  # of an optimizer that is left behind in part: by then another one has stepped on the new parameters
_REMEDY = "Make the optimizer after the change, or give it the new parameters by add_param_group()."
_Named = Sequence[tuple[str, Tensor]]


class Replaced:
    """Parameters that a module had and has no more, and those that came since and that no optimizer has stepped on.

    Those weakly: an optimizer that is left behind holds them. Not the present ones, of which torch.utils.swap_tensors wants
    to know that nobody does. `former` is empty again, and nothing is looked at in a step,
    when nobody holds these any more, when all new ones have an optimizer, and when everything is told.
    """

    def __init__(self) -> None:
        self.former: dict[int, weakref.ref[Tensor]] = {}  # by id
        self._last: dict[int, Tensor] = {}
        self._waiting: set[int] = set()
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_told = False

    def note(self, named_params: _Named) -> None:
        """These are the parameters of the module from now on."""
        now = {id(param): param for _, param in named_params}
        gone = {key: weakref.ref(param) for key, param in self._last.items() if param is not now.get(key)}
        if gone and not self._is_told:
            known = self.former | gone
            # Those that come back were lent away for a moment, by torch.func.functional_call.
            returned = {key for key, param in self.former.items() if key in now and param() is now[key]}
            self.former = {key: param for key, param in known.items() if key not in now and param() is not None}
            self._waiting |= now.keys() - (self._last.keys() - gone.keys())
            self._waiting &= now.keys() - returned
            self._num_steps.clear()
        self._last = now

    def before_step(self, optimizer: Optimizer, stepped: Collection[int], named_params: _Named, *, is_sharded: bool) -> None:
        """`optimizer` is about to update the parameters `stepped`, by id; `named_params` are those of the module now.

        Warns once if it updates none of these, or if no other optimizer updates the new ones. PhaseError for a sharded one, to
        which all of them belong.
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
        if is_sharded:
            raise PhaseError(
                "this optimizer updates parameters that the model has no more, and not those that came in their place.",
                where=f"ShardedOptimizer, parameter {named}",
                remedy=_REMEDY,
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
