"""Makes torch.compile cut graphs at the ends of buckets, as in a forward of torch's own wrapper; private to torch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook

_LEAST_CUT_BYTES = 1024 * 1024  # torch cuts no smaller graphs


@private.untraced
def cut_bytes(plan: Plan, *, num_ranks: int) -> int:
    """Returns the bucket size at which graphs are cut, or 0 if they stay whole."""
    largest = max((bucket.num_bytes for bucket in plan.buckets), default=0)
    return largest if num_ranks > 1 and largest >= _LEAST_CUT_BYTES else 0


def cut_graphs(module: nn.Module, size: Callable[[], int]) -> list[RemovableHandle]:
    """Registers hooks that cut graphs compiled in forwards of `module` at every `size()` bytes of parameters."""

    around: list[DistributedDataParallel | None] = []  # the previous value for each running forward

    @private.untraced
    def begin() -> None:
        around.append(DistributedDataParallel._active_ddp_module)
        num_bytes = size()
        if num_bytes:
            # With the only attribute that torch.compile reads.
            cuts: Any = SimpleNamespace(bucket_bytes_cap=num_bytes)
            DistributedDataParallel._active_ddp_module = cuts

    @private.untraced
    def end() -> None:
        if around:  # empty if an earlier hook has failed
            DistributedDataParallel._active_ddp_module = around.pop()

    return [
        module.register_forward_pre_hook(ModuleHook(module, begin)),
        module.register_forward_hook(ModuleHook(module, end), always_call=True),
    ]
