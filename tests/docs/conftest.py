"""The command `undertow`, called inside this process."""

from unit.conftest import undertow

__all__ = ["undertow"]
