"""Calls to torch's private API, in one place.

`tests/unit/torch_private` pins the behavior that Undertow relies on.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.utils import _to_kwargs
from torch.utils.hooks import RemovableHandle

from undertow.errors import PhaseError, require

# The id of this thread's innermost backward; -1 outside of backward.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Calls its argument at the end of this thread's innermost backward, after the callbacks queued so
# far.
call_after_backward: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)

# Inside such a callback, the node around a nested backward, or None for the outermost.
enclosing_node: Callable[[], Any | None] = torch._C._current_autograd_node

# Context that keeps torch functions from dispatching to the classes of their tensor arguments.
as_plain_tensors: Callable[[], contextlib.AbstractContextManager[None]] = (
    torch.DisableTorchFunctionSubclass
)

# Copies source by source (targets, sources); in one launch per device and dtype if torch has a
# fused kernel.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_

# The largest absolute value of each tensor (NaN if it has one), in few launches; no tensor may be
# empty.
largest_of_each: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = partial(
    torch._foreach_norm, ord=float("inf")
)

# Counts the writes to a tensor, through itself or its views.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# The `__torch_function__` of a subclass whose operations are those of plain tensors.
no_dispatch: Any = torch._C._disabled_torch_function_impl

# A tensor of a subclass over the memory of another one.
make_subclass: Any = torch.Tensor._make_subclass

# A number that grows whenever a hook is registered anywhere. Asked in every step, hence without a
# frame, as is the next one.
num_hooks_ever: Callable[[], int] = partial(getattr, RemovableHandle, "next_id")

# True if a torch profiler is recording; otherwise ranges are not created and cost nothing.
is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")

_autograd: Any = dist.autograd
# True if torch.distributed.rpc runs in this process; some builds of torch do not have it.
is_rpc_running: Callable[[], bool] = getattr(
    dist.rpc, "_is_current_rpc_agent_set", dist.rpc.is_available
)

# The code of the wrapper that torch puts around an optimizer class's `step` when it constructs the
# first instance.
_STEP_WITH_HOOKS = torch.optim.Optimizer.profile_hook_step(int).__code__

_Function = TypeVar("_Function", bound=Callable[..., object])
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def untraced(function: _Function) -> _Function:
    """Makes torch.compile call `function`, and everything that it calls, uncompiled.

    The public torch.compiler.disable imports the compiler at once, and each call of its result
    takes two more frames. Closures of the same code are all to be untraced.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, None  # type: ignore[attr-defined]
    return left_alone(function)


def left_alone(function: _Function) -> _Function:
    """Like `untraced`, without a frame around the function, for autograd hooks.

    Compiled code that calls it traces into it.
    """
    code, frames = cast(Any, function).__code__, torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def wrapper_tensor(cls: type[_Tensor], like: torch.Tensor, dtype: torch.dtype) -> _Tensor:
    """Returns a tensor of class `cls` without storage, with `like`'s shape, strides and device."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside data-parallel wrappers and compiled modules."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    return (
        unwrapped(cast(torch.nn.Module, model._orig_mod))
        if type(model).__name__ == "OptimizedModule"
        else model
    )


def uncompiled(model: Any) -> Any:
    """Returns the module that torch.compile was called on, or the object itself."""
    return getattr(model, "_orig_mod", model)


def ignored_by_ddp(module: torch.nn.Module) -> Collection[str]:
    """Returns the names that the module's author has told torch's class to leave out, by
    `_set_params_and_buffers_to_ignore_for_model`."""
    return cast(Collection[str], getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def end_join(model: Joinable) -> None:
    """Makes the model's forwards announce nothing to ranks inside torch's Join."""
    disabled = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
    model._join_config = disabled


def is_held_by_torch(tensor: torch.Tensor) -> bool:
    """Returns True if something outside of Python refers to the tensor, as a parameter to its
    `.grad`."""
    return int(tensor._use_count()) > 1  # type: ignore[attr-defined]


def counter_of_uses(tensor: torch.Tensor) -> Callable[[], int]:
    """Returns a function that counts the tensors that share `tensor`'s storage, while it exists."""
    return partial(torch._C._storage_Use_Count, tensor.untyped_storage()._cdata)


def free_memory(tensor: torch.Tensor) -> None:
    """Frees a tensor's memory, or its share of it; shape and strides stay. It must not be read."""
    if tensor.untyped_storage().nbytes():
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        empty.untyped_storage().resize_(0)
        tensor.data = empty


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns False for a wrapper subclass, which only refers to other tensors."""
    with as_plain_tensors():
        is_dense = tensor.layout is torch.strided and not tensor.is_meta
        return not is_dense or tensor.numel() == 0 or tensor.data_ptr() != 0


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Returns True if several elements share memory, as in an expanded tensor.

    Torch writes into no such tensor.
    """
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def addresses_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Returns addresses for `are_shared`, valid while the storages are alive."""
    return [storage._cdata for storage in storages]


def are_shared(addresses: Sequence[int]) -> bool:
    """Returns True if more than one tensor refers to any of these storages.

    A Python object also holds each of them.
    """
    return max(map(torch._C._storage_Use_Count, addresses), default=0) > 2


def post_accumulate_hooks(param: torch.Tensor) -> Sequence[Callable[..., None]]:
    """Returns the hooks that `register_post_accumulate_grad_hook` has put on a parameter."""
    return tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def hook_gradients(param: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> RemovableHandle:
    """Registers a post-accumulate hook, also on a frozen parameter: it runs once the parameter is
    trained.

    Raises RuntimeError if the parameter can never be trained: integer and quantized ones, or ones
    made in inference mode.
    """
    # Without a context for trained parameters: a model may have thousands.
    with contextlib.nullcontext() if param.requires_grad else _trained(param):
        return cast(RemovableHandle, param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _trained(param: torch.Tensor) -> Iterator[None]:
    """Context that makes the parameter require gradients.

    Autograd keeps its node for when it is unfrozen later.
    """
    is_trained = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(is_trained)


def may_train(param: torch.Tensor) -> bool:
    """Returns True if the parameter can get a gradient.

    Not an integer or quantized one, or one made in inference mode.
    """
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices and values of a sparse tensor, which may have a row more than once."""
    return tensor._indices(), tensor._values()


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the tensor's gradient, which may differ from the tensor's dtype through
    `tensor.grad_dtype`."""
    return (getattr(tensor, "grad_dtype", None) or tensor.dtype) if tensor.is_leaf else tensor.dtype


def set_gradient_dtype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Makes autograd accumulate in `dtype`; ConfigError if this torch cannot.

    The parameter has no gradient of another dtype.
    """
    require(
        hasattr(param, "grad_dtype"),
        f"torch {torch.__version__} has no Tensor.grad_dtype, by which gradients have a separate "
        "dtype.",
        where="SyncConfig(reduce_dtype=...)",
        remedy="Install a newer torch, or leave reduce_dtype out.",
    )
    param.grad_dtype = dtype


def is_in_rpc_context() -> bool:
    """Returns True in a context of distributed autograd, which keeps gradients instead of
    `.grad`."""
    if is_rpc_running():  # checked first: without a context, torch raises an error, which is slow
        with contextlib.suppress(RuntimeError):
            _autograd._current_context()
            return True
    return False


def accumulating_node(param: torch.Tensor) -> Any:
    """Returns the graph node that adds to the parameter's gradient."""
    with _trained(param), torch.enable_grad():
        return param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def scale_gradients(param: torch.Tensor, factor: float) -> tuple[Any, RemovableHandle]:
    """Multiplies each gradient before it is added to the parameter's `.grad`, as long as the
    returned node is alive.

    Results of torch.autograd.grad stay as they are.
    """
    node = accumulating_node(param)

    @left_alone
    def hook(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient * factor for gradient in gradients)

    return node, node.register_prehook(hook)


def require_eager_backward() -> None:
    """Raises PhaseError in a hook of a backward that compiled autograd runs.

    It writes some gradients after their hooks.
    """
    if getattr(
        sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False
    ):
        raise PhaseError(
            "compiled autograd runs this backward, and would leave gradients out of the mean.",
            where="torch._dynamo.config.compiled_autograd, or torch._dynamo.compiled_autograd",
            remedy="Turn it off; torch.compile of the model or of the whole step works without it.",
        )


def moved_to_device(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves every tensor in the arguments of a forward to `device`, with copies on a side
    stream."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
    return tuple(moved_inputs[0]) if inputs else (), dict(moved_kwargs[0]) if kwargs else {}


def is_compiling() -> bool:
    """Returns True if this code is being compiled, or called while torch.compile traces."""
    frames = getattr(torch._C._dynamo, "eval_frame", None)  # present if the compiler was imported
    return torch.compiler.is_compiling() or (
        frames is not None and callable(frames.get_eval_frame_callback())
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns True if the module is the result of torch.compile or `module.compile()` was called on
    it."""
    # Compared by name, because importing the compiler takes longer than most programs run.
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def is_script(module: torch.nn.Module) -> bool:
    """Returns True for a module of TorchScript, which calls its parts without their hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def step_unwatched(optimizer: torch.optim.Optimizer) -> None:
    """Steps without the user's global optimizer hooks; hooks of this optimizer still run.

    The global hooks run too if the optimizer has hooks itself, or if its class calls the step of
    another class.
    """
    step: Any = type(optimizer).step
    # If other code has wrapped the step, the inner function is not the whole step.
    is_torchs = getattr(step, "__code__", None) is _STEP_WITH_HOOKS and "step" not in vars(
        optimizer
    )
    if is_torchs and not (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Returns the schedulers that this one runs in turn or together."""
    return cast(Sequence[Any], getattr(scheduler, "_schedulers", ()))


def note_steps_before_schedulers(
    earlier: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> None:
    """Lets schedulers of `optimizer` know of a step of the `earlier` one that it replaces.

    Otherwise they warn that no step precedes theirs.
    """
    if "_opt_called" in vars(earlier):
        vars(optimizer)["_opt_called"] = True


def run_last(param: torch.Tensor, hook: RemovableHandle) -> bool:
    """Moves a post-accumulate hook of `param` after all its others.

    Returns False if it was last already.
    """
    hooks = param._post_accumulate_grad_hooks
    if next(reversed(hooks)) == hook.id:
        return False
    hooks[hook.id] = hooks.pop(hook.id)  # C++ calls them in insertion order
    return True
