"""A `zero_grad` for wrappers and sharded optimizers, whose parameters may be in flight."""

import contextlib

from undertow.torch_private import private


class ZeroesWithoutReading:
    """Gives a module or an optimizer a `zero_grad` that waits for no parameter, because None needs
    none of their values."""

    @private.untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        with private.as_plain_tensors() if set_to_none else contextlib.nullcontext():
            super().zero_grad(set_to_none)  # type: ignore[misc]  # of the module or optimizer
