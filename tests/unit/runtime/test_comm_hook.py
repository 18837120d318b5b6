"""Communication hooks that torch takes, and what becomes of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from support.alone import ALONE
from support.errors import text_of
from undertow.errors import ConfigError, WrongType
from undertow.runtime.comm_hook import CommHook, HookedBucket

BUFFER = torch.arange(6.0)


def bucket() -> HookedBucket:
    """Two gradients in a buffer of six elements, the fifth bucket."""
    return HookedBucket(4, BUFFER.clone(), [torch.zeros(2, 2), torch.zeros(2)], is_last=True)


def completed(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def returns(value: Any) -> Callable[[Any, Any], Any]:
    return lambda _state, bucket: value(bucket) if callable(value) else value


def with_annotations(**annotations: Any) -> Callable[..., Any]:
    def hook(state, bucket): ...

    hook.__annotations__ = annotations
    return hook


class Hook:
    def __call__(self, state, bucket): ...


HOOKS = {
    "bare": lambda state, bucket: None,
    "annotated": with_annotations(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}),
    "annotated by text": with_annotations(
        state="object", bucket="dist.GradBucket", **{"return": "torch.futures.Future[torch.Tensor]"}
    ),
    "annotated by short text": with_annotations(bucket="GradBucket", **{"return": "Future[Tensor]"}),
    "object": Hook(),
    "partial": functools.partial(lambda extra, state, bucket: None, 1),
    "more parameters": lambda state, bucket, *, extra=1: None,
    "all_reduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16, wrapped": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    "power": powerSGD_hook.powerSGD_hook,
    "quantized": quantization_hooks.quantization_pertensor_hook,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_torch_takes_is_taken(hook: Any) -> None:
    assert CommHook(None, hook).name


ASK = "register_comm_hook(state, hook)\n"
LEAVE_OUT = f"{ASK}  Annotate it so, or leave the annotation out."
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "not callable": (
        1,
        WrongType,
        f" must be callable, got int.\n  {ASK}  Pass a function hook(state, bucket) that returns a torch.futures.Future.",
    ),
    "no bucket": (
        lambda state, grads: None,
        ConfigError,
        f": expected a parameter named 'bucket', got ['state', 'grads'].\n  {ASK}  Write def hook(state, bucket).",
    ),
    "bucket annotation": (
        with_annotations(bucket=int),
        ConfigError,
        f": bucket annotation should be dist.GradBucket, got <class 'int'>.\n  {LEAVE_OUT}",
    ),
    "bucket annotation by text": (
        with_annotations(bucket="int"),
        ConfigError,
        f": bucket annotation should be dist.GradBucket, got 'int'.\n  {LEAVE_OUT}",
    ),
    "return annotation": (
        with_annotations(**{"return": int}),
        ConfigError,
        f": return annotation should be torch.futures.Future[torch.Tensor], got <class 'int'>.\n  {LEAVE_OUT}",
    ),
}


@pytest.mark.parametrize(("hook", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_hook_that_torch_refuses_is_refused(hook: Any, error: type[Exception], text: str) -> None:
    assert text_of(error, lambda: CommHook(None, hook)) == f"Communication hook{text}"


def test_the_hook_gets_its_state_and_the_bucket() -> None:
    state, seen, given = object(), [], bucket()

    def hook(state, bucket):
        seen.append((state, bucket))
        return completed(bucket.buffer())

    CommHook(state, hook).start(given, ALONE).wait()
    assert seen == [(state, given)]


def test_a_bucket_has_the_methods_of_torchs() -> None:
    given, other = bucket(), torch.ones(6).half()
    names = [name for name in dir(dist.GradBucket) if not name.startswith("_")]
    assert [name for name in names if not callable(getattr(given, name, None))] == []
    assert (given.index(), given.is_last()) == (4, True)
    assert [gradient.tolist() for gradient in given.gradients()] == [[[0, 1], [2, 3]], [4, 5]]
    assert [param.shape for param in given.parameters()] == [(2, 2), (2,)]
    given.set_buffer(other)
    assert given.buffer() is other
    given.gradients()[1].zero_()  # torch's are views of whatever is the buffer; its wrappers and PowerSGD rely on that
    assert other.tolist() == [1, 1, 1, 1, 0, 0]


RESULTS: dict[str, Callable[[HookedBucket], Any]] = {
    "the buffer": lambda bucket: bucket.buffer().mul_(3),
    "a new tensor": lambda bucket: 3 * bucket.buffer(),
    "a list": lambda bucket: [3 * bucket.buffer()],
    "a tuple": lambda bucket: (3 * bucket.buffer(),),
    "another shape": lambda bucket: (3 * bucket.buffer()).view(2, 3),
    "another dtype": lambda bucket: (3 * bucket.buffer()).half(),
    "a graph": lambda bucket: 3 * bucket.buffer() * torch.ones(6, requires_grad=True),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_the_result_is_written_into_the_bucket(result: Callable[[HookedBucket], Any]) -> None:
    given = bucket()
    target = given.buffer()
    handle = CommHook(None, returns(lambda bucket: completed(result(bucket)))).start(given, ALONE)
    for _ in range(2):  # a second time is fine
        handle.wait()
    assert torch.equal(target, 3 * BUFFER)
    assert not target.requires_grad


def test_a_sparse_result_is_written_too() -> None:
    target, result = (
        torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2), (3, 2), check_invariants=True).coalesce()
        for rows in ([1], [0, 2])
    )
    given = HookedBucket(0, target, [torch.zeros(3, 2)], is_last=False)
    CommHook(None, returns(completed(result))).start(given, ALONE).wait()
    assert torch.equal(target.to_dense(), result.to_dense())


def test_a_handle_is_complete_when_its_future_is() -> None:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    handle, told = CommHook(None, returns(future)).start(bucket(), ALONE), []
    handle.on_done(told.append)
    assert (handle.is_completed(), told) == (False, [])
    future.set_result(BUFFER)
    handle.block_stream()
    assert (handle.is_completed(), len(told)) == (True, 1)


@pytest.mark.parametrize(("value", "got"), [(None, "NoneType"), (BUFFER, "Tensor")], ids=["nothing", "a tensor"])
def test_a_hook_that_returns_no_future_is_told_so(value: object, got: str) -> None:
    assert text_of(WrongType, lambda: CommHook(None, returns(value)).start(bucket(), ALONE).wait()) == (
        f"expected the communication hook to return a torch.futures.Future, got {got}.\n"
        "  returns.<locals>.<lambda>, bucket 4\n"
        "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result()."
    )


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "NoneType"), (torch.zeros(5), "(5,)"), (torch.zeros(2, 2), "(2, 2)"), ([BUFFER, BUFFER], "list"), ([], "list")],
    ids=["nothing", "too few elements", "another shape", "two tensors", "no tensor"],
)
def test_a_future_that_holds_something_else_is_told_so(value: object, got: str) -> None:
    assert text_of(WrongType, CommHook(None, returns(completed(value))).start(bucket(), ALONE).wait) == (
        f"expected the communication hook's future to hold a tensor of 6 elements, got {got}.\n"
        "  returns.<locals>.<lambda>\n"
        "  Let the future hold a tensor with the shape of bucket.buffer()."
    )


def test_an_error_of_the_future_is_raised_as_it_is() -> None:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    handle = CommHook(None, returns(future)).start(bucket(), ALONE)
    future.set_exception(ZeroDivisionError("in the hook"))
    assert text_of(ZeroDivisionError, handle.wait) == "in the hook"
