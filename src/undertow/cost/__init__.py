"""What communication costs: links, measured curves, and the time that collectives take on them."""

from undertow.cost.catalogue import PublishedNetwork, catalogue_names, published_network
from undertow.cost.costs import (
    Costs,
    HalvingDoublingCosts,
    HierarchicalCosts,
    MeasuredCosts,
    RingCosts,
    TransferredCosts,
)
from undertow.cost.curve import CostCurve, Line, curve_from_samples, line_through
from undertow.cost.link import COLLECTIVES, Link, collective_seconds, link_from_text
from undertow.cost.network import NODE_LINK, costs_for, link_from_curve

__all__ = [
    "COLLECTIVES",
    "NODE_LINK",
    "CostCurve",
    "Costs",
    "HalvingDoublingCosts",
    "HierarchicalCosts",
    "Line",
    "Link",
    "MeasuredCosts",
    "PublishedNetwork",
    "RingCosts",
    "TransferredCosts",
    "catalogue_names",
    "collective_seconds",
    "costs_for",
    "curve_from_samples",
    "line_through",
    "link_from_curve",
    "link_from_text",
    "published_network",
]
