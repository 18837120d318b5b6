"""The private parts of torch's FSDP2 that Undertow reads and changes.

`tests/unit/torch_private` pins them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from undertow.torch_private import private

_MODULE = "torch.distributed.fsdp"  # imported by whatever makes such a module


def is_managed(module: nn.Module) -> bool:
    """Returns True if torch's `fully_shard` or `replicate` manages gradients of the module."""
    package = sys.modules.get(_MODULE)
    return package is not None and isinstance(module, package.FSDPModule)


def param_groups(module: Any) -> list[Any]:
    """Returns the groups of parameters of such a module that are reduced together."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def params_of(group: Any) -> list[Tensor]:
    """Returns the sharded parameters of a group, in the order of its messages."""
    return [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def replicas_of(group: Any) -> dist.ProcessGroup | None:
    """Returns the ranks over which torch itself averages the shards of a group."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def is_sharded(group: Any) -> bool:
    """Returns False for a module of `replicate`, whose gradients are not cut into shards."""
    return getattr(group.mesh_info, "shard_process_group", None) is not None


def shards_of(group: Any) -> dist.ProcessGroup:
    """Returns the ranks that have the shards of a group."""
    found: dist.ProcessGroup = group.mesh_info.shard_process_group
    return found


def numels_of(group: Any) -> list[int]:
    """Returns the elements of each parameter of a group in its messages, with padding."""
    return [fsdp_param.padded_sharded_param_size.numel() for fsdp_param in group.fsdp_params]


def is_offloaded(group: Any) -> bool:
    """Returns True if parameters of a group stay in host memory, under `CPUOffloadPolicy`."""
    return any(fsdp_param.offload_to_cpu for fsdp_param in group.fsdp_params)


def has_own_divisor(group: Any) -> bool:
    """Returns True after `set_gradient_divide_factor`."""
    return group.gradient_divide_factor is not None


def all_reduces(group: Any) -> bool:
    """Returns False inside `set_requires_all_reduce(False)`: shards are only accumulated."""
    return bool(group.all_reduce_grads)


def leave_without_gradient(groups: Sequence[Any]) -> None:
    """Called in a hook before torch sets gradients of zeros: parameters that have none now have
    none at the end of backward, as with torch's own average. An optimizer steps on zeros too."""
    params = [param for group in groups for param in params_of(group) if param.grad is None]

    def clear() -> None:
        for param in params:
            param.grad = None

    private.call_after_backward(clear)


def take_over(
    module: Any, reduce: Callable[[Tensor], None], *, refuse: Callable[[float], object]
) -> Callable[[], None]:
    """Calls `reduce` with the shards of the module's gradients, in one tensor, in each backward,
    and `refuse` instead of the module's `set_gradient_divide_factor`.

    Torch no longer averages them over replicas. Returns a function that undoes this. Raises
    ValueError for a module whose parameters have several meshes.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    module.set_all_reduce_hook(reduce)
    module.set_gradient_divide_factor = refuse
    before = [
        (group, group.mesh_info, group.post_forward_mesh_info) for group in param_groups(module)
    ]
    for group, info, after_forward in before:
        if replicas_of(group) is not None:
            group.mesh_info = FSDPMeshInfo(
                info.mesh,
                shard_mesh_dim=info.shard_mesh_dim,
                dp_mesh_dims=info.dp_mesh_dims,
                spmd_mesh=info.spmd_mesh,
            )
            group.mesh_info.reduce_scatter_process_group = info.reduce_scatter_process_group
            # another mesh would be one to reshard to after forward
            if after_forward is info:
                group.post_forward_mesh_info = group.mesh_info

    def undo() -> None:
        del module.set_gradient_divide_factor
        for group, info, after_forward in before:
            group.mesh_info, group.post_forward_mesh_info = info, after_forward
            group._all_reduce_hook = None

    return undo
