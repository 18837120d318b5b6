"""The checker of stream order itself: each kind of error in a small program that it must find, and its corrected twin."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from support.naive import of_all
from support.ranks import in_ranks
from support.streams import Checker, Event, OnStream, StreamErrors
from support.streams.backend import BACKEND


def made(*shape: int) -> Tensor:
    return torch.ones(*(shape or (8,)), device="cpu:0")


def waits(event: Event, is_right: bool) -> None:
    if is_right:
        event.wait()


def reads(checker: Checker, is_right: bool) -> None:
    """read without an edge: reads what another stream writes"""
    x = made()
    event = checker.record()
    with checker.use(checker.new_stream()):
        waits(event, is_right)
        x.sum()
        checker.keep(x)


def records_too_early(checker: Checker, is_right: bool) -> None:
    """an event before the write: reads what another stream writes"""
    x = made()
    event = checker.record()
    x.add_(1)
    event = checker.record() if is_right else event
    with checker.use(checker.new_stream()):
        event.wait()
        x.sum()
        checker.keep(x)


def writes_what_is_read(checker: Checker, is_right: bool) -> None:
    """a write while another stream reads: writes what another stream reads"""
    x, side = made(), checker.new_stream()
    event = checker.record()
    with checker.use(side):
        event.wait()
        x.sum()
    waits(checker.record(side), is_right)
    x.zero_()


def writes_what_is_written(checker: Checker, is_right: bool) -> None:
    """a write while another stream writes: writes what another stream writes"""
    x, side = made(), checker.new_stream()
    event = checker.record()
    with checker.use(side):
        event.wait()
        x.add_(1)
    waits(checker.record(side), is_right)
    x.zero_()


def shares_bytes(checker: Checker, is_right: bool) -> None:
    """views that overlap, or do not: reads what another stream writes"""
    x, side = made(), checker.new_stream()
    checker.record().wait(side)
    x[:4].add_(1)
    with checker.use(side):
        x[4 if is_right else 3 :].sum()
        checker.keep(x)


def shares_memory_of_two_storages(checker: Checker, is_right: bool) -> None:
    """another tensor over the same memory: reads what another stream writes"""
    x, side = made(), checker.new_stream()
    y = from_dlpack(x.view(torch.uint8)).view(torch.float32)
    checker.record().wait(side)
    x.add_(1)
    event = checker.record()
    with checker.use(side):
        waits(event, is_right)
        y.sum()
        checker.keep(y)


def uses_new_memory(checker: Checker, is_right: bool) -> None:
    """memory that its own stream may still use for what was there before: writes what another stream writes"""
    made().add_(1)
    x, side = torch.empty(8, device="cpu:0"), checker.new_stream()
    event = checker.record()
    with checker.use(side):
        waits(event, is_right)
        x.zero_()
        checker.keep(x)


def frees(checker: Checker, is_right: bool) -> None:
    """freed memory: freed while another stream may use it"""
    x = made()
    event = checker.record()
    with checker.use(checker.new_stream()):
        event.wait()
        x.sum()
        if is_right:
            checker.keep(x)
    del x


def keeps_for_another(checker: Checker, is_right: bool) -> None:
    """three streams, and memory kept for one that does not wait for the reader: freed while another stream may use it"""
    x, reader, third = made(), checker.new_stream(), checker.new_stream()
    checker.record().wait(reader)
    with checker.use(reader):
        x.sum()
    with checker.use(third):
        waits(checker.record(reader), is_right)
        checker.keep(x)
    del x


def reads_pinned(checker: Checker, is_right: bool) -> None:
    """pinned memory: the host reads what another stream writes"""
    copied, event = made().to("cpu", non_blocking=True), checker.record()
    if is_right:
        event.synchronize()
    copied.sum().item()


def polls_and_reads_pinned(checker: Checker, is_right: bool) -> None:
    """pinned memory, and an event that is polled: the host reads what another stream writes"""
    copied, event = made().to("cpu", non_blocking=True), checker.record()
    assert not event.query()
    if is_right:
        assert event.query()
    copied.tolist()


def writes_in_a_thread(checker: Checker, is_right: bool) -> None:
    """a thread of the host, which has the default stream too: writes what another stream reads"""
    x, side = made(), checker.new_stream()
    checker.record().wait(side)
    with checker.use(side):
        x.sum()
    event = checker.record(side)

    def write() -> None:
        waits(event, is_right)
        x.zero_()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    event.wait()


def packs_gradients_of_two_streams(checker: Checker, is_right: bool) -> None:
    """gradients that come from several streams: reads what another stream writes"""
    here, there = checker.place(nn.Linear(8, 8)), checker.place(nn.Linear(8, 8))
    model = nn.ModuleList([here, OnStream(there, checker, checker.new_stream())])
    arrived: list[tuple[Tensor, Event]] = []

    def arrive(param: Tensor) -> None:
        assert param.grad is not None
        arrived.append((param.grad, checker.record()))
        if len(arrived) == 4:
            for grad, event in arrived:
                waits(event, is_right)
                grad.sum()
                checker.keep(grad)

    for param in [*here.parameters(), *there.parameters()]:
        param.register_post_accumulate_grad_hook(arrive)
    x = made(2, 8)
    sum(layer(x) for layer in model).sum().backward()
    assert len(arrived) == 4
    checker.synchronize()


def reads_rows(checker: Checker, is_right: bool) -> None:
    """a sparse gradient from another stream: reads what another stream writes"""
    table, side = checker.place(nn.Embedding(8, 4, sparse=True)), checker.new_stream()
    table(torch.zeros(2, dtype=torch.int64, device="cpu:0")).sum().backward()
    grad, event = table.weight.grad, checker.record()
    assert str(grad.device) == "cpu:0"
    with checker.use(side):
        waits(event, is_right)
        grad.coalesce()
        checker.keep(grad._indices())
        checker.keep(grad._values())


PROGRAMS: list[Callable[[Checker, bool], None]] = [
    *(reads, records_too_early, writes_what_is_read, writes_what_is_written, shares_bytes, shares_memory_of_two_storages),
    *(uses_new_memory, frees, keeps_for_another, reads_pinned, polls_and_reads_pinned, writes_in_a_thread),
    *(packs_gradients_of_two_streams, reads_rows),
]


def wrong_is_found_and_right_passes(program: Callable[..., None], *more: Any) -> None:
    with Checker() as checker:
        program(checker, True, *more)
    with pytest.raises(StreamErrors, match=(program.__doc__ or "").rpartition(": ")[2]) as raised, Checker() as checker:
        program(checker, False, *more)
    assert "first: " in str(raised.value)
    assert str(raised.value).count(program.__name__) >= 2, "a stack is missing"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_error_is_found_with_both_stacks_and_its_corrected_twin_passes(program: Callable[..., None]) -> None:
    wrong_is_found_and_right_passes(program)


# Collectives, on two ranks


gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13 has the second names
scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def launched(group: dist.ProcessGroup, tensor: Tensor) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


def reads_a_result(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a result that is read before the wait: reads what another stream writes"""
    x = made()
    work = launched(group, x)
    if is_right:
        work.wait()
    assert x.cpu().isnan().all().item() != is_right
    work.wait()


def waits_on_another_stream(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a wait that makes another stream wait: reads what another stream writes"""
    x, side = made(), checker.new_stream()
    work = launched(group, x)
    with checker.use(side):
        work.wait()
    if is_right:
        work.wait()
    x.sum()


def changes_an_input(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """an input that changes between launch and wait: writes what another stream reads"""
    x = made()
    work = gather(made(16), x, group=group, async_op=True)
    if is_right:
        work.wait()
    x.zero_()
    work.wait()


def changes_an_input_unseen(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """an input that changes without an operator: the input of a collective has changed"""
    x = made()
    y = made(16)
    work = gather(y, x, group=group, async_op=True)
    with checker.quiet():
        if not is_right:
            x.zero_()
    work.wait()


def frees_an_input(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """an input that the backend holds until any stream has waited: freed while another stream may use it"""
    side = checker.new_stream()
    work = gather(made(16), made(), group=group, async_op=True)
    if is_right:
        work.wait()
    with checker.use(side):
        work.wait()
    work.wait()


def takes_a_wait_for_the_hosts(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a wait of a stream that is taken for a wait of the host: the host reads what another stream writes"""
    x = made()
    work = launched(group, x)
    work.wait()
    assert not work.is_completed()
    copied = x.to("cpu", non_blocking=True)
    if is_right:
        checker.synchronize()
    assert copied.tolist() == [2.0] * 8


def waits_for_one_of_two(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a wait for the last collective of a group covers earlier ones, not the reverse: reads what another stream writes"""
    x, y = made(), made()
    first, last = launched(group, x), launched(group, y)
    (last if is_right else first).wait()
    assert (x + y).isnan().any().item() != is_right
    for work in (first, last):
        work.wait()


def polls_a_result(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a collective that is polled, which is incomplete at first: reads what another stream writes"""
    x = made()
    work = launched(group, x)
    assert not work.is_completed()
    if is_right:
        assert work.is_completed()
    x.sum()
    work.wait()


def waits_for_a_future(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """a future, which is there at once, and its callback, which has a stream: reads what another stream writes"""
    future = launched(group, made()).get_future().then(lambda future: future.value()[0] * 2)
    assert future.done()
    if is_right:
        future.wait()
    future.value().sum()
    checker.keep(future.value())
    future.wait()


def orders_groups(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """groups in another order on one rank: collective 0 differs"""
    other = dist.new_group(backend=BACKEND)
    groups = [group, other] if is_right or dist.get_rank() == 0 else [other, group]
    for work in [launched(each, made()) for each in groups]:
        work.wait()
    dist.destroy_process_group(other)


def launches_another_kind(checker: Checker, is_right: bool, group: dist.ProcessGroup) -> None:
    """collectives whose dtypes differ: collective 0 differs"""
    x = made() if is_right or dist.get_rank() == 0 else torch.ones(8, dtype=torch.int32, device="cpu:0")
    launched(group, x).wait()


COLLECTIVE: list[Callable[..., None]] = [
    *(reads_a_result, waits_on_another_stream, changes_an_input, changes_an_input_unseen, frees_an_input),
    *(takes_a_wait_for_the_hosts, waits_for_one_of_two, polls_a_result, waits_for_a_future),
    *(orders_groups, launches_another_kind),
]


def with_a_group(program: Callable[..., None], checker: Checker, is_right: bool) -> None:
    group = dist.new_group(backend=BACKEND)
    program(checker, is_right, group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("program", COLLECTIVE, ids=lambda program: program.__name__)
@in_ranks(2)
def test_an_error_around_a_collective_is_found_and_its_corrected_twin_passes(program: Callable[..., None]) -> None:
    with Checker() as checker:
        with_a_group(program, checker, True)
    with pytest.raises(StreamErrors, match=(program.__doc__ or "").rpartition(": ")[2]), Checker() as checker:
        with_a_group(program, checker, False)


@in_ranks(3)
def test_every_collective_brings_the_values_of_gloo() -> None:
    rank = dist.get_rank()

    def run(group: dist.ProcessGroup | None, device: str) -> list[Tensor]:
        mine = torch.arange(6.0, device=device) + rank
        total, mean, root = mine.clone(), mine.clone(), mine.clone()
        parts = [torch.empty(6, device=device) for _ in range(3)]
        flat, swapped, uneven, part = (torch.empty(numel, device=device) for numel in (18, 6, 3 * rank, 2))
        dist.all_reduce(total, group=group)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        dist.broadcast(root, 1, group=group)
        dist.all_gather(parts, mine, group=group)
        gather(flat, mine, group=group)
        dist.all_to_all_single(swapped, mine, group=group)
        dist.all_to_all_single(uneven, mine[:3], [rank] * 3, [0, 1, 2], group=group)  # rank 0 receives nothing
        scatter_sum(part, mine, group=group)
        dist.barrier(group=group)
        return [it.cpu() for it in (total, mean, root, *parts, flat, swapped, uneven, part)]

    with Checker():
        group = dist.new_group(backend=BACKEND)
        ours = run(group, "cpu:0")
        dist.destroy_process_group(group)
    assert all(map(torch.equal, ours, run(None, "cpu")))


@in_ranks(2)
def test_a_reduce_scatter_does_not_average() -> None:
    with Checker(), of_all(BACKEND) as group, pytest.raises(NotImplementedError, match="adds"):
        scatter_sum(made(4), made(8), op=dist.ReduceOp.AVG, group=group)


# Synchronizations of the host


WAITS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "truth": (lambda x: bool(x[0] > 0), 1),
    "list": (lambda x: x.tolist(), 1),
    "equality": (lambda x: torch.equal(x, x), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "mask": (lambda x: x[x > 0], 1),
    "indices-of-the-host": (lambda x: x.__setitem__([0, 1], 0.0), 1),
    "copy-to-the-host": (lambda x: x.cpu(), 1),
    "copy-to-the-device": (lambda x: x.copy_(torch.zeros(8)), 1),
    "values-to-the-device": (lambda x: torch.tensor([1.0], device=x.device), 1),
    "copy-without-blocking": (lambda x: x.copy_(torch.zeros(8), non_blocking=True), 0),
    "number-of-the-host": (lambda x: x * torch.tensor(2.0), 0),
    "slice": (lambda x: x[1:3].fill_(1.0), 0),
    "sum": (lambda x: (x @ x).sum().isnan().any(), 0),
    "optimizer": (lambda x: torch.optim.AdamW([x.requires_grad_()]).step(), 0),
}


@pytest.mark.parametrize(("call", "num_waits"), WAITS.values(), ids=WAITS)
def test_waits_of_the_host_are_counted(call: Callable[[Tensor], object], num_waits: int) -> None:
    with Checker() as checker:
        x = made()
        call(x)
        assert len(checker.synchronizations) == num_waits
        if num_waits:
            with pytest.raises(StreamErrors, match="the host has waited 1 times"), checker.without_synchronization():
                call(x)


def test_memory_is_where_it_was_made_or_asked_for() -> None:
    with Checker():
        x = made()
        there = [x[1:], x.data, x.new_zeros(3), torch.empty_like(x), x.double(), x.to("cpu:0"), torch.zeros(3).to(x.device)]
        here = [torch.zeros(3), x.cpu(), x.to("cpu", torch.float64), torch.tensor([1.0])]
        assert {str(it.device) for it in there} == {"cpu:0"}
        assert {str(it.device) for it in here} == {"cpu"}
        with pytest.raises(TypeError, match="NumPy"):
            x.numpy()
