"""Predicts the step of a model over links of many rates, in several formats.

A table and a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.cost import link_from_text
from undertow.errors import require
from undertow.report.timeline import drawn, save_themes
from undertow.report.what_if import WhatIf

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

RATES_GBIT = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_LATENCY_OF = "1gbit"  # without a link
_TITLE_GBIT = 1.0
# The formats by name, each with its color, as in the timeline.
_FORMATS = {"full width": (None, "#0072b2"), "bfloat16": ("bfloat16", "#e69f00")}
_FORMATS |= {"int8": ("int8", "#d55e00")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The time of a step by format, for each of `RATES_GBIT`; microseconds."""

    compute_us: float  # of a step without communication
    steps_us: Mapping[str, tuple[float, ...]]
    network: str

    @property
    def takeaway(self) -> str:
        """Compares the formats over one link in a line."""
        at = RATES_GBIT.index(_TITLE_GBIT)
        times = [f"{name} {steps_us[at] / 1e3:.0f}" for name, steps_us in self.steps_us.items()]
        alone = f"computation {self.compute_us / 1e3:.0f}"
        return f"A step over {_TITLE_GBIT:g} Gb/s, in ms: {', '.join((*times, alone))}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values in milliseconds, ready for JSON."""
        rows = []
        for at, rate in enumerate(RATES_GBIT):
            times_ms = {name: steps_us[at] / 1e3 for name, steps_us in self.steps_us.items()}
            rows.append({"gbit": rate, "step_ms": times_ms})
        return {"compute_ms": self.compute_us / 1e3, "links": rows}


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
    hop_us = link_from_text(what_if.link or _LATENCY_OF).hop_s * 1e6
    latency = f"{hop_us:g}us"
    steps_us = {}
    for name, (wire, _) in _FORMATS.items():
        param_wire = None if what_if.strategy.gather is None else wire
        in_format = replace(what_if, wire=wire, param_wire=param_wire)
        times_us = []
        for rate in RATES_GBIT:
            over_link = replace(in_format, link=f"{rate:g}gbit,{latency}")
            times_us.append(over_link.step(name, over_link.planned).step_us)
        steps_us[name] = tuple(times_us)
    return Sweep(
        compute_us=what_if.compute_us,
        steps_us=steps_us,
        network=replace(what_if, link=f"0.1 to 100 Gb/s, {latency} a message").network,
    )


def sweep_table(sweep: Sweep) -> Table:
    """Returns one row per rate, in milliseconds."""
    from rich.table import Table

    table = Table(padding=0)
    for name in ("link, Gb/s", *(f"{name}, ms" for name in sweep.steps_us), "computation, ms"):
        table.add_column(name, justify="right")
    for at, rate in enumerate(RATES_GBIT):
        times_us = (*(steps_us[at] for steps_us in sweep.steps_us.values()), sweep.compute_us)
        table.add_row(f"{rate:g}", *(f"{time_us / 1e3:.1f}" for time_us in times_us))
    return table


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
    for name, steps_us in sweep.steps_us.items():
        times_ms = [step_us / 1e3 for step_us in steps_us]
        axes.plot(RATES_GBIT, times_ms, color=_FORMATS[name][1], marker="o", ms=4, label=name)
    axes.axhline(sweep.compute_us / 1e3, color="#999999", linestyle="--", label="computation alone")
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
