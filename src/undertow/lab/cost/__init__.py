"""Models the cost of communication.

Links, measured curves, and the time that collectives take on them.
"""

from undertow.lab.cost.costs import (
    COLLECTIVES,
    Costs,
    MeasuredCosts,
    NodeCosts,
    RingCosts,
    collective_seconds,
    costs_for,
)
from undertow.lab.cost.curves import CostCurve, curve_from_samples
from undertow.lab.cost.links import LINKS, NODE_LINK, Link, link_from_text
from undertow.lab.cost.payloads import Payload, payloads_us

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
