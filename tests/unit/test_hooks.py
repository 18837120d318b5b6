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


def bucket() -> HookedBucket:
    return HookedBucket(4, BUFFER.clone(), [torch.zeros(2, 2), torch.zeros(2)], is_last=True)


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


def result_of(hook: Callable[..., Any]) -> Tensor:
    given = bucket()
    target = given.buffer()
    CommHook(None, hook).start(given, ALONE).wait()
    return target


def test_every_hook_sees_what_the_one_before_has_made() -> None:
    assert torch.equal(result_of(undertow.chain((1.0, add), (None, double_in_place), (3.0, add))), 2 * (BUFFER + 1) + 3)


def test_a_chain_is_a_hook_of_a_chain() -> None:
    inner = undertow.chain((1.0, add), (None, double_in_place))
    assert torch.equal(result_of(undertow.chain((None, inner), (3.0, add))), 2 * (BUFFER + 1) + 3)


def test_the_bucket_keeps_its_dtype_behind_a_hook_that_replaces_the_buffer() -> None:
    dtypes = []

    def look(_state, bucket):
        dtypes.append(bucket.buffer().dtype)
        return completed(bucket.buffer())

    assert torch.equal(result_of(undertow.chain((None, halves), (None, look))), BUFFER + 0.5)
    assert dtypes == [torch.float32]


def test_hooks_behind_one_that_is_on_its_way_wait_for_it() -> None:
    on_its_way: torch.futures.Future[Tensor] = torch.futures.Future()
    seen: list[Tensor] = []

    def look(_state, bucket):
        seen.append(bucket.buffer().clone())
        return completed(bucket.buffer())

    given = bucket()
    target = given.buffer()
    chained = undertow.chain((1.0, add), (None, lambda state, bucket: on_its_way), (None, look), (None, double_in_place))
    handle = CommHook(None, chained).start(given, ALONE)
    assert (seen, handle.is_completed()) == ([], False)
    on_its_way.set_result(torch.full((6,), 7.0))
    handle.wait()
    assert torch.equal(target, torch.full((6,), 14.0))
    assert [values.tolist() for values in seen] == [[7.0] * 6]


def test_a_chain_is_named_after_its_hooks() -> None:
    hook = undertow.chain((None, default_hooks.fp16_compress_hook), (1.0, add))
    assert CommHook(None, hook).name == "chain(fp16_compress_hook, add)"


def test_what_is_no_chain_is_refused() -> None:
    assert text_of(ConfigError, undertow.chain) == (
        "there is no hook to run.\n  chain()\n  Give pairs: chain((state, hook), ...)."
    )
    assert text_of(WrongType, lambda: undertow.chain((None, add), add)) == (  # type: ignore[arg-type]
        "stage 1 must be a pair of a state and a hook, got function.\n"
        "  chain()\n"
        "  Write chain((state, hook), ...); the state may be None."
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_hook_of_a_chain_that_returns_no_future_is_told_so(place: int) -> None:
    def wrong(_state, bucket):
        return bucket.buffer()

    stages = [(1.0, add), (2.0, add)]
    stages[place] = (None, wrong)  # type: ignore[assignment]
    assert text_of(WrongType, lambda: result_of(undertow.chain(*stages))) == (
        "expected the communication hook to return a torch.futures.Future, got Tensor.\n"
        f"  {wrong.__qualname__}, in a chain\n"
        "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result()."
    )
