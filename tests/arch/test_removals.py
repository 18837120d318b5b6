"""The table of removals on logical streams follows the source."""

import pytest

from mutants.streams import REMOVALS, Removal
from support.project import ROOT


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_removal_has_one_place_in_the_source(removal: Removal) -> None:
    text = (ROOT / "src" / "undertow" / removal.file).read_text()
    assert text.count(removal.before) == 1


def test_the_page_has_the_number_of_removals() -> None:
    page = " ".join((ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8").split())
    num_found = sum(not removal.why for removal in REMOVALS)
    assert f"It has {len(REMOVALS)} removals now, and a test should fail for {num_found} of them." in page
