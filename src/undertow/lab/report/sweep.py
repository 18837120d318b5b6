"""Predicts the step of a model over links of many rates, in several formats.

A table and a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from undertow.errors import require
from undertow.lab.cost import link_from_text
from undertow.lab.report.timeline import drawn, save_themes
from undertow.lab.what_if import WhatIf
from undertow.shown import table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

RATES_GBIT = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_LATENCY_OF = "1gbit"  # without a link
_TITLE_GBIT = 1.0
# The formats by name, each with its color, as in the timeline.
_FORMATS = {
    "full width": (None, "#0072b2"),
    "bfloat16": ("bfloat16", "#e69f00"),
    "int8": ("int8", "#d55e00"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLink:
    """The time of a step by format."""

    gbit: float  # the rate of the link
    step_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The time of a step over links of many rates."""

    network: str
    compute_ms: float  # of a step without communication
    links: tuple[OverLink, ...]

    @property
    def takeaway(self) -> str:
        """Compares the formats over one link in a line."""
        (step_ms,) = (link.step_ms for link in self.links if link.gbit == _TITLE_GBIT)
        times = [f"{name} {time_ms:.0f}" for name, time_ms in step_ms.items()]
        times.append(f"computation {self.compute_ms:.0f}")
        return f"A step over {_TITLE_GBIT:g} Gb/s, in ms: {', '.join(times)}"


def swept(what_if: WhatIf) -> Sweep:
    """Simulates the planned buckets over every rate and in every format, with the latency of
    `what_if.link`. Gathered parameters have the format of gradients.

    Raises ConfigError for a single rank.
    """
    require(
        what_if.num_ranks > 1,
        "--sweep has no effect on a single rank: it sends nothing.",
        where="undertow simulate --sweep bandwidth",
        remedy="Give --ranks 2 or more.",
    )
    latency = f"{link_from_text(what_if.link or _LATENCY_OF).hop_s * 1e6:g}us"
    links = []
    for rate in RATES_GBIT:
        step_ms = {}
        for name, (wire, _) in _FORMATS.items():
            param_wire = None if what_if.strategy.gather is None else wire
            over_link = replace(
                what_if, link=f"{rate:g}gbit,{latency}", wire=wire, param_wire=param_wire
            )
            step_ms[name] = over_link.step(over_link.planned).step_us / 1e3
        links.append(OverLink(gbit=rate, step_ms=step_ms))
    return Sweep(
        network=replace(what_if, link=f"0.1 to 100 Gb/s, {latency} a message").network,
        compute_ms=what_if.compute_us / 1e3,
        links=tuple(links),
    )


def sweep_table(sweep: Sweep) -> Table:
    """Returns one row per rate, in milliseconds."""
    columns = {
        "gbit": ("link, Gb/s", "g"),
        **{name: (f"{name}, ms", ".1f") for name in _FORMATS},
        "alone": ("computation, ms", ".1f"),
    }
    rows = ({"gbit": link.gbit, "alone": sweep.compute_ms, **link.step_ms} for link in sweep.links)
    return table_of(columns, rows)


def save_sweep(sweep: Sweep, path: Path) -> None:
    """Writes a PNG with a line per format over the rate of the link, and another one for dark
    pages."""
    save_themes(lambda: _figure(sweep), path)


def _figure(sweep: Sweep) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    figure.suptitle(drawn(sweep.takeaway), x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    axes = figure.add_subplot()
    for name, (_, color) in _FORMATS.items():
        times_ms = [link.step_ms[name] for link in sweep.links]
        axes.plot(RATES_GBIT, times_ms, color=color, marker="o", ms=4, label=name)
    axes.axhline(sweep.compute_ms, color="#999999", linestyle="--", label="computation alone")
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(drawn(f"Gb/s of the link ({sweep.network})"), fontsize=9.5)
    axes.set_ylabel("milliseconds per step", fontsize=9.5)
    axes.grid(linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9.5)
    return figure
