"""Sentences of pages are short, and the measures of style see what they should."""

from pathlib import Path

import pytest

from support.project import DOCS, ROOT, name_of
from support.style import phrases, sentences

MEAN_WORDS = 20.0


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_sentences_of_a_page_are_short_in_the_mean(page: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(words) / max(len(words), 1) <= MEAN_WORDS, "split its longest sentences"


@pytest.mark.parametrize(
    ("text", "num_phrases"),
    [
        ("The norm is that of all ranks.", 1),
        ("Gradients are sent in place of parameters, behind the forward.", 2),
        ("## Where a gradient goes\n", 0),
        ("`what is` and\n```\nbehind what is over\n```\n", 0),
    ],
)
def test_phrases_are_found_in_prose_only(text: str, num_phrases: int, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    assert len(phrases(tmp_path / "page.md")) == num_phrases


def test_sentences_are_split_at_ends_items_and_code() -> None:
    text = """# A title that does not count

One sentence. `Two` is short, as in [a link](there.md#that-is-long)! Contents follow:

- an item of a list
  that continues
- (another item)

| a table | of cells |

```python
print("No sentence at all.")
```
"""
    assert sentences(text) == [
        "One sentence.",
        "`Code` is short, as in a link!",
        "Contents follow",
        "an item of a list that continues",
        "(another item)",
    ]
