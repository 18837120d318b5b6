"""Gathers parameters from the ranks that own them, during the next forward, which waits for each
where it is read.

While a parameter is in flight, its class is a subclass that waits, in the same way as torch
exchanges the class of a lazy parameter when it gets its shape. torch calls such a class before
every function and attribute of the tensor, so old lists of parameters, the bare module and copies
need no hooks. C++ code that is given the parameter itself does not call it.

Reasons: docs/design/sharded-optimizer.md.
"""

import copy
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.utils.hooks import RemovableHandle

from undertow.buckets.bucket import LiveBucket
from undertow.buckets.recorder import BucketMarks, Recorder
from undertow.errors import PhaseError, UndertowError, require
from undertow.mesh.local_tensors import awaited_members
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.handle import Handle
from undertow.ranks.threads import WorkerThread
from undertow.sharded.params import FlatParams
from undertow.torch_private import private, tables
from undertow.torch_private.module_hook import ModuleHook

_addresses_of = attrgetter("addresses")
_T: Any = Tensor  # its attributes are descriptors on the class

# These read no values of a parameter. Every `zero_grad()` uses the first two, and forwards use
# devices and dtypes. `dim()` is not here, because torch.vmap calls nothing else before it takes a
# tensor from C++.
_READ_NO_VALUES = frozenset(
    {
        *(
            descriptor.__get__
            for descriptor in (
                _T.grad,
                _T.requires_grad,
                _T.is_leaf,
                _T.shape,
                _T.dtype,
                _T.device,
                _T.is_meta,
            )
        ),
        *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T.requires_grad_),
        *(
            _T.numel,
            _T.size,
            _T.is_floating_point,
            torch.is_floating_point,
            _T.is_complex,
            torch.is_complex,
        ),
    }
)


def _awaited_class(kind: type, weak: "weakref.ref[Gathers]") -> type:
    """Returns a subclass whose tensors wait before they are read.

    The gathers may be freed before the parameters.
    """

    def arrive(cls: type[Tensor], values: Any) -> None:
        gathers = weak()
        params = [leaf for leaf in _leaves(values) if isinstance(leaf, cls)]
        if gathers is not None:
            gathers.before_read(params)
        else:
            _let_read(params)

    def read(
        cls: type[Tensor],
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _READ_NO_VALUES:
            with private.as_plain_tensors():
                return function(*args, **(kwargs or {}))
        arrive(cls, (args, kwargs))
        if function is _T.detach and kind is nn.Parameter and _is_parameter_made():
            return private.make_subclass(kind, args[0])
        return function(*args, **(kwargs or {}))

    def deep_copy(param: Tensor, memo: dict[int, Any]) -> Any:
        # the copy function looked up depends on the class that the parameter has now
        arrive(type(param), param)
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
            **awaited_members(kind, lambda param: arrive(type(param), param)),
        },
    )


def _leaves(values: Any) -> Iterator[Any]:
    """Yields all values in the arguments of a torch function, within sequences and mappings."""
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, tuple | list):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _is_parameter_made() -> bool:
    """Returns True inside `nn.Parameter(param)`, which has seen the parameter's other class and
    expects to see it again."""
    return any(
        frame.f_code is nn.Parameter.__new__.__code__
        for frame, _ in islice(walk_stack(sys._getframe(1)), 5)
    )


def _let_read(params: Iterable[Tensor]) -> None:
    """Gives parameters their own class back."""
    for param in params:
        param.__class__ = getattr(type(param), "arrived_class", type(param))


class Gathers:
    """The gathers of a plan's buckets; a read of a parameter first waits for its buckets.

    A gather that could not be started is in flight too, and has failed: every read of its
    parameters raises.

    A signal handler or `__del__` may run between any two lines. It may read parameters, which waits
    for them and gives them their class back. Ctrl-C may end any function here.
    """

    def __init__(
        self,
        flats: Sequence[FlatParams],
        shards: Sequence[Sequence[range]],
        exchanges: Exchanges,
        recorder: Recorder,
    ) -> None:
        self._shards = shards  # of each bucket, the elements of each rank
        self.in_flight: dict[int, Handle] = {}
        self._marks: dict[int, BucketMarks] = {}  # of the last gather of each bucket
        # code of torch.compile reads the parameters, and guards their class
        self._is_compiled_in = False
        self.flats, self._exchanges, self._recorder = flats, exchanges, recorder
        self._bucket_of: dict[int, int] = {}  # by id of the parameter
        for bucket, flat in enumerate(flats):
            self._bucket_of.update(dict.fromkeys(map(id, flat.params), bucket))
        self._process = os.getpid()
        self._classes: dict[type, Any] = {}  # of parameters in flight, by their own class
        # `in_flight` and the classes change together, because other threads read them.
        self._lock = threading.RLock()

    def launch(self, live: LiveBucket) -> None:
        """Sends this rank's shard of a bucket to all others, and receives theirs."""
        bucket = live.spec.index
        flat = self.flats[bucket]
        flat.count_write()
        if flat.flat.numel() == 0:
            return
        parcel = flat.parcel
        num_bytes = flat.flat.itemsize * self._shards[bucket][-1].stop
        if parcel is not None:
            num_bytes = sum(parcel.sizes)
        marks = self._marks[bucket] = self._recorder.gather_launches(bucket, num_bytes=num_bytes)
        if parcel is None:
            if flat.exact is not None:
                flat.publish()
            handle = self._exchanges.all_gather(
                flat.flat, self._shards[bucket], number=bucket, then=flat.copy_out
            )
        else:
            handle = self._exchanges.all_gather_differences(
                flat.write_difference, flat.flat, parcel, number=bucket, then=flat.copy_out
            )
        self._recorder.completes(marks, handle)
        self._put_in_flight(bucket, handle)

    def are_cut_off(self, buckets: Sequence[int]) -> None:
        """Called if gathers of these buckets could not be started after a step."""
        for bucket in buckets:
            if bucket not in self.in_flight:
                handle = Handle.failed(self._torn(bucket))
                self._marks[bucket] = self._recorder.gather_launches(bucket, num_bytes=0)
                self._put_in_flight(bucket, handle)

    def wait(self, buckets: Collection[int]) -> None:
        """Waits until the parameters of these buckets have the optimizer's new values."""
        for bucket in buckets:
            handle = self.in_flight.get(bucket)
            if handle is None:
                continue
            marks = self._marks[bucket]
            marks.wait_start = self._recorder.mark()
            try:
                with self._exchanges.group.waiting(f"the parameters of bucket {bucket}"):
                    handle.wait()
            except RuntimeError as error:
                group = self._exchanges.group
                # it tells why the step has failed
                if group.is_alive or (isinstance(error, UndertowError) and group.existing()):
                    raise
                raise self._torn(bucket) from error
            marks.wait_stop = self._recorder.mark()
            parcel = self.flats[bucket].parcel
            if parcel is not None:
                marks.take_codings(parcel.codings)
            # Only now, so that a wait that failed fails again. Another thread may have waited too,
            # and launched the next gather.
            with self._lock:
                if self.in_flight.get(bucket) is handle:
                    # Again, so that a forward that has read too early fails in its backward.
                    self.flats[bucket].count_write()
                    _let_read(self.flats[bucket].params)
                    # Last, so that after Ctrl-C the next wait does all of this again.
                    self.in_flight.pop(bucket, None)

    def wait_for_all(self) -> None:
        self.wait(tuple(self.in_flight))  # at once: a signal handler may change it

    def is_read_unseen(self) -> bool:
        """Returns True if other tensors share the memory of parameters, or compiled code guards
        their class.

        Asked before gathers start, because their threads refer to that memory too.
        """
        addresses = list(chain.from_iterable(map(_addresses_of, self.flats)))
        return self._is_compiled_in or private.are_shared(addresses)

    def let_go(self) -> None:
        """Called after the last gather. Reads of parameters whose gathers failed still raise."""
        for kind in self._classes.values() if self.in_flight else ():
            kind.awaited_from = self  # holds these gathers until the last parameter arrives

    def buckets_of(self, params: Iterator[Tensor | None]) -> tuple[int, ...]:
        found = [self._bucket_of.get(id(param)) for param in params]
        return tuple(bucket for bucket in dict.fromkeys(found) if bucket is not None)

    def before_read(self, params: Sequence[Tensor]) -> None:
        """Called before parameters in flight are read."""
        require(
            os.getpid() == self._process,
            "a child process reads a parameter that had not arrived when the process was started.",
            where=f"process {os.getpid()}, a child of rank {self._exchanges.group.rank}",
            remedy="Call model.wait() before you start processes that use the model.",
            error=PhaseError,
        )
        require(
            threading.get_ident() not in WorkerThread.idents,
            "a thread that gathers parameters reads one of them: it would wait for itself.",
            where=f"rank {self._exchanges.group.rank}, perhaps in a `__del__` that runs there",
            remedy="Read no parameters in `__del__`, or call model.wait() after each step.",
            error=PhaseError,
        )
        # Compiled code would be compiled again each time for the class of a parameter in flight.
        self._is_compiled_in |= private.is_compiling()
        for param in params:
            # torch.utils.swap_tensors gives the class to tensors that nothing gathers: these wait
            # for everything.
            bucket = self._bucket_of.get(id(param))
            self.wait(tuple(self.in_flight) if bucket is None else (bucket,))
            with self._lock:
                # In any case, so that the read does not come here again.
                if bucket not in self.in_flight:
                    _let_read((param,))

    def _torn(self, bucket: int) -> PhaseError:
        return PhaseError(
            "the parameters are torn: this rank's shards have the values of the last step, and "
            "the other shards still have the values of the step before.",
            where=f"bucket {bucket}, rank {self._exchanges.group.rank}",
            remedy="Call model.wait() on every rank after the last step, before a rank ends or "
            "calls torch.distributed.destroy_process_group(). Now, call close(), then load other "
            "values: module.load_state_dict(state, assign=True).",
        )

    def _put_in_flight(self, bucket: int, handle: Handle) -> None:
        with self._lock:
            self.in_flight[bucket] = handle
            for param in self.flats[bucket].params:
                kind = getattr(type(param), "arrived_class", type(param))
                if kind not in self._classes:
                    self._classes[kind] = _awaited_class(kind, weakref.ref(self))
                param.__class__ = self._classes[kind]
            if bucket not in self.in_flight:  # a signal handler has waited for it in between
                _let_read(self.flats[bucket].params)


class _WaitHook(ModuleHook):
    """Waits for buckets before the forward of a module.

    If they are there, as for most modules of a step, it costs one frame.
    """

    def __init__(self, module: nn.Module, gathers: Gathers, buckets: Collection[int]) -> None:
        super().__init__(module, gathers.wait)  # `__call__` gives it the buckets
        self._gathers, self._buckets = gathers, buckets
        self._are_there = gathers.in_flight.keys().isdisjoint

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if not is_exporting() and not self._are_there(self._buckets) and called is self._module():
            self._gathers.wait(self._buckets)


def wait_before_forwards(module: nn.Module, gathers: Gathers) -> list[RemovableHandle]:
    """Makes every module wait for its own parameters before its forward, because reads by C++ code
    cannot be seen.

    Reads of other modules' parameters wait by themselves. If parts of the model are compiled or
    scripted, no hooks are made, and the whole model waits for everything: hooks would split
    compiled graphs, and TorchScript does not call them.
    """
    parts = [part for _, part in tables.named_modules(module)]
    hooks: list[RemovableHandle] = []
    if any(private.is_compiled(part) or private.is_script(part) for part in parts):
        return hooks
    for part in parts:
        buckets = gathers.buckets_of(_own_params(part))
        if buckets:
            # First, because other hooks may read parameters, such as weight_norm's.
            hook = _WaitHook(part, gathers, buckets)
            hooks.append(part.register_forward_pre_hook(hook, prepend=True))
    return hooks


def _own_params(module: nn.Module) -> Iterator[Tensor | None]:
    """Yields the parameters of a module, and of parts without a forward, such as nn.ParameterList,
    which nothing calls."""
    yield from tables.own_parameters(module).values()
    for part in module.children():
        if type(part).forward is nn.Module.forward:
            yield from _own_params(part)
