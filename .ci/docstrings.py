"""An extension of griffe, the collector of mkdocstrings: gives fields docstrings.

mkdocs.yml names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, GriffeLoader, Module

_COMMENT = re.compile(r"  # (?!type:|noqa)(?P<text>.*)$")
_SETTING = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n {5,}.*)*)\n?", re.MULTILINE)


class FieldDocstrings(Extension):
    """A comment on its line, or `Args` of its class's docstring, describes a field."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_kwargs: Any) -> None:
        """Called with everything that is collected."""
        for cls in _classes(pkg):
            fields = {
                name: it
                for name, it in cls.members.items()
                if isinstance(it, Attribute) and "property" not in it.labels
            }
            for field in fields.values():
                comment = (
                    None
                    if field.has_docstring
                    else _COMMENT.search((field.source.splitlines() or [""])[0])
                )
                if comment is not None:
                    field.docstring = Docstring(_as_sentence(comment["text"]), parent=field)
            if any("dataclass" in str(decorator.value) for decorator in cls.decorators):
                _hand_down(cls, fields)
            else:  # what an object is made of is nobody's affair
                for name in [name for name, field in fields.items() if not field.has_docstring]:
                    del cls.members[name]


def _classes(parent: Module | Class) -> Iterator[Class]:
    for member in parent.members.values():
        if isinstance(member, Module | Class):
            yield from _classes(member)
        if isinstance(member, Class):
            yield member


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _hand_down(cls: Class, fields: dict[str, Attribute]) -> None:
    """Moves what the docstring of `cls` says of its fields to them."""

    def taken(setting: re.Match[str]) -> str:
        field = fields.get(setting["name"])
        if field is None:
            return setting[0]
        field.docstring = Docstring(
            _as_sentence(re.sub(r"\s+", " ", setting["text"])), parent=field
        )
        return ""

    if cls.docstring is not None:
        cls.docstring.value = re.sub(
            r"^Args:\n(?=\n|\Z)",
            "",
            _SETTING.sub(taken, cls.docstring.value),
            flags=re.MULTILINE,
        )
