"""Pages of the documentation, and the snippets in them that tests run."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

FENCE = re.compile(r"^(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Snippet:
    page: str
    section: str
    mark: str  # what stands in a comment above the fence
    language: str
    code: str
    line: int  # of the page, where the code begins


def titles(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        before = text[: fence.start("code")]
        yield Snippet(
            page=str(page),
            section=(titles(before) or [""])[-1],
            mark=fence["mark"] or "",
            language=fence["language"],
            code=fence["code"],
            line=before.count("\n") + 1,
        )


def execute(snippet: Snippet, **given: Any) -> dict[str, Any]:
    # As many empty lines in front as the page has: an error then points to its line there.
    code = compile("\n" * (snippet.line - 1) + snippet.code, snippet.page, "exec", dont_inherit=True)
    names = {"__name__": "__main__", **given}
    if dist.is_initialized():
        # On a rank of a test, whose group stays, a whole script neither makes the group nor destroys it.
        destroy: Callable[..., None] = dist.destroy_process_group
        with (
            patch.object(dist, "init_process_group", lambda _backend: None),
            patch.object(dist, "destroy_process_group", lambda group=None: destroy(group) if group is not None else None),
        ):
            exec(code, names)
    else:
        exec(code, names)
    return names
