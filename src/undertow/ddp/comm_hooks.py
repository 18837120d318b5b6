"""Chains communication hooks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from undertow.errors import WrongType, require
from undertow.runtime.comm.comm_hook import name_of, require_future, write_result

Hook = Callable[[Any, Any], Any]
Stage = tuple[object, Hook]


def chain_comm_hooks(*stages: Stage) -> Hook:
    """Returns a communication hook that runs several hooks one after the other.

        hook = chain_comm_hooks((1e3, clip_values), (power_state, powerSGD_hook), (log, note_norms))
        model.register_comm_hook(None, hook)

    Each hook receives the bucket with the result of the previous hook, and returns a future as
    usual. The value of the last future becomes the gradients. One of the hooks communicates, and
    divides if a mean is wanted. Hooks before it see this rank's gradients, hooks after it the reduced
    ones. They change values, not the dtype of the bucket: to send another dtype, put one of torch's
    wrappers around the hook that communicates. A hook after the communicating one runs when that is
    complete, perhaps in another thread and at different times on different ranks: it must not
    communicate.

    Args:
        stages: Pairs of a state and a hook.

    Returns:
        A hook for `register_comm_hook`; its state is ignored.

    Raises:
        ConfigError: Without stages.
        WrongType: For a stage that is not such a pair.
    """
    require(
        stages, "there is no hook to run.", where="chain_comm_hooks()", remedy="Give pairs: chain_comm_hooks((state, hook), ...)."
    )
    for place, stage in enumerate(stages):
        require(
            isinstance(stage, tuple) and len(stage) == 2 and callable(stage[1]),
            f"stage {place} must be a pair of a state and a hook, got {type(stage).__name__}.",
            where="chain_comm_hooks()",
            remedy="Write chain_comm_hooks((state, hook), ...); the state may be None.",
            error=WrongType,
        )

    def chained(_state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own classes
        return _run(stages, bucket, bucket.buffer())

    chained.__qualname__ = f"chain_comm_hooks({', '.join(name_of(hook) for _, hook in stages)})"
    return chained


def _run(stages: Sequence[Stage], bucket: Any, buffer: Tensor) -> Any:
    """Returns the future of the last stage; every stage finds its predecessor's result in `buffer`."""
    (state, hook), *rest = stages
    bucket.set_buffer(buffer)  # a wrapper may have replaced it
    future = hook(state, bucket)
    require_future(future, where=f"{name_of(hook)}, in a chain")
    if not rest:
        return future

    def next_future(completed: Any) -> Any:
        write_result(completed.value(), buffer, name="a stage of chain_comm_hooks()")
        return _run(rest, bucket, buffer)

    # A hook that does not communicate is done by now, and the next one may communicate in this thread. On a device `then` does
    # the same, on a stream that waits for the future's result.
    if future.done() and buffer.device.type == "cpu":
        return next_future(future)
    return future.then(lambda completed: next_future(completed).wait())
