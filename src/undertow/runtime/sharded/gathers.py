"""Gathers parameters from the ranks that own them, during the next forward, which waits for each where it is read.

While a parameter is in flight, its class is a subclass that waits, in the same way as torch exchanges the class of a lazy
parameter when it gets its shape. torch calls such a class before every function and attribute of the tensor, so old lists of
parameters, the bare module and copies need no hooks. C++ code that is given the parameter itself does not call it.
"""

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.compiler import is_exporting
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from undertow.errors import PhaseError, UndertowError, require
from undertow.runtime.comm.collectives import Collectives
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.peers.threads import WorkerThread
from undertow.runtime.sharded.shards import FlatParams
from undertow.runtime.torch_private import private, tables
from undertow.runtime.torch_private.module_hook import ModuleHook

_addresses_of, _is_shared_apart = attrgetter("addresses"), attrgetter("is_shared_apart")
_T: Any = Tensor  # its attributes are descriptors on the class

# These read no values of a parameter. Every `zero_grad()` uses the first two, and forwards use devices and dtypes. `dim()` is not
# here, because torch.vmap calls nothing else before it takes a tensor from C++.
_READ_NO_VALUES = frozenset(
    {
        *(
            descriptor.__get__
            for descriptor in (_T.grad, _T.requires_grad, _T.is_leaf, _T.shape, _T.dtype, _T.device, _T.is_meta)
        ),
        *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T.requires_grad_),
        *(_T.numel, _T.size, _T.is_floating_point, torch.is_floating_point, _T.is_complex, torch.is_complex),
    }
)


def _awaited_class(kind: type, weak: "weakref.ref[Gathers]") -> type:
    """Returns a subclass whose tensors wait before they are read; the gathers may be freed before the parameters."""

    def arrive(cls: type[Tensor], values: Any) -> None:
        gathers = weak()
        if gathers is not None:
            gathers.before_read()
        # Whatever left the class on them, so that the read does not come here again: for example,
        # torch.utils.swap_tensors gives the class to tensors that nothing gathers.
        for leaf in tree_leaves(values):
            if isinstance(leaf, cls):
                (_let_read if gathers is None else gathers.let_read)(leaf)

    def read(
        cls: type[Tensor], function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _READ_NO_VALUES:
            with private.as_plain_tensors():
                return function(*args, **(kwargs or {}))
        arrive(cls, (args, kwargs))
        if function is _T.detach and kind is nn.Parameter and _is_parameter_made():
            return _T._make_subclass(kind, args[0])
        return function(*args, **(kwargs or {}))

    def deep_copy(param: Tensor, memo: dict[int, Any]) -> Any:
        arrive(type(param), param)  # the copy function looked up depends on the class that the parameter has now
        return copy.deepcopy(param, memo)

    def reduce(param: Any, protocol: Any) -> Any:
        arrive(type(param), param)
        return param.__reduce_ex__(protocol)

    return type(kind)(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            # `type(param)(values)` makes a new parameter that nothing waits for.
            "__new__": lambda _cls, *args, **kwargs: kind(*args, **kwargs),
            "__torch_function__": classmethod(private.untraced(read)),
            "__deepcopy__": private.untraced(deep_copy),
            "__reduce_ex__": reduce,
            "arrived_class": kind,
        },
    )


def _is_parameter_made() -> bool:
    """Returns True inside `nn.Parameter(param)`, which has seen the parameter's other class and expects to see it again."""
    return any(frame.f_code is nn.Parameter.__new__.__code__ for frame, _ in islice(walk_stack(sys._getframe(1)), 5))


def _let_read(param: Tensor) -> None:
    """Gives a parameter its own class back."""
    param.__class__ = getattr(type(param), "arrived_class", type(param))


class Gathers:
    """The gathers of a plan's buckets; a read of a parameter first waits for its bucket.

    `unsent` are buckets whose gathers could not be started: every read of their parameters raises.

    A signal handler or `__del__` may run between any two lines. It may read parameters, which waits for
    all that is in flight and gives all of them their class back. Ctrl-C may end any function here.
    """

    def __init__(self, flats: Sequence[FlatParams], exchanges: Collectives, recorder: Recorder) -> None:
        self.in_flight: dict[int, Handle] = {}
        self.unsent: set[int] = set()
        self.flats, self._exchanges, self._recorder = flats, exchanges, recorder
        self._process = os.getpid()
        self._classes: dict[type, Any] = {}  # of parameters in flight, by their own class
        self._is_compiled_in = False  # code of torch.compile reads the parameters
        # `in_flight` and the classes change together, because other threads read them.
        self._lock = threading.RLock()

    def launch(self, bucket: int, *, is_read: bool = True) -> None:
        """Sends this rank's shard of a bucket to all others, and receives theirs.

        The result is copied to the parameters only if it `is_read`.
        """
        params = self.flats[bucket]
        increment_version(params.params)
        if params.flat.numel() == 0:
            return
        marks = self._recorder.gather_launches(bucket, num_bytes=params.flat.nbytes)
        handle = self._exchanges.all_gather(params.flat, number=bucket, then=params.copy_out if is_read else None)
        self._recorder.completes(marks, handle)
        with self._lock:
            self.in_flight[bucket] = handle
            self._watch(bucket)
            if bucket not in self.in_flight:  # a signal handler has waited for it in between
                self._release(bucket)

    def are_cut_off(self) -> None:
        """Called if gathers could not be started after a step: every read of their parameters raises."""
        with self._lock:
            self.unsent.update(set(range(len(self.flats))) - self.in_flight.keys())
            for bucket in self.unsent:
                self._watch(bucket)

    def round_begins(self) -> None:
        """Waits if no forward has; autograd then detects most parameters that were read too early."""
        if self.in_flight:
            self.wait(tuple(self.in_flight))

    def wait(self, buckets: Collection[int]) -> None:
        """Waits until the parameters of these buckets have the optimizer's new values."""
        for bucket in buckets:
            handle = self.in_flight.get(bucket)
            if handle is None:
                if bucket in self.unsent:
                    raise self._torn(bucket)
                continue
            self._recorder.mark_gather(bucket, "wait_start")
            try:
                with self._exchanges.group.waiting(f"the parameters of bucket {bucket}"):
                    handle.wait()
            except RuntimeError as error:
                group = self._exchanges.group
                if group.is_alive or (isinstance(error, UndertowError) and group.existing()):  # it tells why the step has failed
                    raise
                raise self._torn(bucket) from error
            self._recorder.mark_gather(bucket, "wait_stop")
            # Only now, so that a wait that failed fails again. Another thread may have waited too, and launched the next gather.
            with self._lock:
                if self.in_flight.get(bucket) is handle:
                    # Again, so that a forward that has read too early fails in its backward.
                    increment_version(self.flats[bucket].params)
                    self._release(bucket)
                    # Last, so that after Ctrl-C the next wait does all of this again.
                    self.in_flight.pop(bucket, None)

    def wait_for_all(self) -> None:
        self.wait(self._awaited())

    def let_go(self) -> None:
        """Ends the waits for parameters that nothing will gather. Reads of parameters in flight wait or raise as before."""
        for kind in self._classes.values() if self.in_flight or self.unsent else ():
            kind.awaited_from = self  # holds these gathers until the last parameter arrives
        with self._lock:
            coming = {id(param) for bucket in self._awaited() for param in self.flats[bucket].params}
            for param in chain.from_iterable(flat.params for flat in self.flats):
                if id(param) not in coming:
                    _let_read(param)

    def is_read_unseen(self) -> bool:
        """Returns True if other tensors share the memory of parameters in flight, or compiled code guards their class."""
        flats = list(map(self.flats.__getitem__, self.in_flight))
        return (
            self._is_compiled_in
            or any(map(_is_shared_apart, flats))
            or private.are_shared(list(chain.from_iterable(map(_addresses_of, flats))))
        )

    def _awaited(self) -> tuple[int, ...]:
        return *tuple(self.in_flight), *self.unsent  # at once: a signal handler may change either

    def _torn(self, bucket: int) -> PhaseError:
        return PhaseError(
            "the parameters are torn: this rank's shards have the values of the last step, and the other shards still have the "
            "values of the step before.",
            where=f"bucket {bucket}, rank {self._exchanges.group.rank}",
            remedy="Call model.wait() on every rank after the last step, before a rank ends or calls "
            "torch.distributed.destroy_process_group(). Now, call close(), then load other values: "
            "module.load_state_dict(state, assign=True).",
        )

    def _watch(self, bucket: int) -> None:
        for param in self.flats[bucket].params:
            kind = getattr(type(param), "arrived_class", type(param))
            if kind not in self._classes:
                self._classes[kind] = _awaited_class(kind, weakref.ref(self))
            param.__class__ = self._classes[kind]

    def _release(self, bucket: int) -> None:
        flat, coming = self.flats[bucket], set[int]()  # parameters with another bucket to come stay watched
        if flat.split_params:
            others = [self.flats[other] for other in self._awaited() if other != bucket]
            coming.update(id(param) for other in others for param in other.split_params)
        for param in flat.params:
            if id(param) not in coming:
                param.__class__ = getattr(type(param), "arrived_class", type(param))

    def let_read(self, param: Tensor) -> None:
        """Gives a parameter its class back, unless another thread has launched a gather of it again."""
        with self._lock:
            flats = [self.flats[bucket] for bucket in self._awaited()]
            if not any(param is coming for flat in flats for coming in flat.params):
                _let_read(param)

    def before_read(self) -> None:
        """Called before a parameter in flight is read; afterwards none of the model's is."""
        require(
            os.getpid() == self._process,
            "a child process reads a parameter that had not arrived when the process was started.",
            where=f"process {os.getpid()}, a child of rank {self._exchanges.group.rank}",
            remedy="Call model.wait() before you start processes that use the model.",
            error=PhaseError,
        )
        require(
            not isinstance(threading.current_thread(), WorkerThread),
            "a thread that brings parameters reads one of them: it would wait for itself.",
            where=f"rank {self._exchanges.group.rank}, perhaps in a `__del__` that runs there",
            remedy="Read no parameters in `__del__`, or call model.wait() after each step.",
            error=PhaseError,
        )
        # Compiled code would be compiled again each time for the class of a parameter in flight.
        self._is_compiled_in |= private.is_compiling()
        self.wait_for_all()


class _Reads(TorchFunctionMode):
    """Records when parameters are needed; `order` has them by id, in that order.

    A module needs its own parameters when its forward begins: reads by C++ code of an extension cannot be seen.
    Other parameters are needed when they are read; reads while no module runs do not count, because Undertow itself looks at
    every parameter before the model's forward.
    """

    def __init__(self, module: nn.Module, params: Container[int]) -> None:
        super().__init__()
        self.order: dict[int, Tensor] = {}
        self.is_on = False
        self._places: dict[tuple[int, nn.Module], None] = {}
        self._params, self._running = params, list[nn.Module]()
        self._hooks = [
            hook
            for _, part in tables.named_modules(module)
            for hook in (
                part.register_forward_pre_hook(ModuleHook(part, partial(self._begins, part)), prepend=True),
                part.register_forward_hook(ModuleHook(part, self._ends), always_call=True),
            )
        ]

    def begin(self) -> None:
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
            if param not in map(id, part._parameters.values()):
                found.setdefault(part, []).append(self.order[param])
        return list(found.items())

    def close(self) -> None:
        if self.is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _begins(self, part: nn.Module) -> None:
        self._running.append(part)
        for param in part._parameters.values():
            if self.is_on and id(param) in self._params:  # an evaluation may run other modules
                self.order.setdefault(id(param), param)  # type: ignore[arg-type]  # None has no bucket

    def _ends(self) -> None:
        del self._running[-1:]  # empty if an earlier hook has raised


class _WaitHook(ModuleHook):
    """Waits for buckets before the forward of a module. If they are there, as for most modules of a step, it costs one frame."""

    def __init__(self, module: nn.Module, gathers: Gathers, buckets: Collection[int]) -> None:
        super().__init__(module, partial(gathers.wait, buckets))
        self._buckets, self._are_there = buckets, gathers.in_flight.keys().isdisjoint

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if not is_exporting() and not self._are_there(self._buckets) and called is self._module():
            self._then()


class ForwardWaits:
    """Makes every module wait for the parameters that its forward reads. Any other read waits for all of them.

    A module waits for its own parameters. The first training forward shows which others it reads (tied weights, or a layer that
    computes with another one's parameters). Until then, and for parameters that this forward did not read and whose module did
    not run, the forward of the whole model waits.

    `on_order` is called with all buckets in the order of their use. If parts of the model are compiled (`only_root`) or scripted,
    only the whole model waits: hooks would split compiled graphs, and TorchScript calls none.
    """

    def __init__(
        self,
        module: nn.Module,
        gathers: Gathers,
        *,
        on_order: Callable[[Sequence[int]], object] | None,
        only_root: bool,
    ) -> None:
        self._gathers, self._on_order = gathers, on_order
        self._buckets_of: dict[int, list[int]] = {}  # by id of the parameter
        for bucket, flat in enumerate(gathers.flats):
            for param in flat.params:
                self._buckets_of.setdefault(id(param), []).append(bucket)
        self._at_root = _in_order(self._buckets_of.values())
        self._reads: _Reads | None = None
        self._hooks: list[RemovableHandle] = []
        parts = [part for _, part in tables.named_modules(module)]
        if not only_root and not any(map(private.is_compiled, parts)) and not any(map(private.is_script, parts)):
            self._reads = _Reads(module, self._buckets_of)
            for part in parts:
                self._wait_in(part, part._parameters.values())

    def root_begins(self, *, is_training: bool) -> None:
        if not is_training:
            self._gathers.wait_for_all()  # an evaluation may read other parameters than the training forward showed
            return
        if self._at_root:
            self._gathers.wait(self._at_root)
        if self._reads is not None:
            self._reads.begin()

    def root_ends(self) -> None:
        # This increments versions, so autograd detects a parameter read too early where no earlier training forward read it.
        if self._gathers.in_flight:
            self._gathers.wait_for_all()
        reads = self._reads
        if reads is None or not reads.is_on:
            return
        reads.close()
        self._reads = None
        for part, params in reads.beyond_own():
            self._wait_in(part, params)
        read = _in_order(self._buckets_of[param] for param in reads.order)
        self._at_root = _in_order(self._buckets_of[param] for param in self._buckets_of if param not in reads.order)
        if self._on_order is not None:
            self._on_order(_in_order([self._at_root, read]))

    def close(self) -> None:
        if self._reads is not None:
            self._reads.close()
            self._reads = None
        for hook in self._hooks:
            hook.remove()

    def _wait_in(self, part: nn.Module, params: Iterable[Tensor | None]) -> None:
        buckets = _in_order(self._buckets_of.get(id(param), ()) for param in params)
        if buckets:
            # First, because other hooks may read parameters, such as weight_norm's.
            self._hooks.append(part.register_forward_pre_hook(_WaitHook(part, self._gathers, buckets), prepend=True))


def _in_order(groups: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(groups)))
