"""Settings of `undertow run`, which travel to all its processes in environment variables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import require, require_known

RUN = "UNDERTOW_RUN"  # the folder for files, or empty
# The process that `undertow run` becomes, and a file that a process makes with its first wrapper.
MARK = "UNDERTOW_RUN_MARK"
TRACE = "UNDERTOW_TRACE"
_PREFIX = "UNDERTOW_"


def variables_of(assignments: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables of settings given as "name=value".

    Raises ConfigError for other texts.
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        require(
            equals,
            f"--set {name} gives no value.",
            where="undertow run",
            remedy="Write --set name=value, without spaces.",
        )
        require_known(
            [name], SyncConfig.__dataclass_fields__, "setting", where="undertow run --set"
        )
        variables[_PREFIX + name.upper()] = value
    return variables


def settings_from(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that the variables UNDERTOW_<NAME> give.

    A value is JSON, or a text that stands for itself: UNDERTOW_BUCKET_CAP_MB=25,
    UNDERTOW_WIRE_DTYPE=bfloat16. Raises ConfigError for an unknown name, or a value that cannot
    work.
    """
    settings = {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in (RUN, MARK, TRACE):
            settings[name.removeprefix(_PREFIX).lower()] = _value(environment[name])
    SyncConfig(**settings)
    return settings


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return text if isinstance(value, dict) else value  # a plan may be given as its text
