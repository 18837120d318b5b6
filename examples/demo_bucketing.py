"""Gradients one by one against gradients in buckets.

Run with:

    torchrun --nproc-per-node=4 examples/demo_bucketing.py

Many small messages cost a latency each; a bucket carries many gradients for one. The network is
emulated on this machine (a 1 Gb/s link around gloo), so that the difference shows without a
cluster.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow import BucketedDDPHooks
from undertow.lab.cost import link_from_text
from undertow.lab.emulation.link import EmulatedLink, emulated_backend

NUM_STEPS = 8
NUM_WARM_UP_STEPS = 2
BUCKET_MB = 1.0


@dataclass(frozen=True, kw_only=True)
class Result:
    gradients: list[Tensor]
    num_collectives: int
    step_ms: float


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(160, 160), nn.Tanh())))


def gradient_of(param: Tensor) -> Tensor:
    assert param.grad is not None  # after backward
    return param.grad


def reduce_each(model: nn.Module) -> None:
    for param in model.parameters():
        gradient = gradient_of(param)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def train(link: EmulatedLink, *, is_bucketed: bool) -> Result:
    """Gradients of the last step, and the time of a step; both variants see the same weights and
    data."""
    model = new_model()
    hooks = (
        BucketedDDPHooks(model, dist.group.WORLD, bucket_size_mb=BUCKET_MB) if is_bucketed else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(dist.get_rank())

    def make_steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randn(32, 160, generator=random)).square().mean().backward()
            if hooks is None:
                reduce_each(model)
            optimizer.step()

    make_steps(NUM_WARM_UP_STEPS)
    dist.barrier()
    link.drain_log()
    began_s = time.perf_counter()
    make_steps(NUM_STEPS)
    step_ms = (time.perf_counter() - began_s) / NUM_STEPS * 1e3
    num_collectives = len(link.drain_log()) // NUM_STEPS
    gradients = [gradient_of(param).clone() for param in model.parameters()]
    if hooks is not None:
        hooks.close()
    return Result(gradients=gradients, num_collectives=num_collectives, step_ms=step_ms)


def print_table(unbucketed: Result, bucketed: Result) -> None:
    # With more than two ranks a bucket adds the ranks in another order than a single parameter, so
    # last bits differ.
    pairs = zip(unbucketed.gradients, bucketed.gradients, strict=True)
    are_equal = all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in pairs)
    print(f"{'':24}{'collectives':>12}{'ms per step':>13}")
    print(f"{'one per parameter':24}{unbucketed.num_collectives:12d}{unbucketed.step_ms:13.1f}")
    print(
        f"{f'buckets of {BUCKET_MB:g} MiB':24}{bucketed.num_collectives:12d}"
        f"{bucketed.step_ms:13.1f}"
    )
    print(f"gradients equal: {'yes' if are_equal else 'NO'}")


def main() -> None:
    torch.set_num_threads(1)
    with emulated_backend(link_from_text("1gbit")) as link:
        dist.init_process_group("emulated")
        unbucketed = train(link, is_bucketed=False)
        bucketed = train(link, is_bucketed=True)
        if dist.get_rank() == 0:
            print_table(unbucketed, bucketed)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
