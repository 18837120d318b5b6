"""Communication hooks that torch takes, without ranks."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from support.errors import text_of
from undertow import ConfigError, WrongType
from undertow.ranks.comm_hook import CommHook, HookedBucket

BUFFER = torch.arange(6.0)
# As much of a group as a hook asks for: one without ranks that could be lost.
ALONE = Mock(is_broken=False, member="of one", complete=lambda work: work.wait())


def bucket() -> HookedBucket:
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


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(lambda state, bucket: None, id="bare"),
        pytest.param(with_annotations(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}), id="annotated"),
        pytest.param(
            with_annotations(state="object", bucket="dist.GradBucket", **{"return": "torch.futures.Future[torch.Tensor]"}),
            id="annotated by text",
        ),
        pytest.param(with_annotations(bucket="GradBucket", **{"return": "Future[Tensor]"}), id="annotated by short text"),
        pytest.param(Hook(), id="object"),
        pytest.param(functools.partial(lambda extra, state, bucket: None, 1), id="partial"),
        pytest.param(lambda state, bucket, *, extra=1: None, id="more parameters"),
        pytest.param(default_hooks.allreduce_hook, id="all_reduce"),
        pytest.param(default_hooks.fp16_compress_hook, id="fp16"),
        pytest.param(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), id="bf16, wrapped"),
        pytest.param(powerSGD_hook.powerSGD_hook, id="power"),
        pytest.param(quantization_hooks.quantization_pertensor_hook, id="quantized"),
    ],
)
def test_a_hook_that_torch_takes_is_taken(hook: Any) -> None:
    assert CommHook(None, hook).name


ASK = "register_comm_hook(state, hook)\n"


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        pytest.param(
            1,
            WrongType,
            f" must be callable, got int.\n  {ASK}  Pass a function hook(state, bucket) that returns a torch.futures.Future.",
            id="not callable",
        ),
        pytest.param(
            lambda state, grads: None,
            ConfigError,
            f": expected a parameter named 'bucket', got ['state', 'grads'].\n  {ASK}  Write def hook(state, bucket).",
            id="no bucket",
        ),
    ],
)
def test_a_hook_without_the_parameter_of_torchs_is_refused(hook: Any, error: type[Exception], text: str) -> None:
    assert text_of(error, lambda: CommHook(None, hook)) == f"Communication hook{text}"


def test_a_bucket_has_the_methods_of_torchs() -> None:
    given, other = bucket(), torch.ones(6).half()
    names = [name for name in dir(dist.GradBucket) if not name.startswith("_")]
    assert (
        [name for name in names if not callable(getattr(given, name, None))],
        given.index(),
        given.is_last(),
        [param.shape for param in given.parameters()],
        [gradient.tolist() for gradient in given.gradients()],
    ) == ([], 4, True, [(2, 2), (2,)], [[[0, 1], [2, 3]], [4, 5]])
    given.set_buffer(other)
    assert given.buffer() is other
    given.gradients()[1].zero_()  # torch's are views of whatever is the buffer; its wrappers and PowerSGD rely on that
    assert other.tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(lambda bucket: bucket.buffer().mul_(3), id="the buffer"),
        pytest.param(lambda bucket: 3 * bucket.buffer(), id="a new tensor"),
        pytest.param(lambda bucket: [3 * bucket.buffer()], id="a list"),
        pytest.param(lambda bucket: (3 * bucket.buffer(),), id="a tuple"),
        pytest.param(lambda bucket: (3 * bucket.buffer()).view(2, 3), id="another shape"),
        pytest.param(lambda bucket: (3 * bucket.buffer()).half(), id="another dtype"),
        pytest.param(lambda bucket: 3 * bucket.buffer() * torch.ones(6, requires_grad=True), id="a graph"),
    ],
)
def test_the_result_is_written_into_the_bucket(result: Callable[[HookedBucket], Any]) -> None:
    given = bucket()
    target = given.buffer()
    handle = CommHook(None, returns(lambda bucket: completed(result(bucket)))).start(given, ALONE)
    for _ in range(2):  # a second time is fine
        handle.wait()
    assert (torch.equal(target, 3 * BUFFER), target.requires_grad) == (True, False)


def test_a_handle_is_complete_when_its_future_is() -> None:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    handle, told = CommHook(None, returns(future)).start(bucket(), ALONE), []
    handle.on_done(told.append)
    assert told == []
    future.set_result(BUFFER)
    handle.block_stream()
    assert len(told) == 1


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


def add(amount, bucket):
    return completed(bucket.buffer() + amount)


def double_in_place(_state, bucket):
    for gradient in bucket.gradients():
        gradient.mul_(2)
    return completed(bucket.buffer())


def halves(_state, bucket):
    bucket.set_buffer(bucket.buffer().half())
    return completed([bucket.buffer() + 0.5])


def look(seen, bucket):
    seen.append(bucket.buffer().clone())
    return completed(bucket.buffer())


def wrong(_state, bucket):
    return bucket.buffer()


def started(hook: Callable[..., Any]) -> tuple[Tensor, Any]:
    given = bucket()
    return given.buffer(), CommHook(None, hook).start(given, ALONE)
