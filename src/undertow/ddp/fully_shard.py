"""Checks how torch's `fully_shard` was applied to a model, before replicas average its shards."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from undertow.errors import ConfigError, require
from undertow.torch_private import fsdp

WHERE = "outer_axis(...)"  # in errors


def refuse_divisor(named: str, _factor: float = 0.0) -> None:
    """Raises ConfigError; in place of `set_gradient_divide_factor`."""
    raise ConfigError(
        f"{named} has its own divisor, which counts torch's ranks and not the replicas.",
        where=WHERE,
        remedy="Leave set_gradient_divide_factor out, and scale the loss.",
    )


def require_managed(module: nn.Module, managed: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises ConfigError unless replicas can average the shards of these modules by name."""
    require(
        managed,
        f"{type(module).__name__} has no module that torch's fully_shard manages.",
        where=WHERE,
        remedy="Call fully_shard first; without it use DistributedDataParallel or attach.",
    )
    for name, part in managed:
        groups = fsdp.param_groups(part)
        named = f"module {name!r}" if name else "the model"
        require(
            len(groups) <= 1,
            f"parameters of {named} have several meshes, and torch has one hook for all.",
            where=WHERE,
            remedy="Shard all parameters of a module over one mesh.",
        )
        for group in groups:
            require(
                fsdp.is_sharded(group),
                f"{named} is managed by torch's replicate, and has no shards.",
                where=WHERE,
                remedy="Leave replicate out, and use DistributedDataParallel or attach.",
            )
            if fsdp.has_own_divisor(group):
                refuse_divisor(named)
            require(
                not fsdp.is_offloaded(group),
                f"{named} keeps its parameters in host memory, and gradients are averaged on a "
                "device.",
                where=WHERE,
                remedy="Leave CPUOffloadPolicy out.",
            )
            require(
                not any(param.is_meta for param in fsdp.params_of(group)),
                f"{named} has parameters on the meta device, which have no values.",
                where=WHERE,
                remedy="Call model.to_empty(device=...) and load or initialize them first.",
            )


def group_of_replicas(
    managed: Sequence[tuple[str, nn.Module]], device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """Returns the ranks of the replicas that have the same shards.

    Raises ConfigError unless it is given once, and alike for all modules.
    """
    groups = [group for _, part in managed for group in fsdp.param_groups(part)]
    of_torch = {fsdp.replicas_of(group) for group in groups}
    require(
        len(of_torch) == 1,
        "fully_shard got different meshes for different modules.",
        where=WHERE,
        remedy="Give all modules one mesh.",
    )
    (found,) = of_torch
    require(
        (found is None) != (device_mesh is None),
        "the dimension across replicas is not given."
        if found is None
        else "the dimension across replicas is given twice: to fully_shard, and as device_mesh.",
        where=WHERE,
        remedy='Give device_mesh=mesh["dp_replicate"]; or shard over '
        'mesh["dp_replicate", "dp_shard"] and leave device_mesh out.',
    )
    if device_mesh is not None:
        require(
            device_mesh.ndim == 1,
            f"device_mesh must have one dimension, got {device_mesh}.",
            where=WHERE,
            remedy='Give device_mesh=mesh["dp_replicate"].',
        )
        found = device_mesh.get_group()
    assert found is not None
    shards = set(dist.get_process_group_ranks(fsdp.shards_of(groups[0])))
    both = shards.intersection(dist.get_process_group_ranks(found))
    require(
        len(both) == 1,
        f"ranks {', '.join(map(str, sorted(both)))} have shards of one replica: this dimension is "
        "not across replicas.",
        where=WHERE,
        remedy="Give the other dimension of the mesh.",
    )
    return found
