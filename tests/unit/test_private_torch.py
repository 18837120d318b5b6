"""What we rely on of torch's private parts: if one of these fails, a version of torch has changed it."""

from __future__ import annotations

import torch

from undertow.runtime import private


def test_graph_task_id_is_minus_one_outside_of_backward() -> None:
    assert private.graph_task_id() == -1


def test_graph_task_id_is_the_same_for_all_hooks_of_one_backward_and_new_for_the_next() -> None:
    params = [torch.ones(2, requires_grad=True) for _ in range(3)]
    seen: list[int] = []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: seen.append(private.graph_task_id()))
    for _ in range(2):
        sum(param.sum() for param in params).backward()
    first, second = seen[:3], seen[3:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert -1 not in seen


def test_a_callback_queued_from_a_callback_runs_after_those_already_queued() -> None:
    param, order = torch.ones(2, requires_grad=True), []

    def launch(name: str) -> None:
        order.append(f"launch {name}")
        private.call_after_backward(lambda: order.append(f"wait {name}"))

    def queue(_: torch.Tensor) -> None:
        private.call_after_backward(lambda: launch("a"))
        private.call_after_backward(lambda: launch("b"))

    param.register_post_accumulate_grad_hook(queue)
    param.sum().backward()
    assert order == ["launch a", "launch b", "wait a", "wait b"]


def test_there_is_no_enclosing_node_at_the_end_of_the_outermost_backward() -> None:
    param, nodes = torch.ones(2, requires_grad=True), []

    def queue(_: torch.Tensor) -> None:
        private.call_after_backward(lambda: nodes.append(private.enclosing_node()))

    param.register_post_accumulate_grad_hook(queue)
    param.sum().backward()
    assert nodes == [None]


def test_storage_use_count_counts_views() -> None:
    flat = torch.zeros(4)
    before = private.storage_use_count(flat)
    view = flat[:2]
    assert private.storage_use_count(flat) == before + 1
    del view
    assert private.storage_use_count(flat) == before


def test_copy_each_and_zero_each_write_into_the_targets() -> None:
    flat = torch.zeros(5)
    views = [flat[:2], flat[2:]]
    private.copy_each(views, [torch.ones(2), torch.full((3,), 2.0)])
    assert flat.tolist() == [1, 1, 2, 2, 2]
    private.zero_each(views[:1])
    private.zero_each([])
    assert flat.tolist() == [0, 0, 2, 2, 2]


def test_post_accumulate_hooks_are_found_and_gone_after_removal() -> None:
    param = torch.ones(2, requires_grad=True)
    assert private.post_accumulate_hooks(param) == ()

    def hook(_: torch.Tensor) -> None:
        return None

    handle = param.register_post_accumulate_grad_hook(hook)
    assert private.post_accumulate_hooks(param) == (hook,)
    handle.remove()
    assert private.post_accumulate_hooks(param) == ()


def test_is_profiling_only_inside_a_profiler() -> None:
    assert not private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiling()
    assert not private.is_profiling()
