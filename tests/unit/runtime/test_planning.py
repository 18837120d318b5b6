"""Which plan a sharded optimizer moves to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.strategies import spec
from undertow import SyncConfig
from undertow.plan import first_plan
from undertow.runtime.planning import sharded_plan

UNWATCHED: Any = SimpleNamespace(order=None)


@pytest.mark.parametrize(("num_ranks", "split"), [(1, set()), (2, {"large"})])
def test_one_rank_alone_has_nobody_to_share_a_parameter_with(num_ranks: int, split: set[str]) -> None:
    config = SyncConfig(bucket_cap_mb=1e-3)
    params = [spec("large", 4096), spec("small", 8)]
    plan = sharded_plan(first_plan(params, config, num_ranks=num_ranks), UNWATCHED, None, config)
    assert {plan.params[index].name for index in plan.split_params} == split
