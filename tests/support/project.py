"""The files of the project, for tests that read them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
# The pages for readers. docs/matrix is the record of a run, outside of the navigation.
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "matrix")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))
