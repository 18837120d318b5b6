"""Private calls into torch, in one place; tests/unit/runtime/test_private.py holds what we rely on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.utils import _to_kwargs
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from undertow.errors import ConfigError

# Of the backward that this thread is in, the innermost one; -1 outside of backward.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Inside, functions of torch do not ask the classes of the tensors that they are given.
as_plain_tensors: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


_NOBODYS_TAG = (1 << 30) + 1  # nothing is ever sent with it
# Of the function that torch puts around the step of every class of optimizers when one of it is made.
_STEP_WITH_HOOKS = torch.optim.Optimizer.profile_hook_step(int).__code__

_Function = TypeVar("_Function", bound=Callable[..., object])
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_Error = TypeVar("_Error", bound=BaseException)


def untraced(function: _Function) -> _Function:
    """Has torch.compile call a function, and everything that it calls, as it is.

    The public torch.compiler.disable imports the compiler at once, this one when the function first runs; making an
    optimizer has imported it by then.
    """
    return cast(_Function, torch._compile._disable_dynamo(function))


def left_alone(function: _Function) -> _Function:
    """The same without a frame around the function, for what autograd calls; compiled code that calls it looks into it."""
    code, frames = cast(Any, function).__code__, torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the innermost backward of this thread is over, after the callbacks queued so far."""
    Variable._execution_engine.queue_callback(callback)


def enclosing_node() -> Any | None:
    """Inside such a callback: the node around a backward that runs within another one, None for the outermost."""
    return torch._C._current_autograd_node()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of `group` may take; None, which means the backend's default, where it does not say."""
    try:
        options = group._get_backend(group._device_types[0]).options
    except (AttributeError, IndexError, RuntimeError):
        return None
    return getattr(options, "_timeout", None)


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group of these ranks, this one among them; a collective call for them alone.

    torch.distributed.new_group names a group of some ranks by how many groups the process has, which must be the same on
    all of them: there ranks that have let go of groups at different times, or are in several, wait for each other for ever.
    Here they count in the store how often they have made a group of these ranks. None can be ahead: making one waits for all.
    """
    c10d: Any = torch.distributed.distributed_c10d
    world, default = c10d._world, c10d._get_default_group()
    _, store = world.pg_map[default]
    members = "_".join(map(str, ranks))
    number = (int(store.add(f"undertow/{members}", 1)) - 1) // len(ranks)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        f"undertow/{members}/{number}",
        timeout=c10d._get_default_timeout(dist.Backend(backend)) if timeout is None else timeout,
        device_id=default.bound_device_id,
        group_desc="undertow",
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def default_store() -> Any:
    """The store by which the default group's ranks have met."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._get_default_store()


def is_gone(rank: int) -> bool:
    """Whether that rank's process is known to have ended, by the default group's connection to it; only gloo tells.

    A receive that is posted and dropped: on a connection that is closed it fails at once.
    """
    gloo = _gloo_of(dist.group.WORLD)
    if gloo is None or _connects_lazily():
        return False
    try:
        gloo.recv([torch.zeros(1)], rank, _NOBODYS_TAG)
    except RuntimeError:
        return True
    return False


def interrupt(group: dist.ProcessGroup) -> None:
    """Has everything that is under way over a group of ours fail, here and then on the other ranks; the group is broken.

    A receive of gloo's that does not end in time closes all connections of its group.
    """
    gloo = _gloo_of(group)
    with contextlib.suppress(RuntimeError):
        if gloo is not None:
            gloo.recv_anysource([torch.zeros(1)], _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()


def held_by_gloo(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, object] | None:
    """The group of gloo's, and what waits for its threads when it is freed: whoever holds this last. None where it is none."""
    gloo = _gloo_of(group)
    return None if gloo is None else (gloo, gloo._get_backend(torch.device("cpu")))


def keep_for_ever(held: object) -> None:
    """What would be waited for if it were freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def gloo_device() -> Any:
    """What connects pairs: that of the default group, or one of the interface that gloo is given.

    Each has a thread of gloo's that looks a hundred times a second whether it shall end. RuntimeError where there is none.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("this build of torch has no gloo.")
    world = _gloo_of(dist.group.WORLD) if dist.is_initialized() else None
    if world is not None and not _connects_lazily():
        return world._get_backend(torch.device("cpu")).options._devices[0]
    gloo: Any = dist.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    # Not lazily: ranks that cannot be connected shall be found when they connect.
    return gloo.create_device(interface=interface, lazy_init=False) if interface else gloo.create_default_device(lazy_init=False)


def _connects_lazily() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")


def pair(store: Any, key: str, place: int, device: Any, timeout: timedelta) -> Any:
    """A group of gloo's of two processes, this one at `place` 0 or 1, connected when it returns; a call for both.

    It is nobody's: torch.distributed does not count, name or destroy it, and its other groups may be of any backend.
    RuntimeError where the other one is not connected within `timeout`.
    """
    c10d: Any = torch.distributed.distributed_c10d
    options = c10d.ProcessGroupGloo._Options()
    options._devices, options._timeout = [device], timeout
    options._threads = 1  # for collectives; there are none
    return c10d.ProcessGroupGloo(c10d.PrefixStore(key, store), place, 2, options)


def disconnect(group: Any) -> None:
    """Closes the connection of a pair: what is posted on it fails, on both sides."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1)], _NOBODYS_TAG).wait(timedelta(milliseconds=1))


def _gloo_of(group: Any) -> Any | None:
    """What sends and receives over gloo for this group; None where it is none of gloo's."""
    group = getattr(group, "inner", group)  # of an emulated link
    try:
        return group if group._get_backend(torch.device("cpu")).name() == "gloo" else None
    except RuntimeError:
        return None


def reduce_scatter_async(shard: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to write into `shard` the sum over ranks of this rank's part of `parts`, by the backend's own collective."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the name of torch < 2.13
    return cast(dist.Work, start(shard, parts, group=group, async_op=True))


def all_gather_async(flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to fill `flat` with every rank's `own`, by the backend's own collective."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name of torch < 2.13
    return cast(dist.Work, start(flat, own, group=group, async_op=True))


def wrapper_tensor(
    cls: type[_Tensor], like: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> _Tensor:
    """A tensor of class `cls` without storage, of `like`'s shape and strides, and of its dtype and device if not given."""
    make = torch.Tensor._make_wrapper_subclass
    return make(cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device)


def first_failure(error: BaseException, kind: type[_Error]) -> _Error | None:
    """Of what torch.distributed.checkpoint gathers from the ranks where it fails, the first of this kind."""
    failures = getattr(error, "failures", None) or {}
    return next((failed for _, (failed, _) in sorted(failures.items()) if isinstance(failed, kind)), None)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself, of one that is wrapped for data-parallel training, or compiled, or both."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            model = cast(torch.nn.Module, model._orig_mod)
        else:
            return model


def storage_use_count(tensor: torch.Tensor) -> int:
    """Number of tensors that share `tensor`'s storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def addresses_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """For `are_shared`, as long as somebody holds the storages."""
    return [storage._cdata for storage in storages]


def are_shared(addresses: Sequence[int]) -> bool:
    """Whether more than one tensor refers to any of these storages, each of which is held as an object as well."""
    return max(map(torch._C._storage_Use_Count, addresses), default=0) > 2


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies source by source, in one launch per device and dtype where there is one."""
    torch._foreach_copy_(targets, sources)


def zero_each(targets: list[torch.Tensor]) -> None:
    """Writes zeros into each of `targets`; none is fine."""
    if targets:
        torch._foreach_zero_(targets)


def largest_of_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each tensor, NaN where it has one, in few launches; none may be empty."""
    return list(torch._foreach_norm(tensors, float("inf")))


def post_accumulate_hooks(param: torch.Tensor) -> Sequence[Callable[..., None]]:
    """The hooks that `register_post_accumulate_grad_hook` has put on a parameter."""
    return tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def hook_gradients(param: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> RemovableHandle:
    """A post-accumulate hook, also of a frozen parameter, which has it still when it is trained again.

    RuntimeError where it never can be: of integers, as quantized ones are, or made in inference mode.
    """
    with _trained(param):
        return cast(RemovableHandle, param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _trained(param: torch.Tensor) -> Iterator[None]:
    """Inside, the parameter is trained; autograd has the same node for it when it is thawed later."""
    if param.requires_grad:
        yield
        return
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(False)


def is_rpc_running() -> bool:
    """Whether this process takes part in torch.distributed.rpc, without which there is no distributed autograd."""
    rpc = sys.modules.get("torch.distributed.rpc.api")
    return rpc is not None and bool(rpc._is_current_rpc_agent_set())


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of the tensor's gradient, which `tensor.grad_dtype` may set to another one than its own."""
    return (getattr(tensor, "grad_dtype", None) or tensor.dtype) if tensor.is_leaf else tensor.dtype


def set_gradient_dtype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Has autograd accumulate in `dtype`; ConfigError where this torch cannot. The parameter has no gradient of another one."""
    if not hasattr(param, "grad_dtype"):
        raise ConfigError(
            f"torch {torch.__version__} has no Tensor.grad_dtype, by which gradients have a dtype of their own.",
            where="SyncConfig(reduce_dtype=...)",
            remedy="Install a newer torch, or leave reduce_dtype out.",
        )
    param.grad_dtype = dtype


def accumulating_node(param: torch.Tensor) -> Any:
    """The node of the graph that adds to the parameter's gradient."""
    with _trained(param), torch.enable_grad():
        return param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def before_accumulating(param: torch.Tensor, call: Callable[[], object]) -> tuple[Any, RemovableHandle]:
    """Has `call` called before a gradient is added to the parameter's `.grad`, as long as the node is held that it returns."""
    node = accumulating_node(param)

    @left_alone
    def hook(_gradients: object) -> None:
        call()

    return node, node.register_prehook(hook)


def distributed_autograd_context() -> int | None:
    """The context of distributed autograd that this thread is in."""
    try:
        return int(sys.modules["torch.distributed.autograd"]._current_context()._context_id())
    except RuntimeError:
        return None


def gradients_in_context(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of that backward, by parameter; the very tensors."""
    return dict(sys.modules["torch.distributed.autograd"].get_gradients(context))


def optimizers_in_backward(param: torch.Tensor) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that torch.distributed.optim._apply_optimizer_in_backward has put on a parameter."""
    return getattr(param, "_in_backward_optimizers", ())


def disarm_optimizers_in_backward(param: torch.Tensor) -> Callable[[], None]:
    """Has them not step by themselves any more; returns what has them do so again."""
    # Loaded already where a parameter has such optimizers; importing it here would load every optimizer of torch's.
    torchs = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
    handles, node = torchs.param_to_optim_hook_handle_map.get(param, []), torchs.param_to_acc_grad_map[param]
    hooks = [(handle.hooks_dict_ref() or {}).get(handle.id) for handle in handles]
    for handle in handles:
        handle.remove()

    def rearm() -> None:
        handles[:] = [node.register_hook(hook) for hook in hooks if hook is not None]

    return rearm


def moved_to_device(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a forward with every tensor in them on `device`, copied on a side stream."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
    return tuple(moved_inputs[0]) if inputs else (), dict(moved_kwargs[0]) if kwargs else {}


def is_compiling() -> bool:
    """Whether this is compiled, or called where torch.compile looks for something to compile."""
    frames = getattr(torch._C._dynamo, "eval_frame", None)  # there where the compiler was imported
    return torch.compiler.is_compiling() or (frames is not None and callable(frames.get_eval_frame_callback()))


def cast_floating(inputs: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a forward with every tensor of real numbers in them cast."""

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, cast_one, (inputs, kwargs))
    return moved


def tensors_in(outputs: object) -> list[torch.Tensor]:
    """The tensors in what a forward returns, as far as torch knows its containers."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile has taken this module, or `module.compile()` was called."""
    # By name: importing the compiler to ask takes longer than most programs run.
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def step_unwatched(optimizer: torch.optim.Optimizer) -> None:
    """Steps; hooks that the user has put on the steps of all optimizers are not called, those of this one are.

    They are where it has hooks of its own, or where its class steps by the step of another class.
    """
    step: Any = type(optimizer).step
    # Of a step that somebody else has wrapped, what lies beneath is not all of it.
    is_torchs = getattr(step, "__code__", None) is _STEP_WITH_HOOKS and "step" not in vars(optimizer)
    if is_torchs and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def num_hooks_ever() -> int:
    """Grows whenever a hook is put on anything."""
    return int(RemovableHandle.next_id)


def run_last(param: torch.Tensor, hook: RemovableHandle) -> bool:
    """Has a post-accumulate hook of `param` run after all others that it has; whether it did not so far."""
    hooks = param._post_accumulate_grad_hooks
    if next(reversed(hooks)) == hook.id:
        return False
    hooks[hook.id] = hooks.pop(hook.id)  # C++ reads them in the order of insertion
    return True


def is_profiling() -> bool:
    """Whether a torch profiler is recording, so that ranges cost nothing otherwise."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
