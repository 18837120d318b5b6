"""Sparse gradients of embeddings: they stay sparse, and their dense form is the mean.

All gradients are small integers whatever the parameters are, so that sums are exact in every order; none is zero, so
that no row of a sum goes away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import LEARNING_RATE, TIMEOUT_S, SideBySide, with_both_plans
from support.naive import naive_mean, require_same
from support.ranks import Ranks, in_ranks

NUM_STEPS = 3
NUM_WORDS = 7


def integers(low: int, high: int, *shape: int, step: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


class Words(nn.Module):
    """Two tables with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(NUM_WORDS, 3, sparse=True)
        self.bag = nn.EmbeddingBag(NUM_WORDS, 3, sparse=True, mode="sum")
        self.dense = nn.Linear(3, 2)

    def forward(self, step: int, uses: Sequence[str] = ("single", "bag", "dense")) -> Tensor:
        words, factors = integers(0, NUM_WORDS, 5, step=step), integers(1, 5, 5, 3, step=step).float()
        result = torch.zeros(())
        if "single" in uses:
            result = result + (self.single(words) * factors).sum()
        if "bag" in uses:
            result = result + (self.bag(words.view(5, 1)) * factors).sum()
        if "dense" in uses:
            result = result + self.dense(factors).sum()
        if "tied" in uses:
            result = result + (factors @ self.single.weight.t()).sum()
        return result


def require_means(side: SideBySide, sparse: Sequence[str] = ("single.weight", "bag.weight")) -> None:
    """The wrapped model's gradients are dense means of the bare one's, which stay like that; `sparse` are those that are."""
    for param in side.bare.parameters():
        if param.grad is not None:
            param.grad = param.grad.to_dense()
    naive_mean(side.bare)
    ours = dict(side.module.named_parameters())
    require_same(
        {name: None if param.grad is None else param.grad.to_dense() for name, param in ours.items()},
        {name: param.grad for name, param in side.bare.named_parameters()},
    )
    assert [name for name, param in ours.items() if param.grad is not None and param.grad.is_sparse] == list(sparse)


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)]


def sparse_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables, rest = [], []
    for name, param in model.named_parameters():
        (rest if "dense" in name else tables).append(param)
    return [torch.optim.SparseAdam(tables, lr=LEARNING_RATE), torch.optim.SGD(rest, lr=LEARNING_RATE)]


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("make_optimizers", [sgd, sparse_adam])
def test_sparse_gradients_stay_sparse_and_train(make_optimizers: Optimizers, bucket_cap_mb: float | None) -> None:
    with SideBySide(Words(), bucket_cap_mb) as side:
        optimizers = [*make_optimizers(side.ddp), *make_optimizers(side.bare)]
        for step in range(NUM_STEPS):
            side.zero_grad()
            side.backward(lambda model, step=step: model(step))
            require_means(side)
            for table in (side.bare.single, side.bare.bag):
                table.weight.grad = table.weight.grad.to_sparse(1)  # SparseAdam takes no other
            for optimizer in optimizers:
                optimizer.step()
            side.compare_parameters()


# By step, what each rank uses, and what is sparse afterwards; a third rank uses what the first one does.
ONE, OTHER = ("single", "dense"), ("bag", "dense")
USES = {
    "rank 0 only": [(ONE, ("dense",), ["single.weight"])] * NUM_STEPS,
    "rank 1 only": [(("dense",), ONE, ["single.weight"])] * NUM_STEPS,
    "another on each rank": [(ONE, OTHER, ["single.weight", "bag.weight"])] * NUM_STEPS,
    "nowhere at first": [(("dense",), ("dense",), []), (("dense",), OTHER, ["bag.weight"]), (ONE, ONE, ["single.weight"])],
}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("name", USES)
def test_a_table_may_be_used_on_some_ranks_only(name: str, bucket_cap_mb: float | None) -> None:
    with SideBySide(Words(), bucket_cap_mb) as side:
        for step, (first, second, sparse) in enumerate(USES[name]):
            uses = (first, second)[dist.get_rank() % 2]
            side.zero_grad()
            side.backward(lambda model, step=step, uses=uses: model(step, uses))
            require_means(side, sparse)
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_sparse_gradients_accumulate(bucket_cap_mb: float | None) -> None:
    with SideBySide(Words(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: model(2 * step))
            side.backward(lambda model, step=step: model(2 * step + 1))
            require_means(side)
            side.optimize()


def kept(set_to_none: bool, bucket_cap_mb: float | None) -> None:
    """What is there is a mean already, and the next mean is added to it; or it was zeroed in place."""
    with SideBySide(Words(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            if not set_to_none:
                for model in side.both:
                    model.zero_grad(set_to_none=False)
            side.backward(lambda model, step=step: model(step))
            require_means(side)


@with_both_plans
@pytest.mark.parametrize("set_to_none", [True, False], ids=["kept", "zeroed in place"])
def test_sparse_gradients_that_are_there_are_added_to(ranks: Ranks, set_to_none: bool, bucket_cap_mb: float | None) -> None:
    ranks.run(kept, set_to_none, bucket_cap_mb, timeout_s=TIMEOUT_S)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("dense_on", ["all ranks", "rank 0"])
def test_a_sparse_table_may_be_tied_to_a_dense_layer(dense_on: str, bucket_cap_mb: float | None) -> None:
    """A gradient with a dense part is dense; what the others make of it, where it is so on one rank only, is free."""
    uses = ("single", "tied") if dense_on == "all ranks" or dist.get_rank() == 0 else ("single",)
    with SideBySide(Words(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            side.backward(lambda model, step=step: model(step, uses))
            require_means(side, [] if not side.module.single.weight.grad.is_sparse else ["single.weight"])
            assert dense_on == "rank 0" or not side.module.single.weight.grad.is_sparse
            side.optimize()
