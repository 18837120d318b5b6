"""The parameters, buffers and modules that are registered in a module."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from support.models import CASES, scripted
from undertow.torch_private import tables


def with_gaps() -> nn.Module:
    """Has a module, a parameter and a buffer that are None, a module twice, and a tensor twice."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.twice, model.nothing = model[0], None
    model.again = nn.Parameter(torch.ones(2))
    model.register_parameter("none", None)
    model[1].again = model.again
    model.register_buffer("count", torch.zeros(()))
    model[1].register_buffer("same", model.count)
    model[1].register_buffer("empty", None)
    return model


MODELS = {
    **{name: case.make for name, case in CASES.items()},
    "with gaps": with_gaps,
    "scripted": lambda: scripted(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_order_are_torchs(name: str) -> None:
    model = MODELS[name]()
    for ours, torchs in (
        (tables.named_parameters(model), model.named_parameters()),
        (tables.named_buffers(model), model.named_buffers()),
        (tables.named_modules(model), model.named_modules()),
        (tables.named_modules(model, is_unique=False), model.named_modules(remove_duplicate=False)),
    ):
        assert [(name, id(each)) for name, each in ours] == [(name, id(each)) for name, each in torchs]


class Silent(nn.Linear):
    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def named_modules(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        return iter(())

    named_buffers = named_parameters  # type: ignore[assignment]


def test_a_class_may_list_what_it_likes() -> None:
    model = nn.Sequential(Silent(2, 2))
    model[0].register_buffer("mask", torch.ones(2))
    assert [name for name, _ in tables.named_parameters(model)] == ["0.weight", "0.bias"]
    assert [name for name, _ in tables.named_buffers(model)] == ["0.mask"]
    assert [name for name, _ in tables.named_modules(model)] == ["", "0"]


def test_the_table_of_a_script_has_a_dicts_methods() -> None:
    table = tables.own_buffers(scripted(nn.BatchNorm1d(2)))
    new = torch.ones(2)
    table["running_mean"] = new
    assert (list(table), table.get("running_mean") is new, table.get("other")) == (
        ["running_mean", "running_var", "num_batches_tracked"],
        True,
        None,
    )


def test_a_module_has_tables_of_its_own_members() -> None:
    model = with_gaps()
    assert (list(tables.own_parameters(model)), list(tables.own_buffers(model))) == (["again", "none"], ["count"])
    assert list(tables.own_children(model))[:3] == ["0", "1", "twice"]
    assert [(name, tensor is None) for name, tensor in tables.own_tensors(model)] == [
        ("again", False),
        ("none", True),
        ("count", False),
    ]
    norm = nn.BatchNorm1d(2)
    assert [name for name, _ in tables.own_tensors(scripted(norm))] == [name for name, _ in tables.own_tensors(norm)]


def test_a_deep_copy_has_tables_of_its_own() -> None:
    model = with_gaps()
    copied: dict[str, Tensor] = dict(tables.named_parameters(copy.deepcopy(model)))
    assert all(copied[name] is not param for name, param in tables.named_parameters(model))
