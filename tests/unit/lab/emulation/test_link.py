"""Emulated links: when one is free, and receives whose messages come when the test says so."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from undertow.lab.cost import Link
from undertow.lab.emulation.messages import Receives, Sends
from undertow.lab.emulation.ways import EmulatedLink
from undertow.lab.emulation.works import LinkWork

HOP_S, NUMEL = 0.3, 10_000


class Message(dist.Work):
    """A receive of gloo's: `wait` returns when the message has come, or raises what happened instead."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.source = source
        self.error: Exception | None = None
        self._has_come = threading.Event()

    def come(self, error: Exception | None = None) -> "Message":
        self.error = error
        self._has_come.set()
        return self  # for a message that is there from the beginning

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._has_come.wait()
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def link() -> EmulatedLink:
    return EmulatedLink(Link(name="slow", hop_s=HOP_S, bytes_per_s=1e6))


@pytest.fixture
def receives(link: EmulatedLink) -> Iterator[Receives]:
    receives = Receives(link, rank=0)
    yield receives
    receives.close(time.perf_counter() + 10.0)


def post(receives: Receives, message: Message) -> LinkWork:
    return receives.post(lambda: message, [torch.zeros(NUMEL)], source=message.source)


def test_messages_follow_one_another_and_pay_their_latency_side_by_side(link: EmulatedLink, receives: Receives) -> None:
    for work in [post(receives, Message(1).come()) for _ in range(5)]:
        work.wait()
    log, cost_s = link.drain_log(), 4 * NUMEL / 1e6
    assert [(it.kind, it.num_bytes) for it in log] == [("send", 4 * NUMEL)] * 5
    # 1e-9: times of day are large doubles.
    assert all(later.started_s >= it.started_s + cost_s - 1e-9 for it, later in pairwise(log))
    assert all(it.done_s >= it.started_s + cost_s + HOP_S - 1e-9 for it in log)
    # Latencies in series would be 5 * 0.3 s; half of what lies between is left to a busy machine.
    assert log[-1].done_s - log[0].launched_s < 5 * cost_s + HOP_S + 2 * HOP_S


@pytest.mark.deep
def test_a_short_message_does_not_wait_for_a_long_one_of_another_sender(receives: Receives) -> None:
    long = receives.post(lambda: Message(1).come(), [torch.zeros(50 * NUMEL)], source=1)  # for 2 s
    post(receives, Message(2).come()).wait()
    assert not long.is_completed()
    long.wait()


def test_gloo_has_a_message_when_those_before_it_have_left(link: EmulatedLink) -> None:
    sends, begun_s = Sends(link, rank=0), list[float]()

    def start() -> Message:
        begun_s.append(time.perf_counter())
        return Message(1).come()

    posted_s = time.perf_counter()
    works = [sends.post(start, [torch.zeros(NUMEL)]) for _ in range(3)]
    for work in works:
        work.wait()
    sends.close(time.perf_counter() + 10.0)
    cost_s = 4 * NUMEL / 1e6
    assert all(begun >= posted_s + number * cost_s for number, begun in enumerate(begun_s))


def test_an_error_of_a_send_reaches_whoever_waits(link: EmulatedLink) -> None:
    def fail() -> Message:
        raise RuntimeError("no such peer")

    sends = Sends(link, rank=0)
    work = sends.post(fail, [torch.zeros(NUMEL)])
    with pytest.raises(RuntimeError, match="no such peer"):
        work.wait()
    sends.close(time.perf_counter() + 10.0)


@pytest.mark.deep
def test_a_late_sender_does_not_keep_the_others(receives: Receives) -> None:
    late = Message(1)
    waits, comes = post(receives, late), post(receives, Message(2).come())
    comes.wait()
    assert not waits.is_completed()
    late.come()
    waits.wait()


def test_messages_of_one_sender_are_done_as_they_were_posted(receives: Receives) -> None:
    first = Message(1)
    works = [post(receives, first), post(receives, Message(1).come())]
    assert not works[1].is_completed()
    first.come()
    works[1].wait()
    assert works[0].is_completed()


def test_a_receive_waits_for_what_else_is_on_the_link(link: EmulatedLink, receives: Receives) -> None:
    _, free_s = link.way_in.reserve(ready_s=time.perf_counter(), bytes_s=0.2)
    post(receives, Message(1).come()).wait()
    (transfer,) = link.drain_log()
    assert transfer.started_s >= free_s


def test_closing_waits_no_longer_than_it_may_for_a_message(receives: Receives) -> None:
    message = Message(1)
    work = post(receives, message)
    receives.close(time.perf_counter() + 0.01)
    assert not work.is_completed()
    message.come()  # or its thread would wait on


LINK = Link(name="slow", hop_s=1.0, bytes_per_s=10.0)


# The link and its bucket, and what is sent: when it is ready, how long its bytes take, its latency, and its stretch on the link.


@pytest.mark.parametrize(
    ("link", "burst_bytes", "sent"),
    [
        pytest.param(
            *(LINK, 0),
            [(100.0, 5.0, 0.0, (100.0, 105.0)), (101.0, 4.0, 1.0, (105.0, 110.0)), (120.0, 4.0, 1.0, (120.0, 125.0))],
            id="one thing after another",
        ),
        # It has rested since ever. Then as much passes at once as fits into the rest and into the bucket.
        *(
            pytest.param(
                *(LINK, 30),
                [(100.0, 5.0, 0.0, (100.0, 102.0)), (102.0 + rest_s, 5.0, 0.0, (102.0 + rest_s, 107.0 + rest_s - passes_s))],
                id=f"after a rest of {rest_s} s",
            )
            for rest_s, passes_s in ((0.0, 0.0), (1.0, 1.0), (3.0, 3.0), (4.0, 3.0), (50.0, 3.0))
        ),
        # Collectives that pass at once have their latencies one after another. Tokens for 3 s: 2 of them taken, 1 come, 2 taken,
        # 1 come; then 1 is lacking, and again.
        pytest.param(
            *(LINK, 30),
            [(100.0, 2.0, 1.0, stretch) for stretch in ((100.0, 101.0), (101.0, 102.0), (102.0, 104.0), (104.0, 106.0))],
            id="latencies in which the bucket fills",
        ),
    ],
)
def test_a_link_carries_one_thing_after_another_and_a_burst_after_a_rest(
    link: Link, burst_bytes: int, sent: list[tuple[float, float, float, tuple[float, float]]]
) -> None:
    way = EmulatedLink(link, burst_bytes=burst_bytes).way_in
    assert [way.reserve(ready_s=ready_s, bytes_s=bytes_s, latency_s=latency_s) for ready_s, bytes_s, latency_s, _ in sent] == [
        stretch for *_, stretch in sent
    ]
