"""Sentences of pages are short."""

from pathlib import Path

import pytest

from support.project import DOCS, ROOT, name_of
from support.style import sentences

MEAN_WORDS = 20.0


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_sentences_of_a_page_are_short_in_the_mean(page: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(words) / max(len(words), 1) <= MEAN_WORDS, "split its longest sentences"
