"""Synchronizes a module without a wrapper."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from undertow.config import SyncConfig
from undertow.ddp.arguments import checked, warn_of_nothing_to_train
from undertow.ddp.experts import synchronized
from undertow.sync import GradientSync


def attach(
    module: nn.Module,
    *,
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: SyncConfig | None = None,
    ignore: Iterable[str | nn.Module | Tensor] = (),
) -> GradientSync:
    """Synchronizes `module`'s gradients from now on: after a backward every `.grad` is the mean over ranks.

    The module keeps its class and its `state_dict` keys. All ranks copy rank 0's parameters and buffers.

    - `device_mesh`: a mesh of one dimension. With `strategy="hybrid"` it has two: the first replicates and the second shards.
    - `process_group`: the ranks to synchronize; the default group if neither it nor `device_mesh` is given.
    - `config`: settings; None is `SyncConfig()`.
    - `ignore`: parameters, buffers and submodules to leave alone, as names or objects.

    Returns the GradientSync of the module. Raises ConfigError for modules or settings that cannot be synchronized.

    ```python
    sync = undertow.attach(model)
    loss_fn(model(inputs), targets).backward()  # gradients are averaged
    ```
    """
    ignored = checked(module, ignore, config, caller="attach")
    warn_of_nothing_to_train(module, ignored, caller="attach")
    sync = synchronized(module, device_mesh=device_mesh, process_group=process_group, config=config, ignore=ignored)
    sync._watch_forwards()
    return sync


class BucketedDDPHooks:
    """Attaches the overlapped mean reduction to a bare model, with buckets of `bucket_size_mb` MiB, until `close()`."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, bucket_size_mb: float = 25.0) -> None:
        self.sync = attach(model, process_group=process_group, config=SyncConfig(bucket_cap_mb=bucket_size_mb))

    def close(self) -> None:
        self.sync.close()
