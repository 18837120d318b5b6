"""The user's own reduction.

A communication hook in the form that torch's DistributedDataParallel accepts.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import WrongType, require
from undertow.ranks import faults
from undertow.ranks.handle import Handle
from undertow.ranks.threads import Worker, may_be_stuck
from undertow.ranks.transport import OwnGroup

_POWER_SGD_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class HookedBucket:
    """A bucket as hooks see it, with the methods of `torch.distributed.GradBucket`, which Python
    cannot construct.

    The buffer has the gradients one after another, [numel], without padding and trailer. Buckets
    count in the order of launches.
    """

    def __init__(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor], *, is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Returns a view of the buffer for each parameter, of its shape.

        Views are contiguous, as in torch, for any strides of the parameter.
        """
        if self._buffer.is_sparse:
            return [self._buffer]
        pieces = torch.split(self._buffer, [param.numel() for param in self._parameters])
        return [
            piece.view(param.shape) for piece, param in zip(pieces, self._parameters, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces the buffer and makes `gradients` views of it.

        The result is still the value of the hook's future.
        """
        self._buffer = tensor


class CommHook:
    """The user's `hook(state, bucket)`, which returns a future of the reduced buffer.

    ConfigError if torch would refuse it.
    """

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        _check_signature(hook)
        self.name = getattr(hook, "__qualname__", type(hook).__name__)
        self._state, self._hook = state, hook
        self._has_told = False  # that its buckets have other parameters
        self._worker: Worker | None = None
        self._failures: list[BaseException] = []

    def begin_round(self) -> None:
        """Forgets failed calls of earlier synchronizations."""
        self._failures = []

    def forget(self) -> bool:
        """Clears the errors and matrices that torch's PowerSGDState keeps for each bucket. Must be
        called between the same synchronizations on every rank.

        Returns False if the hook has another state, which stays as it is.
        """
        memories = [getattr(self._state, name, None) for name in _POWER_SGD_MEMORIES]
        kept = [memory for memory in memories if isinstance(memory, dict)]
        for memory in kept:
            memory.clear()
        return bool(kept)

    def buckets_change(self, *, is_told: bool) -> None:
        """Called on every rank when the buckets have other parameters from now on. The hook was
        called with zeros for the old ones, which PowerSGD turns into NaN.

        Warns once of a state that may keep more for each bucket, if `is_told` on this rank.
        """
        has_state = not isinstance(self._state, dist.ProcessGroup | None)
        if self.forget() or not (has_state and is_told) or self._has_told:
            return
        self._has_told = True
        faults.tell(
            f"the buckets of the communication hook {self.name} have other parameters from now on, "
            "and it was called once more with zeros for the old ones.\n"
            "  register_comm_hook(state, hook)\n"
            "  If its state keeps values for each bucket, clear them on every rank."
        )

    def start(self, bucket: HookedBucket, group: OwnGroup) -> Handle:
        """Calls the hook; the value of its future is written into the bucket's buffer at the end.

        `group` is the model's: if one of its ranks is gone, the wait for the hook ends.

        On the host, hooks run in a thread, one bucket after another. Some hooks, such as PowerSGD,
        start collectives in callbacks of their futures; those run when other collectives complete,
        in a different order on every rank. On a device, callbacks run immediately.
        """
        if not group.hardware.is_host:
            return self._call(bucket)
        self._worker = _thread_beside_this_one()
        self._worker.groups.add(group)
        call = partial(self._call_in_turn, bucket, self._failures)
        return Handle.in_thread(call, self._worker, waiter=group.waiter)

    def close(self) -> None:
        """Releases the thread; it ends after the pending calls of the last hook that uses it."""
        self._worker = None

    def _call_in_turn(self, bucket: HookedBucket, failures: list[BaseException]) -> None:
        """Calls the hook and waits for its result, unless an earlier call of the synchronization
        has failed.

        On other ranks, the messages of further calls would pair with the failed call's.
        """
        if failures:
            raise failures[0]
        try:
            self._call(bucket).wait()
        except BaseException as error:
            failures.append(error)
            raise

    @torch.no_grad()
    def _call(self, bucket: HookedBucket) -> Handle:
        target = bucket.buffer()
        future = self._hook(self._state, bucket)
        require(
            isinstance(future, torch.Future),  # the base class of torch.futures.Future
            "expected the communication hook to return a torch.futures.Future, got "
            f"{type(future).__name__}.",
            where=f"{self.name}, bucket {bucket.index()}",
            remedy="Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a "
            "Future with set_result().",
            error=WrongType,
        )
        # With the methods of a dist.Work.
        work = SimpleNamespace(
            wait=future.wait, is_completed=future.done, get_future=lambda: future
        )
        return Handle(work, finish=lambda: _write_result(future.wait(), target, name=self.name))


@torch.no_grad()
def _write_result(result: object, target: Tensor, *, name: str) -> None:
    """Writes the value of a hook's future into the bucket."""
    if isinstance(result, list | tuple) and len(result) == 1:  # as collectives return them
        (result,) = result
    if isinstance(result, Tensor) and result.shape == (*target.shape, 2) and target.is_complex():
        result = torch.view_as_complex(result)  # NCCL reduces, and returns, real numbers
    if not isinstance(result, Tensor) or result.numel() != target.numel():
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise WrongType(
            f"expected the communication hook's future to hold a tensor of {target.numel()} "
            f"elements, got {got}.",
            where=name,
            remedy="Let the future hold a tensor with the shape of bucket.buffer().",
        )
    if target.is_sparse:
        target.copy_(result)
    elif result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
        target.copy_(result.view_as(target))


def _thread_beside_this_one() -> Worker:
    """Returns the thread for the hooks of all models that train in this thread, which may share a
    group and so need one order."""
    # differs in a child process, which has none of its parent's threads
    key = threading.get_native_id()
    worker = _workers.get(key)
    if worker is None or may_be_stuck(worker.groups):
        worker = _workers[key] = Worker("undertow-hooks")
    return worker


# Hooks hold the workers: when the last reference is gone, the worker's thread ends.
_workers: weakref.WeakValueDictionary[int, Worker] = weakref.WeakValueDictionary()


def _check_signature(hook: Callable[..., Any]) -> None:
    require(  # as torch does, with torch's messages
        callable(hook),
        f"Communication hook must be callable, got {type(hook).__name__}.",
        where="register_comm_hook(state, hook)",
        remedy="Pass a function hook(state, bucket) that returns a torch.futures.Future.",
        error=WrongType,
    )
    parameters = list(inspect.signature(hook).parameters)
    require(
        "bucket" in parameters,
        f"Communication hook: expected a parameter named 'bucket', got {parameters}.",
        where="register_comm_hook(state, hook)",
        remedy="Write def hook(state, bucket).",
    )
