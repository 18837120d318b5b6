"""Makes forwards wait for parameters where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from undertow.runtime.sharded.gathers import Gathers
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook


class ForwardWaits:
    """Makes every module wait for the parameters that its forward reads. Any other read waits for all (`AwaitedReads`).

    A module waits for its own parameters. The first training forward shows which others it reads (tied weights, or a layer that
    computes with another one's parameters). Until then, and for parameters that this forward did not read, the forward of the
    whole model waits.

    `buckets_of` has the buckets of each parameter, by id. `on_order` is called with all buckets in the order of their use. If
    parts of the model are compiled (`only_root`), only the whole model waits, because hooks would split compiled graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets_of: Mapping[int, Sequence[int]],
        gathers: Gathers,
        *,
        on_order: Callable[[Sequence[int]], object],
        only_root: bool,
    ) -> None:
        self._buckets_of = buckets_of
        self._gathers = gathers
        self._on_order = on_order
        self._at_root = _in_order(buckets_of.values())
        self._is_seen = only_root or any(map(private.is_compiled, module.modules()))
        self._reads = None if self._is_seen else _Reads(module, frozenset(buckets_of))
        # After a failed backward that stepped nothing, no read on this rank waits, but the other ranks wait for its end.
        ends = ModuleHook(module, gathers.make_whole)
        self._hooks: list[RemovableHandle] = [module.register_state_dict_pre_hook(ends)]  # type: ignore[no-untyped-call]
        for part in module.modules() if not self._is_seen else ():
            buckets = self._buckets(part.parameters(recurse=False))
            if buckets:
                self._wait_in(part, buckets)

    def root_begins(self, *, is_training: bool) -> None:
        """Called before a forward of the whole model."""
        if not is_training:
            self._gathers.wait_for_all()  # an evaluation may read other parameters than the training forward showed
            return
        self._gathers.wait(self._at_root)
        if self._reads is not None:
            self._reads.begin()

    def root_ends(self) -> None:
        # This increments versions, so autograd detects a parameter read too early where no earlier training forward read it.
        self._gathers.wait_for_all()
        reads = self._reads
        if reads is None or not reads.is_on:
            return
        reads.close()
        self._reads, self._is_seen = None, True
        for part, params in reads.beyond_own():
            self._wait_in(part, self._buckets(params))
        read = _in_order(self._buckets_of[param] for param in reads.order)
        self._at_root = _in_order(self._buckets_of[param] for param in self._buckets_of if param not in reads.order)
        self._on_order(_in_order([self._at_root, read]))

    def close(self) -> None:
        """Removes all hooks."""
        if self._reads is not None:
            self._reads.close()
            self._reads = None
        for hook in self._hooks:
            hook.remove()

    def _buckets(self, params: Iterable[Tensor]) -> tuple[int, ...]:
        return _in_order(self._buckets_of.get(id(param), ()) for param in params)

    def _wait_in(self, part: nn.Module, buckets: Sequence[int]) -> None:
        hook = ModuleHook(part, partial(_wait_for, self._gathers, buckets))
        # First, because other hooks may read parameters, such as weight_norm's.
        self._hooks.append(part.register_forward_pre_hook(hook, prepend=True))


class _Reads(TorchFunctionMode):
    """Records the modules in which parameters are read; `order` has the parameters by id, in the order of the first read.

    Reads while no module runs do not count, because Undertow itself looks at every parameter before the model's forward.
    """

    def __init__(self, module: nn.Module, params: frozenset[int]) -> None:
        super().__init__()
        self.order: dict[int, Tensor] = {}
        self.is_on = False
        self._places: dict[tuple[int, nn.Module], None] = {}
        self._params = params
        self._running: list[nn.Module] = []
        self._hooks = [
            hook
            for part in module.modules()
            for hook in (
                part.register_forward_pre_hook(ModuleHook(part, partial(self._running.append, part)), prepend=True),
                part.register_forward_hook(ModuleHook(part, self._ends), always_call=True),
            )
        ]

    def begin(self) -> None:
        """Records in this thread from now on, until `close`."""
        if not self.is_on:
            self.is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for argument in chain(args, (kwargs or {}).values()) if self._running else ():
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if id(tensor) in self._params:
                    self.order.setdefault(id(tensor), tensor)
                    self._places[id(tensor), self._running[-1]] = None
        return func(*args, **(kwargs or {}))

    def beyond_own(self) -> list[tuple[nn.Module, list[Tensor]]]:
        """Returns modules with the parameters of other modules that they have read."""
        found: dict[nn.Module, list[Tensor]] = {}
        for param, part in self._places:
            if all(param != id(own) for own in part.parameters(recurse=False)):
                found.setdefault(part, []).append(self.order[param])
        return list(found.items())

    def close(self) -> None:
        if self.is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _ends(self) -> None:
        del self._running[-1:]  # empty if an earlier hook has raised


def _wait_for(gathers: Gathers, buckets: Sequence[int]) -> None:
    if gathers.being_stepped:
        gathers.require_unstepped(buckets)
    if gathers.in_flight or gathers.owed:
        gathers.wait(buckets)


def _in_order(groups: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Returns each bucket of the groups once, in the order of the first occurrence."""
    return tuple(dict.fromkeys(chain.from_iterable(groups)))
