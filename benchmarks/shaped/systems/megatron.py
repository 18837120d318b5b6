"""Megatron-core's DistributedDataParallel and optimizers, gradients reduced under the backward.

With `use_distributed_optimizer` gradients are scattered, each rank steps its share, and parameters are gathered under the
next forward. `bucket_size` counts elements; Megatron's default is 40 million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.shaped.systems import LEARNING_RATE, MOMENTUM, Setting, System


class Megatron:
    """A step as Megatron's training loop makes it, without clipping."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any) -> None:
        self._ddp = ddp
        self._optimizer = optimizer
        self._gathers = ddp.ddp_config.overlap_param_gather
        if self._gathers:
            _Readers(ddp)

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._ddp(*batch).backward()
        self._ddp.finish_grad_sync()

    def update(self) -> None:
        self._optimizer.step()

    def finish(self) -> None:
        if self._gathers:
            self._ddp.start_param_sync(force_sync=True)

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self._ddp.module.named_parameters())

    def is_settled(self) -> bool:
        return True

    def told(self) -> Mapping[str, str]:
        return {"version": megatron.core.__version__}


class _Readers:
    """Waits for parameters whose module is never called.

    Megatron waits for gathered parameters when their own module is called. A list of parameters never is: its parent
    reads them. Which modules are called shows in the first forward; until then parents wait for all their children.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._called: set[nn.Module] = set()
        self._wait: Callable[[nn.Module], None] = ddp._make_forward_pre_hook()
        for module in ddp.module.modules():
            module.register_forward_pre_hook(self._enter)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._called.add(module)
        for child in module.children():
            if child not in self._called:
                self._wait(child)


class _SaysCuda(TorchFunctionMode):
    """Lets constructors that were written for CUDA alone succeed on the processor.

    They ask for scalars on "cuda", and compare the names of tensor types with "torch.cuda.FloatTensor".
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if func is Tensor.type and isinstance(result, str) else result


@contextmanager
def _on_cpu() -> Iterator[None]:
    """What construction needs where there is no CUDA; training itself needs none of it."""
    current_device, adam = torch.cuda.current_device, distrib_optimizer.Adam
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # where buffers are made
    # The distributed optimizer wants Adam, for its checkpoints' sake; we compare steps of SGD and save nothing.
    distrib_optimizer.Adam = torch.optim.SGD
    try:
        with _SaysCuda():
            yield
    finally:
        torch.cuda.current_device, distrib_optimizer.Adam = current_device, adam


def _groups(world: dist.ProcessGroup, own: dist.ProcessGroup) -> ProcessGroupCollection:
    """Data-parallel over all ranks; tensors, layers and experts are not divided."""
    whole = dict.fromkeys(("dp", "dp_cp", "expt_dp", "intra_dist_opt"), world)
    return ProcessGroupCollection(**whole, **dict.fromkeys(("tp", "pp", "ep", "mp", "tp_ep_pp"), own))


def build(setting: Setting) -> System:
    own = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    groups = _groups(setting.group, own)
    is_sharded = setting.options.get("use_distributed_optimizer", False)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=is_sharded, **setting.options)
    transformer_config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)  # of which DDP reads no size
    optimizer_config = OptimizerConfig(
        optimizer="sgd",
        lr=LEARNING_RATE,
        sgd_momentum=MOMENTUM,
        weight_decay=0.0,
        clip_grad=0.0,
        use_distributed_optimizer=is_sharded,
        overlap_param_gather=is_sharded,
    )
    with _on_cpu():
        ddp = DistributedDataParallel(transformer_config, ddp_config, setting.model, pg_collection=groups)
        chain = get_megatron_optimizer(optimizer_config, [ddp], use_gloo_process_groups=False, pg_collection=groups)
    (optimizer,) = chain.chained_optimizers  # the chain would compute the norm of all gradients, which no other system does
    return Megatron(ddp, optimizer)
