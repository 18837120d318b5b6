"""What we rely on of torch's private parts: if one of these fails, a version of torch has changed it."""

from __future__ import annotations

import functools
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from undertow.boxes import Box
from undertow.runtime import private, private_checkpoint, private_scaling
from undertow.runtime.checkpoint_metadata import file_sizes, stored_entries
from undertow.runtime.checkpoint_reads import read_entries
from undertow.runtime.private_counting import CollectiveBytes


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


def test_the_largest_of_each_keeps_what_is_not_finite() -> None:
    huge = torch.finfo(torch.float32).max
    tensors = [torch.tensor(values) for values in ([1.0, -3.0], [huge, huge], [[1.0], [torch.inf]], [torch.nan, 1.0])]
    first, second, third, last = map(float, private.largest_of_each(tensors))
    assert (first, second, third) == (3.0, huge, torch.inf)
    assert last != last
    assert private.largest_of_each([torch.tensor([3 + 4j])]) == [torch.tensor(5.0)]


def test_post_accumulate_hooks_are_found_and_gone_after_removal() -> None:
    param = torch.ones(2, requires_grad=True)
    assert private.post_accumulate_hooks(param) == ()

    def hook(_: torch.Tensor) -> None:
        return None

    handle = param.register_post_accumulate_grad_hook(hook)
    assert private.post_accumulate_hooks(param) == (hook,)
    handle.remove()
    assert private.post_accumulate_hooks(param) == ()


def test_an_untraced_function_is_called_as_it_is() -> None:
    seen: list[bool] = []

    @private.untraced
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        return look(x) * 2

    compiled = torch.compile(forward, backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [4.0] * 3
    assert seen == [False] * 3


def test_a_hook_that_is_left_alone_is_not_compiled_with_the_backward_that_calls_it() -> None:
    from torch._dynamo.convert_frame import input_codes

    @private.left_alone
    def look(_param: torch.Tensor) -> None:
        called()

    def called() -> None:
        seen.append(torch.compiler.is_compiling())

    seen: list[bool] = []
    param = torch.ones(1, requires_grad=True)
    param.register_post_accumulate_grad_hook(look)
    torch.compile(lambda: torch.autograd.backward(param * 2), backend="eager")()
    compiled = {code for ref in input_codes.seen if (code := ref()) is not None}
    assert seen == [False]
    assert compiled.isdisjoint({look.__code__, called.__code__})


def test_a_group_says_how_long_its_collectives_may_take(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "meeting-point"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert dist.group.WORLD is not None
        assert private.timeout_of(dist.group.WORLD) == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_an_object_that_is_no_real_group_does_not_say_it() -> None:
    assert private.timeout_of(object()) is None  # type: ignore[arg-type]


def test_no_rpc_runs_unless_it_was_started() -> None:
    assert not private.is_rpc_running()


def test_a_hook_on_the_accumulating_node_runs_after_the_gradient_is_there() -> None:
    param = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        node = private.accumulating_node(param)
    seen: list[list[float]] = []
    node.register_hook(lambda *_: seen.append(param.grad.tolist()))
    (3 * param).sum().backward()
    assert seen == [[3.0, 3.0]]
    assert private.accumulating_node(param) is node


def test_optimizers_in_backward_are_found_and_disarmed() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated", DeprecationWarning)  # torch's own use of it
        from torch.distributed.optim import _apply_optimizer_in_backward
    params = [torch.ones(2, requires_grad=True) for _ in range(2)]
    assert private.optimizers_in_backward(params[0]) == ()
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.5})
    assert [type(optimizer) for optimizer in private.optimizers_in_backward(params[0])] == [torch.optim.SGD]
    private.disarm_optimizers_in_backward(params[0])
    sum(param.sum() for param in params).backward()
    assert params[0].tolist() == [1, 1]
    assert params[0].grad is not None
    assert params[1].tolist() == [0.5, 0.5]
    for optimizer in private.optimizers_in_backward(params[0]):
        optimizer.step()
    assert params[0].tolist() == [0.5, 0.5]


def test_arguments_of_a_forward_keep_their_structure_when_they_are_moved() -> None:
    x = torch.ones(2)
    inputs, kwargs = private.moved_to_device((x, [x, 3], "text"), {"a": {"b": x}}, torch.device("meta"))
    assert (inputs[0].device.type, inputs[1][0].device.type, kwargs["a"]["b"].device.type) == ("meta",) * 3
    assert (inputs[1][1], inputs[2], len(inputs), list(kwargs)) == (3, "text", 3, ["a"])


@pytest.mark.parametrize(("inputs", "kwargs"), [((), {}), ((torch.ones(1),), {}), ((), {"x": torch.ones(1)})])
def test_arguments_of_a_forward_may_be_missing(inputs: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
    moved, moved_kwargs = private.moved_to_device(inputs, kwargs, torch.device("meta"))
    assert ([x.device.type for x in moved], list(moved_kwargs)) == (["meta"] * len(inputs), list(kwargs))


HOOKED = {
    "on a tensor": lambda: torch.ones(1, requires_grad=True).register_hook(lambda _: None),
    "after accumulation": lambda: torch.ones(1, requires_grad=True).register_post_accumulate_grad_hook(lambda _: None),
    "on a module": lambda: nn.Linear(1, 1).register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", HOOKED)
def test_every_hook_counts(name: str) -> None:
    before = private.num_hooks_ever()
    assert private.num_hooks_ever() == before
    HOOKED[name]()
    assert private.num_hooks_ever() > before


def test_a_hook_can_be_made_to_run_last() -> None:
    param, order = torch.ones(2, requires_grad=True), []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: order.append(name)

    ours = param.register_post_accumulate_grad_hook(hook("ours"))
    others = [param.register_post_accumulate_grad_hook(hook(name)) for name in "ab"]
    for _ in range(2):  # a second time changes nothing
        private.run_last(param, ours)
        param.sum().backward()
    assert order == ["a", "b", "ours"] * 2
    ours.remove()
    param.sum().backward()
    assert order[6:] == ["a", "b"]
    assert len(others) == len(private.post_accumulate_hooks(param))


def test_is_profiling_only_inside_a_profiler() -> None:
    assert not private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiling()
    assert not private.is_profiling()


class InRows(torch.Tensor):
    """A tensor that says to torch.distributed.checkpoint that it lies in two boxes, its first row and the others."""

    BOXES = (Box(offsets=(0, 0), sizes=(1, 2), start=0), Box(offsets=(1, 0), sizes=(2, 2), start=2))
    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> InRows:
        made = private.wrapper_tensor(cls, rows, dtype=torch.float32, device=torch.device("cpu"))
        made.rows = rows
        return made

    def __create_write_items__(self, name: str, _object: object) -> list[object]:
        return private_checkpoint.write_items(name, self, self.BOXES)

    def __create_chunk_list__(self) -> list[object]:
        return private_checkpoint.chunks(self.BOXES)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows[:1] if tuple(index.offset) == (0, 0) else self.rows[1:]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} was called: it has no values")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What torch.distributed.checkpoint saves of such a tensor and of a number, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state = {"rows": InRows(torch.arange(6.0).view(3, 2)), "number": 7, "whole": torch.ones(2, dtype=torch.bfloat16)}
        private_checkpoint.save_checkpoint({"model": state}, tmp_path / "saved", None)
    return tmp_path / "saved"


def read(folder: Path, targets: dict[str, Any]) -> dict[str, Any]:
    entries = stored_entries((folder / ".metadata").read_bytes())
    return read_entries(folder, entries, targets, on_error=lambda path, error: ValueError(f"{path.name}: {error}"))


def test_a_tensor_in_boxes_that_torch_saves_is_read_by_us(saved: Path) -> None:
    rows, plain, middle = InRows(torch.zeros(3, 2)), torch.zeros(3, 2), torch.zeros(2, 1)
    boxes = [(box.offsets, part) for box, part in zip(InRows.BOXES, (rows.rows[:1], rows.rows[1:]), strict=True)]
    assert read(saved, {"model.rows": boxes, "model.number": []}) == {"model.number": 7}
    assert rows.rows.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert read(saved, {"model.rows": [((0, 0), plain), ((1, 1), middle)]}) == {}
    assert plain.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert middle.tolist() == [[3], [5]]


def test_the_metadata_that_torch_writes_is_understood(saved: Path) -> None:
    entries = stored_entries((saved / ".metadata").read_bytes())
    assert file_sizes(entries.values()) == {"__0_0.distcp": (saved / "__0_0.distcp").stat().st_size}
    assert {name: (entry.path, entry.dtype, entry.shape, len(entry.pieces)) for name, entry in entries.items()} == {
        "model.rows": (("model", "rows"), torch.float32, (3, 2), 2),
        "model.number": (("model", "number"), None, None, 1),
        "model.whole": (("model", "whole"), torch.bfloat16, (2,), 1),
    }


FOREIGN = {
    "a function": b"cos\ngetcwd\n.",
    "a function of a module there": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.getcwd\x93.",
    "a number": b"K\x01.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_else_is_unpickled_as_metadata(name: str) -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError, KeyError, ValueError)):
        stored_entries(FOREIGN[name])


class Unwritable(InRows):
    def __create_write_items__(self, name: str, _object: object) -> list[object]:
        raise ValueError(f"{name} cannot be written")


def test_the_first_failure_of_a_kind_comes_out_of_torchs_exception(tmp_path: Path) -> None:
    state = {"rows": Unwritable(torch.zeros(3, 2))}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        with pytest.raises(BaseException, match="Error") as caught:
            private_checkpoint.save_checkpoint(state, tmp_path, None)
    assert private.first_failure(caught.value, OSError) is None
    assert str(private.first_failure(caught.value, ValueError)) == "rows cannot be written"


def test_a_module_is_found_inside_of_a_compiled_one() -> None:
    module = nn.Linear(1, 1)
    assert private.unwrapped(module) is module
    assert private.unwrapped(torch.compile(module, backend="eager")) is module


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_counting_in_another_thread_leaves_no_mode_behind() -> None:
    """torch notes for the whole process that there are modes: one would be left of what ends while another thread counts."""
    has_begun, may_end = threading.Event(), threading.Event()

    def count() -> None:
        with CollectiveBytes():
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=count)
    with Looking():
        thread.start()
        has_begun.wait()
    may_end.set()
    thread.join()
    assert not is_in_torch_dispatch_mode()


def test_a_callback_put_on_a_future_while_collectives_are_counted_counts_wherever_it_runs(tmp_path: Path) -> None:
    """A process group of one rank: what its collectives are handed does not depend on how many there are."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        future: torch.futures.Future[int] = torch.futures.Future()
        with CollectiveBytes() as counting:
            dist.all_reduce(torch.ones(3))
            torch.ones(100).add_(1)
            dist.all_gather([torch.ones(5)], torch.ones(5))
            after = future.then(lambda _: dist.all_reduce(torch.ones(7)))
        dist.all_reduce(torch.ones(11))  # outside: somebody else's
        untouched = future.then(lambda _: dist.all_reduce(torch.ones(13)))
        assert counting.num_bytes == 4 * (3 + 5)
        with counting:
            done: torch.futures.Future[int] = torch.futures.Future()
            done.set_result(1)
            done.then(lambda _: dist.all_reduce(torch.ones(17)))  # runs at once, and counts once
        assert counting.num_bytes == 4 * (3 + 5 + 17)
        thread = threading.Thread(target=future.set_result, args=(1,))
        thread.start()
        thread.join()
        after.wait()
        untouched.wait()
        assert counting.num_bytes == 4 * (3 + 5 + 17 + 7)
        with counting:
            functional.wait_tensor(functional.all_reduce(torch.ones(19), "sum", dist.group.WORLD))
        assert counting.num_bytes == 4 * (3 + 5 + 17 + 7 + 19)
    finally:
        dist.destroy_process_group()


def test_before_accumulating_comes_before_each_addition_and_not_where_nothing_is_added() -> None:
    param = torch.ones(2, requires_grad=True)
    seen: list[object] = []
    param.requires_grad_(False)
    node, handle = private.before_accumulating(param, lambda: seen.append(None if param.grad is None else param.grad.clone()))
    assert not param.requires_grad
    param.requires_grad_(True)
    torch.autograd.grad((3 * param).sum(), param)
    assert seen == []
    for _ in range(2):
        (3 * param + param).sum().backward()
    assert seen[0] is None
    assert isinstance(seen[1], torch.Tensor)
    assert torch.equal(seen[1], torch.full((2,), 4.0))
    handle.remove()
    (3 * param).sum().backward()
    assert len(seen) == 2
    assert node is private.accumulating_node(param)


def test_what_is_there_may_be_taken_out_before_a_gradient_is_added() -> None:
    param = torch.ones(2, requires_grad=True)
    earlier = param.grad = torch.ones(2)

    def take() -> None:
        param.grad = None

    _node, _handle = private.before_accumulating(param, take)
    (3 * param).sum().backward()
    assert param.grad is not earlier
    assert torch.equal(param.grad, torch.full((2,), 3.0))
    assert torch.equal(earlier, torch.ones(2))


def test_a_pair_of_gloos_tells_both_sides_of_its_end_and_torch_knows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, within = dist.HashStore(), timedelta(seconds=30)
    with ThreadPoolExecutor(2) as threads:
        pairs = list(threads.map(lambda place: private.pair(store, "pair", place, private.gloo_device(), within), range(2)))
    assert not dist.is_initialized()
    received = torch.zeros(3)
    works = [pairs[1].recv([tensor], 0, 7) for tensor in (received, torch.zeros(3))]
    other = pairs[0].recv([torch.zeros(3)], 1, 7)
    pairs[0].send([torch.ones(3)], 1, 7).wait(within)
    private.disconnect(pairs[0])
    works[0].wait(within)  # it was there before the end
    assert torch.equal(received, torch.ones(3))
    with pytest.raises(RuntimeError, match="Application timeout caused pair closure"):
        other.wait(timedelta(days=3650))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        works[1].wait(timedelta(days=3650))
    private.disconnect(pairs[0])  # again, which does nothing


def test_the_default_groups_device_connects_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "here"), 1), rank=0, world_size=1)
    try:
        devices = dist.group.WORLD._get_backend(torch.device("cpu")).options._devices
        assert devices == [private.gloo_device()]
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        assert private.gloo_device() not in devices
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["unscale_", "step", "fused step"])
def test_what_is_around_unscaling_is_called_wherever_a_scaler_looks(how: str) -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=how == "fused step")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[str] = []

    def around(name: str, looking: torch.optim.Optimizer, look: private_scaling.Look) -> private_scaling.Found:
        assert looking is optimizer
        seen.append(f"{name} begins")
        found = look()
        seen.append(f"{name} ends")
        return {device: torch.ones_like(value) for device, value in found.items()}

    original = torch.amp.GradScaler._unscale_grads_
    undo = [private_scaling.around_unscaling(partial(around, name)) for name in ("first", "second")]
    scaler.scale(param.sum()).backward()
    if how == "unscale_":
        scaler.unscale_(optimizer)
        assert param.grad is not None
        assert param.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert seen == ["first begins", "second begins", "second ends", "first ends"]
    assert param.tolist() == [1.0, 1.0]  # skipped, for they have said so
    assert scaler.get_scale() == 2.0
    for each in undo:
        assert torch.amp.GradScaler._unscale_grads_ is not original
        each()
    assert torch.amp.GradScaler._unscale_grads_ is original


def test_an_optimizer_steps_without_the_hooks_of_all_and_with_its_own() -> None:
    called: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before any")),
        register_optimizer_step_post_hook(lambda *_: called.append("after any")),
    ]
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    try:
        optimizer = torch.optim.SGD([param], lr=1.0)
        private.step_unwatched(optimizer)
        assert called == []
        assert param.tolist() == [-1.0, -1.0]
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        private.step_unwatched(optimizer)
        assert called == ["before any", "after", "after any"]
    finally:
        for hook in hooks:
            hook.remove()
    assert param.tolist() == [-2.0, -2.0]


def test_a_step_that_is_wrapped_once_more_is_taken_as_a_whole() -> None:
    class Twice(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)  # whose attributes say that torch has hooked it
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    torch.optim.SGD([param], lr=1.0)  # with which its step is hooked
    private.step_unwatched(Twice([param], lr=1.0))
    assert param.tolist() == [-2.0, -2.0]
