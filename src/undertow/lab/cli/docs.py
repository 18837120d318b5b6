"""Implements `undertow docs`; needs no other package, so that every installation can read."""

import argparse
import os
import sys
from collections.abc import Sequence

from undertow.errors import ConfigError, require, suggestion
from undertow.shipped import page_title, pages


def show_docs(arguments: Sequence[str]) -> None:
    """Prints a page, or the list of all.

    Raises ConfigError for a name that is not a page's.
    """
    name = _parser().parse_args(arguments).name
    try:
        print(_list_text() if name is None else _page_text(name))
        sys.stdout.flush()
    except BrokenPipeError:  # a pager that has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _page_text(name: str) -> str:
    known = pages()
    name = name.removeprefix("docs/").removesuffix(".md")
    path = known.get(name)
    if path is None:
        raise ConfigError(
            f"there is no page {name!r}.",
            remedy=suggestion(name, known, instead="`undertow docs` lists all pages."),
        )
    return path.read_text(encoding="utf-8").rstrip("\n")


def _list_text() -> str:
    known = pages()
    require(
        known,
        "the pages are not installed.",
        remedy="Install Undertow again. In a checkout, they are in the folder docs.",
    )
    width = max(map(len, known))
    return "\n".join(f"{name:{width}}  {page_title(path)}" for name, path in known.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="undertow docs",
        description="Print a page of the documentation, as Markdown. Errors name pages: "
        "`undertow docs reliability`.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the page; without it, all pages are listed"
    )
    return parser
