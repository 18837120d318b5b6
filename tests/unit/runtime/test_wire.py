"""When an emulated link is free, and what passes at once on one that is shaped by a token bucket."""

from __future__ import annotations

import math

import pytest

from undertow.cost import Link
from undertow.runtime.wire import Wire

LINK = Link(name="slow", hop_s=1.0, bytes_per_s=10.0)


NO_LINK = Link(name="none", hop_s=0.0, bytes_per_s=math.inf)
# The link and its bucket, and what is sent: when it is ready, how long its bytes take, its latency, and its stretch on the link.
STRETCHES: dict[str, tuple[Link, int, list[tuple[float, float, float, tuple[float, float]]]]] = {
    "one thing after another": (
        *(LINK, 0),
        [(100.0, 5.0, 0.0, (100.0, 105.0)), (101.0, 4.0, 1.0, (105.0, 110.0)), (120.0, 4.0, 1.0, (120.0, 125.0))],
    ),
    # It has rested since ever. Then as much passes at once as fits into the rest and into the bucket.
    **{
        f"after a rest of {rest_s} s": (
            *(LINK, 30),
            [(100.0, 5.0, 0.0, (100.0, 102.0)), (102.0 + rest_s, 5.0, 0.0, (102.0 + rest_s, 107.0 + rest_s - passes_s))],
        )
        for rest_s, passes_s in ((0.0, 0.0), (1.0, 1.0), (3.0, 3.0), (4.0, 3.0), (50.0, 3.0))
    },
    # A bucket that is not used up fills again and never beyond: at last a third of it is left.
    "often": (
        *(LINK, 30),
        [
            *[(100.0, 1.0, 0.0, (100.0, 100.0))] * 3,
            (100.0, 1.0, 0.0, (100.0, 101.0)),
            (103.0, 2.0, 0.0, (103.0, 103.0)),
            (103.0, 2.0, 0.0, (103.0, 105.0)),
            (200.0, 2.0, 0.0, (200.0, 200.0)),
            (200.0, 2.0, 0.0, (200.0, 201.0)),
        ],
    ),
    # Collectives that pass at once have their latencies one after another. Tokens for 3 s: 2 of them taken, 1 come, 2 taken,
    # 1 come; then 1 is lacking, and again.
    "latencies in which the bucket fills": (
        *(LINK, 30),
        [(100.0, 2.0, 1.0, stretch) for stretch in ((100.0, 101.0), (101.0, 102.0), (102.0, 104.0), (104.0, 106.0))],
    ),
    "a link that costs nothing has no bucket": (NO_LINK, 30, [(100.0, 0.0, 0.0, (100.0, 100.0))]),
}


@pytest.mark.parametrize(("link", "burst_bytes", "sent"), STRETCHES.values(), ids=STRETCHES)
def test_stretches_on_a_link(link: Link, burst_bytes: int, sent: list[tuple[float, float, float, tuple[float, float]]]) -> None:
    wire = Wire(link, burst_bytes=burst_bytes)
    found = [wire.reserve(ready_s=ready_s, bytes_s=bytes_s, latency_s=latency_s) for ready_s, bytes_s, latency_s, _ in sent]
    assert found == [stretch for *_, stretch in sent]
