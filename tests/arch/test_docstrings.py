"""Public docstrings have one format: the section `Args` describes every argument."""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest

import undertow
from support.project import ROOT

# Called by the library, by torch or by frameworks, not by users.
_NOT_FOR_USERS = {
    "GradientSync",  # `attach` makes it
    "OuterAxis",  # `outer_axis` makes it
    "DistributedDataParallel.forward",
    "DistributedDataParallel.join_hook",
    "ShardedOptimizer.begin_updates",
    "ShardedOptimizer.update",
}


def _documented():
    for name in undertow.__all__:
        member = getattr(undertow, name)
        yield name, member
        if inspect.isclass(member) and not issubclass(member, Exception):
            for method, function in vars(member).items():
                if not method.startswith("_") and inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))):
                    yield f"{name}.{method}", getattr(member, method)


def _arguments(member):
    if inspect.isclass(member) and issubclass(member, Exception):
        return set()
    named = inspect.signature(member).parameters.values()
    return {it.name for it in named if it.name != "self"} - {"settings"}  # the fields of SyncConfig


@pytest.mark.parametrize(("name", "member"), [pytest.param(*it, id=it[0]) for it in _documented()])
def test_the_docstring_describes_every_argument(name, member):
    described = re.findall(r"^ {4}(\w+): ", (inspect.getdoc(member) or "").partition("Args:\n")[2], re.MULTILINE)
    if name not in _NOT_FOR_USERS:
        assert set(described) >= _arguments(member)


def _public():
    """Names and the objects that have their docstrings: fields are described with their class."""
    for name in undertow.__all__:
        member = getattr(undertow, name)
        yield name, member
        if inspect.isclass(member) and not issubclass(member, Exception):
            for attribute, value in vars(member).items():
                if not attribute.startswith("_") and not inspect.ismemberdescriptor(value) and attribute != "T_destination":
                    yield f"{name}.{attribute}", value


def test_every_public_name_has_a_docstring():
    found = list(_public())
    assert len(found) > 100
    described = [(name, it) for name, it in found if callable(it) or isinstance(it, property)]
    assert [name for name, member in described if not inspect.getdoc(member)] == []


# What most scripts call.
_MAIN = [
    *("DistributedDataParallel", "attach", "SyncConfig", "Outer", "ShardedOptimizer", "shard_optimizer", "hidden_matrices"),
    *("clip_grad_norm_", "average_gradients", "save_checkpoint", "load_checkpoint", "GradientBucketManager", "ExpertGroup"),
]


@pytest.mark.parametrize("name", _MAIN)
def test_a_main_name_has_an_example_that_python_can_read(name):
    text = inspect.getdoc(getattr(undertow, name))
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)(?:    .*\n|\n)+(?=\n|\Z)", text.partition("\nArgs:")[0] + "\n")
    blocks += map(textwrap.dedent, indented)
    assert blocks
    for block in blocks:
        ast.parse(block)


@pytest.mark.parametrize("cls", [undertow.SyncConfig, undertow.Outer])
def test_a_tool_tip_shows_every_setting_with_its_default(cls):
    shown = inspect.signature(cls).parameters
    assert {name: it.default for name, it in shown.items()} == {it.name: it.default for it in dataclasses.fields(cls)}


# Some formatters join or cut the lines of a docstring, and make a sentence of a command.
_FILES = [path for folder in ("src", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def _docstrings(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.deep
def test_no_docstring_cuts_a_command_in_two():
    cut = re.compile(r"\b[Rr]un with(\.|: *\S)|\brun\nwith|^(Torchrun|Python|Undertow) -|^--\w", re.MULTILINE)
    assert [f"{path.name}: {text[:80]}" for path in _FILES for text in _docstrings(path) if cut.search(text)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_says_how_to_run_it_in_one_line(path):
    text = next(_docstrings(path))
    assert re.search(rf"^    (?:torchrun|python) .*examples/{path.name}\b", text, re.MULTILINE)
