"""Communication hooks that torch takes, without ranks."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from support.errors import text_of
from undertow import ConfigError, WrongType
from undertow.buckets.comm_hook import CommHook, HookedBucket

BUFFER = torch.arange(6.0)
# As much of a group as a hook asks for: one without ranks that could be lost.
ALONE = Mock(is_broken=False, member="of one", complete=lambda work: work.wait(), hardware=Mock(is_host=True))


def bucket() -> HookedBucket:
    return HookedBucket(4, BUFFER.clone(), [torch.zeros(2, 2), torch.zeros(2)], is_last=True)


def returns(value: Any) -> Callable[[Any, Any], Any]:
    return lambda _state, bucket: value(bucket) if callable(value) else value


def with_annotations(**annotations: Any) -> Callable[..., Any]:
    def hook(state, bucket): ...

    hook.__annotations__ = annotations
    return hook


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(lambda state, bucket: None, id="bare"),
        pytest.param(with_annotations(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}), id="annotated"),
        pytest.param(
            with_annotations(state="object", bucket="dist.GradBucket", **{"return": "torch.futures.Future[torch.Tensor]"}),
            id="annotated by text",
        ),
        pytest.param(functools.partial(lambda extra, state, bucket: None, 1), id="partial"),
        pytest.param(default_hooks.allreduce_hook, id="all_reduce"),
        pytest.param(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), id="bf16, wrapped"),
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


def test_a_handle_is_complete_when_its_future_is() -> None:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    handle, told = CommHook(None, returns(future)).start(bucket(), ALONE), []
    handle.on_done(told.append)
    assert told == []
    future.set_result(BUFFER)
    handle.block_stream()
    assert len(told) == 1
