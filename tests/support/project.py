"""The files of the project, for tests that read them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))
