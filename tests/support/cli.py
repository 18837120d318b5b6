"""The commands `undertow plan` and `undertow simulate`: models for them, and what they answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from support.project import ROOT
from support.strategies import spec
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile
from undertow.lab.what_if import WhatIf
from undertow.schedule import STRATEGIES

EXAMPLE, MIB = ROOT / "examples" / "profiles" / "gpt2.json", 1024 * 1024
SMALL = Profile(
    name="small",
    params=(spec("stem", MIB), spec("body", 4 * MIB), spec("head.weight", 4 * MIB), spec("head.bias", 1000)),
    ready_us=(30_000, 20_000, 10_000, 10_000),
    forward_us=15_000,
    backward_us=30_000,
    update_us=1_000,
    num_ranks=4,
)
# 1 ms and 1 ns per byte; a ring of 4 ranks takes 6 hops and 1.5 times the bytes: 166.7 us a message and 12 Gb/s.
MEASURED = replace(SMALL, curves={"all_reduce": CostCurve(points=((1e6, 2e3), (1e7, 1.1e4), (1e8, 1.01e5)))})


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Undertow = Callable[..., Ended]  # the fixture of that name


def what_if(profile: Profile = SMALL, strategy: str = "ddp", *, num_ranks: int = 4, **options: Any) -> WhatIf:
    nodes = {"per_node": 2, "node_link": "100gbit,1us"} if strategy == "hybrid" else {}
    return WhatIf(
        profile=profile,
        strategy=STRATEGIES[strategy],
        num_ranks=num_ranks,
        **{"link": "10gbit,20us", **nodes, **options},
    )


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line.startswith("│")]
