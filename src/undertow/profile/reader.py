"""Reads profiles that `Profile.save` wrote or that are written by hand; every error names the field or the line."""

import difflib
import json
import math
from collections.abc import Collection
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.cost import COLLECTIVES, CostCurve
from undertow.errors import ConfigError
from undertow.foreign import parsed_json
from undertow.plan import GroupEntry, ParamSpec, Piece, Plan
from undertow.plan.layout import ITEMSIZES
from undertow.plan.plan import member_from_json
from undertow.profile.profile import FORMAT, FORMAT_FIELD, Profile, checked_integer, checked_ready_us, checked_us

_REQUIRED = (FORMAT_FIELD, "forward_us", "backward_us", "params")
_TEXTS = ("name", "strategy")
_TIMES = ("forward_us", "backward_us", "update_us", "step_us")
FIELDS = (*_REQUIRED, *_TEXTS, "update_us", "step_us", "num_ranks", "costs", "buckets")
_TABLE_FIELDS = ("name", "shape", "bytes", "dtype", "device", "sparse")
PARAM_FIELDS = ("name", "ready_us", *_TABLE_FIELDS[1:])
_EXPECTED = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
_REMEDY = "docs/profiles.md has the format and an example."
_GIVEN_TWICE = object()  # replaces the value of a field that an object has more than once


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
        raise ConfigError(f"{where} is no profile.", where=str(error)) from error


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", where=error.strerror or str(error), remedy=_REMEDY) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no JSON.", where=str(error), remedy=_REMEDY) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return parsed_json(text, object_of=_object)
    except ValueError as error:
        place = str(error)
        if isinstance(error, json.JSONDecodeError):
            place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{where} is no JSON.", where=place, remedy=_REMEDY) from error


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
        given["num_ranks"] = checked_integer(fields["num_ranks"], "num_ranks", lowest=1)
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
        raise ConfigError(f"{path} is no cost curve.", where=str(error)) from error


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
    _checked(data, dict, path or "a profile")
    prefix = f"{path}." if path else ""
    for name in data:
        if name not in known:
            raise ConfigError(f"{prefix}{name} is unknown.", remedy=_suggestion(name, known))
        if data[name] is _GIVEN_TWICE:
            raise ConfigError(f"{prefix}{name} is given twice.", remedy="Leave one of the two out.")
    for name in required:
        if name not in data:
            raise ConfigError(f"{prefix}{name} is missing.", remedy=_REMEDY)
    return data


def _checked(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, _EXPECTED[kind], value)
    return value


def _wrong(path: str, expected: str, value: Any, *, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(f"{path} must be {expected}, got {brief(value)}.", remedy=remedy)


def _suggestion(name: Any, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
