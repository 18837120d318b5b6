"""The fields of an index, from any source: each has the type that saving gives it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from reprlib import repr as brief
from typing import Any, TypeAlias

from torch import Tensor

from undertow.foreign import as_float

_Test: TypeAlias = Callable[[Any], bool]
_FILE = re.compile(r"optimizer-(0|[1-9][0-9]{0,8})\.safetensors")


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is_order(value: object) -> bool:
    """Returns True for an order of axes."""
    is_list = isinstance(value, list) and all(type(axis) is int for axis in value)
    return is_list and sorted(value) == list(range(len(value)))  # type: ignore[arg-type, call-overload]


def _is_group(value: object) -> bool:
    return isinstance(value, dict) and _are(_is_text)(value.get("params"))


def _is_optimizer(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    axes = value.get("axes")
    return (
        _is_text(value.get("optimizer"))
        and _are(_is_group)(value.get("param_groups"))
        and isinstance(axes, dict)
        and all(map(_is_order, axes.values()))
    )


def _are_files(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(map(_FILE.fullmatch, value)) and all(map(_are(_is_text), value.values()))


def _is_outer(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    turns, due = value.get("turns"), value.get("due")
    counts = ("step", "num_forwards", "num_synchronizations")
    return (
        value.keys() == {*counts, "turns", "due"}
        and all(_is_number(value[name]) for name in counts)
        and (turns is None or (_are(_is_number)(turns) and len(turns) == 2 and turns[0] > 0))
        and _are(lambda step: step is None or _is_number(step))(due)
    )


def _is_axis(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, size = value
    return _is_text(name) and _is_number(size) and size > 0


_OF_SAVE: Mapping[str, _Test] = {"save": _is_text, "saved_ns": _is_number}
_OF_MESH: Mapping[str, _Test] = {"axes": _are(_is_axis), "places": _are(_is_object)}
_FIELDS: Mapping[str, _Test] = {
    "extra_states": _is_object,
    "files": _are_files,
    "optimizers": _are(_is_optimizer),
}
_OF_OUTER: Mapping[str, _Test] = {
    "outer": _is_outer,
    "num_replicas": lambda value: _is_number(value) and value > 0,
    "writers": _are(_are(_is_number)),
}


def why_not_an_index(index: Mapping[str, Any]) -> str:
    """Returns the first field that saving cannot have written, in words, or nothing."""
    if "places" not in index:
        return _why_not(index, {**_OF_SAVE, **_fields_of(index)}, more={"format", "extra"})
    how = _why_not(index, {**_OF_SAVE, **_OF_MESH}, more={"format", "extra"})
    if how:
        return how
    if len(index["places"]) != math.prod(size for _, size in index["axes"]):
        return f"has {len(index['places'])} 'places' for the axes {brief(index['axes'])}"
    found = (_why_not(place, _fields_of(place)) for place in index["places"])
    return next(filter(None, found), "")


def _fields_of(index: Mapping[str, Any]) -> Mapping[str, _Test]:
    return {**_FIELDS, **(_OF_OUTER if "outer" in index else {})}


def _why_not(
    index: Mapping[str, Any], fields: Mapping[str, _Test], *, more: Collection[str] = ()
) -> str:
    for name, test in fields.items():
        if name not in index:
            return f"has no {name!r}"
        if not test(index[name]):
            return f"has a {name!r} that save_checkpoint does not write: {brief(index[name])}"
    for name in index.keys() - fields.keys() - {*more}:
        return f"has {brief(name)}, which save_checkpoint does not write"
    if "outer" in index and len(index["writers"]) != index["num_replicas"]:
        return f"has 'writers' of {len(index['writers'])} replicas, not {index['num_replicas']}"
    return ""


def is_setting_like(present: object, setting: object, *, name: str) -> bool:
    """Returns True if an optimizer whose setting is `present` can have saved this one.

    Numbers are finite, except one that the optimizer has too. `present` is None too if it has no
    such setting.
    """
    if isinstance(present, bool):
        return isinstance(setting, bool) or setting is None
    if isinstance(present, int | float | Tensor) or (present is None and name.endswith("lr")):
        is_same = isinstance(setting, float) and _is_same(present, setting)
        return math.isfinite(as_float(setting)) or is_same or setting is present is None
    if isinstance(present, list | tuple):
        if not isinstance(setting, list) or len(setting) != len(present):
            return False
        pairs = zip(present, setting, strict=True)
        return all(is_setting_like(each, other, name="") for each, other in pairs)
    if isinstance(present, str):
        return isinstance(setting, str)
    is_value = isinstance(setting, str | int | float | None)
    is_finite = not isinstance(setting, float) or math.isfinite(setting)
    return (is_value and is_finite) if present is None else type(setting) is type(present)


def _is_same(present: object, setting: float) -> bool:
    value = float(present) if isinstance(present, int | float | Tensor) else 0.0
    return value == setting or (math.isnan(value) and math.isnan(setting))
