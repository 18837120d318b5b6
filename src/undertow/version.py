"""The version of this library, for modules that may not import all of it, and how versions compare."""

import re

__version__ = "0.1.0"


def is_older(version: str, than: str) -> bool:
    """Compares the first two numbers of versions."""
    first, second = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, than))
    return first < second
