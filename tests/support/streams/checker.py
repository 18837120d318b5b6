"""The checker: it books what operators read and write, and says what is out of order."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from support.streams.backend import Orders, stream_backend
from support.streams.clocks import Access, Clock, Event, Frames, Memory, Stream, shown, stack, text_of

DEVICE = torch.device("cpu", 0)
_READS_A_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")


class StreamErrors(AssertionError):
    """All findings of a checker."""


class Checker:
    """Context in which tensors have logical streams; `support.streams` tells how to use it.

    lag: that many queries of an event or a collective say False first; None is for all.
    """

    def __init__(self, *, lag: int | None = 1) -> None:
        self.lag = lag
        self.host, self.default = Stream("the host"), Stream("the default stream")
        self.streams = [self.default]
        self.findings: dict[object, str] = {}
        self.synchronizations: list[str] = []
        self.orders = Orders()
        self.leaves: list[tuple[Stream, Stream]] = []  # of the backward under way, and those that will wait for them
        self.pending: dict[Any, None] = {}  # collectives whose values have not arrived
        self.held: dict[Any, None] = {}  # those that no stream has waited for
        self._memories: list[Memory] = []  # by address
        self._starts: list[int] = []
        self._nothing = Memory(0, 0, Access(self.default, 0, "nothing", []), True, None)
        self.wrappers: Any = WeakTensorKeyDictionary()  # tensors without memory, on the device
        self._empty: Any = WeakIdKeyDictionary()  # storages without bytes, on the device
        self._freed: deque[tuple[Memory, Frames]] = deque()
        self._numbers = itertools.count(1)
        self._of_thread = threading.local()
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()

    # Streams

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.default)

    def new_stream(self, name: str = "") -> Stream:
        self.streams.append(Stream(name or f"stream {next(self._numbers)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def switch(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    def join(self) -> None:
        """A stream waits for others that have made gradients."""
        while self.leaves:
            inner, outer = self.leaves.pop()
            self.record(inner).wait(outer)

    def record(self, stream: Stream | None = None) -> Event:
        """An event of this moment, on the current stream by default."""
        stream = stream or self.current
        stream.follows(self.host.now())
        return Event(self, stream.now(), stack(), next(self._numbers))

    def keep(self, tensor: Tensor, stream: Stream | None = None) -> None:
        """As `tensor.record_stream`: its memory, once freed, is not used before the stream has run what it has by then."""
        memory = self.memory_of(tensor)
        if memory is not None:
            memory.kept.add(stream or self.current)

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        for work in list(self.pending):
            work.deliver()
        self.synchronized("synchronize", {stream: stream.count for stream in self.streams})

    def synchronized(self, why: str, clock: Clock | None = None) -> None:
        self.drain()
        self.host.follows(self.current.now() if clock is None else clock)
        self.synchronizations.append(f"{why}\n{text_of(stack())}")

    @contextlib.contextmanager
    def without_synchronization(self) -> Iterator[None]:
        before = len(self.synchronizations)
        yield
        new = self.synchronizations[before:]
        if new:
            raise StreamErrors("\n".join([f"the host has waited {len(new)} times:", *dict.fromkeys(new)]))

    # Memory

    def place(self, module: nn.Module) -> nn.Module:
        """Makes the memory of a module the device's."""
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            self.place_tensor(tensor)
        return module

    def place_tensor(self, tensor: Tensor, *, is_device: bool = True) -> Tensor:
        with self.quiet():
            self._enter(tensor, Access(self.current, self.current.count, "placed", stack()), is_device=is_device)
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy that the host does not wait for, out of pinned memory that nobody writes."""
        with self.quiet():
            copied = tensor.detach().clone()
        self.launch("to_device", [], [])
        return self.place_tensor(copied)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A pinned copy, which has its values once the next event is reached."""
        with self.quiet():
            copied = tensor.detach().clone()
        self.place_tensor(copied, is_device=False)
        self.launch("to_host", [tensor], [copied])
        return copied

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor, if it is the device's or pinned."""
        if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        self.drain()
        address = tensor.data_ptr()
        if not address:  # of an empty tensor, whatever memory it is a view of
            storage = tensor.untyped_storage()
            if storage in self._empty:
                return self._nothing
            address = storage.data_ptr()
        place = bisect_right(self._starts, address) - 1
        memory = self._memories[place] if place >= 0 else None
        return memory if memory is not None and address < memory.stop else None

    def is_on_device(self, tensor: Tensor) -> bool:
        with self.quiet(), torch._C.DisableTorchFunction():
            memory = self.memory_of(next(_tensors(tensor)))
            return tensor in self.wrappers if memory is None else memory.is_device

    def _enter(self, tensor: Tensor, made: Access, *, is_device: bool = True) -> None:
        """Notes new memory, unless it is known, as of a result that is a view."""
        if tensor.layout is not torch.strided or self.memory_of(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            if is_device:
                self._empty[storage] = None
            return
        start = storage.data_ptr()
        memory = Memory(start, start + storage.nbytes(), made, is_device, None)
        memory.ref = weakref.ref(storage, lambda _: self._freed.append((memory, stack())))
        place = bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._memories.insert(place, memory)

    def _leave(self, memory: Memory) -> None:
        place = bisect_right(self._starts, memory.start) - 1
        if place >= 0 and self._memories[place] is memory:
            del self._starts[place], self._memories[place]

    def drain(self) -> None:
        """Looks at memory that was freed: the stream that has made it may use it again at once."""
        while self._freed:
            memory, frames = self._freed.popleft()
            self._leave(memory)
            home = memory.made.stream
            orderly = (home, self.host, *memory.kept)  # a kept stream may have waited for others
            for segment in memory.segments:
                for access in (segment.write, *segment.reads.values()):
                    if memory.is_device and not any(stream.is_behind(access) for stream in orderly):
                        freed = f"freed, so that {home} may use it again\n{text_of(frames)}\n    made: {memory.made}"
                        self._find("memory is freed while another stream may use it", access, freed, frames)

    # Accesses

    def launch(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, stream: Stream | None = None) -> Access:
        """Books an operator on a stream, by default the current one, which runs it after all the host has done."""
        stream = stream or self.current
        with self._lock:
            self.drain()
            if stream is not self.host:
                stream.follows(self.host.now())
            stream.count += 1
            access = Access(stream, stream.count, what, stack())
            for tensor, is_write in [*((each, False) for each in reads), *((each, True) for each in writes)]:
                self._touch(tensor, access, is_write=is_write)
        return access

    def _touch(self, tensor: Tensor, access: Access, *, is_write: bool) -> None:
        memory = self.memory_of(tensor)
        if memory is None or tensor.numel() == 0:
            return
        stream, start = access.stream, tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for segment in memory.between(start, min(memory.stop, start + (last + 1) * tensor.itemsize)):
            if not stream.is_behind(segment.write):
                how = "writes what another stream writes" if is_write else "reads what another stream writes"
                self._find(f"{stream} {how}, without waiting for it", segment.write, str(access), access.frames)
            if not is_write:
                segment.reads[stream] = access
                continue
            for read in segment.reads.values():
                if not stream.is_behind(read):
                    self._find(
                        f"{stream} writes what another stream reads, without waiting for it", read, str(access), access.frames
                    )
            segment.write, segment.reads = access, {}

    def _find(self, what: str, earlier: Access, later: str, frames: Frames) -> None:
        where = shown(earlier.frames)[0], shown(frames)[0]
        self.findings.setdefault((what, where), f"{what}\n    first: {earlier}\n    then: {later}")

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of torch's, and books it."""
        reads, writes = _accesses(op)
        used: list[tuple[Tensor, str, Memory | None]] = []
        for key, value in itertools.chain(enumerate(args), kwargs.items()):
            used += [(each, _slot(op, key), self.memory_of(each)) for each in _tensors(value)]
        place = kwargs.get("device")
        is_made_there = place is not None and place.index is not None
        is_launched = is_made_there or any(memory is not None and memory.is_device for _, _, memory in used)
        tracked = [(each, slot) for each, slot, memory in used if memory is not None]
        if not is_launched and not tracked:
            return op(*args, **kwargs)
        read = [each for each, slot in tracked if slot in reads]
        written = [each for each, slot in tracked if slot in writes]
        access = self.launch(str(op), read, written, stream=None if is_launched else self.host)
        result = op(*args, **kwargs)
        if not is_launched:
            return result
        goes_to_host = place is not None and place.index is None
        for each in () if goes_to_host else _tensors(result):
            self._enter(each, access)
        # Numbers of the host are arguments of a kernel; anything longer is copied.
        is_mixed = any(memory is None and each.dim() > 0 and each.numel() > 0 for each, _, memory in used)
        is_async = kwargs.get("non_blocking") or (op is torch.ops.aten.copy_.default and any(args[2:]))
        if _waits(op, args) or ((goes_to_host or is_mixed) and not is_async):
            self.synchronized(str(op))
        return result

    def host_reads(self, tensor: Tensor, why: str) -> None:
        """The host reads values, without an operator of torch's."""
        with self.quiet():
            memory = self.memory_of(tensor)
            if memory is None:
                return
            self.launch(why, [tensor], [], stream=None if memory.is_device else self.host)
            if memory.is_device:
                self.synchronized(why)

    # The context

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing that this thread does here is booked."""
        before = self.is_quiet
        self._of_thread.is_quiet = True
        try:
            yield
        finally:
            self._of_thread.is_quiet = before

    @property
    def is_quiet(self) -> bool:
        return getattr(self._of_thread, "is_quiet", False)

    def __enter__(self) -> Self:
        self._stack.enter_context(_Operators(self))
        self._stack.enter_context(self._in_threads())
        self._stack.enter_context(stream_backend(self))
        # A tensor without memory, of a device that torch takes for another one than the device of tensors that have some.
        on_host = partial(_without_index, self, Tensor._make_wrapper_subclass)
        self._stack.enter_context(mock.patch.object(Tensor, "_make_wrapper_subclass", staticmethod(on_host)))
        run = torch.autograd._engine_run_backward

        def run_and_join(roots: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            """The stream of the caller waits for the streams of gradients before any callback at the end, as on a device."""
            first = next((it.grad_fn for it in roots if it.grad_fn is not None), None)
            if first is None:
                return run(roots, *args, **kwargs)
            with first.register_prehook(lambda _: Variable._execution_engine.queue_callback(self.join)):
                return run(roots, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_and_join))
        for owner, name, act in _PATCHES:
            function = getattr(owner, name)
            is_property = not callable(function)
            called = _instead(self, act, function.__get__ if is_property else function)
            self._stack.enter_context(mock.patch.object(owner, name, property(called) if is_property else called))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self.drain()
                with self.quiet():
                    for work in list(self.pending):
                        work.deliver()
                    texts = [*self.findings.values(), *self.orders.differences()]
        if kind is None and texts:
            raise StreamErrors("\n\n".join([f"{len(texts)} findings", *texts]))

    @contextlib.contextmanager
    def _in_threads(self) -> Iterator[None]:
        """Threads that start in the context are seen as well: a mode belongs to a thread."""
        start = threading.Thread.start

        def start_seen(thread: threading.Thread) -> None:
            run = thread.run

            def run_seen() -> None:
                with _Operators(self):
                    run()

            thread.run = run_seen  # type: ignore[method-assign]
            start(thread)

        threading.Thread.start = start_seen  # type: ignore[method-assign]
        try:
            yield
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]


class _Operators(TorchDispatchMode):
    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.checker.is_quiet:
            return op(*args, **kwargs)
        if any(type(it).__torch_dispatch__ is not Tensor.__torch_dispatch__ for it in _tensors([*args, *kwargs.values()])):
            return NotImplemented  # such a class calls its own operators, which arrive here
        with self.checker.quiet(), torch._C.DisableTorchFunction():
            return self.checker.run(op, args, kwargs)


# What does not reach torch's dispatcher: devices, and reads by the host.


def _instead(checker: Checker, act: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `act` with the function, where the checker looks, and else the function."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if checker.is_quiet else act(checker, function, *args, **kwargs)

    return called


def _without_index(checker: Checker, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("device") != DEVICE:
        return make(*args, **kwargs)
    made = make(*args, **kwargs | {"device": "cpu"})
    checker.wrappers[made] = None
    return made


def _device(checker: Checker, function: Any, tensor: Tensor) -> torch.device:
    return DEVICE if checker.is_on_device(tensor) else function(tensor)


def _is_cpu(checker: Checker, function: Any, tensor: Tensor) -> bool:
    return function(tensor) and not checker.is_on_device(tensor)


def _read(checker: Checker, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    checker.host_reads(tensor, function.__name__)
    return function(tensor, *args, **kwargs)


def _numpy(checker: Checker, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if checker.is_on_device(tensor):
        raise TypeError("can't convert a tensor of a device to NumPy. Use Tensor.cpu() first.")  # as torch does
    return _read(checker, function, tensor, *args, **kwargs)


def _record_stream(checker: Checker, function: Any, tensor: Tensor, stream: Any) -> None:
    checker.keep(tensor, stream)


def _make(checker: Checker, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch.tensor and torch.as_tensor copy to a device, and wait."""
    device = kwargs.get("device")
    if device is None or torch.device(device).index is None:
        return function(*args, **kwargs)
    with checker.quiet():
        made = function(*args, **kwargs)
    if not checker.is_on_device(made):
        checker.place_tensor(made)
        checker.synchronized(function.__name__)
    return made


def _to(checker: Checker, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor stays where it is, or is copied to the host, which torch does not do within one kind of device."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    plain = {key: value for key, value in kwargs.items() if key != "copy"}
    is_cpu = function.__name__ == "cpu"
    device = torch.device("cpu") if is_cpu else torch._C._nn._parse_to(*args, **plain)[0]
    if device is None or device.type != "cpu" or not checker.is_on_device(tensor):
        return function(tensor, *args, **kwargs)
    _, dtype, non_blocking, form = (None, None, False, None) if is_cpu else torch._C._nn._parse_to(*args, **plain)
    how = {} if form is None else {"memory_format": form}
    if device.index is not None:
        return tensor.to(dtype or tensor.dtype, copy=kwargs.get("copy", False), **how)
    copied = tensor.to(dtype or tensor.dtype, copy=True, **how)
    with checker.quiet():
        memory = checker.memory_of(copied)
    if memory is not None and non_blocking:
        memory.is_device = False
    elif memory is not None:
        checker.synchronized("to the host")
        checker._leave(memory)
        checker._empty.pop(copied.untyped_storage(), None)
    return copied


_PATCHES: list[tuple[Any, str, Callable[..., Any]]] = [
    (Tensor, "device", _device),
    (Tensor, "is_cpu", _is_cpu),
    (Tensor, "tolist", _read),
    (Tensor, "numpy", _numpy),
    (Tensor, "__array__", _numpy),
    (Tensor, "record_stream", _record_stream),
    (Tensor, "to", _to),
    (Tensor, "cpu", _to),
    (torch, "tensor", _make),
    (torch, "as_tensor", _make),
]


@cache
def _accesses(op: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The arguments that an operator reads, and those that it writes. A view of its argument reads nothing."""
    reads, writes = set(), set()
    for argument in op._schema.arguments:
        alias = argument.alias_info
        if alias is None:
            reads.add(argument.name)
        elif alias.is_write:
            writes.add(argument.name)
    return frozenset(reads), frozenset(writes)


def _slot(op: Any, key: int | str) -> str:
    return op._schema.arguments[key].name if isinstance(key, int) else key


def _waits(op: Any, args: tuple[Any, ...]) -> bool:
    """True if the host needs values of the device for the result."""
    if not any(tag in op.tags for tag in _READS_A_VALUE):
        return False
    if op._schema.name.rpartition("::")[2] in _BY_INDEX:
        return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
    return True


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument or a result; of a sparse one its parts, which have the memory."""
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        yield from (value._indices(), value._values())
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class OnStream(nn.Module):
    """Runs a module on a stream, its backward as well, with the edges that autograd adds on a device.

    Parameters' gradients are made on that stream, and the stream of the backward waits for them only when it ends.
    """

    def __init__(self, module: nn.Module, checker: Checker, stream: Stream) -> None:
        super().__init__()
        self.module, self.checker, self.stream = module, checker, stream
        self.anchor = checker.place_tensor(torch.zeros(())).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        region = _Region(self.checker, self.stream, needs_edge=x.requires_grad)
        x = _Begin.apply(x, self.anchor, region)
        region.goes_in(x)
        with self.checker.use(self.stream):
            y = self.module(x)
        region.goes_out(y)
        return _End.apply(y, region)


class _Region:
    """One forward on a stream, and its backward."""

    def __init__(self, checker: Checker, stream: Stream, *, needs_edge: bool) -> None:
        self.checker, self.inner, self.needs_edge = checker, stream, needs_edge
        self.outer = checker.current

    def goes_in(self, tensor: Tensor) -> None:
        self.checker.record(self.outer).wait(self.inner)
        self.checker.keep(tensor, self.inner)

    def goes_out(self, tensor: Tensor) -> None:
        self.checker.record(self.inner).wait(self.outer)
        self.checker.keep(tensor, self.outer)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        region = ctx.region
        region.checker.switch(region.outer)
        if region.needs_edge:
            region.goes_out(grad)
        return grad, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        region = ctx.region
        region.checker.leaves.append((region.inner, region.outer))
        region.goes_in(grad)
        region.checker.switch(region.inner)
        return grad, None
