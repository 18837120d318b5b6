"""Programs of training steps on a device of logical streams: those by name, and drawn ones.

`python -c "from support import drawn, streamed; drawn.main(SEED, 2, streamed.run)"` prints a smaller program that fails too.
"""

import pytest

from support.drawn import drawn
from support.examples import EXAMPLES
from support.ranks import in_ranks
from support.streamed import run

pytestmark = pytest.mark.deep
NUM_DRAWN = 12  # of two ranks, and a quarter as many of four: each takes seconds
NAMES = [name for name, it in EXAMPLES.items() if "array" not in it.events]  # which share memory of the host only
FEW = NAMES[::32]  # drawn programs combine what examples do, and all of them take minutes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        (num_ranks,) = metafunc.definition.get_closest_marker("in_ranks").args
        number = metafunc.config.getoption("--drawn", default=None) or NUM_DRAWN
        metafunc.parametrize("seed", range(number if num_ranks == 2 else number // 4))
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FEW)


@in_ranks(2)
def test_an_example_orders_its_streams(name: str) -> None:
    run(EXAMPLES[name])


@in_ranks(2)
def test_a_drawn_program_orders_its_streams(seed: int) -> None:
    run(drawn(seed, 2))


@in_ranks(4)
def test_a_drawn_program_of_four_ranks_orders_its_streams(seed: int) -> None:
    run(drawn(seed, 4))
