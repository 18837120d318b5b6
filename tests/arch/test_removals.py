"""The table of removals on logical streams follows the source."""

import pytest

from mutants.streams import REMOVALS, Removal
from support.project import ROOT


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_removal_has_one_place_in_the_source(removal: Removal) -> None:
    text = (ROOT / "src" / "undertow" / removal.file).read_text()
    assert text.count(removal.before) == 1


def test_the_page_has_the_number_of_removals() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert f"| {len(REMOVALS)} removals of a wait" in page
    assert f"a test fails for {sum(not removal.why for removal in REMOVALS)} |" in page
