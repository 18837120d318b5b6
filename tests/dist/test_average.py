"""What average_gradients makes of gradients of every kind, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist.test_events import collectives
from support.errors import text_of
from support.models import CASES, noise
from support.naive import naive_mean, require_same
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, PhaseError, PlanMismatch, WrongType, average_gradients
from undertow.runtime import group as group_module

WHERE = "average_gradients(gradients, parameters)"


def naive(gradients: list[Tensor]) -> list[Tensor]:
    """The mean of each by an all-reduce of its own."""
    holder = nn.ParameterList(nn.Parameter(torch.empty_like(gradient)) for gradient in gradients)
    for param, gradient in zip(holder, gradients, strict=True):
        param.grad = gradient.detach().clone(memory_format=torch.contiguous_format)
    naive_mean(holder)
    return [param.grad for param in holder]


@in_ranks(2, 3)
@pytest.mark.parametrize("case_name", CASES)
def test_the_mean_is_that_of_an_all_reduce_per_gradient(case_name: str) -> None:
    case = CASES[case_name]
    model = case.model()
    params = dict(model.named_parameters())
    for step in range(2):
        local = torch.autograd.grad(case.loss(model, step), list(params.values()))
        averaged = average_gradients(local)
        require_same(dict(zip(params, averaged, strict=True)), dict(zip(params, naive(list(local)), strict=True)))
        for mean, gradient in zip(averaged, local, strict=True):
            assert mean.numel() == 0 or mean.stride() == torch.empty_like(gradient).stride()


def collectives_of_mixed_dtypes() -> list[str]:
    dtypes = [torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.bfloat16]
    gradients = [noise(2).to(dtype) for dtype in dtypes]
    with collectives() as called:
        averaged = average_gradients(gradients)
        found = list(called)
    require_same(dict(enumerate(averaged)), dict(enumerate(naive(gradients))))
    assert [it.dtype for it in averaged] == dtypes
    return found


def test_each_dtype_is_one_collective_and_flags_need_none(ranks: Ranks) -> None:
    assert ranks.run(collectives_of_mixed_dtypes) == [["all_reduce"] * 3] * ranks.num_ranks


def strides_that_differ() -> list[tuple[int, ...]]:
    """The gradient of each rank lies in memory in another way, and one rank has none."""
    rank, values = dist.get_rank(), noise(3, 4)
    parameter = torch.zeros(3, 4, requires_grad=True)
    turned = values.t().contiguous().t()
    averaged = average_gradients([turned if rank == 0 else values])
    partly = average_gradients([turned if rank == 0 else None], [parameter])
    every_rank = range(dist.get_world_size())
    require_same({"all": averaged[0]}, {"all": sum(noise(3, 4, rank=each) for each in every_rank) / len(every_rank)})
    require_same({"one": partly[0]}, {"one": noise(3, 4, rank=0) / len(every_rank)})
    return [averaged[0].stride(), partly[0].stride()]


def test_ranks_may_hold_a_gradient_with_other_strides(ranks: Ranks) -> None:
    first, *others = ranks.run(strides_that_differ)
    assert first == [(1, 3)] * 2
    assert others == [[(4, 1)] * 2] * len(others)


def expanded() -> list[object]:
    x = torch.zeros(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sum() * dist.get_rank(), [x])
    assert gradient.stride() == (0, 0)
    (averaged,) = average_gradients([gradient])
    averaged[0, 0] = 7.0
    return [averaged.tolist(), gradient.tolist() == [[dist.get_rank()] * 3] * 2]


def test_an_expanded_gradient_becomes_one_that_can_be_written(ranks: Ranks) -> None:
    mean = (ranks.num_ranks - 1) / 2
    assert ranks.run(expanded) == [[[[7.0, mean, mean], [mean] * 3], True]] * ranks.num_ranks


def given_twice() -> list[list[float]]:
    """Autograd gives the same tensor for both."""
    a, b = (torch.zeros(2, requires_grad=True) for _ in range(2))
    gradients = torch.autograd.grad(((a + b) * dist.get_rank()).sum(), [a, b])
    first, second = average_gradients(gradients)
    first.mul_(2)
    return [first.tolist(), second.tolist()]


def test_one_tensor_may_be_two_gradients(ranks: Ranks) -> None:
    mean = (ranks.num_ranks - 1) / 2
    assert ranks.run(given_twice) == [[[2 * mean] * 2, [mean] * 2]] * ranks.num_ranks


def sparse() -> list[list[float]]:
    """Ranks use different rows; the last one uses none."""
    rank = dist.get_rank()
    embedding = nn.Embedding(4, 1, sparse=True)
    local: tuple[Tensor | None, ...] = (None,)
    if rank < dist.get_world_size() - 1:
        local = torch.autograd.grad(embedding(torch.tensor([rank, 3, 3])).sum(), [embedding.weight])
        assert local[0].is_sparse
    (averaged,) = average_gradients(local, embedding.parameters())
    return (averaged * dist.get_world_size()).flatten().round().tolist()


def test_sparse_gradients_become_dense(ranks: Ranks) -> None:
    assert ranks.run(sparse) == [{2: [1.0, 0.0, 0.0, 2.0], 3: [1.0, 1.0, 0.0, 4.0]}[ranks.num_ranks]] * ranks.num_ranks


def with_a_graph() -> tuple[bool, list[float]]:
    """Gradients that can be differentiated themselves; the results cannot, and each is a tensor of its own to autograd."""
    x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    gradients = torch.autograd.grad((x**3).sum(), [x], create_graph=True)
    first, second = average_gradients([*gradients, *gradients])
    result = (first.requires_grad, second.requires_grad)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * second).sum()
    first.zero_()  # does not touch what the graph of `loss` has saved
    loss.backward()
    gradients[0].sum().backward()
    assert x.grad.tolist() == [6.0 * (dist.get_rank() + 1)] * 2
    return any(result), weight.grad.tolist()


def test_results_are_cut_off_from_the_graph_and_from_each_other(ranks: Ranks) -> None:
    mean = sum(3.0 * (rank + 1) ** 2 for rank in range(ranks.num_ranks)) / ranks.num_ranks
    for is_differentiable, gradient in ranks.run(with_a_graph):
        assert not is_differentiable
        assert gradient == pytest.approx([mean] * 2, rel=1e-6)  # 14 / 3 is no number of fp32


def without_average_in_the_collective() -> list[float]:
    """As with a backend that only adds."""
    backends = group_module._BACKENDS_WITH_AVERAGE
    group_module._BACKENDS_WITH_AVERAGE = ()
    try:
        (averaged, _) = average_gradients([torch.full((2,), 6.0 * dist.get_rank()), None], [torch.zeros(2)] * 2)
    finally:
        group_module._BACKENDS_WITH_AVERAGE = backends
    return averaged.tolist()


def test_a_backend_that_cannot_average_gives_the_same(ranks: Ranks) -> None:
    assert ranks.run(without_average_in_the_collective) == [[3.0 * (ranks.num_ranks - 1)] * 2] * ranks.num_ranks


def no_elements() -> list[object]:
    empty = torch.zeros(0, 3)
    averaged = average_gradients([None, empty, None], [empty, empty, empty])
    return [None if it is None else tuple(it.shape) for it in averaged]


def test_a_gradient_without_elements_is_there_or_not_like_others(ranks: Ranks) -> None:
    assert ranks.run(no_elements) == [[None, (0, 3), None]] * ranks.num_ranks


DIFFERENT = {
    "another shape": ([(2, 3)], [(3, 2)]),
    "another order": ([(4,), (2, 1)], [(2, 1), (4,)]),
}


def shapes_differ(first: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> str:
    shapes = first if dist.get_rank() == 0 else others
    text = text_of(PlanMismatch, lambda: average_gradients([torch.zeros(shape) for shape in shapes]))
    assert average_gradients([torch.ones(2)])[0].tolist() == [1.0, 1.0]  # nothing is left over from before
    return text


@pytest.mark.parametrize("name", DIFFERENT)
def test_shapes_that_differ_between_ranks_are_an_error_on_every_rank(ranks: Ranks, name: str) -> None:
    texts = [text.splitlines() for text in ranks.run(shapes_differ, *DIFFERENT[name])]
    for rank, (what, where, remedy) in enumerate(texts):
        assert what == "ranks gave gradients of other shapes or dtypes."
        assert where.startswith(f"  rank {rank}: fingerprint ")
        assert remedy == "  Give the gradients of the same parameters in the same order on every rank."
    assert texts[0][1].split()[-1] != texts[1][1].split()[-1]


PARAM = torch.zeros(2, requires_grad=True)
ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
ENTRY = "Pass what torch.autograd.grad returned, and what it was asked for."
LIST = "Pass the tuple that torch.autograd.grad returned, and a tuple or list of what it was asked for."

REFUSED: dict[str, tuple[type[Exception], tuple[Any, ...], str, str]] = {
    "a None alone": (
        ConfigError,
        ([torch.zeros(2), None],),
        "gradient 1 is None, and nothing says how large it would be.",
        "Pass parameters too, those that torch.autograd.grad was given.",
    ),
    "lengths": (ConfigError, ([None], [PARAM, PARAM]), "there are 1 gradients and 2 parameters.", ORDER),
    "a number": (WrongType, ([torch.zeros(2), 3.0],), "gradient 1 must be a tensor or None, got float.", ENTRY),
    "integers": (
        WrongType,
        ([torch.zeros(2, dtype=torch.int64)],),
        "gradient 0 must be floating-point or complex, got torch.int64.",
        ENTRY,
    ),
    "no parameter": (WrongType, ([None], [None]), "parameter 0 must be a tensor, got NoneType.", ENTRY),
    "one tensor": (WrongType, (torch.zeros(2),), "gradients must be a sequence of tensors, got Tensor.", LIST),
    "one parameter": (WrongType, ([None], PARAM), "parameters must be a sequence of tensors, got Tensor.", LIST),
    "another shape": (
        ConfigError,
        ([torch.zeros(3)], [PARAM]),
        "gradient 0 must be like its parameter, (2,) torch.float32 on cpu, got (3,) torch.float32 on cpu.",
        ORDER,
    ),
    "another dtype": (
        ConfigError,
        ([torch.zeros(2).half()], [PARAM]),
        "gradient 0 must be like its parameter, (2,) torch.float32 on cpu, got (2,) torch.float16 on cpu.",
        ORDER,
    ),
}


def refusals() -> dict[str, tuple[str, int]]:
    texts = {}
    for name, (error, arguments, _, _) in REFUSED.items():
        with collectives() as called:
            texts[name] = text_of(error, lambda arguments=arguments: average_gradients(*arguments)), len(called)
    return texts


def test_what_cannot_be_averaged_is_refused_before_anything_is_sent(two_ranks: Ranks) -> None:
    texts, _ = two_ranks.run(refusals)
    for name, (_, _, what, remedy) in REFUSED.items():
        assert texts[name] == (f"{what}\n  {WHERE}\n  {remedy}", 0), name


def inside_a_backward() -> str:
    caught = []

    def hook(gradient: Tensor) -> None:
        caught.append(text_of(PhaseError, lambda: average_gradients([gradient])))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    return caught[0]


def test_a_call_inside_a_backward_is_refused(two_ranks: Ranks) -> None:
    assert (
        two_ranks.run(inside_a_backward)
        == [
            f"average_gradients() was called inside a backward.\n  {WHERE}\n"
            "  Call it on what torch.autograd.grad has returned; there ranks may come in different orders."
        ]
        * 2
    )


def generators(make: Callable[[], nn.Module]) -> bool:
    model = make()
    gradients = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
    averaged = average_gradients(iter(gradients), model.parameters())
    return all(map(torch.equal, averaged, gradients))


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 2)


def test_generators_will_do(two_ranks: Ranks) -> None:
    assert two_ranks.run(generators, linear) == [True, True]
