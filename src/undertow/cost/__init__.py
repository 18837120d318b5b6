"""What communication costs: links and the time that collectives take on them."""

from undertow.cost.link import COLLECTIVES, Link, collective_seconds, link_from_text

__all__ = ["COLLECTIVES", "Link", "collective_seconds", "link_from_text"]
