"""A backend of torch.distributed with streams, as NCCL has them; gloo carries the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from support.streams.clocks import Access, Event, shown, stack

if TYPE_CHECKING:
    from support.streams.checker import Checker

BACKEND = "streams"
_ODD = 91  # in integers that have not arrived
Copied = tuple[list[dist.Work], Sequence[Tensor]]  # works of gloo, and what they bring
Start = Callable[[list[Tensor]], Copied]


class Launch(NamedTuple):
    """One collective, as this rank has launched it."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    num_bytes: int
    dtype: str
    place: str


def differences(launches: list[Launch]) -> list[str]:
    """Compares the launches of all ranks, a pair of them by what both take part in; a collective call.

    NCCL waits for ever if two ranks launch in different orders.
    """
    if not dist.is_initialized():
        return []
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, launches)
    found = []
    for one, other in itertools.combinations(range(len(of_ranks)), 2):
        common = [[it for it in of_ranks[rank] if {one, other} <= set(it.ranks)] for rank in (one, other)]
        for number, (mine, theirs) in enumerate(itertools.zip_longest(*common)):
            if mine is None or theirs is None or mine[:-1] != theirs[:-1]:
                found.append(f"collective {number} differs:\n    rank {one}: {mine}\n    rank {other}: {theirs}")
                break
    return found


class StreamWork(dist.Work):
    """A collective on its group's stream. It holds its tensors until a stream has waited, as NCCL does, and no longer."""

    def __init__(self, checker: Checker, access: Access, inputs: list[Tensor], outputs: list[Tensor], copied: Copied) -> None:
        super().__init__()
        self.checker, self.access, self.event = checker, access, checker.record(access.stream)
        self.inputs, self.outputs, self.copied = inputs, outputs, copied
        self.before = [it.data.clone() for it in inputs]
        self.is_delivered, self.blocks = False, False
        for output in outputs:
            output.data.fill_(torch.nan if output.is_floating_point() or output.is_complex() else _ODD)
        self.checker.works[self] = None

    def bring(self) -> None:
        """Writes the values of this one, and of earlier ones of the same stream, which are there as well."""
        for work in list(self.checker.works):
            if self.event.clock.get(work.access.stream, 0) >= work.access.count:
                work.deliver()

    def deliver(self) -> None:
        """Writes the values."""
        if self.is_delivered:
            return
        self.is_delivered = True
        works, results = self.copied
        for work in works:
            work.wait()
        with self.checker.quiet():
            for tensor, before in zip(self.inputs, self.before, strict=True):
                if not overlap([tensor], self.outputs) and not torch.equal(_bytes(tensor), _bytes(before)):
                    self.checker.find("the input of a collective has changed before its end", self.access, "its end", stack())
            for output, result in zip(self.outputs, results, strict=True):
                output.data.copy_(result.view_as(output))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.event.wait()
        self.bring()
        self.checker.works.pop(self, None)
        self.inputs = self.outputs = []
        if self.blocks or timeout:  # NCCL's waits with a limit make the host wait
            self.checker.synchronized("a wait with a limit" if timeout else "barrier", self.event.clock)
        return True

    def is_completed(self) -> bool:
        if not self.event.query():
            return False
        self.bring()
        return True

    def get_future(self) -> StreamFuture:
        return StreamFuture(self.checker, self.event, self.outputs, self.bring)


class StreamFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future of a device: it is there at once, and a wait makes the current stream wait."""

    def __init__(self, checker: Checker, event: Event, value: Any, bring: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.checker, self.event, self.bring = checker, event, bring
        self.set_result(value)

    def wait(self) -> Any:
        self.event.wait()
        self.bring()
        for tensor in tensors_in(self.value()):
            self.checker.keep(tensor)
        return self.value()

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture:
        """Calls it at once, on a separate stream that waits."""
        with self.checker.use(self.checker.new_stream("a stream of callbacks")):
            self.wait()
            value = callback(self)
            if isinstance(value, torch.futures.Future):
                value = value.wait()
            return StreamFuture(self.checker, self.checker.record(), value)

    add_done_callback = then


class StreamGroup(dist.ProcessGroup):
    """A process group whose collectives run on a separate stream, one after the other."""

    def __init__(self, checker: Checker, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.checker = checker
        self.key = options.group_id
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self.stream = checker.new_stream(f"the stream of group {self.key}")
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", options.store), rank, size, options.timeout)
        # From its backend a group has its name.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def launch(self, kind: str, inputs: list[Tensor], outputs: list[Tensor], start: Start) -> StreamWork:
        """`start` begins the collective on copies of the inputs."""
        checker = self.checker
        with checker.quiet():
            checker.record().wait(self.stream)
            payload = max([*inputs, *outputs], key=lambda it: it.nbytes, default=torch.empty(0))
            place = "{}:{} {}".format(*shown(stack(), most=1)[0])
            num_bytes = 0 if kind == "all_to_all" else payload.nbytes  # of which ranks may have uneven parts
            checker.launches.append(Launch(self.key, self.ranks, kind, num_bytes, str(payload.dtype), place))
            access = checker.launch(kind, inputs, outputs, stream=self.stream)
            for work in [it for it in checker.works if overlap([*inputs, *outputs], it.outputs)]:
                work.deliver()  # earlier ones of this stream, or else there is a finding
            return StreamWork(checker, access, inputs, outputs, start([it.data.clone() for it in inputs]))

    def allreduce(self, tensors: list[Tensor], options: Any) -> StreamWork:
        if tensors[0].is_sparse:
            raise NotImplementedError("as NCCL, this backend does not reduce sparse tensors")
        return self.launch("all_reduce", tensors, tensors, lambda mine: ([self.gloo.allreduce(mine, options)], mine))

    def broadcast(self, tensors: list[Tensor], options: Any) -> StreamWork:
        is_root = options.rootRank == self.rank()

        def start(_: list[Tensor]) -> Copied:
            copies = [it.data.clone() for it in tensors]
            return [self.gloo.broadcast(copies, options)], [] if is_root else copies

        return self.launch("broadcast", tensors if is_root else [], [] if is_root else tensors, start)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> StreamWork:
        def start(mine: list[Tensor]) -> Copied:
            copies = [it.data.clone() for it in outputs[0]]
            return [self.gloo.allgather([copies], mine)], copies

        return self.launch("all_gather", inputs, outputs[0], start)

    def all_gather_single(self, output: Tensor, mine: Tensor, options: Any = None) -> StreamWork:
        return self.allgather([list(output.data.view(self.size(), *mine.shape).unbind())], [mine])

    def reduce_scatter_single(self, output: Tensor, values: Tensor, options: Any) -> StreamWork:
        if options.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError("a reduce-scatter of this backend adds, as gloo's does whatever it is asked for")

        def start(inputs: list[Tensor]) -> Copied:
            return [self.gloo.allreduce(inputs)], [inputs[0].view(self.size(), -1)[self.rank()]]

        return self.launch("reduce_scatter", [values], [output], start)

    def all_to_all_single(
        self, output: Tensor, values: Tensor, to_here: list[int], from_here: list[int], options: Any = None
    ) -> StreamWork:
        def start(inputs: list[Tensor]) -> Copied:
            copy = output.data.clone()
            return [self.gloo.alltoall_base(copy, inputs[0], to_here, from_here)], [copy]

        return self.launch("all_to_all", [values], [output], start)

    # Older versions of torch call them by these names.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def barrier(self, opts: Any = None) -> StreamWork:
        work = self.launch("barrier", [], [], lambda _: ([self.gloo.barrier()], []))
        work.blocks = True  # NCCL's makes the host wait
        return work

    def shutdown(self) -> None:
        """Completes what nobody has waited for."""
        for work in self.checker.works:
            if work.access.stream is self.stream:
                work.deliver()

    abort = shutdown


def register(checker: Checker) -> None:
    """New groups of the backend belong to this checker."""
    dist.Backend.register_backend(BACKEND, lambda options, _: StreamGroup(checker, options), extended_api=True, devices=["cpu"])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument or a result; of a sparse one its parts, which have the memory."""
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        yield from (value._indices(), value._values())
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    ranges = [[(it.data_ptr(), it.data_ptr() + it.nbytes) for it in tensors] for tensors in (some, others)]
    return any(start < end and first < stop for start, stop in ranges[0] for first, end in ranges[1])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.data.contiguous().view(-1).view(torch.uint8)
