"""Undertow's class as `undertow run` puts it in the place of torch's."""

import functools
import itertools
import os
import weakref
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from undertow.ddp.wrapper import DistributedDataParallel
from undertow.errors import require
from undertow.lab.runner.ending import end
from undertow.lab.runner.settings import MARK, RUN, TRACE, settings_from
from undertow.sync.gradient_sync import GradientSync

_numbers = itertools.count()


class Wrapped(DistributedDataParallel):
    """Undertow's class with the settings of `undertow run`."""

    _overrides = settings_from(os.environ)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        out = os.environ[RUN] or None
        if out is not None:
            os.environ.setdefault(TRACE, os.path.join(out, "traces"))
        super().__init__(*args, **kwargs)
        if self.outer is not None and "outer" in self._overrides:
            self.outer.save_global()  # the program does not know that it trains replicas
        # Also at the end of the program.
        weakref.finalize(self, _ends, self.sync, out, next(_numbers), os.getpid())


Wrapped.__name__ = TorchDistributedDataParallel.__name__  # some programs compare it


def _ends(sync: GradientSync, out: str | None, number: int, process: int) -> None:
    if process == os.getpid():  # not of a process that was forked later
        end(sync, out, number)


@functools.cache
def class_for(cls: type[TorchDistributedDataParallel]) -> type[TorchDistributedDataParallel]:
    """Returns the class that a call of `cls` instantiates: for a subclass of torch's, a subclass of
    both.

    Raises ConfigError for a class that overrides private methods of torch's, which Undertow does
    not call.
    """
    _, _, mark = os.environ.get(MARK, "").partition(":")
    if mark:
        Path(mark).touch()
    if cls in (TorchDistributedDataParallel, DistributedDataParallel):
        return Wrapped
    if issubclass(cls, DistributedDataParallel):
        return cls
    foreign = cls.__mro__[: cls.__mro__.index(TorchDistributedDataParallel)]
    private = {
        name
        for name, value in vars(TorchDistributedDataParallel).items()
        if name[0] == "_" != name[1] and callable(value)
    }
    overridden = sorted(private & set().union(*map(vars, foreign)))
    require(
        not overridden,
        f"class {cls.__name__} overrides {', '.join(overridden)}, and Undertow does not call "
        "torch's private methods.",
        where=f"{cls.__module__}.{cls.__qualname__}(...) under `undertow run`",
        remedy="Do the same in forward(), or start the program without `undertow run`.",
    )
    return type(
        cls.__name__,
        (cls, Wrapped),
        {"__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )
