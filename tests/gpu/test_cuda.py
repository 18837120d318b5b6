"""On a CUDA device: two gloo ranks share it, so that the host paths and the device paths are both in play; and over NCCL."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import backward_alike, of_all_ranks, require_equal_gradients, require_equal_values
from support.errors import text_of
from support.naive import wrapped
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, ShardedOptimizer

_HIDDEN = 256
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()


def batch(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()


@in_ranks(2)
def test_gradients_on_a_device_equal_the_reference() -> None:
    bare = make_model()
    with wrapped(copy.deepcopy(bare), bucket_cap_mb=0.03) as ddp:
        backward_alike(ddp, bare, lambda model, step: model(batch(step, 8, 64)).square().mean(), steps=range(4))


@in_ranks(2)
def test_a_parameter_unused_on_one_rank_gets_the_mean_in_a_late_round_too() -> None:
    """Later than the rounds that are read at once: this rank must still learn that another one used it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).cuda()
    with wrapped(layers) as ddp:
        for step in range(5):
            ddp.zero_grad()
            used = layers if step < 4 or dist.get_rank() == 0 else layers[:2]
            sum(layer(torch.ones(2, 8, device="cuda")).sum() for layer in used).backward()
        assert layers[2].weight.grad is not None
        assert ddp.unused_parameters == (() if dist.get_rank() == 0 else ("2.weight", "2.bias"))


@in_ranks(1)
def test_one_rank_steps_on_a_device_as_a_plain_optimizer_does() -> None:
    """One rank has every shard: master weights, norms and scaling run on the device."""
    bare = make_model()
    with wrapped(copy.deepcopy(bare), strategy="zero1") as model:
        optimizers = [ShardedOptimizer(torch.optim.AdamW, model, lr=0.01), torch.optim.AdamW(bare.parameters(), lr=0.01)]
        for _ in range(3):
            for module, optimizer in zip((model, bare), optimizers, strict=True):
                optimizer.zero_grad()
                module(batch(0, 8, 64)).square().mean().backward()
                optimizer.step()
        model.wait()
        require_equal_values(model, bare)


@in_ranks(2)
def test_shards_on_devices_need_another_backend_than_gloo() -> None:
    with wrapped(make_model(), strategy="zero1") as model:
        text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, lr=0.01))
    assert "gloo sends and receives from the host's memory only" in text


@in_ranks(2)
def test_sync_batch_norm_trains_as_under_torchs_class() -> None:
    torch.backends.cudnn.deterministic = True  # of its kernels only those that repeat their bits
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layers, nn.Linear(4 * 12 * 12, 2))).cuda()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    with wrapped(model, bucket_cap_mb=0.001) as ours:
        backward_alike(
            ours,
            theirs,
            lambda model, step: model(batch(step, 4, 3, 16, 16)).square().mean(),
            steps=range(4),
            mean=lambda _: None,
            require=require_equal_gradients,
        )
        assert all(map(torch.equal, ours.module.buffers(), theirs.module.buffers()))


@in_ranks(2)
def test_a_mean_over_ranks_divides_on_a_device() -> None:
    """Over gloo, whose handles the host waits for, with the division on the device; then a number that is there."""
    bare, rank = make_model(), dist.get_rank()
    with wrapped(copy.deepcopy(bare), bucket_cap_mb=0.03) as ddp:

        def loss(model: nn.Module, step: int) -> Tensor:
            num_rows = 4 + 4 * rank
            number = torch.tensor(num_rows, device="cuda") if step % 2 else num_rows
            divisor = ddp.mean_over_ranks(number).wait()
            assert (divisor.device.type, divisor.dtype, divisor.item()) == ("cuda", torch.float64, 6.0)
            return model(batch(step, num_rows, 64)).square().sum() / divisor

        def mean(model: nn.Module) -> None:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 2

        backward_alike(ddp, bare, loss, steps=range(4), mean=mean, require=require_equal_gradients)


@in_ranks(2)
def test_a_gradient_that_is_not_finite_is_known_before_the_step() -> None:
    """Later than the rounds that are read at once: every rank must still know before the optimizer steps."""
    with wrapped(make_model(), bucket_cap_mb=0.03, nonfinite="skip") as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step in range(5):
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            x = torch.ones(8, 64, device="cuda")
            x[0, 0] = float("inf") if step == 4 and dist.get_rank() == 1 else 1.0
            model(x).square().mean().backward()
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        assert model.report().num_skipped == 1


# Over NCCL: ranks with a device each or, where there is one only, sharing it, which NCCL takes for two hosts with one each.
# Both wait on one device in turns, so that nothing here says how fast anything is.


@contextlib.contextmanager
def nccl_group() -> Iterator[dist.ProcessGroup]:
    rank, num_devices = dist.get_rank(), torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    if num_devices < dist.get_world_size():
        # NCCL refuses a device that two ranks of a host have; ranks of two hosts it connects by sockets.
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=50))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def why_refused() -> str:
    try:
        with nccl_group() as group:
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        return str(error).strip().splitlines()[-1]
    return ""


@pytest.fixture(scope="module")
def nccl() -> None:
    """Skips where NCCL does not connect two ranks."""
    with Ranks(2) as ranks:
        refusals = list(filter(None, ranks.run(why_refused)))
    if refusals:
        pytest.skip(f"NCCL does not connect two ranks here: {refusals[0]}")


def over_nccl(test: Callable[..., None]) -> Callable[..., None]:
    needs = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
    return in_ranks(2)(needs(pytest.mark.usefixtures("nccl")(test)))


@contextlib.contextmanager
def wrapped_over_nccl(**settings: Any) -> Iterator[tuple[DistributedDataParallel, nn.Module, dist.ProcessGroup]]:
    """A model over NCCL, a bare copy of it, and the group."""
    with nccl_group() as group:
        torch.manual_seed(0)
        bare = nn.Sequential(*(nn.Linear(_HIDDEN, _HIDDEN) for _ in range(6))).cuda()
        with wrapped(copy.deepcopy(bare), process_group=group, **settings) as model:
            yield model, bare, group


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, 32, _HIDDEN)).square().mean()


def write_over_freed_memory() -> None:
    """What was freed and is still read on another stream is not what it was any more."""
    for numel in (_HIDDEN, _HIDDEN * _HIDDEN, 2 * _HIDDEN * _HIDDEN, 6 * _HIDDEN * _HIDDEN):
        torch.full((numel,), torch.nan, device="cuda")


@over_nccl
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_training_over_nccl_has_the_reference_s_bits(strategy: str, reduction: str) -> None:
    """Of two ranks a sum does not depend on its order, and a half is exact."""
    with wrapped_over_nccl(strategy=strategy, reduction=reduction, bucket_cap_mb=0.3) as (model, bare, group):

        def mean(model: nn.Module) -> None:
            write_over_freed_memory()
            for param in model.parameters():
                dist.all_reduce(param.grad, group=group)
                param.grad /= 2

        make = ShardedOptimizer if strategy != "ddp" else (lambda cls, model, **how: cls(model.parameters(), **how))
        optimizers = [make(torch.optim.AdamW, model, lr=0.01), torch.optim.AdamW(bare.parameters(), lr=0.01)]
        require = require_equal_gradients if strategy == "ddp" else (lambda *_: None)
        for step in range(8):
            backward_alike(model, bare, loss, steps=[step], mean=mean, require=require)
            for optimizer in optimizers:
                optimizer.step()
                write_over_freed_memory()
        model.wait()
        require_equal_values(model, bare)


@over_nccl
def test_what_a_narrow_reduction_reads_is_held_until_it_has_been_read() -> None:
    """After each of several backwards without an update gradients are reduced from the same values."""
    gradients = []
    with wrapped_over_nccl(wire="bfloat16", bucket_cap_mb=0.3) as (model, _, _):
        for _ in range(6):
            model.zero_grad()
            loss(model, 0).backward()
            write_over_freed_memory()
            gradients.append(torch.cat([param.grad.flatten() for param in model.module.parameters()]).cpu())
    first = of_all_ranks(gradients[0])[0]
    assert [torch.equal(gradient, first) for gradient in gradients] == [True] * 6
