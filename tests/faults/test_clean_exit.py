"""A script under torchrun ends well every time: no abort when the interpreter ends, once its results are right."""

from __future__ import annotations

import pytest

from support.elastic import losses_in, run_under_torchrun
from support.project import ROOT


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(3600)  # for as many as are asked for
def test_every_run_of_the_example_learns_and_ends_with_exit_code_0(request: pytest.FixtureRequest) -> None:
    num_runs = request.config.getoption("--exits", default=1)
    for run in range(num_runs):
        done = run_under_torchrun(ROOT / "examples" / "train.py", num_ranks=2, folder=ROOT)
        assert (done.exit_code, "Warning" in done.log) == (0, False), f"run {run} of {num_runs}: {done.log}"
        first, last = losses_in(done.out, 4)
        assert last < first
        assert "Where a step goes" in done.out
