"""Communication hooks one behind the other, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import undertow
from support.alone import ALONE
from support.errors import text_of
from undertow import ConfigError, WrongType
from undertow.runtime.comm_hook import CommHook, HookedBucket

BUFFER = torch.arange(6.0)


def completed(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


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
    """The buffer of two gradients, and the handle of the hook on it."""
    buffer = BUFFER.clone()
    bucket = HookedBucket(4, buffer, [torch.zeros(2, 2), torch.zeros(2)], is_last=True)
    return buffer, CommHook(None, hook).start(bucket, ALONE)


@pytest.mark.parametrize(
    "chained",
    [
        undertow.chain((1.0, add), (None, double_in_place), (3.0, add)),
        undertow.chain((None, undertow.chain((1.0, add), (None, double_in_place))), (3.0, add)),
    ],
    ids=["each sees what the one before has made", "of a chain"],
)
def test_hooks_one_behind_the_other(chained: Any) -> None:
    buffer, handle = started(chained)
    handle.wait()
    assert torch.equal(buffer, 2 * (BUFFER + 1) + 3)


def test_the_bucket_keeps_its_dtype_behind_a_hook_that_replaces_the_buffer() -> None:
    seen: list[Tensor] = []
    buffer, handle = started(undertow.chain((None, halves), (seen, look)))
    handle.wait()
    assert torch.equal(buffer, BUFFER + 0.5)
    assert [it.dtype for it in seen] == [torch.float32]


def test_hooks_behind_one_that_is_on_its_way_wait_for_it() -> None:
    seen, on_its_way = list[Tensor](), torch.futures.Future[Tensor]()
    send = (None, lambda state, bucket: on_its_way)
    buffer, handle = started(undertow.chain((1.0, add), send, (seen, look), (None, double_in_place)))
    assert (seen, handle.is_completed()) == ([], False)
    on_its_way.set_result(torch.full((6,), 7.0))
    handle.wait()
    assert (buffer.tolist(), [it.tolist() for it in seen]) == ([14.0] * 6, [[7.0] * 6])


def test_a_chain_is_named_after_its_hooks() -> None:
    hook = undertow.chain((None, default_hooks.fp16_compress_hook), (1.0, add))
    assert CommHook(None, hook).name == "chain(fp16_compress_hook, add)"


FUTURE = (
    "expected the communication hook to return a torch.futures.Future, got Tensor.\n  wrong, in a chain\n"
    "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result()."
)
REFUSALS: dict[str, tuple[type[Exception], Callable[[], object], str]] = {
    "no hook": (
        ConfigError,
        undertow.chain,
        "there is no hook to run.\n  chain()\n  Give pairs: chain((state, hook), ...).",
    ),
    "no pair": (
        WrongType,
        lambda: undertow.chain((None, add), add),  # type: ignore[arg-type]
        "stage 1 must be a pair of a state and a hook, got function.\n"
        "  chain()\n  Write chain((state, hook), ...); the state may be None.",
    ),
    "no future, first": (WrongType, lambda: started(undertow.chain((None, wrong), (2.0, add)))[1].wait(), FUTURE),
    "no future, last": (WrongType, lambda: started(undertow.chain((1.0, add), (None, wrong)))[1].wait(), FUTURE),
}


@pytest.mark.parametrize(("error", "call", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_chain_of_hooks_is_refused(error: type[Exception], call: Callable[[], object], text: str) -> None:
    assert text_of(error, call) == text
