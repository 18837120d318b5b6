"""Measurements of one model in one run, all that planning and simulating need, and the files that store them.

Profiles are written by `Profile.save` or by hand: every error names the field or the line.
"""

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.cost import COLLECTIVES, CostCurve, MeasuredCosts
from undertow.errors import ConfigError
from undertow.foreign import parsed_json
from undertow.plan import GroupEntry, ParamSpec, Piece, Plan, StepTiming, plan_from_groups
from undertow.plan.layout import ITEMSIZES, MOST
from undertow.plan.plan import member_from_json, member_to_json
from undertow.schedule import strategy_named

FORMAT_FIELD, FORMAT = "undertow_profile", 1  # the first entry of a file, and the version of the format
_REQUIRED = (FORMAT_FIELD, "forward_us", "backward_us", "params")
_TEXTS = ("name", "strategy")
_TIMES = ("forward_us", "backward_us", "update_us", "step_us")
FIELDS = (*_REQUIRED, *_TEXTS, "update_us", "step_us", "num_ranks", "costs", "buckets")
_TABLE_FIELDS = ("name", "shape", "bytes", "dtype", "device", "sparse")
PARAM_FIELDS = ("name", "ready_us", *_TABLE_FIELDS[1:])
_EXPECTED = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
_REMEDY = "docs/profiles.md has the format and an example."
_GIVEN_TWICE = object()  # replaces the value of a field that an object has more than once
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
                    f"params[{index}].name must differ from the name of params[{first}], got {spec.name!r}.",
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
            remedy="A millisecond is 1000. NaN and infinity are not times.",
        )
    return float(value)


def checked_ready_us(value: Any, field: str, *, backward_us: float) -> float:
    """Returns a gradient's ready time in microseconds since backward began; raises ConfigError if it is after backward ends."""
    ready_us = checked_us(value, field)
    if ready_us > backward_us + _ROUNDING_US:
        raise ConfigError(
            f"{field} must not be after the end of backward, got {brief(value)}.",
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


def profile_from_file(path: str | Path) -> Profile:
    """Reads the profile in the JSON file at `path`.

    Raises ConfigError, naming the file and the field or line, if it cannot be read or is not a profile.

    ```python
    profile = profile_from_file("examples/profiles/gpt2.json")
    ```
    """
    return profile_from_json(_text_of(path), str(path))


def profile_from_json(text: str, where: str) -> Profile:
    """Parses a profile from `text`.

    Raises ConfigError, naming its origin `where` and the field or line, if it is not a profile.
    """
    return _profile_of(_parsed(text, where), where)


def source_from_file(path: str | Path) -> Profile | Plan | tuple[ParamSpec, ...]:
    """Reads a profile, a saved plan or a table of parameters from a JSON file; raises ConfigError for other files."""
    text = _text_of(path)
    data = _parsed(text, str(path))
    try:
        if isinstance(data, dict) and "buckets" in data and FORMAT_FIELD not in data:
            return Plan.from_json(text)
        if isinstance(data, dict) and data.keys() == {"params"}:
            rows = enumerate(_checked(_checked_object(data, "", ("params",))["params"], list, "params"))
            return tuple(_spec(row, f"params[{index}]", _TABLE_FIELDS, ("name",)) for index, row in rows)
    except ConfigError as error:
        raise ConfigError(f"{path} is neither a saved plan nor a table of parameters.", where=str(error)) from error
    return _profile_of(data, str(path))


def _profile_of(data: Any, where: str) -> Profile:
    try:
        return _profile(data)
    except ConfigError as error:
        raise ConfigError(f"{where} is not a profile.", where=str(error)) from error


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", where=error.strerror or str(error), remedy=_REMEDY) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON.", where=str(error), remedy=_REMEDY) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return parsed_json(text, object_of=_object)
    except ValueError as error:
        place = str(error)
        if isinstance(error, json.JSONDecodeError):
            place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{where} is not JSON.", where=place, remedy=_REMEDY) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        fields[name] = _GIVEN_TWICE if name in fields else value
    return fields


def _profile(data: Any) -> Profile:
    fields = _checked_object(data, "", FIELDS, _REQUIRED)
    if fields[FORMAT_FIELD] != FORMAT or isinstance(fields[FORMAT_FIELD], bool):
        raise ConfigError(f"{FORMAT_FIELD} must be {FORMAT}, got {brief(fields[FORMAT_FIELD])}.", remedy=_REMEDY)
    rows = _checked(fields["params"], list, "params")
    given = {name: _checked(fields[name], str, name) for name in _TEXTS if name in fields}
    given |= {name: checked_us(fields[name], name) for name in _TIMES if name in fields}
    if "num_ranks" in fields:
        given["num_ranks"] = fields["num_ranks"]
    if "costs" in fields:
        costs = _checked_object(fields["costs"], "costs", tuple(COLLECTIVES))
        given["curves"] = {kind: _curve(points, f"costs.{kind}") for kind, points in costs.items()}
    if "buckets" in fields:
        given["groups"] = _groups(fields["buckets"], len(rows))
    params = tuple(_spec(row, f"params[{index}]", PARAM_FIELDS, ("name", "ready_us")) for index, row in enumerate(rows))
    ready_us = tuple(
        checked_ready_us(row["ready_us"], f"params[{index}].ready_us", backward_us=given["backward_us"])
        for index, row in enumerate(rows)
    )
    return Profile(params=params, ready_us=ready_us, **given)


def _spec(row: Any, path: str, known: Collection[str], required: Collection[str]) -> ParamSpec:
    fields = _checked_object(row, path, known, required)
    dtype = fields.get("dtype", "float32")
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise _wrong(f"{path}.dtype", f"one of {', '.join(ITEMSIZES)}", dtype, remedy=_suggestion(dtype, ITEMSIZES))
    return ParamSpec(
        name=_checked(fields["name"], str, f"{path}.name"),
        shape=_shape(fields, path, ITEMSIZES[dtype]),
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=_checked(fields.get("device", "cpu"), str, f"{path}.device"),
        is_sparse=_checked(fields.get("sparse", False), bool, f"{path}.sparse"),
    )


def _shape(fields: dict[str, Any], path: str, itemsize: int) -> tuple[int, ...]:
    if ("shape" in fields) == ("bytes" in fields):
        raise ConfigError(
            f"{path} must have either shape or bytes, got {'both' if 'shape' in fields else 'neither'}.",
            remedy='Write "shape": [64, 3, 7, 7], "shape": 9408 (elements) or "bytes": 37632.',
        )
    if "bytes" in fields:
        num_bytes = checked_integer(fields["bytes"], f"{path}.bytes", lowest=0)
        if num_bytes % itemsize:
            raise _wrong(f"{path}.bytes", f"a multiple of the {itemsize} bytes of an element", num_bytes)
        return (num_bytes // itemsize,)
    given = fields["shape"]
    if isinstance(given, list):
        shape = tuple(checked_integer(size, f"{path}.shape[{dim}]", lowest=0) for dim, size in enumerate(given))
    else:
        shape = (checked_integer(given, f"{path}.shape", lowest=0),)
    checked_integer(math.prod(shape) * itemsize, f"{path}.shape, in bytes,", lowest=0)
    return shape


def _curve(points: Any, path: str) -> CostCurve:
    rows = _checked(points, list, path)
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 2:
            raise _wrong(f"{path}[{index}]", "[bytes, microseconds]", row)
        for position, number in enumerate(row):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise _wrong(f"{path}[{index}][{position}]", "a number", number)
    try:
        return CostCurve(points=tuple((size, time) for size, time in rows))
    except ConfigError as error:
        raise ConfigError(f"{path} is not a cost curve.", where=str(error)) from error


def _groups(buckets: Any, num_params: int) -> tuple[tuple[GroupEntry, ...], ...]:
    rows = [_checked(members, list, f"buckets[{index}]") for index, members in enumerate(_checked(buckets, list, "buckets"))]
    groups: list[tuple[GroupEntry, ...]] = []
    path_of: dict[int, str] = {}  # of parameters that are in a bucket as a whole
    for index, members in enumerate(rows):
        paths = [f"buckets[{index}][{position}]" for position, _ in enumerate(members)]
        groups.append(tuple(_member(member, path, num_params) for member, path in zip(members, paths, strict=True)))
        for member, path in zip(groups[-1], paths, strict=True):
            if isinstance(member, int) and path_of.setdefault(member, path) != path:
                raise _wrong(path, f"of a parameter that {path_of[member]} does not hold", member)
    return tuple(groups)


def _member(value: Any, path: str, num_params: int) -> GroupEntry:
    try:
        member = member_from_json(value)
    except ValueError as error:
        raise _wrong(path, "a parameter's index or [index, first element, end]", value) from error
    if (member.param if isinstance(member, Piece) else member) not in range(num_params):
        raise _wrong(path, f"of one of the {num_params} parameters, counted from zero", value)
    return member


def _checked_object(data: Any, path: str, known: Collection[str], required: Collection[str] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = _checked(data, dict, path or "a profile")
    prefix = f"{path}." if path else ""
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"{prefix}{name} is unknown.", remedy=_suggestion(name, known))
        if value is _GIVEN_TWICE:
            raise ConfigError(f"{prefix}{name} is given twice.", remedy="Leave one of the two out.")
    for name in required:
        if name not in fields:
            raise ConfigError(f"{prefix}{name} is missing.", remedy=_REMEDY)
    return fields


def _checked(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, _EXPECTED[kind], value)
    return value


def _wrong(path: str, expected: str, value: Any, *, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(f"{path} must be {expected}, got {brief(value)}.", remedy=remedy)


def _suggestion(name: Any, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
