"""How near a system has to come to the parameters of right steps."""

from __future__ import annotations

import pytest
import torch
from benchmarks.matrix.truth import Reference, bounds_of
from torch import Tensor


class Found:
    """A system that has come to these parameters."""

    def __init__(self, **found: Tensor) -> None:
        self._found = found

    def parameters(self) -> dict[str, Tensor]:
        return self._found


START, RIGHT = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)}  # steps are 2 long


def test_what_is_further_away_than_rounding_is_wrong() -> None:
    bounds = bounds_of(START, RIGHT, RIGHT)
    assert bounds["a"] == pytest.approx(2 * 5e-4, rel=1e-3)
    found = Found(a=RIGHT["a"] + torch.tensor([9e-4, 0, 0, 0]), b=RIGHT["b"] + torch.tensor([0, 0, 0, 2e-3]))
    reference = Reference(right=RIGHT, bounds=bounds)
    assert reference.wrong_parameters(found) == ["b"]
    assert reference.wrong_parameters(Found(a=RIGHT["a"])) == ["b"]


def test_a_model_that_amplifies_rounding_may_be_as_far_away_as_other_orders_of_a_sum_make_it() -> None:
    reordered = {"a": RIGHT["a"] + torch.tensor([0, 1e-3, 0, 0]), "b": RIGHT["b"]}
    bounds = bounds_of(START, RIGHT, reordered)
    assert bounds["a"] == pytest.approx(bounds["b"] + 4e-3, rel=1e-3)
