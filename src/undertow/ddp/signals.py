"""Signals that ask all ranks to stop in the same step."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn

from undertow.ddp.wrapper import DistributedDataParallel
from undertow.engine.stop import StopRequest
from undertow.errors import PhaseError, WrongType, require
from undertow.foreign import as_float
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private

_WHERE = "stop_on_signal"
# Python's own handlers end the process, which is what this replaces.
_ENDINGS = (signal.SIG_DFL, signal.default_int_handler)
# Whom a signal asks, by its number and the process: handlers may call each other, and a forked
# process has the handlers of its parent.
_requests: dict[tuple[int, int], weakref.WeakSet[StopRequest]] = {}


def stop_on_signal(
    model: nn.Module | GradientSync,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    seconds: float | None = None,
) -> None:
    """Makes `model.stop_requested` True on every rank, from the same step on, after one of these
    signals has reached any rank.

    Never communicates: the next synchronization tells the others, and with outer synchronization
    the next exchange. The signals no longer end the process, as long as the model is open.
    Handlers that were there before are called too. More models, and a second call, are possible.

        undertow.stop_on_signal(model)
        for batch in batches:
            train(batch)
            if model.stop_requested:
                undertow.save_checkpoint("run", model, optimizer)
                break

    Args:
        model: A DistributedDataParallel, or the result of `attach`.
        signals: The signals, of the module `signal`.
        seconds: The time between the signal and the end of the process, if it is known. A warning
            follows if two synchronizations are further apart, because ranks are told too late then.

    Raises:
        PhaseError: In another thread than the main one, and after `close()`.
        ConfigError: For a signal that cannot be handled, and for a time that is not above 0.
        WrongType: For another kind of model, signal or time.
    """
    request = _request_of(model)
    numbers = _numbers_of(signals)
    if seconds is not None:
        _require_time(seconds)
    require(
        threading.current_thread() is threading.main_thread(),
        "signals are handled in the main thread only.",
        where=f"{_WHERE}, thread {threading.current_thread().name!r}",
        remedy="Call it in the main thread, on any rank; the other threads may ask "
        "model.stop_requested.",
        error=PhaseError,
    )
    for number in numbers:
        handler = signal.getsignal(number)
        while isinstance(handler, _Handler) and handler.process != os.getpid():
            handler = handler.earlier
        if not isinstance(handler, _Handler):
            handler = _Handler(number, handler)
        _requests.setdefault((number, os.getpid()), weakref.WeakSet()).add(request)
        signal.signal(number, handler)
    if seconds is not None:
        request.follow_grace(seconds)


class _Handler:
    """Python's handler of one signal, which asks the models that are open in this process.

    If none is open, the signal does what it did before.
    """

    def __init__(self, number: int, earlier: Any) -> None:
        self.process = os.getpid()
        self.earlier = earlier
        self._number = number
        if earlier is None:
            warnings.warn(
                f"an earlier handler of {_name(number)} was not installed by Python: it is no "
                f"longer called.\n  {_WHERE}\n"
                "  Leave the signal out, or install that handler after it, if it calls this one.",
                stacklevel=3,
            )

    def __call__(self, number: int, frame: FrameType | None) -> None:
        requests = _requests.get((self._number, os.getpid()), ())
        asked = [request for request in requests if not request.is_closed]
        for request in asked:
            request.ask()
        if callable(self.earlier) and not (asked and self.earlier in _ENDINGS):
            self.earlier(number, frame)
        elif self.earlier is signal.SIG_DFL and not asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _request_of(model: object) -> StopRequest:
    """Returns the request of the model; raises WrongType unless Undertow synchronizes it."""
    whole = private.uncompiled(model)
    sync = whole.sync if isinstance(whole, DistributedDataParallel) else whole
    if not isinstance(sync, GradientSync):
        raise WrongType(
            "model must be an undertow.DistributedDataParallel, or the result of attach(), got "
            f"{type(model).__name__}.",
            where=f"{_WHERE}, first argument",
            remedy="Wrap the model first; after attach(), give its result instead of the module.",
        )
    sync._own.require_open("stop_on_signal()")
    ranks = sync._own.all_ranks
    require(
        not ranks.is_on_mesh or (ranks.num_ranks > 1 and ranks.hardware.is_host),
        "stop_on_signal() works beside tensor parallelism only on CPU and with several "
        "data-parallel ranks: nothing tells the places of the other axes in each step.",
        where=_WHERE,
        remedy="Note the signal in a handler of your own, and add up a flag over all ranks between "
        "steps, by torch.distributed.all_reduce.",
    )
    return sync._own.stop


def _numbers_of(signals: object) -> list[int]:
    where = f"{_WHERE}(signals={signals!r})"
    remedy = "Give signals of the module `signal`: signals=(signal.SIGTERM,)."
    if not isinstance(signals, Iterable) or isinstance(signals, str | bytes):
        raise WrongType("signals must be a tuple of signals.", where=where, remedy=remedy)
    numbers = []
    for number in signals:
        if not isinstance(number, int) or isinstance(number, bool):
            raise WrongType(f"{number!r} is not a signal.", where=where, remedy=remedy)
        is_possible = number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        require(is_possible, f"{_name(number)} cannot be handled.", where=where, remedy=remedy)
        numbers.append(int(number))
    require(numbers, "signals are empty.", where=where, remedy=remedy)
    return numbers


def _name(number: int) -> str:
    names = {int(each): each.name for each in signal.Signals}
    return names.get(int(number), f"signal {int(number)}")


def _require_time(seconds: object) -> None:
    where = f"{_WHERE}(seconds={seconds!r})"
    remedy = "Give the seconds between the signal and the end of the process, or leave it out."
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    require(is_number, "seconds must be a number.", where=where, remedy=remedy, error=WrongType)
    require(
        0 < as_float(seconds) < float("inf"),
        "seconds must be a number above 0.",
        where=where,
        remedy=remedy,
    )
