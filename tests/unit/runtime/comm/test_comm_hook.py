"""Communication hooks that torch takes, one by one and in chains, without ranks."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

import undertow
from support.errors import text_of
from undertow import ConfigError, WrongType
from undertow.runtime.comm.comm_hook import CommHook, HookedBucket

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
LEAVE_OUT = f"{ASK}  Annotate it so, or leave the annotation out."


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
        pytest.param(
            with_annotations(bucket=int),
            ConfigError,
            f": bucket annotation should be dist.GradBucket, got <class 'int'>.\n  {LEAVE_OUT}",
            id="bucket annotation",
        ),
        pytest.param(
            with_annotations(bucket="int"),
            ConfigError,
            f": bucket annotation should be dist.GradBucket, got 'int'.\n  {LEAVE_OUT}",
            id="bucket annotation by text",
        ),
        pytest.param(
            with_annotations(**{"return": int}),
            ConfigError,
            f": return annotation should be torch.futures.Future[torch.Tensor], got <class 'int'>.\n  {LEAVE_OUT}",
            id="return annotation",
        ),
    ],
)
def test_a_hook_that_torch_refuses_is_refused(hook: Any, error: type[Exception], text: str) -> None:
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


@pytest.mark.parametrize(
    "chained",
    [
        undertow.chain_comm_hooks((1.0, add), (None, double_in_place), (3.0, add)),
        undertow.chain_comm_hooks((None, undertow.chain_comm_hooks((1.0, add), (None, double_in_place))), (3.0, add)),
    ],
    ids=["each sees what the one before has made", "of a chain"],
)
def test_hooks_one_behind_the_other(chained: Any) -> None:
    buffer, handle = started(chained)
    handle.wait()
    assert torch.equal(buffer, 2 * (BUFFER + 1) + 3)


def test_the_bucket_keeps_its_dtype_behind_a_hook_that_replaces_the_buffer() -> None:
    seen: list[Tensor] = []
    buffer, handle = started(undertow.chain_comm_hooks((None, halves), (seen, look)))
    handle.wait()
    assert (torch.equal(buffer, BUFFER + 0.5), [it.dtype for it in seen]) == (True, [torch.float32])


def test_hooks_behind_one_that_is_on_its_way_wait_for_it() -> None:
    seen, on_its_way = list[Tensor](), torch.futures.Future[Tensor]()
    buffer, handle = started(
        undertow.chain_comm_hooks((1.0, add), (None, lambda state, bucket: on_its_way), (seen, look), (None, double_in_place))
    )
    assert seen == []
    on_its_way.set_result(torch.full((6,), 7.0))
    handle.wait()
    assert (buffer.tolist(), [it.tolist() for it in seen]) == ([14.0] * 6, [[7.0] * 6])


def test_a_chain_is_named_after_its_hooks() -> None:
    assert (
        CommHook(None, undertow.chain_comm_hooks((None, default_hooks.fp16_compress_hook), (1.0, add))).name
        == "chain_comm_hooks(fp16_compress_hook, add)"
    )


FUTURE = (
    "expected the communication hook to return a torch.futures.Future, got Tensor.\n  wrong, in a chain\n"
    "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result()."
)


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        pytest.param(
            ConfigError,
            undertow.chain_comm_hooks,
            "there is no hook to run.\n  chain_comm_hooks()\n  Give pairs: chain_comm_hooks((state, hook), ...).",
            id="no hook",
        ),
        pytest.param(
            WrongType,
            lambda: undertow.chain_comm_hooks((None, add), add),  # type: ignore[arg-type]
            "stage 1 must be a pair of a state and a hook, got function.\n"
            "  chain_comm_hooks()\n  Write chain_comm_hooks((state, hook), ...); the state may be None.",
            id="no pair",
        ),
        pytest.param(
            WrongType,
            lambda: started(undertow.chain_comm_hooks((None, wrong), (2.0, add)))[1].wait(),
            FUTURE,
            id="no future, first",
        ),
        pytest.param(
            WrongType,
            lambda: started(undertow.chain_comm_hooks((1.0, add), (None, wrong)))[1].wait(),
            FUTURE,
            id="no future, last",
        ),
    ],
)
def test_what_is_no_chain_of_hooks_is_refused(error: type[Exception], call: Callable[[], object], text: str) -> None:
    assert text_of(error, call) == text
