"""How many bytes collectives are handed, whoever calls them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from undertow.runtime.private_counting import CollectiveBytes


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_counting_in_another_thread_leaves_no_mode_behind() -> None:
    # torch notes for the whole process that there are modes: one would be left of what ends while another thread counts.
    counting = CollectiveBytes()
    with ThreadPoolExecutor(1) as threads:
        with Looking():
            threads.submit(counting.__enter__).result()
        threads.submit(counting.__exit__, None, None, None).result()
    assert not is_in_torch_dispatch_mode()


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    """What collectives are handed does not depend on how many ranks there are."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_callback_put_on_a_future_while_collectives_are_counted_counts_wherever_it_runs() -> None:
    future, done = torch.futures.Future[int](), torch.futures.Future[int]()
    done.set_result(1)
    with CollectiveBytes() as counting:
        dist.all_reduce(torch.ones(3))
        torch.ones(100).add_(1)
        dist.all_gather([torch.ones(5)], torch.ones(5))
        after = future.then(lambda _: dist.all_reduce(torch.ones(7)))
    dist.all_reduce(torch.ones(11))  # outside: somebody else's
    untouched = future.then(lambda _: dist.all_reduce(torch.ones(13)))
    assert counting.num_bytes == 4 * (3 + 5)
    with counting:
        done.then(lambda _: dist.all_reduce(torch.ones(17)))  # runs at once, and counts once
    assert counting.num_bytes == 4 * (3 + 5 + 17)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(future.set_result, 1)
    torch.futures.wait_all([after, untouched])
    assert counting.num_bytes == 4 * (3 + 5 + 17 + 7)
    with counting:
        functional.wait_tensor(functional.all_reduce(torch.ones(19), "sum", dist.group.WORLD))
    assert counting.num_bytes == 4 * (3 + 5 + 17 + 7 + 19)
