"""`model.reducer`: answers the calls that frameworks make to the C++ reducer of torch's class."""

from __future__ import annotations

from typing import NoReturn


class Reducer:
    """Accepts announcements and ignores them.

    A backward decides whether to synchronize when it runs, from the parameters it reaches. Lightning's manual optimization,
    Accelerate's `trigger_sync_in_backward` and torch's pipeline stages tell torch's reducer that a backward is to synchronize
    although its forward ran under `no_sync`. They call only these methods.
    """

    __slots__ = ()

    def _rebuild_buckets(self) -> bool:
        """Returns False: no buckets were rebuilt."""
        return False

    def prepare_for_backward(self, outputs: object) -> None:
        """Does nothing: parameters that `outputs` do not reach need not be known before backward."""

    def _delay_all_reduce(self) -> None:
        """Does nothing: the first synchronization of a static graph is not delayed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"model.reducer has no {name!r}: Undertow's DistributedDataParallel has no C++ reducer.\n"
            "  model.reducer only answers frameworks: it has _delay_all_reduce, _rebuild_buckets and prepare_for_backward.\n"
            "  See model.plan for the buckets and model.report() for times; no_sync() and backward() need no preparation."
        )
