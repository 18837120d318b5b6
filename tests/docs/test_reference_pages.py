"""The reference of docs/reference has every public name, and every one has something to say."""

import importlib
import inspect
import re

import pytest

from support.project import ROOT

MODULES = ["undertow", "undertow.plan", "undertow.cost", "undertow.profile", "undertow.simulate", "undertow.trace"]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_shown_once(module: str) -> None:
    public = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    shown = [name for name in SHOWN if name.rpartition(".")[0] == module and name not in [*MODULES, "undertow.errors"]]
    assert sorted(shown) == sorted(public)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_class_and_function_has_a_docstring(module: str) -> None:
    imported = importlib.import_module(module)
    public = {name: getattr(imported, name) for name in imported.__all__}
    # A dataclass without one is given its signature.
    without = [
        name
        for name, it in public.items()
        if (inspect.isclass(it) or inspect.isfunction(it)) and (not it.__doc__ or it.__doc__.startswith(f"{name}("))
    ]
    assert without == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == pages
