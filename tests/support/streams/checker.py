"""The checker: it books what operators read and write, and says what is out of order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from operator import attrgetter
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from support.streams import backend
from support.streams.backend import tensors_in
from support.streams.clocks import Access, Clock, Event, Frames, Memory, Stream, shown, stack, text_of

DEVICE = torch.device("cpu", 0)
_READS_A_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")
_start_of = attrgetter("start")


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
        self.launches: list[backend.Launch] = []  # collectives of this rank, in order
        self.works: dict[backend.StreamWork, None] = {}  # collectives that no stream has waited for
        self.leaves: set[Stream] = set()  # that the backward under way has used
        self.wrappers: Any = WeakTensorKeyDictionary()  # tensors without memory, on the device
        self._memories: list[Memory] = []  # by address
        self.of_thread = threading.local()
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()

    # Streams

    @property
    def current(self) -> Stream:
        return getattr(self.of_thread, "stream", self.default)

    def switch(self, stream: Stream) -> None:
        self.of_thread.stream = stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.switch(stream)
        try:
            yield
        finally:
            self.switch(before)

    def new_stream(self, name: str = "") -> Stream:
        self.streams.append(Stream(name or f"stream {len(self.streams)}"))
        return self.streams[-1]

    def record(self, stream: Stream | None = None) -> Event:
        """An event of this moment, on the current stream by default."""
        stream = stream or self.current
        stream.follows(self.host.clock)
        return Event(self, dict(stream.clock), stack())

    def keep(self, tensor: Tensor, stream: Stream | None = None) -> None:
        """As `tensor.record_stream`: its memory, once freed, is not used before the stream has run what it has by then."""
        memory = self.memory_of(tensor)
        if memory is not None:
            memory.kept.add(stream or self.current)

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        self.deliver()
        self.synchronized("synchronize", {stream: stream.clock[stream] for stream in self.streams})

    def deliver(self) -> None:
        """All collectives write their values."""
        for work in list(self.works):
            work.deliver()

    def synchronized(self, why: str, clock: Clock | None = None) -> None:
        """The host has waited, by default for the current stream."""
        self.host.follows(self.current.clock if clock is None else clock)
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
        """Makes the memory of a tensor the device's, or pinned."""
        with self.quiet():
            self._enter(tensor, self.launch("placed", [], []), is_device=is_device)
        return tensor

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor, if it is the device's or pinned."""
        if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()  # an empty tensor has no address
        with self._lock:
            place = bisect_right(self._memories, address, key=_start_of)
            memory = self._memories[place - 1] if place else None
        return memory if memory is not None and address < memory.stop else None

    def is_on_device(self, tensor: Tensor) -> bool:
        with self.quiet(), torch._C.DisableTorchFunction():
            memory = self.memory_of(next(tensors_in(tensor)))
            return tensor in self.wrappers if memory is None else memory.is_device

    def _enter(self, tensor: Tensor, made: Access, *, is_device: bool = True) -> None:
        """Notes new memory, unless it is known, as of a result that is a view."""
        if tensor.layout is not torch.strided or self.memory_of(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(1)  # else it would have no address
        start = storage.data_ptr()
        memory = Memory(start, start + storage.nbytes(), made, is_device)
        memory.ref = weakref.ref(storage, lambda _: self._free(memory))
        with self._lock:
            insort(self._memories, memory, key=_start_of)

    def _free(self, memory: Memory) -> None:
        """The stream that has made it may use it again at once."""
        with self._lock:
            self._memories.remove(memory)
        home = memory.made.stream
        orderly = (home, self.host, *memory.kept)  # a kept stream may have waited for others
        for access in [each for it in memory.segments for each in (it.write, *it.reads.values())]:
            if memory.is_device and not any(stream.is_behind(access) for stream in orderly):
                frames = stack()
                freed = f"freed, so that {home} may use it again\n{text_of(frames)}\n    made: {memory.made}"
                self.find("memory is freed while another stream may use it", access, freed, frames)

    # Accesses

    def launch(self, what: object, reads: Sequence[Tensor], writes: Sequence[Tensor], *, stream: Stream | None = None) -> Access:
        """Books an operator on a stream, by default the current one, which runs it after all the host has done."""
        stream = stream or self.current
        with self._lock:
            stream.follows(self.host.clock)
            stream.clock[stream] += 1
            access = Access(stream, stream.clock[stream], what, stack())
            for tensor in reads:
                self._touch(tensor, access, is_write=False)
            for tensor in writes:
                self._touch(tensor, access, is_write=True)
        return access

    def _touch(self, tensor: Tensor, access: Access, *, is_write: bool) -> None:
        memory = self.memory_of(tensor)
        if memory is None or tensor.numel() == 0:
            return
        stream, start = access.stream, tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        does = "writes" if is_write else "reads"
        for segment in memory.between(start, start + (last + 1) * tensor.itemsize):
            earlier = [("writes", segment.write)]
            if is_write:
                earlier += [("reads", read) for read in segment.reads.values()]
            for did, each in earlier:
                if not stream.is_behind(each):
                    what = f"{stream} {does} what another stream {did}, without waiting for it"
                    self.find(what, each, str(access), access.frames)
            if is_write:
                segment.write, segment.reads = access, {}
            else:
                segment.reads[stream] = access

    def find(self, what: str, earlier: Access, later: str, frames: Frames) -> None:
        where = shown(earlier.frames, most=1)[0], shown(frames, most=1)[0]
        self.findings.setdefault((what, where), f"{what}\n    first: {earlier}\n    then: {later}")

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of torch's, and books it."""
        aliases = _aliases(op)
        values = dict(zip(aliases, args, strict=False)) | kwargs
        used = [(name, each, self.memory_of(each)) for name, value in values.items() for each in tensors_in(value)]
        place = values.get("device")
        is_made_there = place is not None and place.index is not None
        goes_to_host = place is not None and place.index is None
        is_launched = is_made_there or any(memory is not None and memory.is_device for _, _, memory in used)
        if not is_launched and all(memory is None for _, _, memory in used):
            return op(*args, **kwargs)
        # A view of an argument reads nothing.
        read = [each for name, each, _ in used if aliases[name] is None]
        written = [each for name, each, _ in used if aliases[name] is not None and aliases[name].is_write]
        if op.is_view and not read:
            return op(*args, **kwargs)  # no stream has anything to do
        access = self.launch(op, read, written, stream=None if is_launched else self.host)
        result = op(*args, **kwargs)
        if not is_launched:
            return result
        for each in () if goes_to_host else tensors_in(result):
            self._enter(each, access)
        # Numbers of the host are arguments of a kernel; anything longer is copied.
        is_mixed = any(memory is None and each.dim() > 0 and each.numel() > 0 for _, each, memory in used)
        if _waits(op, args) or ((goes_to_host or is_mixed) and not values.get("non_blocking")):
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
        self.of_thread.is_quiet = True
        try:
            yield
        finally:
            self.of_thread.is_quiet = before

    @property
    def is_quiet(self) -> bool:
        return getattr(self.of_thread, "is_quiet", False)

    def __enter__(self) -> Self:
        backend.register(self)
        self._stack.enter_context(_Operators(self))
        for owner, name, act in _PATCHES:
            function = getattr(owner, name)
            is_property = not callable(function)
            called = _instead(self, act, function.__get__ if is_property else function)
            self._stack.enter_context(mock.patch.object(owner, name, property(called) if is_property else called))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is not None:
                return
            self.deliver()
            with self.quiet():
                texts = [*self.findings.values(), *backend.differences(self.launches)]
        if texts:
            raise StreamErrors("\n\n".join([f"{len(texts)} findings", *texts]))


class _Operators(TorchDispatchMode):
    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.checker.is_quiet:
            return op(*args, **kwargs)
        if any(it.__torch_dispatch__ is not Tensor.__torch_dispatch__ for it in types):
            return NotImplemented  # such a class calls its own operators, which arrive here
        of_thread = self.checker.of_thread
        of_thread.is_quiet = True
        try:
            with torch._C.DisableTorchFunction():
                return self.checker.run(op, args, kwargs)
        finally:
            of_thread.is_quiet = False


@functools.cache
def _aliases(op: Any) -> dict[str, Any]:
    """What each argument of an operator shares with its result."""
    return {each.name: each.alias_info for each in op._schema.arguments}


@functools.cache
def _reads_a_value(op: Any) -> bool:
    return any(tag in op.tags for tag in _READS_A_VALUE)


def _waits(op: Any, args: tuple[Any, ...]) -> bool:
    """True if the host needs values of the device for the result."""
    if not _reads_a_value(op):
        return False
    if op._schema.name.rpartition("::")[2] in _BY_INDEX:
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1]))
    return True


# What does not reach torch's dispatcher: devices, reads by the host, new threads, and the end of a backward.


def _instead(checker: Checker, act: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `act` with the function, where the checker looks, and else the function."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if checker.is_quiet else act(checker, function, *args, **kwargs)

    return called


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


def _make_wrapper(checker: Checker, function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor without memory: torch must see the device of those that have some."""
    if kwargs.get("device") != DEVICE:
        return function(*args, **kwargs)
    made = function(*args, **kwargs | {"device": "cpu"})
    checker.wrappers[made] = None
    return made


def _to(checker: Checker, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor stays on the device, or is copied to the host; for torch both are one."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    must_copy = kwargs.pop("copy", False)
    device, dtype, is_async, form = torch._C._nn._parse_to(*args, **kwargs)
    if device is None or device.type != "cpu" or not checker.is_on_device(tensor):
        return function(tensor, *args, copy=must_copy, **kwargs)
    convert = partial(function, tensor, dtype or tensor.dtype, memory_format=form or torch.preserve_format)
    if device.index is not None:
        return convert(copy=must_copy)
    with checker.quiet():
        copied = convert(copy=True)
    if is_async:
        checker.place_tensor(copied, is_device=False)
        checker.launch("to the host", [tensor], [copied])
    else:
        checker.host_reads(tensor, "to the host")
    return copied


def _cpu(checker: Checker, function: Any, tensor: Tensor, **kwargs: Any) -> Tensor:
    return tensor.to("cpu", **kwargs)


def _start(checker: Checker, function: Any, thread: threading.Thread) -> None:
    """A mode belongs to a thread."""
    run = thread.run

    def run_seen() -> None:
        with _Operators(checker):
            run()

    thread.run = run_seen  # type: ignore[method-assign]
    function(thread)


def _run_backward(checker: Checker, function: Any, roots: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The stream of the caller waits for the streams of gradients before any callback at the end, as on a device."""
    caller = checker.current

    def join() -> None:
        checker.switch(caller)
        while checker.leaves:
            checker.record(checker.leaves.pop()).wait()

    first = next((it.grad_fn for it in roots if it.grad_fn is not None), None)
    if first is None:
        return function(roots, *args, **kwargs)
    with first.register_prehook(lambda _: Variable._execution_engine.queue_callback(join)):
        return function(roots, *args, **kwargs)


_PATCHES: list[tuple[Any, str, Callable[..., Any]]] = [
    (Tensor, "device", _device),
    (Tensor, "is_cpu", _is_cpu),
    (Tensor, "tolist", _read),
    (Tensor, "numpy", _numpy),
    (Tensor, "__array__", _numpy),
    (Tensor, "record_stream", _record_stream),
    (Tensor, "to", _to),
    (Tensor, "cpu", _cpu),
    (Tensor, "_make_wrapper_subclass", _make_wrapper),
    (torch, "tensor", _make),
    (torch, "as_tensor", _make),
    (threading.Thread, "start", _start),
    (torch.autograd, "_engine_run_backward", _run_backward),
]


class OnStream(nn.Module):
    """Runs a module on a stream, its backward as well, with the edges that autograd adds on a device.

    Parameters' gradients are made on that stream, and the stream of the backward waits for them only when it ends.
    """

    def __init__(self, module: nn.Module, checker: Checker, stream: Stream) -> None:
        super().__init__()
        self.module, self.checker, self.stream = module, checker, stream
        self.anchor = checker.place_tensor(torch.zeros(())).requires_grad_()  # for a backward if `x` needs none

    def forward(self, x: Tensor) -> Tensor:
        outer = self.checker.current
        x = _Crossing.apply(x, self.anchor, self.checker, outer, self.stream)
        with self.checker.use(self.stream):
            y = self.module(x)
        return _Crossing.apply(y, self.anchor, self.checker, self.stream, outer)


class _Crossing(torch.autograd.Function):
    """Hands a tensor over from stream to stream, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, checker: Checker, source: Stream, target: Stream) -> Tensor:
        ctx.back = checker, target, source
        _cross(x, checker, source, target)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        checker, source, target = ctx.back
        if ctx.needs_input_grad[0]:
            _cross(grad, checker, source, target)
        checker.leaves.add(target)
        checker.switch(target)
        return grad, None, None, None, None


def _cross(tensor: Tensor, checker: Checker, source: Stream, target: Stream) -> None:
    checker.record(source).wait(target)
    checker.keep(tensor, target)
