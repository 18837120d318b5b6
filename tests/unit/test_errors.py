from __future__ import annotations

import inspect
import pickle

import pytest

from undertow import errors
from undertow.errors import (
    CheckpointError,
    ConfigError,
    Desync,
    NonFiniteGradient,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    RankLost,
    ReplicaMismatch,
    ShardedGradientError,
    StallTimeout,
    UndertowError,
    WrongType,
)

TREE = [
    CheckpointError,
    ConfigError,
    Desync,
    NonFiniteGradient,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    RankLost,
    ReplicaMismatch,
    ShardedGradientError,
    StallTimeout,
    WrongType,
]


def test_text_has_what_where_and_remedy_on_a_line_each() -> None:
    error = UndertowError("it broke.", where="rank 2, step 7", remedy="Mend it.")
    assert str(error) == "it broke.\n  rank 2, step 7\n  Mend it."


def test_text_leaves_out_parts_that_are_not_given() -> None:
    assert str(UndertowError("it broke.", remedy="Mend it.")) == "it broke.\n  Mend it."


@pytest.mark.parametrize("kind", TREE)
def test_pickling_keeps_type_and_text(kind: type[UndertowError]) -> None:
    error = kind("it broke.", where="rank 2", remedy="Mend it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))


def test_exports_are_the_tree() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert classes == set(errors.__all__) == {kind.__name__ for kind in TREE} | {"UndertowError"}


@pytest.mark.parametrize("name", errors.__all__)
def test_docstring_draws_every_error(name: str) -> None:
    assert f" {name} " in errors.__doc__.replace("\n", " ")


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (UndertowError, (RuntimeError,)),
        (ConfigError, (UndertowError, ValueError)),
        (WrongType, (ConfigError, TypeError)),
        (PhaseError, (UndertowError,)),
        (CheckpointError, (UndertowError,)),
        (NonFiniteGradient, (UndertowError,)),
        (Desync, (UndertowError,)),
        (PeerFailed, (UndertowError,)),
        (PlanMismatch, (UndertowError,)),
        (ShardedGradientError, (UndertowError,)),
    ],
)
def test_errors_can_be_caught_as_the_builtin_they_resemble(kind: type[UndertowError], bases: tuple[type, ...]) -> None:
    assert kind.__bases__ == bases
