"""Gradients that are not finite, and parameters that differ, on one rank: every rank says the same in that step."""

from __future__ import annotations

import pytest

from faults.conftest import Record
from faults.test_lost_ranks import WITHIN_S
from support.faults import FAULTY_STEP, Fault, outcomes

NONFINITE = """the gradient of 'last.bias' is infinite or no number on rank {faulty}.
  synchronisation {step}, bucket {bucket}
  No rank has taken the step. Look for what has overflowed there, or set nonfinite="skip"."""
DIFFERS = """parameter 'last.weight' has other values on rank {faulty} than on rank {others}.
  synchronisation {step}; 1 of 6 parameters differ
  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."""


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(num_ranks: int, record: Record) -> None:
    fault = Fault("overflows", "in_data", rank=num_ranks - 1, num_ranks=num_ranks, settings={"nonfinite": "raise"})
    found = outcomes(fault)
    text = NONFINITE.format(faulty=fault.rank, step=FAULTY_STEP, bucket=0)
    assert [(outcome.kind, outcome.text) for outcome in found] == [("NonFiniteGradient", text)] * num_ranks
    assert all(outcome.seconds < WITHIN_S for outcome in found)
    record("infinite gradient", found)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parameters_that_differ_are_named_on_all_ranks(num_ranks: int, record: Record) -> None:
    fault = Fault("writes", "in_data", rank=num_ranks - 1, num_ranks=num_ranks, settings={"check_replicas_every": 1})
    found = outcomes(fault)
    others = ", ".join(map(str, range(num_ranks - 1)))
    text = DIFFERS.format(faulty=fault.rank, others=others, step=FAULTY_STEP)
    assert [(outcome.kind, outcome.text) for outcome in found] == [("ReplicaMismatch", text)] * num_ranks
    assert all(outcome.seconds < WITHIN_S for outcome in found)
    record("parameters changed, check_replicas_every=1", found)
