from __future__ import annotations

import pytest

from support.errors import refusal
from undertow.schedule import DDP, HYBRID, ZERO1, ZERO2, strategy_named


def test_a_strategy_is_found_by_its_name() -> None:
    assert [strategy_named(name) for name in (None, "ddp", "zero1", "zero2", "hybrid")] == [DDP, DDP, ZERO1, ZERO2, HYBRID]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("zero3", "Use torch.distributed.fsdp.fully_shard to shard parameters."),
        ("zero", "Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'."),
    ],
)
def test_another_strategy_is_refused_with_the_way_out(name: str, remedy: str) -> None:
    assert refusal(lambda: strategy_named(name)) == f"there is no strategy {name!r}.\n  strategy\n  {remedy}"
