"""Parameters are laid out in shards when the optimizer is made, and again if rank 0's order of arrival makes other buckets."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.inside import sharding_of
from support.levels import some
from support.models import noise
from support.naive import collectives
from support.ranks import in_ranks
from support.sharded import MLP, ORDERED, WRITES, Parameters, Write, parameters, require_equal, require_same_everywhere, training
from undertow import DistributedDataParallel, PhaseError, ReplicaMismatch, ShardedOptimizer, SyncConfig

STRATEGIES = pytest.mark.parametrize("strategy", ["zero1", "zero2"])
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


class Crossed(nn.Module):
    """Its layers are used in another order than they were registered in."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(8, 3), nn.Linear(6, 7), nn.Linear(7, 8)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x.to(self.first.weight.dtype))).tanh())
        return result


def backward(model: Any, number: int) -> None:
    model(noise(5, 6, step=number)).float().square().sum().backward()


@contextlib.contextmanager
def wrapped(module: nn.Module, strategy: str | None = None, **settings: Any) -> Iterator[DistributedDataParallel]:
    """A model, wrapped and not stepped by anything yet."""
    ddp = DistributedDataParallel(module, config=SyncConfig(strategy=strategy, **{**ORDERED, **settings}))
    try:
        yield ddp
    finally:
        ddp.close()


def sharded(ddp: DistributedDataParallel, *params: Any) -> ShardedOptimizer:
    return ShardedOptimizer(torch.optim.SGD, ddp, list(params) or None, **SGD)


def plain(ddp: DistributedDataParallel, *params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params) or ddp.parameters(), **SGD)


@in_ranks(2, 3)
@STRATEGIES
def test_the_first_backward_is_reduced_to_shards(strategy: str) -> None:
    with wrapped(Crossed(), strategy) as ddp:
        optimizer = sharded(ddp)
        sharding = sharding_of(ddp)
        assert sharding is not None
        with collectives() as called:
            backward(ddp, 0)
        assert sharding_of(ddp) is sharding
        assert "all_reduce" not in called
        numels = [grad.part.numel() for grad in (param.grad for param in ddp.parameters())]  # type: ignore[union-attr]
        assert sum(numels) < sum(param.numel() for param in ddp.parameters())
        optimizer.step()


def once(ddp: Any, number: int) -> None:
    backward(ddp, number)


def accumulates(ddp: Any, number: int) -> None:
    with ddp.no_sync():
        backward(ddp, 10 + number)
    backward(ddp, number)


def twice(ddp: Any, number: int) -> None:
    backward(ddp, number)
    backward(ddp, 10 + number)


def clears_between(ddp: Any, number: int) -> None:
    backward(ddp, 10 + number)
    ddp.zero_grad(set_to_none=False)
    with ddp.no_sync():
        backward(ddp, number)
    backward(ddp, 20 + number)


def rewrites(ddp: Any, number: int) -> None:
    backward(ddp, number)
    for param in ddp.module.last.parameters():
        param.grad = ddp.full_gradient(param).clamp(-0.1, 0.1)


Each = Callable[[Any, int], None]


def require_bits_under_rank_0s_order(strategy: str, each: Each, dtype: torch.dtype) -> None:
    def trained(order: str) -> tuple[Parameters, list[tuple[tuple[int, ...], ...]]]:
        groups = []
        with training(Crossed(dtype), strategy, "SGD", order=order, **ORDERED) as (ddp, optimizer):
            for number in range(3):
                optimizer.zero_grad()
                each(ddp, number)
                groups.append(ddp.plan.groups)
                optimizer.step()
                groups.append(ddp.plan.groups)
            return parameters(ddp), groups

    (expected, before), (found, after) = trained("reverse"), trained("observed")
    require_equal(found, expected)
    require_same_everywhere(found)
    assert before == before[:1] * 6
    assert after == [before[0], *after[1:2] * 5]
    assert after[0] != after[1]


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], most=1))
@pytest.mark.parametrize("each", some([once, accumulates, twice, clears_between, rewrites], most=1))
@STRATEGIES
def test_rank_0s_order_comes_before_the_first_step_with_the_same_bits(strategy: str, each: Each, dtype: torch.dtype) -> None:
    require_bits_under_rank_0s_order(strategy, each, dtype)


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], most=1))
@pytest.mark.parametrize("each", some([once, twice], most=1))
def test_so_it_does_on_a_mesh(each: Each, dtype: torch.dtype) -> None:
    require_bits_under_rank_0s_order("hybrid", each, dtype)


@in_ranks(2)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 3e-4])  # the gradient has a bucket of its own, or shares one
@pytest.mark.parametrize("write", some(WRITES, most=1))
@STRATEGIES
def test_a_gradient_that_one_rank_has_written_does_not_move_to_rank_0s_order(
    strategy: str, write: Write, bucket_cap_mb: float
) -> None:
    """The ranks would gather other shards, and wait for each other."""
    settings = {**ORDERED, "bucket_cap_mb": bucket_cap_mb, "order": "observed"}
    with training(Crossed(), strategy, "SGD", **settings) as (ddp, optimizer):
        sharding, before = sharding_of(ddp), parameters(ddp)
        backward(ddp, 0)
        if dist.get_rank() == 1:
            write(ddp.module.last.weight)
        assert text_of(ReplicaMismatch, optimizer.step) == (
            "the gradient of 'last.weight' is not the same on rank 1 as on rank 0, and a sharded optimizer steps on it.\n"
            "  before shards move to another plan; 1 of 6 gradients differ\n"
            "  On every rank, write the same values into `.grad` after backward, or call zero_grad()."
        )
        assert sharding_of(ddp) is sharding
        require_equal(parameters(ddp), before)
        optimizer.zero_grad()
        backward(ddp, 1)
        optimizer.step()
        require_same_everywhere(parameters(ddp))


@in_ranks(2)
@pytest.mark.parametrize("write", some(WRITES, most=1))
@STRATEGIES
def test_a_gradient_that_one_rank_has_written_before_the_optimizer_is_made_is_an_error_on_every_rank(
    strategy: str, write: Write
) -> None:
    """Else each rank would step on its part of another gradient."""
    with wrapped(Crossed(), strategy) as ddp:
        before = parameters(ddp)
        backward(ddp, 0)
        if dist.get_rank() == 1:
            write(ddp.module.last.weight)
        assert text_of(ReplicaMismatch, lambda: sharded(ddp)) == (
            "the gradient of 'last.weight' is not the same on rank 1 as on rank 0, and a sharded optimizer steps on it.\n"
            "  before gradients are cut into shards; 1 of 6 gradients differ\n"
            "  On every rank, write the same values into `.grad` after backward, or call zero_grad()."
        )
        require_equal(parameters(ddp), before)
        ddp.zero_grad()
        optimizer = sharded(ddp)
        backward(ddp, 1)
        optimizer.step()
        require_same_everywhere(parameters(ddp))


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], most=1))
@STRATEGIES
def test_a_state_that_was_loaded_before_moves_along(strategy: str, dtype: torch.dtype) -> None:
    def trained(*numbers: range) -> Parameters:
        saved: Any = None
        for steps in numbers:
            with training(Crossed(dtype), strategy, "AdamW", **ORDERED) as (ddp, optimizer):
                if saved is not None:
                    ddp.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                for number in steps:
                    optimizer.zero_grad()
                    backward(ddp, number)
                    optimizer.step()
                saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
                found = parameters(ddp)
        return found

    require_equal(trained(range(2), range(2, 4)), trained(range(4)))


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
def test_of_several_optimizers_the_last_one_lays_out(strategy: str) -> None:
    def trained(make: Callable[..., Any], strategy: str | None, before: int) -> Parameters:
        with wrapped(Crossed(), strategy) as ddp:
            for number in range(before):  # with one optimizer for each layer, or before the last of them
                ddp.zero_grad()
                backward(ddp, number)
            layers = list(ddp.module.children())
            optimizers = [make(ddp, *layer.parameters()) for layer in layers[:-1]]
            assert sharding_of(ddp) is None
            if before > 1:
                backward(ddp, 5)
            optimizers.append(make(ddp, *layers[-1].parameters()))
            assert (sharding_of(ddp) is None) == (make is plain)
            for number in range(3):
                if before < 2 or number:
                    ddp.zero_grad()
                    backward(ddp, 10 + number)
                for optimizer in optimizers:
                    optimizer.step()
            return parameters(ddp)

    for before in (0, 1, 2):
        require_equal(trained(sharded, strategy, before), trained(plain, None, before), what=str(before))


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], most=1))
def test_gradients_from_before_the_optimizer_was_made_count(dtype: torch.dtype) -> None:
    """A mean that waits for its step, and gradients that were only accumulated."""

    def trained(make: Callable[..., Any], *, is_mean: bool) -> Parameters:
        with wrapped(Crossed(dtype)) as ddp:
            with contextlib.nullcontext() if is_mean else ddp.no_sync():
                backward(ddp, 0)
            optimizer = make(ddp)
            if not is_mean:
                backward(ddp, 1)
            optimizer.step()
            return parameters(ddp)

    for is_mean in (True, False):
        found = trained(sharded, is_mean=is_mean)
        require_same_everywhere(found)
        if dtype is torch.float32:  # of 16 bits, shards are updated in fp32
            require_equal(found, trained(plain, is_mean=is_mean), what=str(is_mean))


def freezes(model: Crossed) -> None:
    model.first.requires_grad_(False)


def unfreezes(model: Crossed) -> None:
    model.last.requires_grad_(True)


def adds(model: Crossed) -> None:
    torch.manual_seed(1)
    model.last = nn.Sequential(model.last, nn.Linear(3, 2))  # type: ignore[assignment]


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("change", some([freezes, unfreezes, adds], most=1))
@pytest.mark.parametrize("is_before", [True, False])
@STRATEGIES
def test_a_change_lays_out_before_gradients_leave(strategy: str, is_before: bool, change: Callable[[Any], None]) -> None:
    """Before the first step, or after one; no round is reduced whole."""

    def trained(make: Callable[..., Any], strategy: str | None) -> Parameters:
        model = Crossed()
        if change is unfreezes:
            model.last.requires_grad_(False)
        with wrapped(model, strategy) as ddp:
            optimizer = make(ddp)
            if not is_before:
                backward(ddp, 0)
                optimizer.step()
            ddp.zero_grad()
            change(model)
            if change is adds:
                optimizer.add_param_group({"params": list(model.last[1].parameters())})  # type: ignore[index]
            for number in range(3):
                ddp.zero_grad()
                backward(ddp, 1 + number)
                if make is sharded:
                    assert sharding_of(ddp) is not None
                    assert not any(type(param.grad) is Tensor for param in model.parameters())
                optimizer.step()
            return parameters(ddp)

    require_equal(trained(sharded, strategy), trained(plain, None))


@in_ranks(2)
def test_micro_batches_of_zero2_are_reduced_from_the_first_one_on() -> None:
    """Also in the step in which the parameters change."""
    with training(Crossed(), "zero2", "SGD", **ORDERED) as (ddp, optimizer):
        for number in range(4):
            if number == 2:
                freezes(ddp.module)
            optimizer.zero_grad()
            expected: list[Tensor] = []
            for micro_batch in range(2):
                rows = [noise(5, 6, step=10 * number + micro_batch, rank=rank) for rank in range(2)]
                trained = [param for param in ddp.parameters() if param.requires_grad]
                one, other = (torch.autograd.grad(ddp.module(x).float().square().sum(), trained) for x in rows)
                means = [(first + second) / 2 for first, second in zip(one, other, strict=True)]
                expected = [sum(pair) for pair in zip(expected, means, strict=True)] if expected else means  # type: ignore[misc]
                with ddp.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                    ddp(rows[dist.get_rank()]).float().square().sum().backward()
            for param, mean in zip(trained, expected, strict=True):
                assert torch.equal(ddp.full_gradient(param), mean)
            optimizer.step()


@in_ranks(2)
def test_an_optimizer_is_not_made_inside_a_backward() -> None:
    with wrapped(MLP.model(), "zero1") as ddp:
        param = next(ddp.parameters())
        texts = []
        param.register_hook(lambda _grad: texts.append(text_of(PhaseError, lambda: sharded(ddp))))
        MLP.loss(ddp, 0).backward()
        assert texts == [
            f"ShardedOptimizer() was called inside a backward.\n  rank {dist.get_rank()}\n"
            "  Make the optimizer before or after it."
        ]
        param.grad = None
        sharded(ddp)
