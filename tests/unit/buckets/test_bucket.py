"""What a bucket does with `.grad`."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from support.strategies import spec
from undertow.buckets.gradients import WholeGradients
from undertow.buckets.memory import BucketMemory, Copy
from undertow.buckets.recorder import Recorder
from undertow.buckets.sparse import SparseGradients
from undertow.device import device_of
from undertow.plan import plan_from_groups


def made(*sizes: int) -> tuple[list[nn.Parameter], BucketMemory, WholeGradients]:
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    specs = [spec(f"p{index}", size) for index, size in enumerate(sizes)]
    (bucket,) = plan_from_groups(specs, [range(len(sizes))], num_ranks=2).buckets
    memory = BucketMemory(bucket, params)
    return params, memory, WholeGradients(params, memory)


def fill(params: Sequence[Tensor], value: float) -> list[Tensor]:
    grads = [torch.full_like(param, value + index) for index, param in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return grads


def test_gradients_are_packed_one_after_another_and_bound_as_views() -> None:
    params, memory, gradients = made(3, 5)
    grads = fill(params, 1.0)
    assert gradients.pack(()) == []
    assert [param.grad for param in params] == [None, None]
    assert torch.equal(memory.gradients, torch.cat(grads))
    gradients.bind(())
    assert all(param.grad is view for param, view in zip(params, memory.views, strict=True))


def test_a_gradient_that_the_user_holds_does_not_change_in_the_next_step() -> None:
    params, memory, gradients = made(3, 5)
    (first, _) = fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    held, before = params[0].grad, memory.flat.data_ptr()
    fill(params, 7.0)
    gradients.pack(())
    gradients.bind(())
    assert held is not None
    assert torch.equal(held, first)
    assert memory.flat.data_ptr() != before


def test_memory_is_used_again_if_nobody_holds_it() -> None:
    params, memory, gradients = made(3, 5)
    pointers = []
    for _ in range(3):
        fill(params, 1.0)
        gradients.pack(())
        gradients.bind(())
        pointers.append(memory.flat.data_ptr())
        for param in params:
            param.grad = None
    assert len(set(pointers)) == 1


def test_a_parameter_that_no_rank_used_gets_its_gradient_back() -> None:
    params, memory, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    params[1].grad = None
    assert gradients.pack([0]) == [0, 1]
    assert torch.equal(memory.gradients, torch.tensor([1.0] * 3 + [0.0] * 5))
    memory.flat.fill_(9.0)  # the reduction
    gradients.bind({1})
    assert torch.equal(params[0].grad, torch.ones(3))
    assert params[1].grad is memory.views[1]


def test_copies_for_later_are_made_when_they_are_asked_for() -> None:
    params, memory, _ = made(3, 5)
    grads = fill(params, 1.0)
    memory.flat.zero_()
    later: list[Copy] = []
    assert memory.pack(params, (), later=later) == {}
    assert not memory.gradients.any()
    memory.copy_in(later)
    assert (torch.equal(memory.gradients, torch.cat(grads)), later) == (True, [])


def test_a_format_leaves_nothing_between_gradients() -> None:
    params = [nn.Parameter(torch.zeros(size)) for size in (520, 600)]
    specs = [spec("one", 520), spec("other", 600)]
    (bucket,) = plan_from_groups(specs, ((0, 1),), num_ranks=2, block=512).buckets
    memory = BucketMemory(bucket, params)
    for later in (None, list[Copy]()):
        memory.flat.fill_(torch.nan)
        fill(params, 1.0)
        memory.pack(params, (), later=later)
        if later is not None:
            memory.copy_in(later)
        assert bucket.numel > 1120
        assert memory.gradients.isfinite().all()


def test_only_writes_that_are_not_zero_count_as_gradients() -> None:
    params, memory, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    assert [gradients.is_written(position) for position in (0, 1)] == [False, False]
    memory.views[0].add_(1)
    params[1].grad = torch.zeros(5)
    assert [gradients.is_written(position) for position in (0, 1)] == [True, False]
    gradients.note_known()
    assert not gradients.is_written(0)


def test_late_gradients_are_added_to_the_result() -> None:
    params, memory, gradients = made(3, 5)
    fill(params, 1.0)
    gradients.pack(())
    gradients.bind(())
    with torch.no_grad():
        (values,) = gradients.late_values({1: torch.full((5,), 4.0)})
        gradients.add_late((values,))
    assert torch.equal(memory.gradients, torch.tensor([1.0] * 3 + [6.0] * 5))


def test_a_sparse_gradient_stays_a_tensor_of_merged_rows() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    (bucket,) = plan_from_groups([spec("weight", 8, is_sparse=True)], ((0,),), num_ranks=2).buckets
    gradients = SparseGradients([layer.weight], BucketMemory(bucket, ()))
    layer(torch.tensor([1, 3, 1])).sum().backward()
    assert (gradients.pack(()), layer.weight.grad) == ([], None)
    (rows,) = gradients.values()
    assert (rows.is_coalesced(), rows.indices().tolist()) == (True, [[1, 3]])
    gradients.bind(())
    assert layer.weight.grad is rows


def test_a_model_that_is_dropped_in_a_backward_is_not_in_one_any_more() -> None:
    group: Any = SimpleNamespace(rank=0, hardware=device_of(torch.device("cpu")))
    recorder = Recorder(group, level="off")
    key = id(recorder)
    recorder.backward_begins(generation=0)
    assert key in Recorder.in_backward
    del recorder
    assert key not in Recorder.in_backward
