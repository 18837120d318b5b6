"""The style of texts: phrases that a reader has to parse twice, and the length of sentences."""

import re
from pathlib import Path

# Each phrase has a plainer one that says the same. Questions, and "where" for a place, are left alone as far as they can be told.
PHRASES = re.compile(
    r"\bbut for\b|\bin place of\b|\botherwise than\b|\bas ever\b|\bto the bit\b|\bno affair\b|\bmakes of\b"
    r"|\b(that|those) of\b|\bof (ours|its own|their own)\b|\b[Oo]urs\b"
    r"|(?<!here )\b(is|are) (none|no) |\bno number\b|\bbehind\b"
    r"|\b(in|of|with) which\b(?! order)"
    r"|\b[Ww]hat (is|are|was|has|have|had|no|one|they|it|we|you|all|others|a|the|goes|comes|makes)\b(?=[^?]{0,200}[.;|\n]|[^?]*$)"
    r"|\b[Ww]hoever\b|^\s*(\"\"\"|#+ |- )?(Who|Whose|What|Of an?) (?!.*\?)"
    r"|\b(is|are) over\b(?! (the|a|an) )|\b(is|are) through\b|\bha(s|ve) come\b|\bgoes on\b|\bin silence\b"
    r"|(?<!# )\bWhere (no|a|one|it|they|this|there|all|nothing|something) |, where (no|a|one|it|they|this|all) ",
    re.MULTILINE,
)
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|<!--.*?-->|\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"\s*(\||#|!!!|\?\?\?|:::|    options)|Contents: |[^a-z]*$")  # tables, headings, directives, formulas
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z0-9`*\"'(\[])|\n\n+|:\n+")


def _without_code(markdown: str) -> str:
    text = _CODE.sub(lambda code: "\n" * code[0].count("\n"), markdown)
    return re.sub(r"`[^`\n]*`", "`Code`", text)


def phrases(path: Path) -> list[str]:
    """Returns the phrases of a file, each after the number of its line. The code of a page does not count."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = _without_code(text)
    return [f"{text.count(chr(10), 0, it.start()) + 1}: {it[0].strip()}" for it in PHRASES.finditer(text)]


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
