"""What we rely on of torch's private parts: if one of these fails, a version of torch has changed it."""

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from undertow.engine import arrivals as arrivals_module
from undertow.engine.arrivals import Arrivals
from undertow.torch_private import private, process_groups


def ones(num: int = 2) -> torch.Tensor:
    return torch.ones(num, requires_grad=True)


def with_gradient() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    return param


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_graph_task_id_is_the_same_for_all_hooks_of_one_backward_and_new_for_the_next() -> None:
    params, seen = [ones() for _ in range(3)], list[int]()
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: seen.append(private.graph_task_id()))
    for _ in range(2):
        sum(param.sum() for param in params).backward()
    assert (seen, len({-1, private.graph_task_id(), *seen})) == ([seen[0]] * 3 + [seen[3]] * 3, 3)  # it is -1 outside of backward


def test_a_callback_queued_from_a_callback_runs_after_those_already_queued() -> None:
    param, order = ones(), []

    def launch(name: str) -> None:
        order.append(f"launch {name}")
        private.call_after_backward(lambda: order.append(f"wait {name}"))

    def queue(_: torch.Tensor) -> None:
        for name in "ab":
            private.call_after_backward(functools.partial(launch, name))
        # There is no enclosing node at the end of the outermost backward.
        private.call_after_backward(lambda: order.append(private.enclosing_node()))

    param.register_post_accumulate_grad_hook(queue)
    param.sum().backward()
    assert order == ["launch a", "launch b", None, "wait a", "wait b"]


@pytest.mark.deep
def test_an_untraced_function_is_called_as_it_is() -> None:
    seen: list[bool] = []

    @private.untraced
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: look(x) * 2, backend="eager")
    assert ([compiled(torch.ones(1)).item() for _ in range(3)], seen) == ([4.0] * 3, [False] * 3)


@pytest.mark.deep
def test_the_hooks_of_gradients_are_not_compiled_with_the_backward_that_calls_them() -> None:
    from torch._dynamo.convert_frame import input_codes

    full: list[int] = []
    param = ones(1)
    engine = SimpleNamespace(bucket_is_full=full.append, first_gradient_arrives=lambda _: None)
    arrivals = Arrivals([[0]], [param], engine=engine)  # type: ignore[arg-type]
    hook = private.hook_gradients(param, arrivals.bucket_of[0].hook)
    torch.compile(lambda: torch.autograd.backward(param * 2), backend="eager")()
    hook.remove()
    compiled = {code for ref in input_codes.seen if (code := ref()) is not None}
    names = [code.co_name for code in compiled if code.co_filename == arrivals_module.__file__]
    assert (full, names) == ([0], [])


def test_a_group_says_how_long_its_collectives_may_take(one_rank: Any) -> None:
    # What is no real group does not say it.
    assert [process_groups.timeout_of(group) for group in (one_rank, object())] == [timedelta(seconds=77), None]


def test_a_hook_on_the_accumulating_node_runs_after_the_gradient_is_there() -> None:
    param = ones()
    with torch.no_grad():
        node = private.accumulating_node(param)
    seen: list[list[float]] = []
    node.register_hook(lambda *_: seen.append(param.grad.tolist()))
    (3 * param).sum().backward()
    assert (seen, private.accumulating_node(param)) == ([[3.0, 3.0]], node)


def test_arguments_of_a_forward_keep_their_structure_when_they_are_moved() -> None:
    x = torch.ones(2)
    inputs, kwargs = private.moved_to_device((x, [x, 3], "text"), {"a": {"b": x}}, torch.device("meta"))
    assert (
        (inputs[0].device.type, inputs[1][0].device.type, kwargs["a"]["b"].device.type),
        inputs[1][1],
        inputs[2],
        len(inputs),
        list(kwargs),
    ) == (("meta",) * 3, 3, "text", 3, ["a"])


@pytest.mark.parametrize(("inputs", "kwargs"), [((), {}), ((torch.ones(1),), {}), ((), {"x": torch.ones(1)})])
def test_arguments_of_a_forward_may_be_missing(inputs: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
    moved, moved_kwargs = private.moved_to_device(inputs, kwargs, torch.device("meta"))
    assert ([x.device.type for x in moved], list(moved_kwargs)) == (["meta"] * len(inputs), list(kwargs))


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda: ones().register_hook(lambda _: None), id="on a tensor"),
        pytest.param(lambda: ones().register_post_accumulate_grad_hook(lambda _: None), id="after accumulation"),
        pytest.param(lambda: nn.Linear(1, 1).register_forward_hook(lambda *_: None), id="on a module"),
    ],
)
def test_every_hook_counts(register: Callable[[], object]) -> None:
    before = private.num_hooks_ever()
    assert private.num_hooks_ever() == before
    register()
    assert private.num_hooks_ever() > before


def test_a_hook_can_be_made_to_run_last() -> None:
    param, order = ones(), []
    ours, *others = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name)) for name in ("ours", "a", "b")
    ]
    for _ in range(2):  # a second time changes nothing
        private.run_last(param, ours)
        param.sum().backward()
    ours.remove()
    param.sum().backward()
    assert (order, len(others)) == (["a", "b", "ours", "a", "b", "ours", "a", "b"], len(private.post_accumulate_hooks(param)))


def test_rpc_and_the_profiler_are_seen_only_if_they_run() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert (private.is_profiling(), private.is_in_rpc_context()) == (True, False)
    assert not private.is_profiling()


def test_a_module_is_found_inside_of_a_compiled_one() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert private.unwrapped(module) is private.unwrapped(compiled) is module
    assert private.uncompiled(module) is private.uncompiled(compiled) is module


def test_names_that_torchs_class_is_told_to_ignore_are_read() -> None:
    module = nn.Linear(1, 1)
    assert list(private.ignored_by_ddp(module)) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert list(private.ignored_by_ddp(module)) == ["bias"]


def test_the_end_of_a_join_disables_what_its_beginning_has_enabled(one_rank: Any) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with ddp.join():
        assert ddp._join_config.enable
        private.end_join(ddp)
        assert not ddp._join_config.enable


def test_schedulers_inside_of_one_are_found() -> None:
    optimizer = torch.optim.SGD([ones()], lr=1.0)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) for _ in range(2)]
    assert [*private.inner_schedulers(torch.optim.lr_scheduler.ChainedScheduler(parts))] == parts
    assert [*private.inner_schedulers(parts[0])] == []


def test_a_scheduler_of_another_optimizer_knows_that_a_step_came_first() -> None:
    optimizers = [torch.optim.SGD([with_gradient()], lr=1.0) for _ in range(2)]
    _, later = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) for optimizer in optimizers]
    optimizers[0].step()
    private.note_steps_before_schedulers(*optimizers)
    later.step()  # without the warning that no step precedes it


def test_scaled_gradients_are_scaled_before_each_addition_and_not_where_nothing_is_added() -> None:
    param = ones().requires_grad_(False)
    node, handle = private.scale_gradients(param, 0.5)
    assert not param.requires_grad
    param.requires_grad_(True)
    assert torch.autograd.grad((3 * param).sum(), param)[0].tolist() == [3.0, 3.0]
    for _ in range(2):
        (3 * param + param).sum().backward()
    assert param.grad.tolist() == [4.0, 4.0]
    handle.remove()
    (3 * param).sum().backward()
    assert (param.grad.tolist(), private.accumulating_node(param)) == ([7.0, 7.0], node)


def test_rows_of_a_table_are_scaled() -> None:
    table = nn.Embedding(2, 1, sparse=True)
    _alive = private.scale_gradients(table.weight, 0.5)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad.to_dense().tolist() == [[0.0], [1.0]]


def test_an_optimizer_steps_without_the_hooks_of_all_and_with_its_own() -> None:
    called: list[str] = []
    param = with_gradient()
    optimizer = torch.optim.SGD([param], lr=1.0)
    with (
        register_optimizer_step_pre_hook(lambda *_: called.append("before any")),
        register_optimizer_step_post_hook(lambda *_: called.append("after any")),
    ):
        private.step_unwatched(optimizer)
        assert (called, param.tolist()) == ([], [-1.0, -1.0])
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        private.step_unwatched(optimizer)
    assert (called, param.tolist()) == (["before any", "after", "after any"], [-2.0, -2.0])


def test_a_step_that_is_wrapped_once_more_is_taken_as_a_whole() -> None:
    class Twice(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)  # whose attributes say that torch has hooked it
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    param = with_gradient()
    torch.optim.SGD([param], lr=1.0)  # with which its step is hooked
    private.step_unwatched(Twice([param], lr=1.0))
    assert param.tolist() == [-2.0, -2.0]


def test_writes_to_a_tensor_and_its_views_count() -> None:
    tensor = torch.zeros(4)
    before = private.version_of(tensor)
    tensor[:2].add_(1)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 2
    assert private.version_of(tensor.data) == 0


def test_a_sparse_tensor_has_parts_before_its_rows_are_summed() -> None:
    indices, values = torch.tensor([[1, 1]]), torch.ones(2, 3)
    parts = private.parts_of_sparse(torch.sparse_coo_tensor(indices, values, (4, 3), check_invariants=True))
    assert all(map(torch.equal, parts, (indices, values)))


def test_a_subclass_shares_its_memory() -> None:
    class Other(torch.Tensor):
        pass

    tensor = torch.zeros(2)
    other = private.make_subclass(Other, tensor)
    assert (type(other), other.data_ptr()) == (Other, tensor.data_ptr())
