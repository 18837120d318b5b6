"""FSDP2 per layer, parameters kept whole between forward and backward, gathers asynchronous.

Its reduce-scatters are synchronous on gloo: the overlap relies on device streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.systems.plain import PlainSystem

_LEAST_NUMEL = 500_000  # a replayed layer may be one bias; nobody would shard that alone


class Fsdp2(PlainSystem):
    def parameters(self) -> Mapping[str, Tensor]:
        return {name: param.full_tensor() for name, param in self.bare.named_parameters()}


def build(setting: Setting) -> System:
    mesh = DeviceMesh.from_group(setting.group, next(setting.model.parameters()).device.type)
    for group in _groups(setting.model.blocks):
        fully_shard(group, mesh=mesh, reshard_after_forward=False)  # type: ignore[call-overload]
    fully_shard(setting.model, mesh=mesh, reshard_after_forward=False)
    assert isinstance(setting.model, FSDPModule)
    setting.model._set_unshard_async_op(True)
    return Fsdp2(setting.model, setting.model)


def _groups(blocks: nn.Sequential) -> Iterator[list[nn.Module]]:
    """Blocks one by one, small neighbors together."""
    group: list[nn.Module] = []
    for block in blocks:
        group.append(block)
        if sum(param.numel() for one in group for param in one.parameters()) >= _LEAST_NUMEL:
            yield group
            group = []
    if group:
        yield group
