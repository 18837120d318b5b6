"""A network link as two numbers, and the cost of ring collectives on it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from undertow.errors import ConfigError

# Share of the line rate that is payload: iperf3 over TCP on a link shaped to 1 Gb/s carries 956 Mb/s.
TCP_PAYLOAD_SHARE = 0.956
_ETHERNET_HOP_S = 100e-6
_BITS_PER_S = {"mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3}
_LINK_TEXT = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)(?P<rate_unit>mbit|gbit|tbit)(?:,(?P<latency>\d+(?:\.\d+)?)(?P<latency_unit>us|ms))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A full-duplex link of each rank to the network. Raises ConfigError for a bandwidth of zero or a negative latency."""

    name: str
    hop_s: float  # latency of one message between two ranks
    bytes_per_s: float  # payload, per direction; infinity for a link that costs nothing

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and math.isfinite(self.hop_s) and self.hop_s >= 0):
            raise ConfigError(
                f"link {self.name!r} is impossible: {self.bytes_per_s} bytes/s, {self.hop_s} s per hop.",
                remedy="Give a positive bandwidth and a latency of zero or more.",
            )

    @property
    def is_free(self) -> bool:
        """True if nothing that crosses this link takes time."""
        return math.isinf(self.bytes_per_s) and self.hop_s == 0


def link_from_text(text: str) -> Link:
    """Parses a link from `text`; the payload is 95.6 % of any rate.

    - "1gbit" or "200mbit": a rate, with the latency of Ethernet carrying TCP, 100 us.
    - "100gbit,5us" or "1gbit,20ms": a rate and another latency.
    - "none": a link that costs nothing.

    Raises ConfigError for any other text.
    """
    if text == "none":
        return Link(name="none", hop_s=0.0, bytes_per_s=math.inf)
    match = _LINK_TEXT.fullmatch(text)
    if match is None or float(match["rate"]) == 0:
        raise ConfigError(
            f"there is no link {text!r}.",
            remedy='Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as "100gbit,5us", '
            'or "none" for the bare loopback.',
        )
    line_rate = float(match["rate"]) * _BITS_PER_S[match["rate_unit"]] / 8
    hop_s = float(match["latency"]) * _SECONDS[match["latency_unit"]] if match["latency"] else _ETHERNET_HOP_S
    return Link(name=text, hop_s=hop_s, bytes_per_s=line_rate * TCP_PAYLOAD_SHARE)


# Ring algorithms over n ranks: (messages one after another, share of the payload that crosses each rank's link).
# Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005. The arithmetic of the
# reduction is left out, because the processor does it and not the link.
COLLECTIVES: Mapping[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "broadcast": lambda n: (math.ceil(math.log2(n)), 1.0),
    "reduce": lambda n: (math.ceil(math.log2(n)), 1.0),
    "gather": lambda n: (n - 1, (n - 1) / n),
    "scatter": lambda n: (n - 1, (n - 1) / n),
    "send": lambda n: (1, 1.0),
    "barrier": lambda n: (math.ceil(math.log2(n)), 0.0),
}


def collective_seconds(link: Link, kind: str, *, num_bytes: int, num_ranks: int) -> float:
    """Returns the seconds that one collective occupies the link; `num_bytes` is the whole payload."""
    if num_ranks == 1:
        return 0.0
    hops, share = COLLECTIVES[kind](num_ranks)
    return hops * link.hop_s + share * num_bytes / link.bytes_per_s
