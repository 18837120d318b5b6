"""Which versions of a framework are supported."""

import importlib.metadata

from undertow.errors import require
from undertow.version import is_older


def require_version(package: str, lowest: str) -> None:
    """Raises ConfigError if the installed version of `package` is below `lowest`, which has the form "2.4"."""
    found = importlib.metadata.version(package)
    require(
        not is_older(found, lowest),
        f"{package} {found} is not supported: {lowest} is the oldest version that is.",
        where=f"undertow.integrations.{package}",
        remedy=f"pip install '{package}>={lowest}'",
    )
