"""Measurements of one model in one run: all that planning and simulating need."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.cost import COLLECTIVES, CostCurve, MeasuredCosts
from undertow.errors import ConfigError
from undertow.plan import GroupEntry, ParamSpec, StepTiming, plan_from_groups
from undertow.plan.layout import MOST
from undertow.plan.plan import member_to_json
from undertow.schedule import strategy_named

FORMAT_FIELD, FORMAT = "undertow_profile", 1  # the first entry of a file, and the version of the format
_ROUNDING_US = 1.0  # two times of one step may disagree by this much, because each is rounded separately


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step of a model without its communication, and the cost of communication in the run that measured it; microseconds.

    A step is forward, backward, and the update with everything else until the next forward. Gradients become ready at `ready_us`
    since backward began, the latest time of all ranks. A gradient that never arrives is sent with the last bucket, when backward
    ends. Raises ConfigError for values that do not fit together.

    ```python
    profile = profile_from_file("profile.json")
    optimum = optimal_groups(profile.params, profile.order, profile.timing, profile.costs(), num_ranks=profile.num_ranks)
    ```
    """

    params: tuple[ParamSpec, ...]  # in order of registration
    ready_us: tuple[float, ...]  # by parameter
    forward_us: float
    backward_us: float
    update_us: float = 0.0
    name: str = ""
    num_ranks: int = 1  # of the run that measured it
    curves: Mapping[str, CostCurve] = field(default_factory=dict)  # by kind of collective
    strategy: str = "ddp"
    groups: tuple[tuple[GroupEntry, ...], ...] | None = None  # the buckets under which it was measured
    step_us: float | None = None  # measured time of the whole step

    def __post_init__(self) -> None:
        for name in ("forward_us", "backward_us", "update_us", *(() if self.step_us is None else ("step_us",))):
            checked_us(getattr(self, name), name)
        if len(self.ready_us) != len(self.params):
            raise ConfigError(
                f"ready_us must have a time for each of {len(self.params)} parameters, got {len(self.ready_us)}.",
                remedy="Give a ready time for each parameter, in the order of registration.",
            )
        first_of: dict[str, int] = {}
        for index, (spec, time) in enumerate(zip(self.params, self.ready_us, strict=True)):
            checked_ready_us(time, f"ready_us[{index}] ({spec.name!r})", backward_us=self.backward_us)
            first = first_of.setdefault(spec.name, index)
            if first != index:
                raise ConfigError(
                    f"params[{index}].name must be another one than that of params[{first}], got {spec.name!r}.",
                    remedy="Name each parameter once; a tied one has one name and one gradient.",
                )
        checked_integer(self.num_ranks, "num_ranks", lowest=1)
        unknown = sorted(self.curves.keys() - COLLECTIVES.keys())
        if unknown:
            raise ConfigError(
                f"curves has the unknown kind {unknown[0]!r}.", remedy=f"Kinds of collectives: {', '.join(COLLECTIVES)}."
            )
        strategy_named(self.strategy)
        try:
            if self.groups is not None:
                plan_from_groups(self.params, self.groups, num_ranks=self.num_ranks)
        except (ConfigError, IndexError) as error:
            is_config = isinstance(error, ConfigError)
            reason = str(error) if is_config else f"they name one that is not among the {len(self.params)} parameters"
            raise ConfigError("buckets, the groups of a profile, do not fit the parameters.", where=reason) from error

    @property
    def used_us(self) -> tuple[float, ...]:
        """Estimated time at which forward first uses each parameter, in microseconds since forward began.

        The estimate assumes that forward runs through the layers in the reverse order of backward, with the same shares of time:
        the parameter that is ready last is used first.
        """
        if self.backward_us == 0:
            return (0.0,) * len(self.params)
        shares = ((self.backward_us - ready) / self.backward_us for ready in self.ready_us)
        return tuple(self.forward_us * min(max(share, 0.0), 1.0) for share in shares)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the parameters in the order in which they become ready; ties in reverse order of registration."""
        return tuple(sorted(range(len(self.params)), key=lambda param: (self.ready_us[param], -param)))

    @property
    def timing(self) -> StepTiming:
        """Times of a step for the planner, since forward began."""
        return StepTiming(
            ready_us=[self.forward_us + min(ready_us, self.backward_us) for ready_us in self.ready_us],
            backward_end_us=self.forward_us + self.backward_us,
            used_us=self.used_us,
        )

    def costs(self) -> MeasuredCosts:
        """Returns the measured costs of communication."""
        return MeasuredCosts(self.curves)

    def to_json(self) -> str:
        """Returns the file format of docs/profiles.md, with one line per parameter; `profile_from_json` reads it."""
        plain = {
            FORMAT_FIELD: FORMAT,
            "name": self.name,
            "num_ranks": self.num_ranks,
            "forward_us": _number(self.forward_us),
            "backward_us": _number(self.backward_us),
            "update_us": _number(self.update_us),
            "strategy": self.strategy,
            "step_us": None if self.step_us is None else _number(self.step_us),
        }
        entries = {name: json.dumps(value) for name, value in plain.items() if value is not None}
        entries["params"] = _list_text(map(_row, self.params, self.ready_us))
        if self.curves:
            curves = {kind: [[*map(_number, point)] for point in curve.points] for kind, curve in self.curves.items()}
            entries["costs"] = _object_text({kind: json.dumps(points) for kind, points in curves.items()}, indent="  ").rstrip()
        if self.groups is not None:
            entries["buckets"] = _list_text([*map(member_to_json, group)] for group in self.groups)
        return _object_text(entries)

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to `path`; `profile_from_file` reads it."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def checked_us(value: Any, field: str) -> float:
    """Returns `value` as a time in microseconds; raises ConfigError unless it is finite and not negative."""
    try:
        is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= float(value) < math.inf
    except OverflowError:  # an integer beyond all floats
        is_time = False
    if not is_time:
        raise ConfigError(
            f"{field} must be a number of microseconds, zero or more, got {brief(value)}.",
            remedy="A millisecond is 1000. NaN and infinity are no times.",
        )
    return float(value)


def checked_ready_us(value: Any, field: str, *, backward_us: float) -> float:
    """Returns a gradient's ready time in microseconds since backward began; raises ConfigError if it is after backward ends."""
    ready_us = checked_us(value, field)
    if ready_us > backward_us + _ROUNDING_US:
        raise ConfigError(
            f"{field} must not be behind the end of backward, got {brief(value)}.",
            where=f"backward_us is {brief(backward_us)}",
            remedy="Count from the beginning of backward; a gradient that never comes has backward_us.",
        )
    return ready_us


def checked_integer(value: Any, field: str, *, lowest: int) -> int:
    """Returns a whole number; raises ConfigError if it is less than `lowest` or does not fit into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(
            f"{field} must be a whole number, {lowest} or more, got {brief(value)}.",
            remedy=f"Write a number such as {lowest}, without a decimal point or quotes.",
        )
    if value > MOST:
        raise ConfigError(f"{field} is too large: {brief(value)}.", remedy=f"At most {MOST} can be counted.")
    return value


def _row(spec: ParamSpec, ready_us: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": spec.name, "shape": spec.shape, "dtype": spec.dtype, "ready_us": _number(ready_us)}
    return row | ({"device": spec.device} if spec.device != "cpu" else {}) | ({"sparse": True} if spec.is_sparse else {})


def _object_text(entries: Mapping[str, str], indent: str = "") -> str:
    lines = ",\n".join(f"{indent}  {json.dumps(name)}: {value}" for name, value in entries.items())
    return f"{{\n{lines}\n{indent}}}\n"


def _list_text(values: Iterable[Any]) -> str:
    lines = ",\n".join(f"    {json.dumps(value)}" for value in values)
    return f"[\n{lines}\n  ]"


def _number(value: float) -> float:
    """Returns a whole number as an integer: sizes and round times are easier to read."""
    return int(value) if float(value).is_integer() and value < 2**53 else value
