"""What a bucket does with its memory and `.grad`."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from support.strategies import spec
from undertow.buckets.gradients import Copy, FlatGradients
from undertow.plan import plan_from_groups


def made(*sizes: int) -> tuple[list[nn.Parameter], FlatGradients]:
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    specs = [spec(f"p{index}", size) for index, size in enumerate(sizes)]
    (bucket,) = plan_from_groups(specs, [range(len(sizes))], num_ranks=2).buckets
    return params, FlatGradients(bucket, params)


def fill(params: Sequence[Tensor], value: float) -> list[Tensor]:
    grads = [torch.full_like(param, value + index) for index, param in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return grads


def test_gradients_are_packed_one_after_another_and_bound_as_views() -> None:
    params, gradients = made(3, 5)
    grads = fill(params, 1.0)
    assert gradients.pack(()) == []
    assert [param.grad for param in params] == [None, None]
    assert torch.equal(*gradients.values(), torch.cat(grads))
    gradients.bind(())
    assert all(param.grad is view for param, view in zip(params, gradients.views, strict=True))


def test_a_gradient_that_the_user_holds_does_not_change_in_the_next_step() -> None:
    params, gradients = made(3, 5)
    (first, _) = fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    held, before = params[0].grad, gradients.flat.data_ptr()
    fill(params, 7.0)
    gradients.pack(())
    gradients.bind(())
    assert held is not None
    assert torch.equal(held, first)
    assert gradients.flat.data_ptr() != before


def test_memory_is_used_again_if_nobody_holds_it() -> None:
    params, gradients = made(3, 5)
    pointers = []
    for _ in range(3):
        fill(params, 1.0)
        gradients.pack(())
        gradients.bind(())
        pointers.append(gradients.flat.data_ptr())
        for param in params:
            param.grad = None
    assert len(set(pointers)) == 1


@pytest.mark.parametrize("not_arrived", [(), (0,)], ids=["added in place", "unused"])
def test_memory_is_used_again_if_only_grad_refers_to_it(not_arrived: tuple[int, ...]) -> None:
    params, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    before = gradients.flat.data_ptr()
    params[1].grad = torch.full((5,), 7.0)
    assert gradients.pack(not_arrived) == list(not_arrived)
    assert torch.equal(*gradients.values(), torch.tensor([1.0] * 3 + [7.0] * 5))
    assert gradients.flat.data_ptr() == before


def test_a_parameter_that_no_rank_used_gets_its_gradient_back() -> None:
    params, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    params[1].grad = None
    assert gradients.pack([0]) == [0, 1]
    assert torch.equal(*gradients.values(), torch.tensor([1.0] * 3 + [0.0] * 5))
    gradients.flat.fill_(9.0)  # the reduction
    gradients.bind({1})
    assert torch.equal(params[0].grad, torch.ones(3))
    assert params[1].grad is gradients.views[1]


def test_copies_for_later_are_made_when_they_are_asked_for() -> None:
    params, gradients = made(3, 5)
    grads = fill(params, 1.0)
    gradients.flat.zero_()
    later: list[Copy] = []
    assert gradients.pack((), later=later) == []
    assert not gradients.values()[0].any()
    gradients.copy_in(later)
    assert (torch.equal(*gradients.values(), torch.cat(grads)), later) == (True, [])


def test_a_format_leaves_nothing_between_gradients() -> None:
    params = [nn.Parameter(torch.zeros(size)) for size in (520, 600)]
    specs = [spec("one", 520), spec("other", 600)]
    (bucket,) = plan_from_groups(specs, ((0, 1),), num_ranks=2, block=512).buckets
    gradients = FlatGradients(bucket, params)
    for later in (None, list[Copy]()):
        gradients.flat.fill_(torch.nan)
        fill(params, 1.0)
        gradients.pack((), later=later)
        if later is not None:
            gradients.copy_in(later)
        assert bucket.numel > 1120
        assert gradients.values()[0].isfinite().all()


def test_only_writes_that_are_not_zero_count_as_gradients() -> None:
    params, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    assert [gradients.is_written(position) for position in (0, 1)] == [False, False]
    gradients.views[0].add_(1)
    params[1].grad = torch.zeros(5)
    assert [gradients.is_written(position) for position in (0, 1)] == [True, False]
    gradients.note_known()
    assert not gradients.is_written(0)


def test_late_gradients_are_added_to_the_result() -> None:
    params, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    with torch.no_grad():
        (values,) = gradients.late_values({1: torch.full((5,), 4.0)})
        gradients.add_late((values,))
    assert torch.equal(*gradients.values(), torch.tensor([1.0] * 3 + [6.0] * 5))
