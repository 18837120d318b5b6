"""Programs of training steps have the results of the naive reference: drawn ones, and the special cases by name.

One runner has three back ends: ranks that are threads of this process, ranks that are processes, and processes over a device
of logical streams. A drawn program that fails is printed, and can be pasted into EXAMPLES with a name.
`python -c "from programs.drawn import main; main(SEED, NUM_RANKS)"` prints a smaller one that fails on processes too; with
`from support import streamed` and `main(SEED, NUM_RANKS, streamed.run)` it is one that fails on streams.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from programs.drawn import drawn
from programs.examples import EXAMPLES, ON_THREE_RANKS
from support import programs, streamed
from support.levels import some
from support.one_process import ranks_of
from support.programs import Program, run
from support.ranks import RankPools, in_ranks

# Two ranks on two threads change the same list of filters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward"),
    pytest.mark.filterwarnings("ignore:an optimizer steps on gradients that were not averaged"),
]


def mean_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Does what torch's allreduce_hook does, over ranks that are threads."""
    mean = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(mean)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future


def on_threads(program: Program, num_ranks: int, _pools: RankPools | None = None) -> None:
    # In a world of one rank that rank is a group of its own.
    with mock.patch.multiple(programs, allreduce_hook=mean_hook, alone=contextlib.nullcontext):
        ranks_of(num_ranks, lambda _: run(program))


def on_processes(program: Program, num_ranks: int, pools: RankPools) -> None:
    pools.of_size(num_ranks).run(run, program)


def on_streams(program: Program, num_ranks: int, pools: RankPools) -> None:
    pools.of_size(num_ranks).run(streamed.run, program)


BACK_ENDS: dict[str, Callable[[Program, int, RankPools], None]] = {
    "threads": on_threads,
    "processes": on_processes,
    "streams": on_streams,
}


def drawn_cases(num_streamed: int) -> list[Any]:
    """The back end, the seed and the number of ranks of each drawn program. Threads and processes run different ones.

    The seeds of processes are few in a row in which each strategy, plan, setting, event and kind of unit is met.
    """
    return [
        *some([("threads", seed, 2 + seed % 2) for seed in range(30)], most=8),
        *some([("threads", seed, 1) for seed in range(6)], most=1),
        *some([("processes", seed, 2 + place % 3) for place, seed in enumerate(range(28, 37))], most=2),
        *some([("streams", seed, 2) for seed in range(num_streamed)], most=0),
        *some([("streams", seed, 4) for seed in range(num_streamed // 4)], most=0),
    ]


def example_cases() -> list[Any]:
    """The back end and the name of each example. Drawn programs on processes and on streams combine what examples do."""
    on_devices = [name for name, it in EXAMPLES.items() if "array" not in it.events]  # arrays share memory of the host only
    return [
        *some([("threads", name) for name in EXAMPLES], most=24),
        *some([("processes", name) for name in list(EXAMPLES)[::24]], most=0),
        *some([("streams", name) for name in on_devices[::32]], most=0),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        num_streamed = metafunc.config.getoption("--drawn", default=None) or 7
        metafunc.parametrize(("back_end", "seed", "num_ranks"), drawn_cases(num_streamed))
    elif "back_end" in metafunc.fixturenames:
        metafunc.parametrize(("back_end", "name"), example_cases())


def test_a_drawn_program_has_the_results_of_the_reference(back_end: str, seed: int, num_ranks: int, pools: RankPools) -> None:
    program = dataclasses.replace(drawn(seed, num_ranks), is_alone=num_ranks == 1)
    BACK_ENDS[back_end](program, num_ranks, pools)


def test_an_example_has_the_results_of_the_reference(back_end: str, name: str, pools: RankPools) -> None:
    num_ranks = 1 if back_end == "threads" and EXAMPLES[name].is_alone else 2
    BACK_ENDS[back_end](EXAMPLES[name], num_ranks, pools)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "plan"), [(name, ("default", "each")[at % 2]) for at, name in enumerate(ON_THREE_RANKS)])
def test_an_example_has_them_on_three_ranks(name: str, plan: str) -> None:
    on_threads(dataclasses.replace(EXAMPLES[name], plan=plan), 3)


@in_ranks(4)
def test_rows_of_a_mesh_have_them() -> None:
    run(
        Program(
            strategy="hybrid",
            events="zero, forward 012|01, accumulate, forward 012|-|02|1, backward, step",
        )
    )
