"""Programs of training steps against the naive reference: drawn at random, and the special cases by name.

A drawn program that fails is printed, and can be pasted into EXAMPLES with a name.
`python -c "from support.drawn import main; main(SEED, NUM_RANKS)"` prints a smaller one that fails too.
"""

import dataclasses

import pytest

from support.drawn import drawn
from support.examples import EXAMPLES, ON_THREE_RANKS
from support.programs import Program, run
from support.ranks import in_ranks


# Other programs than in unit/engine, which draws from the seeds below 30.
@pytest.mark.parametrize("seed", range(30, 42))
@in_ranks(2, 3, 4)
def test_a_drawn_program_has_the_results_of_the_reference(seed: int, num_ranks: int) -> None:
    run(drawn(seed, num_ranks))


@pytest.mark.deep  # unit/engine runs all of them in one process
@pytest.mark.parametrize("name", list(EXAMPLES)[::6])
@in_ranks(2)
def test_an_example_has_the_results_of_the_reference(name: str) -> None:
    run(EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THREE_RANKS)
@pytest.mark.parametrize("plan", ["default", "each"])
@in_ranks(3)
def test_an_example_has_them_on_three_ranks(name: str, plan: str) -> None:
    run(dataclasses.replace(EXAMPLES[name], plan=plan))


@in_ranks(4)
def test_rows_of_a_mesh_have_them() -> None:
    run(
        Program(
            strategy="hybrid",
            events="zero, forward 012|01, accumulate, forward 012|-|02|1, backward, step",
        )
    )
