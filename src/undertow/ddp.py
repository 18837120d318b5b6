"""The wrapper that takes the place of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.plan import Plan
from undertow.sync import Reduction, Sync
from undertow.trace import StepReport, Trace


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Data-parallel training of `module`: change one import.

    The constructor is torch's. It is torch's class in name only, so that trainers and checkpointing recognise it; its
    C++ reducer is never made. What we always do is accepted: `find_unused_parameters` (who used what travels inside
    the buckets), `gradient_as_bucket_view`, `static_graph`. Settings of our own come in `config`.
    """

    def __init__(  # noqa: PLR0913  torch's signature
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        config: SyncConfig | None = None,
    ) -> None:
        _check_module(module)
        _check_devices(device_ids)
        nn.Module.__init__(self)  # past torch's constructor, which would make its reducer
        chosen = _settings(config, bucket_cap_mb=bucket_cap_mb, broadcast_buffers=broadcast_buffers)
        self.module = module
        self.dim = dim
        self.device_ids = list(device_ids) if device_ids else None  # type: ignore[arg-type]
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.sync = Sync(module, process_group=process_group, config=chosen, broadcast=init_sync)

    @property
    def process_group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """The group of our own over which gradients travel."""
        return self.sync.process_group

    @property
    def plan(self) -> Plan:
        return self.sync.plan

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank, over the micro-batches of the last step."""
        return self.sync.unused_parameters

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.sync.forward_begins()
        try:
            return self.module(*inputs, **kwargs)
        finally:
            self.sync.forward_ends()

    def accumulate(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; the next one outside synchronises the sum."""
        return self.sync.accumulate()

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same as `accumulate`, under torch's name."""
        return self.sync.accumulate()

    def finish(self) -> None:
        """Joins the other ranks where this rank's backward reached no parameter at all."""
        self.sync.finish()

    def reduce_gradients_async(self) -> Reduction:
        """Sends the gradients that were accumulated; wait for the result before the optimizer steps."""
        return self.sync.reduce_gradients_async()

    def wait(self) -> None:
        """Returns when nothing is in flight."""
        self.sync.wait()

    def broadcast_parameters(self) -> None:
        """Gives every rank rank 0's parameters and buffers; a collective call."""
        self.sync.broadcast_parameters()

    def report(self, *, show: bool = True) -> StepReport:
        """Where the time of the last steps went on this rank; never communicates."""
        return self.sync.report(show=show)

    def traces(self) -> tuple[Trace, ...]:
        """What happened in the recorded steps, oldest first."""
        return self.sync.traces()

    def save_plan(self, path: str | Path) -> None:
        """Writes the present plan as JSON."""
        self.sync.save_plan(path)

    def close(self) -> None:
        """Takes the hooks off and destroys our process group; the module goes on without synchronisation."""
        self.sync.close()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward synchronises; decided when it runs."""
        return not self.sync.is_accumulating

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_required: bool) -> None:
        self.sync.is_accumulating = not is_required

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _not_built("join()", "Give every rank the same number of steps; finish() joins in for a rank without a backward.")

    def register_comm_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _not_built("register_comm_hook()", "Leave the hook out: gradients are averaged in their own dtype.")

    def _set_static_graph(self) -> None:
        """Accepted: nothing of ours depends on it."""
        self.static_graph = True

    def __getstate__(self) -> NoReturn:
        raise _not_built("copying and pickling a wrapped model", "Copy or save model.module, and wrap the copy.")

    def __getattr__(self, name: str) -> Any:
        # What the wrapper does not have, the module may: ddp.generate(...), ddp.config.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _not_built(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{what} is not built yet.", where="undertow.DistributedDataParallel", remedy=remedy)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"module must be a torch.nn.Module, got {type(module).__name__}.",
            where="DistributedDataParallel, first argument",
            remedy="Pass the model itself.",
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "this module is wrapped already.",
            where=f"DistributedDataParallel({type(module).__name__}(...))",
            remedy="Wrap the bare module once.",
        )


def _check_devices(device_ids: Sequence[int | torch.device] | None) -> None:
    if isinstance(device_ids, dist.ProcessGroup):
        raise ConfigError(
            "a process group stands where device_ids belongs.",
            where="DistributedDataParallel, second argument",
            remedy="Write DistributedDataParallel(module, process_group=group).",
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError(
            f"device_ids must name one device, got {list(device_ids)}.",
            where="DistributedDataParallel",
            remedy="Start one process per device, and move the module to its device before wrapping it.",
        )


def _settings(config: SyncConfig | None, *, bucket_cap_mb: float | None, broadcast_buffers: bool) -> SyncConfig:
    if config is None:
        return SyncConfig(bucket_cap_mb=bucket_cap_mb, buffers="rank0" if broadcast_buffers else "off")
    if bucket_cap_mb is not None or not broadcast_buffers:
        raise ConfigError(
            "settings are given twice.",
            where="DistributedDataParallel(bucket_cap_mb=... or broadcast_buffers=..., config=...)",
            remedy="Put bucket_cap_mb and buffers into config=SyncConfig(...).",
        )
    return config
