from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.errors import text_of
from undertow.errors import ConfigError, WrongType
from undertow.runtime.ignore import names_to_ignore


class Model(nn.Module):
    """A tied weight, a buffer in two places, a module under two names, and places that hold None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))
        self.again = self.encoder[0]
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(2))
        self.head.register_buffer("table", self.table)
        self.register_buffer("nothing", None)


NORM = tuple(f"encoder.2.{name}" for name in ("bias", "num_batches_tracked", "running_mean", "running_var", "weight"))
LINEAR = ("again.bias", "again.weight", "encoder.0.bias", "encoder.0.weight")


def refusal(error: type[Exception], ignore: Any) -> str:
    return text_of(error, lambda: names_to_ignore(Model(), ignore))


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("encoder.2.weight", ("encoder.2.weight",)),
        ("encoder.2.running_mean", ("encoder.2.running_mean",)),
        ("encoder.2", NORM),
        ("encoder", (*LINEAR, *NORM)),
        ("encoder.1", ()),
    ],
    ids=["a parameter", "a buffer", "a submodule", "submodules of submodules", "a submodule without tensors"],
)
def test_a_name_is_a_parameter_a_buffer_or_all_of_a_submodule(entry: str, names: tuple[str, ...]) -> None:
    assert names_to_ignore(Model(), [entry]) == names


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (lambda model: model.embedding.weight, "embedding.weight"),
        (lambda model: model.table, "table"),
        (lambda model: model.encoder[2], "encoder.2"),
        (lambda model: model.again, "again"),
    ],
    ids=["a parameter", "a buffer", "a module", "a module with two names"],
)
def test_a_thing_itself_means_what_its_name_does(entry: Any, name: str) -> None:
    model = Model()
    assert names_to_ignore(model, [entry(model)]) == names_to_ignore(model, [name]) != ()


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("embedding.weight", ("embedding.weight", "head.weight")),
        ("head.weight", ("embedding.weight", "head.weight")),
        ("embedding", ("embedding.weight", "head.weight")),
        ("head.table", ("head.table", "table")),
        ("again.bias", ("again.bias", "encoder.0.bias")),
    ],
)
def test_what_is_shared_is_ignored_under_all_its_names(entry: str, names: tuple[str, ...]) -> None:
    assert names_to_ignore(Model(), [entry]) == names


def test_entries_of_all_kinds_can_be_mixed_and_repeated() -> None:
    model = Model()
    ignore = (entry for entry in ("table", model.encoder[2], model.table, "encoder.2.bias"))
    assert names_to_ignore(model, ignore) == (*NORM, "head.table", "table")


def test_nothing_is_ignored_by_nothing() -> None:
    assert names_to_ignore(Model(), ()) == ()


def test_a_place_that_is_still_empty_can_be_ignored() -> None:
    assert names_to_ignore(Model(), ["nothing", "head.bias"]) == ("head.bias", "nothing")


def test_values_that_are_alike_are_not_mistaken_for_each_other() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    nn.init.zeros_(model[0].bias), nn.init.zeros_(model[1].bias)
    assert names_to_ignore(model, [model[1].bias]) == ("1.bias",)


@pytest.mark.parametrize(
    ("ignore", "got", "remedy"),
    [
        ("head.weight", "'head.weight'", "Write ignore=('head.weight',)."),
        (nn.Sequential(nn.ReLU()), "Sequential", "Write ignore=(it,)."),
        (torch.zeros(2), "Tensor", "Write ignore=(it,)."),
        (None, "None", "Write ignore=(it,)."),
    ],
)
def test_one_thing_in_place_of_a_sequence_is_told_to_be_put_into_one(ignore: Any, got: str, remedy: str) -> None:
    assert refusal(WrongType, ignore) == (
        f"ignore must be a sequence of names, modules and tensors, got {got}.\n  ignore, for a model of type Model\n  {remedy}"
    )


def test_an_entry_of_another_type_is_refused() -> None:
    assert refusal(WrongType, ["table", 3]) == (
        "ignore takes names, modules, parameters and buffers, got 3.\n  ignore, for a model of type Model\n"
        '  Write ignore=("embedding.weight", model.head).'
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("embeding.weight", "Did you mean 'embedding.weight'?"),
        ("module.encoder", "Did you mean 'encoder'?"),
        ("head.tables", "Did you mean 'head.table'?"),
        ("xyzzy", "Use names of named_parameters(), named_buffers() or named_modules()."),
        ("", "Use names of named_parameters(), named_buffers() or named_modules()."),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_may_be_meant(name: str, remedy: str) -> None:
    assert refusal(ConfigError, [name]) == f"there is no {name!r} to ignore.\n  ignore, for a model of type Model\n  {remedy}"


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (nn.Linear(3, 4), "a module of type Linear"),
        (nn.Parameter(torch.zeros(4, 3)), "a tensor of shape (4, 3)"),
    ],
)
def test_what_is_not_in_the_model_is_refused(entry: Any, what: str) -> None:
    assert refusal(ConfigError, [entry]) == (
        f"{what} that is to be ignored is not inside the model.\n  ignore, for a model of type Model\n"
        "  Give modules, parameters and buffers of this very model, no copies, and not the whole of it."
    )


def test_the_whole_model_cannot_be_ignored() -> None:
    model = Model()
    assert "is not inside the model" in text_of(ConfigError, lambda: names_to_ignore(model, [model]))
