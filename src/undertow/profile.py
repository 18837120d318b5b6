"""Measurements of one model in one run, all that planning and simulating need, and the files that store them.

Profiles are written by `Profile.save` or by hand: every error names the field or the line.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from reprlib import repr as brief
from statistics import median_low
from typing import Any

from undertow.cost import COLLECTIVES, CostCurve, MeasuredCosts
from undertow.errors import ConfigError, require, suggestion
from undertow.foreign import as_float, parsed_json
from undertow.plan import GroupEntry, ParamSpec, Piece, Plan, StepTiming, plan_from_groups
from undertow.plan.layout import ITEMSIZES, MOST
from undertow.plan.plan import member_from_json, member_to_json
from undertow.schedule import strategy_named

__all__ = ["Profile", "profile_from_file", "profile_from_json"]

FORMAT_FIELD, FORMAT = "undertow_profile", 1  # the first entry of a file, and the version of the format
_REQUIRED = (FORMAT_FIELD, "backward_us", "params")
_TEXTS = ("name", "strategy")
_TIMES = ("forward_us", "backward_us", "update_us", "step_us")
# Of the run: a rank's computing time per collective and per megabyte of a bucket, the standard deviation of computing times
# between ranks, and of steps, both relative, the share of its speed that computation loses to communication, and the time that
# processors and the network add to a step.
EFFECTS = ("launch_us", "copy_us_per_mb", "skew", "spread", "contention", "processors_us", "network_us")
FIELDS = (*_REQUIRED, *_TEXTS, "forward_us", "update_us", "step_us", "num_ranks", *EFFECTS, "costs", "buckets")
_RENAMED = {"costs": "curves", "buckets": "groups"}  # fields of a file with another name in a Profile
_TABLE_FIELDS = ("name", "shape", "bytes", "dtype", "device", "sparse")
PARAM_FIELDS = ("name", "ready_us", *_TABLE_FIELDS[1:], "backward_us")  # all parameters have the last one, instead of ready_us
_LINE = ("alpha_us", "beta_us_per_mb")  # a cost curve that is a line
_EXPECTED = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
_REMEDY = "docs/profiles.md has the format and an example."
_GIVEN_TWICE = object()  # replaces the value of a field that an object has more than once
_MOST = {"skew": 0.2, "contention": 0.99}  # the largest values that a simulation can use
_ROUNDING_US = 1.0  # two times of one step may disagree by this much, because each is rounded separately


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step of a model without its communication, and the cost of communication in the run that measured it; microseconds.

    A step is forward, backward, and the update with everything else until the next forward. Gradients become ready at `ready_us`
    since backward began, the latest time of all ranks. A gradient that never arrives is sent with the last bucket, when backward
    ends. Raises ConfigError for values that do not fit together.

    ```python
    profile = profile_from_file("profile.json")
    choice = choose(profile.params, profile.order, profile.timing, profile.costs(), num_ranks=profile.num_ranks)
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
    launch_us: float | None = None  # computing time of a rank per collective
    copy_us_per_mb: float | None = None  # computing time of a rank to fill a bucket
    skew: float | None = None  # standard deviation of computing times between ranks, relative
    spread: float | None = None  # standard deviation between steps, relative
    contention: float | None = None  # share of its speed that computation loses while the network works
    processors_us: float | None = None  # time that packing and copying add to the step
    network_us: float | None = None  # time that waiting for the network adds
    is_forward_guessed: bool = False  # as half of backward

    def __post_init__(self) -> None:
        for name in (*_TIMES, *EFFECTS):
            if getattr(self, name) is not None or name in _TIMES[:-1]:
                _reader_of(name)(getattr(self, name), name)
        require(
            len(self.ready_us) == len(self.params),
            f"ready_us must have a time for each of {len(self.params)} parameters, got {len(self.ready_us)}.",
            remedy="Give a ready time for each parameter, in the order of registration.",
        )
        first_of: dict[str, int] = {}
        for index, (spec, time) in enumerate(zip(self.params, self.ready_us, strict=True)):
            _checked_ready_us(time, f"ready_us[{index}] ({spec.name!r})", backward_us=self.backward_us)
            first = first_of.setdefault(spec.name, index)
            if first != index:
                raise ConfigError(
                    f"params[{index}].name must differ from the name of params[{first}], got {spec.name!r}.",
                    remedy="Name each parameter once; a tied one has one name and one gradient.",
                )
        _checked_integer(self.num_ranks, "num_ranks", lowest=1)
        unknown = min(self.curves.keys() - COLLECTIVES.keys(), default=None)
        kinds = f"Kinds of collectives: {', '.join(COLLECTIVES)}."
        require(unknown is None, f"curves has the unknown kind {unknown!r}.", remedy=kinds)
        strategy_named(self.strategy)
        try:
            if self.groups is not None:
                plan_from_groups(self.params, self.groups, num_ranks=self.num_ranks)
        except (ConfigError, IndexError) as error:
            outside = f"they name one that is not among the {len(self.params)} parameters"
            reason = outside if isinstance(error, IndexError) else str(error)
            raise ConfigError("buckets, the groups of a profile, do not fit the parameters.", where=reason) from error

    @property
    def is_measured(self) -> bool:
        """True if its times are of a run of several ranks, so that waiting and contention are part of them."""
        return self.num_ranks > 1 and bool(self.curves)

    @property
    def is_bound_by_processors(self) -> bool:
        """True if communication took more time from processors than the network added, in the measured run."""
        return (self.processors_us or 0.0) > (self.network_us or 0.0)

    @property
    def is_of_one_size(self) -> bool:
        """True if messages of one size were measured, so that the costs of smaller ones are not known."""
        return not all(curve.is_enough for curve in self.curves.values())

    @property
    def used_us(self) -> tuple[float, ...]:
        """Estimated time at which forward first uses each parameter, in microseconds since forward began.

        The estimate assumes that forward runs through the layers in the reverse order of backward, with the same shares of time:
        the parameter that is ready last is used first.
        """
        shares = ((self.backward_us - ready) / (self.backward_us or 1.0) for ready in self.ready_us)
        return tuple(self.forward_us * min(max(share, 0.0), 1.0) for share in shares)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the parameters in the order they become ready; ties in reverse order of registration."""
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
            **{name: None if getattr(self, name) is None else _number(getattr(self, name)) for name in ("step_us", *EFFECTS)},
        }
        curves = {kind: json.dumps([[*map(_number, point)] for point in curve.points]) for kind, curve in self.curves.items()}
        of_lines = {
            "params": _list_text(map(_row, self.params, self.ready_us)),
            "costs": _object_text(curves, indent="  ").rstrip() if curves else None,
            "buckets": None if self.groups is None else _list_text([*map(member_to_json, group)] for group in self.groups),
        }
        texts = {name: json.dumps(value) for name, value in plain.items() if value is not None}
        return _object_text(texts | {name: text for name, text in of_lines.items() if text is not None})

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to `path`; `profile_from_file` reads it."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _checked_us(value: Any, path: str) -> float:
    """Returns `value` as a time in microseconds; raises ConfigError unless it is finite and not negative."""
    time_us, remedy = as_float(value), "A millisecond is 1000. NaN and infinity are not times."
    _require(0 <= time_us < math.inf, path, "a number of microseconds, zero or more", value, remedy=remedy)
    return time_us


def _checked_share(value: Any, path: str) -> float:
    """Returns `value` as a share; raises ConfigError unless it is finite, not negative, and not too large."""
    share, most = as_float(value), _MOST.get(path, math.inf)
    limit = "zero or more" if math.isinf(most) else f"0 to {most}"
    _require(0 <= share <= most and share < math.inf, path, f"a share, {limit}", value, remedy="0.05 is 5 %.")
    return share


def _reader_of(name: str) -> Callable[[Any, str], float]:
    return _checked_share if name in ("skew", "spread", "contention") else _checked_us


def _checked_ready_us(value: Any, path: str, *, backward_us: float) -> float:
    """Returns a gradient's ready time in microseconds since backward began; raises ConfigError if it is after backward ends."""
    ready_us = _checked_us(value, path)
    if ready_us > backward_us + _ROUNDING_US:
        raise ConfigError(
            f"{path} must not be after the end of backward, got {brief(value)}.",
            where=f"backward_us is {brief(backward_us)}",
            remedy="Count from the beginning of backward; a gradient that never comes has backward_us.",
        )
    return ready_us


def _checked_integer(value: Any, path: str, *, lowest: int) -> int:
    """Returns a whole number; raises ConfigError if it is less than `lowest` or does not fit into 64 bits."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
    remedy = f"Write a number such as {lowest}, without a decimal point or quotes."
    _require(is_whole, path, f"a whole number, {lowest} or more", value, remedy=remedy)
    require(value <= MOST, f"{path} is too large: {brief(value)}.", remedy=f"At most {MOST} can be counted.")
    return int(value)


def _row(spec: ParamSpec, ready_us: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": spec.name, "shape": spec.shape, "dtype": spec.dtype, "ready_us": _number(ready_us)}
    return row | ({"device": spec.device} if spec.device != "cpu" else {}) | ({"sparse": True} if spec.is_sparse else {})


def _object_text(entries: Mapping[str, str], indent: str = "") -> str:
    lines = ",\n".join(f"{indent}  {json.dumps(name)}: {value}" for name, value in entries.items())
    return f"{{\n{lines}\n{indent}}}\n"


def _list_text(values: Iterable[Any]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(value)}" for value in values) + "\n  ]"


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
    return _profile_of(_parsed(_contents(path), str(path)), str(path))


def profile_from_json(text: str, where: str) -> Profile:
    """Parses a profile from `text`.

    Raises ConfigError, naming its origin `where` and the field or line, if it is not a profile.
    """
    return _profile_of(_parsed(text, where), where)


def source_from_file(path: str | Path) -> Profile | Plan | tuple[ParamSpec, ...]:
    """Reads a profile, a saved plan or a table of parameters from a JSON file; raises ConfigError for other files."""
    contents = _contents(path)
    data = _parsed(contents, str(path))
    try:
        if isinstance(data, dict) and "buckets" in data and FORMAT_FIELD not in data:
            return Plan.from_json(contents.decode())
        if isinstance(data, dict) and data.keys() == {"params"}:
            rows = enumerate(_checked(_checked_object(data, "", ("params",))["params"], "params", kind=list))
            return tuple(_spec(row, f"params[{index}]", _TABLE_FIELDS, ("name",)) for index, row in rows)
    except ConfigError as error:
        raise ConfigError(f"{path} is neither a saved plan nor a table of parameters.", where=str(error)) from error
    return _profile_of(data, str(path))


def _profile_of(data: Any, where: str) -> Profile:
    try:
        return _profile(data)
    except ConfigError as error:
        raise ConfigError(f"{where} is not a profile.", where=str(error)) from error


def _contents(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", where=error.strerror or str(error), remedy=_REMEDY) from error


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return parsed_json(text, object_of=_object)
    except ValueError as error:
        place = (
            f"line {error.lineno}, column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        )
        raise ConfigError(f"{where} is not JSON.", where=place, remedy=_REMEDY) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    return {name: _GIVEN_TWICE if counts[name] > 1 else value for name, value in pairs}


def _profile(data: Any) -> Profile:
    fields = _checked_object(data, "", FIELDS, _REQUIRED)
    is_read = fields[FORMAT_FIELD] == FORMAT and not isinstance(fields[FORMAT_FIELD], bool)
    _require(is_read, FORMAT_FIELD, FORMAT, fields[FORMAT_FIELD])
    rows = _with_ready_times(_checked(fields["params"], "params", kind=list), backward_us=as_float(fields["backward_us"]))
    readers: dict[str, Callable[[Any, str], Any]] = {
        **dict.fromkeys(_TEXTS, partial(_checked, kind=str)),
        **{name: _reader_of(name) for name in (*_TIMES, *EFFECTS)},
        "num_ranks": partial(_checked_integer, lowest=1),
        "costs": _curves,
        "buckets": partial(_groups, num_params=len(rows)),
    }
    given = {_RENAMED.get(name, name): read(fields[name], name) for name, read in readers.items() if name in fields}
    params = tuple(_spec(row, f"params[{index}]", PARAM_FIELDS[:-1], ("name", "ready_us")) for index, row in enumerate(rows))
    ready_us = tuple(
        _checked_ready_us(row["ready_us"], f"params[{index}].ready_us", backward_us=given["backward_us"])
        for index, row in enumerate(rows)
    )
    guess = {} if "forward_us" in given else {"forward_us": given["backward_us"] / 2, "is_forward_guessed": True}
    return Profile(params=params, ready_us=ready_us, **given, **guess)


def _with_ready_times(rows: list[Any], *, backward_us: float) -> list[Any]:
    """Returns rows with ready times for rows with the time of each in backward, which runs from the last one to the first."""
    if not rows or not all(isinstance(row, dict) and "backward_us" in row and "ready_us" not in row for row in rows):
        return rows
    indices = range(len(rows))[::-1]
    ready_us = [*accumulate(_checked_us(rows[index]["backward_us"], f"params[{index}].backward_us") for index in indices)]
    is_within = not ready_us[-1] > backward_us + _ROUNDING_US  # a time that is not a number is refused elsewhere
    _require(is_within, "the sum of params[...].backward_us", f"at most backward_us, {brief(backward_us)}", ready_us[-1])
    timed = [{**rows[index], "ready_us": at} for index, at in zip(indices, ready_us, strict=True)]
    return [{name: value for name, value in row.items() if name != "backward_us"} for row in reversed(timed)]


def _spec(row: Any, path: str, known: Collection[str], required: Collection[str]) -> ParamSpec:
    fields = {"dtype": "float32", "device": "cpu", "sparse": False, **_checked_object(row, path, known, required)}
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise _wrong(f"{path}.dtype", f"one of {', '.join(ITEMSIZES)}", dtype, remedy=suggestion(dtype, ITEMSIZES))
    return ParamSpec(
        name=_checked(fields["name"], f"{path}.name", kind=str),
        shape=_shape(fields, path, ITEMSIZES[dtype]),
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=_checked(fields["device"], f"{path}.device", kind=str),
        is_sparse=_checked(fields["sparse"], f"{path}.sparse", kind=bool),
    )


def _shape(fields: dict[str, Any], path: str, itemsize: int) -> tuple[int, ...]:
    require(
        ("shape" in fields) != ("bytes" in fields),
        f"{path} must have either shape or bytes, got {'both' if 'shape' in fields else 'neither'}.",
        remedy='Write "shape": [64, 3, 7, 7], "shape": 9408 (elements) or "bytes": 37632.',
    )
    if "bytes" in fields:
        num_bytes = _checked_integer(fields["bytes"], f"{path}.bytes", lowest=0)
        _require(num_bytes % itemsize == 0, f"{path}.bytes", f"a multiple of the {itemsize} bytes of an element", num_bytes)
        return (num_bytes // itemsize,)
    given, path = fields["shape"], f"{path}.shape"
    sizes = {f"{path}[{dim}]": size for dim, size in enumerate(given)} if isinstance(given, list) else {path: given}
    shape = tuple(_checked_integer(size, path, lowest=0) for path, size in sizes.items())
    _checked_integer(math.prod(shape) * itemsize, f"{path}, in bytes,", lowest=0)
    return shape


def _curves(costs: Any, path: str) -> dict[str, CostCurve]:
    return {kind: _curve(points, f"{path}.{kind}") for kind, points in _checked_object(costs, path, COLLECTIVES).items()}


def _curve(points: Any, path: str) -> CostCurve:
    if isinstance(points, dict):
        alpha_us, beta_us = (_checked_us(_checked_object(points, path, _LINE, _LINE)[name], f"{path}.{name}") for name in _LINE)
        points = [[size, alpha_us + beta_us * size / 1e6] for size in (1, 1_000_000, 1_000_000_000)]
    times: dict[float, list[float]] = defaultdict(list)  # by size: repeated ones count once, at their median
    for index, row in enumerate(_checked(points, path, kind=list)):
        _require(isinstance(row, list) and len(row) == 2, f"{path}[{index}]", "[bytes, microseconds]", row)
        for position, number in enumerate(row):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            _require(is_number, f"{path}[{index}][{position}]", "a number", number)
        times[row[0]].append(row[1])
    try:
        # A median must not hide an impossible time: the curve refuses it.
        middles = {size: next((us for us in it if not 0 < us < math.inf), median_low(it)) for size, it in times.items()}
        return CostCurve(points=tuple(middles.items()))
    except ConfigError as error:
        raise ConfigError(f"{path} is not a cost curve.", where=str(error)) from error


def _groups(buckets: Any, path: str, *, num_params: int) -> tuple[tuple[GroupEntry, ...], ...]:
    rows = [_checked(row, f"{path}[{index}]", kind=list) for index, row in enumerate(_checked(buckets, path, kind=list))]
    groups = tuple(
        tuple(_member(value, f"{path}[{index}][{position}]", num_params) for position, value in enumerate(row))
        for index, row in enumerate(rows)
    )
    path_of: dict[GroupEntry, str] = {}
    for index, group in enumerate(groups):
        for position, member in enumerate(group):
            here = f"{path}[{index}][{position}]"
            first = path_of.setdefault(member, here)
            _require(isinstance(member, Piece) or first == here, here, f"of a parameter that {first} does not hold", member)
    return groups


def _member(value: Any, path: str, num_params: int) -> GroupEntry:
    try:
        member = member_from_json(value)
    except ValueError as error:
        raise _wrong(path, "a parameter's index or [index, first element, end]", value) from error
    is_one = (member.param if isinstance(member, Piece) else member) in range(num_params)
    _require(is_one, path, f"of one of the {num_params} parameters, counted from zero", value)
    return member


def _checked_object(data: Any, path: str, known: Collection[str], required: Collection[str] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = _checked(data, path or "a profile", kind=dict)
    prefix = f"{path}." if path else ""
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"{prefix}{name} is unknown.", remedy=suggestion(name, known))
        require(value is not _GIVEN_TWICE, f"{prefix}{name} is given twice.", remedy="Leave one of the two out.")
    missing = next((name for name in required if name not in fields), None)
    require(missing is None, f"{prefix}{missing} is missing.", remedy=_REMEDY)
    return fields


def _checked(value: Any, path: str, *, kind: type) -> Any:
    _require(isinstance(value, kind), path, _EXPECTED[kind], value)
    return value


def _require(holds: bool, path: str, expected: object, value: Any, *, remedy: str = _REMEDY) -> None:
    if not holds:
        raise _wrong(path, expected, value, remedy=remedy)


def _wrong(path: str, expected: object, value: Any, *, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(f"{path} must be {expected}, got {brief(value)}.", remedy=remedy)
