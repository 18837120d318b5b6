"""Links to the network: how many bytes per second, and how long a message takes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from undertow.errors import ConfigError

# NVLink 3 of an A100 carries 300 GB/s in each direction. NCCL's src/graph/tuning.cc has, for rings
# of its protocol Simple, 3.4 us of latency a hop over NVLink, and 5.7 us over PCI.
_NVLINK_LATENCY = "3us"
NODE_LINK = f"2400gbit,{_NVLINK_LATENCY}"
# Share of the line rate that is payload: iperf3 over TCP on a link shaped to 1 Gb/s carries 956
# Mb/s.
TCP_PAYLOAD_SHARE = 0.956
_ETHERNET_HOP_S = 100e-6
_UNITS = {"m": 1e6, "g": 1e9, "t": 1e12, "us": 1e-6, "ms": 1e-3}  # bits per second, and seconds
_OF_NVLINK = "latency of NCCL's tuning model, rounded"
# Fitted to a whole all-reduce with its launch: a wire alone has a fraction of that latency.
_OF_NETWORKS = (
    "nodes of 4 V100s: ddl-benchmarks, rate of fused rows of BERT, latency fitted to "
    "rows of a message per tensor"
)
# Links by name: their rate and latency as text, and where these are from.
LINKS: Mapping[str, tuple[str, str]] = {
    "nvlink2": (
        f"1200gbit,{_NVLINK_LATENCY}",
        f"V100: 6 links of 25 GB/s in each direction; {_OF_NVLINK}",
    ),
    "nvlink3": (NODE_LINK, f"A100: 12 links of 25 GB/s in each direction; {_OF_NVLINK}"),
    "nvlink4": (
        f"3600gbit,{_NVLINK_LATENCY}",
        f"H100: 18 links of 25 GB/s in each direction; {_OF_NVLINK}",
    ),
    "pcie3": (
        "40gbit,5.7us",
        "4 V100s of a node: ddl-benchmarks, fused rows of BERT; latency of NCCL's tuning model",
    ),
    "infiniband100": ("40gbit,58us", f"100 Gb/s InfiniBand; {_OF_NETWORKS}"),
    "tcp100": ("19gbit,72us", f"100 GbE with TCP; {_OF_NETWORKS}"),
    "tcp10": ("9.6gbit,57us", f"10 GbE with TCP; {_OF_NETWORKS}"),
}
_LINK_TEXT = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)(?P<rate_unit>[mMgGtT])(?:bits?(?:/s)?|bps|b/s|b[eE]?|BE)"
    r"(?:,(?P<latency>\d+(?:\.\d+)?)(?P<latency_unit>us|ms))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A full-duplex link of each rank to the network."""

    name: str
    hop_s: float  # latency of one message between two ranks
    bytes_per_s: float  # payload, per direction; infinity for a link that costs nothing


def link_from_text(text: str) -> Link:
    """Parses a link from `text`; the payload is 95.6 % of any rate.

    - "1gbit" or "200mbit": a rate, with the latency of Ethernet carrying TCP, 100 us.
    - "100gbit,5us" or "1gbit,20ms": a rate and another latency.
    - "none": a link that costs nothing.
    - The name of an entry of `LINKS`, such as "nvlink3".

    "25gbps", "25 Gb/s", "25 Gbit/s" and "25GbE" are other spellings of "25gbit". Raises ConfigError
    for any other text.
    """
    if text == "none":
        return Link(name="none", hop_s=0.0, bytes_per_s=math.inf)
    match = _LINK_TEXT.fullmatch(
        LINKS[text.lower()][0] if text.lower() in LINKS else text.replace(" ", "")
    )
    if match is None or float(match["rate"]) == 0:
        raise ConfigError(
            f"link {text!r} is not known.",
            remedy='Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency '
            'such as "100gbit,5us", '
            'or "none" for the bare loopback.',
        )
    line_rate = float(match["rate"]) * _UNITS[match["rate_unit"].lower()] / 8
    hop_s = (
        float(match["latency"]) * _UNITS[match["latency_unit"]]
        if match["latency"]
        else _ETHERNET_HOP_S
    )
    return Link(name=text, hop_s=hop_s, bytes_per_s=line_rate * TCP_PAYLOAD_SHARE)
