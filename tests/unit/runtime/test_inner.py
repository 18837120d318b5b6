"""The user's optimizer over this rank's parts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from undertow.runtime import private
from undertow.runtime.inner import InnerOptimizer, Owned
from undertow.runtime.shards import ShardPart


def sixteen_bits() -> tuple[InnerOptimizer, Owned]:
    values = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    part = ShardPart(param=0, bucket=0, start=0, stop=64, in_bucket=0, in_shard=0)
    owned = Owned(part=part, values=values, target=values.float())
    return InnerOptimizer([owned], torch.optim.SGD([owned.target], lr=1e-3, momentum=0.9)), owned


def test_an_interrupted_update_of_sixteen_bits_loses_nothing() -> None:
    def interrupted(optimizer: torch.optim.Optimizer) -> None:
        step_unwatched(optimizer)
        raise KeyboardInterrupt

    step_unwatched = private.step_unwatched
    grad: Any = torch.full((64,), 0.5)
    (expected, whole), (actual, mine) = sixteen_bits(), sixteen_bits()
    for step in range(3):
        expected.step([{}], lambda _part: grad)
        if step == 1:
            with mock.patch.object(private, "step_unwatched", interrupted), pytest.raises(KeyboardInterrupt):
                actual.step([{}], lambda _part: grad)
        else:
            actual.step([{}], lambda _part: grad)
        assert torch.equal(mine.target, whole.target)
        assert torch.equal(mine.values, whole.target.bfloat16())
