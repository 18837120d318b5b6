"""Parameters and buffers that a wrapper leaves alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.errors import text_of
from undertow.errors import ConfigError, WrongType
from undertow.sync.ignore import names_to_ignore


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
TIED = ("embedding.weight", "head.weight")
LINEAR = ("again.bias", "again.weight", "encoder.0.bias", "encoder.0.weight")


# Entries, made of a model, and the names that they mean.


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        pytest.param(lambda _: ["encoder.2.weight"], ("encoder.2.weight",), id="a parameter"),
        pytest.param(lambda _: ["encoder.2.running_mean"], ("encoder.2.running_mean",), id="a buffer"),
        pytest.param(lambda _: ["encoder"], (*LINEAR, *NORM), id="submodules of submodules"),
        pytest.param(lambda model: [model.embedding.weight], TIED, id="a parameter itself"),
        pytest.param(lambda model: [model.table], ("head.table", "table"), id="a buffer itself"),
        pytest.param(lambda model: [model.again], LINEAR, id="a module with two names"),
        # What is shared is ignored under all its names.
        pytest.param(lambda _: ["embedding.weight"], TIED, id="a tied weight"),
        pytest.param(lambda _: ["head.table"], ("head.table", "table"), id="a buffer in two places"),
        pytest.param(
            lambda model: (entry for entry in ("table", model.encoder[2], model.table, "encoder.2.bias")),
            (*NORM, "head.table", "table"),
            id="entries of all kinds, mixed and repeated",
        ),
        pytest.param(lambda _: ["nothing", "head.bias"], ("head.bias", "nothing"), id="places that are still empty"),
    ],
)
def test_what_is_ignored_has_all_its_names(entries: Callable[[Any], Any], names: tuple[str, ...]) -> None:
    model = Model()
    assert names_to_ignore(model, entries(model)) == names


def test_values_that_are_alike_are_not_mistaken_for_each_other() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    nn.init.zeros_(model[0].bias), nn.init.zeros_(model[1].bias)
    assert names_to_ignore(model, [model[1].bias]) == ("1.bias",)


TYPE = "ignore, for a model of type Model\n  "
KNOWN = "Use names of named_parameters(), named_buffers() or named_modules()."


@pytest.mark.parametrize(
    ("ignore", "error", "text"),
    [
        # One thing instead of a sequence is told to be put into one.
        *(
            pytest.param(
                ignore,
                WrongType,
                f"ignore must be a sequence of names, modules and tensors, got {got}.\n  {TYPE}Write ignore={remedy}.",
                id=f"one {got}",
            )
            for ignore, got, remedy in (
                ("head.weight", "'head.weight'", "('head.weight',)"),
                (nn.Sequential(nn.ReLU()), "Sequential", "(it,)"),
                (torch.zeros(2), "Tensor", "(it,)"),
                (None, "None", "(it,)"),
            )
        ),
        pytest.param(
            ["table", 3],
            WrongType,
            "ignore takes names, modules, parameters and buffers, got 3.\n  "
            f'{TYPE}Write ignore=("embedding.weight", model.head).',
            id="an entry of another type",
        ),
        *(
            pytest.param(
                [name],
                ConfigError,
                f"{name!r} does not exist and cannot be ignored.\n  {TYPE}{remedy}",
                id=f"an unknown name: {name}",
            )
            for name, remedy in (
                ("embeding.weight", "Did you mean 'embedding.weight'?"),
                ("module.encoder", "Did you mean 'encoder'?"),
                ("head.tables", "Did you mean 'head.table'?"),
                ("xyzzy", KNOWN),
                ("", KNOWN),
            )
        ),
        *(
            pytest.param(
                [entry],
                ConfigError,
                f"{what} that is to be ignored is not inside the model.\n  {TYPE}"
                "Give modules, parameters and buffers of this model itself: no copies, and not the whole model.",
                id=f"not in the model: {what}",
            )
            for entry, what in (
                (nn.Linear(3, 4), "a module of type Linear"),
                (nn.Parameter(torch.zeros(4, 3)), "a tensor of shape (4, 3)"),
            )
        ),
    ],
)
def test_what_cannot_be_ignored_is_refused(ignore: Any, error: type[Exception], text: str) -> None:
    assert text_of(error, lambda: names_to_ignore(Model(), ignore)) == text
