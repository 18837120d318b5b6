"""Measurements of one model in one run, all that planning and simulating need, and the files that
store them.

Profiles are written by `Profile.save` or by hand: every error names the field or the line.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError, one_of, require, suggestion
from undertow.foreign import as_float, parsed_json
from undertow.lab.cost import COLLECTIVES, CostCurve, MeasuredCosts
from undertow.plan import Groups, ParamSpec, Plan, Wires, plan_from_groups
from undertow.plan.layout import ITEMSIZES, MOST
from undertow.plan.plan import groups_from_json, wires_from_json
from undertow.schedule import strategy_named
from undertow.shipped import profile_path
from undertow.wire import AUTO, PARAM_WIRES, WIRES

__all__ = ["Profile", "profile_from_file", "profile_from_json"]

FORMAT_FIELD, FORMAT = "undertow_profile", 1  # the first entry of a file, and the format's version
_TIMES = ("forward_us", "backward_us", "update_us")
# The numbers, with the largest value that a simulation can use. All but `_TIMES` may be unknown.
NUMBERS = {
    **dict.fromkeys(_TIMES, math.inf),
    "step_us": math.inf,
    "launch_us": math.inf,
    "copy_us_per_mb": math.inf,
    # The fastest of a million ranks is 4.9 deviations below the mean: it must still take some time.
    "skew": 0.2,
    "contention": 0.99,
    "processors_us": math.inf,
    "network_us": math.inf,
}
_FORMATS = {"wire": (*WIRES, AUTO), "param_wire": PARAM_WIRES}
# the fields that are one value, in the order of a file
_SIMPLE = tuple(dict.fromkeys(("name", "num_ranks", *_TIMES, "strategy", *_FORMATS, *NUMBERS)))
_REQUIRED = (FORMAT_FIELD, "forward_us", "backward_us", "params")
FIELDS = (FORMAT_FIELD, *_SIMPLE, "params", "costs", "buckets", "wires")
PARAM_FIELDS = ("name", "ready_us", "shape", "dtype", "device", "sparse", "whole")
_REMEDY = "The command `undertow docs profiles` shows the format and an example."
_NO_FILE = (
    "Give a file that save_profile() has written, or the example gpt2. `undertow docs profiles` "
    "shows the format."
)
_ROUNDING_US = 1.0  # two times of a step may disagree by this much, as each is rounded separately


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step of a model without its communication, and the cost of communication in the run that
    measured it; microseconds.

    A step is forward, backward, and the update with everything else until the next forward.
    Gradients become ready at `ready_us` since backward began, the latest time of all ranks. A
    gradient that never arrives is sent with the last bucket, when backward ends. Raises ConfigError
    for values that do not fit together.

    ```python
    profile = profile_from_file("profile.json")
    plan = WhatIf.of(profile, num_ranks=64, link="25gbit").planned
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
    wire: str | None = None  # the setting of the run: a format of gradients, or "auto"
    param_wire: str | None = None  # the format of gathered parameters in the run
    groups: Groups | None = None  # the buckets of the run
    wires: Wires | None = None  # their formats; None: all in full width
    step_us: float | None = None  # measured time of the whole step
    launch_us: float | None = None  # computing time of a rank per collective
    copy_us_per_mb: float | None = None  # computing time of a rank to fill a bucket
    skew: float | None = None  # standard deviation of computing times between ranks, relative
    # share of its speed that computation loses while the network works
    contention: float | None = None
    processors_us: float | None = None  # time that packing and copying add to the step
    network_us: float | None = None  # time that waiting for the network adds

    def __post_init__(self) -> None:
        for name, most in NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name in _TIMES:
                _require_number(value, name, most=most)
        _require(isinstance(self.name, str), "name", "a text", self.name)
        is_whole = type(self.num_ranks) is int and 1 <= self.num_ranks <= MOST
        _require(is_whole, "num_ranks", "a whole number, 1 or more", self.num_ranks)
        require(
            len(self.ready_us) == len(self.params),
            f"ready_us must have a time for each of {len(self.params)} parameters, got "
            f"{len(self.ready_us)}.",
            remedy="Give a ready time for each parameter, in the order of registration.",
        )
        names: set[str] = set()
        for index, (spec, ready_us) in enumerate(zip(self.params, self.ready_us, strict=True)):
            path = f"params[{index}] ({spec.name!r})"
            _require_number(ready_us, f"ready_us of {path}")
            require(
                ready_us <= self.backward_us + _ROUNDING_US,
                f"ready_us of {path} must not be after the end of backward, got {brief(ready_us)}.",
                where=f"backward_us is {brief(self.backward_us)}",
                remedy="Count from the beginning of backward; a gradient that never arrives "
                "has backward_us.",
            )
            require(
                spec.name not in names,
                f"the name of {path} must differ from the names before it.",
                remedy="Name each parameter once; a tied one has one name and one gradient.",
            )
            names.add(spec.name)
        for kind in self.curves:
            _require_known(kind, COLLECTIVES, "costs.")
        strategy_named(self.strategy)
        for name, formats in _FORMATS.items():
            value = getattr(self, name)
            require(
                value is None or value in formats,
                f"{name} {value} is unknown.",
                remedy=one_of(value, formats),
            )
        if self.wires is not None:
            wires_from_json([*self.wires], num_buckets=len(self.groups or ()))
        _ = self.plan  # raises ConfigError

    @property
    def is_measured(self) -> bool:
        """True if its times are of a run of several ranks, so that waiting and contention are part
        of them."""
        return self.num_ranks > 1 and bool(self.curves)

    @property
    def compute_us(self) -> float:
        """Time of a step without communication."""
        return self.forward_us + self.backward_us + self.update_us

    @property
    def is_bound_by_processors(self) -> bool:
        """True if communication took more time from processors than the network added, in the
        measured run."""
        return (self.processors_us or 0.0) > (self.network_us or 0.0)

    @property
    def is_of_one_size(self) -> bool:
        """True if messages of one size were measured, so that the costs of smaller ones are not
        known."""
        return not all(curve.is_enough for curve in self.curves.values())

    @property
    def used_us(self) -> tuple[float, ...]:
        """Estimated time at which forward first uses each parameter, in microseconds since forward
        began.

        The estimate assumes that forward runs through the layers in the reverse order of backward,
        with the same shares of time: the parameter that is ready last is used first.
        """
        shares = ((self.backward_us - ready) / (self.backward_us or 1.0) for ready in self.ready_us)
        return tuple(self.forward_us * min(max(share, 0.0), 1.0) for share in shares)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the parameters in the order they become ready.

        Ties in reverse order of registration.
        """
        return tuple(
            sorted(range(len(self.params)), key=lambda param: (self.ready_us[param], -param))
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the run, if its buckets are known."""
        if self.groups is None:
            return None
        return plan_from_groups(
            self.params, self.groups, num_ranks=self.num_ranks, wires=self.wires
        )

    def costs(self) -> MeasuredCosts:
        """Returns the measured costs of communication.

        They contain the coding of the formats of the run; with "auto" they were measured before
        it chose any.
        """
        wire = None if self.wire == AUTO else self.wire
        wires = {"all_reduce": wire, "reduce_scatter": wire, "all_gather": self.param_wire}
        return MeasuredCosts(self.curves, wires)

    def to_json(self) -> str:
        """Returns the file format of `undertow docs profiles`, with one line per parameter.

        `profile_from_json` reads it.
        """
        lines = [f'"{FORMAT_FIELD}": {FORMAT}']
        for name in _SIMPLE:
            value = getattr(self, name)
            if value is not None:
                lines.append(f'"{name}": {json.dumps(value)}')
        rows = [_row(spec, time) for spec, time in zip(self.params, self.ready_us, strict=True)]
        lines.append(f'"params": {_list_text(rows)}')
        if self.curves:
            points = {kind: curve.points for kind, curve in self.curves.items()}
            lines.append(f'"costs": {json.dumps(points)}')
        if self.groups is not None:
            lines.append(f'"buckets": {_list_text(self.groups)}')
        if self.wires is not None:
            lines.append(f'"wires": {json.dumps(self.wires)}')
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to `path`; `profile_from_file` reads it."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _require_number(value: object, name: str, *, most: float = math.inf) -> None:
    """Raises ConfigError unless the value is finite, not negative, and at most `most`."""
    limit = "zero or more" if math.isinf(most) else f"0 to {most}"
    is_possible = 0 <= as_float(value) <= min(most, 1e300)
    _require(is_possible, name, f"a number, {limit}", value)


def _row(spec: ParamSpec, ready_us: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": spec.name,
        "shape": spec.shape,
        "dtype": spec.dtype,
        "ready_us": ready_us,
    }
    if spec.device != "cpu":
        row["device"] = spec.device
    if spec.is_sparse:
        row["sparse"] = True
    if spec.is_whole:
        row["whole"] = True
    return row


def _list_text(values: Sequence[object]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(value)}" for value in values) + "\n  ]"


def profile_from_file(path: str | Path) -> Profile:
    """Reads the profile in the JSON file at `path`, or the example profile "gpt2".

    Raises ConfigError, naming the file and the field or line, if it cannot be read or is not a
    profile.

    ```python
    profile = profile_from_file("gpt2")
    ```
    """
    try:
        contents = profile_path(path).read_bytes()
    except OSError as error:
        where = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be read.", where=where, remedy=_NO_FILE) from error
    return profile_from_json(contents, str(path))


def profile_from_json(text: str | bytes, where: str) -> Profile:
    """Parses a profile from `text`.

    Raises ConfigError, naming its origin `where` and the field or line, if it is not a profile.
    """
    try:
        data = parsed_json(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON.", where=str(error), remedy=_REMEDY) from error
    try:
        return _profile(data)
    except ConfigError as error:
        raise ConfigError(f"{where} is not a profile.", where=str(error)) from error


def _profile(data: Any) -> Profile:
    fields = _object(data, "", FIELDS, _REQUIRED)
    version = fields.pop(FORMAT_FIELD)
    _require(version == FORMAT and type(version) is int, FORMAT_FIELD, FORMAT, version)
    rows = []
    for index, row in enumerate(_list(fields.pop("params"), "params")):
        rows.append(_object(row, f"params[{index}]", PARAM_FIELDS, ("name", "ready_us", "shape")))
    if "buckets" in fields:
        fields["groups"] = groups_from_json(fields.pop("buckets"))
    if "wires" in fields:
        fields["wires"] = tuple(_list(fields["wires"], "wires"))
    return Profile(
        params=tuple(_param(row, f"params[{index}]") for index, row in enumerate(rows)),
        ready_us=tuple(row["ready_us"] for row in rows),
        curves=_curves(fields.pop("costs", {})),
        **fields,
    )


def _param(row: Mapping[str, Any], path: str) -> ParamSpec:
    dtype = row.get("dtype", "float32")
    _require_known(dtype, ITEMSIZES, f"{path}.dtype ")
    shape = row["shape"]
    return ParamSpec(
        name=row["name"],
        shape=tuple(shape) if isinstance(shape, list) else (shape,),  # or the number of elements
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=row.get("device", "cpu"),
        is_sparse=row.get("sparse", False),
        is_whole=row.get("whole", False),
    )


def _curves(costs: Any) -> dict[str, CostCurve]:
    curves = {}
    for kind, points in _object(costs, "costs", COLLECTIVES).items():
        try:
            curves[kind] = CostCurve(points=tuple(_list(points, f"costs.{kind}")))
        except ConfigError as error:
            raise ConfigError(f"costs.{kind} is not a cost curve.", where=str(error)) from error
    return curves


def _object(
    data: Any,
    path: str,
    known: Collection[str],
    required: Collection[str] = (),
) -> dict[str, Any]:
    """Returns a copy of the fields of an object.

    Raises ConfigError for others than `known`, and without `required` ones.
    """
    _require(isinstance(data, dict), path or "a profile", "an object", data)
    prefix = f"{path}." if path else ""
    for name in data:
        _require_known(name, known, prefix)
    for name in required:
        require(name in data, f"{prefix}{name} is missing.", remedy=_REMEDY)
    return dict(data)


def _require_known(name: object, known: Collection[str], prefix: str) -> None:
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{prefix}{name} is unknown.", remedy=suggestion(name, known))


def _list(value: Any, path: str) -> list[Any]:
    _require(isinstance(value, list), path, "a list", value)
    return list(value)


def _require(holds: bool, path: str, expected: object, value: object) -> None:
    require(holds, f"{path} must be {expected}, got {brief(value)}.", remedy=_REMEDY)
