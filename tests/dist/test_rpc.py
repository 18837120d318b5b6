"""Gradients of torch.distributed.rpc, which distributed autograd keeps in a context instead of `.grad`."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from support.inside import issued_ops
from support.models import mlp, noise
from support.naive import TIMEOUT_S, naive_mean, require_same, wrapped_and_bare
from support.ranks import in_ranks

_numbers = itertools.count()


@contextlib.contextmanager
def context(directory: Path) -> Iterator[int]:
    """A context of distributed autograd, in ranks that can call each other."""
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/{next(_numbers)}", num_worker_threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it uses its groups
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    with dist_autograd.context() as number:
        yield number
    rpc.shutdown()


def in_context(model: nn.Module, number: int) -> dict[str, Tensor | None]:
    found = dist_autograd.get_gradients(number)
    return {name.removeprefix("module."): found.get(param) for name, param in model.named_parameters()}


def means(bare: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the bare model that are to be expected: a parameter without one here stays without."""
    loss.backward()
    used = [param.grad is not None for param in bare.parameters()]
    naive_mean(bare)
    return {name: param.grad if is_used else None for (name, param), is_used in zip(bare.named_parameters(), used, strict=True)}


class Branches(nn.Module):
    """Rank 1 leaves out the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.table = nn.Linear(3, 4), nn.Linear(4, 4), nn.Embedding(5, 3, sparse=True)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.first(self.table(indices)).tanh()
        return hidden if dist.get_rank() == 1 else self.second(hidden)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_gradients_in_a_context_are_averaged_there(tmp_path: Path) -> None:
    indices = torch.tensor([0, 1, 1]) + 2 * dist.get_rank()
    with wrapped_and_bare(Branches()) as (ddp, bare), context(tmp_path) as number:
        ops = issued_ops(ddp)
        expected = means(bare, bare(indices).square().sum())
        dist_autograd.backward(number, [ddp(indices).square().sum()])
        found = in_context(ddp, number)
        assert found["table.weight"].is_sparse
        found["table.weight"], expected["table.weight"] = found["table.weight"].to_dense(), expected["table.weight"].to_dense()
        require_same(found, expected)
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        assert [param.grad for param in ddp.parameters()] == [None] * 5
        assert not ops


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_gradients_add_up_in_a_context_until_a_backward_synchronizes(tmp_path: Path) -> None:
    first, second = (noise(4, 6, step=step) for step in range(2))
    with wrapped_and_bare(mlp()) as (ddp, bare), context(tmp_path) as number:
        with ddp.no_sync():
            dist_autograd.backward(number, [ddp(first).square().mean()])
        bare(first).square().mean().backward()
        require_same(in_context(ddp, number), {name: param.grad for name, param in bare.named_parameters()})
        dist_autograd.backward(number, [ddp(second).square().mean()])
        require_same(in_context(ddp, number), means(bare, bare(second).square().mean()))
