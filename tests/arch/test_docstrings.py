"""Public docstrings have one format: the section `Args` describes every argument."""

import inspect
import re

import pytest

import undertow

# Called by the library, by torch or by frameworks, not by users.
_NOT_FOR_USERS = {
    "GradientSync",  # `attach` makes it
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
    return {it.name for it in named if it.name != "self"} - {"settings"}  # of SyncConfig: its fields, as the class lists them


@pytest.mark.parametrize(("name", "member"), [pytest.param(*it, id=it[0]) for it in _documented()])
def test_the_docstring_describes_every_argument(name, member):
    described = re.findall(r"^ {4}(\w+): ", (inspect.getdoc(member) or "").partition("Args:\n")[2], re.MULTILINE)
    if name not in _NOT_FOR_USERS:
        assert set(described) >= _arguments(member)
