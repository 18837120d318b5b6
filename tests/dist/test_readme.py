"""The first snippets of the README run one behind the other, as a newcomer puts them into one script."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch.distributed as dist

from support.pages import snippets
from support.project import ROOT
from support.ranks import Ranks

CODES = [snippet.code for snippet in snippets(ROOT / "README.md") if snippet.mark == "two ranks"]


def one_script() -> str:
    """What it prints, on ranks that have met already."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(dist, "init_process_group", lambda _backend: None)
        names = {"__name__": "__main__"}
        exec("\n".join(CODES), names)
    names["sync"].close()
    return printed.getvalue()


def test_the_first_snippets_make_one_script(two_ranks: Ranks) -> None:
    assert len(CODES) == 3
    assert all("Where a step goes" in text for text in two_ranks.run(one_script))
