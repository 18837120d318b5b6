"""What the part of the benchmark that times the planner is made of."""

from functools import partial

import pytest
from benchmarks.planner import busy_link, model_of

from undertow.plan import optimal_groups


@pytest.mark.slow
def test_twice_as_many_atoms_would_gain_little_where_most_is_to_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    # Random sizes and times, and a link on which gathers just fit under forward: docs/planning.md says 1.4 % at most.
    params, timing = model_of(300)
    solve = partial(optimal_groups, params, range(300), timing, busy_link(params), num_ranks=8, has_shards=True)
    coarse_us = solve().best_us
    monkeypatch.setattr("undertow.plan.optimal._MAX_ATOMS_WITH_SHARDS", 256)
    fine_us = solve().best_us
    assert fine_us < coarse_us <= 1.014 * fine_us
