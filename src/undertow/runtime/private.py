"""Every private call into torch, in one place; tests/unit/test_private_torch.py holds what we rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

# Of the backward that this thread is in, the innermost one; -1 outside of backward.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the innermost backward of this thread is over, after the callbacks queued so far."""
    Variable._execution_engine.queue_callback(callback)


def enclosing_node() -> Any | None:
    """Inside such a callback: the node around a backward that runs within another one, None for the outermost."""
    return torch._C._current_autograd_node()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of `group` may take; None, which means the backend's default, where it does not say."""
    try:
        options = group._get_backend(group._device_types[0]).options
    except (AttributeError, IndexError, RuntimeError):
        return None
    return getattr(options, "_timeout", None)


def storage_use_count(tensor: torch.Tensor) -> int:
    """Number of tensors that share `tensor`'s storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies source by source, in one launch per device and dtype where there is one."""
    torch._foreach_copy_(targets, sources)


def zero_each(targets: list[torch.Tensor]) -> None:
    """Writes zeros into each of `targets`; none is fine."""
    if targets:
        torch._foreach_zero_(targets)


def post_accumulate_hooks(param: torch.Tensor) -> Sequence[Callable[..., None]]:
    """The hooks that `register_post_accumulate_grad_hook` has put on a parameter."""
    return tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def is_profiling() -> bool:
    """Whether a torch profiler is recording, so that ranges cost nothing otherwise."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
