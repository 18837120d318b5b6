"""Implements `undertow docs`; needs no other package, so that every installation can read."""

import argparse
import inspect
import os
import pydoc
import re
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType

from undertow.errors import ConfigError, require, suggestion
from undertow.shipped import page_title, pages

# of mkdocstrings, with its options
_DIRECTIVE = re.compile(r"^::: (\S+)(?:\n .*)*", re.MULTILINE)


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
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return _DIRECTIVE.sub(_docstrings, text)


def _docstrings(directive: re.Match[str]) -> str:
    """Returns what the site has in place of a directive: signatures and docstrings of a name and,
    if it is a class, of its public members."""
    name = directive[1]
    return "\n\n".join(_entries(name, pydoc.locate(name)))


def _entries(name: str, documented: object) -> Iterator[str]:
    yield _entry(f"## {name}", documented)
    if not inspect.isclass(documented):
        return
    for member, value in vars(documented).items():
        if not member.startswith("_") and isinstance(value, (FunctionType, property)):
            yield _entry(f"### {name}.{member}", value)


def _entry(heading: str, documented: object) -> str:
    text = inspect.getdoc(documented) or ""
    if isinstance(documented, type | FunctionType):
        return f"{heading}\n\n    {inspect.signature(documented)}\n\n{text}"
    return f"{heading}\n\n{text}"  # a module, a property or an alias of a type


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
