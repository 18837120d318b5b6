"""Settings of `undertow run`, which travel to all its processes in environment variables."""

import json
from collections.abc import Iterable, Mapping
from reprlib import repr as brief
from typing import Any

from undertow.config import Outer, SyncConfig
from undertow.errors import require, require_known
from undertow.tracebacks import VARIABLE as TRACEBACK

RUN = "UNDERTOW_RUN"  # the folder for files, or empty
# The process that `undertow run` becomes, and a file that a process makes with its first wrapper.
MARK = "UNDERTOW_RUN_MARK"
TRACE = "UNDERTOW_TRACE"
_PREFIX = "UNDERTOW_"
_OUTER, _VARIABLE = "outer.", "UNDERTOW_OUTER"  # of names of single settings, and for all of them


def variables_of(assignments: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of settings given as "name=value".

    A setting of outer synchronization is given as "outer.every=30". Those that are not given keep
    the values of the variables in `environment`. Raises ConfigError for other texts.
    """
    variables = {}
    outer = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        require(
            equals,
            f"--set {name} gives no value.",
            remedy="Write --set name=value, without spaces.",
        )
        if name.startswith(_OUTER):
            outer[name.removeprefix(_OUTER)] = _value(value)
            continue
        require_known(
            [name], SyncConfig.__dataclass_fields__, "setting", where="undertow run --set"
        )
        variables[_PREFIX + name.upper()] = value
    if outer:
        text = variables.get(_VARIABLE, environment.get(_VARIABLE, "null"))
        others = _value(text, may_be_dict=True)
        require(
            others is None or isinstance(others, dict),
            f"the outer settings are {brief(others)}, which has no single ones to replace.",
            where=f"undertow run --set outer.NAME, {_VARIABLE}",
            remedy="Give them in JSON, as in UNDERTOW_OUTER='{\"every\": 30}', or leave them out.",
        )
        merged = {**(others or {}), **outer}
        Outer(**merged)
        variables[_VARIABLE] = json.dumps(merged)
    return variables


def settings_from(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that the variables UNDERTOW_<NAME> give.

    A value is JSON, or a text that stands for itself: UNDERTOW_BUCKET_CAP_MB=25,
    UNDERTOW_WIRE=bfloat16. Raises ConfigError for an unknown name, or a value that cannot
    work.
    """
    settings = {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in (RUN, MARK, TRACE, TRACEBACK):
            setting = name.removeprefix(_PREFIX).lower()
            is_outer = setting == "outer"
            settings[setting] = _value(environment[name], may_be_dict=is_outer)
    SyncConfig(**settings)
    return settings


def _value(text: str, *, may_be_dict: bool = False) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
    # a plan may be given as its text
    return text if isinstance(value, dict) and not may_be_dict else value
