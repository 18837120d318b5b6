"""The mean of a number over ranks, by which losses are divided: what it makes of gradients, what it costs, what is refused."""

import contextlib
import copy
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.models import mlp, noise
from support.naive import TIMEOUT_S, wrapped
from support.ranks import in_ranks
from support.sharded import MLP, optimizer_for, require_same_everywhere, training
from undertow import ConfigError, PhaseError, WrongType

NUM_STEPS, NUM_MICRO = 3, 2
STRATEGIES = ["ddp", "zero1", "zero2"]


def num_tokens_of(rank: int, step: int, part: int) -> int:
    return 2 + 3 * rank + (step + part) % 3


def batch_of(rank: int, step: int, part: int) -> Tensor:
    return noise(num_tokens_of(rank, step, part), 6, step=NUM_MICRO * step + part, rank=rank)


def loss_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def train(model: Any, optimizer: Any) -> None:
    """Steps of micro-batches, whose losses are divided by the mean number of tokens of a step."""
    rank = dist.get_rank()
    for step in range(NUM_STEPS):
        mean = model.mean_over_ranks(sum(num_tokens_of(rank, step, part) for part in range(NUM_MICRO)))
        optimizer.zero_grad()
        for part in range(NUM_MICRO):
            is_last = part == NUM_MICRO - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (loss_sum(model, batch_of(rank, step, part)) / mean.wait()).backward()
        optimizer.step()


def train_in_one_process(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same steps with the tokens of all ranks in one batch."""
    for step in range(NUM_STEPS):
        batches = [batch_of(rank, step, part) for rank in range(dist.get_world_size()) for part in range(NUM_MICRO)]
        tokens = torch.cat(batches)
        optimizer.zero_grad()
        (loss_sum(model, tokens) / len(tokens)).backward()
        optimizer.step()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_that_of_one_process_with_all_tokens(strategy: str) -> None:
    model = MLP.model()
    bare = copy.deepcopy(model)
    with training(model, strategy, "SGD") as (ddp, optimizer):
        train(ddp, optimizer)
        ddp.wait()
        train_in_one_process(bare, optimizer_for(bare, "ddp", "SGD"))
        # The sums of products have other orders: a few units in the last place of fp32 in each step.
        torch.testing.assert_close(list(model.parameters()), list(bare.parameters()), rtol=1e-5, atol=1e-6)
        require_same_everywhere(dict(ddp.named_parameters()))


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_may_end_when_no_rank_has_data(strategy: str) -> None:
    """Rank 1 has two batches more than rank 0, which takes part without data; every rank steps."""
    rank, num_batches, num_steps = dist.get_rank(), (1, 3), 0
    with training(MLP.model(), strategy, "SGD") as (ddp, optimizer):
        while True:
            has_data = num_steps < num_batches[rank]
            mean = ddp.mean_over_ranks(num_tokens_of(rank, num_steps, 0) if has_data else 0).wait()
            if mean == 0:
                break
            optimizer.zero_grad()
            if has_data:
                (loss_sum(ddp, batch_of(rank, num_steps, 0)) / mean).backward()
            else:
                ddp.finish()
            optimizer.step()
            num_steps += 1
        ddp.wait()
        assert num_steps == 3
        require_same_everywhere(dict(ddp.named_parameters()))


@pytest.mark.deep
@in_ranks(4)
def test_it_is_the_mean_over_all_ranks_of_a_mesh() -> None:
    with training(mlp(), "hybrid", "SGD") as (ddp, _optimizer):
        assert ddp.mean_over_ranks(dist.get_rank()).wait().item() == 1.5


NUMBERS: dict[str, Callable[[int], Any]] = {
    "an int": lambda rank: 3 + rank,
    "a large int": lambda rank: 2**53 - 2 * rank,  # exact in fp64 only
    "a float": lambda rank: 0.5 + rank,
    "a fraction": lambda rank: Fraction(3 + rank, 2),
    "a number of numpy's": lambda rank: np.int64(3 + rank),
    "a tensor": lambda rank: torch.tensor(3 + rank),
    "a tensor of one dimension": lambda rank: torch.tensor([3.0 + rank]),
}


@in_ranks(2)
def test_every_real_number_has_a_mean() -> None:
    with wrapped(nn.Linear(3, 2)) as ddp:
        for name, number_of in NUMBERS.items():
            mean = ddp.mean_over_ranks(number_of(dist.get_rank())).wait()
            wanted = (float(number_of(0)) + float(number_of(1))) / 2
            assert (mean.item(), mean.dtype, mean.dim(), mean.requires_grad) == (wanted, torch.float64, 0, False), name


@in_ranks(2)
def test_each_call_has_a_mean_of_its_own_whatever_the_order_of_waits() -> None:
    rank = dist.get_rank()
    with wrapped(nn.Linear(3, 2)) as ddp:
        first, second = ddp.mean_over_ranks(rank), ddp.mean_over_ranks(10 * rank)
        assert second.wait().item() == 5.0
        assert first.wait() is first.wait()
        assert first.wait().item() == 0.5


@in_ranks(2)
def test_a_mean_that_nobody_waits_for_ends_with_the_model() -> None:
    with wrapped(nn.Linear(3, 2)) as ddp:
        ddp.mean_over_ranks(1)
        ddp(torch.ones(1, 3)).sum().backward()
        ddp.mean_over_ranks(2)


@in_ranks(2, 3)
def test_it_costs_one_all_reduce_of_eight_bytes() -> None:
    with wrapped(nn.Linear(3, 2), auto_tune=False, record="off") as ddp:
        sizes, all_reduce = list[int](), dist.ProcessGroup.allreduce

        def counted(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
            sizes.append(tensors[0].nbytes)
            return all_reduce(group, tensors, *args)

        with mock.patch.object(dist.ProcessGroup, "allreduce", counted):
            mean = ddp.mean_over_ranks(5)
            assert sizes == [8]
            (ddp(torch.ones(2, 3)).sum() / mean.wait()).backward()
        assert len(sizes) == 1 + len(ddp.plan.buckets)


@in_ranks(2)
def test_it_may_be_called_during_a_reduction_by_hand() -> None:
    with wrapped(nn.Linear(3, 2)) as ddp:
        with ddp.no_sync():
            ddp(torch.ones(2, 3)).sum().backward()
        reduction = ddp.reduce_gradients_async()
        mean = ddp.mean_over_ranks(dist.get_rank())
        reduction.wait()
        assert (mean.wait().item(), ddp.module.bias.grad.tolist()) == (0.5, [2.0, 2.0])


ASK = "  mean_over_ranks(number)\n  Give the number of tokens, or samples, that the loss of this rank is summed over."
NOT_NUMBERS: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("3", WrongType, "number must be a real number, got str."),
    "a bool": (True, WrongType, "number must be a real number, got bool."),
    "a complex number": (1j, WrongType, "number must be a real number, got complex."),
    "nothing": (None, WrongType, "number must be a real number, got NoneType."),
    "two numbers": (torch.ones(2), WrongType, "number must be a real number, got a tensor of shape (2,)."),
    "NaN": (float("nan"), ConfigError, "number must be finite, got nan."),
    "an infinite tensor": (torch.tensor(-torch.inf), ConfigError, "number must be finite, got -inf."),
}


@in_ranks(2)
def test_what_is_not_a_finite_number_is_refused_and_sends_nothing() -> None:
    with wrapped(nn.Linear(3, 2)) as ddp:
        for number, error, text in NOT_NUMBERS.values():
            if dist.get_rank() == 1:
                assert text_of(error, partial(ddp.mean_over_ranks, number)) == f"{text}\n{ASK}"
        assert ddp.mean_over_ranks(1).wait().item() == 1.0


@in_ranks(2)
def test_it_is_refused_inside_a_backward_and_inside_join() -> None:
    where = f"  mean_over_ranks(number), rank {dist.get_rank()}\n"
    with wrapped(nn.Linear(3, 2)) as ddp:
        with ddp.join():
            ddp(torch.ones(1, 3)).sum().backward()
            assert text_of(PhaseError, lambda: ddp.mean_over_ranks(3)) == (
                f"mean_over_ranks() was called inside join(): a rank that has left its loop does not answer.\n{where}"
                "  Leave join() out. Give 0 on a rank without data, call finish() there, and end every rank's loop when "
                "the mean is 0."
            )
        assert ddp.mean_over_ranks(3).wait().item() == 3.0
        ddp.module.weight.register_hook(lambda _: ddp.mean_over_ranks(3))
        assert text_of(PhaseError, ddp(torch.ones(1, 3)).sum().backward) == (
            f"mean_over_ranks() was called inside a backward.\n{where}"
            "  Call it before the forward: during a backward, ranks may run in different orders."
        )
