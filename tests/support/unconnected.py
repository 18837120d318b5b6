"""Ranks of one process that nothing connects: they count what they send, and messages arrive when a test delivers them."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

ENDED = mock.Mock()  # work that no test waits for: it advances all ranks


class Network:
    """What ranks have sent and where they receive."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int], Tensor] = {}
        self.expected: dict[tuple[int, int, int], Tensor] = {}
        self.num_messages, self.num_bytes = Counter[int](), Counter[int]()

    def deliver(self) -> None:
        """Each message has its receive, of its size, and each receive its message."""
        assert self.sent.keys() == self.expected.keys()
        for key, tensor in self.sent.items():
            self.expected[key].copy_(tensor)
        self.sent.clear()
        self.expected.clear()


class Unconnected:
    """The group of one rank of a network, as a carrier uses it."""

    waiter = None  # works wait by themselves

    def __init__(self, network: Network, rank: int, num_ranks: int) -> None:
        self.network, self.rank, self.num_ranks = network, rank, num_ranks
        self.process_group, self.hardware = mock.Mock(), mock.Mock()
        self.peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]

    def worker(self, _name: str) -> Any:
        return mock.Mock()

    def send(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        self.network.sent[self.rank, peer, tag] = message.clone()
        self.network.num_messages[self.rank] += 1
        self.network.num_bytes[self.rank] += message.nbytes
        return ENDED

    def receive(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        self.network.expected[peer, self.rank, tag] = message
        return ENDED

    def send_each(self, parts: Sequence[Tensor], tag: int, over: object) -> list[Any]:
        return [self.send(parts[peer], peer, tag, over) for peer in self.peers if parts[peer].numel()]

    def receive_each(self, parts: Sequence[Tensor], tag: int, over: object) -> list[Any]:
        return [self.receive(parts[peer], peer, tag, over) for peer in self.peers if parts[peer].numel()]


class Tallied(Unconnected):
    """A rank that counts what it sends, and nothing arrives."""

    def send(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        self.network.num_messages[self.rank] += 1
        self.network.num_bytes[self.rank] += message.nbytes
        return ENDED

    def receive(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        return ENDED


class Worker:
    """Keeps its tasks until `advance` runs them."""

    def __init__(self) -> None:
        self.tasks = deque[Callable[[], object]]()

    def submit(self, task: Callable[..., object], *args: Any) -> None:
        self.tasks.append(partial(task, *args))

    def shutdown(self) -> None:
        pass


class Advanced(Unconnected):
    """A rank whose exchanges advance by a stage when all ranks do."""

    def __init__(self, network: Network, rank: int, num_ranks: int) -> None:
        super().__init__(network, rank, num_ranks)
        self.workers: list[Worker] = []

    def worker(self, _name: str) -> Any:
        self.workers.append(Worker())
        return self.workers[-1]


def advance(network: Network, groups: Sequence[Advanced]) -> int:
    """Runs all exchanges to their ends; returns the number of stages."""
    num_stages = 0
    while tasks := [task for group in groups for worker in group.workers for task in worker.tasks]:
        for group in groups:
            for worker in group.workers:
                worker.tasks.clear()
        for task in tasks:
            task()
        for key, message in network.sent.items():
            network.expected.pop(key).copy_(message)
        network.sent.clear()
        num_stages += 1
    assert not network.expected, "receives that no message came for"
    return num_stages
