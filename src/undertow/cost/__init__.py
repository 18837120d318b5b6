"""Models the cost of communication.

Links, measured curves, and the time that collectives take on them.
"""

from undertow.cost.costs import (
    COLLECTIVES,
    LINKS,
    NODE_LINK,
    CostCurve,
    Costs,
    Link,
    MeasuredCosts,
    NodeCosts,
    RingCosts,
    collective_seconds,
    costs_for,
    curve_from_samples,
    link_from_text,
)
from undertow.cost.formats import Payload, payloads_us

__all__ = [
    "COLLECTIVES",
    "LINKS",
    "NODE_LINK",
    "CostCurve",
    "Costs",
    "Link",
    "MeasuredCosts",
    "NodeCosts",
    "Payload",
    "RingCosts",
    "collective_seconds",
    "costs_for",
    "curve_from_samples",
    "link_from_text",
    "payloads_us",
]
