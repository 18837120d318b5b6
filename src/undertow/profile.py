"""What was measured of one model in one run: all that planning and simulating need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from undertow.cost.curve import CostCurve
from undertow.plan import Member, ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step of a model, without its communication, and what communication took where it ran; microseconds.

    A step is forward, backward, and the update with all else until the next forward. Gradients become ready at `ready_us`
    since backward began, each at the latest of all ranks; none means that it never came.
    """

    params: tuple[ParamSpec, ...]  # in the order of registration
    ready_us: tuple[float, ...]  # by parameter
    forward_us: float
    backward_us: float
    update_us: float = 0.0
    name: str = ""
    num_ranks: int = 1  # of the run in which it was measured
    link: str | None = None  # that the run is known to have used, as `link_from_text` reads it
    curves: Mapping[str, CostCurve] = field(default_factory=dict)  # by kind of collective
    strategy: str = "ddp"
    groups: tuple[tuple[Member, ...], ...] | None = None  # the buckets under which it was measured
    step_us: float | None = None  # what the step took there

    @property
    def order(self) -> tuple[int, ...]:
        """Parameters as their gradients become ready; of equal ones the last registered first."""
        return tuple(sorted(range(len(self.params)), key=lambda param: (self.ready_us[param], -param)))

    @property
    def used_us(self) -> tuple[float, ...]:
        """By parameter, since the forward began: an estimate, for forward runs through the layers the other way round."""
        return tuple(self.forward_us * (1 - ready / self.backward_us) for ready in self.ready_us)
