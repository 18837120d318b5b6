"""Programs of training steps on ranks in one process, with the results of the naive reference."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support import programs
from support.drawn import drawn
from support.examples import EXAMPLES
from support.one_process import ranks_of
from support.programs import run

# Two ranks on two threads change the same list of filters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward"),
    pytest.mark.filterwarnings("ignore:an optimizer steps on gradients that were not averaged"),
]


@pytest.fixture(autouse=True)
def _of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "allreduce_hook", mean_hook)
    monkeypatch.setattr(programs, "alone", contextlib.nullcontext)  # for a world of one rank


def mean_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Does what torch's allreduce_hook does."""
    mean = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(mean)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future


SEEDS = [(seed, num_ranks) for seed in range(30) for num_ranks in (2, 3)]


@pytest.mark.parametrize(("seed", "num_ranks"), [*SEEDS, *((seed, 1) for seed in range(6))])
def test_a_drawn_program_has_the_results_of_the_reference(seed: int, num_ranks: int) -> None:
    program = dataclasses.replace(drawn(seed, num_ranks), is_alone=num_ranks == 1)
    ranks_of(num_ranks, lambda _: run(program))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_results_of_the_reference(name: str) -> None:
    ranks_of(1 if EXAMPLES[name].is_alone else 2, lambda _: run(EXAMPLES[name]))
