"""Parameters and buffers that a wrapper leaves alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.errors import text_of
from undertow.errors import ConfigError, WrongType
from undertow.runtime.model.ignore import names_to_ignore


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
MEANT: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "a parameter": (lambda _: ["encoder.2.weight"], ("encoder.2.weight",)),
    "a buffer": (lambda _: ["encoder.2.running_mean"], ("encoder.2.running_mean",)),
    "a submodule": (lambda _: ["encoder.2"], NORM),
    "submodules of submodules": (lambda _: ["encoder"], (*LINEAR, *NORM)),
    "a submodule without tensors": (lambda _: ["encoder.1"], ()),
    "a parameter itself": (lambda model: [model.embedding.weight], TIED),
    "a buffer itself": (lambda model: [model.table], ("head.table", "table")),
    "a module itself": (lambda model: [model.encoder[2]], NORM),
    "a module with two names": (lambda model: [model.again], LINEAR),
    # What is shared is ignored under all its names.
    "a tied weight": (lambda _: ["embedding.weight"], TIED),
    "its other name": (lambda _: ["head.weight"], TIED),
    "the module that has it": (lambda _: ["embedding"], TIED),
    "a buffer in two places": (lambda _: ["head.table"], ("head.table", "table")),
    "a parameter of a module with two names": (lambda _: ["again.bias"], ("again.bias", "encoder.0.bias")),
    "entries of all kinds, mixed and repeated": (
        lambda model: (entry for entry in ("table", model.encoder[2], model.table, "encoder.2.bias")),
        (*NORM, "head.table", "table"),
    ),
    "nothing": (lambda _: (), ()),
    "places that are still empty": (lambda _: ["nothing", "head.bias"], ("head.bias", "nothing")),
}


@pytest.mark.parametrize(("entries", "names"), MEANT.values(), ids=MEANT)
def test_what_is_ignored(entries: Callable[[Any], Any], names: tuple[str, ...]) -> None:
    model = Model()
    assert names_to_ignore(model, entries(model)) == names


def test_values_that_are_alike_are_not_mistaken_for_each_other() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    nn.init.zeros_(model[0].bias), nn.init.zeros_(model[1].bias)
    assert names_to_ignore(model, [model[1].bias]) == ("1.bias",)


TYPE = "ignore, for a model of type Model\n  "
KNOWN = "Use names of named_parameters(), named_buffers() or named_modules()."
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    # One thing instead of a sequence is told to be put into one.
    **{
        f"one {got}": (
            ignore,
            WrongType,
            f"ignore must be a sequence of names, modules and tensors, got {got}.\n  {TYPE}Write ignore={remedy}.",
        )
        for ignore, got, remedy in (
            ("head.weight", "'head.weight'", "('head.weight',)"),
            (nn.Sequential(nn.ReLU()), "Sequential", "(it,)"),
            (torch.zeros(2), "Tensor", "(it,)"),
            (None, "None", "(it,)"),
        )
    },
    "an entry of another type": (
        ["table", 3],
        WrongType,
        f'ignore takes names, modules, parameters and buffers, got 3.\n  {TYPE}Write ignore=("embedding.weight", model.head).',
    ),
    **{
        f"an unknown name: {name}": ([name], ConfigError, f"there is no {name!r} to ignore.\n  {TYPE}{remedy}")
        for name, remedy in (
            ("embeding.weight", "Did you mean 'embedding.weight'?"),
            ("module.encoder", "Did you mean 'encoder'?"),
            ("head.tables", "Did you mean 'head.table'?"),
            ("xyzzy", KNOWN),
            ("", KNOWN),
        )
    },
    **{
        f"not in the model: {what}": (
            [entry],
            ConfigError,
            f"{what} that is to be ignored is not inside the model.\n  {TYPE}"
            "Give modules, parameters and buffers of this very model, no copies, and not the whole of it.",
        )
        for entry, what in (
            (nn.Linear(3, 4), "a module of type Linear"),
            (nn.Parameter(torch.zeros(4, 3)), "a tensor of shape (4, 3)"),
        )
    },
}


@pytest.mark.parametrize(("ignore", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_ignored_is_refused(ignore: Any, error: type[Exception], text: str) -> None:
    assert text_of(error, lambda: names_to_ignore(Model(), ignore)) == text


def test_the_whole_model_cannot_be_ignored() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="is not inside the model"):
        names_to_ignore(model, [model])
