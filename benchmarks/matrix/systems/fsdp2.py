"""FSDP2 per layer, parameters kept whole between forward and backward, gathers asynchronous.

Its reduce-scatters are synchronous on gloo: the overlap relies on device streams.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem


class Fsdp2(PlainSystem):
    def parameters(self) -> Mapping[str, Tensor]:
        return {name: param.full_tensor() for name, param in self.bare.named_parameters()}  # type: ignore[operator]


def build(setting: Setting) -> System:
    mesh = DeviceMesh.from_group(setting.group, "cpu")
    for block in (*setting.model.blocks, setting.model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    assert isinstance(setting.model, FSDPModule)
    setting.model._set_unshard_async_op(True)
    return Fsdp2(setting.model, setting.model, version=torch.__version__)
