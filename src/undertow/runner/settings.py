"""Settings of `undertow run`, which travel to all its processes in environment variables."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from undertow.config import SyncConfig, settings_of_json
from undertow.errors import ConfigError, require

RUN, FILE, TRACE = "UNDERTOW_RUN", "UNDERTOW_CONFIG", "UNDERTOW_TRACE"
_PREFIX = "UNDERTOW_"
_NO_SETTINGS = {RUN, FILE, TRACE}


def variables_of(assignments: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables of settings given as "name=value"; raises ConfigError for a text without "="."""
    pairs = [assignment.partition("=") for assignment in assignments]
    for name, equals, _ in pairs:
        require(equals, f"--set {name} gives no value.", where="undertow run", remedy="Write --set name=value, without spaces.")
    variables = {_PREFIX + name.strip().upper(): value for name, _, value in pairs}
    require(
        not (internal := _NO_SETTINGS & set(variables)),
        f"--set is for the fields of SyncConfig, and {' '.join(internal)} is a variable of `undertow run` itself.",
        where="undertow run --set",
        remedy="Set the variable in the environment, or give --out.",
    )
    return variables


def settings_from(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that the variables UNDERTOW_<NAME> give, and before them the settings in the file UNDERTOW_CONFIG.

    A value is JSON, or a text that stands for itself: UNDERTOW_BUCKET_CAP_MB=25, UNDERTOW_WIRE_DTYPE=bfloat16.

    Raises:
        ConfigError: For an unknown name, a value that cannot work, or a file that cannot be read.
    """
    settings = _of_file(environment[FILE]) if environment.get(FILE) else {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in _NO_SETTINGS:
            settings[name.removeprefix(_PREFIX).lower()] = _value(environment[name])
    SyncConfig(**settings)
    return settings


def _value(text: str) -> Any:
    try:
        return text if text.lstrip().startswith("{") else json.loads(text)  # a plan is a text
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _of_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the settings cannot be read: {getattr(error, 'strerror', None) or error}.",
            where=f"{FILE}={path}",
            remedy="Give the path of a JSON object of settings by name, as SyncConfig(...).to_json() makes one.",
        ) from error
    given = settings_of_json(text)
    if isinstance(plan := given.get("plan"), str) and not plan.lstrip().startswith("{"):
        given["plan"] = os.path.join(os.path.dirname(path), plan)  # relative to the file
    return given


def with_absolute_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that name files, as paths that hold in any folder."""
    named = {name: environment[name] for name in (FILE, TRACE, f"{_PREFIX}PLAN") if environment.get(name)}
    return {name: text if text.lstrip().startswith("{") else os.path.abspath(text) for name, text in named.items()}
