"""Undertow's class as `undertow run` puts it in the place of torch's."""

import atexit
import functools
import inspect
import itertools
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from undertow.ddp.wrapper import DistributedDataParallel
from undertow.errors import ConfigError, require
from undertow.runner.ending import end
from undertow.runner.settings import RUN, TRACE, settings_from

_NAMES = tuple(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
# Torch's class first compares the number of parameters. No model has this many.
_NUM_MARKERS = 9_973
_numbers = itertools.count()


@functools.cache
def _run() -> Mapping[str, Any]:
    """Returns what `undertow run` has told its processes."""
    return dict(json.loads(os.environ[RUN]))


class Wrapped(DistributedDataParallel):
    """Undertow's class with the settings of `undertow run`; every rank raises ConfigError if one wraps its model by torch's."""

    alive: ClassVar["weakref.WeakSet[Wrapped]"] = weakref.WeakSet()
    _overrides = settings_from(os.environ)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        # Torch's class would not compare either without `init_sync`. Other types than a module and a group, and arguments that do
        # not exist, are refused below.
        if given.get("init_sync", True) and isinstance(given.get("module"), nn.Module):
            _require_our_class_everywhere(given["module"], given.get("process_group"), given.get("device_mesh"))
        if _run()["out"] is not None:
            os.environ.setdefault(TRACE, os.path.join(_run()["out"], "traces"))
        super().__init__(*args, **kwargs)
        self._made: tuple[int, int] | None = (os.getpid(), next(_numbers))
        self.alive.add(self)

    def __del__(self) -> None:
        if "_made" in self.__dict__:  # not again while the interpreter ends; Python prints an error here, and goes on
            _ends(self)


Wrapped.__name__ = TorchDistributedDataParallel.__name__  # some programs compare it


def _ends(model: Wrapped) -> None:
    """Writes and prints the findings from the training of this model, once."""
    pid, number = model.__dict__.pop("_made", (None, 0))
    if pid == os.getpid():  # not of a process that was forked later
        end(model.sync, _run()["out"], number)


@atexit.register
def _all_end() -> None:
    for model in list(Wrapped.alive):
        _ends(model)


@functools.cache
def class_for(cls: type[TorchDistributedDataParallel]) -> type[TorchDistributedDataParallel]:
    """Returns the class that a call of `cls` instantiates: for a subclass of torch's, a subclass of both.

    Raises ConfigError for a class that overrides private methods of torch's, which Undertow does not call.
    """
    Path(_run()["mark"]).touch()
    if cls in (TorchDistributedDataParallel, DistributedDataParallel):
        return Wrapped
    if issubclass(cls, DistributedDataParallel):
        return cls
    foreign = cls.__mro__[: cls.__mro__.index(TorchDistributedDataParallel)]
    private = {name for name, it in vars(TorchDistributedDataParallel).items() if name[0] == "_" != name[1] and callable(it)}
    overridden = sorted(private & set().union(*map(vars, foreign)))
    require(
        not overridden,
        f"class {cls.__name__} overrides {', '.join(overridden)}, and Undertow does not call torch's private methods.",
        where=f"{cls.__module__}.{cls.__qualname__}(...) under `undertow run`",
        remedy="Do the same in forward(), or start the program without `undertow run`.",
    )
    return type(cls.__name__, (cls, Wrapped), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _require_our_class_everywhere(module: nn.Module, group: Any, mesh: Any) -> None:
    """Runs the first collective of torch's constructor, with markers instead of parameters.

    Torch's class on another rank raises then because the numbers differ, and so does this rank.
    """
    group = mesh.get_group(mesh.ndim - 1) if mesh is not None else group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    try:
        _verify_param_shape_across_processes(group, [torch.empty((), device=device)] * _NUM_MARKERS)
    except RuntimeError as error:
        if "DDP expects same model" not in str(error):
            raise
        raise ConfigError(
            "another rank wraps its model by torch's own class, and this one by Undertow's.",
            where=f"rank {dist.get_rank()}, DistributedDataParallel(...) under `undertow run`",
            remedy="Start all ranks by `undertow run`. To ranks that do not inherit its environment, "
            f"give the variables PYTHONPATH and {RUN}.",
        ) from error
