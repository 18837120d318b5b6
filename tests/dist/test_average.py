"""What average_gradients makes of gradients of every kind, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import inside
from support.alike import of_all_ranks
from support.errors import text_of
from support.models import CASES, noise
from support.naive import collectives, naive_mean, require_same
from support.ranks import in_ranks
from undertow import ConfigError, PhaseError, PlanMismatch, WrongType, average_gradients

WHERE = "average_gradients(gradients, parameters)"


def require_naive(averaged: Any, gradients: Any) -> None:
    """The mean of each by an all-reduce of its own."""
    holder = nn.ParameterList(nn.Parameter(torch.empty_like(gradient)) for gradient in gradients)
    for param, gradient in zip(holder, gradients, strict=True):
        param.grad = gradient.detach().clone(memory_format=torch.contiguous_format)
    naive_mean(holder)
    require_same(dict(enumerate(averaged)), {index: param.grad for index, param in enumerate(holder)})


@in_ranks(2, 3)
@pytest.mark.parametrize("case_name", CASES)
def test_the_mean_is_that_of_an_all_reduce_per_gradient(case_name: str) -> None:
    """Each dtype is one collective, and flags need none."""
    case = CASES[case_name]
    model = case.model()
    num_dtypes = len({param.dtype for param in model.parameters()})
    for step in range(2):
        local = torch.autograd.grad(case.loss(model, step), list(model.parameters()))
        with collectives() as called:
            averaged = average_gradients(iter(local), model.parameters())  # generators will do
            assert called == ["all_reduce"] * num_dtypes
        require_naive(averaged, local)
        for mean, gradient in zip(averaged, local, strict=True):
            assert mean.numel() == 0 or mean.stride() == torch.empty_like(gradient).stride()


@in_ranks(2, 3)
def test_ranks_may_hold_a_gradient_with_other_strides() -> None:
    """The gradient of each rank lies in memory in another way, and all but one have none."""
    rank, values, num_ranks = dist.get_rank(), noise(3, 4), dist.get_world_size()
    turned = values.t().contiguous().t()
    averaged = average_gradients([turned if rank == 0 else values])
    partly = average_gradients([turned if rank == 0 else None], [torch.zeros(3, 4, requires_grad=True)])
    require_same({"all": averaged[0]}, {"all": sum(noise(3, 4, rank=each) for each in range(num_ranks)) / num_ranks})
    require_same({"one": partly[0]}, {"one": noise(3, 4, rank=0) / num_ranks})
    assert {averaged[0].stride(), partly[0].stride()} == {(4, 1) if rank else (1, 3)}


@in_ranks(2, 3)
def test_an_expanded_gradient_becomes_one_that_can_be_written() -> None:
    """And the same tensor may be the gradient of two."""
    x, y = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
    gradients = torch.autograd.grad((x + y).sum() * dist.get_rank(), [x, y])
    assert gradients[0].stride() == (0, 0)
    averaged, other = average_gradients(gradients)
    averaged[0, 0] = 7.0
    mean = (dist.get_world_size() - 1) / 2
    assert averaged.tolist() == [[7.0, mean, mean], [mean] * 3]
    assert other.unique().tolist() == [mean]
    assert gradients[0].unique().tolist() == [dist.get_rank()]


@in_ranks(2, 3)
def test_sparse_gradients_become_dense() -> None:
    """Ranks use different rows; the last one uses none."""
    rank, num_ranks, embedding = dist.get_rank(), dist.get_world_size(), nn.Embedding(4, 1, sparse=True)
    local: tuple[Tensor | None, ...] = (None,)
    if rank < num_ranks - 1:
        local = torch.autograd.grad(embedding(torch.tensor([rank, 3, 3])).sum(), [embedding.weight])
        assert local[0].is_sparse
    (averaged,) = average_gradients(local, embedding.parameters())
    used = [float(row < num_ranks - 1) for row in range(3)]
    assert (averaged * num_ranks).flatten().round().tolist() == [*used, 2.0 * (num_ranks - 1)]


@in_ranks(2, 3)
def test_results_are_cut_off_from_the_graph_and_from_each_other() -> None:
    """Gradients that can be differentiated themselves; the results cannot, and each is a tensor of its own to autograd."""
    x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    gradients = torch.autograd.grad((x**3).sum(), [x], create_graph=True)
    first, second = average_gradients([*gradients, *gradients])
    assert not first.requires_grad
    assert not second.requires_grad
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * second).sum()
    first.zero_()  # does not touch what the graph of `loss` has saved
    loss.backward()
    gradients[0].sum().backward()
    assert x.grad.tolist() == [6.0 * (dist.get_rank() + 1)] * 2
    mean = sum(3.0 * (rank + 1) ** 2 for rank in range(dist.get_world_size())) / dist.get_world_size()
    assert weight.grad.tolist() == pytest.approx([mean] * 2, rel=1e-6)  # 14 / 3 is no number of fp32


@in_ranks(2, 3)
def test_a_backend_that_cannot_average_gives_the_same() -> None:
    with inside.without_averaging_backends():
        (averaged, _) = average_gradients([torch.full((2,), 6.0 * dist.get_rank()), None], [torch.zeros(2)] * 2)
    assert averaged.tolist() == [3.0 * (dist.get_world_size() - 1)] * 2


@in_ranks(2, 3)
def test_a_gradient_without_elements_is_there_or_not_like_others() -> None:
    empty = torch.zeros(0, 3)
    averaged = average_gradients([None, empty, None], [empty, empty, empty])
    assert [None if it is None else tuple(it.shape) for it in averaged] == [None, (0, 3), None]


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("first", "others"), [([(2, 3)], [(3, 2)]), ([(4,), (2, 1)], [(2, 1), (4,)])], ids=["another shape", "another order"]
)
def test_shapes_that_differ_between_ranks_are_an_error_on_every_rank(
    first: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> None:
    gradients = [torch.zeros(shape) for shape in (others if dist.get_rank() else first)]
    what, where, remedy = text_of(PlanMismatch, lambda: average_gradients(gradients)).splitlines()
    assert average_gradients([torch.ones(2)])[0].tolist() == [1.0, 1.0]  # nothing is left over from before
    assert what == "ranks gave gradients of other shapes or dtypes."
    before, _, fingerprint = where.rpartition(" ")
    assert before == f"  rank {dist.get_rank()}: fingerprint"
    assert len(set(of_all_ranks(fingerprint))) == 2
    assert remedy == "  Give the gradients of the same parameters in the same order on every rank."


PARAM = torch.zeros(2, requires_grad=True)
ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
ENTRY = "Pass what torch.autograd.grad returned, and what it was asked for."
LIST = "Pass the tuple that torch.autograd.grad returned, and a tuple or list of what it was asked for."
UNLIKE = "gradient 0 must be like its parameter, (2,) torch.float32 on cpu, got"

REFUSED: list[tuple[type[Exception], tuple[Any, ...], str, str]] = [
    (
        ConfigError,
        ([torch.zeros(2), None],),
        "gradient 1 is None, and nothing says how large it would be.",
        "Pass parameters too, those that torch.autograd.grad was given.",
    ),
    (ConfigError, ([None], [PARAM, PARAM]), "there are 1 gradients and 2 parameters.", ORDER),
    (WrongType, ([torch.zeros(2), 3.0],), "gradient 1 must be a tensor or None, got float.", ENTRY),
    (WrongType, ([torch.zeros(2).long()],), "gradient 0 must be floating-point or complex, got torch.int64.", ENTRY),
    (WrongType, ([None], [None]), "parameter 0 must be a tensor, got NoneType.", ENTRY),
    (WrongType, (torch.zeros(2),), "gradients must be a sequence of tensors, got Tensor.", LIST),
    (WrongType, ([None], PARAM), "parameters must be a sequence of tensors, got Tensor.", LIST),
    (ConfigError, ([torch.zeros(3)], [PARAM]), f"{UNLIKE} (3,) torch.float32 on cpu.", ORDER),
    (ConfigError, ([torch.zeros(2).half()], [PARAM]), f"{UNLIKE} (2,) torch.float16 on cpu.", ORDER),
]


@in_ranks(2)
def test_what_cannot_be_averaged_is_refused_before_anything_is_sent() -> None:
    with collectives() as called:
        for error, arguments, what, remedy in REFUSED:
            with pytest.raises(error) as caught:
                average_gradients(*arguments)
            assert str(caught.value) == f"{what}\n  {WHERE}\n  {remedy}"
    assert called == []


@in_ranks(2)
def test_a_call_inside_a_backward_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: average_gradients([gradient])[0])
    assert text_of(PhaseError, x.sum().backward) == (
        f"average_gradients() was called inside a backward.\n  {WHERE}\n"
        "  Call it on what torch.autograd.grad has returned; there ranks may come in different orders."
    )
