"""Settings of `undertow run`, which travel to all its processes in environment variables."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import require

RUN, TRACE = "UNDERTOW_RUN", "UNDERTOW_TRACE"
_PREFIX = "UNDERTOW_"
_PLAN = "UNDERTOW_PLAN"
_NO_SETTINGS = (RUN, TRACE)


def variables_of(assignments: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables of settings given as "name=value"; raises ConfigError for other texts."""
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        require(
            equals,
            f"--set {name} gives no value.",
            where="undertow run",
            remedy="Write --set name=value, without spaces.",
        )
        variable = _PREFIX + name.strip().upper()
        require(
            variable not in _NO_SETTINGS,
            f"--set is for the fields of SyncConfig, and {variable} is a variable of `undertow run` itself.",
            where="undertow run --set",
            remedy="Set the variable in the environment, or give --out.",
        )
        variables[variable] = value
    return variables


def settings_from(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that the variables UNDERTOW_<NAME> give.

    A value is JSON, or a text that stands for itself: UNDERTOW_BUCKET_CAP_MB=25,
    UNDERTOW_WIRE_DTYPE=bfloat16. Raises ConfigError for an unknown name, or a value that cannot
    work.
    """
    settings = {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in _NO_SETTINGS:
            settings[name.removeprefix(_PREFIX).lower()] = _value(environment[name])
    SyncConfig(**settings)
    return settings


def _value(text: str) -> Any:
    if _is_plan(text):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def with_absolute_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that name files, as paths that hold in any folder."""
    paths = {}
    for name in (TRACE, _PLAN):
        text = environment.get(name, "")
        if text and not _is_plan(text):
            paths[name] = os.path.abspath(text)
    return paths


def _is_plan(text: str) -> bool:
    """Returns True for the text of a plan, which is given as it is instead of its path."""
    return text.lstrip().startswith("{")
