"""Finds the files that come with the package: pages of the documentation, and example profiles.

In a checkout, `data` has links to the folders `docs` and `examples/profiles`.
"""

import re
from pathlib import Path

_DATA = Path(__file__).parent / "data"
_DOCS = _DATA / "docs"
_PROFILES = _DATA / "profiles"
# folders of the documentation
_SECTIONS = ("", "integrations", "migration", "reference", "design")


def pages() -> dict[str, Path]:
    """Returns the files of the documentation by name, such as "reliability" and
    "migration/torch-ddp"."""
    found = {}
    for section in _SECTIONS:
        for path in sorted((_DOCS / section).glob("*.md")):
            found[path.relative_to(_DOCS).with_suffix("").as_posix()] = path
    return found


def page_title(path: Path) -> str:
    """Returns the first heading of a page, or the name of its file if it has none."""
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return path.stem if heading is None else heading[1]


def profile_path(path: str | Path) -> Path:
    """Returns `path`, or the file of the example profile that it names, such as "gpt2", if it does
    not exist itself."""
    path = Path(path)
    example = _PROFILES / f"{path.name}.json"
    is_name = len(path.parts) == 1 and not path.exists()
    return example if is_name and example.exists() else path
