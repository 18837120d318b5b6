"""Refuses settings that do not exist, and leaves the signature of the settings as it is."""

import functools
from collections.abc import Callable, Mapping
from reprlib import repr as brief
from typing import Any, TypeVar

from undertow.errors import WrongType, require, require_known

_Settings = TypeVar("_Settings")


def with_known_settings(
    remedies: Mapping[str, str] | None = None,
) -> Callable[[type[_Settings]], type[_Settings]]:
    """Returns a decorator of a dataclass whose fields are settings.

    A setting that is not a field raises ConfigError with the field that it resembles, or its
    remedy. A setting without a name raises WrongType.

    The decorated `__init__` keeps its signature, so that `help`, notebooks and editors show every
    setting with its default.
    """

    def decorated(cls: type[_Settings]) -> type[_Settings]:
        # of the dataclass, which made it
        original: Callable[..., None] = vars(cls)["__init__"]
        known = list(vars(cls)["__dataclass_fields__"])

        @functools.wraps(original)
        def init(self: _Settings, *arguments: Any, **settings: Any) -> None:
            require(
                not arguments,
                f"settings are given by name, got {', '.join(map(brief, arguments))} without one.",
                where=cls.__name__,
                remedy=f"Write {cls.__name__}({known[0]}=...).",
                error=WrongType,
            )
            require_known(settings, known, "setting", where=cls.__name__, remedies=remedies)
            original(self, **settings)

        setattr(cls, "__init__", init)  # noqa: B010  # mypy takes an assignment for a mistake
        return cls

    return decorated
