"""The tree of exceptions, and their texts."""

from __future__ import annotations

import inspect
import pickle

import pytest

from undertow import errors
from undertow.errors import ConfigError, UndertowError

# The bases of each: the built-in that it resembles catches it too.
TREE = {
    "CheckpointError": (UndertowError,),
    "ConfigError": (UndertowError, ValueError),
    "Desync": (UndertowError,),
    "NonFiniteGradient": (UndertowError,),
    "PeerFailed": (UndertowError,),
    "PhaseError": (UndertowError,),
    "PlanMismatch": (UndertowError,),
    "RankLost": (UndertowError,),
    "ReplicaMismatch": (UndertowError,),
    "ShardedGradientError": (UndertowError,),
    "StallTimeout": (UndertowError, TimeoutError),
    "UndertowError": (RuntimeError,),
    "WrongType": (ConfigError, TypeError),
}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"where": "rank 2, step 7", "remedy": "Mend it."}, "it broke.\n  rank 2, step 7\n  Mend it."),
        ({"remedy": "Mend it."}, "it broke.\n  Mend it."),
    ],
)
def test_text_has_what_where_and_remedy_on_a_line_each_as_far_as_they_are_given(parts: dict[str, str], text: str) -> None:
    assert str(UndertowError("it broke.", **parts)) == text


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_its_bases_is_drawn_and_can_be_pickled(name: str) -> None:
    kind: type[UndertowError] = getattr(errors, name)
    assert kind.__bases__ == TREE[name]
    assert f" {name} " in errors.__doc__.replace("\n", " ")
    error = kind("it broke.", where="rank 2", remedy="Mend it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))


def test_exports_are_the_tree() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert classes == set(errors.__all__) == set(TREE)
