"""Sentences of pages are short."""

import re
from pathlib import Path

import pytest

from support.project import DOCS, ROOT, name_of

MEAN_WORDS = 20.0
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|<!--.*?-->|\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"\s*(\||#|!!!|\?\?\?|:::|    options)|Contents: |[^a-z]*$")  # tables, headings, directives, formulas
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z0-9`*\"'(\[])|\n\n+|:\n+")


def _without_code(markdown: str) -> str:
    text = _CODE.sub(lambda code: "\n" * code[0].count("\n"), markdown)
    return re.sub(r"`[^`\n]*`", "`Code`", text)


def sentences(markdown: str) -> list[str]:
    """Returns the sentences of paragraphs and list items. Code counts as one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", _without_code(markdown))
    lines = []
    for line in text.splitlines():
        if _NOT_PROSE.match(line):
            lines.append("")
        elif _ITEM.match(line):
            lines += ["", _ITEM.sub("", line, count=1)]
        else:
            lines.append(line.strip())
    found = (" ".join(it.split()) for it in _END.split("\n".join(lines)))
    return [it for it in found if " " in it]


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_sentences_of_a_page_are_short_in_the_mean(page: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(words) / max(len(words), 1) <= MEAN_WORDS, "split its longest sentences"
