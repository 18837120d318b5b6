"""Links by name, and what collectives cost over one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.errors import refusal
from undertow.cost import COLLECTIVES, Link, collective_seconds, link_from_text

# One second per byte and a thousand per hop, so that a cost shows both parts.
PLAIN = Link(name="plain", hop_s=1000.0, bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "seconds"),
    [
        ("all_reduce", 2, 2 * 1000 + 12),
        ("all_reduce", 4, 6 * 1000 + 18),
        ("reduce_scatter", 4, 3 * 1000 + 9),
        ("all_gather", 4, 3 * 1000 + 9),
        ("all_to_all", 4, 3 * 1000 + 9),
        ("gather", 4, 3 * 1000 + 9),
        ("scatter", 4, 3 * 1000 + 9),
        ("broadcast", 4, 2 * 1000 + 12),
        ("broadcast", 5, 3 * 1000 + 12),
        ("reduce", 4, 2 * 1000 + 12),
        ("send", 4, 1 * 1000 + 12),
        ("barrier", 4, 2 * 1000),
        *((kind, 1, 0) for kind in sorted(COLLECTIVES)),
    ],
)
def test_cost_of_twelve_bytes(kind: str, num_ranks: int, seconds: float) -> None:
    assert collective_seconds(PLAIN, kind, num_bytes=12, num_ranks=num_ranks) == seconds


@pytest.mark.parametrize(
    ("text", "hop_s", "line_rate"),
    [
        ("1gbit", 100e-6, 125e6),
        ("5gbit", 100e-6, 625e6),
        ("2.5gbit", 100e-6, 312.5e6),
        ("200mbit", 100e-6, 25e6),
        ("0.1mbit", 100e-6, 12.5e3),
        ("1tbit", 100e-6, 125e9),
        ("100gbit,5us", 5e-6, 12.5e9),
        ("1gbit,20ms", 20e-3, 125e6),
        ("2.4tbit,1.5us", 1.5e-6, 300e9),
        ("1gbit,0us", 0.0, 125e6),
    ],
)
def test_a_rate_names_an_ethernet_link_and_may_have_a_latency(text: str, hop_s: float, line_rate: float) -> None:
    link = link_from_text(text)
    # Powers of ten are a rounding off.
    assert (link.name, link.hop_s, link.bytes_per_s) == (
        text,
        pytest.approx(hop_s, rel=1e-15),
        pytest.approx(line_rate * 0.956, rel=1e-15),
    )
    assert not link.is_free


def test_no_link_costs_nothing() -> None:
    link = link_from_text("none")
    assert link.is_free
    assert collective_seconds(link, "all_reduce", num_bytes=10**9, num_ranks=8) == 0
    assert not any(costly.is_free for costly in (PLAIN, replace(PLAIN, hop_s=0.0), replace(PLAIN, bytes_per_s=math.inf)))


NO_LINKS = ["", "1", "gbit", "1 gbit", "1Gbit", "-1gbit", "1gbits", "1.gbit", "1pbit", "0gbit", "0.0mbit", "1gbit\n"]
NO_LATENCIES = ["1gbit,", "1gbit,5", "1gbit,5s", "1gbit, 5us", "1gbit,-5us", "1gbit,us", "5us", "0gbit,5us", "none,5us"]


@pytest.mark.parametrize("text", [*NO_LINKS, *NO_LATENCIES])
def test_a_text_that_names_no_link_is_refused(text: str) -> None:
    assert refusal(lambda: link_from_text(text)) == (
        f'there is no link {text!r}.\n  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as '
        '"100gbit,5us", or "none" for the bare loopback.'
    )


@pytest.mark.parametrize(
    ("hop_s", "bytes_per_s"), [(0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0)]
)
def test_an_impossible_link_is_refused(hop_s: float, bytes_per_s: float) -> None:
    assert refusal(lambda: Link(name="odd", hop_s=hop_s, bytes_per_s=bytes_per_s)) == (
        f"link 'odd' is impossible: {bytes_per_s} bytes/s, {hop_s} s per hop.\n"
        "  Give a positive bandwidth and a latency of zero or more."
    )
